"""Prefill rows cut into tiles: the unit in which prompts select keys and attend."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class Tiles(NamedTuple):
    """R rows each, consecutive rows of one chunk; tiles in use come first, chunk after chunk."""

    rows: Int[Array, "T R"]  # row of each place; a pad place names a row past the end
    positions: Int[Array, "T R"]  # -1 for a pad place
    page_table: Int[Array, "T W"]
    chunk_first: Int[Array, " T"]  # position of the first row of the tile's chunk
    chunk_last: Int[Array, " T"]  # position of its last row

    def names(self, rows: int) -> Bool[Array, " N"]:
        """Which of ``rows`` rows stand in a tile."""
        return jnp.zeros(rows, bool).at[self.rows].set(True, mode="drop")
