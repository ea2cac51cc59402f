"""Grouped SwiGLU experts: each row goes through its X chosen experts only.

Maths, for row n with experts e_x and gates g_x:

    out[n] = sum_x g_x * down[e_x]^T (silu(a) * b),   [a, b] = gate_up[e_x]^T x[n]

An expert id equal to E (one past the last) drops the assignment: pad rows use it, cost nothing and
yield zeros. The sum over x is taken in the given order, in float32.
"""

from collections.abc import Callable

from jaxtyping import Array, Float, Int

from pallas_kernels.expert_matmul import reference, xla

IMPLEMENTATIONS: dict[str, Callable] = {
    "reference": reference.expert_matmul,
    "xla": xla.expert_matmul,
}


def expert_matmul(
    x: Float[Array, "N D"],
    experts: Int[Array, "N X"],
    gates: Float[Array, "N X"],
    gate_up: Float[Array, "E D F"],
    down: Float[Array, "E Y D"],
    *,
    implementation: str = "xla",
) -> Float[Array, "N D"]:
    """Route rows through their experts and combine.

    Args:
        x: input rows.
        experts: chosen experts per row, E = dropped.
        gates: combination weights, float32.
        gate_up: gate columns first, then up columns (F = 2 Y).
        down: projection back to the model width.
        implementation: "xla" (default) or "reference".
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"unknown implementation {implementation!r} of expert_matmul; "
            f"allowed: {', '.join(sorted(IMPLEMENTATIONS))}"
        )
    return IMPLEMENTATIONS[implementation](x, experts, gates, gate_up, down)
