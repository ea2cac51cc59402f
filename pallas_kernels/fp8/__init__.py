"""Float8 (e4m3) numbers with scales: block-scaled weights, cache entries, index keys."""

from pallas_kernels.fp8.block_scaled import BLOCK, BlockScaled
from pallas_kernels.fp8.e4m3 import e4m3_to_float32
from pallas_kernels.fp8.product import scaled_product
from pallas_kernels.fp8.scaled_tiles import ENTRY_FLOOR, INDEX_KEY_FLOOR, TILE, ScaledTiles

__all__ = [
    "BLOCK",
    "ENTRY_FLOOR",
    "INDEX_KEY_FLOOR",
    "TILE",
    "BlockScaled",
    "ScaledTiles",
    "e4m3_to_float32",
    "scaled_product",
]
