"""Float8 (e4m3) numbers with scales: block-scaled weights, cache entries, index keys."""

from pallas_kernels.fp8.block_scaled import BLOCK, BlockScaled

__all__ = ["BLOCK", "BlockScaled"]
