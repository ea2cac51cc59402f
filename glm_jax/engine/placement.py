"""Where the rows of a step sit: prefills as chunks or, where that is cheaper, as decode groups."""

from collections.abc import Sequence
from typing import NamedTuple

from bucketing.cell import Cell
from bucketing.grid import Grid
from bucketing.step_inputs import Limits
from bucketing.step_time import StepTime
from glm_jax.engine.chunking import Decodes, Piece, scored_pairs


class Placement(NamedTuple):
    """A cell, the pieces that are its chunks, those that join the decodes as groups, all pairs."""

    cell: Cell
    chunks: Sequence[Piece]
    groups: Sequence[Piece]
    pairs: int


def place(
    grid: Grid, limits: Limits, step_time: StepTime, decodes: Decodes, pieces: Sequence[Piece]
) -> Placement:
    """Return the placement with the least predicted time, pads included; then the fewest rows.

    A piece of at most Q rows may be a group: its class stays PREFILL. So the last row of a prompt
    need not open a prefill bucket. Longest pieces are moved first, since they free most rows.

    Example:
        Buckets P 0, 64 and G 0, 1, 8, width 1: three decodes and a rest of one row use cell
        (0, 8, 1) with four groups, 8 rows, rather than (64, 8, 1), 72 rows.
    """
    running, width, pairs = decodes
    resets = rows = 0
    for piece in pieces:
        request = piece.request
        pairs += scored_pairs(piece.start, piece.rows)
        rows += piece.rows
        # Admitted requests have no slot yet.
        resets += request.slot is None or request.needs_reset
    best, fitting = None, 0
    for allowed in grid.widths:
        if allowed < width:
            continue
        small = [piece for piece in pieces if piece.rows <= allowed]
        # A wider cell is worth asking for only where it takes a piece that the narrower one could
        # not. Where it just pads, a prediction from one slow step would choose it for good: the
        # narrower one would never be timed again.
        if best is not None and len(small) == fitting:
            continue
        fitting = len(small)
        small.sort(key=lambda piece: piece.rows, reverse=True)
        left = rows
        for count in range(len(small) + 1):
            if count:
                left -= small[count - 1].rows
            cell = grid.cell_for(left, len(pieces) - count, len(running) + count, allowed)
            if resets > limits.resets(cell):
                continue
            cost = cell not in grid, step_time.predict(cell, pairs), cell.rows
            if best is None or cost < best[0]:
                best = cost, cell, small[:count]
    assert best is not None, f"no placement for {len(running)=} {len(pieces)=} {width=}"
    _, cell, moved = best
    if not moved:
        return Placement(cell, pieces, (), pairs)
    owners = {id(piece.request) for piece in moved}
    chunks = [piece for piece in pieces if id(piece.request) not in owners]
    return Placement(cell, chunks, moved, pairs)
