"""One step: all rows of a mixed batch through the model, one draw per sampled row, slots advanced.

Then, where slots hold drafts, the MTP layer behind it and the drafts of the next step.
``build_step`` returns the function of one cell; it is traced once per cell and compiled ahead of
time by ``bucketing.programs``.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from bucketing.step_inputs import StepInputs, StepOutputs
from glm_jax.model.cache import Cache
from glm_jax.model.drafter import Drafter, drafter_of
from glm_jax.model.draw import Drawn, draw_tokens
from glm_jax.model.layer import Context, Form, Stream
from glm_jax.model.mtp import (
    draft_rows,
    draft_tokens,
    following_tokens,
    indexed_pass,
    last_rows,
)
from glm_jax.model.rope import rotation
from glm_jax.model.rows import build_rows
from glm_jax.model.slots import Slots, keep_drafts, update_slots
from glm_jax.model.transformer import Transformer, run_layers

Step = Callable[[list, Cache, Slots, StepInputs], tuple[Cache, Slots, StepOutputs]]


def build_step(merge: Callable[[list], Transformer], form: Form, *, loop: str) -> Step:
    """The step of all ranks: written for one rank, wrapped over the leading rank axis.

    Args:
        merge: rebuilds the model from its leaves (``split_model``).
        form: the model and how it is run.
        loop: "unrolled" or "scan".
    """

    def step_rank(
        params: list, cache: Cache, slots: Slots, inputs: StepInputs
    ) -> tuple[Cache, Slots, StepOutputs]:
        return run_rows(merge(params), form, loop, cache, update_slots(slots, inputs), inputs)

    return over_ranks(step_rank)


def run_rows(
    model: Transformer, form: Form, loop: str, cache: Cache, slots: Slots, inputs: StepInputs
) -> tuple[Cache, Slots, StepOutputs]:
    """One rank's rows through the model, a draw per sampled row, slots advanced, drafts made.

    Args:
        model: the weights.
        form: how the model is run.
        loop: over layers, "unrolled" or "scan".
        cache: of the rank.
        slots: with the step's resets and page updates applied.
        inputs: the step's inputs.
    """
    config = form.config
    _, pages, page_size, _ = cache.latent.shape
    rows = build_rows(
        slots,
        inputs,
        page_size=page_size,
        pool_entries=pages * page_size,
        tile_rows=form.tile_rows,
    )
    turn = rotation(rows.positions, config.qk_rope_head_dim, config.rope_theta)
    context = Context(form, rows, turn, slots.page_table)
    topk = selection_width(form, slots, page_size)
    x = model.embed[...][rows.tokens].astype(form.dtype)
    stream = run_layers(model, x, cache, context, loop=loop, topk=topk)
    slots, drawn = draw_tokens(model.head[...], stream.x, slots, rows, inputs)
    cache, num_drafts = stream.cache, slots.drafts.shape[-1]
    drafts = jnp.zeros((inputs.chunk_slot.size + inputs.group_slot.size, num_drafts), jnp.int32)
    if num_drafts:
        drafter = drafter_of(model, config)
        cache, slots, drafts = draft(drafter, stream, slots, drawn, inputs, context)
    return cache, slots, drawn.outputs(drafts, stream.x, stream.expert_rows)


def draft(
    drafter: Drafter,
    stream: Stream,
    slots: Slots,
    drawn: Drawn,
    inputs: StepInputs,
    context: Context,
) -> tuple[Cache, Slots, Int[Array, "R k"]]:
    """The MTP layer over the rows of a step, if ``inputs.drafter``, and the drafts it makes.

    Args:
        drafter: the weights.
        stream: as the target leaves it.
        slots: advanced by the step.
        drawn: what the step drew.
        inputs: the step's inputs.
        context: the target's.

    Returns:
        The cache, the slots with the drafts, the drafts behind each chunk, then each group.
    """
    starts = draft_rows(inputs, drawn, context.rows.positions)
    first = indexed_pass(
        drafter,
        stream.x,
        following_tokens(inputs, drawn),
        stream.cache,
        context,
        topk=stream.selection.entries.shape[1],
        run=inputs.drafter,
    )
    made, cache = draft_tokens(
        drafter,
        last_rows(first, starts),
        starts,
        context.page_table,
        context.form,
        num_drafts=slots.drafts.shape[-1],
    )
    return cache, keep_drafts(slots, starts.slots, starts.lengths, made.tokens), made.tokens


def selection_width(form: Form, slots: Slots, page_size: int) -> int:
    """K: entries a row attends to, fewer where no request can be that long."""
    return min(form.config.index_topk, slots.page_table.shape[-1] * page_size)


def over_ranks(step_rank: Step) -> Step:
    """Wrap a step of one rank over the leading rank axis, which has size 1 today."""

    def step(
        params: list, cache: Cache, slots: Slots, inputs: StepInputs
    ) -> tuple[Cache, Slots, StepOutputs]:
        one_rank = jax.tree.map(lambda array: array[0], (cache, slots, inputs))
        return jax.tree.map(lambda array: array[None], step_rank(params, *one_rank))

    return step
