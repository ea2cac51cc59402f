"""expert_matmul for the CPU: assignments sorted by expert, cut into blocks, one matmul a block.

``lax.ragged_dot`` computes every expert for every row on CPU (and on H200); here the number of
blocks is dynamic, so the cost is that of the rows that are really routed.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.bits import cut_bits
from pallas_kernels.expert_matmul.weights import ExpertWeights
from pallas_kernels.fp8 import BlockScaled, scaled_product

MIN_BLOCK_ROWS = 8
MAX_BLOCK_ROWS = 64


class _Blocks(NamedTuple):
    """Where each block finds its expert and its rows in the sorted assignments."""

    order: Int[Array, " A"]  # sorted place -> assignment (row * X + choice)
    expert: Int[Array, " blocks"]
    start: Int[Array, " blocks"]  # first sorted place of the block
    end: Int[Array, " blocks"]  # one past the last sorted place of the block's expert
    used: Int[Array, ""]


def expert_matmul(
    x: Float[Array, "N D"],
    experts: Int[Array, "N X"],
    gates: Float[Array, "N X"],
    weights: ExpertWeights,
) -> Float[Array, "N D"]:
    """One matmul pair per block of rows that share an expert (see ``api``)."""
    rows, choices = experts.shape
    number, width = weights.experts, weights.width
    gate_up, down = weights.flat
    assignments = rows * choices
    block_rows = _block_rows(assignments, number)
    blocks = _plan_blocks(experts.reshape(-1), number, block_rows)

    def run_block(index: int | Int[Array, ""], outputs: Float[Array, "A D"]) -> Float[Array, "A D"]:
        places = blocks.start[index] + jnp.arange(block_rows)
        live = places < blocks.end[index]
        assignment = blocks.order[jnp.minimum(places, assignments - 1)]
        expert = weights.first + blocks.expert[index]
        both = _multiply(x[assignment // choices], gate_up, expert)
        hidden = jax.nn.silu(both[:, :width]) * both[:, width:]
        result = _multiply(hidden, down, expert).astype(jnp.float32)
        return outputs.at[jnp.where(live, assignment, assignments)].set(result, mode="drop")

    empty = jnp.zeros((assignments, x.shape[1]), jnp.float32)
    outputs = jax.lax.fori_loop(0, blocks.used, run_block, empty).reshape(rows, choices, -1)
    # An explicit sum in the order of the choices: the same bits wherever the row stands. where: a
    # dropped row's gate may be NaN.
    kept = experts < number
    total = jnp.zeros(x.shape, jnp.float32)
    for choice in range(choices):
        weighted = outputs[:, choice] * gates[:, choice, None]
        total += jnp.where(kept[:, choice, None], weighted, 0.0)
    return total


def _multiply(
    rows: Float[Array, "R inputs"],
    stack: Float[Array, "LE inputs outputs"] | BlockScaled,
    index: Int[Array, ""],
) -> Float[Array, "R outputs"]:
    """Times one matrix; only that one is brought to the rows' dtype if it has another."""
    if isinstance(stack, BlockScaled):
        return scaled_product(rows, stack, index)
    if stack.dtype.itemsize == 4:
        return rows @ stack[index].astype(rows.dtype)
    # Narrow weights also where the rows are as narrow: the CPU multiplies both in float32.
    bits = cut_bits(stack, (index, 0, 0), (1, *stack.shape[1:]))[0]
    return rows @ jax.lax.bitcast_convert_type(bits, stack.dtype).astype(rows.dtype)


def _block_rows(assignments: int, experts: int) -> int:
    """Power of two near the mean number of rows per expert: 2 % to 40 % padding in even loads."""
    mean = max(1, assignments // experts)
    return min(MAX_BLOCK_ROWS, max(MIN_BLOCK_ROWS, 1 << (mean - 1).bit_length()))


def _plan_blocks(flat: Int[Array, " A"], number: int, block_rows: int) -> _Blocks:
    """Sort assignments by expert (stable) and lay blocks that never span two experts."""
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    sizes = jnp.sum(flat[:, None] == jnp.arange(number), axis=0, dtype=jnp.int32)
    ends = jnp.cumsum(sizes)
    per_expert = (sizes + block_rows - 1) // block_rows
    block_ends = jnp.cumsum(per_expert)
    most = flat.shape[0] // block_rows + min(number, flat.shape[0])
    index = jnp.arange(most, dtype=jnp.int32)
    expert = jnp.searchsorted(block_ends, index, side="right").astype(jnp.int32)
    safe = jnp.minimum(expert, number - 1)
    inside = index - (block_ends[safe] - per_expert[safe])
    start = ends[safe] - sizes[safe] + inside * block_rows
    return _Blocks(order, safe, start, ends[safe], block_ends[-1])
