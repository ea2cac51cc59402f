"""Tiles of prompt rows against their whole context, with keys and values of every head made once.

The rows of a chunk share the expanded context: it grows from tile to tile, and the selection is
a mask. Blocks of keys go through the running softmax of FlashAttention (Dao et al. 2022).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.pool import PagedPool
from pallas_kernels.sparse_mla.queries import Queries
from pallas_kernels.sparse_mla.up_projections import UpProjections

# Keys expanded and attended to per turn. 64 to 256 take the same time within the machine's noise.
BLOCK_KEYS = 128
_MASKED = -1e30


class Context(NamedTuple):
    """A request's first ``known`` keys and values, expanded; S is the most there can be."""

    keys: Float[Array, "H S A_plus_B"]
    values: Float[Array, "H S U"]
    known: Int[Array, ""]


class Tile(NamedTuple):
    """One tile of ``Tiles``."""

    positions: Int[Array, " R"]
    page_table: Int[Array, " W"]
    chunk_first: Int[Array, ""]
    chunk_last: Int[Array, ""]


def empty_context(up: UpProjections, queries: Queries, most_keys: int) -> Context:
    """Room for ``most_keys`` keys; what stands there before ``extend`` is never read."""
    heads, nope, _ = up.key.shape
    rope = queries.rope.shape[-1]
    # 0, but made from the layer's data: XLA makes constants of all layers when a step starts and
    # keeps each until it is used, so that no two layers could share the memory.
    filling = jnp.minimum(jnp.abs(queries.rope[0, 0, 0]), 0.0)
    return Context(
        keys=jnp.full((heads, most_keys, nope + rope), filling),
        values=jnp.full((heads, most_keys, up.value.shape[-1]), filling),
        known=jnp.int32(0),
    )


def extend(context: Context, tile: Tile, pool: PagedPool, up: UpProjections) -> Context:
    """Expand what the tile sees and the context lacks; a chunk's first tile starts anew.

    Whole blocks, up to the chunk's last row: what lies beyond may be anything, so it is cleared.
    """
    block = block_keys(pool.page_size)
    latent_width = up.key.shape[-1]

    def expand(index: int | Int[Array, ""], state: tuple[Array, Array]) -> tuple[Array, Array]:
        keys, values = state
        pages = jax.lax.dynamic_slice_in_dim(
            tile.page_table, index * (block // pool.page_size), block // pool.page_size
        )
        entries = pool.read_pages(pages).reshape(block, -1)
        number = index * block + jnp.arange(block, dtype=jnp.int32)
        entries = jnp.where((number <= tile.chunk_last)[:, None], entries, 0.0)
        latent, rope = entries[:, :latent_width], entries[:, latent_width:]
        nope = _for_every_head(latent, up.key.transpose(0, 2, 1))
        shared = jnp.broadcast_to(rope, (nope.shape[0], *rope.shape))
        key = jnp.concatenate([nope, shared], axis=-1)
        value = _for_every_head(latent, up.value)
        return (
            jax.lax.dynamic_update_slice_in_dim(keys, key, index * block, axis=1),
            jax.lax.dynamic_update_slice_in_dim(values, value, index * block, axis=1),
        )

    fresh = tile.positions[0] == tile.chunk_first
    known = jnp.where(fresh, 0, context.known)
    last = jnp.max(tile.positions)
    keys, values = jax.lax.fori_loop(
        known // block, last // block + 1, expand, (context.keys, context.values)
    )
    return Context(keys, values, last + 1)


def attend(
    queries: Queries, seen: Bool[Array, "R S"], context: Context, *, block: int, scale: float
) -> Float[Array, "R H U"]:
    """Attend from R rows to the keys that each may see; a row that sees nothing yields zeros.

    Args:
        queries: of the rows.
        seen: which keys of the context are meant.
        context: expanded as far as any row sees.
        block: keys per turn.
        scale: softmax scale.
    """
    joined = jnp.concatenate([queries.nope.astype(jnp.float32), queries.rope], axis=-1)
    query = joined.transpose(1, 0, 2) * scale
    heads, rows, _ = query.shape

    def step(
        index: int | Int[Array, ""], state: tuple[Array, Array, Array]
    ) -> tuple[Array, Array, Array]:
        top, total, mixed = state
        keys, values = (
            jax.lax.dynamic_slice_in_dim(array, index * block, block, axis=1)
            for array in (context.keys, context.values)
        )
        live = jax.lax.dynamic_slice_in_dim(seen, index * block, block, axis=1)
        scores = jnp.where(live, jnp.einsum("hra,hka->hrk", query, keys), _MASKED)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights = jnp.where(live, jnp.exp(scores - new_top[..., None]), 0.0)
        fade = jnp.exp(top - new_top)
        mixed = mixed * fade[..., None] + jnp.einsum("hrk,hku->hru", weights, values)
        return new_top, total * fade + jnp.sum(weights, axis=-1), mixed

    start = (
        jnp.full((heads, rows), _MASKED),
        jnp.zeros((heads, rows)),
        jnp.zeros((heads, rows, context.values.shape[-1])),
    )
    turns = (context.known + block - 1) // block
    _, total, mixed = jax.lax.fori_loop(0, turns, step, start)
    return (mixed / jnp.where(total > 0, total, 1.0)[..., None]).transpose(1, 0, 2)


def block_keys(page_size: int) -> int:
    """Keys per turn: whole pages, about BLOCK_KEYS."""
    return max(1, BLOCK_KEYS // page_size) * page_size


def _for_every_head(
    x: Float[Array, "k C"], weights: Float[Array, "H C outer"]
) -> Float[Array, "H k outer"]:
    """One matmul for all heads."""
    heads, width, outer = weights.shape
    flat = weights.transpose(1, 0, 2).reshape(width, heads * outer)
    product = x @ flat.astype(jnp.float32)
    return product.reshape(-1, heads, outer).transpose(1, 0, 2)
