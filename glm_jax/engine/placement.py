"""Where the rows of a step sit: prefills as chunks or, where that is cheaper, as decode groups."""

from collections.abc import Sequence
from typing import NamedTuple

from bucketing.grid import Cell, Grid
from bucketing.step_inputs import Limits
from glm_jax.engine.chunking import Piece
from glm_jax.engine.request import Request


class Placement(NamedTuple):
    """A cell, the pieces that are its chunks, and those that join the decodes as groups."""

    cell: Cell
    chunks: list[Piece]
    groups: list[Piece]


def place(
    grid: Grid, limits: Limits, decodes: Sequence[Request], pieces: Sequence[Piece]
) -> Placement:
    """Return the placement with the fewest rows, pads included.

    A piece of at most Q rows may be a group: its class stays PREFILL. So the last row of a prompt
    need not open a prefill bucket. Longest pieces are moved first, since they free most rows.

    Example:
        Buckets P 0, 64 and G 0, 1, 8, width 1: three decodes and a rest of one row use cell
        (0, 8, 1) with four groups, 8 rows, rather than (64, 8, 1), 72 rows.
    """
    width = 1 + max((request.drafts for request in decodes), default=0)
    best: Placement | None = None
    for allowed in grid.widths:
        if allowed < width:
            continue
        small = sorted(
            (piece for piece in pieces if piece.rows <= allowed),
            key=lambda piece: piece.rows,
            reverse=True,
        )
        for count in range(len(small) + 1):
            placement = _try(grid, decodes, pieces, small[:count], allowed)
            fits = _resets(placement) <= limits.resets(placement.cell)
            if fits and (best is None or placement.cell.rows < best.cell.rows):
                best = placement
    assert best is not None, f"no placement for {len(decodes)=} {len(pieces)=} {width=}"
    return best


def _try(
    grid: Grid,
    decodes: Sequence[Request],
    pieces: Sequence[Piece],
    moved: list[Piece],
    width: int,
) -> Placement:
    """Return the placement in which `moved` are groups and the other pieces chunks."""
    owners = {id(piece.request) for piece in moved}
    chunks = [piece for piece in pieces if id(piece.request) not in owners]
    rows = sum(piece.rows for piece in chunks)
    cell = grid.cell_for(rows, len(chunks), len(decodes) + len(moved), width)
    return Placement(cell, chunks, moved)


def _resets(placement: Placement) -> int:
    """Return how many slots the step must reset; admitted requests have no slot yet."""
    return sum(
        piece.request.slot is None or piece.request.needs_reset
        for piece in (*placement.chunks, *placement.groups)
    )
