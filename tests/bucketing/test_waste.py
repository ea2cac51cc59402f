import pytest

from bucketing.cell import Cell
from bucketing.step_rows import StepRows
from bucketing.waste import UsefulTime, measure_waste


class RowsTime:
    """A second per row, and one per hundred pairs."""

    def predict(self, cell, pairs):
        return cell.rows + pairs / 100

    def useful(self, prefill_rows, decode_rows, groups, pairs):
        return prefill_rows + decode_rows + pairs / 100


def step(cell, prefill_rows=0, decode_rows=0, pairs=0):
    return StepRows(Cell(*cell), prefill_rows, decode_rows, decode_rows, 1, pairs)


def test_waste_is_the_time_beyond_the_useful_rows():
    waste = measure_waste([step((8, 4, 1), 6, 4), step((0, 4, 1), 0, 4)], RowsTime())
    assert waste.time == pytest.approx(2 / 14)
    assert waste.rows == pytest.approx(2 / 14)
    assert (waste.steps, waste.seconds) == (2, 16)


def test_pairs_are_no_waste():
    waste = measure_waste([step((8, 0, 1), 6, pairs=400)], RowsTime())
    assert waste.time == pytest.approx(2 / 10)
    assert waste.rows == pytest.approx(2 / 6)


def test_the_percentile_is_of_single_steps():
    steps = [step((4, 0, 1), 4)] * 97 + [step((8, 0, 1), 4)] * 3
    waste = measure_waste(steps, RowsTime())
    assert waste.p99 == pytest.approx(1.0)
    assert waste.time == pytest.approx(0.03)


def test_cells_are_listed_with_what_they_lost():
    steps = [step((4, 0, 1), 3), step((4, 0, 1), 4), step((64, 0, 1), 60)]
    waste = measure_waste(steps, RowsTime())
    assert list(waste.cells) == [(64, 0, 1), (4, 0, 1)]
    assert waste.cells[Cell(4, 0, 1)] == (2, 8, 1)


def test_the_model_is_a_useful_time_and_no_steps_are_refused():
    assert isinstance(RowsTime(), UsefulTime)
    with pytest.raises(ValueError, match="no steps to judge"):
        measure_waste([], RowsTime())
