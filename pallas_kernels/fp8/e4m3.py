"""e4m3 bits as float32, by integer operations that a CPU does eight or sixteen at a time.

``float8_e4m3fn`` values convert to the same numbers, but at half of the speed: XLA's CPU backend
goes through float16.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

# float32 has 20 mantissa bits more, and exponents count from -127, not from -7.
_MANTISSA_SHIFT = 20
_EXPONENT_SHIFT = 120 << 23
_SIGN_SHIFT = 24
_NAN, _LEAST_NORMAL = 0x7F, 0x08


def e4m3_to_float32(bits: UInt8[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Exactly the numbers that the bits mean, NaN (0x7f, 0xff) and both zeros among them."""
    wide = bits.astype(jnp.uint32)
    magnitude = wide & 0x7F
    normal = (magnitude << _MANTISSA_SHIFT) + _EXPONENT_SHIFT
    # m / 8 * 2^-6 as (1 + m / 8) * 2^-6 - 2^-6, for a float32 subnormal would be flushed to zero.
    above = jax.lax.bitcast_convert_type(normal + (1 << 23), jnp.float32) - np.float32(2.0**-6)
    unsigned = jnp.where(
        magnitude < _LEAST_NORMAL, above, jax.lax.bitcast_convert_type(normal, jnp.float32)
    )
    unsigned = jnp.where(magnitude == _NAN, jnp.nan, unsigned)
    sign = (wide & 0x80) << _SIGN_SHIFT
    signed = jax.lax.bitcast_convert_type(unsigned, jnp.uint32) | sign
    return jax.lax.bitcast_convert_type(signed, jnp.float32)
