"""Measurements of earlier runs: read at a start, added to, never trusted blindly."""

import pytest

from bucketing.cell import Cell
from bucketing.grid_use import GridUse
from glm_jax.measurements import NAME, Measurements, MeasurementsWarning

CELL = Cell(64, 8, 1)


def run_of(folder, steps=10) -> None:
    measured, use = Measurements(folder), GridUse()
    for _ in range(steps):
        measured.step_time.observe(CELL, 100, 0.02)
        use.add(CELL, 70, 0.02, piecewise=False)
    measured.save(use)


def test_a_later_run_starts_from_what_an_earlier_one_measured(tmp_path):
    run_of(tmp_path)
    later = Measurements(tmp_path)
    assert later.step_time.predict(CELL, 100) == pytest.approx(0.02)
    assert later.use[CELL].steps == 10


def test_use_adds_up_over_runs(tmp_path):
    run_of(tmp_path)
    run_of(tmp_path)
    assert Measurements(tmp_path).use[CELL].steps == 20


def test_saving_twice_counts_a_run_once(tmp_path):
    measured, use = Measurements(tmp_path), GridUse()
    use.add(CELL, 70, 0.02, piecewise=False)
    measured.save(use)
    measured.save(use)
    assert Measurements(tmp_path).use[CELL].steps == 1


@pytest.mark.parametrize("content", ["", "{", "[]", '{"use": [], "step_time": {}}'])
def test_a_broken_file_is_reported_and_not_used(tmp_path, content):
    (tmp_path / NAME).write_text(content)
    with pytest.warns(MeasurementsWarning, match="not used"):
        measured = Measurements(tmp_path)
    assert measured.use.steps == 0


def test_a_run_without_steps_writes_nothing(tmp_path):
    Measurements(tmp_path).save(GridUse())
    assert list(tmp_path.iterdir()) == []


def test_without_a_folder_nothing_is_kept():
    measured, use = Measurements(None), GridUse()
    use.add(CELL, 70, 0.02, piecewise=False)
    measured.save(use)
