"""Drawing tokens: logits of the sampled rows, one draw each, accepted drafts, slots advanced."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from bucketing.step_inputs import StepInputs, StepOutputs
from glm_jax.model.head import logits_of
from glm_jax.model.rows import Rows
from glm_jax.model.slots import Slots
from glm_jax.sampling.controls import ControlRows
from glm_jax.sampling.sampler import RowSettings, sample


class Drawn(NamedTuple):
    """What a step drew; a token is meaningless where it was not asked for."""

    chunk_tokens: Int[Array, " J"]
    group_tokens: Int[Array, "G Q"]
    group_accepted: Int[Array, " G"]

    def outputs(
        self,
        drafts: Int[Array, "R k"],
        hidden: Float[Array, "N D"],
        expert_rows: Int[Array, "sparse_layers E"],
    ) -> StepOutputs:
        """The outputs of the step, with its drafts, hidden rows and the rows of each expert."""
        load = jnp.zeros(2)
        if expert_rows.size:
            rows = expert_rows.astype(jnp.float32)
            load = jnp.stack([jnp.max(rows), jnp.mean(rows)])
        return StepOutputs(
            *self, drafts=drafts, expert_load=load, expert_rows=expert_rows, hidden=hidden
        )


class Sampled(NamedTuple):
    """Rows that may be drawn at.

    Attributes:
        row: in the layout of the inputs.
        wanted: whether the draw is asked for.
        number: of the draw among those of its request, from 0; negative before the first.
    """

    row: Int[Array, " S"]
    wanted: Bool[Array, " S"]
    number: Int[Array, " S"]


def draw_tokens(
    head: Float[Array, "V D"],
    hidden: Float[Array, "n D"],
    slots: Slots,
    rows: Rows,
    inputs: StepInputs,
    place: Int[Array, " N"] | None = None,
) -> tuple[Slots, Drawn]:
    """Draw at chunk ends and at group rows, then advance the slots.

    Args:
        head: output projection.
        hidden: final-norm hidden rows.
        slots: with this step's resets applied.
        rows: the step's rows in the layout of ``inputs``.
        inputs: the step's inputs.
        place: where each row of the layout stands in ``hidden``; None if there. With it only
            ``n`` logits are computed, however many rows the layout could sample.
    """
    sampled = _sampled_rows(inputs)
    count = sampled.row.shape[0]
    if place is None or hidden.shape[0] >= count:
        drawn = _draw(head, hidden, slots, rows, sampled, place)
    else:
        chosen = jnp.nonzero(sampled.wanted, size=hidden.shape[0], fill_value=count)[0]
        safe = jnp.minimum(chosen, count - 1)
        asked = Sampled(sampled.row[safe], chosen < count, sampled.number[safe])
        few = _draw(head, hidden, slots, rows, asked, place)
        drawn = jnp.zeros((count,), few.dtype).at[chosen].set(few, mode="drop")
    chunks = inputs.chunk_slot.shape[0]
    chunk_tokens, group_tokens = drawn[:chunks], drawn[chunks:].reshape(inputs.group_tokens.shape)
    accepted = _accepted(group_tokens, slots, inputs)
    slots = _advance(slots, inputs, chunk_tokens, group_tokens, accepted)
    return slots, Drawn(chunk_tokens, group_tokens, accepted)


def _sampled_rows(inputs: StepInputs) -> Sampled:
    """Rows that may be drawn at: chunk ends, then all group rows."""
    groups, width = inputs.group_tokens.shape
    prefill_rows = inputs.prefill_tokens.shape[0]
    chunk_last = jnp.maximum(inputs.chunk_start[1:] - 1, 0)
    group_rows = prefill_rows + jnp.arange(groups * width)
    sampled = jnp.concatenate([chunk_last, group_rows]).astype(jnp.int32)
    # From a group's last known row on: its next token, then what its drafts are compared with.
    draw = jnp.arange(width) - (inputs.group_known - 1)[:, None]
    wanted = inputs.group_sampled[:, None] & (draw >= 0) & (draw <= inputs.group_drafts[:, None])
    number = jnp.concatenate([jnp.zeros_like(chunk_last), draw.reshape(-1)])
    return Sampled(sampled, jnp.concatenate([inputs.chunk_sampled, wanted.reshape(-1)]), number)


def _draw(
    head: Float[Array, "V D"],
    hidden: Float[Array, "n D"],
    slots: Slots,
    rows: Rows,
    sampled: Sampled,
    place: Int[Array, " N"] | None,
) -> Int[Array, " S"]:
    row, wanted = sampled.row, sampled.wanted
    owner = rows.slots[row]
    settings = RowSettings(
        # A row nobody reads is greedy: it must not switch the costly branch on.
        temperature=jnp.where(wanted, slots.temperature[owner], 0.0),
        top_k=slots.top_k[owner],
        top_p=slots.top_p[owner],
        min_p=slots.min_p[owner],
        seed=slots.seed[owner],
        position=rows.positions[row] + 1,
        min_length=jnp.where(wanted, slots.min_length[owner], 0),
        stop_ids=slots.stop_ids[owner],
    )
    lines, controls = slots.controls, None
    if lines is not None:
        controls = ControlRows(lines, slots.drafts, owner, sampled.number, wanted)
    standing = row if place is None else jnp.minimum(place[row], hidden.shape[0] - 1)
    return sample(logits_of(hidden, head, standing), settings, controls)


def _accepted(
    group_tokens: Int[Array, "G Q"], slots: Slots, inputs: StepInputs
) -> Int[Array, " G"]:
    """Length of the longest prefix of drafts that the draws confirm.

    Only decoding groups have drafts, and those know one token: draw j is at row j.
    """
    count = min(slots.drafts.shape[1], group_tokens.shape[1] - 1)
    drafts = slots.drafts[inputs.group_slot][:, :count]
    agree = group_tokens[:, :count] == drafts
    agree &= jnp.arange(count) < inputs.group_drafts[:, None]
    return jnp.sum(jnp.cumprod(agree.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def _advance(
    slots: Slots,
    inputs: StepInputs,
    chunk_tokens: Int[Array, " J"],
    group_tokens: Int[Array, "G Q"],
    accepted: Int[Array, " G"],
) -> Slots:
    """Computed lengths and last tokens after the step; pads and unsampled rows change nothing."""
    nowhere = slots.computed.shape[0]
    pad_slot = nowhere - 1

    def target(slot: Int[Array, " rows"], active: Array) -> Int[Array, " rows"]:
        return jnp.where(active & (slot != pad_slot), slot, nowhere)

    chunk_rows = inputs.chunk_start[1:] - inputs.chunk_start[:-1]
    grown = jnp.where(inputs.group_decodes, 1 + accepted, inputs.group_known)
    slot = jnp.concatenate([inputs.chunk_slot, inputs.group_slot])
    computed = slots.computed.at[target(slot, jnp.array(True))].add(
        jnp.concatenate([chunk_rows, grown]), mode="drop"
    )
    last_row = jnp.maximum(inputs.group_known - 1, 0) + accepted
    last = jnp.take_along_axis(group_tokens, last_row[:, None], axis=1)
    sampled = jnp.concatenate([inputs.chunk_sampled, inputs.group_sampled])
    last_token = slots.last_token.at[target(slot, sampled)].set(
        jnp.concatenate([chunk_tokens, last[:, 0]]), mode="drop"
    )
    return slots._replace(computed=computed, last_token=last_token)
