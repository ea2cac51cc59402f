"""Control lines of FakeDevice, and the same rules read from the parameters alone.

The fake draws by a hash; a rule only says which tokens that walk must skip. A penalty skips every
token that it would punish, so that a wrong count shows up as a wrong token. Lines also check
themselves: their counts must be those of a split of the history into prompt and output.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bucketing.step_inputs import Limits
from glm_jax.sampling.control_update import IN_PROMPT, NO_TOKEN, ControlUpdate, empty_update
from glm_jax.sampling.params import SamplingParams


class Rule(NamedTuple):
    """Which tokens may not be drawn, or the one that must be."""

    banned: frozenset[int] = frozenset()
    avoided: frozenset[int] = frozenset()
    force: int | None = None


FREE = Rule()


def walk(start: int, vocabulary: int, banned: frozenset[int], rule: Rule) -> int:
    """Return the first token from `start` on that no rule skips; avoiding all is avoiding none."""
    if rule.force is not None:
        return rule.force
    banned |= rule.banned
    order = [*range(start, vocabulary), *range(start)]
    for skipped in (banned | rule.avoided, banned):
        for token in order:
            if token not in skipped:
                return token
    raise AssertionError("nothing is left to draw")


def rule_alone(
    history: Sequence[int],
    prompt_length: int,
    params: SamplingParams,
    vocabulary: int,
    think: tuple[int, int] | None = None,
) -> Rule:
    """Return what holds for the token after `history`, by the parameters; words are token ids."""
    output = list(history[prompt_length:])
    banned = set()
    if params.allowed_token_ids is not None:
        banned = set(range(vocabulary)) - set(params.allowed_token_ids)
    for word in params.bad_words:
        before = list(word[:-1])
        if not before or output[-len(before) :] == before:
            banned.add(word[-1])
    avoided: set[int] = set()
    if params.presence_penalty or params.frequency_penalty:
        avoided |= set(output)
    if params.repetition_penalty != 1:
        avoided |= set(history)
    force = None
    if params.thinking_token_budget is not None:
        assert think is not None
        start, end = think
        marks = [n for n, token in enumerate(history) if token in think]
        if marks and history[marks[-1]] == start:
            spent = len(history) - 1 - marks[-1]
            force = end if spent >= params.thinking_token_budget else None
    return Rule(frozenset(banned), frozenset(avoided), force)


class FakeControls:
    """The control lines of all slots, as the controls program leaves them."""

    def __init__(self, limits: Limits, vocabulary: int) -> None:
        slots, width = limits.max_num_seqs + 1, limits.num_drafts + 1
        self.expected = empty_update(slots, limits.num_drafts)
        self.active = np.zeros(slots, bool)
        self.counts = np.zeros((slots, vocabulary), np.int64)
        self.bias = np.zeros((slots, vocabulary), np.float32)
        self.penalties = np.zeros((slots, 3), np.float32)
        self.bans = np.zeros((slots, width, self.expected.row_bans.shape[-1]), np.int64)
        self.force = np.zeros((slots, width), np.int64)

    def update(self, update: ControlUpdate) -> None:
        """Apply an update, after checking its shapes, dtypes and what it names twice."""
        for array, pad in zip(update, self.expected, strict=True):
            assert (array.shape, array.dtype) == (pad.shape, pad.dtype)
        one = ControlUpdate(*(array[0] for array in update))
        slots = len(self.active)
        for slots_named in (one.line_slot, one.row_slot):
            named = slots_named[slots_named < slots].tolist()
            assert len(named) == len(set(named)), "a line is written twice in one call"
        self._start(one)
        used = one.count_slot < slots
        assert self.active[one.count_slot[used]].all(), "a line is counted that says nothing"
        np.add.at(self.counts, (one.count_slot[used], one.count_token[used]), one.count_more[used])
        used = one.bias_slot < slots
        self.bias[one.bias_slot[used], one.bias_token[used]] = one.bias_value[used]
        for n, slot in enumerate(one.row_slot):
            if slot < slots:
                self.bans[slot], self.force[slot] = one.row_bans[n], one.row_force[n]

    def _start(self, one: ControlUpdate) -> None:
        for n, slot in enumerate(one.line_slot):
            if slot < len(self.active):
                self.active[slot], self.counts[slot] = one.line_active[n], 0
                self.bias[slot], self.penalties[slot] = one.line_bias[n], one.line_penalties[n]

    def rule(self, slot: int, history: Sequence[int], drafts: int) -> Rule:
        """Return what a slot's line says of the token after `history`, whose end is drafts."""
        if not self.active[slot]:
            return FREE
        force = int(self.force[slot, drafts])
        banned = set(np.flatnonzero(np.isneginf(self.bias[slot])).tolist())
        banned |= set(self.bans[slot, drafts].tolist()) - {NO_TOKEN}
        presence, frequency, repetition = self.penalties[slot].tolist()
        avoided: set[int] = set()
        if (presence, frequency, repetition) != (0, 0, 1):
            known = len(history) - drafts
            made = self.counts[slot] % IN_PROMPT
            prompt = known - int(made.sum())
            output = np.bincount(history[prompt:known], minlength=len(made))
            assert np.array_equal(made, output), "wrong counts of the output"
            marked = np.flatnonzero(self.counts[slot] >= IN_PROMPT).tolist()
            assert set(marked) == set(history[:prompt]), "wrong marks of the prompt"
            if presence or frequency:
                avoided |= set(history[prompt:])
            if repetition != 1:
                avoided |= set(history)
        return Rule(frozenset(banned), frozenset(avoided), None if force == NO_TOKEN else force)
