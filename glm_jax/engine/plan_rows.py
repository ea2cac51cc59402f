"""Writes a placement down as a StepPlan: the rows to pack, and what the device must be told."""

from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Int32

from bucketing.pack import Chunk, Group, PageUpdate, RankRows, SlotReset
from glm_jax.engine.chunking import Piece
from glm_jax.engine.pages import PagePool
from glm_jax.engine.placement import Placement
from glm_jax.engine.plan import PlanEntry, StepPlan
from glm_jax.engine.request import Request, RowClass


def write_plan(pool: PagePool, placement: Placement, decodes: Sequence[Request]) -> StepPlan:
    """Return the plan of a step; every request in it has its slot and its pages."""
    chunks, chunk_entries = [], []
    for piece in placement.chunks:
        slot, tokens, following = _piece_rows(piece)
        chunks.append(Chunk(slot, tokens, following, piece.final))
        chunk_entries.append(_prefill_entry(piece))
    groups, group_entries = [], []
    decode = RowClass.DECODE
    for request in decodes:
        drafts = request.drafts
        groups.append(Group(_slot(request), True, 1, drafts, None, None, True))
        group_entries.append(PlanEntry(request, decode, 1, drafts, True))
    for piece in placement.groups:
        slot, tokens, following = _piece_rows(piece)
        groups.append(Group(slot, False, piece.rows, 0, tokens, following, piece.final))
        group_entries.append(_prefill_entry(piece))
    resets, updates = _differences(pool, (*chunk_entries, *group_entries))
    rows = RankRows(chunks, groups, resets, updates)
    entries = tuple(chunk_entries), tuple(group_entries)
    return StepPlan(placement.cell, (rows,), *entries, placement.pairs)


def pages_told(pool: PagePool, entry: PlanEntry) -> int:
    """Return how many page-table entries the device knows once the entry's step has run.

    A reset tells the whole table. Otherwise only pages of this step's rows are told: a request may
    hold more, from a larger plan that was cancelled, than the cell has page updates for.
    """
    request, _, known, drafts, _ = entry
    if request.needs_reset:
        return len(request.pages)
    rows = request.computed + known + drafts
    if rows <= request.synced_pages * pool.page_size:
        return request.synced_pages
    return pool.pages_for(rows)


def _differences(
    pool: PagePool, entries: Iterable[PlanEntry]
) -> tuple[list[SlotReset], list[PageUpdate]]:
    """Return what the device must learn about the slots of a step before its rows run."""
    resets, updates = [], []
    size = pool.page_size
    for request, _, known, drafts, _ in entries:
        if request.needs_reset:
            pages = tuple(request.pages)
            resets.append(SlotReset(_slot(request), pages, request.computed, request.settings()))
            continue
        told = request.synced_pages
        # Most steps stay within the last page that the device knows.
        if request.computed + known + drafts > told * size:
            for index in range(told, pool.pages_for(request.computed + known + drafts)):
                updates.append(PageUpdate(_slot(request), index, request.pages[index]))
    return resets, updates


def _slot(request: Request) -> int:
    assert request.slot is not None, f"{request} was planned without a slot"
    return request.slot


def _piece_rows(piece: Piece) -> tuple[int, Int32[np.ndarray, " n"], Int32[np.ndarray, " n"]]:
    """Return slot, tokens and next tokens of a piece."""
    return (_slot(piece.request), *piece.request.rows(piece.rows))


def _prefill_entry(piece: Piece) -> PlanEntry:
    return PlanEntry(piece.request, RowClass.PREFILL, piece.rows, 0, piece.final)
