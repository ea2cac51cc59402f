"""The MTP layer and the drafts it makes (DeepSeek-V3 report, 2.2; GLM-5 adds its own indexer).

Row i merges the target's final-norm hidden state h_i with the token that follows it:

    z_i = concat[norm_e(embed[t_(i+1)]), norm_h(h_i)] W,   y_i = norm(layer(z_i) at position i)

and ``head y_i`` drafts t_(i+2). The embedding counts as zero at position 0 (vLLM's convention).
The first pass runs over all rows of a step and writes the layer's cache planes. Each later pass has
one row per request: y instead of h, the last draft instead of t, one position further.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from bucketing.step_inputs import StepInputs
from glm_jax.model.cache import Cache
from glm_jax.model.config import GlmConfig
from glm_jax.model.draw import Drawn
from glm_jax.model.head import logits_of
from glm_jax.model.layer import (
    Context,
    Layer,
    Planes,
    Stream,
    after_attention,
    attend_groups,
    run_layer,
)
from glm_jax.model.norm import rms_norm
from glm_jax.model.rope import rotation
from glm_jax.model.selection import empty_selection
from glm_jax.model.transformer import Transformer
from pallas_kernels.sparse_mla import Selection


class Pass(NamedTuple):
    """What a pass of the MTP layer leaves behind."""

    y: Float[Array, "N D"]  # after the layer's own norm: what the head and the next pass take
    cache: Cache
    selection: Selection


class DraftRows(NamedTuple):
    """The requests of a step that draft: one line per chunk, then one per group (R = J + G).

    Attributes:
        last: row of the step that the drafts follow, the last verified one of the request; never
            that of a rejected draft, never a pad.
        slots: of each request.
        lengths: how many drafts each wants; 0 where it does not draft.
    """

    last: Int[Array, " R"]
    slots: Int[Array, " R"]
    lengths: Int[Array, " R"]


class Drafts(NamedTuple):
    """What was drafted; a row means nothing from its request's length on.

    Attributes:
        tokens: 0 where nothing was drafted.
        hidden: y that the head drafted each of them from.
    """

    tokens: Int[Array, "R k"]
    hidden: Float[Array, "k R D"]


def following_tokens(inputs: StepInputs, drawn: Drawn) -> Int[Array, " N"]:
    """The token after each row: known from the text, or drawn in this step.

    After a rejected draft's row it is the draw made there, which has no meaning: the request's
    next step computes that position again.
    """
    prefill_rows, width = inputs.prefill_next.shape[0], inputs.group_next.shape[1]
    end = jnp.where(inputs.chunk_sampled, inputs.chunk_start[1:] - 1, prefill_rows)
    prefill = inputs.prefill_next.at[end].set(drawn.chunk_tokens, mode="drop")
    new = jnp.arange(width) >= (inputs.group_known - 1)[:, None]
    new &= inputs.group_sampled[:, None]
    group = jnp.where(new, drawn.group_tokens, inputs.group_next)
    return jnp.concatenate([prefill, group.reshape(-1)])


def draft_rows(inputs: StepInputs, drawn: Drawn, lengths: Int[Array, " R"]) -> DraftRows:
    """Find each request's last verified row.

    Args:
        inputs: the step's inputs.
        drawn: what the step drew and accepted.
        lengths: drafts wanted of each chunk's, then of each group's request; taken as 0 where the
            step draws nothing for it.
    """
    prefill_rows = inputs.prefill_next.shape[0]
    groups, width = inputs.group_next.shape
    group_first = prefill_rows + width * jnp.arange(groups, dtype=jnp.int32)
    group_last = group_first + jnp.maximum(inputs.group_known - 1, 0) + drawn.group_accepted
    sampled = jnp.concatenate([inputs.chunk_sampled, inputs.group_sampled])
    return DraftRows(
        last=jnp.concatenate([jnp.maximum(inputs.chunk_start[1:] - 1, 0), group_last]),
        slots=jnp.concatenate([inputs.chunk_slot, inputs.group_slot]),
        lengths=jnp.where(sampled, lengths, 0),
    )


def indexed_pass(
    model: Transformer,
    hidden: Float[Array, "N D"],
    next_tokens: Int[Array, " N"],
    cache: Cache,
    context: Context,
    *,
    topk: int,
) -> Pass:
    """Run the MTP layer with its own indexer: the first pass, over all rows of a step.

    Later passes too, one row per request, in models that do not share the first one's selection.

    Args:
        model: with an MTP layer.
        hidden: the target's rows after its final norm; later, y of the pass before.
        next_tokens: as ``following_tokens`` gives them; later, the last drafts.
        cache: of the rank.
        context: the target's, for rows, positions and pages are the same; later, that of
            ``pass_context``.
        topk: width of the selection.
    """
    config = context.form.config
    z = merge(model, hidden, next_tokens, context.rows.positions == 0, config)
    # run_layer counts rows per expert; the target's counts are elsewhere.
    counts = jnp.zeros((1, config.n_routed_experts), jnp.int32)
    stream = Stream(z, cache, empty_selection(z.shape[0], topk), counts)
    stream = run_layer(mtp_layer(model, config), stream, context)
    y = rms_norm(stream.x, model.mtp["norm"][...], config.rms_norm_eps)
    return Pass(y, stream.cache, stream.selection)


def shared_pass(
    model: Transformer,
    y: Float[Array, "R D"],
    selection: Selection,
    cache: Cache,
    context: Context,
) -> Float[Array, "R D"]:
    """Run a later pass over the keys that the first pass selected.

    No such row is among those keys, so nothing is written: the cache holds only entries made of the
    target's hidden states, and drafting needs no pages ahead.

    Args:
        model: with an MTP layer.
        y: rows of the pass before.
        selection: what the first pass selected for each request's last verified row.
        cache: as the first pass left it.
        context: of ``pass_context``.
    """
    form, rows = context.form, context.rows
    config, layer = form.config, mtp_layer(model, form.config)
    z = merge(model, y, rows.tokens, rows.positions == 0, config)
    block, planes = layer.block, Planes(layer.plane, layer.index_plane)
    h = rms_norm(z, block.input_norm[...], config.rms_norm_eps)
    queries = block.attention.project(h, context.turn, config, form.kernels).queries
    up = block.attention.up(form.dtype)
    values = attend_groups(queries, selection, cache, planes, up, form)
    x, _ = after_attention(block, layer.feed_forward, z, values, rows.valid, form)
    return rms_norm(x, model.mtp["norm"][...], config.rms_norm_eps)


def draft_tokens(
    model: Transformer,
    first: Pass,
    starts: DraftRows,
    context: Context,
    *,
    num_drafts: int,
) -> tuple[Drafts, Cache]:
    """Draft greedily behind the last verified row of each request.

    The first draft is the first pass's; each further one costs a pass, which is skipped where every
    request wants fewer. ``index_share_for_mtp_iteration`` says whether these passes share the first
    one's selection; if not, pass j writes position last + j of the MTP planes, and the request
    needs pages up to last + length - 1.

    Args:
        model: with an MTP layer.
        first: of the step's rows.
        starts: where drafts begin.
        context: of the first pass.
        num_drafts: k, at least 1 and at least every length.

    Returns:
        The drafts, and the cache, the same one where the selection is shared.
    """
    selection: Selection = jax.tree.map(lambda array: array[starts.last], first.selection)

    # The cache is carried only where a pass writes it: no branch can copy what it merely reads.
    def shared(
        step: int, y: Float[Array, "R D"], token: Int[Array, " R"]
    ) -> tuple[Float[Array, "R D"], Int[Array, " R"]]:
        ahead = pass_context(context, starts, token, step, first.cache)
        later = shared_pass(model, y, selection, first.cache, ahead)
        return later, _best_tokens(model, later)

    def indexed(
        step: int, y: Float[Array, "R D"], token: Int[Array, " R"], cache: Cache
    ) -> tuple[Float[Array, "R D"], Int[Array, " R"], Cache]:
        ahead = pass_context(context, starts, token, step, cache)
        topk = selection.entries.shape[1]
        later = indexed_pass(model, y, ahead.rows.tokens, cache, ahead, topk=topk)
        return later.y, _best_tokens(model, later.y), later.cache

    share = context.form.config.index_share_for_mtp_iteration
    wanted = jnp.max(starts.lengths)
    y = first.y[starts.last]
    token = jax.lax.cond(
        wanted > 0, partial(_best_tokens, model), lambda _: jnp.zeros_like(starts.last), y
    )
    carry: tuple = (y, token) if share else (y, token, first.cache)
    chain = [carry]
    for step in range(1, num_drafts):
        later = partial(shared if share else indexed, step)
        carry = jax.lax.cond(wanted > step, later, lambda *same: same, *carry)
        chain.append(carry)
    tokens = jnp.stack([token for _, token, *_ in chain], axis=1)
    meant = jnp.arange(num_drafts) < starts.lengths[:, None]
    drafts = Drafts(jnp.where(meant, tokens, 0), jnp.stack([y for y, *_ in chain]))
    return drafts, first.cache if share else carry[2]


def pass_context(
    context: Context, starts: DraftRows, tokens: Int[Array, " R"], step: int, cache: Cache
) -> Context:
    """The rows of pass ``step`` (from 1): groups of one row, at position last + step."""
    config = context.form.config
    _, pages, page_size, _ = cache.latent.shape
    valid = step < starts.lengths
    positions = jnp.where(valid, context.rows.positions[starts.last] + step, 0)
    page = context.page_table[starts.slots, positions // page_size]
    rows = context.rows._replace(
        tokens=jnp.where(valid, tokens, 0),
        positions=positions,
        valid=valid,
        entries=jnp.where(valid, page * page_size + positions % page_size, pages * page_size),
        slots=starts.slots,
        # The step's tiles stay, unread: there are no prefill rows.
        group_positions=jnp.where(valid, positions, -1)[:, None],
        group_page_table=context.page_table[starts.slots],
    )
    turn = rotation(positions, config.qk_rope_head_dim, config.rope_theta)
    return context._replace(rows=rows, turn=turn)


def merge(
    model: Transformer,
    hidden: Float[Array, "N D"],
    tokens: Int[Array, " N"],
    start: Bool[Array, " N"],
    config: GlmConfig,
) -> Float[Array, "N D"]:
    """The layer's input: norms of the tokens' embeddings and of ``hidden``, in this order, times W.

    Args:
        model: with an MTP layer.
        hidden: the target's final-norm rows, or y of the pass before.
        tokens: the token after each row.
        start: rows at position 0, whose embedding counts as zero.
        config: the model's.
    """
    embedded = jnp.where(start[:, None], 0, model.embed[...][tokens]).astype(hidden.dtype)
    weights, eps = model.mtp, config.rms_norm_eps
    halves = (
        rms_norm(embedded, weights["embed_norm"][...], eps),
        rms_norm(hidden, weights["hidden_norm"][...], eps),
    )
    return jnp.concatenate(halves, axis=-1) @ weights["merge"][...].astype(hidden.dtype)


def mtp_layer(model: Transformer, config: GlmConfig) -> Layer:
    """The decoder layer behind the target's: last of its groups, last plane of each cache array."""
    number = config.num_hidden_layers
    full = sum(map(config.has_indexer, range(number)))
    sparse = sum(map(config.is_sparse, range(number)))
    return Layer(
        block=model.member("blocks", number),
        indexer=model.member("indexers", full),
        feed_forward=model.member("moes", sparse),
        plane=number,
        index_plane=full,
        sparse_before=0,
    )


def _best_tokens(model: Transformer, y: Float[Array, "R D"]) -> Int[Array, " R"]:
    logits = logits_of(y, model.head[...], jnp.arange(y.shape[0]))
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
