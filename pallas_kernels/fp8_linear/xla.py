"""fp8_linear for the CPU: strips of the matrix in turn, each dequantised into the cache."""

from jaxtyping import Array, Float, Int

from pallas_kernels.fp8 import BlockScaled, scaled_product


def fp8_linear(
    x: Float[Array, "N inputs"], weight: BlockScaled, layer: int | Int[Array, ""] | None
) -> Float[Array, "N outputs"]:
    """One product of rows per strip (see ``api``)."""
    if layer is None:
        weight, layer = BlockScaled(weight.values[None], weight.scales[None]), 0
    return scaled_product(x, weight, layer).astype(x.dtype)
