"""Slow, obvious form of expert_matmul: every expert on every row, then the chosen ones."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.expert_matmul.weights import ExpertWeights
from pallas_kernels.fp8 import BlockScaled


def expert_matmul(
    x: Float[Array, "N D"],
    experts: Int[Array, "N X"],
    gates: Float[Array, "N X"],
    weights: ExpertWeights,
) -> Float[Array, "N D"]:
    """Dense over experts (see ``api``)."""
    width = weights.width
    gate_up, down = (_plain(stack, weights, x.dtype) for stack in weights.flat)
    both = jnp.einsum("nd,edf->enf", x, gate_up)
    hidden = jax.nn.silu(both[..., :width]) * both[..., width:]
    outputs = jnp.einsum("eny,eyd->end", hidden, down).astype(jnp.float32)
    total = jnp.zeros(x.shape, jnp.float32)
    for choice in range(experts.shape[1]):
        chosen = experts[:, choice]
        kept = chosen < weights.experts
        rows = outputs[jnp.where(kept, chosen, 0), jnp.arange(x.shape[0])]
        total += jnp.where(kept[:, None], rows * gates[:, choice, None], 0.0)
    return total


def _plain(
    stack: Float[Array, "LE inputs outputs"] | BlockScaled, weights: ExpertWeights, dtype: Any
) -> Float[Array, "E inputs outputs"]:
    """The layer's experts, block FP8 dequantised; float32 or of the rows' dtype."""
    own = stack
    if weights.layer is not None:
        own = jax.tree.map(
            lambda array: jax.lax.dynamic_slice_in_dim(array, weights.first, weights.experts), stack
        )
    if isinstance(own, BlockScaled):
        return own.dequantised().swapaxes(-1, -2)
    return own.astype(dtype)
