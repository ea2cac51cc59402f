"""One step: all rows of a mixed batch through the model, one draw per sampled row, slots advanced.

``build_step`` returns the function of one cell; it is traced once per cell and compiled ahead of
time by ``bucketing.programs``.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from bucketing.step_inputs import StepInputs, StepOutputs
from glm_jax.model.cache import Cache
from glm_jax.model.draw import draw_tokens
from glm_jax.model.layer import Context, Form
from glm_jax.model.rope import rotation
from glm_jax.model.rows import build_rows
from glm_jax.model.slots import Slots, update_slots
from glm_jax.model.transformer import Transformer, run_layers

Step = Callable[[list, Cache, Slots, StepInputs], tuple[Cache, Slots, StepOutputs]]


def build_step(merge: Callable[[list], Transformer], form: Form, *, loop: str) -> Step:
    """The step of all ranks: written for one rank, wrapped over the leading rank axis.

    Args:
        merge: rebuilds the model from its leaves (``split_model``).
        form: the model and how it is run.
        loop: "unrolled" or "scan".
    """
    config = form.config

    def step_rank(
        params: list, cache: Cache, slots: Slots, inputs: StepInputs
    ) -> tuple[Cache, Slots, StepOutputs]:
        model = merge(params)
        slots = update_slots(slots, inputs)
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
        drafts = jnp.zeros((inputs.chunk_slot.size + inputs.group_slot.size, 0), jnp.int32)
        return stream.cache, slots, drawn.outputs(drafts, stream.x, stream.expert_rows)

    return over_ranks(step_rank)


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
