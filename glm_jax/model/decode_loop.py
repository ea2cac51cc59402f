"""Several decode steps in one dispatch: the serving loop inside a program.

All groups of the first step decode again and again, each from the slots that the step before left,
until a group ends or may need a page, or the steps are used up. A step of the loop is the same
function as a step of its own, drafts included, so the tokens are the same.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from bucketing.loop_inputs import LoopInputs, LoopOutputs
from bucketing.step_inputs import StepInputs, StepOutputs
from glm_jax.model.cache import Cache
from glm_jax.model.layer import Form
from glm_jax.model.slots import Slots, update_slots
from glm_jax.model.step import run_rows
from glm_jax.model.transformer import Transformer

DecodeLoop = Callable[
    [list, Cache, Slots, StepInputs, LoopInputs], tuple[Cache, Slots, LoopOutputs]
]


class _Lines(NamedTuple):
    """What the steps drew so far, a line per step."""

    group_tokens: Int[Array, "S G Q"]
    group_accepted: Int[Array, "S G"]
    drafts: Int[Array, "S G k"]
    expert_load: Float[Array, "S 2"]


class _State(NamedTuple):
    """What a step hands to the next."""

    step: Int[Array, ""]
    going: Bool[Array, ""]
    cache: Cache
    slots: Slots
    group_drafts: Int[Array, " G"]
    lines: _Lines


class _Loop(NamedTuple):
    """What all steps of a loop share.

    Attributes:
        run: one step: cache, slots and inputs to cache, slots and outputs.
        inputs: of the first step; resets and page updates were applied before it.
        ends: when to stop.
        drafts_ahead: positions behind a group's rows that making drafts may write.
    """

    run: Callable[[Cache, Slots, StepInputs], tuple[Cache, Slots, StepOutputs]]
    inputs: StepInputs
    ends: LoopInputs
    drafts_ahead: int

    def step(self, state: _State) -> _State:
        """Run one step, and see whether another may follow."""
        inputs, ends = self.inputs, self.ends
        computed = state.slots.computed[inputs.group_slot]
        wanted = jnp.minimum(inputs.group_new_drafts, ends.most_rows - computed - 2)
        wanted = jnp.maximum(wanted, 0)
        now = inputs._replace(group_drafts=state.group_drafts, group_new_drafts=wanted)
        cache, slots, outputs = self.run(state.cache, state.slots, now)
        after = slots.computed[inputs.group_slot]
        verified = jnp.maximum(jnp.minimum(wanted, ends.most_rows - after - 1), 0)
        reach = jnp.minimum(after + 1 + verified + self.drafts_ahead, ends.most_rows)
        stops = (reach > ends.page_rows) | _ended(outputs, computed, ends)
        drawn = _Lines(
            outputs.group_tokens, outputs.group_accepted, outputs.drafts, outputs.expert_load
        )
        return _State(
            step=state.step + 1,
            going=~jnp.any(inputs.group_decodes & stops),
            cache=cache,
            slots=slots,
            group_drafts=verified,
            lines=jax.tree.map(lambda old, new: old.at[state.step].set(new), state.lines, drawn),
        )


def build_decode_loop(
    merge: Callable[[list], Transformer], form: Form, *, loop: str, most_steps: int
) -> DecodeLoop:
    """The loop of all ranks over the steps of a pure decode cell.

    Args:
        merge: rebuilds the model from its leaves (``split_model``).
        form: the model and how it is run.
        loop: over layers, "unrolled" or "scan".
        most_steps: S, the lines of the outputs.
    """

    def loop_rank(
        params: list, cache: Cache, slots: Slots, inputs: StepInputs, ends: LoopInputs
    ) -> tuple[Cache, Slots, LoopOutputs]:
        num_drafts = slots.drafts.shape[-1]
        shares = form.config.index_share_for_mtp_iteration
        steps = _Loop(
            partial(run_rows, merge(params), form, loop),
            inputs,
            ends,
            drafts_ahead=0 if shares else max(0, num_drafts - 1),
        )
        first = _State(
            step=jnp.int32(0),
            going=jnp.bool_(True),
            cache=cache,
            slots=update_slots(slots, inputs),
            group_drafts=inputs.group_drafts,
            lines=_no_lines(inputs, num_drafts, most_steps),
        )
        most = jnp.minimum(ends.steps, most_steps)
        last = jax.lax.while_loop(
            lambda state: state.going & (state.step < most), steps.step, first
        )
        return last.cache, last.slots, LoopOutputs(last.step, *last.lines)

    def of_ranks(
        params: list, cache: Cache, slots: Slots, inputs: StepInputs, ends: LoopInputs
    ) -> tuple[Cache, Slots, LoopOutputs]:
        one_rank = jax.tree.map(lambda array: array[0], (cache, slots, inputs, ends))
        return jax.tree.map(lambda array: array[None], loop_rank(params, *one_rank))

    return of_ranks


def _no_lines(inputs: StepInputs, num_drafts: int, most_steps: int) -> _Lines:
    groups, width = inputs.group_tokens.shape
    return _Lines(
        jnp.zeros((most_steps, groups, width), jnp.int32),
        jnp.zeros((most_steps, groups), jnp.int32),
        jnp.zeros((most_steps, groups, num_drafts), jnp.int32),
        jnp.zeros((most_steps, 2), jnp.float32),
    )


def _ended(outputs: StepOutputs, computed: Int[Array, " G"], ends: LoopInputs) -> Bool[Array, " G"]:
    """Whether one of the tokens that a group emits ends its request.

    Args:
        outputs: of a step in which every group knew one token.
        computed: rows in the cache before it.
        ends: as the loop got them.
    """
    tokens = outputs.group_tokens
    number = jnp.arange(tokens.shape[1])
    emitted = number <= outputs.group_accepted[:, None]
    length = computed[:, None] + number + 2
    stops = jnp.any(tokens[:, :, None] == ends.end_ids[:, None, :], axis=-1)
    stops &= length >= ends.min_length[:, None]
    return jnp.any(emitted & (stops | (length > ends.most_rows[:, None])), axis=1)
