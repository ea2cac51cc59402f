"""The grid of compiled cells: which cell a step uses, and which prefill total fits one well."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from bucketing.axis import Axis, NoCellError

# What a step costs beside its rows, counted in rows (weights are read once per step, one dispatch).
# It only ranks ways to cut a prefill; a time model per cell takes its place once it is fitted.
STEP_OVERHEAD_ROWS = 64


class Cell(NamedTuple):
    """One compiled program: P prefill rows, G decode groups, Q rows per group."""

    prefill: int
    groups: int
    width: int

    @property
    def rows(self) -> int:
        """Rows the program computes, pads included."""
        return self.prefill + self.groups * self.width


def chunks_for(prefill: int, max_num_seqs: int) -> int:
    """Return J, the number of chunks a prefill bucket can hold; it depends on P only."""
    if prefill == 0:
        return 0
    return min(max_num_seqs, max(4, prefill // 16))


@dataclass(frozen=True)
class Grid:
    """Two axes and the decode widths; every (P, G, Q) with a row is one compiled program.

    Attributes:
        prefill: P, rows of the prefill segment; its largest size is the token budget of a step.
        groups: G, groups of the decode segment; its largest size is max_num_seqs, so that every
            decoding request can be served in every step.
        widths: Q, ascending rows per group; all groups of a step use one width.
    """

    prefill: Axis
    groups: Axis
    widths: tuple[int, ...] = (1,)
    _fits: dict[int, tuple[int, int]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        """Check the widths."""
        if not self.widths or list(self.widths) != sorted(set(self.widths)) or self.widths[0] < 1:
            raise ValueError(
                f"decode widths {self.widths} must be ascending, distinct and >= 1, for example "
                "(1,) or (1, 4). Change decode_widths."
            )

    @property
    def max_num_seqs(self) -> int:
        """The most requests a step can serve."""
        return self.groups.largest

    @property
    def max_chunks(self) -> int:
        """The most chunks any cell holds."""
        return self.chunks(self.prefill.largest)

    def chunks(self, prefill: int) -> int:
        """Return J of a prefill bucket."""
        return chunks_for(prefill, self.max_num_seqs)

    def cells(self) -> tuple[Cell, ...]:
        """Return every cell, ascending; without groups only the smallest width exists."""
        return tuple(self._iterate())

    def _iterate(self) -> Iterator[Cell]:
        for prefill in self.prefill.edges:
            for groups in self.groups.edges:
                for width in self.widths if groups else self.widths[:1]:
                    if prefill or groups:
                        yield Cell(prefill, groups, width)

    def cell_for(self, prefill_rows: int, chunks: int, groups: int, width: int = 1) -> Cell:
        """Return the smallest cell that holds a step; more rows never give a smaller cell.

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
        if prefill == 0 and group_bucket == 0:
            raise NoCellError(
                f"a step of {prefill_rows} prefill rows and {groups} groups has no cell. "
                "Plan at least one row."
            )
        if groups == 0:
            return Cell(prefill, 0, self.widths[0])
        for allowed in self.widths:
            if width <= allowed:
                return Cell(prefill, group_bucket, allowed)
        raise NoCellError(
            f"a group of {width} rows fits no decode width (largest: {self.widths[-1]}). "
            f"Send fewer drafts or add a width to decode_widths; widths: {self.widths}."
        )

    def _prefill_for_chunks(self, prefill: int, chunks: int) -> int:
        """Return the smallest bucket of at least `prefill` rows that holds `chunks` chunks."""
        for edge in self.prefill.edges:
            if edge >= prefill and self.chunks(edge) >= chunks:
                return edge
        raise NoCellError(
            f"{chunks} chunks fit no prefill bucket (largest: {self.prefill.largest} rows, "
            f"{self.max_chunks} chunks). Plan fewer requests per step."
        )

    def fit_prefill(self, rows: int) -> int:
        """Return how many of `rows` waiting prefill rows to compute in this step.

        The answer is `rows` (padded up to its bucket) or the largest bucket below it (no pad, the
        rest follows in later steps), whichever computes all the rows in the fewest row-equivalents:
        a step costs its bucket plus STEP_OVERHEAD_ROWS. A tie takes all the rows now.

        Example:
            With buckets 64 and 512: 500 rows -> 500 (one step of 512 beats eight of 64),
            130 rows -> 64 (64 + 64 + 2 rows in three steps of 64 beat one of 512),
            40 rows -> 40 (padded to 64).

        Raises:
            NoCellError: `rows` is above the largest bucket; the caller cuts at the budget first.
        """
        return self._fit(rows)[0] if rows else 0

    def _fit(self, rows: int) -> tuple[int, int]:
        """Return (rows to take now, row-equivalents until all are done); remembered per count."""
        known = self._fits.get(rows)
        if known is not None:
            return known
        whole = (rows, self.prefill.ceiling(rows) + STEP_OVERHEAD_ROWS)
        below = self.prefill.floor(rows)
        if below in (0, rows):
            best = whole
        else:
            # Whole buckets first, in a loop: recursion would be as deep as the number of steps.
            steps, rest = divmod(rows, below)
            cost = steps * (below + STEP_OVERHEAD_ROWS)
            cost += self._fit(rest)[1] if rest else 0
            best = whole if whole[1] <= cost else (below, cost)
        self._fits[rows] = best
        return best
