"""Rows to tiles and back, for implementations that select for all tiles at once."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.tiles import Tiles


def select_tiled(
    select: Callable[..., tuple[Int[Array, "T R K"], Int[Array, "T R"]]],
    queries: Float[Array, "N M I"],
    weights: Float[Array, "N M"],
    tiles: Tiles,
) -> tuple[Int[Array, "N K"], Int[Array, " N"]]:
    """Gather the rows of every tile, select, scatter; rows that no tile names get count 0.

    Args:
        select: takes queries ``[T, R, M, I]``, weights ``[T, R, M]``, positions ``[T, R]`` and page
            tables ``[T, W]``.
        queries: of all rows.
        weights: of all rows.
        tiles: the rows cut into tiles.
    """
    rows = queries.shape[0]
    places = jnp.minimum(tiles.rows, rows - 1)
    found, count = select(queries[places], weights[places], tiles.positions, tiles.page_table)
    return (
        jnp.zeros((rows, found.shape[-1]), jnp.int32).at[tiles.rows].set(found, mode="drop"),
        jnp.zeros((rows,), jnp.int32).at[tiles.rows].set(count, mode="drop"),
    )
