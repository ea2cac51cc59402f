"""Penalties, biases, banned and forced tokens: lines on the device, and what they do to logits.

A slot has a line for the request in it. Only the controls program writes lines, before a step that
needs it; the step reads them in one branch, which steps without such requests do not take.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from glm_jax.sampling.control_update import IN_PROMPT, NO_TOKEN, ControlUpdate


class ControlLines(NamedTuple):
    """The control lines of all slots.

    Attributes:
        active: Whether the line says anything; without it the rest has no meaning.
        counts: How often the output has each token, and IN_PROMPT.
        bias: Added to the logits; -inf forbids.
        penalties: Presence, frequency, repetition.
        bans: Tokens forbidden at each verify row, besides those of `bias`; pads are NO_TOKEN.
        force: The only token allowed at each verify row; NO_TOKEN where it is free.
    """

    active: Bool[Array, " slots"]
    counts: Int[Array, "slots V"]
    bias: Float[Array, "slots V"]
    penalties: Float[Array, "slots 3"]
    bans: Int[Array, "slots k+1 B"]
    force: Int[Array, "slots k+1"]


class ControlRows(NamedTuple):
    """The sampled rows as controls see them.

    Attributes:
        lines: Of all slots.
        drafts: Of all slots.
        owner: The slot of each row.
        number: How many drafts stand before the drawn token: 0 is the first of a request's rows.
        wanted: Whether anybody reads the row.
    """

    lines: ControlLines
    drafts: Int[Array, "slots k"]
    owner: Int[Array, " S"]
    number: Int[Array, " S"]
    wanted: Bool[Array, " S"]


def update_lines(lines: ControlLines, update: ControlUpdate) -> ControlLines:
    """Apply an update to the lines of one rank, both without the rank axis."""
    line, counts, bias = update.line_slot, lines.counts, lines.bias
    counts = counts.at[line].set(0, mode="drop")
    counts = counts.at[update.count_slot, update.count_token].add(update.count_more, mode="drop")
    bias = bias.at[line].set(update.line_bias[:, None], mode="drop")
    bias = bias.at[update.bias_slot, update.bias_token].set(update.bias_value, mode="drop")
    return ControlLines(
        active=lines.active.at[line].set(update.line_active, mode="drop"),
        counts=counts,
        bias=bias,
        penalties=lines.penalties.at[line].set(update.line_penalties, mode="drop"),
        bans=lines.bans.at[update.row_slot].set(update.row_bans, mode="drop"),
        force=lines.force.at[update.row_slot].set(update.row_force, mode="drop"),
    )


def apply_controls(logits: Float[Array, "S V"], rows: ControlRows) -> Float[Array, "S V"]:
    """Change the logits of the rows whose requests ask for it; the others stay as they are.

    Row number j of a request sees its output and the drafts before it, so that drafts change
    nothing (vLLM computes the same from its token tables per row).
    """
    asked = rows.lines.active[rows.owner] & rows.wanted
    return jax.lax.cond(
        jnp.any(asked),
        lambda: jnp.where(asked[:, None], _controlled(logits, rows), logits),
        lambda: logits,
    )


def _controlled(logits: Float[Array, "S V"], rows: ControlRows) -> Float[Array, "S V"]:
    lines, owner, vocabulary = rows.lines, rows.owner, logits.shape[1]
    line = jnp.arange(logits.shape[0])[:, None]
    number = jnp.clip(rows.number, 0, lines.force.shape[1] - 1)
    logits += lines.bias[owner]
    logits = logits.at[line, lines.bans[owner, number]].set(-jnp.inf, mode="drop")
    counts = lines.counts[owner]
    before = jnp.arange(rows.drafts.shape[1]) < number[:, None]
    drafts = jnp.where(before, rows.drafts[owner], vocabulary)
    counts = counts.at[line, drafts].add(1, mode="drop")
    logits = _penalized(logits, counts, lines.penalties[owner])
    force = lines.force[owner, number][:, None]
    forced = jnp.where(jnp.arange(vocabulary) == force, 0.0, -jnp.inf)
    return jnp.where(force == NO_TOKEN, logits, forced)


def _penalized(
    logits: Float[Array, "S V"], counts: Int[Array, "S V"], penalties: Float[Array, "S 3"]
) -> Float[Array, "S V"]:
    """The penalties of vLLM's `apply_penalties`, in its order.

    Repetition (CTRL, arXiv 1909.05858, with the sign rule that divides what is positive and
    multiplies the rest) is over prompt and output, presence and frequency (OpenAI's API reference:
    minus count x frequency, minus presence where the count is above 0) over the output.
    """
    presence, frequency, repetition = (penalties[:, number, None] for number in range(3))
    outputs = counts & (IN_PROMPT - 1)
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(counts > 0, repeated, logits)
    return logits - frequency * outputs - presence * (outputs > 0)
