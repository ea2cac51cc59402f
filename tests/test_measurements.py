"""Measurements of earlier runs: read at a start, added to, never trusted blindly."""

import pytest

from bucketing.cell import Cell
from bucketing.grid_use import GridUse
from bucketing.program_store import ProgramStore, ProgramStoreWarning
from glm_jax.measurements import NAME, Measurements, MeasurementsWarning

CELL = Cell(64, 8, 1)


@pytest.fixture
def store(tmp_path):
    return ProgramStore(tmp_path / "programs", "f" * 16)


def run_of(store, steps=10) -> None:
    measured, use = Measurements(store), GridUse()
    for _ in range(steps):
        measured.step_time.observe(CELL, 100, 0.02)
        use.add(CELL, 70, 0.02, piecewise=False)
    measured.save(use)


def test_a_later_run_starts_from_what_an_earlier_one_measured(store):
    run_of(store)
    later = Measurements(store)
    assert later.step_time.predict(CELL, 100) == pytest.approx(0.02)
    assert later.use[CELL].steps == 10


def test_use_adds_up_over_runs(store):
    run_of(store)
    run_of(store)
    assert Measurements(store).use[CELL].steps == 20


def test_saving_twice_counts_a_run_once(store):
    measured, use = Measurements(store), GridUse()
    use.add(CELL, 70, 0.02, piecewise=False)
    measured.save(use)
    measured.save(use)
    assert Measurements(store).use[CELL].steps == 1


def test_something_else_is_reported_and_not_used(store):
    store.save_json(NAME, {"use": [], "step_time": {}})
    with pytest.warns(MeasurementsWarning, match="not used"):
        measured = Measurements(store)
    assert measured.use.steps == 0


def test_a_broken_file_is_reported_and_not_used(store):
    run_of(store)
    (file,) = store.folder.glob(f"{NAME}*")
    file.write_text("{")
    with pytest.warns(ProgramStoreWarning, match="ignored"):
        measured = Measurements(store)
    assert measured.use.steps == 0


def test_a_run_without_steps_writes_nothing(store):
    Measurements(store).save(GridUse())
    assert list(store.folder.glob(f"{NAME}*")) == []


def test_a_store_that_does_not_last_keeps_nothing():
    store = ProgramStore.temporary("f" * 16)
    run_of(store)
    assert list(store.folder.glob(f"{NAME}*")) == []
