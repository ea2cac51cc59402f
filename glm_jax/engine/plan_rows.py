"""Writes a placement down as a StepPlan: the rows to pack, and what the device must be told."""

from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Int32

from bucketing.pack import Chunk, Group, PageUpdate, RankRows, SlotReset
from glm_jax.engine.chunking import Piece
from glm_jax.engine.drafting import NextDrafts
from glm_jax.engine.pages import PagePool
from glm_jax.engine.placement import Placement
from glm_jax.engine.plan import PlanEntry, StepPlan
from glm_jax.engine.request import Request, RowClass


def write_plan(
    pool: PagePool, placement: Placement, decodes: Sequence[Request], following: NextDrafts
) -> StepPlan:
    """Return the plan of a step; every request in it has its slot and its pages.

    Args:
        pool: Of the rank.
        placement: The cell, and where prefill rows sit in it.
        decodes: Who decodes; first among the groups.
        following: The drafts to make for the next step.
    """
    chunks, chunk_entries = [], []
    for piece in placement.chunks:
        slot, tokens, after = _piece_rows(piece)
        entry = _prefill_entry(piece, following)
        chunks.append(Chunk(slot, tokens, after, piece.final, entry.new_drafts))
        chunk_entries.append(entry)
    groups, group_entries = [], []
    for request in decodes:
        entry = _decode_entry(request, following)
        drafts, new_drafts = len(entry.draft_token_ids), entry.new_drafts
        groups.append(Group(_slot(request), True, 1, drafts, None, None, True, new_drafts))
        group_entries.append(entry)
    for piece in placement.groups:
        slot, tokens, after = _piece_rows(piece)
        entry = _prefill_entry(piece, following)
        groups.append(
            Group(slot, False, piece.rows, 0, tokens, after, piece.final, entry.new_drafts)
        )
        group_entries.append(entry)
    resets, updates = _differences(pool, (*chunk_entries, *group_entries))
    rows = RankRows(chunks, groups, resets, updates, following.drafter)
    entries = tuple(chunk_entries), tuple(group_entries)
    return StepPlan(placement.cell, (rows,), *entries, placement.pairs, following.drafter)


def pages_told(pool: PagePool, entry: PlanEntry) -> int:
    """Return how many page-table entries the device knows once the entry's step has run.

    A reset tells the whole table. Otherwise only pages that the step may write are told: a request
    may hold more, from a larger plan that was cancelled, than the cell has page updates for.
    """
    request = entry.request
    if request.needs_reset:
        return len(request.pages)
    if entry.end <= request.synced_pages * pool.page_size:
        return request.synced_pages
    return pool.pages_for(entry.end)


def _differences(
    pool: PagePool, entries: Iterable[PlanEntry]
) -> tuple[list[SlotReset], list[PageUpdate]]:
    """Return what the device must learn about the slots of a step before its rows run."""
    resets, updates = [], []
    size = pool.page_size
    for entry in entries:
        request = entry.request
        if request.needs_reset:
            pages = tuple(request.pages)
            resets.append(SlotReset(_slot(request), pages, request.computed, request.settings()))
            continue
        told, end = request.synced_pages, entry.end
        # Most steps stay within the last page that the device knows.
        if end > told * size:
            for index in range(told, pool.pages_for(end)):
                updates.append(PageUpdate(_slot(request), index, request.pages[index]))
    return resets, updates


def _slot(request: Request) -> int:
    assert request.slot is not None, f"{request} was planned without a slot"
    return request.slot


def _piece_rows(piece: Piece) -> tuple[int, Int32[np.ndarray, " n"], Int32[np.ndarray, " n"]]:
    """Return slot, tokens and next tokens of a piece."""
    return (_slot(piece.request), *piece.request.rows(piece.rows))


def _prefill_entry(piece: Piece, following: NextDrafts) -> PlanEntry:
    name = piece.request.request_id
    return PlanEntry(
        piece.request,
        RowClass.PREFILL,
        piece.rows,
        (),
        piece.final,
        following.lengths.get(name, 0),
        following.ahead.get(name, 0),
        piece.start,
    )


def _decode_entry(request: Request, following: NextDrafts) -> PlanEntry:
    _, lengths, ahead = following
    drafts, name = request.draft_token_ids, request.request_id
    # In most steps there is nothing to look up: this runs for every group of every step.
    made = lengths.get(name, 0) if lengths else 0
    rows_ahead = ahead.get(name, 0) if ahead else 0
    start = request.computed
    return PlanEntry(request, RowClass.DECODE, 1, drafts, True, made, rows_ahead, start)
