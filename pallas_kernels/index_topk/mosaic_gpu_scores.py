"""Lightning indexer scores on Hopper: every block of keys is read once for all rows of a tile.

One program of the kernel takes blocks ``split, split + splits, ..`` of a tile's context. A producer
warpgroup copies blocks of 64 keys into shared memory, page by page through the page table; two
consumer warpgroups take turns at them. For one block, 64 keys (rows) times the tile's rows x heads
(columns):

    S = K Q^T;  score[key, row] = sum over the row's heads of weight * max(S, 0)

The sum runs over neighbouring columns, so it stays in the registers of four lanes.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.index_topk.tile_shape import BLOCK
from pallas_kernels.mosaic import bridge, e4m3_operand
from pallas_kernels.mosaic.hopper import MULTIPROCESSORS
from pallas_kernels.mosaic.ordered_bits import ordered_bits
from pallas_kernels.pool import PagedPool

_CONSUMERS = 2
# Registers per thread of a consumer and of the producer: 2 * 216 + 40 <= 512 for three warpgroups.
_REGISTERS = (216, 40)
# Programs per launch: two waves even out unequal contexts.
_PROGRAMS = 2 * MULTIPROCESSORS
# Shared memory for queries and key blocks; a program may have 227 KiB, barriers and scratch aside.
_SHARED_BYTES = 216 * 1024
_MAX_STAGES = 8
_KEY_TYPES = {"bfloat16": jnp.bfloat16, "fp8_planar": jnp.uint8, "float32": jnp.float32}
_SCALE_ROWS = BLOCK * 4 // e4m3_operand.WIDTH  # rows of 128 bytes that hold the scales of 64 keys


class _Plan(NamedTuple):
    """What is fixed when the kernel is traced."""

    storage_format: str
    heads: int
    width: int
    rows: int  # per tile
    page_blocks: int  # blocks of 64 keys per page
    pages: int  # of one plane
    splits: int
    interpret: bool

    @property
    def columns(self) -> int:
        return self.rows * self.heads

    @property
    def planar(self) -> bool:
        return self.storage_format == "fp8_planar"

    @property
    def terms(self) -> int:
        """Terms of a query in bfloat16."""
        return 2 if self.storage_format == "float32" else 1

    @property
    def key_type(self) -> Any:
        return _KEY_TYPES[self.storage_format]

    @property
    def stages(self) -> int:
        """Blocks in flight that fit beside the queries."""
        queries = self.terms * self.columns * self.width * 2
        block = BLOCK * self.width * jnp.dtype(self.key_type).itemsize
        return min(_MAX_STAGES, (_SHARED_BYTES - queries) // (block + BLOCK * 4))


def score_tiles(
    queries: Float[Array, "U r M I"],
    weights: Float[Array, "U r M"],
    context: Int[Array, " U"],
    tables: Int[Array, " U"],
    page_table: Int[Array, "T W"],
    keys: PagedPool,
    *,
    length: int,
    splits: int | None = None,
    interpret: bool = False,
) -> Int[Array, "U r S"]:
    """Ordered bits of the scores of U tiles of r rows.

    Args:
        queries: rounded to bfloat16 (float32 pools: split into two bfloat16 terms).
        weights: per row and head.
        context: how many keys each tile scores; blocks of 64 beyond it are not read, and their
            scores are left undefined.
        tables: row of the page table of each tile.
        page_table: ``page_table[t, j]`` holds positions ``j * page_size ..``.
        keys: whole pool; ``r`` and ``M`` must be what ``tile_shape`` gives for it.
        length: S, the scores' last axis.
        splits: programs per tile; None takes ``split_count``.
        interpret: run in the interpreter.
    """
    tiles, rows, heads, width = queries.shape
    plan = _Plan(
        storage_format=keys.storage_format,
        heads=heads,
        width=width,
        rows=rows,
        page_blocks=keys.page_size // BLOCK,
        pages=keys.array.shape[1],
        splits=split_count(tiles, page_table.shape[1] * keys.page_size)
        if splits is None
        else splits,
        interpret=interpret,
    )
    plane = jnp.asarray(keys.plane, jnp.int32).reshape(1)
    launch = bridge.kernel(
        functools.partial(_kernel, plan),
        name="index_scores",
        out_type=jax.ShapeDtypeStruct((tiles, rows, length), jnp.int32),
        grid=(tiles, plan.splits),
        grid_names=("tile", "split"),
        num_threads=_CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types=_scratch(plan),
        interpret=interpret,
    )
    return launch(
        _terms(queries.reshape(tiles, plan.columns, width), keys.storage_format),
        weights.reshape(tiles, plan.columns),
        context,
        tables,
        page_table,
        plane,
        _key_operand(keys),
    )


def split_count(tiles: int, length: int) -> int:
    """Programs per tile: enough to fill the device, never more than there are blocks."""
    return max(1, min(length // BLOCK, math.ceil(_PROGRAMS / tiles)))


def local_blocks(context: Any, split: Any, splits: int) -> Any:
    """How many blocks of 64 keys program ``split`` of a tile reads."""
    blocks = lax.div(context + (BLOCK - 1), jnp.int32(BLOCK))
    return lax.div(jnp.maximum(blocks - split + (splits - 1), 0), jnp.int32(splits))


def _terms(queries: Float[Array, "U N I"], storage_format: str) -> Array:
    """Queries ``[U, terms, N, I]`` in bfloat16; two terms hold 16 of float32's 24 mantissa bits."""
    high = queries.astype(jnp.bfloat16)
    if storage_format == "fp8_planar":
        return e4m3_operand.permute_columns(high)[:, None]
    if storage_format == "bfloat16":
        return high[:, None]
    low = (queries - high.astype(jnp.float32)).astype(jnp.bfloat16)
    return jnp.stack([high, low], axis=1)


def _key_operand(keys: PagedPool) -> Array:
    """The whole pool, [planes * pages, rows, I], as the copy engine wants it: a view, no copy."""
    planes, pages, page_size, size = keys.array.shape
    if keys.storage_format == "fp8_planar":
        rows = page_size * size // e4m3_operand.WIDTH
        return keys.array.reshape(planes * pages, rows, e4m3_operand.WIDTH)
    flat = keys.array.reshape(planes * pages, page_size, size)
    if keys.storage_format == "bfloat16":
        return lax.bitcast_convert_type(flat, jnp.bfloat16)
    return flat


def _swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    columns = 128 // jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _scratch(plan: _Plan) -> dict[str, Any]:
    key_blocks = (plan.stages, BLOCK, plan.width)
    return {
        "query_block": _swizzled((plan.terms, plan.columns, plan.width), jnp.bfloat16),
        "key_blocks": plgpu.SMEM(key_blocks, jnp.uint8)
        if plan.planar
        else _swizzled(key_blocks, plan.key_type),
        "scale_blocks": plgpu.SMEM((plan.stages, _SCALE_ROWS, e4m3_operand.WIDTH), jnp.uint8),
        "weight_block": plgpu.SMEM((plan.columns,), jnp.float32),
        "queries_ready": plgpu.Barrier(num_arrivals=plan.terms + 1),
        "full": plgpu.Barrier(num_arrivals=2 if plan.planar else 1, num_barriers=plan.stages),
        "empty": plgpu.Barrier(num_barriers=plan.stages),
    }


def _kernel(
    plan: _Plan,
    queries: Any,  # [U, terms, N, I] in global memory
    weights: Any,  # [U, N]
    context: Any,  # [U]
    tables: Any,  # [U]
    page_table: Any,  # [T, W]
    plane: Any,  # [1]
    keys: Any,  # the pool
    scores: Any,  # [U, r, S]
    **scratch: Any,
) -> None:
    warpgroup = lax.axis_index("warpgroup")
    blocks = local_blocks(context[lax.axis_index("tile")], lax.axis_index("split"), plan.splits)

    @pl.when(warpgroup == _CONSUMERS)
    def _() -> None:
        if not plan.interpret:
            plgpu.set_max_registers(_REGISTERS[1], action="decrease")
        _fetch(plan, blocks, tables, page_table, plane, keys, **scratch)

    @pl.when((warpgroup < _CONSUMERS) & (blocks > 0))
    def _() -> None:
        if not plan.interpret:
            plgpu.set_max_registers(_REGISTERS[0], action="increase")
        _score(plan, blocks, queries, weights, scores, **scratch)


def _fetch(
    plan: _Plan,
    blocks: Any,
    tables: Any,
    page_table: Any,
    plane: Any,
    keys: Any,
    *,
    key_blocks: Any,
    scale_blocks: Any,
    full: Any,
    empty: Any,
    **_: Any,
) -> None:
    """Copy this program's key blocks, as many ahead as there are stages."""
    table = tables[lax.axis_index("tile")]
    first = lax.axis_index("split")

    def fetch(index: Any, carry: tuple[()]) -> tuple[()]:
        slot = lax.rem(index, jnp.int32(plan.stages))

        @pl.when(index >= plan.stages)
        def _() -> None:
            plgpu.barrier_wait(empty.at[slot])

        block = first + index * plan.splits
        page = page_table[table, lax.div(block, jnp.int32(plan.page_blocks))]
        inside = lax.rem(block, jnp.int32(plan.page_blocks))
        source = keys.at[plane[0] * plan.pages + page]
        plgpu.copy_gmem_to_smem(
            source.at[pl.ds(inside * BLOCK, BLOCK)], key_blocks.at[slot], full.at[slot]
        )
        if plan.planar:
            scale_row = plan.page_blocks * BLOCK + inside * _SCALE_ROWS
            plgpu.copy_gmem_to_smem(
                source.at[pl.ds(scale_row, _SCALE_ROWS)], scale_blocks.at[slot], full.at[slot]
            )
        return carry

    lax.fori_loop(0, blocks, fetch, ())
    for slot in range(plan.stages):
        # No barrier may be left with a phase that nobody has seen.
        @pl.when(blocks > slot)
        def _(slot: int = slot) -> None:
            plgpu.barrier_wait(empty.at[slot])


def _score(
    plan: _Plan,
    blocks: Any,
    queries: Any,
    weights: Any,
    scores: Any,
    *,
    query_block: Any,
    weight_block: Any,
    key_blocks: Any,
    scale_blocks: Any,
    queries_ready: Any,
    full: Any,
    empty: Any,
) -> None:
    """Score every second block of this program, from this warpgroup's own on."""
    tile, warpgroup = lax.axis_index("tile"), lax.axis_index("warpgroup")
    first = lax.axis_index("split")

    @pl.when(warpgroup == 0)
    def _() -> None:
        for term in range(plan.terms):
            plgpu.copy_gmem_to_smem(queries.at[tile, term], query_block.at[term], queries_ready)
        plgpu.copy_gmem_to_smem(weights.at[tile], weight_block, queries_ready)

    plgpu.barrier_wait(queries_ready)

    column_layout = plgpu.Layout.WGMMA.reduce(0)

    def score_block(turn: Any, carry: tuple[()]) -> tuple[()]:
        index = turn * _CONSUMERS + warpgroup
        slot = lax.rem(index, jnp.int32(plan.stages))
        plgpu.barrier_wait(full.at[slot])
        dots = _dots(plan, key_blocks.at[slot], query_block)
        scales = _scales(plan, scale_blocks, slot) if plan.planar else None
        plgpu.barrier_arrive(empty.at[slot])
        place = pl.ds((first + index * plan.splits) * BLOCK, BLOCK)
        for row in range(plan.rows):
            start = row * plan.heads
            heads = lax.slice(dots, (0, start), (BLOCK, start + plan.heads))
            factors = _load(plan, weight_block, (pl.ds(start, plan.heads),), column_layout)
            weighted = jnp.maximum(heads, 0.0) * lax.broadcast_in_dim(factors, heads.shape, [1])
            total = weighted.sum(axis=1)
            score = total if scales is None else total * scales
            scores[tile, row, place] = ordered_bits(score)
        return carry

    turns = lax.div(blocks - warpgroup + (_CONSUMERS - 1), jnp.int32(_CONSUMERS))
    lax.fori_loop(0, turns, score_block, ())


def _dots(plan: _Plan, keys: Any, queries: Any) -> Array:
    """``K Q^T`` of one block in float32, [64, N]."""
    if plan.interpret:  # no wgmma there with A in registers or B transposed
        return _interpreted_dots(plan, keys, queries)

    def multiply(sums: Any) -> Array:
        if plan.storage_format == "bfloat16":
            plgpu.wgmma(sums, keys, bridge.transposed(queries.at[0]))
        elif plan.planar:
            plgpu.wgmma(sums, e4m3_operand.load_rows(keys), bridge.transposed(queries.at[0]))
        else:
            _multiply_float32(plan, sums, keys, queries)
        return sums[...]

    return pl.run_scoped(multiply, plgpu.ACC((BLOCK, plan.columns), jnp.float32))


def _multiply_float32(plan: _Plan, sums: Any, keys: Any, queries: Any) -> None:
    """Two bfloat16 terms of either operand; the product of the two low terms is left out."""
    step = 64  # columns of a bfloat16 swizzle tile
    for column in range(0, plan.width, step):
        part = pl.ds(column, step)
        values = bridge.load(keys.at[:, part], layout=plgpu.Layout.WGMMA, optimized=False)
        high = values.astype(jnp.bfloat16)
        low = (values - high.astype(jnp.float32)).astype(jnp.bfloat16)
        query_high = bridge.transposed(queries.at[0, :, part])
        plgpu.wgmma(sums, high, query_high)
        plgpu.wgmma(sums, low, query_high)
        plgpu.wgmma(sums, high, bridge.transposed(queries.at[1, :, part]))


def _interpreted_dots(plan: _Plan, keys: Any, queries: Any) -> Array:
    values = keys[...]
    if plan.planar:
        values = e4m3_operand.interpreted_rows(values)
    terms = queries[...].astype(jnp.float32).sum(axis=0)
    return jnp.dot(values.astype(jnp.float32), terms.T)


def _scales(plan: _Plan, blocks: Any, slot: Any) -> Array:
    if plan.interpret:
        return e4m3_operand.interpreted_scales(blocks[slot])
    return e4m3_operand.load_scales(blocks.at[slot])


def _load(plan: _Plan, ref: Any, index: tuple[Any, ...], layout: Any) -> Array:
    if plan.interpret:  # layouts mean nothing there
        return ref[index]
    return bridge.load(ref, index, layout=layout, optimized=False)
