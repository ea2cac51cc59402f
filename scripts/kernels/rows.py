"""Prompt rows at the end of their requests' contexts."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from pallas_kernels.tiles import Tiles
from scripts.kernels.pools import PAGE_SIZE


def last_rows(rows: int, table: Int[np.ndarray, "requests pages"], tile_rows: int) -> Tiles:
    """The last ``rows`` rows of every request, request after request, in tiles of ``tile_rows``.

    Raises:
        ValueError: they are no whole tiles.
    """
    if rows % tile_rows:
        raise ValueError(
            f"a prompt's last {rows} rows are no whole tiles. Take a multiple of {tile_rows}."
        )
    requests, pages = table.shape
    tiles, context = rows // tile_rows, pages * PAGE_SIZE
    positions = np.tile(np.arange(context - rows, context), requests)
    return Tiles(
        rows=jnp.arange(requests * rows, dtype=jnp.int32).reshape(-1, tile_rows),
        positions=jnp.asarray(positions.reshape(-1, tile_rows), jnp.int32),
        page_table=jnp.repeat(jnp.asarray(table, jnp.int32), tiles, axis=0),
        chunk_first=jnp.full(requests * tiles, context - rows, jnp.int32),
        chunk_last=jnp.full(requests * tiles, context - 1, jnp.int32),
    )
