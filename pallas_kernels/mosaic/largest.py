"""Exact top-k of rows on Hopper, without a sort: positions ascending, ties to the lowest position.

A program takes one chunk of one row. Its 512 threads hold the chunk in registers and look for the
K-th largest by bisection on ordered bits; ``compaction`` then writes out what reaches it. A row
longer than a chunk gives a row of candidates, K per chunk, and goes through the same kernel again.
Programs past a row's end stop at once, and a chunk searches as many quarters as the row fills.

What it costs for a full chunk of 16384 entries: 32 entries a thread, compare and add, are about 280
cycles per count for the 4 warps of a scheduler; the sum over 512 threads adds the latency of one
barrier, which a second program on the multiprocessor hides. The search starts at the maximum with
growing steps and ends as soon as exactly K entries reach the lower bound: about 16 counts where
scores differ, 25 to 37 at a plateau, so some 5,000 cycles. Compaction takes as long again: about
70 us for 192 rows of 131072 entries on 132 multiprocessors (estimated; no device was at hand). A
radix histogram in shared memory would serialise: scores of one row share their exponents.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from pallas_kernels.mosaic import bridge
from pallas_kernels.mosaic.compaction import Chunk, Target, compact, interpreted_compact
from pallas_kernels.mosaic.ordered_bits import NO_SCORE
from pallas_kernels.mosaic.warp_totals import (
    WARPGROUP_WARPS,
    WARPS,
    Operation,
    interpreted_warp_totals,
    store_warp_totals,
    total_of_warps,
)

UNIT = 2048  # a chunk is a multiple: 512 threads, vectors of four entries
MAX_CHUNK = 16384  # entries; 32 registers a thread, so that two programs share a multiprocessor
_WARPGROUPS = 4
_VECTOR = 4
_FIRST_STEP = 1 << 22  # half an octave below the maximum
_LAST_STEP = 1 << 30
_REDUCE = {"add": jnp.sum, "max": jnp.max}


class _Plan(NamedTuple):
    chunk: int  # entries per program
    chunks: int  # per row
    topk: int
    places: int  # per chunk of the result
    interpret: bool


class _Here(NamedTuple):
    """The program's place; read before any branch, where the interpreter can still cache it."""

    warpgroup: Any
    row: Any
    first: Any  # first entry of the chunk
    entries: Any  # of the chunk


class _Bounds(NamedTuple):
    """The K-th largest is at least ``low`` and below ``high``."""

    low: Any
    high: Any
    reach_low: Any  # how many entries are at least ``low``: K or more
    reach_high: Any  # fewer than K
    step: Any  # how far below ``high`` to look while nothing is known of ``low``
    counts: Any  # how many sums over the program there were


def padded_length(length: int) -> int:
    """The least row length that ``largest_of_rows`` takes for rows of that many entries."""
    chunks = math.ceil(length / MAX_CHUNK)
    return chunks * UNIT * math.ceil(length / (chunks * UNIT))


def largest_of_rows(
    bits: Int[Array, "rows length"],
    entries: Int[Array, " rows"],
    *,
    topk: int,
    interpret: bool = False,
) -> Int[Array, "rows topk"]:
    """Positions of the ``topk`` largest of each row's first ``entries``.

    Args:
        bits: of ``ordered_bits``; anything may stand after a row's entries. ``length`` must be
            one that ``padded_length`` gives.
        entries: per row; a row with no more than ``topk`` gives all of them, then zeros.
        topk: at most MAX_CHUNK / 2.
        interpret: run in the interpreter.
    """
    origins = None
    while (chunks := math.ceil(bits.shape[1] / MAX_CHUNK)) > 1:
        chunk = bits.shape[1] // chunks
        origins, bits = _choose(
            bits, entries, origins, chunks=chunks, topk=topk, interpret=interpret
        )
        entries = (entries + (chunk - 1)) // chunk * _places(topk)
    (positions,) = _choose(bits, entries, origins, chunks=1, topk=topk, interpret=interpret)
    return positions


def candidate_length(length: int, topk: int) -> int:
    """Length of the rows of candidates that rows of that length give."""
    return padded_length(math.ceil(length / MAX_CHUNK) * _places(topk))


def _places(topk: int) -> int:
    """Candidates per chunk, in whole vectors."""
    return -(-topk // _VECTOR) * _VECTOR


def _choose(
    bits: Int[Array, "rows length"],
    entries: Int[Array, " rows"],
    origins: Int[Array, "rows length"] | None,
    *,
    chunks: int,
    topk: int,
    interpret: bool,
) -> tuple[Array, ...]:
    """Positions, and bits where there is more than one chunk, of each chunk's largest."""
    rows, length = bits.shape
    last = chunks == 1
    plan = _Plan(
        chunk=length // chunks,
        chunks=chunks,
        topk=topk,
        places=topk if last else _places(topk),
        interpret=interpret,
    )
    width = topk if last else candidate_length(length, topk)
    chosen = jax.ShapeDtypeStruct((rows, width), jnp.int32)
    launch = bridge.kernel(
        functools.partial(_kernel, plan, origins is not None),
        name="largest_of_rows",
        out_type=(chosen,) if last else (chosen, chosen),
        grid=(rows, chunks),
        grid_names=("row", "chunk"),
        num_threads=_WARPGROUPS,
        thread_name="warpgroup",
        scratch_types={
            "totals": plgpu.SMEM((2, WARPS), jnp.int32),
            "warp_counts": plgpu.SMEM((WARPS,), jnp.int32),
            "all_stored": plgpu.Barrier(num_arrivals=_WARPGROUPS),
        },
        interpret=interpret,
    )
    return launch(bits, entries, *(() if origins is None else (origins,)))


def _kernel(
    plan: _Plan, has_origins: bool, bits: Any, entries: Any, *refs: Any, **scratch: Any
) -> None:
    origins, *results = refs if has_origins else (None, *refs)
    number, row = lax.axis_index("chunk"), lax.axis_index("row")
    first = number * plan.chunk
    here = _Here(
        warpgroup=lax.axis_index("warpgroup"),
        row=row,
        first=first,
        entries=jnp.clip(entries[row] - first, 0, plan.chunk),
    )

    @pl.when((here.entries > 0) | (number == 0))
    def _() -> None:
        search = functools.partial(_search, plan, bits, here, scratch)
        nothing = jnp.int32(NO_SCORE)
        low, high, above = lax.cond(
            here.entries > plan.topk, search, lambda: (nothing, nothing, here.entries)
        )
        chunk = Chunk(here.row, here.first, here.entries, low, high, above)
        target = Target(
            positions=results[0],
            bits=results[1] if len(results) > 1 else None,
            place=number * plan.places,
            places=plan.places,
        )
        if not plan.interpret:
            compact(chunk, bits, origins, target, scratch["warp_counts"], topk=plan.topk)
            return

        @pl.when(here.warpgroup == 0)
        def _() -> None:
            interpreted_compact(chunk, bits, origins, target, topk=plan.topk, length=plan.chunk)


def _search(plan: _Plan, bits: Any, here: _Here, scratch: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Bounds of the K-th largest of the chunk's entries, of which there are more than K."""
    share = plan.chunk // _WARPGROUPS
    sizes = sorted({_quarter(share, part) for part in range(1, 5)})
    branches = [functools.partial(_bisect, plan, size, bits, here, scratch) for size in sizes]
    branch = jnp.int32(0)
    for size in sizes[:-1]:
        branch += jnp.where(here.entries > size * _WARPGROUPS, jnp.int32(1), jnp.int32(0))
    return lax.switch(branch, branches)


def _quarter(share: int, part: int) -> int:
    """Entries per warpgroup that cover ``part`` quarters of its share."""
    unit = UNIT // _WARPGROUPS
    return -(-share * part // (4 * unit)) * unit


def _bisect(
    plan: _Plan, size: int, bits: Any, here: _Here, scratch: dict[str, Any]
) -> tuple[Any, Any, Any]:
    """The search with ``size`` entries per warpgroup in registers."""
    values = _load_share(plan, size, bits, here)
    combine = functools.partial(_combine, plan, here, scratch["totals"], scratch["all_stored"])
    highest = combine(values, jnp.int32(0), "max")

    def count(least: Any, counts: Any) -> Any:
        reached = jnp.where(values >= least, jnp.int32(1), jnp.int32(0))
        return combine(reached, counts, "add")

    def undecided(bounds: _Bounds) -> Any:
        return (bounds.high - bounds.low != 1) & (bounds.reach_low != plan.topk)

    def halve(bounds: _Bounds) -> _Bounds:
        # The distance may not fit an int32; its half as an unsigned number does.
        half = lax.shift_right_logical(bounds.high - bounds.low, jnp.int32(1))
        middle = bounds.high - jnp.minimum(half, bounds.step)
        reach = count(middle, bounds.counts)
        enough = reach >= plan.topk
        return _Bounds(
            low=jnp.where(enough, middle, bounds.low),
            high=jnp.where(enough, bounds.high, middle),
            reach_low=jnp.where(enough, reach, bounds.reach_low),
            reach_high=jnp.where(enough, bounds.reach_high, reach),
            step=jnp.minimum(bounds.step, jnp.int32(_LAST_STEP // 2)) * 2,
            counts=bounds.counts + 1,
        )

    start = _Bounds(
        low=jnp.int32(NO_SCORE),
        high=highest + 1,
        reach_low=here.entries,
        reach_high=jnp.int32(0),
        step=jnp.int32(_FIRST_STEP),
        counts=jnp.int32(1),
    )
    found = lax.while_loop(undecided, halve, start)
    return found.low, found.high, found.reach_high


def _load_share(plan: _Plan, size: int, bits: Any, here: _Here) -> Array:
    """This warpgroup's part of the chunk; NO_SCORE after the row's entries."""
    begin = here.warpgroup * size
    index = here.row, pl.ds(here.first + begin, size)
    if plan.interpret:  # layouts mean nothing there
        values, entry = bits[index], lax.iota(jnp.int32, size)
    else:
        layout = plgpu.Layout.WG_STRIDED((size,), vec_size=_VECTOR)
        values = bridge.load(bits, index, layout=layout, optimized=False)
        entry = plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout)
    return jnp.where(entry + begin < here.entries, values, jnp.int32(NO_SCORE))


def _combine(
    plan: _Plan,
    here: _Here,
    totals: Any,
    all_stored: Any,
    values: Array,
    number: Any,
    operation: Operation,
) -> Any:
    """Sum or maximum of all 512 threads' values, the same for all of them.

    Two slots suffice: nobody writes a slot again before all have read the other one.
    """
    slot = lax.rem(number, jnp.int32(2))
    if plan.interpret:
        share = pl.ds(here.warpgroup * WARPGROUP_WARPS, WARPGROUP_WARPS)
        totals[slot, share] = interpreted_warp_totals(values, operation)
    else:
        store_warp_totals(values, totals.at[slot], operation, vector_size=_VECTOR)
    plgpu.barrier_arrive(all_stored)
    plgpu.barrier_wait(all_stored)
    if plan.interpret:  # one read; every access costs the interpreter milliseconds
        return _REDUCE[operation](totals[slot])
    return total_of_warps(totals.at[slot], operation)
