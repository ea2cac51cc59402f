"""What pads cost: time and rows of a step's cell beside those of its useful rows."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from bucketing.cell import Cell
from bucketing.step_rows import StepRows
from bucketing.step_time import StepTime


@runtime_checkable
class UsefulTime(StepTime, Protocol):
    """Also predicts the seconds that exactly the useful rows would take."""

    def useful(self, prefill_rows: int, decode_rows: int, groups: int, pairs: int) -> float:
        """Return the seconds of a step without pads."""
        ...


class CellUse(NamedTuple):
    """How a cell was used.

    Attributes:
        steps: Steps in it.
        seconds: Their predicted time.
        lost: The part of it that pads took.
    """

    steps: int
    seconds: float
    lost: float


class Waste(NamedTuple):
    """What the pads of some steps cost, beyond the useful rows: 0.03 is three percent.

    Attributes:
        steps: Steps that were judged.
        seconds: Predicted time of their cells.
        time: Time lost, as a fraction of the time of the useful rows.
        rows: Pad rows, as a fraction of the useful rows.
        p99: The 99th percentile of a single step's fraction of time.
        cells: Use of each cell, most time first.
    """

    steps: int
    seconds: float
    time: float
    rows: float
    p99: float
    cells: dict[Cell, CellUse]


def measure_waste(steps: Sequence[StepRows], step_time: UsefulTime) -> Waste:
    """Return the waste of steps in the cells that they name.

    Raises:
        ValueError: There is no step.
    """
    seconds = [step_time.predict(step.cell, step.pairs) for step in steps]
    return waste_of(steps, seconds, step_time)


def waste_of(steps: Sequence[StepRows], seconds: Iterable[float], step_time: UsefulTime) -> Waste:
    """Return the waste of steps that took these seconds each.

    Raises:
        ValueError: There is no step.
    """
    if not steps:
        raise ValueError("no steps to judge; give a trace or a log with at least one step.")
    taken = np.fromiter(seconds, float, len(steps))
    useful = np.array([step_time.useful(*step[1:4], step.pairs) for step in steps])
    rows = sum(step.cell.rows for step in steps)
    useful_rows = sum(step.useful_rows for step in steps)
    return Waste(
        len(steps),
        float(taken.sum()),
        float(taken.sum() / useful.sum() - 1),
        rows / useful_rows - 1,
        float(np.quantile(taken / useful - 1, 0.99)),
        _cell_use(steps, taken, taken - useful),
    )


def _cell_use(
    steps: Iterable[StepRows], taken: np.ndarray, lost: np.ndarray
) -> dict[Cell, CellUse]:
    count: Counter[Cell] = Counter()
    seconds: Counter[Cell] = Counter()
    gone: Counter[Cell] = Counter()
    for step, time, extra in zip(steps, taken.tolist(), lost.tolist(), strict=True):
        count[step.cell] += 1
        seconds[step.cell] += time
        gone[step.cell] += extra
    most_first = sorted(count, key=lambda cell: -seconds[cell])
    return {cell: CellUse(count[cell], seconds[cell], gone[cell]) for cell in most_first}
