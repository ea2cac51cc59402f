"""Matrices in block FP8: e4m3 values with one float32 scale per block of 128 x 128.

The layout of the published GLM-5 checkpoints, untransposed: outputs in rows, so that the inputs,
over which products sum, are contiguous.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

BLOCK = 128


class BlockScaled(NamedTuple):
    """``values * scales``, each scale spread over its block; the last blocks may be partial.

    Attributes:
        values: float8_e4m3fn.
        scales: float32, any value.
    """

    values: Float[Array, "*stack outputs inputs"]
    scales: Float[Array, "*stack output_blocks input_blocks"]

    def dequantised(self) -> Float[Array, "*stack outputs inputs"]:
        """The numbers that are meant, in float32."""
        outputs, inputs = self.values.shape[-2:]
        spread = jnp.repeat(jnp.repeat(self.scales, BLOCK, axis=-2), BLOCK, axis=-1)
        return self.values.astype(jnp.float32) * spread[..., :outputs, :inputs]
