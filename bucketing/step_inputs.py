"""The arrays that cross into and out of a step program: their names, shapes and neutral values.

Every array leads with the attention-rank axis (size 1 on one device). `pack` fills the inputs, a
program reads them. The letters are those of DESIGN.md section 2, plus Z resets, U page updates and
T stop ids per reset.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int32, UInt32

from bucketing.grid import Cell, chunks_for

# Pads a list of stop ids: no vocabulary is that large.
NO_STOP_ID = 2**31 - 1


class Limits(NamedTuple):
    """What the shapes of a step depend on besides its cell.

    Attributes:
        max_num_seqs: Slots; row `max_num_seqs` of the slot arrays is the pad slot.
        pages_per_seq: W, entries of one request's page table.
        page_size: Tokens per page.
        stop_ids: T, stop ids a request can have banned while it is below its minimum length.
        num_drafts: k, the most drafts a slot holds; 0 without a drafter.
    """

    max_num_seqs: int
    pages_per_seq: int
    page_size: int
    stop_ids: int = 16
    num_drafts: int = 0

    @property
    def pad_slot(self) -> int:
        """The slot of pad chunks and pad groups: a real row whose page table stays zero."""
        return self.max_num_seqs

    @property
    def dropped_slot(self) -> int:
        """The slot of unused resets and page updates: out of range, so the scatter drops it.

        Never -1: JAX would write the last row.
        """
        return self.max_num_seqs + 1

    def chunks(self, cell: Cell) -> int:
        """J, chunks of a cell."""
        return chunks_for(cell.prefill, self.max_num_seqs)

    def resets(self, cell: Cell) -> int:
        """Z, slots a step can (re)admit."""
        return min(self.max_num_seqs, max(4, self.chunks(cell)))

    def page_updates(self, cell: Cell) -> int:
        """U, page-table entries a step can add to slots that it does not reset.

        n rows reach into at most n // page_size + 1 new pages; one more each is for a row ahead.
        A request that drafts may be told of pages for k rows more.
        """
        ahead = self.num_drafts // self.page_size + 2
        chunk_pages = cell.prefill // self.page_size + ahead * self.chunks(cell)
        group_pages = (cell.width + self.num_drafts) // self.page_size + 2
        return chunk_pages + cell.groups * group_pages


class StepInputs(NamedTuple):
    """What changed since the last step, and where this step's rows are.

    Positions are not sent: the first row of a chunk or group has the position `slots.computed` of
    its slot. Arrays are NumPy on the host and traced inside a program.

    Attributes:
        prefill_tokens: Token ids of the prefill rows; pads are 0.
        prefill_next: The known token that follows each row; 0 where it is unknown (last row of a
            final chunk) and on pads.
        chunk_start: Row where each chunk starts; entry j + 1 ends chunk j. Pad chunks are empty.
        chunk_slot: Slot of each chunk; pads are `pad_slot`.
        chunk_sampled: The chunk's last row is sampled (final chunks only).
        chunk_new_drafts: Drafts to make behind the token it draws; 0 is none.
        group_slot: Slot of each group; pads are `pad_slot`.
        group_decodes: The group is of class DECODE: known is 1, its tokens are the slot's last
            token and drafts. False for the rest of a prefill, whose tokens are in `group_tokens`.
        group_known: Committed tokens in the group, from 1 to Q; 0 on pads.
        group_drafts: Drafts after the known tokens.
        group_tokens: Tokens of a group that does not decode; 0 elsewhere.
        group_next: The token that follows each of them, as in `prefill_next`.
        group_sampled: The group's rows from `known - 1` on are sampled.
        group_new_drafts: Drafts to make behind the last token it draws; 0 is none.
        drafter: Whether the MTP layer runs over the rows. Without it nothing is drafted, and its
            cache has no entries for them.
        reset_slot: Slots whose state is replaced before anything else; pads are `dropped_slot`.
        reset_pages: The whole new page table of each; unused entries are page 0.
        reset_computed: Tokens of it already in the cache.
        reset_temperature: 0 is greedy.
        reset_top_k: 0 is off.
        reset_top_p: 1 is off.
        reset_min_p: 0 is off.
        reset_seed: (low, high) words of the 64-bit seed.
        reset_min_length: While the request holds fewer tokens, its stop ids are banned; 0 is off.
        reset_stop_ids: Those ids; pads are NO_STOP_ID.
        page_slot: Slots whose page table grows (after the resets); pads are `dropped_slot`.
        page_index: The entry of the table.
        page_value: The page.
    """

    prefill_tokens: Int32[Any, "ranks P"]
    prefill_next: Int32[Any, "ranks P"]
    chunk_start: Int32[Any, "ranks J+1"]
    chunk_slot: Int32[Any, "ranks J"]
    chunk_sampled: Bool[Any, "ranks J"]
    chunk_new_drafts: Int32[Any, "ranks J"]
    group_slot: Int32[Any, "ranks G"]
    group_decodes: Bool[Any, "ranks G"]
    group_known: Int32[Any, "ranks G"]
    group_drafts: Int32[Any, "ranks G"]
    group_tokens: Int32[Any, "ranks G Q"]
    group_next: Int32[Any, "ranks G Q"]
    group_sampled: Bool[Any, "ranks G"]
    group_new_drafts: Int32[Any, "ranks G"]
    drafter: Bool[Any, " ranks"]
    reset_slot: Int32[Any, "ranks Z"]
    reset_pages: Int32[Any, "ranks Z W"]
    reset_computed: Int32[Any, "ranks Z"]
    reset_temperature: Float32[Any, "ranks Z"]
    reset_top_k: Int32[Any, "ranks Z"]
    reset_top_p: Float32[Any, "ranks Z"]
    reset_min_p: Float32[Any, "ranks Z"]
    reset_seed: UInt32[Any, "ranks Z 2"]
    reset_min_length: Int32[Any, "ranks Z"]
    reset_stop_ids: Int32[Any, "ranks Z T"]
    page_slot: Int32[Any, "ranks U"]
    page_index: Int32[Any, "ranks U"]
    page_value: Int32[Any, "ranks U"]


class StepOutputs(NamedTuple):
    """What a step program returns beside the cache and the slots.

    Attributes:
        chunk_tokens: The token drawn after each chunk; meaningless where it was not sampled.
        group_tokens: The token drawn at each row of a group; draw j is at row `known - 1 + j`.
        group_accepted: Accepted drafts a; the draws 0..a are the emitted tokens.
        drafts: Drafts for the next step, made behind each chunk, then behind each group; as many
            as were asked for have a meaning. The slots hold them too.
        expert_load: Rows of the busiest expert of any layer, and the mean over experts and layers;
            zeros without experts.
        expert_rows: Rows routed to each expert of the target, layer by layer; pads reach none, and
            those of the MTP layer are not counted. They stay on the device, like the hidden rows.
        hidden: Final-norm hidden rows, prefill segment first; they stay on the device.
    """

    chunk_tokens: Int32[Any, "ranks J"]
    group_tokens: Int32[Any, "ranks G Q"]
    group_accepted: Int32[Any, "ranks G"]
    drafts: Int32[Any, "ranks J+G k"]
    expert_load: Float32[Any, "ranks 2"]
    expert_rows: Int32[Any, "ranks sparse_layers E"]
    hidden: Float32[Any, "ranks N D"]


@dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of one array, by the attribute names that JAX also uses."""

    shape: tuple[int, ...]
    dtype: np.dtype


@lru_cache(maxsize=1024)
def input_shapes(cell: Cell, limits: Limits, ranks: int = 1) -> StepInputs:
    """Return the ArraySpec of every input of a cell, as a StepInputs."""
    P, G, Q = cell
    J, Z, U = limits.chunks(cell), limits.resets(cell), limits.page_updates(cell)
    W, T = limits.pages_per_seq, limits.stop_ids

    def spec(*shape: int, dtype: type = np.int32) -> ArraySpec:
        return ArraySpec((ranks, *shape), np.dtype(dtype))

    return StepInputs(
        prefill_tokens=spec(P),
        prefill_next=spec(P),
        chunk_start=spec(J + 1),
        chunk_slot=spec(J),
        chunk_sampled=spec(J, dtype=np.bool_),
        chunk_new_drafts=spec(J),
        group_slot=spec(G),
        group_decodes=spec(G, dtype=np.bool_),
        group_known=spec(G),
        group_drafts=spec(G),
        group_tokens=spec(G, Q),
        group_next=spec(G, Q),
        group_sampled=spec(G, dtype=np.bool_),
        group_new_drafts=spec(G),
        drafter=spec(dtype=np.bool_),
        reset_slot=spec(Z),
        reset_pages=spec(Z, W),
        reset_computed=spec(Z),
        reset_temperature=spec(Z, dtype=np.float32),
        reset_top_k=spec(Z),
        reset_top_p=spec(Z, dtype=np.float32),
        reset_min_p=spec(Z, dtype=np.float32),
        reset_seed=spec(Z, 2, dtype=np.uint32),
        reset_min_length=spec(Z),
        reset_stop_ids=spec(Z, T),
        page_slot=spec(U),
        page_index=spec(U),
        page_value=spec(U),
    )


@lru_cache(maxsize=1024)
def neutral_inputs(cell: Cell, limits: Limits, ranks: int = 1) -> StepInputs:
    """Return the inputs of a step in which every row is a pad.

    The arrays are made once per cell, are read-only, and stand unchanged (the same objects) in
    whatever a step leaves unused.
    """
    fills = {
        "chunk_slot": limits.pad_slot,
        "group_slot": limits.pad_slot,
        "reset_slot": limits.dropped_slot,
        "page_slot": limits.dropped_slot,
        "reset_top_p": 1.0,
        "reset_stop_ids": NO_STOP_ID,
    }
    arrays = {}
    for name, spec in input_shapes(cell, limits, ranks)._asdict().items():
        array = np.full(spec.shape, fills.get(name, 0), spec.dtype)
        array.setflags(write=False)
        arrays[name] = array
    return StepInputs(**arrays)
