"""Scores as integers in the same order, so that a search for the K-th largest needs no floats."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Less than the bits of any score: stands where there is none.
NO_SCORE = -(2**31)
_NOT_A_NUMBER = 0x7F800001  # one above the bits of infinity


def ordered_bits(scores: Float[Array, "*shape"]) -> Int[Array, "*shape"]:
    """int32 in the order of float32 scores: -0.0 ties with 0.0, NaN is above all or below all."""
    bits = jax.lax.bitcast_convert_type(scores, jnp.int32)
    bits = jnp.where(bits == jnp.int32(NO_SCORE), jnp.int32(0), bits)  # the bits of -0.0
    ordered = bits ^ (jax.lax.shift_right_arithmetic(bits, jnp.int32(31)) & jnp.int32(0x7FFFFFFF))
    return jnp.minimum(jnp.maximum(ordered, jnp.int32(NO_SCORE + 1)), jnp.int32(_NOT_A_NUMBER))
