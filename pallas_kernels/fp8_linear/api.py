"""Rows times one matrix in block FP8, which is read where it lies.

Maths, for row n and output o, with values v and scales s of the matrix:

    out[n, o] = sum_i x[n, i] * v[o, i] * s[o // 128, i // 128]

The matrix is stored ``[out, in]``, as checkpoints have it; the last blocks may be partial. Scales
may be any float32. Sums are float32.
"""

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import find
from pallas_kernels.fp8 import BlockScaled


def fp8_linear(
    x: Float[Array, "N inputs"],
    weight: BlockScaled,
    layer: int | Int[Array, ""] | None = None,
    *,
    implementation: str | None = None,
) -> Float[Array, "N outputs"]:
    """Multiply rows; the result has the rows' dtype.

    Args:
        x: float32 or bfloat16.
        weight: one matrix, or a stack of them with the layers in front. A matrix cut out of its
            stack would be copied in front of a GPU kernel, so the stack comes whole.
        layer: which of the stack; None where ``weight`` is one matrix.
        implementation: "reference", "xla" or "mosaic_gpu"; None chooses by platform.
    """
    run = find("fp8_linear", "fp8_linear", implementation)
    return run(x, weight, layer)
