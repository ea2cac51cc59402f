"""Which cells an engine should have ready before its first request; host-only."""

from bucketing.cell import Cell
from bucketing.grid import Grid


def hot_cells(grid: Grid, width: int = 1) -> tuple[Cell, ...]:
    """The cells that most steps of any traffic use, the most useful first.

    - The smallest prefill and the smallest decode cell: a single user's short prompt and every
      token after it. They come first, for the time to the first token of a fresh engine.
    - The largest decode cell: where a busy server spends its steps.
    - The mixed corner (most prefill rows, most groups, widest): holds any step whatever; its
      temporaries are the largest, so that it also tells whether the engine fits.
    - The largest prefill cell: chunks of a long prompt that runs alone.

    What the grid does not have is left out; a cell that plays two parts counts once.

    Args:
        grid: the cells.
        width: rows of most decode groups: one, and their drafts.
    """
    cells = grid.cells()
    # The narrowest that hold such groups; where none does, groups are cut to what there is.
    decode = [cell for cell in cells if cell.prefill == 0]
    decode = [cell for cell in decode if cell.width >= width] or decode
    prefill = [cell for cell in cells if cell.groups == 0]
    mixed = [cell for cell in cells if cell.prefill and cell.groups]
    hot = [
        *prefill[:1],
        *decode[:1],
        *_first_of_most_groups(decode),
        *mixed[-1:],
        *prefill[-1:],
    ]
    return tuple(dict.fromkeys(hot))


def _first_of_most_groups(decode: list[Cell]) -> list[Cell]:
    most = max((cell.groups for cell in decode), default=0)
    return [cell for cell in decode if cell.groups == most][:1]
