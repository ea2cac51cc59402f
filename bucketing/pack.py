"""Turns the rows of a plan into arrays of exactly the cell's shapes; the only place of padding.

Called by the runner between the scheduler and a program. Whatever a step leaves unused is the
neutral array of the cell itself, not a copy; nothing returned here is written again.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from bucketing.grid import Cell
from bucketing.step_inputs import Limits, StepInputs, neutral_inputs


class PackError(ValueError):
    """Rows were planned that the cell's arrays cannot hold."""


class Chunk(NamedTuple):
    """The prefill rows of one request in the prefill segment.

    Attributes:
        slot: The request's slot.
        tokens: Its next tokens, at least one.
        next_tokens: The token after each of them; 0 where it is not known yet.
        sampled: Whether the last row draws the request's next token.
        new_drafts: Drafts to make behind that token.
    """

    slot: int
    tokens: Int32[np.ndarray, " n"]
    next_tokens: Int32[np.ndarray, " n"]
    sampled: bool
    new_drafts: int = 0


class Group(NamedTuple):
    """The rows of one request in the decode segment.

    Attributes:
        slot: The request's slot.
        decodes: Whether the request decodes; then the device knows its tokens and `tokens` and
            `next_tokens` are None. Otherwise they are the rest of a prefill, as in a Chunk.
        known: Committed tokens, 1 when it decodes.
        drafts: Draft tokens after them.
        tokens: Known tokens of a rest.
        next_tokens: The token after each of them.
        sampled: Whether rows from the last known one on are sampled.
        new_drafts: Drafts to make behind the last token drawn.
    """

    slot: int
    decodes: bool
    known: int
    drafts: int
    tokens: Int32[np.ndarray, " n"] | None
    next_tokens: Int32[np.ndarray, " n"] | None
    sampled: bool
    new_drafts: int = 0


class SlotSettings(NamedTuple):
    """How a slot samples; the meaning of each field is in StepInputs.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 is off.
        top_p: 1 is off.
        min_p: 0 is off.
        seed: 64 bits, from 0.
        min_length: Total tokens below which `stop_ids` are banned; 0 is off.
        stop_ids: Banned ids.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    min_length: int
    stop_ids: tuple[int, ...]


class SlotReset(NamedTuple):
    """A slot that a request takes over: its whole page table, its length in the cache, settings."""

    slot: int
    pages: Sequence[int]
    computed: int
    settings: SlotSettings


class PageUpdate(NamedTuple):
    """One page-table entry that a slot gains."""

    slot: int
    index: int
    page: int


class RankRows(NamedTuple):
    """What one attention rank computes in a step; ``drafter`` says whether the MTP layer runs."""

    chunks: Sequence[Chunk] = ()
    groups: Sequence[Group] = ()
    resets: Sequence[SlotReset] = ()
    pages: Sequence[PageUpdate] = ()
    drafter: bool = False


def pack(cell: Cell, limits: Limits, rows: Sequence[RankRows]) -> StepInputs:
    """Return the inputs of a step.

    Args:
        cell: The program's cell.
        limits: The engine's limits, which give the arrays' widths.
        rows: What each rank computes, one per rank.

    Raises:
        PackError: The rows fit the cell in some axis not at all; nothing is cut silently.
    """
    for rank in rows:
        _check(cell, limits, rank)
    neutral = neutral_inputs(cell, limits, len(rows))
    changed: dict[str, np.ndarray] = {}
    if any(rank.chunks for rank in rows):
        changed |= _pack_chunks(neutral, rows)
    if any(rank.groups for rank in rows):
        changed |= _pack_groups(neutral, rows)
    if any(rank.resets for rank in rows):
        changed |= _pack_resets(neutral, rows)
    if any(rank.pages for rank in rows):
        changed |= _pack_pages(neutral, rows)
    if any(rank.drafter for rank in rows):
        changed["drafter"] = np.array([rank.drafter for rank in rows])
    return neutral._replace(**changed)


def _check(cell: Cell, limits: Limits, rank: RankRows) -> None:
    """Raise PackError where the rows of a rank exceed the cell."""
    counts = (
        ("prefill rows", sum(len(chunk.tokens) for chunk in rank.chunks), cell.prefill),
        ("chunks", len(rank.chunks), limits.chunks(cell)),
        ("groups", len(rank.groups), cell.groups),
        ("slot resets", len(rank.resets), limits.resets(cell)),
        ("page updates", len(rank.pages), limits.page_updates(cell)),
    )
    for what, count, allowed in counts:
        if count > allowed:
            raise PackError(
                f"{count} {what} do not fit cell {tuple(cell)}, which holds {allowed}. "
                "Plan fewer or choose a larger cell."
            )
    for group in rank.groups:
        if not (group.known >= 1 and 0 <= group.drafts <= cell.width - group.known):
            raise PackError(
                f"a group of {group.known} known tokens and {group.drafts} drafts does not fit "
                f"cell {tuple(cell)}; known must be >= 1 and both together <= {cell.width}."
            )
    for reset in rank.resets:
        if len(reset.pages) > limits.pages_per_seq:
            raise PackError(
                f"a page table of {len(reset.pages)} pages does not fit {limits.pages_per_seq}. "
                "Raise max_model_len or refuse the request."
            )
        if len(reset.settings.stop_ids) > limits.stop_ids:
            raise PackError(
                f"{len(reset.settings.stop_ids)} stop ids do not fit {limits.stop_ids}. "
                "Refuse the request at submit."
            )


def _pack_chunks(neutral: StepInputs, rows: Sequence[RankRows]) -> dict[str, np.ndarray]:
    """Lay the chunks of each rank one after another from row 0."""
    tokens, next_tokens = neutral.prefill_tokens.copy(), neutral.prefill_next.copy()
    start, slot = neutral.chunk_start.copy(), neutral.chunk_slot.copy()
    sampled, new_drafts = neutral.chunk_sampled.copy(), neutral.chunk_new_drafts.copy()
    for index, rank in enumerate(rows):
        row = 0
        for j, chunk in enumerate(rank.chunks):
            stop = row + len(chunk.tokens)
            tokens[index, row:stop] = chunk.tokens
            next_tokens[index, row:stop] = chunk.next_tokens
            row = stop
            start[index, j + 1] = stop
            slot[index, j] = chunk.slot
            sampled[index, j] = chunk.sampled
            new_drafts[index, j] = chunk.new_drafts
        # Pad chunks are empty: they start and end where the last real one ends.
        start[index, len(rank.chunks) + 1 :] = row
    return {
        "prefill_tokens": tokens,
        "prefill_next": next_tokens,
        "chunk_start": start,
        "chunk_slot": slot,
        "chunk_sampled": sampled,
        "chunk_new_drafts": new_drafts,
    }


def _pack_groups(neutral: StepInputs, rows: Sequence[RankRows]) -> dict[str, np.ndarray]:
    """Put each group into its row of the decode segment."""
    names = ("slot", "decodes", "known", "drafts", "sampled", "new_drafts")
    names = tuple(f"group_{name}" for name in names)
    changed = {name: getattr(neutral, name).copy() for name in names}
    if any(not group.decodes for rank in rows for group in rank.groups):
        changed["group_tokens"] = neutral.group_tokens.copy()
        changed["group_next"] = neutral.group_next.copy()
    for index, rank in enumerate(rows):
        if not rank.groups:
            continue
        # One conversion per field instead of one per element: this runs in every decode step.
        slot, decodes, known, drafts, _, _, sampled, new = zip(*rank.groups, strict=True)
        columns = (slot, decodes, known, drafts, sampled, new)
        for name, column in zip(names, columns, strict=True):
            changed[name][index, : len(column)] = column
        for g, group in enumerate(rank.groups):
            if not group.decodes:
                changed["group_tokens"][index, g, : group.known] = group.tokens
                changed["group_next"][index, g, : group.known] = group.next_tokens
    return changed


def _pack_resets(neutral: StepInputs, rows: Sequence[RankRows]) -> dict[str, np.ndarray]:
    """Write each (re)admitted slot's page table, length and settings."""
    names = [name for name in neutral._fields if name.startswith("reset_")]
    changed = {name: getattr(neutral, name).copy() for name in names}
    for index, rank in enumerate(rows):
        for z, (slot, pages, computed, settings) in enumerate(rank.resets):
            changed["reset_slot"][index, z] = slot
            changed["reset_pages"][index, z, : len(pages)] = pages
            changed["reset_computed"][index, z] = computed
            changed["reset_temperature"][index, z] = settings.temperature
            changed["reset_top_k"][index, z] = settings.top_k
            changed["reset_top_p"][index, z] = settings.top_p
            changed["reset_min_p"][index, z] = settings.min_p
            changed["reset_seed"][index, z] = (settings.seed & 0xFFFFFFFF, settings.seed >> 32)
            changed["reset_min_length"][index, z] = settings.min_length
            changed["reset_stop_ids"][index, z, : len(settings.stop_ids)] = settings.stop_ids
    return changed


def _pack_pages(neutral: StepInputs, rows: Sequence[RankRows]) -> dict[str, np.ndarray]:
    """Write the page-table entries that slots gain."""
    names = ("page_slot", "page_index", "page_value")
    changed = {name: getattr(neutral, name).copy() for name in names}
    for index, rank in enumerate(rows):
        if rank.pages:
            for name, column in zip(names, zip(*rank.pages, strict=True), strict=True):
                changed[name][index, : len(column)] = column
    return changed
