"""What the fitting of a grid starts from: traffic, candidate sizes, and what each cell costs."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from bucketing.cell import Cell
from bucketing.grid import Grid
from bucketing.step_time import StepTime

# Rows above a bucket can be cut to it, their rest then shares a later step. A rest may wait once
# only, so about half of the cuts that would pay can be made.
CUT_SHARE = 0.5


class Shape(NamedTuple):
    """What a step asks of a cell: prefill rows, groups, rows of the longest group."""

    prefill_rows: int
    groups: int
    width: int


@dataclass(frozen=True)
class Candidates:
    """The sizes that a grid may have.

    Attributes:
        prefill: Prefill sizes, ascending from 0 to the budget.
        groups: Group sizes, ascending from 0 to max_num_seqs.
        widths: Decode widths, ascending.
    """

    prefill: tuple[int, ...]
    groups: tuple[int, ...]
    widths: tuple[int, ...]

    def weigh(self, shapes: Mapping[Shape, float]) -> Float[np.ndarray, "widths prefill groups"]:
        """Return the weight of the traffic by the smallest candidate that holds it.

        Steps without groups count as of the largest width, whose cells every grid has.
        """
        total = np.zeros((len(self.widths), len(self.prefill), len(self.groups)))
        for (rows, groups, width), weight in shapes.items():
            w = bisect_left(self.widths, width) if groups else len(self.widths) - 1
            total[w, bisect_left(self.prefill, rows), bisect_left(self.groups, groups)] += weight
        return total

    def price(self, step_time: StepTime) -> Float[np.ndarray, "widths prefill groups"]:
        """Return the seconds of every candidate cell; the empty one is free."""
        table = [
            [[step_time.predict(Cell(p, g, q), 0) for g in self.groups] for p in self.prefill]
            for q in self.widths
        ]
        seconds = np.array(table)
        seconds[:, 0, 0] = 0.0
        return seconds


@dataclass(frozen=True)
class Problem:
    """Traffic, candidate sizes, and the cost of every candidate cell.

    Attributes:
        candidates: The sizes.
        cost: Seconds of every candidate cell.
        weight: Weight of the traffic at every candidate.
        cut_share: How many of the cuts to a lower bucket that would pay are made.
    """

    candidates: Candidates
    cost: Float[np.ndarray, "widths prefill groups"]
    weight: Float[np.ndarray, "widths prefill groups"]
    cut_share: float = CUT_SHARE

    @property
    def prefill(self) -> tuple[int, ...]:
        """Candidate prefill sizes."""
        return self.candidates.prefill

    @property
    def groups(self) -> tuple[int, ...]:
        """Candidate group sizes."""
        return self.candidates.groups

    @property
    def widths(self) -> tuple[int, ...]:
        """Decode widths."""
        return self.candidates.widths

    @property
    def largest_cost(self) -> float:
        """Seconds of the cell that holds every step."""
        return float(self.cost[-1, -1, -1])

    def cell(self, width: int, prefill: int, groups: int) -> Cell:
        """Return a candidate cell by its indices."""
        return Cell(self.prefill[prefill], self.groups[groups], self.widths[width])

    def bucket_cost(self, first: int, last: int) -> Float[np.ndarray, "widths p groups"]:
        """Return what a bucket `last` costs each prefill candidate of first..last.

        A cut goes to the bucket below, and the rest costs its share of a full bucket.
        """
        cost = self.cost
        whole = np.repeat(cost[:, last : last + 1], last + 1 - first, 1)
        if first <= 1:
            return whole
        sizes = np.array(self.prefill)
        rest = sizes[first : last + 1] - sizes[first - 1]
        rate = (cost[:, last] - cost[:, 0]) / sizes[last]
        cut = cost[:, first - 1 : first] + rest[None, :, None] * rate[:, None, :]
        return whole - self.cut_share * np.maximum(whole - cut, 0)

    def grid(self, cells: Iterable[Cell]) -> Grid:
        """Return a grid of cells and of the one that holds every step."""
        largest = Cell(self.prefill[-1], self.groups[-1], self.widths[-1])
        return Grid.from_cells(
            {largest, *cells},
            max_num_batched_tokens=largest.prefill,
            max_num_seqs=largest.groups,
            widths=self.widths,
        )

    def seconds(self, grid: Grid) -> float:
        """Return the time that the traffic takes in the cells of a grid of candidate sizes.

        Such a grid gives the candidates that hold a shape the same cell as the shape.
        """
        where = np.argwhere(self.weight).tolist()
        seconds = [self._seconds(grid, w, p, g) for w, p, g in where]
        return float(self.weight[self.weight != 0] @ np.array(seconds))

    def _seconds(self, grid: Grid, w: int, p: int, g: int) -> float:
        """Return the expected time of one step, cuts included as in `bucket_cost`."""
        rows, groups, width = self.prefill[p], self.groups[g], self.widths[w]
        cell = grid.cell_for(rows, min(rows, 1), groups, width)
        whole = self._price(cell)
        below = grid.prefill.floor(rows)
        if below in (0, rows) or self.cut_share == 0:
            return whole
        base = self._price(grid.cell_for(0, 0, groups, width)) if groups else 0.0
        rest = (rows - below) * (whole - base) / cell.prefill
        cut = self._price(grid.cell_for(below, 1, groups, width)) + rest
        return whole - self.cut_share * max(whole - cut, 0)

    def _price(self, cell: Cell) -> float:
        w = bisect_left(self.widths, cell.width)
        p, g = bisect_left(self.prefill, cell.prefill), bisect_left(self.groups, cell.groups)
        return float(self.cost[w, p, g])
