"""e4m3 rows in shared memory as the bfloat16 A operand of wgmma, converted exactly in registers.

wgmma's A operand wants columns 2c, 2c + 1, 2c + 8, 2c + 9 of every 16 in lane c of a row's four.
Taken literally that is 32 loads of two bytes. But a dot product does not care in which order its
columns come, as long as both operands agree: here lane c takes bytes 16c .. 16c + 15 of either half
of a row, in two loads of 16 bytes, and ``permute_columns`` puts the other operand into that order.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector
from jaxtyping import Array, Float

from pallas_kernels.mosaic.ptx import instruction
from pallas_kernels.mosaic.word import Word, signless

WIDTH = 128  # values of a row
ROWS = 64
_HALVES, _LANES, _WORDS = 2, 4, 4  # a row: halves of 64 bytes, lanes of 16 bytes, words of 4

# Four e4m3 values to two pairs of bfloat16, through float16 and float32: all steps are exact.
_WIDEN = """{
.reg .b16 a, b, p, q, r, s;
.reg .b32 x, y;
.reg .f32 e, f, g, h;
mov.b32 {a, b}, $2;
cvt.rn.f16x2.e4m3x2 x, a;
cvt.rn.f16x2.e4m3x2 y, b;
mov.b32 {p, q}, x;
mov.b32 {r, s}, y;
cvt.f32.f16 e, p;
cvt.f32.f16 f, q;
cvt.f32.f16 g, r;
cvt.f32.f16 h, s;
cvt.rn.bf16x2.f32 $0, f, e;
cvt.rn.bf16x2.f32 $1, h, g;
}"""


def permute_columns(values: Float[Array, "*rows 128"]) -> Float[Array, "*rows 128"]:
    """The columns in the order in which ``load_rows`` delivers them."""
    split = values.reshape(*values.shape[:-1], _HALVES, _LANES, _WORDS, 2, 2)
    # [half, lane, word, pair, element] to the operand's [half, word, pair, lane, element]
    return jnp.moveaxis(split, -4, -2).reshape(values.shape)


def load_rows(rows: Any) -> Float[Array, "64 128"]:
    """bfloat16 values, columns permuted, of a plain (not swizzled) uint8 block [64, 128]."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )
    def load(_context: object, block: ir.Value) -> mgpu.FragmentedArray:
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((ROWS, WIDTH)), dtype=object)
        thread = Word.thread()
        row = thread // 32 * 16 + thread % 32 // _LANES
        start = row * WIDTH + thread % _LANES * 16
        for lower in range(2):  # a thread has rows r and r + 8
            for half in range(_HALVES):
                address = start + (lower * 8 * WIDTH + half * (WIDTH // _HALVES))
                for word, pairs in enumerate(sixteen_values(block, address)):
                    tile = 2 * (half * _WORDS + word)  # a step of 16 columns is two tiles of 8
                    for pair, value in enumerate(pairs):
                        registers[0, tile + pair, 0, 0, lower, 0, 0, 0, 0] = value
        return mgpu.FragmentedArray(
            _registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None
        )

    return load(rows)


def load_scales(scales: Any) -> Float[Array, " 64"]:
    """The rows' float32 scales from a uint8 block of shared memory, as the result's rows lie."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct(
            (ROWS,), jnp.float32, layout=plgpu.Layout.WGMMA.reduce(1)
        ),
    )
    def load(_context: object, block: ir.Value) -> mgpu.FragmentedArray:
        space = ir.MemRefType(block.type).memory_space
        words = mgpu.utils.ptr_as_memref(
            mgpu.utils.memref_ptr(block),
            ir.MemRefType.get((ROWS,), ir.F32Type.get(), memory_space=space),
        )
        return mgpu.FragmentedArray.load_untiled(
            words, layout=mgpu.WGMMA_ROW_LAYOUT, optimized=False
        )

    return load(scales)


def interpreted_scales(scales: Array) -> Float[Array, " 64"]:
    """What ``load_scales`` gives, from the value of a block."""
    return jax.lax.bitcast_convert_type(scales.reshape(ROWS, 4), jnp.float32)


def interpreted_rows(rows: Array) -> Float[Array, "64 128"]:
    """What ``load_rows`` gives, from the value of a block; the interpreter runs no inline code."""
    values = jax.lax.bitcast_convert_type(rows, jnp.float8_e4m3fn)
    return permute_columns(values.astype(jnp.float32)).astype(jnp.bfloat16)


def sixteen_values(block: ir.Value, address: Word) -> list[tuple[ir.Value, ir.Value]]:
    """Of 16 bytes at ``address``: two pairs of bfloat16 for each word of four."""
    words = ir.VectorType.get((_WORDS,), signless(32))
    pointer = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(block), [address.value], signless(8))
    loaded = llvm.load(words, pointer)
    return [
        _widen(vector.extract(loaded, dynamic_position=[], static_position=[word]))
        for word in range(_WORDS)
    ]


def _widen(word: ir.Value) -> tuple[ir.Value, ir.Value]:
    pair = llvm.StructType.get_literal([signless(32)] * 2)
    both = instruction(_WIDEN, "=r,=r,r", [word], pair)
    values = ir.VectorType.get((2,), ir.BF16Type.get())
    first, second = (
        vector.bitcast(values, _vector_of(llvm.extractvalue(signless(32), both, [index])))
        for index in range(2)
    )
    return first, second


def _vector_of(word: ir.Value) -> ir.Value:
    return vector.broadcast(ir.VectorType.get((1,), signless(32)), word)
