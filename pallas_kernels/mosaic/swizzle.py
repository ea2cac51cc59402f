"""Where wgmma expects the 16-byte pieces of a bfloat16 matrix in shared memory.

Written with operators only, so that the same lines run on ints, on NumPy arrays (tests) and on the
registers of a GPU thread (``word.Word``).
"""

from typing import Any

TILE_ROWS = 8
TILE_COLUMNS = 64
# A tile's row is as long as the swizzle: 128 bytes, 8 pieces of 16 bytes.
TILE_PIECES = 8
TILE_BYTES = TILE_ROWS * TILE_COLUMNS * 2


def piece_offset(row: Any, piece: Any, columns: int) -> Any:
    """Byte offset of piece ``piece`` (8 values) of row ``row`` of a matrix ``[rows, columns]``.

    The matrix is cut into tiles of 8 x 64 values, row of tiles by row of tiles; inside a tile the
    128-byte swizzle exchanges pieces by exclusive or with the row's number.
    """
    tile = row // TILE_ROWS * (columns // TILE_COLUMNS) + piece // TILE_PIECES
    row_in_tile = row % TILE_ROWS
    swizzled = (piece % TILE_PIECES) ^ row_in_tile
    return tile * TILE_BYTES + row_in_tile * (TILE_PIECES * 16) + swizzled * 16
