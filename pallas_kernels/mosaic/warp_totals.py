"""One number from an array in the registers of 16 warps, by way of one word per warp.

``jnp.sum`` over a warpgroup is not for kernels in which several warpgroups reduce at a time: all of
them pass their warps' numbers through the same few words of shared memory (seen in the PTX of
jax 0.10.2), and it takes two barriers besides.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector
from jaxtyping import Array, Int

from pallas_kernels.mosaic.ptx import instruction
from pallas_kernels.mosaic.word import Word, signless

Operation = Literal["add", "max"]
WARPS = 16
WARPGROUP_WARPS = 4
_FOLDS: dict[str, Callable[[ir.Value, ir.Value], ir.Value]] = {
    "add": arith.addi,
    "max": arith.maxsi,
}


def store_warp_totals(
    values: Int[Array, " entries"], totals: Any, operation: Operation, *, vector_size: int
) -> None:
    """Leave the sum, or maximum, of warp w's share of ``values`` in ``totals[w]``.

    Args:
        values: int32, in a warpgroup's registers as WG_STRIDED with ``vector_size``.
        totals: one word of shared memory for every warp of the block.
        operation: what to do with the values.
        vector_size: of the layout.
    """
    layout = plgpu.Layout.WG_STRIDED(values.shape, vec_size=vector_size)

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType()))
    def store(_context: object, array: mgpu.FragmentedArray, words: ir.Value) -> None:
        fold = _FOLDS[operation]
        own = functools.reduce(fold, [_folded(fold, each) for each in array.registers.flat])
        total = _total_of_lanes(own, operation)
        thread = Word(mgpu.utils.thread_idx())
        first_lane = arith.cmpi(arith.CmpIPredicate.eq, (thread % 32).value, Word(0).value)
        branch = scf.IfOp(first_lane)
        with ir.InsertionPoint(branch.then_block):
            place = [(thread // 32).wide()]
            pointer = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(words), place, signless(32))
            llvm.store(total, pointer)
            scf.yield_([])

    store(values, totals)


def total_of_warps(totals: Any, operation: Operation) -> Int[Array, ""]:
    """Sum or maximum of the totals of 16 warps; every warp of the block computes it."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(())),
    )
    def load(_context: object, words: ir.Value) -> mgpu.FragmentedArray:
        lane = Word.thread() % 32
        place = [(lane % WARPS).wide()]
        pointer = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(words), place, signless(32))
        known = llvm.load(signless(32), pointer)
        if operation == "add":  # the upper lanes read the same words once more
            lower = arith.cmpi(arith.CmpIPredicate.ult, lane.value, Word(WARPS).value)
            known = arith.select(lower, known, Word(0).value)
        total = _total_of_lanes(known, operation)
        return mgpu.FragmentedArray.splat(total, (), mgpu.WGSplatFragLayout(()), is_signed=True)

    return load(totals)


def interpreted_warp_totals(
    values: Int[Array, " entries"], operation: Operation
) -> Int[Array, " 4"]:
    """The totals of one warpgroup's four warps, as arrays of the interpreter."""
    shares = values.reshape(-1, WARPGROUP_WARPS, values.size // 4 // WARPGROUP_WARPS)
    return shares.sum(axis=(0, 2)) if operation == "add" else jnp.max(shares, axis=(0, 2))


def _total_of_lanes(value: ir.Value, operation: Operation) -> ir.Value:
    text = f"redux.sync.{operation}.s32 $0, $1, 0xffffffff;"
    return instruction(text, "=r,r", [value], signless(32), has_side_effects=True)


def _folded(fold: Callable[[ir.Value, ir.Value], ir.Value], register: ir.Value) -> ir.Value:
    """One number from the elements of a vector register."""
    (size,) = ir.VectorType(register.type).shape
    elements = [
        vector.extract(register, dynamic_position=[], static_position=[index])
        for index in range(size)
    ]
    return functools.reduce(fold, elements)
