"""Mixture of experts: sigmoid router with correction bias, routed experts, one shared expert.

Routing follows DeepSeek-V3 ("noaux_tc"): the bias chooses, the unbiased score weighs. Everything
that decides is float32; a bf16 bias would change the experts of nearly every token.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from glm_jax.model.config import GlmConfig
from glm_jax.model.linear import module_of_layer
from glm_jax.model.mlp import Mlp
from pallas_kernels.expert_matmul import ExpertWeights, expert_matmul


class Moe(nnx.Module):
    """Weights of one sparse feed-forward, or of a stack of them: then layers stand in front."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        """Wrap arrays, or shapes of arrays, by their names."""
        self.router = nnx.Param(arrays["router"])  # [D, E] float32
        self.router_bias = nnx.Param(arrays["router_bias"])  # [E] float32
        self.gate_up = nnx.Param(arrays["gate_up"])  # [E, D, 2Y]
        self.down = nnx.Param(arrays["down"])  # [E, Y, D]
        self.shared = Mlp({"gate_up": arrays["shared_gate_up"], "down": arrays["shared_down"]})


class MoeRows(NamedTuple):
    """What a sparse feed-forward makes of its rows."""

    x: Float[Array, "N D"]
    expert_rows: Int[Array, " E"]  # how many of them reach each expert


class MoeLayer(NamedTuple):
    """One sparse feed-forward.

    Attributes:
        moe: its weights, or the stack that they are in.
        place: in the stack; None where ``moe`` is this layer's alone.
    """

    moe: Moe
    place: int | Int[Array, ""] | None = None

    def __call__(
        self,
        x: Float[Array, "N D"],
        valid: Bool[Array, " N"],
        config: GlmConfig,
        kernels: str | None,
    ) -> MoeRows:
        """Routed plus shared experts; rows that are not valid reach no expert."""
        moe = self.moe
        chosen, gates = route(x, self._own(moe.router), self._own(moe.router_bias), config)
        experts = jnp.where(valid[:, None], chosen, config.n_routed_experts)
        weights = ExpertWeights(moe.gate_up.get_value(), moe.down.get_value(), self.place)
        routed = expert_matmul(x, experts, gates, weights, implementation=kernels)
        own = moe.shared if self.place is None else module_of_layer(moe.shared, self.place)
        shared = own(x, kernels)
        # Comparisons and a sum, as the operator itself counts: a scatter would be slow on a CPU.
        reached = experts.reshape(-1, 1) == jnp.arange(config.n_routed_experts)
        return MoeRows(
            (routed + shared.astype(jnp.float32)).astype(x.dtype),
            jnp.sum(reached, axis=0, dtype=jnp.int32),
        )

    def _own(self, weights: nnx.Param) -> Array:
        return weights[...] if self.place is None else weights[self.place]


def route(
    x: Float[Array, "N D"],
    router: Float[Array, "D E"],
    bias: Float[Array, " E"],
    config: GlmConfig,
) -> tuple[Int[Array, "N X"], Float[Array, "N X"]]:
    """Choose X experts per row and weigh them.

    With s = sigmoid(x W): the choice is the top X of s + bias (inside the best groups), the gate
    is s / sum(s) of the chosen, times ``routed_scaling_factor``. Ties go to the lower expert.
    """
    logits = jnp.matmul(x.astype(jnp.float32), router, precision=jax.lax.Precision.HIGHEST)
    scores = jax.nn.sigmoid(logits)
    choice = _keep_best_groups(scores + bias, config)
    _, chosen = jax.lax.top_k(choice, config.num_experts_per_tok)
    gates = jnp.take_along_axis(scores, chosen, axis=-1)
    if config.norm_topk_prob:
        gates = gates / (jnp.sum(gates, axis=-1, keepdims=True) + 1e-20)
    return chosen, gates * config.routed_scaling_factor


def _keep_best_groups(choice: Float[Array, "N E"], config: GlmConfig) -> Float[Array, "N E"]:
    """Mask the experts outside the ``topk_group`` best groups (score: sum of a group's top two)."""
    if config.n_group == 1:
        return choice
    rows, experts = choice.shape
    grouped = choice.reshape(rows, config.n_group, experts // config.n_group)
    group_score = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
    _, best = jax.lax.top_k(group_score, config.topk_group)
    kept = jnp.any(best[:, :, None] == jnp.arange(config.n_group), axis=1)
    return jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(rows, experts)
