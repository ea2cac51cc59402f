"""What prefill rows add to the steps of decoding requests, measured while the engine runs."""

from collections import deque
from statistics import median

from bucketing.cell import Cell

# Decode steps of a cell that the usual one is the median of, and how often it is taken anew.
WINDOW = 64
REFRESH = 16


class Interference:
    """Compares mixed steps with the latest decode steps of the same groups."""

    def __init__(self) -> None:
        """Know no decode step yet."""
        self._windows: dict[Cell, deque[float]] = {}
        self._usual: dict[Cell, float] = {}
        self._fresh: dict[Cell, int] = {}

    def decode(self, cell: Cell, seconds: float) -> None:
        """Take a step without prefill rows."""
        window = self._windows.setdefault(cell, deque(maxlen=WINDOW))
        window.append(seconds)
        fresh = self._fresh.get(cell, 0) + 1
        # Often at first, while every step moves the median.
        if fresh >= min(REFRESH, len(window)):
            self._usual[cell] = median(window)
            fresh = 0
        self._fresh[cell] = fresh

    def mixed(self, cell: Cell, seconds: float) -> float | None:
        """Return what a mixed step took above a decode step, at least 0; None before there was any.

        Args:
            cell: Of the mixed step.
            seconds: It took.
        """
        usual = self._usual.get(cell._replace(prefill=0))
        return None if usual is None else max(0.0, seconds - usual)
