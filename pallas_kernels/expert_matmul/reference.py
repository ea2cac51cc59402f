"""Slow, obvious form of expert_matmul: every expert on every row, then the chosen ones."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.expert_matmul.weights import ExpertWeights


def expert_matmul(
    x: Float[Array, "N D"],
    experts: Int[Array, "N X"],
    gates: Float[Array, "N X"],
    weights: ExpertWeights,
) -> Float[Array, "N D"]:
    """Dense over experts (see ``api``)."""
    width, (gate_up, down) = weights.width, weights.flat
    if weights.layer is not None:
        gate_up = jax.lax.dynamic_slice_in_dim(gate_up, weights.first, weights.experts)
        down = jax.lax.dynamic_slice_in_dim(down, weights.first, weights.experts)
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
