"""What a step of a cell usually takes, by the steps of a log.

A step is judged by the others: its own time is left out, so that a slow step cannot pass for usual.
"""

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from bucketing.cell import Cell
from bucketing.step_time import RowEquivalents
from glm_jax.engine.chunking import scored_pairs
from glm_jax.engine.modes import Mode
from glm_jax.engine.outputs import StepRecord

# Steps of the same cell and about the same context that are compared with, and the fewest.
NEAREST = 32
FEWEST = 3


class Typical(NamedTuple):
    """A usual step.

    Attributes:
        seconds: All of it.
        host: The host's part: all phases but the wait for the device.
        basis: What the figures rest on, in words.
        measured: Whether that is steps of the cell itself.
        cell: The cell; None where it is no one cell's figure.
        cpu: What the process used of all cores together; 0 is not known.
    """

    seconds: float
    host: float
    basis: str
    measured: bool = True
    cell: Cell | None = None
    cpu: float = 0.0


class _Sample(NamedTuple):
    """One step of a cell; of a loop, one of its steps."""

    pairs: int
    seconds: float
    host: float
    cpu: float
    place: int


class TypicalSteps:
    """Usual times by cell, mode and context.

    Attributes:
        pause: Seconds that usually pass between two steps.
    """

    def __init__(self, records: Sequence[StepRecord], slowed: Iterable[int] = ()) -> None:
        """Collect.

        Args:
            records: Of a log, in order.
            slowed: Places of steps that something outside slowed down; they count only where there
                are no others.
        """
        self._samples = _collect(records, frozenset(slowed))
        pauses = [
            after.started - before.started - before.wall_time
            for before, after in itertools.pairwise(records)
        ]
        self.pause = max(0.0, median(pauses)) if pauses else 0.0
        self._line = _line(self._samples)

    def decode_cells(self, mode: str) -> list[Cell]:
        """Return the cells without prefill rows of which steps ran in a mode."""
        return [cell for cell, ran in self._samples if ran == mode and not cell.prefill]

    def of(self, cell: Cell, mode: str, pairs: int, *, without: int = -1) -> Typical | None:
        """Return the usual step of a cell; None where no step of it was measured.

        Args:
            cell: The cell.
            mode: "FULL", "PIECEWISE" or "EAGER".
            pairs: (row, key) pairs that the step scores.
            without: Place of a step to leave out.
        """
        samples = self._samples.get((cell, mode))
        if samples is None:
            return None
        middle = bisect_left(samples, pairs, key=lambda sample: sample.pairs)
        low = max(0, min(middle - NEAREST // 2, len(samples) - NEAREST - 1))
        near = [one for one in samples[low : low + NEAREST + 1] if one.place != without]
        if len(near) < FEWEST:
            return None
        seconds, host, cpu = (
            median(values) for values in zip(*(one[1:4] for one in near), strict=True)
        )
        basis = f"{len(near)} {mode} steps of cell {tuple(cell)}"
        return Typical(seconds, host, basis, cell=cell, cpu=cpu)

    def guess(self, record: StepRecord, alone: Typical | None) -> Typical | None:
        """Return what a step that is the only one of its cell should have taken as a FULL step.

        Args:
            record: The step.
            alone: Its decodes in a step of their own.
        """
        cell, steps = record.cell, record.loop_steps
        if cell is None:
            return None
        host = alone.host if alone is not None else 0.0
        prior = RowEquivalents()
        predicted = record.predicted / steps
        # Before anything was measured the prediction is of rows, in no true seconds.
        if predicted > 0 and abs(predicted - prior.predict(cell, 0)) > 1e-9:
            return Typical(predicted, host, "the scheduler's prediction", measured=False)
        if self._line is not None:
            start, per_row = self._line
            seconds = start + per_row * cell.rows
            return Typical(seconds, host, "a line through the other cells", measured=False)
        if alone is None:
            return None
        decode = cell._replace(prefill=0)
        ratio = prior.predict(cell, 0) / prior.predict(decode, 0)
        return Typical(alone.seconds * ratio, host, "its rows", measured=False)


def decode_pairs(record: StepRecord) -> int:
    """Return the scored pairs of a step's decodes alone."""
    return sum(
        scored_pairs(rows.start, rows.known + rows.drafts)
        for rows in record.rows
        if not rows.prefill
    )


def host_seconds(record: StepRecord) -> float:
    """Return the time of a step that the host needed itself."""
    phases = record.phases
    return sum(phases) - phases.device


def _collect(
    records: Sequence[StepRecord], slowed: frozenset[int]
) -> dict[tuple[Cell, str], list[_Sample]]:
    """Return the clean steps of each cell and mode, by pairs; slowed ones where too few are."""
    clean: dict[tuple[Cell, str], list[_Sample]] = {}
    others: dict[tuple[Cell, str], list[_Sample]] = {}
    for place, record in enumerate(records):
        if record.cell is None or record.fault is not None or record.halves:
            continue
        steps = record.loop_steps
        sample = _Sample(
            record.pairs,
            record.wall_time / steps,
            host_seconds(record) / steps,
            record.cpu_time / steps,
            place,
        )
        kept = others if place in slowed else clean
        kept.setdefault((record.cell, record.mode), []).append(sample)
    for key, samples in others.items():
        if len(clean.get(key, ())) < FEWEST:
            clean.setdefault(key, []).extend(samples)
    return {key: sorted(samples) for key, samples in clean.items()}


def _line(samples: dict[tuple[Cell, str], list[_Sample]]) -> tuple[float, float] | None:
    """Return start and seconds per row through the medians of the FULL cells, if they allow."""
    cells = [
        (cell.rows, median(one.seconds for one in known))
        for (cell, mode), known in samples.items()
        if mode == Mode.FULL and len(known) >= FEWEST
    ]
    if len({rows for rows, _ in cells}) < 2:
        return None
    rows, seconds = np.array(cells).T
    # Relative errors count, or the largest cells would decide.
    columns = np.stack([1 / seconds, rows / seconds], 1)
    (start, per_row), *_ = np.linalg.lstsq(columns, np.ones(len(rows)), rcond=None)
    return (float(start), float(per_row)) if start >= 0 and per_row > 0 else None
