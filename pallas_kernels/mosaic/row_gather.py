"""Gathers 64 cache entries of 576 values from anywhere in device memory into wgmma's layout.

No bulk copy of the GPU can do this (indexed TMA needs Blackwell, a copy per row lands row-major),
so the 128 threads of a warpgroup copy 16-byte pieces themselves: thread t takes piece t % 8 of
every 64-value column tile, for rows t // 8 + 16 * step. Bits that are bfloat16 already go by
cp.async without passing registers; float32 and fp8 entries are converted on the way.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector
from jaxtyping import Array, Int

from pallas_kernels.mosaic.ptx import instruction
from pallas_kernels.mosaic.swizzle import TILE_BYTES, TILE_COLUMNS, TILE_PIECES, piece_offset
from pallas_kernels.mosaic.word import Word, signless

ROWS = 64
LATENT_HALF = 256
LATENT_TILES = 8
ROPE_TILE = LATENT_TILES  # the ninth column tile
SWIZZLED = (plgpu.TilingTransform((8, TILE_COLUMNS)), plgpu.SwizzleTransform(128))

_STEP_ROWS = 128 // TILE_PIECES
_STEPS = ROWS // _STEP_ROWS
_NUMBERS = plgpu.Layout.WG_STRIDED((ROWS * TILE_PIECES,), vec_size=_STEPS)
_SCALAR = plgpu.Layout.WG_SPLAT(())


class _Piece(NamedTuple):
    """One thread's share of one row.

    Attributes:
        row: pointer to the entry.
        lane: which of the row's eight threads this is.
        target: shared-memory pointer for a column tile, 0 .. 8.
    """

    row: ir.Value
    lane: Word
    target: Callable[[int], ir.Value]


class RowFormat(NamedTuple):
    """How entries of one storage format get into shared memory.

    Attributes:
        row_bytes: size of an entry.
        load: emits the loads of a thread's share of a row, or the whole copy by cp.async.
        store: emits the conversion and the stores of what was loaded; None after cp.async.
        ahead: rows that a thread loads before it stores one: what its registers hold.
    """

    row_bytes: int
    load: Callable[[_Piece], list[ir.Value]]
    store: Callable[[_Piece, list[ir.Value]], None] | None
    ahead: int


def column_tile_offset(tile: int) -> tuple[bool, int]:
    """Whether column tile ``tile`` is the rope's, and its byte offset in the first row of tiles.

    The latent part is two matrices of 256 columns, one per warpgroup that multiplies by it.
    """
    if tile == ROPE_TILE:
        return True, 0
    half, place = divmod(tile, LATENT_HALF // TILE_COLUMNS)
    return False, half * ROWS * LATENT_HALF * 2 + place * TILE_BYTES


def step_offset(step: int, columns: int) -> int:
    """Byte distance of a thread's row of step ``step`` from its first."""
    return int(piece_offset(step * _STEP_ROWS, 0, columns))


def entry_numbers(
    entries: Any, row: Int[Array, ""], first: Int[Array, ""], last: Int[Array, ""]
) -> Int[Array, "512"]:
    """Each thread's four numbers ``entries[row, min(first + its rows, last)]``.

    Separate from the copy, so that these loads are under way while the producer still waits for
    room. Places after ``last`` repeat the last one: what stands there is never read, and the
    products of its probability 0 are with values that are in use anyway.

    Args:
        entries: [N, K] int32 in global memory.
        row: n.
        first: place of the block's first entry.
        last: last valid place.
    """
    width = entries.shape[1]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), _SCALAR, _SCALAR, _SCALAR),
        return_type=plgpu.ShapeDtypeStruct((ROWS * TILE_PIECES,), jnp.int32, layout=_NUMBERS),
    )
    def read(
        _context: object, table: ir.Value, row: Any, first: Any, last: Any
    ) -> mgpu.FragmentedArray:
        start = _advanced(_global(table), (Word.of_scalar(row) * width).wide(), 4)
        place = Word.of_scalar(first) + Word.thread() // TILE_PIECES
        numbers = []
        for step in range(_STEPS):
            at = (place + step * _STEP_ROWS).at_most(Word.of_scalar(last))
            numbers.append(llvm.load(signless(32), _advanced(start, at.wide(), 4)))
        packed = vector.from_elements(_vector(_STEPS, signless(32)), numbers)
        return mgpu.FragmentedArray(
            _registers=np.array([packed], dtype=object),
            _layout=_NUMBERS.to_mgpu(),
            _is_signed=True,
        )

    return read(entries, row, first, last)


def start_gather(
    storage_format: str,
    pool: Any,
    plane: Int[Array, ""],
    numbers: Int[Array, "512"],
    latent: Any,
    rope: Any,
) -> None:
    """Copy the 64 entries of ``numbers`` (asynchronously, for some formats: see ``end_gather``).

    Args:
        storage_format: a key of ``ROW_FORMATS``.
        pool: [planes, pages, page_size, entry_size] in global memory.
        plane: which plane ``numbers`` count in.
        numbers: from ``entry_numbers``.
        latent: [2, 64, 256] bfloat16 in shared memory, ``SWIZZLED``.
        rope: [64, 64], likewise.
    """
    _, pages, page_size, _ = pool.shape
    form = ROW_FORMATS[storage_format]
    swizzled = plgpu.RefType(SWIZZLED)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR, _NUMBERS, swizzled, swizzled))
    def copy(
        _context: object, pool: ir.Value, plane: Any, numbers: Any, latent: ir.Value, rope: ir.Value
    ) -> None:
        lane, row = Word.thread() % TILE_PIECES, Word.thread() // TILE_PIECES
        # 64 bits from here on: a pool is larger than 4 GiB.
        plane_start = arith.muli(Word.of_scalar(plane).wide(), _wide(pages * page_size))
        latent_start = _shared(latent, piece_offset(row, lane, LATENT_HALF))
        rope_start = _shared(rope, piece_offset(row, lane, TILE_COLUMNS))
        pieces = []
        for step in range(_STEPS):

            def target(tile: int, step: int = step) -> ir.Value:
                is_rope, offset = column_tile_offset(tile)
                if is_rope:
                    return _offset(rope_start, offset + step_offset(step, TILE_COLUMNS))
                return _offset(latent_start, offset + step_offset(step, LATENT_HALF))

            number = vector.extract(numbers.registers.item(), [], [step])
            entry = arith.addi(plane_start, Word(number).wide())
            pieces.append(_Piece(_advanced(_global(pool), entry, form.row_bytes), lane, target))
        _copy_pieces(form, pieces)

    copy(pool, plane, numbers, latent, rope)


def end_gather(storage_format: str) -> None:
    """Wait until what this warpgroup's threads copied is in shared memory and wgmma may read it."""
    if ROW_FORMATS[storage_format].store is None:

        @plgpu.inline_mgpu()
        def wait(_context: object) -> None:
            nvvm.cp_async_wait_group(0)

        wait()
    plgpu.commit_smem()


def _copy_pieces(form: RowFormat, pieces: list[_Piece]) -> None:
    if form.store is None:
        for piece in pieces:
            form.load(piece)
        nvvm.cp_async_commit_group()
        return
    loaded = [form.load(piece) for piece in pieces[: form.ahead]]
    for step, piece in enumerate(pieces):
        form.store(piece, loaded[step])
        # The assembler moves later loads up across it no more: all rows' at once would spill.
        nvvm.bar_warp_sync(Word(-1).value)
        if step + form.ahead < len(pieces):
            loaded.append(form.load(pieces[step + form.ahead]))


def _copy_bfloat16(piece: _Piece) -> list[ir.Value]:
    source = _advanced(piece.row, piece.lane.wide(), 16)
    for tile in range(LATENT_TILES + 1):
        nvvm.cp_async_shared_global(
            piece.target(tile),
            _offset(source, tile * TILE_COLUMNS * 2),
            16,
            nvvm.LoadCacheModifierKind.CG,  # not through L1: nothing is read twice by one SM
        )
    return []


def _load_float32(piece: _Piece) -> list[ir.Value]:
    source = _advanced(piece.row, piece.lane.wide(), 32)
    return [
        llvm.load(
            _vector(4, ir.F32Type.get()), _offset(source, tile * TILE_COLUMNS * 4 + 16 * half)
        )
        for tile in range(LATENT_TILES + 1)
        for half in range(2)
    ]


def _store_float32(piece: _Piece, loaded: list[ir.Value]) -> None:
    for tile in range(LATENT_TILES + 1):
        llvm.store(_rounded(loaded[2 * tile], loaded[2 * tile + 1]), piece.target(tile))


# fp8_ds_mla: 512 e4m3 values, 4 float32 scales (one per 128 values), 64 bfloat16 values.
def _load_fp8_ds_mla(piece: _Piece) -> list[ir.Value]:
    eight, four = _vector(2, signless(32)), _vector(4, signless(32))
    source = _advanced(piece.row, piece.lane.wide(), 8)
    latent = [
        llvm.load(eight, _offset(source, tile * TILE_COLUMNS)) for tile in range(LATENT_TILES)
    ]
    scales = llvm.load(_vector(4, ir.F32Type.get()), _offset(piece.row, 512))
    rope = llvm.load(four, _offset(_advanced(piece.row, piece.lane.wide(), 16), 512 + 16))
    return [*latent, scales, rope]


def _store_fp8_ds_mla(piece: _Piece, loaded: list[ir.Value]) -> None:
    *latent, scales, rope = loaded
    llvm.store(rope, piece.target(ROPE_TILE))
    for tile, bits in enumerate(latent):
        scale = vector.extract(scales, [], [tile * TILE_COLUMNS // 128])
        values = [_scaled(vector.extract(bits, [], [word]), scale) for word in range(2)]
        llvm.store(_rounded(*values), piece.target(tile))


def _scaled(word: ir.Value, scale: ir.Value) -> ir.Value:
    """Four e4m3 values times ``scale``, as float32: exact up to the product's own rounding."""
    float32 = ir.F32Type.get()
    pairs = []
    for half in (word, arith.shrui(word, Word(16).value)):
        # Hopper converts e4m3 to float16 only; that holds every e4m3 value exactly.
        pair = instruction(
            "cvt.rn.f16x2.e4m3x2 $0, $1;",
            "=r,h",
            [arith.trunci(signless(16), half)],
            signless(32),
        )
        halves = vector.bitcast(
            _vector(2, ir.F16Type.get()), vector.from_elements(_vector(1, signless(32)), [pair])
        )
        pairs.append(arith.extf(_vector(2, float32), halves))
    four = vector.shuffle(pairs[0], pairs[1], list(range(4)))
    return arith.mulf(four, vector.broadcast(four.type, scale))


def _rounded(low: ir.Value, high: ir.Value) -> ir.Value:
    """Two times four float32 values as 16 bytes of bfloat16, rounded to nearest even."""
    eight = vector.shuffle(low, high, list(range(8)))
    return vector.bitcast(
        _vector(4, signless(32)), arith.truncf(_vector(8, ir.BF16Type.get()), eight)
    )


def _vector(size: int, element: ir.Type) -> ir.Type:
    return ir.VectorType.get((size,), element)


def _wide(number: int) -> ir.Value:
    return arith.constant(signless(64), number)


def _global(memref: ir.Value) -> ir.Value:
    """The start of an operand as a pointer into global memory."""
    return llvm.addrspacecast(llvm.PointerType.get(address_space=1), mgpu.utils.memref_ptr(memref))


def _shared(memref: ir.Value, offset: Word) -> ir.Value:
    return mgpu.utils.getelementptr(mgpu.utils.memref_ptr(memref), [offset.value], signless(8))


def _offset(pointer: ir.Value, size: int) -> ir.Value:
    return mgpu.utils.getelementptr(pointer, [size], signless(8))


def _advanced(pointer: ir.Value, number: ir.Value, size: int) -> ir.Value:
    """``pointer`` plus a 64-bit number of objects of ``size`` bytes."""
    offset = arith.muli(number, _wide(size))
    return mgpu.utils.getelementptr(pointer, [offset], signless(8))


ROW_FORMATS: Mapping[str, RowFormat] = {
    "bfloat16": RowFormat(576 * 2, _copy_bfloat16, None, ahead=4),
    "float32": RowFormat(576 * 4, _load_float32, _store_float32, ahead=1),
    "fp8_ds_mla": RowFormat(512 + 4 * 4 + 64 * 2, _load_fp8_ds_mla, _store_fp8_ds_mla, ahead=2),
}
