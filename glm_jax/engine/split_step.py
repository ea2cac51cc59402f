"""Executes a step as two halves (micro-batches), unless one request reads what another writes.

In one program every layer writes the rows of all requests before any is read, so a request may read
pages that another one writes in the same step. Across two programs that holds only for the order in
which they run; so such a step stays whole. See vLLM's issue 51402 for what happens otherwise.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from bucketing.grid import Grid
from bucketing.pack import RankRows
from bucketing.step_inputs import Limits
from glm_jax.engine.chunking import scored_pairs
from glm_jax.engine.plan import PlanEntry, StepPlan

SHARED_PAGES = "a request reads pages that are written in this step"


class Halves(NamedTuple):
    """A step as it is executed.

    Attributes:
        plans: One plan per program, in the order in which they run; two where it was split.
        reason: Why it was not; empty where it was.
    """

    plans: tuple[StepPlan, ...]
    reason: str = ""


def split_step(plan: StepPlan, grid: Grid, limits: Limits) -> Halves:
    """Cut a planned step into two of about as many useful rows each, by requests.

    Args:
        plan: The step.
        grid: Its halves run in cells of it.
        limits: Of the engine.
    """
    if plan.loop_steps > 1:
        return Halves((plan,), "a decode loop")
    entries = plan.entries
    if len(entries) < 2:
        return Halves((plan,), "one request")
    if _reads_what_is_written(entries, limits.page_size):
        return Halves((plan,), SHARED_PAGES)
    cut = _middle(entries)
    chunks = len(plan.chunk_entries)
    first = _part(plan, grid, slice(0, min(cut, chunks)), slice(0, max(0, cut - chunks)))
    second = _part(plan, grid, slice(min(cut, chunks), None), slice(max(0, cut - chunks), None))
    for part in (first, second):
        (rows,) = part.rows
        if len(rows.resets) > limits.resets(part.cell):
            return Halves((plan,), "more new requests than a half can take")
    return Halves((first, second))


def _reads_what_is_written(entries: Sequence[PlanEntry], page_size: int) -> bool:
    """Return whether a request's rows attend to a page that another's rows write."""
    writers: dict[int, PlanEntry] = {}
    for entry in entries:
        first, last = entry.request.computed // page_size, (entry.end - 1) // page_size
        for page in entry.request.pages[first : last + 1]:
            writers[page] = entry
    return any(
        writers.get(page, entry) is not entry
        for entry in entries
        for page in entry.request.pages[: -(-entry.request.computed // page_size)]
    )


def _middle(entries: Sequence[PlanEntry]) -> int:
    """Return how many entries make the first half: at least one, and not all."""
    half = sum(entry.rows for entry in entries) / 2
    rows = count = 0
    while count < len(entries) - 1 and (count == 0 or rows + entries[count].rows <= half):
        rows += entries[count].rows
        count += 1
    return count


def _part(plan: StepPlan, grid: Grid, chunks: slice, groups: slice) -> StepPlan:
    """Return the plan of some of a step's chunks and groups, in a cell of their own."""
    chunk_entries, group_entries = plan.chunk_entries[chunks], plan.group_entries[groups]
    (rows,) = plan.rows
    slots = {entry.request.slot for entry in (*chunk_entries, *group_entries)}
    own = RankRows(
        rows.chunks[chunks],
        rows.groups[groups],
        [reset for reset in rows.resets if reset.slot in slots],
        [update for update in rows.pages if update.slot in slots],
        rows.drafter,
    )
    prefill = sum(entry.rows for entry in chunk_entries)
    width = max((entry.rows for entry in group_entries), default=1)
    pairs = sum(
        scored_pairs(entry.request.computed, entry.rows)
        for entry in (*chunk_entries, *group_entries)
    )
    return dataclasses.replace(
        plan,
        cell=grid.cell_for(prefill, len(chunk_entries), len(group_entries), width),
        rows=(own,),
        chunk_entries=chunk_entries,
        group_entries=group_entries,
        pairs=pairs,
    )
