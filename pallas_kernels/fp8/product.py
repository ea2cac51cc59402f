"""Rows times one block-FP8 matrix of a stack by plain XLA, a strip of outputs at a time.

Strips stay in a core's cache between being dequantised and multiplied, and no matrix is ever whole
in float32.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.bits import cut_bits
from pallas_kernels.fp8.block_scaled import BLOCK, BlockScaled
from pallas_kernels.fp8.e4m3 import e4m3_to_float32

# 2 MB in float32.
STRIP_VALUES = 1 << 19


def scaled_product(
    x: Float[Array, "N inputs"], stack: BlockScaled, place: int | Int[Array, ""]
) -> Float[Array, "N outputs"]:
    """Multiply by one matrix; float32 whatever the rows are.

    Args:
        x: any float type.
        stack: matrices ``[stack, outputs, inputs]``.
        place: which of them.
    """
    _, outputs, inputs = stack.values.shape
    wide = x.astype(jnp.float32)
    strip = max(1, STRIP_VALUES // (inputs * BLOCK)) * BLOCK
    if outputs <= strip:
        return _strip_product(wide, stack, place, 0, outputs)

    def add(turn: Int[Array, ""], product: Array) -> Array:
        part = _strip_product(wide, stack, place, turn * strip, strip)
        return jax.lax.dynamic_update_slice_in_dim(product, part, turn * strip, axis=1)

    whole = outputs // strip
    product = jax.lax.fori_loop(0, whole, add, jnp.zeros((x.shape[0], outputs), jnp.float32))
    if whole * strip == outputs:
        return product
    rest = _strip_product(wide, stack, place, whole * strip, outputs - whole * strip)
    return product.at[:, whole * strip :].set(rest)


def _strip_product(
    x: Float[Array, "N inputs"],
    stack: BlockScaled,
    place: int | Int[Array, ""],
    first: int | Int[Array, ""],
    rows: int,
) -> Float[Array, "N rows"]:
    """Times the outputs ``first`` .. ``first + rows - 1``; ``first`` is a multiple of BLOCK."""
    blocks, inputs = -(-rows // BLOCK), stack.values.shape[2]
    bits = cut_bits(stack.values, (place, first, 0), (1, rows, inputs))[0]
    scales = jax.lax.dynamic_slice(
        stack.scales, (place, first // BLOCK, 0), (1, blocks, stack.scales.shape[2])
    )[0]
    spread = jnp.repeat(jnp.repeat(scales, BLOCK, axis=0), BLOCK, axis=1)[:rows, :inputs]
    matrix = e4m3_to_float32(bits) * spread
    return jax.lax.dot_general(x, matrix, (((1,), (1,)), ((), ())))
