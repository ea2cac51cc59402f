"""The flat row axis of a step: which token, position and cache entry each row has.

Rows 0..P-1 are the prefill segment (chunks one after another), rows P.. the decode segment (groups
of Q rows). Built on the device from the slots and the packed inputs, once per step.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from bucketing.step_inputs import StepInputs
from glm_jax.model.slots import Slots
from pallas_kernels.tiles import Tiles

# Rows of one chunk that select their keys and attend together. On a GPU pads cost scratch memory,
# and kernels cut the tiles further. On a CPU wide tiles fill the matmuls: attention of 512 rows
# takes 16 to 22 % less time with 128 than with 64, the indexer as long; 256 saves a little more,
# but short chunks would pay.
TILE_ROWS = 64
WIDE_TILE_ROWS = 128


class Rows(NamedTuple):
    """Everything the layers need to know about the rows of a step."""

    tokens: Int[Array, " N"]
    positions: Int[Array, " N"]
    valid: Bool[Array, " N"]
    entries: Int[Array, " N"]  # page * page_size + offset; past the pool for a pad row
    slots: Int[Array, " N"]
    tiles: Tiles
    group_positions: Int[Array, "G Q"]  # -1 for a pad row
    group_page_table: Int[Array, "G W"]


def build_rows(
    slots: Slots, inputs: StepInputs, *, page_size: int, pool_entries: int, tile_rows: int
) -> Rows:
    """Lay out the rows of one step."""
    prefill_rows = inputs.prefill_tokens.shape[0]
    width = inputs.group_tokens.shape[1]
    chunk_rows = jnp.arange(prefill_rows, dtype=jnp.int32)
    chunk = jnp.sum(chunk_rows[:, None] >= inputs.chunk_start[1:], axis=1, dtype=jnp.int32)
    chunk_valid = chunk_rows < inputs.chunk_start[-1]
    pad_slot = slots.computed.shape[0] - 1
    chunk_slots = jnp.append(inputs.chunk_slot, pad_slot)[chunk]
    chunk_positions = slots.computed[chunk_slots] + chunk_rows - inputs.chunk_start[chunk]

    group_rows = jnp.arange(width, dtype=jnp.int32)
    group_positions = slots.computed[inputs.group_slot][:, None] + group_rows
    group_valid = group_rows < (inputs.group_known + inputs.group_drafts)[:, None]
    group_tokens = jnp.where(
        inputs.group_decodes[:, None], _own_tokens(slots, inputs), inputs.group_tokens
    )
    row_slots = jnp.concatenate([chunk_slots, jnp.repeat(inputs.group_slot, width)])
    valid = jnp.concatenate([chunk_valid, group_valid.reshape(-1)])
    positions = jnp.concatenate([chunk_positions, group_positions.reshape(-1)])
    positions = jnp.where(valid, positions, 0)
    page = slots.page_table[row_slots, positions // page_size]
    entries = jnp.where(valid, page * page_size + positions % page_size, pool_entries)
    tokens = jnp.concatenate([inputs.prefill_tokens, group_tokens.reshape(-1)])
    return Rows(
        tokens=jnp.where(valid, tokens, 0),
        positions=positions,
        valid=valid,
        entries=entries,
        slots=row_slots,
        tiles=_cut_tiles(slots, inputs, tile_rows),
        group_positions=jnp.where(group_valid, group_positions, -1),
        group_page_table=slots.page_table[inputs.group_slot],
    )


def no_tiles(pages_per_slot: int) -> Tiles:
    """The tiles of a step without prefill rows."""
    nothing = jnp.zeros((0, TILE_ROWS), jnp.int32)
    pages = jnp.zeros((0, pages_per_slot), jnp.int32)
    return Tiles(nothing, nothing, pages, nothing[:, 0], nothing[:, 0])


def _own_tokens(slots: Slots, inputs: StepInputs) -> Int[Array, "G Q"]:
    """Last drawn token and drafts of each group's request, as far as they reach."""
    width = inputs.group_tokens.shape[1]
    drafts = slots.drafts[inputs.group_slot][:, : width - 1]
    own = jnp.concatenate([slots.last_token[inputs.group_slot][:, None], drafts], axis=1)
    return jnp.pad(own, ((0, 0), (0, width - own.shape[1])))


def _cut_tiles(slots: Slots, inputs: StepInputs, tile_rows: int) -> Tiles:
    """At most P / tile_rows + J tiles; the unused ones hold pads only."""
    prefill_rows, chunks = inputs.prefill_tokens.shape[0], inputs.chunk_slot.shape[0]
    if prefill_rows == 0:
        return no_tiles(slots.page_table.shape[1])
    tile_rows = min(tile_rows, prefill_rows)
    lengths = inputs.chunk_start[1:] - inputs.chunk_start[:-1]
    per_chunk = (lengths + tile_rows - 1) // tile_rows
    ends = jnp.cumsum(per_chunk)
    tile = jnp.arange(prefill_rows // tile_rows + chunks, dtype=jnp.int32)
    chunk = jnp.sum(tile[:, None] >= ends, axis=1, dtype=jnp.int32)
    used = chunk < chunks
    owner = jnp.minimum(chunk, chunks - 1)
    first = inputs.chunk_start[owner] + (tile - (ends - per_chunk)[owner]) * tile_rows
    rows = first[:, None] + jnp.arange(tile_rows, dtype=jnp.int32)
    live = used[:, None] & (rows < inputs.chunk_start[owner + 1][:, None])
    slot = inputs.chunk_slot[owner]
    computed = slots.computed[slot]
    positions = computed[:, None] + rows - inputs.chunk_start[owner][:, None]
    return Tiles(
        # Past the end of all rows, not only of the prefill rows: what reads tiles takes them all.
        rows=jnp.where(live, rows, prefill_rows + inputs.group_tokens.size),
        positions=jnp.where(live, positions, -1),
        page_table=slots.page_table[slot],
        chunk_first=computed,
        chunk_last=computed + lengths[owner] - 1,
    )
