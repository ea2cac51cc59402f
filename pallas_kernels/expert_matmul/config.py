"""Tile sizes of expert_matmul's GPU kernel."""

from typing import NamedTuple

from pallas_kernels.mosaic.fp8_product import tile_size

# Rows of one wgmma. Experts start at multiples of ROW_GROUP, the rows of a swizzled tile.
TILE_ROWS = 64
ROW_GROUP = 8
# A swizzled row is 128 bytes.
DEPTH = 64


class Tile(NamedTuple):
    """Columns of the result per tile, and stages of the pipeline over the depth."""

    columns: int
    stages: int


class Cut(NamedTuple):
    """How the kernels cut their work, where it is not left to the rules; for tuning.

    Attributes:
        columns: of bfloat16 weights per tile, at most.
        stages: of the pipeline, with bfloat16 weights.
        fp8_rows: rows of a tile with block-FP8 weights.
    """

    columns: int | None = None
    stages: int | None = None
    fp8_rows: int | None = None


BY_RULE = Cut()

# Columns of weights per tile, widest first. 64 x 256 float32 sums fill half of a thread's
# registers. Four stages are 4 x (8 + 32) KiB of shared memory: bytes under way that reach the full
# bandwidth. Wide tiles, so that the start of a tile, when nothing is under way, is a small part:
# 256 columns of 2048 values take a multiprocessor 29 microseconds at 4.8 TB/s.
_WEIGHT_COLUMNS = (256, 128, 64)
_STAGES = 4


def tile_for(columns: int, parts: int, cut: Cut = BY_RULE) -> Tile:
    """The widest tile that divides the result.

    Args:
        columns: of the result.
        parts: columns of weights that make one of the result.
        cut: bounds the columns, and names the stages.

    Raises:
        ValueError: if none does.
    """
    least = parts * DEPTH
    most = max(least, cut.columns or _WEIGHT_COLUMNS[0])
    for width in _WEIGHT_COLUMNS:
        if least <= width <= most and columns % (width // parts) == 0:
            return Tile(width // parts, cut.stages or _STAGES)
    raise ValueError(
        f"expert_matmul's GPU kernel cannot tile {columns} columns; the width must be a multiple "
        f'of {DEPTH}. Use implementation="xla".'
    )


def fp8_tile_size(assignments: int, experts: int, cut: Cut = BY_RULE) -> int:
    """Rows of a tile with block-FP8 weights: what 1.4 times an expert's mean needs.

    An expert with more rows than a tile has its weights read again from L2. If rows choose evenly,
    two experts in a hundred have.
    """
    return cut.fp8_rows or tile_size(1.4 * assignments / experts)
