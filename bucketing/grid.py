"""The grid of compiled cells: which cell a step uses, and which prefill total fits one well."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from bucketing.axis import Axis, NoCellError
from bucketing.cell import Cell, chunks_for
from bucketing.step_time import StepTime


@dataclass(frozen=True)
class Grid:
    """A set of cells: every combination of two axes and the decode widths, or an explicit list.

    An explicit list may give each prefill bucket its own group sizes. It may also miss
    combinations: a step that none of its cells holds gets the cell of the axes, which is then not
    `in` the grid (nothing is compiled for it in advance).

    Attributes:
        prefill: P, rows of the prefill segment; its largest size is the token budget of a step.
        groups: G, groups of the decode segment; its largest size is max_num_seqs, so that every
            decoding request can be served in every step.
        widths: Q, ascending rows per group; all groups of a step use one width.
        explicit: The cells, ascending, where they are not all combinations; see `from_cells`.
    """

    prefill: Axis
    groups: Axis
    widths: tuple[int, ...] = (1,)
    explicit: tuple[Cell, ...] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Check the widths and that every cell lies on the axes."""
        if not self.widths or list(self.widths) != sorted(set(self.widths)) or self.widths[0] < 1:
            raise ValueError(
                f"decode widths {self.widths} must be ascending, distinct and >= 1, for example "
                "(1,) or (1, 4). Change decode_widths."
            )
        for cell in self.explicit or ():
            self._check(cell)

    def _check(self, cell: Cell) -> None:
        allowed = self.widths if cell.groups else self.widths[:1]
        on_axes = cell.prefill in self.prefill.edges and cell.groups in self.groups.edges
        if not on_axes or cell.width not in allowed or cell.prefill == cell.groups == 0:
            raise ValueError(
                f"cell {tuple(cell)} is not on the axes {self.prefill.edges}, {self.groups.edges} "
                f"with widths {self.widths}. Build the grid with Grid.from_cells."
            )

    @classmethod
    def from_cells(
        cls,
        cells: Iterable[Sequence[int]],
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        widths: Sequence[int] | None = None,
    ) -> "Grid":
        """Make a grid of exactly these cells.

        Args:
            cells: (P, G, Q) each; Q does not matter without groups.
            max_num_batched_tokens: The budget: the largest P a step may need.
            max_num_seqs: The most groups a step may need.
            widths: The decode widths a step may need; by default those of the cells.

        Raises:
            ValueError: A cell is negative, empty, or larger than a step may need.
        """
        listed = [tuple(map(int, cell)) for cell in cells]
        bad = [cell for cell in listed if len(cell) != 3 or min(cell) < 0 or not sum(cell[:2])]
        if bad or not listed:
            raise ValueError(
                f"cells {bad or listed} make no grid; each must be (prefill rows, groups, rows "
                "per group) with at least one row. Change the list of cells."
            )
        if widths is None:
            widths = sorted({cell[2] for cell in listed if cell[1]}) or (1,)
        most = (max_num_batched_tokens, max_num_seqs, max(widths))
        for cell in listed:
            if cell[0] > most[0] or cell[1] > most[1] or (cell[1] and cell[2] not in widths):
                raise ValueError(
                    f"cell {cell} is outside of max_num_batched_tokens {most[0]}, max_num_seqs "
                    f"{most[1]} and decode_widths {tuple(widths)}. Raise those or drop the cell."
                )
        distinct = {Cell(p, g, q if g else widths[0]) for p, g, q in listed}
        return cls(
            Axis.cut("prefill rows", (cell.prefill for cell in distinct), most[0]),
            Axis.cut("groups", (cell.groups for cell in distinct), most[1]),
            tuple(widths),
            explicit=tuple(sorted(distinct)),
        )

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Grid":
        """Read what `as_json` wrote.

        Raises:
            ValueError: The content is not a grid.
        """
        try:
            return cls.from_cells(
                content["cells"],
                max_num_batched_tokens=content["max_num_batched_tokens"],
                max_num_seqs=content["max_num_seqs"],
                widths=content["decode_widths"],
            )
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"the content is no grid ({type(error).__name__}: {error}); it must hold "
                "max_num_batched_tokens, max_num_seqs, decode_widths and cells. "
                "Make it with `glm-jax grid plan`."
            ) from error

    def as_json(self) -> dict[str, Any]:
        """Return the grid as plain values, for a grid file."""
        return {
            "max_num_batched_tokens": self.prefill.largest,
            "max_num_seqs": self.max_num_seqs,
            "decode_widths": list(self.widths),
            "cells": [list(cell) for cell in self.cells()],
        }

    @property
    def max_num_seqs(self) -> int:
        """The most requests a step can serve."""
        return self.groups.largest

    @property
    def max_chunks(self) -> int:
        """The most chunks any cell holds."""
        return self.chunks(self.prefill.largest)

    @property
    def complete(self) -> bool:
        """Whether every step has a cell: the largest one holds them all."""
        return Cell(self.prefill.largest, self.groups.largest, self.widths[-1]) in self

    def __contains__(self, cell: object) -> bool:
        return cell in self._members

    def chunks(self, prefill: int) -> int:
        """Return J of a prefill bucket."""
        return chunks_for(prefill, self.max_num_seqs)

    def cells(self) -> tuple[Cell, ...]:
        """Return every cell, ascending; without groups only the smallest width exists."""
        return self.explicit if self.explicit is not None else tuple(self._combinations())

    @cached_property
    def _members(self) -> frozenset[Cell]:
        return frozenset(self.cells())

    @cached_property
    def _found(self) -> dict[tuple[int, int, int], Cell]:
        """Cells already searched, by the cell of the axes."""
        return {}

    def _combinations(self) -> Iterator[Cell]:
        for prefill in self.prefill.edges:
            for groups in self.groups.edges:
                for width in self.widths if groups else self.widths[:1]:
                    if prefill or groups:
                        yield Cell(prefill, groups, width)

    def cell_for(self, prefill_rows: int, chunks: int, groups: int, width: int = 1) -> Cell:
        """Return the cell with the fewest rows that holds a step; more never gives a smaller one.

        Where no cell of an explicit grid holds the step, it is the cell of the axes, which is not
        in the grid.

        Args:
            prefill_rows: Rows in the prefill segment.
            chunks: Requests those rows belong to.
            groups: Groups in the decode segment.
            width: Rows of the longest group; ignored without groups.

        Raises:
            NoCellError: Nothing to compute, or too much for the largest cell.
        """
        prefill = self.prefill.ceiling(prefill_rows)
        if chunks > self.chunks(prefill):
            prefill = self._prefill_for_chunks(prefill, chunks)
        group_bucket = self.groups.ceiling(groups)
        if groups == 0:
            if prefill == 0:
                raise NoCellError(
                    f"a step of {prefill_rows} prefill rows and {groups} groups has no cell. "
                    "Plan at least one row."
                )
            return self._smallest(prefill, 0, self.widths[0])
        for allowed in self.widths:
            if width <= allowed:
                return self._smallest(prefill, group_bucket, allowed)
        raise NoCellError(
            f"a group of {width} rows fits no decode width (largest: {self.widths[-1]}). "
            f"Send fewer drafts or add a width to decode_widths; widths: {self.widths}."
        )

    def _smallest(self, prefill: int, groups: int, width: int) -> Cell:
        """Return the cell with the fewest rows that holds this one of the axes; remembered."""
        asked = prefill, groups, width
        found = self._found.get(asked)
        if found is None:
            found = Cell(*asked)
            # Among all combinations the cell of the axes is its own smallest.
            if self.explicit is not None and found not in self:
                holding = (cell for cell in self.explicit if _holds(cell, found))
                found = min(holding, key=lambda cell: (cell.rows, cell), default=found)
            self._found[asked] = found
        return found

    def _prefill_for_chunks(self, prefill: int, chunks: int) -> int:
        """Return the smallest bucket of at least `prefill` rows that holds `chunks` chunks."""
        for edge in self.prefill.edges:
            if edge >= prefill and self.chunks(edge) >= chunks:
                return edge
        raise NoCellError(
            f"{chunks} chunks fit no prefill bucket (largest: {self.prefill.largest} rows, "
            f"{self.max_chunks} chunks). Plan fewer requests per step."
        )

    def fit_prefill(
        self,
        rows: int,
        step_time: StepTime,
        *,
        groups: int = 0,
        width: int = 1,
        at_least: int = 0,
    ) -> int:
        """Return how many of `rows` waiting prefill rows to compute in this step.

        The answer is `rows` (padded up to its bucket), or a bucket below (no pad) whose rest
        follows whole in the next step, whichever takes the least predicted time in all. The groups
        decode in both steps anyway, so a step costs what it takes beyond them. A tie takes more
        now, and rows that fill a bucket are never cut.

        Example:
            With buckets 64 and 512: 65 rows -> 64 (64 + 1 rows in two steps beat one of 512),
            130 rows -> 130 (the rest of 66 would need the bucket of 512 as well),
            40 rows -> 40 (padded to 64).

        Args:
            rows: Waiting rows, at most the largest bucket.
            step_time: Predicts the time of a step in a cell.
            groups: Groups of the step, and of the next.
            width: Rows of the longest group.
            at_least: Rows that must not wait (again).

        Raises:
            NoCellError: `rows` is above the largest bucket; the caller cuts at the budget first.
        """
        if rows == 0:
            return 0
        cell = self.cell_for(rows, 1, groups, width)
        if cell.prefill == rows:
            return rows
        base = step_time.predict(self.cell_for(0, 0, groups, width), 0) if groups else 0.0
        # A step outside the grid is only taken where no cut stays inside.
        best, taken = (cell not in self, step_time.predict(cell, 0) - base), rows
        for edge in reversed(self.prefill.edges):
            if not 0 < edge < rows:
                continue
            if edge < at_least:
                break
            now = self.cell_for(edge, 1, groups, width)
            then, rest = self._rest(rows - edge, step_time, groups, width)
            cost = step_time.predict(now, 0) - base + rest - base
            outside = now not in self or then not in self
            if (outside, cost) < best:
                best, taken = (outside, cost), edge
        return taken

    def _rest(self, rows: int, step_time: StepTime, groups: int, width: int) -> tuple[Cell, float]:
        """Return the cell and time of the step that computes a rest: a chunk, or one more group."""
        chunk = self.cell_for(rows, 1, groups, width)
        seconds = step_time.predict(chunk, 0)
        if rows <= self.widths[-1] and groups < self.groups.largest:
            group = self.cell_for(0, 0, groups + 1, max(width, rows))
            as_group = step_time.predict(group, 0)
            if as_group < seconds:
                return group, as_group
        return chunk, seconds


def _holds(cell: Cell, asked: Cell) -> bool:
    """Whether a step of the shape `asked` fits into a cell."""
    wide = asked.groups == 0 or cell.width >= asked.width
    return wide and cell.prefill >= asked.prefill and cell.groups >= asked.groups
