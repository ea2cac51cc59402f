"""What the scheduler decides for one step; `pack` turns it into arrays, `commit` takes it back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bucketing.cell import Cell
from bucketing.pack import RankRows
from glm_jax.engine.declined import Declined
from glm_jax.engine.request import Request, RowClass


class PlanEntry(NamedTuple):
    """One request in a step. Its class is stored: nobody derives it from a count or a place.

    Attributes:
        request: The request.
        row_class: What its rows are.
        known: Committed tokens among them.
        draft_token_ids: Draft tokens after those.
        sampled: Whether the last known row (and each draft) draws a token.
        new_drafts: Drafts to make behind the last token drawn, for the next step.
        rows_ahead: Positions after its rows that making them may write.
        start: Position of its first row.
    """

    request: Request
    row_class: RowClass
    known: int
    draft_token_ids: Sequence[int]
    sampled: bool
    new_drafts: int = 0
    rows_ahead: int = 0
    start: int = 0

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def drafts(self) -> int:
        """How many draft tokens it has."""
        return len(self.draft_token_ids)

    @property
    def rows(self) -> int:
        """Rows it uses."""
        return self.known + len(self.draft_token_ids)

    @property
    def end(self) -> int:
        """Positions its page table must hold on the device: all that the step may write."""
        rows = self.known + len(self.draft_token_ids) + self.rows_ahead
        return self.request.computed + rows


class Occupancy(NamedTuple):
    """How full the engine was when a step was planned.

    Attributes:
        waiting: Requests without a slot.
        running: Requests with one.
        free_pages: Pages that could still be handed out, cached ones included.
        cached_pages: Pages that nobody owns and whose content can be found.
    """

    waiting: int = 0
    running: int = 0
    free_pages: int = 0
    cached_pages: int = 0


NOBODY = Occupancy()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: a cell, who sits where in it, and the rows to pack.

    Attributes:
        cell: The program to call.
        rows: What each attention rank computes (one rank today), for `bucketing.pack.pack`.
        chunk_entries: Who owns each chunk of the prefill segment, in order; all of class PREFILL.
        group_entries: Who owns each group of the decode segment, in order; decodes first, then
            rests of prefills that were placed there.
        pairs: (row, key) pairs that an indexer layer scores: over the useful rows, position + 1.
        drafter: Whether the MTP layer runs.
        loop_steps: Steps that its groups may run in one dispatch; 1 is no loop.
        loop_reason: Why there is no loop where loops are switched on.
        cached_tokens: Tokens that requests admitted in it found in the prefix cache.
        queried_tokens: Tokens that those requests had, as far as pages are shared.
        prefix_waits: Requests that wait because others write the pages they begin with.
        declined: Who could not have rows in it, and why.
        preempted: Ids of those who lost their pages to its decodes.
        predicted: Seconds that one step was expected to take.
        occupancy: How full the engine was.
    """

    cell: Cell
    rows: tuple[RankRows, ...]
    chunk_entries: tuple[PlanEntry, ...]
    group_entries: tuple[PlanEntry, ...]
    pairs: int
    drafter: bool = False
    loop_steps: int = 1
    loop_reason: str = ""
    cached_tokens: int = 0
    queried_tokens: int = 0
    prefix_waits: int = 0
    declined: tuple[Declined, ...] = ()
    preempted: tuple[str, ...] = ()
    predicted: float = 0.0
    occupancy: Occupancy = NOBODY

    @property
    def entries(self) -> tuple[PlanEntry, ...]:
        """All requests of the step, prefill segment first."""
        return self.chunk_entries + self.group_entries

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The ids of all requests of the step."""
        return tuple(entry.request_id for entry in self.entries)

    @property
    def kind(self) -> str:
        """The kind of step by the classes in it: "mixed", "prefill" or "decode"."""
        classes = {entry.row_class for entry in self.entries}
        return "mixed" if len(classes) == 2 else classes.pop().value

    @property
    def prefill_rows(self) -> int:
        """Useful rows in the prefill segment."""
        return sum(entry.rows for entry in self.chunk_entries)

    @property
    def decode_rows(self) -> int:
        """Useful rows in the decode segment, rests of prefills included."""
        return sum(entry.rows for entry in self.group_entries)

    @property
    def useful_rows(self) -> int:
        """Useful rows in both segments."""
        return self.prefill_rows + self.decode_rows

    @property
    def prefill_pad_rows(self) -> int:
        """Pad rows in the prefill segment."""
        return self.cell.prefill - self.prefill_rows

    @property
    def decode_pad_rows(self) -> int:
        """Pad rows in the decode segment."""
        return self.cell.groups * self.cell.width - self.decode_rows
