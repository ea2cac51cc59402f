"""The useful rows of a step packed together: the row axis of PIECEWISE steps.

A piece is compiled for a number of rows alone. So the rows of both segments stand one after another
without pads in between, prefill rows first, and index arrays say which rows are whose: attention
gathers its segment's rows and scatters its results back, out-of-range rows dropped. (Slices at
a traced start would not do: ``dynamic_slice`` clamps at the end and shifts the rows.)
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from glm_jax.model.rope import Rotation, rotation
from glm_jax.model.rows import Rows
from glm_jax.model.slots import Slots
from pallas_kernels.tiles import Tiles

# Past the end of any pool, far from overflowing when a plane's offset is added.
_NO_ENTRY = 1 << 30


class CompactRows(NamedTuple):
    """What the pieces of a layer need to know about n compact rows; pads have index n."""

    taken: Int[Array, " n"]  # row of the layout; past its end for a pad
    positions: Int[Array, " n"]
    entries: Int[Array, " n"]
    valid: Bool[Array, " n"]
    slots: Int[Array, " n"]
    turn: Rotation
    page_table: Int[Array, "slots W"]
    chunk_rows: Int[Array, " n"]  # the prefill rows
    tiles: Tiles
    group_rows: Int[Array, "G Q"]  # the rows of each group
    group_positions: Int[Array, "G Q"]
    group_slots: Int[Array, " G"]


def places_of(valid: Bool[Array, " N"], size: int) -> Int[Array, " N"]:
    """Where each row of the layout stands among the useful ones; ``size`` for a pad."""
    return jnp.where(valid, jnp.cumsum(valid.astype(jnp.int32)) - 1, size)


def compact_rows(
    rows: Rows, slots: Slots, group_slots: Int[Array, " G"], size: int, *, rope: tuple[int, float]
) -> tuple[CompactRows, Int[Array, " n"]]:
    """Pack the rows of a layout.

    Args:
        rows: of the widest layout.
        slots: with this step's resets applied.
        group_slots: slot of each group of the layout.
        size: n, at least the number of useful rows.
        rope: width and theta of the rotation.

    Returns:
        The compact rows, and their tokens.
    """
    total = rows.valid.shape[0]
    groups, width = rows.group_positions.shape
    prefill_rows = total - groups * width
    place = places_of(rows.valid, size)
    taken = jnp.nonzero(rows.valid, size=size, fill_value=total)[0]
    valid = taken < total
    safe = jnp.minimum(taken, total - 1)
    # Tiles and groups in use come first: at most n of each hold a row.
    some_groups = min(groups, size)
    some_tiles = min(rows.tiles.rows.shape[0], size)
    group_places = place[prefill_rows:].reshape(groups, width)
    number = jnp.arange(size, dtype=jnp.int32)
    chunk_count = jnp.sum(rows.valid[:prefill_rows], dtype=jnp.int32)
    positions = jnp.where(valid, rows.positions[safe], 0)
    packed = CompactRows(
        taken=taken.astype(jnp.int32),
        positions=positions,
        entries=jnp.where(valid, rows.entries[safe], _NO_ENTRY),
        valid=valid,
        slots=jnp.where(valid, rows.slots[safe], slots.computed.shape[0] - 1),
        turn=rotation(positions, *rope),
        page_table=slots.page_table,
        chunk_rows=jnp.where(number < chunk_count, number, size),
        tiles=Tiles(
            rows=jnp.append(place, size)[rows.tiles.rows[:some_tiles]],
            positions=rows.tiles.positions[:some_tiles],
            page_table=rows.tiles.page_table[:some_tiles],
            chunk_first=rows.tiles.chunk_first[:some_tiles],
            chunk_last=rows.tiles.chunk_last[:some_tiles],
        ),
        group_rows=group_places[:some_groups],
        group_positions=rows.group_positions[:some_groups],
        group_slots=group_slots[:some_groups],
    )
    return packed, jnp.where(valid, rows.tokens[safe], 0)
