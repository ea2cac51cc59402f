"""One thread block of ``fp8_product``: it stays and takes items in turn.

An item is one tile of rows by one or two blocks of 128 rows of weights, over one part of the depth.
A producer warpgroup copies its steps ahead, across items; two consumers compute 64 rows of each
block, transposed: wgmma takes the weights from registers.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.fp8 import BLOCK
from pallas_kernels.mosaic import bridge, e4m3_weights
from pallas_kernels.mosaic.e4m3_weights import ROWS
from pallas_kernels.mosaic.swizzle import TILE_ROWS as ROW_GROUP

CONSUMERS = BLOCK // ROWS
WARPGROUPS = CONSUMERS + 1
# Registers per thread of a consumer and of the producer: 2 * 232 + 40 <= 512 for three warpgroups.
_REGISTERS = (232, 40)
# Tiles of rows that go through all columns together: a matrix larger than L2 (50 MB) is read once
# for so many.
_GROUP_TILES = 8


class Product(NamedTuple):
    """Static facts of one kernel.

    Attributes:
        name: of the kernel.
        blocks: first row of each block of 128 rows of weights that the first item multiplies by.
        advance: rows of weights from one item to the next.
        across: items side by side in the result.
        size: rows of a tile, 16, 32 or 64.
        splits: into how many parts the depth is cut; each gives a result of its own.
        join: makes one block of the result of all the blocks' sums; None keeps them.
        ordered: the result's columns come permuted, as the next product wants its rows.
        interpret: run in the interpreter.
    """

    name: str
    blocks: tuple[int, ...]
    advance: int
    across: int
    size: int
    splits: int = 1
    join: Callable[..., Array] | None = None
    ordered: bool = False
    interpret: bool = False

    @property
    def results(self) -> int:
        """Blocks of the result that an item makes."""
        return len(self.blocks) if self.join is None else 1

    @property
    def columns(self) -> int:
        """Of the result."""
        return self.across * self.results * BLOCK

    @property
    def result_type(self) -> Any:
        """What is to be added up stays float32."""
        return jnp.bfloat16 if self.splits == 1 else jnp.float32


class Loop(NamedTuple):
    """Static facts of the loop over the depth."""

    width: int  # columns of a step
    steps: int  # of one item
    stages: int


class Operands(NamedTuple):
    """References in global memory."""

    first: Any  # [1] int32, first matrix that tiles count from
    matrix: Any  # [tiles] int32
    start: Any  # [tiles] int32
    live: Any  # [tiles] int32
    used: Any  # [1] int32
    rows: Any  # [P, depth] bfloat16, columns permuted
    values: Any  # [stack, outputs, depth] e4m3
    scales: Any  # [stack, output blocks, depth blocks] float32
    results: Any  # [splits, P, columns]


class Scratch(NamedTuple):
    """Shared memory and barriers."""

    values: Any  # [stages, blocks, 128, width] e4m3
    rows: Any  # [stages, size, width] bfloat16
    staged: Any  # [CONSUMERS, size, 64]
    full: Any
    empty: Any


class Kernel(NamedTuple):
    """All that the parts of the kernel need."""

    product: Product
    loop: Loop
    operands: Operands
    scratch: Scratch


class _Item(NamedTuple):
    """What an item is made of, and where its results go."""

    matrix: Int[Array, ""]
    start: Int[Array, ""]  # its first row
    live: Int[Array, ""]  # its rows
    column: Int[Array, ""]
    split: Int[Array, ""]


def take_items(kernel: Kernel) -> None:
    """One thread block: every so manyth item."""
    product, loop, operands, scratch = kernel
    blocks, mine = lax.axis_size("multiprocessor"), lax.axis_index("multiprocessor")
    warpgroup = lax.axis_index("warpgroup")
    items = operands.used[0] * (product.across * product.splits)
    turns = lax.div(items - mine + (blocks - 1), jnp.int32(blocks))

    @pl.when(warpgroup == CONSUMERS)
    def _() -> None:
        _set_registers(product, _REGISTERS[1], "decrease")
        _for_each(turns, lambda turn: _fetch(kernel, turn))
        for slot in range(loop.stages):
            # No barrier may be left with a phase that nobody has seen.
            @pl.when(turns * loop.steps > slot)
            def _(slot: int = slot) -> None:
                plgpu.barrier_wait(scratch.empty.at[slot])

    @pl.when(warpgroup < CONSUMERS)
    def _() -> None:
        _set_registers(product, _REGISTERS[0], "increase")
        _for_each(turns, lambda turn: _compute(kernel, turn))
        plgpu.wait_smem_to_gmem(0)


def item_of(
    product: Product, used: Int[Array, ""], number: Int[Array, ""]
) -> tuple[Int[Array, ""], Int[Array, ""], Int[Array, ""]]:
    """Tile of rows, column of items and part of the depth of an item.

    Parts of the depth come first, then the tiles of a group, then columns: what runs at one time
    shares weights and rows in L2.
    """
    place, split = _divided(number, jnp.int32(product.splits))
    group, inside = _divided(place, jnp.int32(_GROUP_TILES * product.across))
    first = group * _GROUP_TILES
    column, tile = _divided(inside, jnp.minimum(used - first, _GROUP_TILES))
    return first + tile, column, split


def _item(kernel: Kernel, turn: Int[Array, ""]) -> _Item:
    """The thread block's ``turn``-th item."""
    operands = kernel.operands
    number = lax.axis_index("multiprocessor") + turn * lax.axis_size("multiprocessor")
    tile, column, split = item_of(kernel.product, operands.used[0], number)
    matrix = operands.first[0] + operands.matrix[tile]
    start = pl.multiple_of(operands.start[tile], ROW_GROUP)
    return _Item(matrix, start, operands.live[tile], column, split)


def _divided(number: Array, by: Array) -> tuple[Int[Array, ""], Int[Array, ""]]:
    return lax.div(number, by), lax.rem(number, by)


def _fetch(kernel: Kernel, turn: Int[Array, ""]) -> None:
    """Copy an item's weights and rows, as many steps ahead as there are stages."""
    product, loop, operands, scratch = kernel
    item = _item(kernel, turn)
    values = operands.values.at[item.matrix]
    rows = operands.rows.at[pl.ds(item.start, product.size)]

    def fetch(step: Int[Array, ""]) -> None:
        index = turn * loop.steps + step
        slot = lax.rem(index, jnp.int32(loop.stages))

        @pl.when(index >= loop.stages)
        def _() -> None:
            plgpu.barrier_wait(scratch.empty.at[slot])

        full = scratch.full.at[slot]
        columns = pl.ds((item.split * loop.steps + step) * loop.width, loop.width)
        for block, first in enumerate(product.blocks):
            outputs = pl.ds(first + item.column * product.advance, BLOCK)
            target = scratch.values.at[slot, block]
            plgpu.copy_gmem_to_smem(values.at[outputs, columns], target, full)
        plgpu.copy_gmem_to_smem(rows.at[:, columns], scratch.rows.at[slot], full)

    _for_each(jnp.int32(loop.steps), fetch)


def _compute(kernel: Kernel, turn: Int[Array, ""]) -> None:
    """One consumer's part of an item."""
    product, loop, operands, scratch = kernel
    item = _item(kernel, turn)

    def scales(step: Array | int) -> tuple[Array, ...]:
        inputs = lax.div((item.split * loop.steps + step) * loop.width, jnp.int32(BLOCK))
        outputs = [
            lax.div(first + item.column * product.advance, jnp.int32(BLOCK))
            for first in product.blocks
        ]
        return tuple(operands.scales[item.matrix, output, inputs] for output in outputs)

    def add(step: Int[Array, ""], carry: Any) -> Any:
        totals, factors = carry
        slot = lax.rem(turn * loop.steps + step, jnp.int32(loop.stages))
        plgpu.barrier_wait(scratch.full.at[slot])
        # The next step's: memory answers while this one is computed.
        upcoming = scales(jnp.minimum(step + 1, loop.steps - 1))
        sums = _block_sums(kernel, slot)
        plgpu.barrier_arrive(scratch.empty.at[slot])
        scaled = (part * factor for part, factor in zip(sums, factors, strict=True))
        return tuple(total + part for total, part in zip(totals, scaled, strict=True)), upcoming

    zeros = tuple(_zeros(product) for _ in product.blocks)
    totals, _ = lax.fori_loop(0, loop.steps, add, (zeros, scales(0)))
    _store(kernel, item, totals if product.join is None else [product.join(*totals)])


def _block_sums(kernel: Kernel, slot: Int[Array, ""]) -> Sequence[Float[Array, "64 R"]]:
    """Weights times rows, transposed, of one step: 64 rows of each block."""
    product, _, _, scratch = kernel
    consumer, rows = lax.axis_index("warpgroup"), scratch.rows.at[slot]
    if product.interpret:  # no wgmma there with A in registers or B transposed
        wide = scratch.rows[slot].astype(jnp.float32).T
        parts = [
            e4m3_weights.interpreted_rows(
                scratch.values[slot, block], consumer, ordered=product.ordered
            )
            for block in range(len(product.blocks))
        ]
        return [jnp.dot(part.astype(jnp.float32), wide) for part in parts]

    def multiply(sums: Sequence[Any]) -> Sequence[Array]:
        for block, part in enumerate(sums):
            values = scratch.values.at[slot, block]
            weights = e4m3_weights.load_rows(values, consumer, ordered=product.ordered)
            plgpu.wgmma(part, weights, bridge.transposed(rows))
        return tuple(part[...] for part in sums)

    shape = plgpu.ACC((ROWS, product.size), jnp.float32)
    return pl.run_scoped(multiply, [shape] * len(product.blocks))


def _store(kernel: Kernel, item: _Item, results: Sequence[Float[Array, "64 R"]]) -> None:
    """Write one consumer's results by way of shared memory, which turns them round."""
    product, _, operands, scratch = kernel
    consumer = lax.axis_index("warpgroup")
    staged = scratch.staged.at[consumer]
    target = operands.results.at[item.split]
    for block, result in enumerate(results):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        _stage(product, staged, result.astype(product.result_type))
        plgpu.commit_smem()
        place = item.column * len(results) + block
        columns = pl.ds(place * BLOCK + consumer * ROWS, ROWS)
        for group in range(0, product.size, ROW_GROUP):
            # Not one copy: what follows the tile's rows is another's.
            @pl.when(group < item.live)
            def _(group: int = group, columns: Any = columns) -> None:
                plgpu.copy_smem_to_gmem(
                    staged.at[pl.ds(group, ROW_GROUP)],
                    target.at[pl.ds(item.start + group, ROW_GROUP), columns],
                )


def _stage(product: Product, staged: Any, result: Float[Array, "64 R"]) -> None:
    if product.interpret:
        staged[...] = result.T
        return
    transposed = plgpu.layout_cast(result, plgpu.Layout.WGMMA_TRANSPOSED)
    bridge.transposed(staged)[...] = transposed


def _zeros(product: Product) -> Float[Array, "64 R"]:
    zeros = jnp.zeros((ROWS, product.size), jnp.float32)
    return zeros if product.interpret else plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)


def _for_each(number: Int[Array, ""], run: Callable[[Int[Array, ""]], None]) -> None:
    def once(index: Int[Array, ""], carry: tuple[()]) -> tuple[()]:
        run(index)
        return carry

    lax.fori_loop(0, number, once, ())


def _set_registers(product: Product, number: int, action: Any) -> None:
    if not product.interpret:
        plgpu.set_max_registers(number, action=action)
