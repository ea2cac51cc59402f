"""Grouped SwiGLU experts: each row goes through its X chosen experts only.

Maths, for row n with experts e_x and gates g_x:

    out[n] = sum_x g_x * down[e_x]^T (silu(a) * b),   [a, b] = gate_up[e_x]^T x[n]

An expert id equal to E (one past the last) drops the assignment: pad rows use it, cost nothing and
yield zeros. The sum over x is taken in the given order, in float32. Weights in block FP8 count as
the float32 numbers that they mean; plain ones of another dtype than the rows are cast to it.
"""

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import find
from pallas_kernels.expert_matmul.weights import ExpertWeights


def expert_matmul(
    x: Float[Array, "N D"],
    experts: Int[Array, "N X"],
    gates: Float[Array, "N X"],
    weights: ExpertWeights,
    *,
    implementation: str | None = None,
) -> Float[Array, "N D"]:
    """Route rows through their experts and combine.

    Args:
        x: input rows.
        experts: chosen experts per row, E = dropped.
        gates: combination weights, float32.
        weights: of the layer's experts.
        implementation: "reference", "xla" or "mosaic_gpu"; None chooses by platform.
    """
    run = find("expert_matmul", "expert_matmul", implementation)
    return run(x, experts, gates, weights)
