"""One thread block of sparse_mla on Hopper: a row's 64 heads over one share of its keys.

The keys come in blocks of 64. One warpgroup gathers them into two stages; two compute: both need
all 64 x 64 scores (S = Q K^T) and each multiplies its own 256 of the 512 latent columns
(O += P V), P straight from registers. The two take turns on the tensor core, one computing its
softmax meanwhile.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.formats import format_of
from pallas_kernels.mosaic import bridge
from pallas_kernels.mosaic.opaque_zero import opaque_zero
from pallas_kernels.mosaic.row_gather import (
    LATENT_HALF,
    SWIZZLED,
    end_gather,
    entry_numbers,
    start_gather,
)
from pallas_kernels.sparse_mla.config import KEYS_PER_BLOCK

HEADS = 64  # rows of a wgmma
LATENT = 2 * LATENT_HALF
ROPE = 64
WARPGROUPS = 3
_GATHERING = 2  # the last; 0 and 1 compute
_STAGES = 2
# Per thread: (2 * 208 + 96) * 128 = 65536. A computing thread holds 128 of its output, 32 scores
# and 16 probabilities; a gathering one the pieces it converts.
_COMPUTE_REGISTERS = 208
_GATHER_REGISTERS = 96
_MASKED = -1e30


class Call(NamedTuple):
    """Static facts of one call."""

    splits: int
    scale: float
    storage_format: str
    interpret: bool


class Operands(NamedTuple):
    """References in global memory."""

    q_latent: Any  # [N, 64, 512] bfloat16
    q_rope: Any  # [N, 64, 64] bfloat16
    entries: Any  # [N, K] int32
    count: Any  # [N] int32
    plane: Any  # [1] int32
    pool: Any  # [planes, pages, page_size, entry_size] storage bits
    parts: Any  # [N, splits, 64, 512] float32, result
    log_sums: Any  # [N, splits, 64] float32, result: log2 of the share's sum of exponentials


class Scratch(NamedTuple):
    """References in shared memory; barriers last."""

    q_latent: Any  # [2, 64, 256]: halves of the columns
    q_rope: Any  # [1, 64, 64]
    latent: Any  # [stage, 2, 64 keys, 256]
    rope: Any  # [stage, 64 keys, 64]
    queries_ready: Any
    full: Any
    empty: Any
    turn: Any


def scratch_types() -> dict[str, Any]:
    """What ``Scratch`` refers to."""
    latent, rope = (KEYS_PER_BLOCK, LATENT_HALF), (KEYS_PER_BLOCK, ROPE)
    return {
        "q_latent": plgpu.SMEM((2, HEADS, LATENT_HALF), jnp.bfloat16, transforms=SWIZZLED),
        "q_rope": plgpu.SMEM((1, HEADS, ROPE), jnp.bfloat16, transforms=SWIZZLED),
        "latent": plgpu.SMEM((_STAGES, 2, *latent), jnp.bfloat16, transforms=SWIZZLED),
        "rope": plgpu.SMEM((_STAGES, *rope), jnp.bfloat16, transforms=SWIZZLED),
        "queries_ready": plgpu.Barrier(num_arrivals=3),
        "full": plgpu.Barrier(num_barriers=_STAGES),
        "empty": plgpu.Barrier(num_arrivals=2, num_barriers=_STAGES),
        "turn": plgpu.Barrier(num_arrivals=2),
    }


class _Share(NamedTuple):
    """The keys of one thread block: places ``first .. first + keys - 1`` of row ``row``."""

    row: Int[Array, ""]
    first: Int[Array, ""]
    keys: Int[Array, ""]
    blocks: Int[Array, ""]


def attend(call: Call, operands: Operands, scratch: Scratch) -> None:
    """What the thread block does, all three warpgroups of it."""
    row, split, group = (lax.axis_index(name) for name in ("row", "split", "warpgroup"))
    places = operands.entries.shape[1]
    count = jnp.clip(operands.count[row], 0, places)
    share_keys = _blocks(_blocks(count, KEYS_PER_BLOCK), call.splits) * KEYS_PER_BLOCK
    first = split * share_keys
    keys = jnp.clip(count - first, 0, share_keys)
    share = _Share(row, first, keys, _blocks(keys, KEYS_PER_BLOCK))

    @pl.when(group == _GATHERING)
    def _() -> None:
        _set_registers(_GATHER_REGISTERS, "decrease", call)
        _gather_share(call, operands, scratch, share)

    @pl.when(group < _GATHERING)
    def _() -> None:
        _set_registers(_COMPUTE_REGISTERS, "increase", call)
        _attend_share(call, operands, scratch, share, split, group)


def _gather_share(call: Call, operands: Operands, scratch: Scratch, share: _Share) -> None:
    """The gathering warpgroup.

    It announces a block before it waits for room for the next: while one block is computed the
    next is on its way, and no computing warpgroup waits for a block that has landed.
    """
    last = share.first + share.keys - 1

    def announce(index: Int[Array, ""]) -> None:
        _finish_gather(call)
        plgpu.barrier_arrive(scratch.full.at[lax.rem(index, _STAGES)])

    def gather_block(index: Int[Array, ""], carry: tuple[()]) -> tuple[()]:
        stage = lax.rem(index, _STAGES)
        first = share.first + index * KEYS_PER_BLOCK
        numbers = _numbers(call, operands, (share.row, first, last))
        pl.when(index > 0)(lambda: announce(index - 1))

        @pl.when(index >= _STAGES)
        def _() -> None:
            plgpu.barrier_wait(scratch.empty.at[stage])

        _begin_gather(call, operands, numbers, scratch.latent.at[stage], scratch.rope.at[stage])
        return carry

    lax.fori_loop(0, share.blocks, gather_block, ())
    pl.when(share.blocks > 0)(lambda: announce(share.blocks - 1))
    for stage in range(_STAGES):  # the interpreter insists on the last phase of every barrier

        @pl.when(share.blocks > stage)
        def _(stage: int = stage) -> None:
            plgpu.barrier_wait(scratch.empty.at[stage])


def _numbers(call: Call, operands: Operands, places: tuple[Any, Any, Any]) -> Array:
    """The entries at 64 places from ``first`` of a row; those after ``last`` repeat it."""
    row, first, last = places
    if not call.interpret:
        return entry_numbers(operands.entries, row, first, last)
    return operands.entries[row][jnp.minimum(first + jnp.arange(KEYS_PER_BLOCK), last)]


def _begin_gather(call: Call, operands: Operands, numbers: Array, latent: Any, rope: Any) -> None:
    plane = operands.plane[0]
    if not call.interpret:
        start_gather(call.storage_format, operands.pool, plane, numbers, latent, rope)
        return
    # The interpreter cannot run inline PTX, and is slow at single rows.
    decode = format_of(call.storage_format).decode_entries
    assert decode is not None, f"{call.storage_format=} has no single entries"
    entries = operands.pool[plane].reshape(-1, operands.pool.shape[-1])
    values = decode(entries[numbers]).astype(jnp.bfloat16)
    for half in range(2):
        latent[half] = values[:, half * LATENT_HALF : (half + 1) * LATENT_HALF]
    rope[...] = values[:, LATENT:]


def _finish_gather(call: Call) -> None:
    if call.interpret:
        plgpu.commit_smem()
    else:
        end_gather(call.storage_format)


def _attend_share(
    call: Call,
    operands: Operands,
    scratch: Scratch,
    share: _Share,
    split: Int[Array, ""],
    half: Int[Array, ""],
) -> None:
    """One computing warpgroup: all scores, and ``half`` of the latent columns of the result."""

    @pl.when(share.blocks > 0)
    def _() -> None:
        pl.when(half == 0)(lambda: _load_queries(operands, scratch, share.row))
        plgpu.barrier_wait(scratch.queries_ready)

    def take_turn() -> None:
        plgpu.barrier_arrive(scratch.turn)
        plgpu.barrier_wait(scratch.turn)

    # Warpgroup 1 lets 0 have the tensor core first; from then on they alternate.
    pl.when(half == 1)(take_turn)

    def attend_block(index: Int[Array, ""], carry: tuple[Array, Array, Array]) -> Any:
        total, highest, weight = carry
        stage = lax.rem(index, _STAGES)
        plgpu.barrier_wait(scratch.full.at[stage])
        scores = _scores(call, scratch, stage, take_turn) * (call.scale * math.log2(math.e))
        column = _columns(call)
        scores = jnp.where(column + index * KEYS_PER_BLOCK < share.keys, scores, _MASKED)
        new_highest = jnp.maximum(highest, scores.max(axis=1))
        shrink = jnp.exp2(highest - new_highest)
        probabilities = jnp.exp2(scores - _per_row(new_highest, scores.shape))
        weight = weight * shrink + probabilities.sum(axis=1)
        total = total * _per_row(shrink, total.shape)
        take_turn()
        values = scratch.latent.at[stage, half]
        total = _plus_product(call, total, probabilities.astype(jnp.bfloat16), values)
        plgpu.barrier_arrive(scratch.empty.at[stage])
        return total, new_highest, weight

    start = (
        _filled(call, (HEADS, LATENT_HALF), 0.0),
        _filled(call, (HEADS,), _MASKED),
        _filled(call, (HEADS,), 0.0),
    )
    total, highest, weight = lax.fori_loop(0, share.blocks, attend_block, start)
    pl.when(half == 0)(take_turn)
    inverse = jnp.where(weight > 0, 1.0 / weight, 0.0)
    columns = pl.ds(half * LATENT_HALF, LATENT_HALF)
    operands.parts[share.row, split, :, columns] = total * _per_row(inverse, total.shape)

    @pl.when(half == 0)
    def _() -> None:
        log_sum = jnp.where(weight > 0, highest + jnp.log2(weight), _MASKED)
        operands.log_sums[share.row, split] = log_sum


def _load_queries(operands: Operands, scratch: Scratch, row: Int[Array, ""]) -> None:
    for half in range(2):
        columns = pl.ds(half * LATENT_HALF, LATENT_HALF)
        plgpu.copy_gmem_to_smem(
            operands.q_latent.at[row, :, columns], scratch.q_latent.at[half], scratch.queries_ready
        )
    plgpu.copy_gmem_to_smem(operands.q_rope.at[row], scratch.q_rope.at[0], scratch.queries_ready)


def _scores(call: Call, scratch: Scratch, stage: Int[Array, ""], take_turn: Any) -> Array:
    """Q K^T over latent and rope columns, float32; the tensor core is free again on return."""
    if call.interpret:
        take_turn()
        total = jnp.dot(_wide(scratch.q_rope[0]), _wide(scratch.rope[stage]).T)
        for half in range(2):
            query, keys = scratch.q_latent[half], scratch.latent[stage, half]
            total = total + jnp.dot(_wide(query), _wide(keys).T)
        return total
    zero = opaque_zero()

    def multiply(accumulator: Any) -> Array:
        for half in range(2):
            keys = bridge.transposed(scratch.latent.at[stage, half])
            plgpu.wgmma(accumulator, scratch.q_latent.at[zero + half], keys)
        keys = bridge.transposed(scratch.rope.at[stage])
        plgpu.wgmma(accumulator, scratch.q_rope.at[zero], keys)
        take_turn()
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.ACC((HEADS, KEYS_PER_BLOCK), jnp.float32))


def _plus_product(call: Call, total: Array, probabilities: Array, values: Any) -> Array:
    """``total`` + P V."""
    if call.interpret:
        return total + jnp.dot(_wide(probabilities), _wide(values[...]))
    multiply: Any = pl.run_state(
        lambda accumulator: plgpu.wgmma(accumulator, probabilities, values)
    )
    return multiply(plgpu.ACC.init(total))


def _blocks(number: Int[Array, ""], size: int) -> Int[Array, ""]:
    """``number / size`` rounded up, for ``number`` > ``-size``."""
    return lax.div(number + (size - 1), jnp.int32(size))


def _per_row(vector: Float[Array, " H"], shape: tuple[int, ...]) -> Array:
    return lax.broadcast_in_dim(vector, shape, [0])


def _wide(matrix: Array) -> Array:
    return matrix.astype(jnp.float32)


def _set_registers(number: int, action: Any, call: Call) -> None:
    if not call.interpret:
        plgpu.set_max_registers(number, action=action)


def _filled(call: Call, shape: tuple[int, ...], value: float) -> Array:
    """A constant laid out like wgmma's results, or like one value per row of them."""
    constant = jnp.full(shape, value, jnp.float32)
    if call.interpret:
        return constant
    layout = plgpu.Layout.WGMMA if len(shape) == 2 else plgpu.Layout.WGMMA.reduce(1)
    return plgpu.layout_cast(constant, layout)


def _columns(call: Call) -> Int[Array, "64 64"]:
    shape = (HEADS, KEYS_PER_BLOCK)
    if call.interpret:
        return lax.broadcasted_iota(jnp.int32, shape, 1)
    return plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
