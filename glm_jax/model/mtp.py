"""The passes of the MTP layer in a step (DeepSeek-V3 report, 2.2; GLM-5 adds its own indexer).

Row i merges the target's final-norm hidden state h_i with the token that follows it:

    z_i = concat[norm_e(embed[t_(i+1)]), norm_h(h_i)] W,   y_i = norm(layer(z_i) at position i)

and ``head y_i`` drafts t_(i+2). The embedding counts as zero at position 0 (vLLM's convention).
The first pass runs over all rows of a step and writes the layer's cache planes. Each later pass has
one row per request: y instead of h, the last draft instead of t, one position further.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from bucketing.step_inputs import StepInputs
from glm_jax.model.cache import Cache
from glm_jax.model.drafter import Drafter, mtp_planes
from glm_jax.model.draw import Drawn
from glm_jax.model.layer import (
    Context,
    Form,
    Projected,
    after_attention,
    attend_groups,
    finish_layer,
    project_rows,
    write_rows,
)
from glm_jax.model.norm import rms_norm
from glm_jax.model.rope import rotation
from glm_jax.model.rows import Rows, no_tiles
from glm_jax.model.selection import empty_selection
from pallas_kernels.sparse_mla import Selection


class Pass(NamedTuple):
    """What a pass of the MTP layer leaves behind."""

    y: Float[Array, "N D"]  # after the layer's own norm: what the head and the next pass take
    selection: Selection
    cache: Cache


class DraftRows(NamedTuple):
    """The requests of a step that draft: one line per chunk, then one per group (R = J + G).

    Attributes:
        last: row that the drafts follow, the last verified one of the request; never that of
            a rejected draft, never a pad.
        slots: of each request.
        positions: of the last row.
        lengths: how many drafts each wants; 0 where it does not draft.
    """

    last: Int[Array, " R"]
    slots: Int[Array, " R"]
    positions: Int[Array, " R"]
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


def draft_rows(
    inputs: StepInputs,
    drawn: Drawn,
    positions: Int[Array, " n"],
    place: Int[Array, " N"] | None = None,
) -> DraftRows:
    """Find each request's last verified row; only requests that the step draws a token for draft.

    Args:
        inputs: the step's inputs.
        drawn: what the step drew and accepted.
        positions: of the rows.
        place: where each row of the inputs' layout stands among the rows; None if there.
    """
    prefill_rows = inputs.prefill_next.shape[0]
    groups, width = inputs.group_next.shape
    group_first = prefill_rows + width * jnp.arange(groups, dtype=jnp.int32)
    group_last = group_first + jnp.maximum(inputs.group_known - 1, 0) + drawn.group_accepted
    last = jnp.concatenate([jnp.maximum(inputs.chunk_start[1:] - 1, 0), group_last])
    if place is not None:
        last = jnp.minimum(place[last], positions.shape[0] - 1)
    asked = inputs.drafter & jnp.concatenate([inputs.chunk_sampled, inputs.group_sampled])
    wanted = jnp.concatenate([inputs.chunk_new_drafts, inputs.group_new_drafts])
    return DraftRows(
        last=last,
        slots=jnp.concatenate([inputs.chunk_slot, inputs.group_slot]),
        positions=positions[last],
        lengths=jnp.where(asked, wanted, 0),
    )


def indexed_pass(
    drafter: Drafter,
    hidden: Float[Array, "N D"],
    next_tokens: Int[Array, " N"],
    cache: Cache,
    context: Context,
    *,
    topk: int,
    run: Bool[Array, ""] | bool = True,
) -> Pass:
    """Run the MTP layer with its own indexer: the first pass, over all rows of a step.

    Later passes too, one row per request, in models that do not share the first one's selection.
    The rows that its experts get are not counted: ``StepOutputs.expert_rows`` is the target's.

    Args:
        drafter: the weights.
        hidden: the target's rows after its final norm; later, y of the pass before.
        next_tokens: as ``following_tokens`` gives them; later, the last drafts.
        cache: of the rank.
        context: the target's, for rows, positions and pages are the same; later, that of
            ``later_context``.
        topk: width of the selection.
        run: False skips all of it but a scatter of no rows, and finds zeros.
    """
    form, rows = context.form, context.rows
    config = form.config

    def project() -> tuple[Float[Array, "N D"], Projected]:
        layer = drafter.layer()
        z = drafter.merge(hidden, next_tokens, rows.positions == 0, config)
        return z, project_rows(layer.block, layer.indexer, z, context.turn, form)

    z, projected = _if(run, project)
    # Outside of any branch: XLA copies what a branch writes, on a GPU the whole cache.
    _, pages, page_size, _ = cache.latent.shape
    entries = jnp.where(run, rows.entries, pages * page_size)
    cache = write_rows(projected, cache, entries, mtp_planes(config), form)

    def finish() -> tuple[Float[Array, "N D"], Selection]:
        nothing = empty_selection(z.shape[0], topk)
        x, selection, _ = finish_layer(drafter.layer(), projected, z, cache, nothing, context)
        return drafter.norm(x, config), selection

    y, selection = _if(run, finish)
    return Pass(y, selection, cache)


def shared_pass(
    drafter: Drafter,
    y: Float[Array, "R D"],
    selection: Selection,
    cache: Cache,
    context: Context,
) -> Float[Array, "R D"]:
    """Run a later pass over the keys that the first pass selected; returns its y.

    No such row is among those keys, so nothing is written: the cache holds only entries made of the
    target's hidden states, and drafting needs no pages ahead.

    Args:
        drafter: the weights.
        y: rows of the pass before.
        selection: what the first pass selected for each request's last verified row.
        cache: as the first pass left it.
        context: of ``later_context``.
    """
    form, rows, layer = context.form, context.rows, drafter.layer()
    config = form.config
    z = drafter.merge(y, rows.tokens, rows.positions == 0, config)
    block = layer.block
    h = rms_norm(z, block.input_norm[...], config.rms_norm_eps)
    queries = block.attention.project(h, context.turn, config, form.kernels).queries
    up = block.attention.up(form.dtype)
    # A line that does not draft attends to nothing.
    used = selection._replace(count=jnp.where(rows.valid, selection.count, 0))
    values = attend_groups(queries, used, cache, layer.planes, up, form)
    x, _ = after_attention(block, layer.feed_forward, z, values, rows.valid, form)
    return drafter.norm(x, config)


def draft_tokens(
    drafter: Drafter,
    first: Pass,
    starts: DraftRows,
    page_table: Int[Array, "slots W"],
    form: Form,
    *,
    num_drafts: int,
) -> tuple[Drafts, Cache]:
    """Draft greedily behind the last verified row of each request.

    The first draft is the first pass's; each further one costs a pass, which is skipped where every
    request wants fewer. ``index_share_for_mtp_iteration`` says whether these passes share the first
    one's selection. If not, pass j writes position last + j of the MTP planes; where the request
    has no page for it the row is a pad, and what it drafts means nothing.

    Args:
        drafter: the weights.
        first: of the requests' last rows (``last_rows``).
        starts: where drafts begin.
        page_table: of the slots.
        form: the model and how it is run.
        num_drafts: k, at least 1 and at least every length.

    Returns:
        The drafts, and the cache, the same one where the selection is shared.
    """
    share = form.config.index_share_for_mtp_iteration
    wanted, selection = jnp.max(starts.lengths), first.selection
    # A loop of unknown length would leave the CUDA graph; elsewhere one body compiles faster.
    unrolled = form.kernels == "mosaic_gpu"

    def later(step: int | Int[Array, ""], carry: tuple[Drafts, Any]) -> tuple[Drafts, Any]:
        made, written = carry
        cache = first.cache if share else written
        run = step < wanted if unrolled else True
        y = made.hidden[step - 1]
        ahead = later_context(form, page_table, starts, made.tokens[:, step - 1], step, cache)
        if share:
            y = _if(run, lambda: shared_pass(drafter, y, selection, cache, ahead))
        else:
            topk = selection.entries.shape[1]
            y, _, written = indexed_pass(
                drafter, y, ahead.rows.tokens, cache, ahead, topk=topk, run=run
            )
        return _with_draft(drafter, made, step, y, run), written

    made = _with_draft(drafter, _no_drafts(first.y, num_drafts), 0, first.y, wanted > 0)
    # Carried only where a pass writes it.
    carry: tuple[Drafts, Any] = made, None if share else first.cache
    if unrolled:
        for step in range(1, num_drafts):
            carry = later(step, carry)
    else:
        carry = jax.lax.fori_loop(1, wanted, later, carry)
    made, written = carry
    meant = jnp.arange(num_drafts) < starts.lengths[:, None]
    made = made._replace(tokens=jnp.where(meant, made.tokens, 0))
    return made, first.cache if share else written


def last_rows(first: Pass, starts: DraftRows) -> Pass:
    """The first pass of the rows that drafts follow alone."""
    y, selection = jax.tree.map(lambda array: array[starts.last], (first.y, first.selection))
    return Pass(y, selection, first.cache)


def later_context(
    form: Form,
    page_table: Int[Array, "slots W"],
    starts: DraftRows,
    tokens: Int[Array, " R"],
    step: int | Int[Array, ""],
    cache: Cache,
) -> Context:
    """The rows of pass ``step`` (from 1): groups of one row, ``step`` positions past the last."""
    config = form.config
    _, pages, page_size, _ = cache.latent.shape
    positions = starts.positions + step
    pages_per_slot = page_table.shape[1]
    index = positions // page_size
    page = page_table[starts.slots, jnp.minimum(index, pages_per_slot - 1)]
    valid = step < starts.lengths
    if not config.index_share_for_mtp_iteration:
        # Page 0 is no page: a request's last token may stand at the end of its last one.
        valid &= (index < pages_per_slot) & (page > 0)
    positions = jnp.where(valid, positions, 0)
    rows = Rows(
        tokens=jnp.where(valid, tokens, 0),
        positions=positions,
        valid=valid,
        entries=jnp.where(valid, page * page_size + positions % page_size, pages * page_size),
        slots=starts.slots,
        tiles=no_tiles(pages_per_slot),
        group_positions=jnp.where(valid, positions, -1)[:, None],
        group_page_table=page_table[starts.slots],
    )
    turn = rotation(positions, config.qk_rope_head_dim, config.rope_theta)
    return Context(form, rows, turn, page_table)


def _no_drafts(y: Float[Array, "R D"], num_drafts: int) -> Drafts:
    tokens = jnp.zeros((y.shape[0], num_drafts), jnp.int32)
    return Drafts(tokens, jnp.zeros((num_drafts, *y.shape), y.dtype))


def _with_draft(
    drafter: Drafter,
    made: Drafts,
    step: int | Int[Array, ""],
    y: Float[Array, "R D"],
    run: Bool[Array, ""] | bool,
) -> Drafts:
    """What was made before, and the draft of a pass."""
    tokens = _if(run, lambda: drafter.best_tokens(y))
    return Drafts(made.tokens.at[:, step].set(tokens), made.hidden.at[step].set(y))


def _if(run: Bool[Array, ""] | bool, make: Callable[[], Any]) -> Any:
    """What ``make`` returns; with ``run`` False zeros instead, and nothing is computed."""
    if isinstance(run, bool):
        assert run, "what never runs is not asked for"
        return make()
    shapes = jax.eval_shape(make)

    def zeros() -> Any:
        return jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), shapes)

    return jax.lax.cond(run, make, zeros)
