"""fp8_linear for Hopper: ``fp8_product`` with one matrix for all rows.

XLA would write the scaled matrix to memory, in bfloat16, before it multiplies: five times the
traffic, and room for it besides.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.fp8 import BlockScaled
from pallas_kernels.fp8_linear.config import split_count
from pallas_kernels.mosaic.e4m3_weights import permute_columns
from pallas_kernels.mosaic.fp8_product import (
    Tiles,
    fp8_product,
    plain_product,
    steps_of,
    tile_size,
)


def fp8_linear(
    x: Float[Array, "N inputs"],
    weight: BlockScaled,
    layer: int | Int[Array, ""] | None = None,
    *,
    interpret: bool = False,
) -> Float[Array, "N outputs"]:
    """Multiply rows, rounded to bfloat16 (see ``api``).

    Args:
        x: float32 or bfloat16.
        weight: one matrix, or a stack of them with the layers in front; read in place.
        layer: which of the stack; None where ``weight`` is one matrix.
        interpret: run in Mosaic's interpreter, on the CPU.

    Raises:
        ValueError: for sizes that the copy engine cannot address.
    """
    outputs, depth = weight.values.shape[-2:]
    _refuse_unsupported(outputs, depth)
    rows = x.shape[0]
    size = tile_size(rows)
    number = -(-rows // size)
    start = jnp.arange(number, dtype=jnp.int32) * size
    tiles = Tiles(
        matrix=jnp.zeros_like(start),
        start=start,
        rows=jnp.minimum(rows - start, size),
        used=jnp.full(1, number, jnp.int32),
    )
    product = plain_product("fp8_linear", outputs, size, interpret=interpret)
    splits = split_count(number * product.across, steps_of(depth))
    padded = jnp.pad(x.astype(jnp.bfloat16), ((0, number * size - rows), (0, 0)))
    first = jnp.asarray(0 if layer is None else layer, jnp.int32).reshape(1)
    parts = fp8_product(
        product._replace(splits=splits), tiles, permute_columns(padded), (first, _stack(weight))
    )
    return parts[:, :rows, :outputs].sum(axis=0).astype(x.dtype)


def _stack(weight: BlockScaled) -> BlockScaled:
    """With one axis for the matrices, also where there is one only."""
    values, scales = weight
    return BlockScaled(
        values.reshape(-1, *values.shape[-2:]), scales.reshape(-1, *scales.shape[-2:])
    )


def _refuse_unsupported(outputs: int, depth: int) -> None:
    if depth % 16 or outputs % 8:
        raise ValueError(
            f"fp8_linear's GPU kernel got a matrix of {outputs} outputs and {depth} inputs; they "
            'must be multiples of 8 and 16. Load the model with weight_dtype="bfloat16" or use '
            'implementation="xla".'
        )
