"""Rows of an e4m3 matrix in shared memory as the bfloat16 A operand of wgmma.

As in ``e4m3_operand``, the sum over columns is taken in the order in which 16-byte loads bring
them, and ``permute_columns`` puts the other operand into that order. Here the lanes of a row take
neighbouring pieces, which the copy engine's swizzle keeps in banks of their own. A matrix whose
depth is no multiple of 128 comes in plain blocks of 64 columns instead: the copy engine cannot
fill up what it swizzles with zeros.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxtyping import Array, Float, Int

from pallas_kernels.mosaic.e4m3_operand import sixteen_values
from pallas_kernels.mosaic.word import Word

ROWS = 64  # of one operand
WIDTHS = (128, 64)  # of a block
_PIECE = 16  # values of one load
_LANES = 4  # of a row
_WORDS = 4  # of a piece
_SCALAR = plgpu.Layout.WG_SPLAT(())


def block_width(depth: int) -> int:
    """Columns of the blocks in which a matrix of that depth comes."""
    return WIDTHS[0] if depth % WIDTHS[0] == 0 else WIDTHS[1]


def transforms(width: int) -> tuple[Any, ...]:
    """How a block lies in shared memory."""
    if width == WIDTHS[0]:
        return plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(width)
    return ()


def permute_columns(values: Float[Array, "rows depth"]) -> Float[Array, "rows padded"]:
    """Columns in the order in which ``load_rows`` delivers them; the last block ends in zeros."""
    depth = values.shape[1]
    width = block_width(depth)
    padded = jnp.pad(values, ((0, 0), (0, -depth % width)))
    blocks = padded.reshape(values.shape[0], -1, width)
    return _permuted(blocks).reshape(padded.shape)


def _permuted(blocks: Float[Array, "*blocks width"]) -> Float[Array, "*blocks width"]:
    """[lane, piece, word, pair, element] in the operand's order, [piece, word, pair, lane, ..]."""
    split = blocks.reshape(*blocks.shape[:-1], _LANES, -1, _WORDS, 2, 2)
    return jnp.moveaxis(split, -5, -2).reshape(blocks.shape)


def load_rows(block: Any, share: Int[Array, ""], *, ordered: bool) -> Float[Array, "64 width"]:
    """bfloat16 values, columns permuted.

    Args:
        block: e4m3 ``[128, width]``, as ``transforms`` has it.
        share: which half of the rows.
        ordered: take the rows as ``permute_columns`` orders columns: a product's results then come
            in the order in which the next product wants its columns.
    """
    width = block.shape[1]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(transforms(width)), _SCALAR),
        return_type=plgpu.ShapeDtypeStruct((ROWS, width), jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )
    def load(_context: object, block: ir.Value, share: Any) -> mgpu.FragmentedArray:
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((ROWS, width)), dtype=object)
        for lower in range(2):  # a thread has rows r and r + 8 of 16
            row = loaded_row(Word.thread(), lower, Word.of_scalar(share), ordered=ordered)
            for part in range(width // (_LANES * _PIECE)):
                address = piece_address(Word.thread(), row, part, width)
                for word, pairs in enumerate(sixteen_values(block, address)):
                    tile = 2 * (part * _WORDS + word)  # a step of 16 columns is two tiles of 8
                    for pair, value in enumerate(pairs):
                        registers[0, tile + pair, 0, 0, lower, 0, 0, 0, 0] = value
        return mgpu.FragmentedArray(
            _registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None
        )

    return load(block, share)


def interpreted_rows(block: Array, share: Int[Array, ""], *, ordered: bool) -> Array:
    """What ``load_rows`` gives, from the value of a block; the interpreter runs no inline code."""
    values = block.astype(jnp.float32)
    rows = _permuted(values.T).T if ordered else values
    return _permuted(jax.lax.dynamic_slice_in_dim(rows, share * ROWS, ROWS)).astype(jnp.bfloat16)


def loaded_row(thread: Any, lower: int, share: Any, *, ordered: bool) -> Any:
    """Row of the block that a thread loads as the operand's row r (``lower`` 0) or r + 8.

    With operators only, so that the same lines run on ints in a test.
    """
    warp, octet = thread // 32, thread % 32 // _LANES
    if ordered:
        return octet // 2 * 32 + share * 16 + warp * 4 + octet % 2 + lower * 2
    return share * ROWS + warp * 16 + octet + lower * 8


def piece_address(thread: Any, row: Any, part: int, width: int) -> Any:
    """Byte in a block at which a thread's ``part``-th 16 values of a row start (as above)."""
    parts = width // (_LANES * _PIECE)
    piece = thread % _LANES * parts + part
    # The swizzle of 128 bytes exchanges pieces by exclusive or with the row's number.
    place = piece ^ row % 8 if width == WIDTHS[0] else piece
    return row * width + place * _PIECE
