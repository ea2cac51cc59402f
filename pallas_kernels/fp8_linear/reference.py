"""Slow, obvious form of fp8_linear: the whole matrix in float32."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.fp8 import BlockScaled


def fp8_linear(
    x: Float[Array, "N inputs"], weight: BlockScaled, layer: int | Int[Array, ""] | None
) -> Float[Array, "N outputs"]:
    """Dequantise and multiply (see ``api``)."""
    if layer is not None:
        weight = BlockScaled(weight.values[layer], weight.scales[layer])
    product = x.astype(jnp.float32) @ weight.dequantised().T
    return product.astype(x.dtype)
