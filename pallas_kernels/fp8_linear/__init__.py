"""Products of rows with one matrix in block FP8."""

from pallas_kernels.fp8_linear.api import fp8_linear

__all__ = ["fp8_linear"]
