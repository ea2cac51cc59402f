"""Dense SwiGLU feed-forward (Shazeer 2020) of the first layers and of the shared expert."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float


class Mlp(nnx.Module):
    """Weights of one dense feed-forward."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        """Wrap arrays, or shapes of arrays, by their names."""
        self.gate_up = nnx.Param(arrays["gate_up"])  # [D, 2F], gate columns first
        self.down = nnx.Param(arrays["down"])  # [F, D]

    def __call__(self, x: Float[Array, "N D"]) -> Float[Array, "N D"]:
        """down(silu(gate x) * up x)."""
        return swiglu(x, self.gate_up[...], self.down[...])


def swiglu(
    x: Float[Array, "N D"], gate_up: Float[Array, "D two_F"], down: Float[Array, "F D"]
) -> Float[Array, "N D"]:
    """One gated feed-forward; no clamp in this model family."""
    both = x @ gate_up
    width = down.shape[0]
    return (jax.nn.silu(both[:, :width]) * both[:, width:]) @ down
