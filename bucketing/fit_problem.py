"""What the fitting of a grid starts from: traffic, candidate sizes, and what each cell costs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
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
class Problem:
    """Traffic, candidates and the cost of every candidate cell.

    Attributes:
        shapes: Weight of each shape.
        step_time: Predicts the time of a cell.
        prefill: Candidate prefill sizes, ascending from 0 to the budget.
        groups: Candidate group sizes, ascending from 0 to max_num_seqs.
        widths: Decode widths, ascending.
        cut_share: How many of the cuts to a lower bucket that would pay are made.
    """

    shapes: Mapping[Shape, float]
    step_time: StepTime
    prefill: tuple[int, ...]
    groups: tuple[int, ...]
    widths: tuple[int, ...]
    cut_share: float = CUT_SHARE

    @cached_property
    def cost(self) -> Float[np.ndarray, "widths prefill groups"]:
        """Seconds of every candidate cell; the empty one is free."""
        table = [
            [[self.step_time.predict(Cell(p, g, q), 0) for g in self.groups] for p in self.prefill]
            for q in self.widths
        ]
        seconds = np.array(table)
        seconds[:, 0, 0] = 0.0
        return seconds

    @cached_property
    def weight(self) -> Float[np.ndarray, "widths prefill groups"]:
        """Weight of the traffic by the smallest candidate that holds it.

        Steps without groups count as of the largest width, whose cells every grid has.
        """
        total = np.zeros((len(self.widths), len(self.prefill), len(self.groups)))
        for (rows, groups, width), weight in self.shapes.items():
            w = int(np.searchsorted(self.widths, width)) if groups else len(self.widths) - 1
            p, g = np.searchsorted(self.prefill, rows), np.searchsorted(self.groups, groups)
            total[w, p, g] += weight
        return total

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
        total = 0.0
        for w, p, g in np.argwhere(self.weight).tolist():
            shape = Shape(self.prefill[p], self.groups[g], self.widths[w])
            total += float(self.weight[w, p, g]) * self._seconds(grid, shape)
        return total

    def _seconds(self, grid: Grid, shape: Shape) -> float:
        """Return the expected time of one step, cuts included as in `bucket_cost`."""
        rows, groups, width = shape
        cell = grid.cell_for(rows, min(rows, 1), groups, width)
        whole = self.step_time.predict(cell, 0)
        below = grid.prefill.floor(rows)
        if below in (0, rows):
            return whole
        base = self.step_time.predict(grid.cell_for(0, 0, groups, width), 0) if groups else 0.0
        rest = (rows - below) * (whole - base) / cell.prefill
        cut = self.step_time.predict(grid.cell_for(below, 1, groups, width), 0) + rest
        return whole - self.cut_share * max(whole - cut, 0)
