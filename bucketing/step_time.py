"""How long a step takes, by its cell and its scored pairs: a prior, and a model fitted online.

The scheduler cuts and places rows by it, `fit` and `waste` charge pads by it.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from bucketing.cell import Cell

# What a step costs beside its rows, counted in rows (weights are read once per step, one dispatch).
STEP_OVERHEAD_ROWS = 64
# Only ratios matter before anything was measured; the size is that of a prefill row on 8 H200.
PRIOR_ROW_SECONDS = 1e-5

# Observations that a cell is judged by; older ones are forgotten.
WINDOW = 64
# Planning sees new figures only after this many observations, so that plans do not flicker.
REFRESH = 32
FIRST_REFRESH = 4
# Observations before a cell has a slope of its own, and the spread of pairs that shows one.
SLOPE_OBSERVATIONS = 8
SLOPE_SPREAD = 0.1
# Cells before a line through all of them is better than the prior, scaled.
LINE_CELLS = 3
# A residual beyond this many robust standard deviations counts less (Huber's usual constant).
HUBER = 1.345
# The median absolute deviation of a normal distribution in standard deviations.
MAD = 0.6745


@runtime_checkable
class StepTime(Protocol):
    """Predicts the seconds of a step."""

    def predict(self, cell: Cell, pairs: int) -> float:
        """Return seconds; `pairs` are the (row, key) pairs that one indexer layer scores."""
        ...


class RowEquivalents:
    """The prior: a step costs its rows and a fixed overhead, in rows of a nominal time."""

    def predict(self, cell: Cell, pairs: int) -> float:
        """Return seconds, of which only the ratios mean anything."""
        return (cell.rows + STEP_OVERHEAD_ROWS) * PRIOR_ROW_SECONDS


class Figures(NamedTuple):
    """What is known of a cell: seconds = fixed + per_pair * pairs.

    Attributes:
        fixed: Seconds of the step without pairs.
        per_pair: Seconds per scored pair.
        spread: Robust standard deviation of the residual, seconds.
        observations: Steps that the figures rest on.
    """

    fixed: float
    per_pair: float
    spread: float
    observations: int


class _Line(NamedTuple):
    """The model across cells: fixed seconds = start + per_row * rows."""

    start: float
    per_row: float
    per_pair: float


_PRIOR = _Line(STEP_OVERHEAD_ROWS * PRIOR_ROW_SECONDS, PRIOR_ROW_SECONDS, 0.0)


class StepTimeModel:
    """Step times fitted online: per cell, else by a line across cells, else by the prior.

    A cell's figures are a robust line through its last steps. They change only at a refresh, every
    few dozen observations, so that plans made in between agree with each other.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self._figures: dict[Cell, Figures] = {}
        self._line = _PRIOR
        self._windows: dict[Cell, deque[tuple[float, float]]] = {}
        self._touched: set[Cell] = set()
        self._seen = 0
        self._fresh = 0

    def observe(self, cell: Cell, pairs: int, seconds: float) -> None:
        """Learn from one step.

        Raises:
            ValueError: `seconds` is no duration.
        """
        if not 0 < seconds < float("inf"):
            raise ValueError(f"a step of {seconds} seconds was observed; it must be above 0.")
        window = self._windows.get(cell)
        if window is None:
            window = self._windows[cell] = deque(maxlen=WINDOW)
        window.append((float(pairs), float(seconds)))
        self._touched.add(cell)
        self._fresh += 1
        if self._fresh >= min(REFRESH, max(FIRST_REFRESH, self._seen)):
            self.refresh()

    def refresh(self) -> None:
        """Take what was observed into the figures that planning uses."""
        self._seen += self._fresh
        self._fresh = 0
        for cell in self._touched:
            self._figures[cell] = _fit_cell(self._windows[cell], self._line.per_pair)
        self._touched.clear()
        self._line = _fit_line(self._figures)

    def predict(self, cell: Cell, pairs: int) -> float:
        """Return the seconds of a step, by the best that is known of its cell."""
        known = self._figures.get(cell)
        if known is not None:
            return known.fixed + known.per_pair * pairs
        return self._line.start + self._line.per_row * cell.rows + self._line.per_pair * pairs

    def useful(self, prefill_rows: int, decode_rows: int, groups: int, pairs: int) -> float:
        """Return the seconds that exactly these rows would take, by the line across cells."""
        rows = prefill_rows + decode_rows
        return self._line.start + self._line.per_row * rows + self._line.per_pair * pairs

    def figures(self, cell: Cell) -> Figures | None:
        """Return what planning knows of a cell itself; None if it was not observed."""
        return self._figures.get(cell)

    def as_json(self) -> dict[str, Any]:
        """Return the figures as plain values; the window of observations is not kept."""
        self.refresh()
        return {
            "cells": [
                {"cell": list(cell), **figures._asdict()}
                for cell, figures in sorted(self._figures.items())
            ]
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "StepTimeModel":
        """Return a model that starts from saved figures and goes on learning.

        Raises:
            ValueError: The content is not what `as_json` wrote.
        """
        model = cls()
        try:
            for entry in content["cells"]:
                cell = Cell(*(int(size) for size in entry["cell"]))
                fixed, per_pair, spread = (float(entry[name]) for name in Figures._fields[:3])
                known = Figures(fixed, per_pair, spread, int(entry["observations"]))
                model._figures[cell] = known
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"the content holds no step times ({type(error).__name__}: {error}). "
                "Delete the file; it is written anew."
            ) from error
        model._line = _fit_line(model._figures)
        return model


def _fit_cell(window: Iterable[tuple[float, float]], per_pair: float) -> Figures:
    """Fit a robust line to (pairs, seconds) of one cell.

    Args:
        window: The observations.
        per_pair: The slope to take where the observations show none of their own.
    """
    pairs, seconds = np.array(list(window)).T
    own_slope = len(pairs) >= SLOPE_OBSERVATIONS and pairs.std() > SLOPE_SPREAD * max(
        pairs.mean(), 1.0
    )
    if not own_slope:
        # Never below zero: a slope from elsewhere must not explain all of a cell's time.
        slope = min(per_pair, float(np.median(seconds)) / 2 / max(float(np.median(pairs)), 1.0))
        fixed = float(np.median(seconds - slope * pairs))
    else:
        slope, fixed = _huber_line(pairs, seconds)
    spread = float(np.median(np.abs(seconds - fixed - slope * pairs))) / MAD
    return Figures(fixed, slope, spread, len(pairs))


def _huber_line(pairs: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    """Return slope and start of a line by reweighted least squares, neither below zero."""
    slope, fixed = 0.0, float(np.median(seconds))
    for _ in range(5):
        residual = np.abs(seconds - fixed - slope * pairs)
        scale = max(float(np.median(residual)) / MAD, 1e-3 * fixed, 1e-12)
        weights = np.minimum(1.0, HUBER * scale / np.maximum(residual, 1e-15))
        total = weights.sum()
        mean_pairs, mean_seconds = weights @ pairs / total, weights @ seconds / total
        centred = pairs - mean_pairs
        slope = max(0.0, float(weights * centred @ (seconds - mean_seconds)))
        slope /= float(weights * centred @ centred)
        fixed = float(mean_seconds - slope * mean_pairs)
        if fixed < 0:
            fixed, slope = 0.0, float(mean_seconds / mean_pairs)
    return slope, fixed


def _fit_line(figures: Mapping[Cell, Figures]) -> _Line:
    """Fit the model across cells; relative errors count, or the largest cells would decide."""
    if not figures:
        return _PRIOR
    rows = np.array([cell.rows for cell in figures], float)
    fixed = np.array([max(known.fixed, 1e-9) for known in figures.values()])
    slopes = [known.per_pair for known in figures.values() if known.per_pair > 0]
    per_pair = float(np.median(slopes)) if slopes else 0.0
    scale = float(np.median(fixed / (rows + STEP_OVERHEAD_ROWS)))
    scaled = _Line(scale * STEP_OVERHEAD_ROWS, scale, per_pair)
    if len(figures) < LINE_CELLS:
        return scaled
    columns = np.stack([1 / fixed, rows / fixed], 1)
    (start, per_row), *_ = np.linalg.lstsq(columns, np.ones(len(rows)), rcond=None)
    # A step never gets cheaper by pads, and is never free.
    if start < 0 or per_row <= 0:
        return scaled
    return _Line(float(start), float(per_row), per_pair)
