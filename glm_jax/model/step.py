"""One step: all rows of a mixed batch through the model, one draw per sampled row, slots advanced.

``build_step`` returns the function of one cell; it is traced once per cell and compiled ahead of
time by ``bucketing.programs``.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from bucketing.step_inputs import StepInputs, StepOutputs
from glm_jax.model.cache import Cache, CacheFormat
from glm_jax.model.config import GlmConfig
from glm_jax.model.head import logits_of
from glm_jax.model.layer import Context
from glm_jax.model.rope import rotation
from glm_jax.model.rows import Rows, build_rows
from glm_jax.model.slots import Slots, update_slots
from glm_jax.model.transformer import Transformer, run_layers
from glm_jax.sampling.sampler import RowSettings, sample

Step = Callable[[list, Cache, Slots, StepInputs], tuple[Cache, Slots, StepOutputs]]


def build_step(
    merge: Callable[[list], Transformer],
    config: GlmConfig,
    cache_format: CacheFormat,
    *,
    loop: str,
) -> Step:
    """The step of all ranks: written for one rank, wrapped over the leading rank axis.

    Args:
        merge: rebuilds the model from its leaves (``split_model``).
        config: the model.
        cache_format: how cache rows are stored.
        loop: "unrolled" or "scan".
    """

    def step_rank(
        params: list, cache: Cache, slots: Slots, inputs: StepInputs
    ) -> tuple[Cache, Slots, StepOutputs]:
        model = merge(params)
        slots = update_slots(slots, inputs)
        _, pages, page_size, _ = cache.latent.shape
        rows = build_rows(slots, inputs, page_size=page_size, pool_entries=pages * page_size)
        context = Context(
            config=config,
            cache_format=cache_format,
            rows=rows,
            turn=rotation(rows.positions, config.qk_rope_head_dim, config.rope_theta),
            page_table=slots.page_table,
        )
        topk = min(config.index_topk, slots.page_table.shape[1] * page_size)
        x = model.embed[...][rows.tokens]
        hidden, cache = run_layers(model, x, cache, context, loop=loop, topk=topk)
        slots, outputs = _sample_rows(model, hidden, slots, rows, inputs)
        return cache, slots, outputs

    def step(
        params: list, cache: Cache, slots: Slots, inputs: StepInputs
    ) -> tuple[Cache, Slots, StepOutputs]:
        one_rank = jax.tree.map(lambda array: array[0], (cache, slots, inputs))
        return jax.tree.map(lambda array: array[None], step_rank(params, *one_rank))

    return step


def _sample_rows(
    model: Transformer,
    hidden: Float[Array, "N D"],
    slots: Slots,
    rows: Rows,
    inputs: StepInputs,
) -> tuple[Slots, StepOutputs]:
    """Draw at chunk ends and at group rows, then advance the slots."""
    groups, width = inputs.group_tokens.shape
    prefill_rows = inputs.prefill_tokens.shape[0]
    chunk_last = jnp.maximum(inputs.chunk_start[1:] - 1, 0)
    group_rows = prefill_rows + jnp.arange(groups * width)
    sampled = jnp.concatenate([chunk_last, group_rows]).astype(jnp.int32)
    # From a group's last known row on: its next token, then what its drafts are compared with.
    draw = jnp.arange(width) - (inputs.group_known - 1)[:, None]
    wanted = inputs.group_sampled[:, None] & (draw >= 0) & (draw <= inputs.group_drafts[:, None])
    wanted = jnp.concatenate([inputs.chunk_sampled, wanted.reshape(-1)])
    settings = _settings(slots, rows, sampled, wanted)
    drawn = sample(logits_of(hidden, model.head[...], sampled), settings)
    chunk_tokens = drawn[: chunk_last.shape[0]]
    group_tokens = drawn[chunk_last.shape[0] :].reshape(groups, width)
    outputs = StepOutputs(
        chunk_tokens, group_tokens, _accepted(group_tokens, slots, inputs), hidden
    )
    return _advance(slots, inputs, outputs), outputs


def _settings(
    slots: Slots, rows: Rows, sampled: Int[Array, " S"], wanted: Bool[Array, " S"]
) -> RowSettings:
    owner = rows.slots[sampled]
    return RowSettings(
        # A row nobody reads is greedy: it must not switch the costly branch on.
        temperature=jnp.where(wanted, slots.temperature[owner], 0.0),
        top_k=slots.top_k[owner],
        top_p=slots.top_p[owner],
        min_p=slots.min_p[owner],
        seed=slots.seed[owner],
        position=rows.positions[sampled] + 1,
        min_length=jnp.where(wanted, slots.min_length[owner], 0),
        stop_ids=slots.stop_ids[owner],
    )


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


def _advance(slots: Slots, inputs: StepInputs, outputs: StepOutputs) -> Slots:
    """Computed lengths and last tokens after the step; pads and unsampled rows change nothing."""
    nowhere = slots.computed.shape[0]
    pad_slot = nowhere - 1

    def target(slot: Int[Array, " rows"], active: Array) -> Int[Array, " rows"]:
        return jnp.where(active & (slot != pad_slot), slot, nowhere)

    chunk_rows = inputs.chunk_start[1:] - inputs.chunk_start[:-1]
    grown = jnp.where(inputs.group_decodes, 1 + outputs.group_accepted, inputs.group_known)
    slot = jnp.concatenate([inputs.chunk_slot, inputs.group_slot])
    computed = slots.computed.at[target(slot, jnp.array(True))].add(
        jnp.concatenate([chunk_rows, grown]), mode="drop"
    )
    last_row = jnp.maximum(inputs.group_known - 1, 0) + outputs.group_accepted
    last = jnp.take_along_axis(outputs.group_tokens, last_row[:, None], axis=1)
    sampled = jnp.concatenate([inputs.chunk_sampled, inputs.group_sampled])
    last_token = slots.last_token.at[target(slot, sampled)].set(
        jnp.concatenate([outputs.chunk_tokens, last[:, 0]]), mode="drop"
    )
    return slots._replace(computed=computed, last_token=last_token)
