"""A step with the MTP layer behind it, laid open, and what a mutant does otherwise."""

from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from glm_jax.model import mtp
from glm_jax.model.cache import Cache
from glm_jax.model.drafter import drafter_of
from glm_jax.model.draw import draw_tokens
from glm_jax.model.layer import Context, Form
from glm_jax.model.rope import rotation
from glm_jax.model.rows import build_rows
from glm_jax.model.slots import update_slots
from glm_jax.model.step import selection_width
from glm_jax.model.transformer import run_layers

OWN, OF_TARGET, OF_NEXT_ROW = range(3)


class Mutation(NamedTuple):
    """What the program does otherwise; the defaults change nothing."""

    first_shift: int = 0  # of the positions in the first pass
    later_shift: int = 0  # of the positions in later passes
    selection: int = OWN  # which selection later passes share
    recycle_scale: np.ndarray | float = 1.0  # of what later passes recycle


class Found(NamedTuple):
    """What one step's MTP layer did; requests are chunks, then groups."""

    accepted: np.ndarray  # [G]
    y: np.ndarray  # [N, D]
    positions: np.ndarray  # [N, K] selected
    count: np.ndarray  # [N]
    shared: mtp.Drafts
    indexed: mtp.Drafts
    indexed_cache: Cache  # as the passes leave it that do not share


def drafting_step(merge: Callable, form: Form) -> Callable:
    """One rank's step that drafts with and without sharing; the cache stays as sharing leaves it.

    Cache, slots and inputs have the rank axis in front.
    """
    config = form.config

    def shifted(context, shift):
        positions = context.rows.positions + shift
        turn = rotation(positions, config.qk_rope_head_dim, config.rope_theta)
        return context._replace(rows=context.rows._replace(positions=positions), turn=turn)

    def step(params, cache, slots, inputs, mutation):
        cache, slots, inputs = jax.tree.map(lambda array: array[0], (cache, slots, inputs))
        model, slots = merge(params), update_slots(slots, inputs)
        _, pages, page_size, _ = cache.latent.shape
        pool = {"page_size": page_size, "pool_entries": pages * page_size}
        rows = build_rows(slots, inputs, **pool, tile_rows=form.tile_rows)
        turn = rotation(rows.positions, config.qk_rope_head_dim, config.rope_theta)
        context = Context(form, rows, turn, slots.page_table)
        topk = selection_width(form, slots, page_size)
        x = model.embed[...][rows.tokens].astype(form.dtype)
        target = run_layers(model, x, cache, context, loop="unrolled", topk=topk)
        slots, drawn = draw_tokens(model.head[...], target.x, slots, rows, inputs)

        drafter = drafter_of(model, config)
        following = mtp.following_tokens(inputs, drawn)
        moved = shifted(context, mutation.first_shift)
        first = mtp.indexed_pass(drafter, target.x, following, target.cache, moved, topk=topk)
        starts = mtp.draft_rows(inputs, drawn, rows.positions)
        of_next_row = jax.tree.map(lambda array: jnp.roll(array, -1, axis=0), first.selection)
        selection = jax.tree.map(
            lambda *kinds: jnp.stack(kinds)[mutation.selection],
            *(first.selection, target.selection, of_next_row),
        )
        original = mtp.shared_pass

        def mutant_pass(drafter, y, selection, cache, context):
            y = (y * mutation.recycle_scale).astype(y.dtype)
            return original(drafter, y, selection, cache, shifted(context, mutation.later_shift))

        def draft(first, share):
            changed = form._replace(config=config.replace(index_share_for_mtp_iteration=share))
            first = mtp.last_rows(first, starts)
            num_drafts = slots.drafts.shape[1]
            return mtp.draft_tokens(
                drafter, first, starts, slots.page_table, changed, num_drafts=num_drafts
            )

        with mock.patch.object(mtp, "shared_pass", mutant_pass):
            shared, cache = draft(first._replace(selection=selection), True)
        indexed, indexed_cache = draft(first, False)
        chosen = first.selection.positions, first.selection.count
        found = Found(drawn.group_accepted, first.y, *chosen, shared, indexed, indexed_cache)
        return *jax.tree.map(lambda array: array[None], (cache, slots)), found

    return step
