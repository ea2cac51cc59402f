"""sparse_mla for the CPU.

Decode rows, one at a time: K x 576 values are in memory, not N x K x 576. A row is two plain
matmuls over one gathered block that stays in the core's cache. Measured on two CPU cores (512 rows,
8 heads, K = 256): blocks of 8 rows as batched einsums took 6 times as long, because masking the
block and slicing its latent part each copy it.

Prompt rows, one tile at a time: expanded where that is cheaper (``crossover``), else like decode
rows. Measured likewise for a chunk of 512 rows: expanded 16 against 77 ms at the start of a prompt,
38 against 100 ms after 1024 tokens.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.pool import PagedPool
from pallas_kernels.sparse_mla import expanded
from pallas_kernels.sparse_mla.crossover import Sizes, expanded_pays, most_expanded_keys
from pallas_kernels.sparse_mla.expanded import Tile, block_keys, empty_context, extend
from pallas_kernels.sparse_mla.queries import Queries
from pallas_kernels.sparse_mla.selection import Selection
from pallas_kernels.sparse_mla.up_projections import UpProjections
from pallas_kernels.tiles import Tiles


def sparse_mla_decode(
    q_latent: Float[Array, "N H C"],
    q_rope: Float[Array, "N H B"],
    entries: Int[Array, "N K"],
    count: Int[Array, " N"],
    pool: PagedPool,
    *,
    scale: float,
) -> Float[Array, "N H C"]:
    """Map over rows (see ``api``)."""
    latent_width = q_latent.shape[-1]

    def attend(latent: Array, rope: Array, entry: Array, valid_count: Array) -> Float[Array, "H C"]:
        # Per row, like the scale below: for all rows at once they would be two more arrays of the
        # queries' size, and a step's temporaries beyond 32 MB are mapped anew by the allocator.
        query = jnp.concatenate([latent, rope], axis=-1)
        valid = jnp.arange(entry.shape[0]) < valid_count
        # Unused places read the row's own first entry: whatever stands elsewhere, NaN included,
        # is never touched, and the block needs no mask.
        gathered = pool.read_entries(jnp.where(valid, entry, entry[:1]))
        # [K, H], so that the small operand of each matmul is the one that gets transposed.
        scores = jnp.where(valid[:, None], (gathered @ query.T) * scale, -1e30)
        weights = jnp.exp(scores - jnp.max(scores, axis=0)) * valid[:, None]
        total = jnp.sum(weights, axis=0)
        # All 576 columns, then the latent ones: slicing the block first would copy it.
        return ((weights / total).T @ gathered)[:, :latent_width]

    def attend_row(operands: tuple[Array, Array, Array, Array]) -> Float[Array, "H C"]:
        latent, _, _, valid_count = operands
        nothing = jnp.zeros(latent.shape, jnp.float32)
        # A pad row costs nothing, and what it would read may be anything.
        return jax.lax.cond(valid_count > 0, attend, lambda *_: nothing, *operands)

    return jax.lax.map(attend_row, (q_latent, q_rope, entries, count))


def sparse_mla_prefill(
    queries: Queries,
    selection: Selection,
    tiles: Tiles,
    pool: PagedPool,
    up: UpProjections,
    *,
    scale: float,
) -> Float[Array, "N H U"]:
    """Expanded tiles first, then the absorbed ones (see ``api``).

    Two loops, not one with a condition: a condition would copy the expanded context through.
    """
    rows, heads, nope = queries.nope.shape
    topk = selection.entries.shape[1]
    sizes = Sizes(nope, queries.rope.shape[-1], up.key.shape[-1], up.value.shape[-1], topk)
    block = block_keys(pool.page_size)
    table_keys = tiles.page_table.shape[1] // (block // pool.page_size) * block
    most = min(table_keys, most_expanded_keys(sizes, heads, rows, block))
    used = tiles.positions[:, 0] >= 0
    is_expanded = used & (tiles.chunk_last < most)
    is_expanded &= expanded_pays(sizes, tiles.chunk_first, tiles.chunk_last)
    out = jnp.zeros((rows, heads, up.value.shape[-1]), up.value.dtype)

    def of_tile(tree: Any, places: Int[Array, " R"]) -> Any:
        return jax.tree.map(lambda array: array[jnp.minimum(places, rows - 1)], tree)

    def expanded_tile(tile: Int[Array, ""], state: tuple) -> tuple:
        out, context = state
        places = tiles.rows[tile]
        own = Tile(*(array[tile] for array in tiles[1:]))
        context = extend(context, own, pool, up)
        seen = _seen(of_tile(selection, places), own.positions, most)
        mixed = expanded.attend(of_tile(queries, places), seen, context, block=block, scale=scale)
        return out.at[places].set(mixed.astype(out.dtype), mode="drop"), context

    def absorbed_tile(tile: Int[Array, ""], out: Array) -> Array:
        places = tiles.rows[tile]
        chosen, own = of_tile(selection, places), of_tile(queries, places)
        mixed = sparse_mla_decode(
            up.absorb(own.nope),
            own.rope,
            chosen.entries,
            jnp.where(places < rows, chosen.count, 0),
            pool,
            scale=scale,
        )
        return out.at[places].set(up.expand(mixed), mode="drop")

    if most:
        context = empty_context(up, queries.rope.shape[-1], most)
        out, _ = _for_each(is_expanded, expanded_tile, (out, context))
    return _for_each(used & ~is_expanded, absorbed_tile, out)


def _for_each(flags: Bool[Array, " T"], body: Callable[[Array, Any], Any], state: Any) -> Any:
    """Run ``body`` for the tiles that have the flag, in order; the others cost nothing."""
    (chosen,) = jnp.nonzero(flags, size=flags.shape[0], fill_value=0)

    def turn(index: int | Int[Array, ""], state: Any) -> Any:
        return body(chosen[index], state)

    return jax.lax.fori_loop(0, jnp.sum(flags), turn, state)


def _seen(selection: Selection, positions: Int[Array, " R"], most_keys: int) -> Bool[Array, "R S"]:
    """The selection of R rows as a mask over the context; pads see nothing."""
    rows, topk = selection.positions.shape
    meant = (jnp.arange(topk) < selection.count[:, None]) & (positions >= 0)[:, None]
    key = jnp.where(meant, selection.positions, most_keys)
    nothing = jnp.zeros((rows, most_keys), bool)
    return nothing.at[jnp.arange(rows)[:, None], key].set(True, mode="drop")
