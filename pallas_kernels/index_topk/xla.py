"""index_topk for the CPU: key blocks in a loop of dynamic length, a running top-k beside it.

Never more than one block of scores per row in memory, and the cost follows the real context, not
the page table's width.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Keys scored between two merges of the running top-k: below 512 the merges dominate on CPU.
MIN_BLOCK_KEYS = 512


def index_topk_decode(
    queries: Float[Array, "G Q M I"],
    weights: Float[Array, "G Q M"],
    positions: Int[Array, "G Q"],
    page_table: Int[Array, "G W"],
    read: Callable[[Array], Array],
    *,
    page_size: int,
    topk: int,
) -> tuple[Int[Array, "G Q K"], Int[Array, "G Q"]]:
    """All groups advance together through their contexts (see ``api``)."""
    everything = jnp.broadcast_to(jnp.arange(topk, dtype=jnp.int32), (*positions.shape, topk))
    count = jnp.minimum(positions + 1, topk).astype(jnp.int32)

    def search() -> Int[Array, "G Q K"]:
        found = _running_topk(queries, weights, positions, page_table, read, page_size, topk)
        # A row that may see at most K keys keeps all of them in their order: one canonical form.
        return jnp.where((positions < topk)[..., None], everything, found)

    return jax.lax.cond(jnp.max(positions) >= topk, search, lambda: everything), count


def index_topk_prefill(
    queries: Float[Array, "T R M I"],
    weights: Float[Array, "T R M"],
    positions: Int[Array, "T R"],
    page_table: Int[Array, "T W"],
    read: Callable[[Array], Array],
    *,
    page_size: int,
    topk: int,
) -> tuple[Int[Array, "T R K"], Int[Array, "T R"]]:
    """Tiles one by one, each through its own context (see ``api``)."""

    def tile(operands: tuple[Array, Array, Array, Array]) -> tuple[Array, Array]:
        query, weight, position, table = (operand[None] for operand in operands)
        selected, count = index_topk_decode(
            query, weight, position, table, read, page_size=page_size, topk=topk
        )
        return selected[0], count[0]

    return jax.lax.map(tile, (queries, weights, positions, page_table))


def _running_topk(
    queries: Float[Array, "T R M I"],
    weights: Float[Array, "T R M"],
    positions: Int[Array, "T R"],
    page_table: Int[Array, "T W"],
    read: Callable[[Array], Array],
    page_size: int,
    topk: int,
) -> Int[Array, "T R K"]:
    """Merge block after block into the K best; earlier positions win ties by standing first."""
    tiles, rows, heads, width = queries.shape
    block_pages = min(max(1, max(MIN_BLOCK_KEYS, topk) // page_size), page_table.shape[1])
    block = block_pages * page_size
    spare = -page_table.shape[1] % block_pages
    table = jnp.pad(page_table, ((0, 0), (0, spare)))  # page 0: zeros, and never causal
    flat_queries = queries.reshape(tiles, rows * heads, width)
    blocks = jnp.max(positions) // block + 1

    def merge(index: Array, best: tuple[Array, Array]) -> tuple[Array, Array]:
        pages = jax.lax.dynamic_slice_in_dim(table, index * block_pages, block_pages, axis=1)
        context = read(pages).reshape(tiles, block, width)
        dots = jnp.einsum("tri,tsi->trs", flat_queries, context)
        per_head = jnp.maximum(dots, 0.0).reshape(tiles, rows, heads, block)
        scores = jnp.einsum("trms,trm->trs", per_head, weights)
        where = index * block + jnp.arange(block, dtype=jnp.int32)
        visible = where <= positions[..., None]
        # where, not a product: masked keys may be NaN. -0.0 must tie with 0.0.
        ranked = jnp.where(visible, jnp.where(scores == 0.0, 0.0, scores), -jnp.inf)
        values = jnp.concatenate([best[0], ranked], axis=-1)
        places = jnp.concatenate([best[1], jnp.broadcast_to(where, ranked.shape)], axis=-1)
        top, order = jax.lax.top_k(values, topk)
        return top, jnp.take_along_axis(places, order, axis=-1)

    shape = (tiles, rows, topk)
    empty = jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.int32)
    return jax.lax.fori_loop(0, blocks, merge, empty)[1]
