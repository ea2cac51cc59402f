"""Step times per cell and draft length, with and without the drafter; for the draft policy."""

from collections import deque
from statistics import median
from typing import NamedTuple

from bucketing.cell import Cell
from bucketing.grid import Grid
from bucketing.step_time import StepTime

# Step times that a draft length is judged by; older ones are forgotten.
WINDOW = 31
# Of those, how many from before a visit still count after it: the machine may have changed.
KEPT = 4
# Step times before they are believed.
TRUSTED = 3
# A drafter that seems to take more of a step was timed wrongly.
HIGHEST_SHARE = 0.9


class ProgramTimes:
    """Recent steps of one program in one way of use."""

    __slots__ = ("_middle", "_window")

    def __init__(self) -> None:
        """Know nothing yet."""
        self._window: deque[tuple[float, int]] = deque(maxlen=WINDOW)
        self._middle: tuple[float, float] | None = None

    def __len__(self) -> int:
        """Steps that count."""
        return len(self._window)

    @property
    def known(self) -> bool:
        """Whether enough steps were seen."""
        return len(self._window) >= TRUSTED

    def add(self, pairs: int, seconds: float) -> None:
        """Take one step."""
        self._window.append((seconds, pairs))
        self._middle = None

    def shorten(self, kept: int = KEPT) -> None:
        """Drop all but the newest steps."""
        while len(self._window) > kept:
            self._window.popleft()
        self._middle = None

    def seconds(self, pairs: int, per_pair: float) -> float:
        """Return the median time, moved to a step of so many scored pairs."""
        if self._middle is None:
            times, counts = zip(*self._window, strict=True)
            self._middle = median(times), median(counts)
        seconds, middle = self._middle
        return max(seconds + per_pair * (pairs - middle), seconds / 2)


class Option(NamedTuple):
    """A draft length, the pure decode cell that verifies it, and what its steady steps took."""

    drafts: int
    cell: Cell
    times: ProgramTimes


class DraftTimes:
    """Step times per cell and draft length, with and without the drafter.

    The step-time model cannot tell those apart; it is asked for what a scored pair costs, and for
    cells that were never timed.

    Attributes:
        step_time: That model.
        lengths: The draft lengths that fill a decode width, ascending from 0.
        untimed_cell: Whether the last step was no pure decode step, so that it timed no length.
        drafter_share: Share of a step without drafts that the drafter takes: a guess, or measured.
    """

    def __init__(self, drafts: int, grid: Grid, step_time: StepTime, drafter_share: float) -> None:
        """Know no time yet; `drafts` is the most that a request makes."""
        self.step_time = step_time
        self.lengths = tuple(sorted({0, *(min(width - 1, drafts) for width in grid.widths)}))
        self.drafter_share = drafter_share
        self.untimed_cell = False
        self._share_known = False
        self._grid = grid
        self._times: dict[tuple[Cell, int, bool], ProgramTimes] = {}
        self._cells: set[Cell] = set()
        # Fewer drafts than fill the width need the same cell.
        self._length_of = [
            min(length for length in self.lengths if length >= made)
            for made in range(self.lengths[-1] + 1)
        ]

    def options(self, groups: int) -> tuple[tuple[Option, ...], Option]:
        """Return the options of so many groups with the drafter, and the one without."""
        cells = [self._grid.cell_for(0, 0, groups, length + 1) for length in self.lengths]
        self._cells.update(cells)
        options = [
            Option(length, cell, self._times.setdefault((cell, length, True), ProgramTimes()))
            for length, cell in zip(self.lengths, cells, strict=True)
        ]
        without = self._times.setdefault((cells[0], 0, False), ProgramTimes())
        return tuple(options), Option(0, cells[0], without)

    def observe(
        self, cell: Cell, drafter: bool, new_drafts: int, pairs: int, seconds: float
    ) -> None:
        """Take a step, if it verified as many drafts as it made; others are no steady state."""
        self.untimed_cell = cell not in self._cells
        times = self._times.get((cell, self._length_of[new_drafts], drafter))
        if times is not None:
            times.add(pairs, seconds)

    def learn_share(self, share: float) -> None:
        """Take a measured share of the drafter; several count about alike, any against a guess."""
        share = min(max(share, 0.0), HIGHEST_SHARE)
        self.drafter_share = (self.drafter_share + share) / 2 if self._share_known else share
        self._share_known = True

    def per_pair(self, cell: Cell, pairs: int) -> float:
        """Return the seconds that one more scored pair costs."""
        more = self.step_time.predict(cell, 2 * pairs) - self.step_time.predict(cell, pairs)
        return max(more, 0.0) / max(pairs, 1)
