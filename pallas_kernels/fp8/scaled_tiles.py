"""Rows of values as e4m3 numbers, every 128 of them with one scale: cache entries, index keys.

A writer takes powers of two for scales, so that dividing by one and multiplying by it again add no
rounding of their own: the smallest power that brings a tile's largest magnitude to e4m3's range,

    scale = 2 ^ ceil(log2(amax / 448))

and not below a floor, which is what an all-zero tile gets. A reader takes any float32 scale.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.fp8.e4m3 import e4m3_to_float32

TILE = 128
# e4m3's largest number, 1.75 * 2^8. JAX's cast makes NaN of anything that rounds above it.
LARGEST = 448.0
# Floors of the scale. FlashMLA and vLLM bound a cache entry's scale, 2^ceil(log2(max(amax / 448,
# 1e-4))); DeepSeek-V3.2 bounds an index key's amax, 2^ceil(log2(max(amax, 1e-4) / 448)).
ENTRY_FLOOR = 2.0**-13
INDEX_KEY_FLOOR = 2.0**-22

_MANTISSA_BITS = 23
_MANTISSA = (1 << _MANTISSA_BITS) - 1
_MANTISSA_OF_LARGEST = 0x600000  # of 1.75
_INFINITY = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF  # all but the sign


class ScaledTiles(NamedTuple):
    """``values * scales``, tile by tile.

    Attributes:
        bits: of float8_e4m3fn values; bits, because XLA's CPU backend converts a whole array of
            fp8 values around a scatter.
        scales: any value.
    """

    bits: UInt8[Array, "*rows tiles 128"]
    scales: Float[Array, "*rows tiles"]

    @classmethod
    def quantised(cls, values: Float[Array, "*rows width"], *, floor: float) -> "ScaledTiles":
        """Round values to the nearest e4m3 number of their tile, ties to even.

        A tile that holds a NaN or an infinity becomes NaN as a whole.

        Args:
            values: any float type; ``width`` is a multiple of 128.
            floor: the smallest scale, a power of two: ENTRY_FLOOR or INDEX_KEY_FLOOR.
        """
        tiles = values.astype(jnp.float32).reshape(*values.shape[:-1], -1, TILE)
        # Magnitudes as integers, which are ordered alike: the largest float may leave out a NaN.
        magnitudes = jax.lax.bitcast_convert_type(tiles, jnp.int32) & _MAGNITUDE
        scales = _power_of_two_scales(jnp.max(magnitudes, axis=-1), floor)
        scaled = jnp.clip(tiles * _reciprocals(scales)[..., None], -LARGEST, LARGEST)
        bits = jax.lax.bitcast_convert_type(scaled.astype(jnp.float8_e4m3fn), jnp.uint8)
        return cls(bits, scales)

    def dequantised(self) -> Float[Array, "*rows width"]:
        """The numbers that are meant, in float32."""
        scaled = e4m3_to_float32(self.bits) * self.scales[..., None]
        return scaled.reshape(*scaled.shape[:-2], -1)


def _power_of_two_scales(
    largest: Int[Array, "*rows tiles"], floor: float
) -> Float[Array, "*rows tiles"]:
    """``max(2^ceil(log2(largest / 448)), floor)`` of a magnitude's bits, NaN if it is not finite.

    Without a division or a logarithm, whose last digit differs between devices: with
    largest = m * 2^e and 448 = 1.75 * 2^8 the exponent is e - 8, or e - 7 where m > 1.75.
    """
    above = (largest & _MANTISSA) > _MANTISSA_OF_LARGEST
    # Zero and subnormal magnitudes have exponent field 0: less than any floor.
    field = jnp.maximum((largest >> _MANTISSA_BITS) - 8 + above, 1)
    scales = jax.lax.bitcast_convert_type(field << _MANTISSA_BITS, jnp.float32)
    finite = largest < _INFINITY
    return jnp.where(finite, jnp.maximum(scales, floor), jnp.nan)


def _reciprocals(scales: Float[Array, "*rows tiles"]) -> Float[Array, "*rows tiles"]:
    """1 / scales of powers of two, exact on every device; no number in particular for NaN."""
    bits = jax.lax.bitcast_convert_type(scales, jnp.int32)
    return jax.lax.bitcast_convert_type((254 << _MANTISSA_BITS) - bits, jnp.float32)
