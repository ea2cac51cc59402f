import json
from random import Random

import pytest

from bucketing.cell import Cell
from bucketing.step_time import (
    FIRST_REFRESH,
    REFRESH,
    WINDOW,
    RowEquivalents,
    StepTime,
    StepTimeModel,
)

SMALL, LARGE = Cell(64, 8, 1), Cell(512, 8, 1)


def observed(
    cell=SMALL, steps=WINDOW, *, fixed=0.01, per_pair=1e-7, noise=0.0, outliers=0.0, seed=0
):
    """A model that saw steps of fixed + per_pair * pairs seconds."""
    rng, model = Random(seed), StepTimeModel()
    for _ in range(steps):
        pairs = rng.randint(0, 200_000)
        seconds = fixed + per_pair * pairs + rng.gauss(0, noise)
        model.observe(cell, pairs, 1.0 if rng.random() < outliers else seconds)
    model.refresh()
    return model


def test_both_are_step_times():
    assert isinstance(RowEquivalents(), StepTime)
    assert isinstance(StepTimeModel(), StepTime)


def test_the_prior_counts_rows_and_an_overhead():
    prior = RowEquivalents()
    assert prior.predict(Cell(0, 64, 1), 5) == 2 * prior.predict(Cell(0, 0, 1), 7)
    assert StepTimeModel().predict(LARGE, 0) == pytest.approx(prior.predict(LARGE, 0))


def test_a_cell_is_a_line_in_its_pairs():
    model = observed()
    assert model.predict(SMALL, 0) == pytest.approx(0.01)
    assert model.predict(SMALL, 10**6) == pytest.approx(0.11)
    assert model.figures(SMALL).spread == pytest.approx(0.0, abs=1e-9)
    assert model.figures(LARGE) is None


def test_outliers_move_nothing_and_the_spread_tells_the_noise():
    figures = observed(noise=1e-4, outliers=0.15).figures(SMALL)
    assert figures.fixed == pytest.approx(0.01, rel=0.02)
    assert figures.per_pair == pytest.approx(1e-7, rel=0.02)
    assert 0.5e-4 < figures.spread < 2e-4


def test_old_steps_are_forgotten():
    model = observed(fixed=0.05)
    for _ in range(WINDOW):
        model.observe(SMALL, 0, 0.02)
    model.refresh()
    assert model.predict(SMALL, 0) == pytest.approx(0.02)


def test_figures_change_only_at_a_refresh():
    model = StepTimeModel()
    guess = model.predict(SMALL, 0)
    for _ in range(FIRST_REFRESH - 1):
        model.observe(SMALL, 0, 3.0)
        assert model.predict(SMALL, 0) == guess
    model.observe(SMALL, 0, 3.0)
    assert model.predict(SMALL, 0) == pytest.approx(3.0)
    changes, last = 0, 3.0
    for n in range(10 * REFRESH):
        model.observe(SMALL, 0, 1.0 + n)
        changes += model.predict(SMALL, 0) != last
        last = model.predict(SMALL, 0)
    assert changes <= 13


def test_an_unknown_cell_takes_the_scaled_prior_and_then_a_line_across_cells():
    model = observed(per_pair=0.0)
    rows = RowEquivalents()
    scale = 0.01 / rows.predict(SMALL, 0)
    assert model.predict(LARGE, 0) == pytest.approx(scale * rows.predict(LARGE, 0))
    for cell in (Cell(128, 0, 1), Cell(256, 8, 1), Cell(0, 8, 1)):
        for _ in range(8):
            model.observe(cell, 0, 0.002 + 1e-4 * cell.rows)
    for _ in range(WINDOW):
        model.observe(SMALL, 0, 0.002 + 1e-4 * SMALL.rows)
    model.refresh()
    assert model.predict(LARGE, 0) == pytest.approx(0.002 + 1e-4 * LARGE.rows)
    assert model.useful(100, 5, 5, 0) == pytest.approx(0.002 + 1e-4 * 105)


def test_more_pads_never_look_cheaper_across_cells():
    model = StepTimeModel()
    # Measured upside down: the large cell was faster.
    for rows, seconds in ((64, 0.3), (128, 0.2), (256, 0.1)):
        for _ in range(8):
            model.observe(Cell(rows, 0, 1), 0, seconds)
    model.refresh()
    assert model.predict(Cell(1024, 0, 1), 0) > model.predict(Cell(512, 0, 1), 0) > 0


def test_a_slope_needs_pairs_that_differ():
    model = StepTimeModel()
    for n in range(20):
        model.observe(SMALL, 1000, 0.01 + 1e-4 * (n % 2))
    model.refresh()
    assert model.figures(SMALL).per_pair == 0.0


def test_a_model_survives_a_file():
    model = observed(noise=1e-4)
    again = StepTimeModel.from_json(json.loads(json.dumps(model.as_json())))
    assert again.figures(SMALL) == model.figures(SMALL)
    assert again.predict(LARGE, 7) == model.predict(LARGE, 7)
    for _ in range(WINDOW):
        again.observe(SMALL, 0, 0.5)
    again.refresh()
    assert again.predict(SMALL, 0) == pytest.approx(0.5)


@pytest.mark.parametrize("content", [{}, {"cells": [{"cell": [1, 2]}]}, {"cells": 3}])
def test_a_broken_file_is_refused(content):
    with pytest.raises(ValueError, match="holds no step times"):
        StepTimeModel.from_json(content)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_only_durations_are_observed(seconds):
    with pytest.raises(ValueError, match="must be above 0"):
        StepTimeModel().observe(SMALL, 0, seconds)
