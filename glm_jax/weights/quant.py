"""Block FP8: 128 x 128 blocks of float8_e4m3fn with one float32 multiplier each.

The format of the published GLM-5.x FP8 checkpoints: `weight = fp8 * weight_scale_inv`, the last
block of a dimension partial. The loader and the exporter call it; NumPy only.
"""

from typing import NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import Float, Shaped

BLOCK = 128
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
FP8_MAX = 448.0

# A power of two far above the subnormal numbers, so that `fp8 * scale` is exact there and a block
# of zeros has a scale that is neither zero nor odd.
_SMALLEST_SCALE = np.float32(2.0**-100)


class QuantisedBlocks(NamedTuple):
    """A matrix in block FP8: `values * scales`, each scale spread over its block."""

    values: Shaped[np.ndarray, "rows cols"]
    scales: Float[np.ndarray, "row_blocks col_blocks"]


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the scales of a matrix: one per started block of 128."""
    return tuple(-(-size // BLOCK) for size in shape)


def quantise_blocks(matrix: Shaped[np.ndarray, "rows cols"]) -> QuantisedBlocks:
    """Quantise a floating-point matrix by blocks.

    Quantising `dequantise_rows(...)` of the result in float32 returns the same bytes: the largest
    value of a block comes back as `fl(448 * scale)`, and in float32 `fl(fl(448 * s) / 448) == s`
    for every `s` that is itself a quotient by 448 (tested for all mantissas; other `s` differ).

    Raises:
        ValueError: the matrix holds an infinity or a NaN.
    """
    rows, cols = matrix.shape
    values = np.empty((rows, cols), FP8)
    scales = np.empty(scale_shape((rows, cols)), np.float32)
    for block_row, first in enumerate(range(0, rows, BLOCK)):
        strip = np.asarray(matrix[first : first + BLOCK], np.float32)
        column_amax = np.abs(strip).max(axis=0)
        amax = np.maximum.reduceat(column_amax, np.arange(0, cols, BLOCK))
        if not np.isfinite(amax).all():
            raise ValueError(
                f"rows {first} to {first + len(strip) - 1} hold a value that is not finite; "
                "such a matrix has no FP8 form."
            )
        scales[block_row] = np.maximum(amax / np.float32(FP8_MAX), _SMALLEST_SCALE)
        scaled = strip / np.repeat(scales[block_row], BLOCK)[:cols]
        # The cast turns what is above 448 into NaN, so it is clipped first.
        np.clip(scaled, -FP8_MAX, FP8_MAX, out=scaled)
        values[first : first + BLOCK] = scaled.astype(FP8)
    return QuantisedBlocks(values, scales)


def dequantise_rows(
    values: Shaped[np.ndarray, "rows cols"],
    scales: Float[np.ndarray, "row_blocks col_blocks"],
    *,
    first_row: int = 0,
) -> Float[np.ndarray, "rows cols"]:
    """Return some consecutive rows of a block-FP8 matrix in float32.

    Args:
        values: the rows, in float8_e4m3fn.
        scales: the scales of the *whole* matrix.
        first_row: index of the first given row in the whole matrix.
    """
    rows, cols = values.shape
    block_of_row = np.arange(first_row, first_row + rows) // BLOCK
    result = values.astype(np.float32)
    for block_col, first in enumerate(range(0, cols, BLOCK)):
        result[:, first : first + BLOCK] *= scales[block_of_row, block_col, None]
    return result
