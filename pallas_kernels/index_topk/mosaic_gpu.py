"""index_topk for Hopper: two kernels, scores into a bounded buffer and an exact top-k of its rows.

Decode and prefill are the same program. Rows are cut into tiles that fill one matrix instruction;
blocks of tiles take turns at one buffer of SCORES scores, each block waiting for the one before, in
straight-line code: a loop of XLA would leave the step's command buffer.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.index_topk import mosaic_gpu_scores as tile_scores
from pallas_kernels.index_topk import tile_shape
from pallas_kernels.mosaic import largest
from pallas_kernels.pool import PagedPool
from pallas_kernels.tiles import Tiles

# Scores in memory at a time: 256 rows of 131072 positions, 128 MiB.
SCORES = 1 << 25


class _Tiles(NamedTuple):
    """Rows as the kernels take them: r rows of one request, m heads in whole eights."""

    queries: Float[Array, "U r m I"]
    weights: Float[Array, "U r m"]
    positions: Int[Array, "U r"]
    tables: Int[Array, " U"]  # row of the page table


def index_topk_decode(
    queries: Float[Array, "G Q M I"],
    weights: Float[Array, "G Q M"],
    positions: Int[Array, "G Q"],
    page_table: Int[Array, "G W"],
    keys: PagedPool,
    *,
    topk: int,
    cut: tile_shape.Cut = tile_shape.BY_RULE,
    interpret: bool = False,
) -> tuple[Int[Array, "G Q K"], Int[Array, "G Q"]]:
    """Select for decode groups; the Q rows of a group share one read of the keys (see ``api``).

    Queries are rounded to bfloat16, to two bfloat16 terms where keys are float32. fp8 keys are
    converted exactly.

    Args:
        queries: per row and index head.
        weights: per row and index head.
        positions: -1 for a pad row.
        page_table: pages of each group.
        keys: bfloat16, fp8_planar or float32; pages of a multiple of 64 keys.
        topk: K.
        cut: how the scoring kernel cuts its work.
        interpret: run the kernels in Mosaic's interpreter, on the CPU.

    Raises:
        ValueError: the kernels do not take such operands.
    """
    count = jnp.clip(positions + 1, 0, topk).astype(jnp.int32)
    length = page_table.shape[1] * keys.page_size
    if topk >= length:
        return jnp.broadcast_to(_everything(topk, length), (*positions.shape, topk)), count
    if topk > largest.MAX_CHUNK // 2:
        raise ValueError(
            f"index_topk on a GPU selects at most {largest.MAX_CHUNK // 2} positions, not {topk}."
        )
    _, rows, heads, _ = queries.shape
    few = tile_shape.rows_per_tile(rows, heads, keys, cut)
    tiles = _cut(queries, weights, positions, few)
    chosen = _search(tiles, page_table, keys, topk=topk, splits=cut.splits, interpret=interpret)
    per_request = chosen.reshape(positions.shape[0], -1, topk)
    return per_request[:, : positions.shape[1]], count


def index_topk_prefill(
    queries: Float[Array, "N M I"],
    weights: Float[Array, "N M"],
    tiles: Tiles,
    keys: PagedPool,
    *,
    topk: int,
    cut: tile_shape.Cut = tile_shape.BY_RULE,
    interpret: bool = False,
) -> tuple[Int[Array, "N K"], Int[Array, " N"]]:
    """Select for prompt rows; arguments as in ``api``, the rest as ``index_topk_decode``.

    Block of tiles after block, so that no more rows are copied into tiles than are scored at once.
    """
    rows, length = queries.shape[0], tiles.page_table.shape[1] * keys.page_size
    number, per_tile = tiles.rows.shape
    block = max(1, SCORES // (length * per_tile))
    found, count = jnp.zeros((rows, topk), jnp.int32), jnp.zeros((rows,), jnp.int32)
    for start in range(0, number, block):
        if start:
            # Blocks share the buffer of scores only if one waits for the other.
            queries, weights, found = jax.lax.optimization_barrier((queries, weights, found))
        own = Tiles(*(field[start : start + block] for field in tiles))
        places = jnp.minimum(own.rows, rows - 1)
        best, number_of_best = index_topk_decode(
            queries[places],
            weights[places],
            own.positions,
            own.page_table,
            keys,
            topk=topk,
            cut=cut,
            interpret=interpret,
        )
        found = found.at[own.rows].set(best, mode="drop")
        count = count.at[own.rows].set(number_of_best, mode="drop")
    return found, count


def _everything(topk: int, length: int) -> Int[Array, " K"]:
    return jnp.minimum(jnp.arange(topk, dtype=jnp.int32), length - 1)


def _cut(
    queries: Float[Array, "T R M I"],
    weights: Float[Array, "T R M"],
    positions: Int[Array, "T R"],
    few: int,
) -> _Tiles:
    """Tiles of ``few`` rows, for one matrix instruction; pad rows and heads score nothing."""
    tiles, rows, heads, width = queries.shape
    spare_rows, spare_heads = -rows % few, tile_shape.padded_heads(heads) - heads
    place = (0, 0), (0, spare_rows)
    padded_queries = jnp.pad(queries, (*place, (0, spare_heads), (0, 0)))
    padded_weights = jnp.pad(weights, (*place, (0, spare_heads)))
    padded_positions = jnp.pad(positions, place, constant_values=-1)
    per_table = (rows + spare_rows) // few
    count = tiles * per_table
    return _Tiles(
        queries=padded_queries.reshape(count, few, heads + spare_heads, width),
        weights=padded_weights.reshape(count, few, heads + spare_heads),
        positions=padded_positions.reshape(count, few),
        tables=jnp.arange(count, dtype=jnp.int32) // per_table,
    )


def _search(
    tiles: _Tiles,
    page_table: Int[Array, "T W"],
    keys: PagedPool,
    *,
    topk: int,
    splits: int | None,
    interpret: bool,
) -> Int[Array, "rows K"]:
    """The K best positions of every row, block of tiles after block."""
    count, rows = tiles.positions.shape
    length = largest.padded_length(page_table.shape[1] * keys.page_size)
    block = max(1, SCORES // (length * rows))
    chosen = jnp.zeros((count * rows, topk), jnp.int32)
    for start in range(0, count, block):
        if start:
            # Blocks share the buffer of scores only if one waits for the other.
            tiles, chosen = jax.lax.optimization_barrier((tiles, chosen))
        best = _search_block(
            _Tiles(*(field[start : start + block] for field in tiles)),
            page_table,
            keys,
            length=length,
            topk=topk,
            splits=splits,
            interpret=interpret,
        )
        chosen = jax.lax.dynamic_update_slice(chosen, best, (start * rows, 0))
    return chosen


# Under jit, so that the kernels of equal blocks are traced and lowered once.
@functools.partial(jax.jit, static_argnames=("length", "topk", "splits", "interpret"))
def _search_block(
    tiles: _Tiles,
    page_table: Int[Array, "T W"],
    keys: PagedPool,
    *,
    length: int,
    topk: int,
    splits: int | None,
    interpret: bool,
) -> Int[Array, "rows K"]:
    last = jnp.max(tiles.positions, axis=1)
    scores = tile_scores.score_tiles(
        tiles.queries,
        tiles.weights,
        # A tile all of whose rows keep everything scores nothing.
        jnp.where(last >= topk, last + 1, 0),
        tiles.tables,
        page_table,
        keys,
        length=length,
        splits=splits,
        interpret=interpret,
    )
    return largest.largest_of_rows(
        scores.reshape(-1, length),
        tiles.positions.reshape(-1) + 1,
        topk=topk,
        interpret=interpret,
    )
