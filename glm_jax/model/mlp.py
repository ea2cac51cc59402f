"""Dense SwiGLU feed-forward (Shazeer 2020) of the first layers and of the shared expert."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float

from glm_jax.model.linear import Linear


class Mlp(nnx.Module):
    """Weights of one dense feed-forward."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        """Wrap arrays, or shapes of arrays, by their names."""
        self.gate_up = Linear(arrays["gate_up"])  # [D, 2F], gate columns first
        self.down = Linear(arrays["down"])  # [F, D]

    def __call__(self, x: Float[Array, "N D"], kernels: str | None) -> Float[Array, "N D"]:
        """down(silu(gate x) * up x); no clamp in this model family."""
        both = self.gate_up(x, kernels)
        width = both.shape[1] // 2
        return self.down(jax.nn.silu(both[:, :width]) * both[:, width:], kernels)
