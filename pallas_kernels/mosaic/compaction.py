"""Writes out, in ascending order, where the chosen entries of a row are.

512 threads share one chunk of a row. Each of the 16 warps owns a run of consecutive entries, counts
what it will write, learns what the warps before it will write, and then goes through its run once
more, 128 entries a turn, four to a lane. Counts of the two kinds of entries (above the threshold,
tied with it) travel in the halves of one word, which one scan over the lanes sums for both.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, scf, vector

from pallas_kernels.mosaic.ordered_bits import NO_SCORE
from pallas_kernels.mosaic.ptx import instruction
from pallas_kernels.mosaic.warp_totals import WARPS
from pallas_kernels.mosaic.word import Word, signless

_LANES = 32
_VECTOR = 4  # entries a lane takes per turn: one load of 16 bytes
_TURN = _LANES * _VECTOR
_SCALAR = plgpu.Layout.WG_SPLAT(())
_FIRST_LANES = (1, 2, 4, 8, 16)
# The value of the lane that many places below; 0 where there is none.
_SHIFT_UP = """{{
.reg .pred inside;
shfl.sync.up.b32 $0|inside, $1, {distance}, 0, 0xffffffff;
@!inside mov.b32 $0, 0;
}}"""


class Chunk(NamedTuple):
    """What to choose from ``bits[row, first : first + entries]``; scalars of the kernel.

    Entries at or above ``high`` are chosen, and of those from ``low`` up to ``high`` as many of the
    first as there is room for.

    Attributes:
        row: row of ``bits``.
        first: the chunk's first entry; entries are read in vectors of four.
        entries: how many of the chunk's entries count, at most 32768.
        low: least bits that may be chosen.
        high: least bits that are chosen in any case.
        above: how many entries are at or above ``high``.
    """

    row: Any
    first: Any
    entries: Any
    low: Any
    high: Any
    above: Any


class Target(NamedTuple):
    """Where the choice goes; references to whole arrays in global memory.

    Attributes:
        positions: ``[rows, length]``; receives ``origins[row, entry]``, or ``entry`` itself.
        bits: ``[rows, length]`` for the chosen bits, or None.
        place: first place in the row.
        places: how many places to fill; those without an entry get position 0 and NO_SCORE.
    """

    positions: Any
    bits: Any
    place: Any
    places: int


def compact(
    chunk: Chunk, bits: Any, origins: Any, target: Target, warp_counts: Any, *, topk: int
) -> None:
    """Write the chunk's choice of at most ``topk`` entries; run by all 512 threads together.

    Args:
        chunk: what to choose.
        bits: ``[rows, length]``, ordered bits in global memory.
        origins: ``[rows, length]``, positions that the entries stand for, or None.
        target: where to write.
        warp_counts: 16 words of shared memory.
        topk: most entries to choose.
    """
    refs = [bits, target.positions, warp_counts]
    refs += [ref for ref in (origins, target.bits) if ref is not None]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),) * len(refs) + (_SCALAR,) * (len(Chunk._fields) + 1)
    )
    def write(_context: object, *operands: Any) -> None:
        memrefs, scalars = operands[: len(refs)], operands[len(refs) :]
        row, first, entries, low, high, above, place = map(_scalar, scalars)
        extra = list(memrefs[3:])
        base = Word(row) * bits.shape[1] + Word(first)
        source = _Source(
            bits=_pointer(memrefs[0], base),
            origins=None if origins is None else _pointer(extra.pop(0), base),
            first=Word(first),
            entries=entries,
            low=low,
            high=high,
        )
        out = Word(row) * target.positions.shape[1] + Word(place)
        sink = _Sink(
            positions=_pointer(memrefs[1], out),
            bits=None if target.bits is None else _pointer(extra.pop(0), out),
            room=arith.subi(_constant(topk), above),
        )
        _write(source, sink, mgpu.utils.memref_ptr(memrefs[2]))
        _fill(sink, Word(entries).at_most(topk), target.places)

    write(*refs, *chunk, target.place)


def interpreted_compact(
    chunk: Chunk, bits: Any, origins: Any, target: Target, *, topk: int, length: int
) -> None:
    """The same by one warpgroup, for the interpreter, which runs no inline code."""
    part = chunk.row, pl.ds(chunk.first, length)
    entry = jnp.arange(length, dtype=jnp.int32)
    values = bits[part]
    counts = entry < chunk.entries
    above = counts & (values >= chunk.high)
    tied = counts & (values >= chunk.low) & (values < chunk.high)
    chosen = above | (tied & (jnp.cumsum(tied) <= topk - chunk.above))
    # Place p holds the first entry up to which more than p are chosen.
    place = jnp.arange(target.places, dtype=jnp.int32)
    found = jnp.sum(jnp.cumsum(chosen)[None, :] <= place[:, None], axis=1, dtype=jnp.int32)
    used = place < jnp.minimum(chunk.entries, topk)
    index = jnp.minimum(found, length - 1)
    named = chunk.first + index if origins is None else origins[part][index]
    places = chunk.row, pl.ds(target.place, target.places)
    target.positions[places] = jnp.where(used, named, 0)
    if target.bits is not None:
        target.bits[places] = jnp.where(used, values[index], jnp.int32(NO_SCORE))


class _Source(NamedTuple):
    bits: ir.Value  # pointers to the chunk's first entry
    origins: ir.Value | None
    first: Word
    entries: ir.Value
    low: ir.Value
    high: ir.Value


class _Sink(NamedTuple):
    positions: ir.Value  # pointers to the first place
    bits: ir.Value | None
    room: ir.Value  # for tied entries


class _Entry(NamedTuple):
    index: Word
    bits: ir.Value
    above: ir.Value  # 0 or 1, 32 bits
    tied: ir.Value


def _write(source: _Source, sink: _Sink, warp_counts: ir.Value) -> None:
    thread = Word(mgpu.utils.thread_idx())
    lane, warp = thread % _LANES, thread // _LANES
    run = (Word(source.entries) + (WARPS * _TURN - 1)) // (WARPS * _TURN) * _TURN
    start = warp * run + lane * _VECTOR

    def count(offset: Word, total: Word) -> Word:
        return total + _both(_load_entries(source, start + offset))

    counted = _sum_of_lanes(_loop(run, _TURN, count, Word(0)))

    def publish() -> None:
        llvm.store(counted.value, _element(warp_counts, warp))

    _when(_equal(lane, 0), publish)
    gpu.barrier()
    other = _less(lane, warp)
    known = llvm.load(signless(32), _element(warp_counts, lane % WARPS))
    before = _sum_of_lanes(Word(arith.select(other, known, _constant(0))))

    def write(offset: Word, before_turn: Word) -> Word:
        entries = _load_entries(source, start + offset)
        own = _both(entries)
        upto = own
        for distance in _FIRST_LANES:
            upto = upto + _shift_up(upto, distance)
        before_lane = before_turn + upto + _negated(own)
        _write_entries(source, sink, entries, before_lane)
        return before_turn + _last_lane(upto)

    _loop(run, _TURN, write, before)


def _write_entries(source: _Source, sink: _Sink, entries: list[_Entry], before: Word) -> None:
    above, tied = before % (1 << 16), before // (1 << 16)
    for entry in entries:
        is_above = arith.cmpi(arith.CmpIPredicate.ne, entry.above, _constant(0))
        is_tied = arith.cmpi(arith.CmpIPredicate.ne, entry.tied, _constant(0))
        fits = arith.cmpi(arith.CmpIPredicate.slt, tied.value, sink.room)
        place = above + tied.at_most(Word(sink.room))

        def store(entry: _Entry = entry, place: Word = place) -> None:
            position = source.first + entry.index
            if source.origins is not None:
                position = Word(llvm.load(signless(32), _element(source.origins, entry.index)))
            llvm.store(position.value, _element(sink.positions, place))
            if sink.bits is not None:
                llvm.store(entry.bits, _element(sink.bits, place))

        _when(arith.ori(is_above, arith.andi(is_tied, fits)), store)
        above, tied = above + Word(entry.above), tied + Word(entry.tied)


def _fill(sink: _Sink, used: Word, places: int) -> None:
    """Give the places after ``used`` something harmless."""

    def store(offset: Word, carry: Word) -> Word:
        llvm.store(_constant(0), _element(sink.positions, used + thread + offset))
        if sink.bits is not None:
            llvm.store(_constant(NO_SCORE), _element(sink.bits, used + thread + offset))
        return carry

    thread = Word(mgpu.utils.thread_idx())
    taken = used + thread
    left = arith.maxsi(arith.subi(_constant(places), taken.value), _constant(0))
    _loop(Word(left), WARPS * _LANES, store, Word(0))


def _load_entries(source: _Source, index: Word) -> list[_Entry]:
    four = ir.VectorType.get((_VECTOR,), signless(32))
    loaded = llvm.load(four, _element(source.bits, index))
    entries = []
    predicate = arith.CmpIPredicate
    for lane in range(_VECTOR):
        bits = vector.extract(loaded, dynamic_position=[], static_position=[lane])
        counts = arith.cmpi(predicate.ult, (index + lane).value, source.entries)
        reaches = arith.andi(counts, arith.cmpi(predicate.sge, bits, source.low))
        high = arith.cmpi(predicate.sge, bits, source.high)
        above = arith.andi(reaches, high)
        tied = arith.andi(reaches, arith.cmpi(predicate.slt, bits, source.high))
        widen = signless(32)
        entries.append(
            _Entry(index + lane, bits, arith.extui(widen, above), arith.extui(widen, tied))
        )
    return entries


def _both(entries: list[_Entry]) -> Word:
    """Counts of a lane's entries: those above in the low half, those tied in the high half."""
    total = Word(0)
    for entry in entries:
        total = total + Word(entry.above) + Word(entry.tied) * (1 << 16)
    return total


def _loop(end: Word, step: int, body: Callable[[Word, Word], Word], carry: Word) -> Word:
    """``for offset in range(0, end, step): carry = body(offset, carry)``."""
    loop = scf.ForOp(_constant(0), end.value, _constant(step), [carry.value])
    with ir.InsertionPoint(loop.body):
        result = body(Word(loop.induction_variable), Word(loop.inner_iter_args[0]))
        scf.yield_([result.value])
    return Word(loop.results[0])


def _when(condition: ir.Value, body: Callable[[], None]) -> None:
    branch = scf.IfOp(condition)
    with ir.InsertionPoint(branch.then_block):
        body()
        scf.yield_([])


def _sum_of_lanes(word: Word) -> Word:
    return _assembly("redux.sync.add.s32 $0, $1, 0xffffffff;", word)


def _shift_up(word: Word, distance: int) -> Word:
    return _assembly(_SHIFT_UP.format(distance=distance), word)


def _last_lane(word: Word) -> Word:
    return _assembly("shfl.sync.idx.b32 $0, $1, 31, 31, 0xffffffff;", word)


def _assembly(text: str, word: Word) -> Word:
    return Word(instruction(text, "=r,r", [word.value], signless(32), has_side_effects=True))


def _negated(word: Word) -> Word:
    return Word(arith.subi(_constant(0), word.value))


def _equal(left: Word, right: int) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.eq, left.value, _constant(right))


def _less(left: Word, right: Word) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.ult, left.value, right.value)


def _constant(value: int) -> ir.Value:
    return arith.constant(signless(32), value)


def _scalar(value: Any) -> ir.Value:
    return value.registers.item() if isinstance(value, mgpu.FragmentedArray) else value


def _element(pointer: ir.Value, index: Word) -> ir.Value:
    return mgpu.utils.getelementptr(pointer, [index.wide()], signless(32))


def _pointer(memref: ir.Value, index: Word) -> ir.Value:
    """To element ``index`` of an array of 32-bit words in global memory."""
    generic = mgpu.utils.memref_ptr(memref)
    return _element(llvm.addrspacecast(llvm.PointerType.get(address_space=1), generic), index)
