"""How many rows and heads the scoring kernel takes at a time, and which pools it reads."""

import math
from typing import NamedTuple

from pallas_kernels.pool import PagedPool

BLOCK = 64  # keys per wgmma: the rows of its A operand
# Rows x heads of a tile: the widest wgmma is 256; three products with key terms in registers leave
# room for 192 (ptxas serialises them at 256).
MAX_COLUMNS = {"bfloat16": 256, "fp8_planar": 256, "float32": 192}
_WIDTHS = (64, 128)


class Cut(NamedTuple):
    """How the scoring kernel cuts its work; None leaves a number to the rule.

    Attributes:
        rows: of a tile; by rule ``rows_per_tile``.
        splits: programs that share the keys of a tile; by rule as many as fill the device.
    """

    rows: int | None = None
    splits: int | None = None


BY_RULE = Cut()


def rows_per_tile(rows: int, heads: int, keys: PagedPool, cut: Cut = BY_RULE) -> int:
    """How many of ``rows`` rows one tile scores.

    By rule a divisor of ``rows`` if one fills more than half a tile, so that nothing is padded;
    otherwise as few tiles as can be, all equally full.

    Raises:
        ValueError: the kernel does not take such keys, heads or cut.
    """
    most = most_rows(heads, keys)
    if cut.splits is not None and cut.splits < 1:
        raise ValueError(f"index_topk got {cut.splits} splits; a tile needs at least 1 program.")
    if cut.rows is not None:
        if not 1 <= cut.rows <= most:
            raise ValueError(
                f"index_topk on a GPU got tiles of {cut.rows} rows; with {heads} heads and "
                f"{keys.storage_format} keys a tile has 1 to {most}. Leave rows to the rule."
            )
        return cut.rows
    divisor = max(size for size in range(1, most + 1) if rows % size == 0)
    return divisor if 2 * divisor > most else math.ceil(rows / math.ceil(rows / most))


def most_rows(heads: int, keys: PagedPool) -> int:
    """The most rows that one tile can have.

    Raises:
        ValueError: the kernel does not take such keys or heads.
    """
    name, page_size = keys.storage_format, keys.page_size
    if name not in MAX_COLUMNS:
        raise ValueError(
            f"index_topk on a GPU does not read keys of format {name}; "
            f"allowed: {', '.join(MAX_COLUMNS)}."
        )
    if page_size % BLOCK:
        raise ValueError(
            f"index_topk on a GPU needs pages of a multiple of {BLOCK} keys, not of {page_size}; "
            "change the page size."
        )
    if name != "fp8_planar" and keys.array.shape[3] not in _WIDTHS:
        raise ValueError(
            f"index_topk on a GPU takes keys of width {' or '.join(map(str, _WIDTHS))}, "
            f"not {keys.array.shape[3]}."
        )
    most = MAX_COLUMNS[name] // padded_heads(heads)
    if most == 0:
        raise ValueError(
            f"index_topk on a GPU takes at most {MAX_COLUMNS[name]} index heads with keys of "
            f"format {name}, not {heads}."
        )
    return most


def padded_heads(heads: int) -> int:
    """Columns of wgmma come in eights; so do the heads of a row."""
    return -(-heads // 8) * 8
