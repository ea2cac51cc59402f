"""The arrays that change control lines, as the host makes them; no JAX."""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int32

# Pads a list of token ids: no vocabulary is that large.
NO_TOKEN = 2**31 - 1
# Set in a token count where the prompt has the token; the bits below count the output's.
IN_PROMPT = 1 << 30
# The most many-token bad words that may end at one token (admission checks it).
ROW_BANS = 32
# What one call of the controls program takes; more are several calls.
UPDATE_LINES = 8
UPDATE_TOKENS = 1024


class ControlUpdate(NamedTuple):
    """What one call of the controls program changes, in this order; a slot out of range is none.

    Attributes:
        line_slot: Lines that start anew, without counts.
        line_active: Whether they say anything.
        line_bias: The bias of all their tokens.
        line_penalties: Their penalties.
        count_slot: Lines whose counts grow.
        count_token: The token.
        count_more: By how much: outputs, or IN_PROMPT once.
        bias_slot: Lines that give a token a bias of its own.
        bias_token: The token.
        bias_value: The bias.
        row_slot: Lines with new rows.
        row_bans: As `ControlLines.bans` in controls.py.
        row_force: As `ControlLines.force`.
    """

    line_slot: Int32[Any, "ranks L"]
    line_active: Bool[Any, "ranks L"]
    line_bias: Float32[Any, "ranks L"]
    line_penalties: Float32[Any, "ranks L 3"]
    count_slot: Int32[Any, "ranks C"]
    count_token: Int32[Any, "ranks C"]
    count_more: Int32[Any, "ranks C"]
    bias_slot: Int32[Any, "ranks C"]
    bias_token: Int32[Any, "ranks C"]
    bias_value: Float32[Any, "ranks C"]
    row_slot: Int32[Any, "ranks L"]
    row_bans: Int32[Any, "ranks L k+1 B"]
    row_force: Int32[Any, "ranks L k+1"]


def empty_update(slots: int, num_drafts: int) -> ControlUpdate:
    """Return the host arrays of an update of one rank that changes nothing.

    Args:
        slots: Lines of the device, the pad slot's included.
        num_drafts: k.
    """
    width = num_drafts + 1
    nowhere = np.full((1, UPDATE_LINES), slots, np.int32)
    tokens = np.full((1, UPDATE_TOKENS), slots, np.int32)
    return ControlUpdate(
        line_slot=nowhere,
        line_active=np.zeros((1, UPDATE_LINES), bool),
        line_bias=np.zeros((1, UPDATE_LINES), np.float32),
        line_penalties=np.zeros((1, UPDATE_LINES, 3), np.float32),
        count_slot=tokens,
        count_token=np.zeros_like(tokens),
        count_more=np.zeros_like(tokens),
        bias_slot=tokens.copy(),
        bias_token=np.zeros_like(tokens),
        bias_value=np.zeros(tokens.shape, np.float32),
        row_slot=nowhere.copy(),
        row_bans=np.full((1, UPDATE_LINES, width, ROW_BANS), NO_TOKEN, np.int32),
        row_force=np.full((1, UPDATE_LINES, width), NO_TOKEN, np.int32),
    )
