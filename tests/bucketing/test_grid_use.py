"""Counts of cells: what they add up to, and that they survive a restart."""

import pytest

from bucketing.cell import Cell
from bucketing.grid_use import CellCount, GridUse

CELL, OTHER = Cell(64, 8, 1), Cell(0, 8, 1)


@pytest.fixture
def use():
    use = GridUse()
    use.add(CELL, 36, 0.5, piecewise=True)
    use.add(CELL, 72, 0.25, piecewise=False)
    use.add(OTHER, 8, 0.125, piecewise=False)
    return use


def test_steps_of_a_cell_are_counted_with_rows_time_and_mode(use):
    assert use[CELL] == CellCount(steps=2, useful_rows=108, seconds=0.75, piecewise=1)
    assert use.steps == 3


def test_waste_is_the_share_of_pad_rows(use):
    assert use.waste(CELL) == pytest.approx(0.25)
    assert use.waste(OTHER) == 0.0


def test_a_cell_that_was_never_used_counts_nothing(use):
    assert use[Cell(1, 1, 1)] == CellCount()
    assert use.waste(Cell(1, 1, 1)) == 0.0


def test_counts_add_up_over_runs(use):
    both = use + GridUse.from_json(use.as_json())
    assert both[CELL] == CellCount(4, 216, 1.5, 2)
    assert use[CELL].steps == 2


def test_something_else_is_refused():
    with pytest.raises(ValueError, match="holds no use of cells"):
        GridUse.from_json([{"cell": [1, 2]}])
