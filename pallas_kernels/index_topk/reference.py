"""Slow, obvious form of index_topk: the whole score matrix, then one stable sort."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.pool import PagedPool
from pallas_kernels.tiles import Tiles


def index_topk_decode(
    queries: Float[Array, "T R M I"],
    weights: Float[Array, "T R M"],
    positions: Int[Array, "T R"],
    page_table: Int[Array, "T W"],
    keys: PagedPool,
    *,
    topk: int,
) -> tuple[Int[Array, "T R K"], Int[Array, "T R"]]:
    """Score all S = W * page_size positions of every row and sort them (see ``api``)."""
    tiles, pages = page_table.shape
    context = keys.read_pages(page_table).reshape(tiles, pages * keys.page_size, -1)
    heads = jnp.einsum("trmi,tsi->trms", queries, context)
    scores = jnp.einsum("trms,trm->trs", jnp.maximum(heads, 0.0), weights)
    causal = jnp.arange(context.shape[1]) <= positions[..., None]
    # where, not a product: masked entries may be NaN. -0.0 must tie with 0.0.
    ranked = jnp.where(causal, jnp.where(scores == 0.0, 0.0, scores), -jnp.inf)
    order = jnp.argsort(-ranked, axis=-1, stable=True)
    count = jnp.minimum(positions + 1, topk)
    return order[..., :topk].astype(jnp.int32), count.astype(jnp.int32)


def index_topk_prefill(
    queries: Float[Array, "N M I"],
    weights: Float[Array, "N M"],
    tiles: Tiles,
    keys: PagedPool,
    *,
    topk: int,
) -> tuple[Int[Array, "N K"], Int[Array, " N"]]:
    """The same for all tiles at once (see ``api``); rows that no tile names get count 0."""
    rows = queries.shape[0]
    places = jnp.minimum(tiles.rows, rows - 1)
    found, count = index_topk_decode(
        queries[places], weights[places], tiles.positions, tiles.page_table, keys, topk=topk
    )
    return (
        jnp.zeros((rows, found.shape[-1]), jnp.int32).at[tiles.rows].set(found, mode="drop"),
        jnp.zeros((rows,), jnp.int32).at[tiles.rows].set(count, mode="drop"),
    )
