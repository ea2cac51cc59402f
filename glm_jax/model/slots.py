"""Device-resident state of the running requests, one line per slot; updated inside each step.

The host keeps the truth and sends only differences (resets of (re)admitted slots, page growth); the
device advances what a step decides: computed length, last token, drafts.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from bucketing.step_inputs import Limits, StepInputs
from glm_jax.sampling.control_update import ROW_BANS, ControlUpdate
from glm_jax.sampling.controls import ControlLines, update_lines


class Slots(NamedTuple):
    """State of one rank; the last line is the pad slot: page table zero, nothing computed."""

    page_table: Int[Array, "slots W"]
    computed: Int[Array, " slots"]  # tokens whose entries are in the cache
    last_token: Int[Array, " slots"]  # drawn, not yet in the cache
    drafts: Int[Array, "slots k"]  # of the next tokens; the host knows how many have a meaning
    temperature: Float[Array, " slots"]  # 0 = greedy
    top_k: Int[Array, " slots"]  # 0 = off
    top_p: Float[Array, " slots"]
    min_p: Float[Array, " slots"]
    seed: UInt[Array, "slots 2"]
    min_length: Int[Array, " slots"]  # stop ids are banned below this sequence length
    stop_ids: Int[Array, "slots T"]
    control_active: Bool[Array, " slots"]  # the rest as in `ControlLines`; a step only reads them
    token_counts: Int[Array, "slots V"]
    bias: Float[Array, "slots V"]
    penalties: Float[Array, "slots 3"]
    row_bans: Int[Array, "slots k+1 B"]
    row_force: Int[Array, "slots k+1"]

    @property
    def controls(self) -> ControlLines | None:
        """The control lines; None where they were left out."""
        return ControlLines(*self[-len(ControlLines._fields) :]) if self.bias.shape[-1] else None


def slot_shapes(limits: Limits, vocabulary: int = 0) -> Slots:
    """Shapes and types of one rank's slots, pad slot included.

    Args:
        limits: array widths of a step.
        vocabulary: V, logits per row; 0 leaves out the control lines, and what steps do with them.
    """
    slots, width = limits.max_num_seqs + 1, limits.num_drafts + 1

    def shape(*rest: int, dtype: type = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct((slots, *rest), dtype)

    return Slots(
        page_table=shape(limits.pages_per_seq),
        computed=shape(),
        last_token=shape(),
        drafts=shape(limits.num_drafts),
        temperature=shape(dtype=jnp.float32),
        top_k=shape(),
        top_p=shape(dtype=jnp.float32),
        min_p=shape(dtype=jnp.float32),
        seed=shape(2, dtype=jnp.uint32),
        min_length=shape(),
        stop_ids=shape(limits.stop_ids),
        control_active=shape(dtype=jnp.bool_),
        token_counts=shape(vocabulary),
        bias=shape(vocabulary, dtype=jnp.float32),
        penalties=shape(3, dtype=jnp.float32),
        row_bans=shape(width, ROW_BANS),
        row_force=shape(width),
    )


def empty_slots(limits: Limits, ranks: int, vocabulary: int = 0) -> Slots:
    """Host arrays of empty slots with the rank axis in front; see `slot_shapes`."""

    def empty(spec: Any) -> Any:
        return np.zeros((ranks, *spec.shape), spec.dtype)

    return jax.tree.map(empty, slot_shapes(limits, vocabulary))


def update_slots(slots: Slots, inputs: StepInputs) -> Slots:
    """Apply resets, then page growth; an index past the last slot writes nowhere."""
    where = inputs.reset_slot

    def reset(old: Array, new: Array) -> Array:
        return old.at[where].set(new.astype(old.dtype), mode="drop")

    table = reset(slots.page_table, inputs.reset_pages)
    return slots._replace(
        page_table=table.at[inputs.page_slot, inputs.page_index].set(
            inputs.page_value, mode="drop"
        ),
        computed=reset(slots.computed, inputs.reset_computed),
        temperature=reset(slots.temperature, inputs.reset_temperature),
        top_k=reset(slots.top_k, inputs.reset_top_k),
        top_p=reset(slots.top_p, inputs.reset_top_p),
        min_p=reset(slots.min_p, inputs.reset_min_p),
        seed=reset(slots.seed, inputs.reset_seed),
        min_length=reset(slots.min_length, inputs.reset_min_length),
        stop_ids=reset(slots.stop_ids, inputs.reset_stop_ids),
    )


def update_controls(slots: Slots, update: ControlUpdate) -> Slots:
    """The controls program: apply an update to the lines; both with the rank axis, of size 1."""
    one, update = jax.tree.map(lambda array: array[0], (slots, update))
    assert one.controls is not None
    lines = update_lines(one.controls, update)
    return Slots(*slots[: -len(lines)], *(array[None] for array in lines))


def keep_drafts(
    slots: Slots,
    owners: Int[Array, " R"],
    lengths: Int[Array, " R"],
    drafts: Int[Array, "R k"],
) -> Slots:
    """Write the drafts of the requests that made some; the others keep what they have."""
    nowhere = slots.computed.shape[0]
    where = jnp.where(lengths > 0, owners, nowhere)
    return slots._replace(drafts=slots.drafts.at[where].set(drafts, mode="drop"))
