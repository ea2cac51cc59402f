"""index_topk for the CPU: scores as ordered bits, the K-th largest by bisection, one compaction.

A tile's keys are scored block after block in a loop of dynamic length, so the cost follows the real
context, not the page table's width. The K-th largest score is found bit by bit (32 counts), and the
positions at or above it are written out in ascending order: the selection has one canonical form,
whatever the scores. A running ``lax.top_k`` over the same blocks took 1.2 to 2.7 times as long on
two CPU cores (contexts of 640 to 4096 keys, 8 or 512 rows, K = 256).
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from pallas_kernels.pool import PagedPool
from pallas_kernels.tiles import Tiles

# Keys scored per loop turn: few, so that a context is not rounded up by much (640 keys, 8 rows:
# 0.83 ms with 128 keys, 1.4 ms with 512; no difference at 4096 keys).
SCORE_KEYS = 128
# Keys counted and compacted per turn: more, since those turns do little each.
COUNT_KEYS = 512


class _Scores(NamedTuple):
    """Ordered bits of a tile's scores; 0 where a row may not look, less than any score's bits."""

    bits: UInt[Array, "T R S"]
    blocks: Int[Array, ""]  # blocks of COUNT_KEYS or so that hold anything
    block: int  # keys per block


def index_topk_decode(
    queries: Float[Array, "G Q M I"],
    weights: Float[Array, "G Q M"],
    positions: Int[Array, "G Q"],
    page_table: Int[Array, "G W"],
    keys: PagedPool,
    *,
    topk: int,
) -> tuple[Int[Array, "G Q K"], Int[Array, "G Q"]]:
    """All groups advance together through their contexts (see ``api``)."""
    everything = jnp.broadcast_to(jnp.arange(topk, dtype=jnp.int32), (*positions.shape, topk))
    count = jnp.minimum(positions + 1, topk).astype(jnp.int32)

    def search() -> Int[Array, "G Q K"]:
        scores = _score(queries, weights, positions, page_table, keys)
        return _positions_of_largest(scores, topk)

    return jax.lax.cond(jnp.max(positions) >= topk, search, lambda: everything), count


def index_topk_prefill(
    queries: Float[Array, "N M I"],
    weights: Float[Array, "N M"],
    tiles: Tiles,
    keys: PagedPool,
    *,
    topk: int,
) -> tuple[Int[Array, "N K"], Int[Array, " N"]]:
    """The tiles in use one by one, each through its own context (see ``api``)."""
    rows = queries.shape[0]

    def select(index: int | Int[Array, ""], state: tuple[Array, Array]) -> tuple[Array, Array]:
        places = tiles.rows[index]
        safe = jnp.minimum(places, rows - 1)
        positions, table = tiles.positions[index], tiles.page_table[index]
        found, count = index_topk_decode(
            queries[safe][None], weights[safe][None], positions[None], table[None], keys, topk=topk
        )
        return (
            state[0].at[places].set(found[0], mode="drop"),
            state[1].at[places].set(count[0], mode="drop"),
        )

    nothing = jnp.zeros((rows, topk), jnp.int32)
    used = jnp.sum(tiles.positions[:, 0] >= 0)
    return jax.lax.fori_loop(0, used, select, (nothing, nothing[:, 0]))


def _score(
    queries: Float[Array, "T R M I"],
    weights: Float[Array, "T R M"],
    positions: Int[Array, "T R"],
    page_table: Int[Array, "T W"],
    keys: PagedPool,
) -> _Scores:
    """Score every visible key of each row."""
    tiles, rows, heads, width = queries.shape
    page_size = keys.page_size
    block_pages = max(1, SCORE_KEYS // page_size)
    block = block_pages * page_size
    turns = max(1, COUNT_KEYS // block)
    spare = -page_table.shape[1] % (block_pages * turns)
    table = jnp.pad(page_table, ((0, 0), (0, spare)))  # page 0: zeros, and never causal
    flat_queries = queries.reshape(tiles, rows * heads, width)

    def score(index: int | Int[Array, ""], bits: UInt[Array, "T R S"]) -> UInt[Array, "T R S"]:
        pages = jax.lax.dynamic_slice_in_dim(table, index * block_pages, block_pages, axis=1)
        context = keys.read_pages(pages).reshape(tiles, block, width)
        dots = jnp.einsum("tri,tsi->trs", flat_queries, context)
        per_head = jnp.maximum(dots, 0.0).reshape(tiles, rows, heads, block)
        scores = jnp.einsum("trms,trm->trs", per_head, weights)
        key = index * block + jnp.arange(block, dtype=jnp.int32)
        # where, not a product: keys that may not be seen may be NaN.
        visible = jnp.where(key <= positions[..., None], _ordered_bits(scores), jnp.uint32(0))
        return jax.lax.dynamic_update_slice_in_dim(bits, visible, index * block, axis=2)

    last = jnp.max(positions)
    nothing = jnp.zeros((tiles, rows, table.shape[1] * page_size), jnp.uint32)
    bits = jax.lax.fori_loop(0, last // block + 1, score, nothing)
    return _Scores(bits, last // (block * turns) + 1, block * turns)


def _ordered_bits(scores: Float[Array, "T R s"]) -> UInt[Array, "T R s"]:
    """Unsigned integers in the order of the scores; -0.0 counts as 0.0, so that they tie."""
    bits = jax.lax.bitcast_convert_type(jnp.where(scores == 0.0, 0.0, scores), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _positions_of_largest(scores: _Scores, topk: int) -> Int[Array, "T R K"]:
    """Positions of the K largest, ascending; of those equal to the K-th, the lowest positions."""
    tiles, rows, _ = scores.bits.shape
    kth = _kth_largest(scores, topk)
    # A row with fewer than K visible keys takes them all: its K-th is the mark of hidden ones.
    room = jnp.where(kth > 0, topk - _count_from(scores, kth + 1), 0)
    tile = jnp.arange(tiles)[:, None, None]
    row = jnp.arange(rows)[None, :, None]

    def collect(
        index: int | Int[Array, ""], state: tuple[Array, Array, Array]
    ) -> tuple[Array, Array, Array]:
        found, taken, equal = state
        bits = _block_of(scores, index)
        ties = bits == kth[..., None]
        tie_number = _running_count(ties) + equal[..., None]
        chosen = (bits > kth[..., None]) | (ties & (tie_number <= room[..., None]))
        number = _running_count(chosen) + taken[..., None]
        key = index * scores.block + jnp.arange(scores.block, dtype=jnp.int32)
        place = jnp.where(chosen, number - 1, topk)
        found = found.at[tile, row, place].set(jnp.broadcast_to(key, place.shape), mode="drop")
        return found, number[..., -1], tie_number[..., -1]

    zeros = jnp.zeros((tiles, rows), jnp.int32)
    start = jnp.zeros((tiles, rows, topk), jnp.int32), zeros, zeros
    return jax.lax.fori_loop(0, scores.blocks, collect, start)[0]


def _kth_largest(scores: _Scores, topk: int) -> UInt[Array, "T R"]:
    """The largest value that at least K entries reach, from the highest bit down."""

    def try_bit(index: int | Int[Array, ""], kth: UInt[Array, "T R"]) -> UInt[Array, "T R"]:
        candidate = kth | (jnp.uint32(1) << jnp.uint32(31 - index))
        return jnp.where(_count_from(scores, candidate) >= topk, candidate, kth)

    return jax.lax.fori_loop(0, 32, try_bit, jnp.zeros(scores.bits.shape[:2], jnp.uint32))


def _count_from(scores: _Scores, least: UInt[Array, "T R"]) -> Int[Array, "T R"]:
    """How many entries of each row are at least ``least``."""

    def count(index: int | Int[Array, ""], total: Int[Array, "T R"]) -> Int[Array, "T R"]:
        reached = _block_of(scores, index) >= least[..., None]
        return total + jnp.sum(reached, axis=-1, dtype=jnp.int32)

    return jax.lax.fori_loop(0, scores.blocks, count, jnp.zeros(least.shape, jnp.int32))


def _block_of(scores: _Scores, index: int | Int[Array, ""]) -> UInt[Array, "T R s"]:
    start = index * scores.block
    return jax.lax.dynamic_slice_in_dim(scores.bits, start, scores.block, axis=2)


def _running_count(flags: Bool[Array, "T R s"]) -> Int[Array, "T R s"]:
    """How many flags are set up to and including each place.

    Short pieces by a triangular matmul (exact in float32 below 2^24): XLA's CPU cumsum takes a few
    times as long.
    """
    tiles, rows, length = flags.shape
    lane = math.gcd(length, 128)
    pieces = flags.reshape(tiles, rows, length // lane, lane).astype(jnp.float32)
    inside = pieces @ jnp.triu(jnp.ones((lane, lane), jnp.float32))
    totals = inside[..., -1]
    before = jnp.cumsum(totals, axis=-1) - totals
    return (inside + before[..., None]).reshape(flags.shape).astype(jnp.int32)
