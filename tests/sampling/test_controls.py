"""Control lines against plain NumPy: what an update writes, and what logits become of it."""

import jax
import numpy as np
import pytest

from glm_jax import SamplingParams
from glm_jax.sampling.control_changes import ControlChanges, RowControl
from glm_jax.sampling.control_update import NO_TOKEN, ROW_BANS, ControlUpdate
from glm_jax.sampling.controls import ControlLines, ControlRows, apply_controls, update_lines
from glm_jax.sampling.request_controls import controls_of
from scripts.reference_controls import controlled_logits

SLOTS, DRAFTS, VOCABULARY, ROWS = 4, 3, 23, 15
RNG = np.random.default_rng(3)
PARAMS = {
    0: {"presence_penalty": 0.7, "frequency_penalty": -0.4, "repetition_penalty": 1.4},
    1: {"logit_bias": {2: 3.5, 9: -1.0}, "allowed_token_ids": [2, 3, 9, 11], "bad_words": [[3]]},
    2: {"repetition_penalty": 0.6, "bad_words": [[5, 6], [6]]},
}
PROMPTS = {slot: RNG.integers(0, VOCABULARY, 9).tolist() for slot in PARAMS}
OUTPUTS = {slot: RNG.integers(0, VOCABULARY, 12).tolist() for slot in PARAMS}


@pytest.fixture
def eager(compile_counter):
    """Operator by operator: no program of its own."""
    with compile_counter.single_operators(), jax.disable_jit():
        yield


def garbage() -> ControlLines:
    """Lines as a former owner may have left them."""
    rng = np.random.default_rng(4)
    return ControlLines(
        active=np.ones(SLOTS, bool),
        counts=rng.integers(0, 2**30, (SLOTS, VOCABULARY)).astype(np.int32),
        bias=rng.normal(size=(SLOTS, VOCABULARY)).astype(np.float32),
        penalties=np.full((SLOTS, 3), np.nan, np.float32),
        bans=np.zeros((SLOTS, DRAFTS + 1, ROW_BANS), np.int32),
        force=np.zeros((SLOTS, DRAFTS + 1), np.int32),
    )


def updated(lines: ControlLines, changes: ControlChanges) -> ControlLines:
    lines = jax.tree.map(jax.numpy.asarray, lines)
    for update in changes.packed():
        lines = update_lines(lines, ControlUpdate(*(array[0] for array in update)))
    return jax.tree.map(np.array, lines)


def started() -> ControlLines:
    """Lines of the three requests; the last slot's says nothing."""
    changes = ControlChanges(SLOTS, DRAFTS)
    for slot, params in PARAMS.items():
        controls = controls_of(
            SamplingParams(**params), vocab_size=VOCABULARY, tokenizer=None, think_ids=None
        )
        changes.start(slot, controls.fill, controls.biases, controls.penalties)
        changes.count(slot, set(PROMPTS[slot]), 1 << 30)
        changes.count(slot, OUTPUTS[slot])
        changes.set_rows(slot, [])
    changes.clear(3)
    return updated(garbage(), changes)


@pytest.mark.usefixtures("eager")
def test_an_update_leaves_nothing_of_a_former_owner():
    lines = started()
    assert lines.active.tolist() == [True, True, True, False]
    for slot in PARAMS:
        output = np.bincount(OUTPUTS[slot], minlength=VOCABULARY)
        prompt = np.isin(np.arange(VOCABULARY), PROMPTS[slot])
        np.testing.assert_array_equal(lines.counts[slot], output + (prompt << 30))
        assert (lines.bans[slot] == NO_TOKEN).all()
        assert (lines.force[slot] == NO_TOKEN).all()
    np.testing.assert_array_equal(lines.penalties[1], [0, 0, 1])


@pytest.mark.usefixtures("eager")
def test_a_line_that_is_not_named_stays_as_it_is():
    before = garbage()
    changes = ControlChanges(SLOTS, DRAFTS)
    changes.start(1, 0.0, {}, None)
    after = updated(before, changes)
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(np.delete(old, 1, axis=0), np.delete(new, 1, axis=0))


def rows_of(lines, owner, number, wanted, drafts) -> ControlRows:
    arrays = (lines, drafts, np.array(owner), np.array(number), np.array(wanted))
    return ControlRows(*jax.tree.map(jax.numpy.asarray, arrays))


@pytest.mark.usefixtures("eager")
def test_each_verify_row_sees_the_output_and_the_drafts_before_it():
    rng = np.random.default_rng(5)
    lines, logits = started(), rng.normal(size=(ROWS, VOCABULARY), scale=3).astype(np.float32)
    drafts = rng.integers(0, VOCABULARY, (SLOTS, DRAFTS)).astype(np.int32)
    # The same token twice, and one that the output has.
    drafts[0] = OUTPUTS[0][3]
    owner = [0, 0, 0, 0, 1, 2, 2, 2, 2, 3, 3, 1, 0, 2, 1]
    number = [0, 1, 2, 3, 0, 0, 1, 2, 3, 0, 2, 3, 1, 0, 1]
    wanted = [True] * 12 + [False] * 3
    rows = rows_of(lines, owner, number, wanted, drafts)
    got = np.asarray(apply_controls(jax.numpy.asarray(logits), rows))
    for row, (slot, before, asked) in enumerate(zip(owner, number, wanted, strict=True)):
        expected = logits[row]
        if asked and slot in PARAMS:
            # The host bans what completes a longer word: not in this test.
            params = {**PARAMS[slot]}
            params["bad_words"] = [word for word in params.get("bad_words", []) if len(word) == 1]
            seen = OUTPUTS[slot] + drafts[slot, :before].tolist()
            expected = controlled_logits(logits[row], SamplingParams(**params), PROMPTS[slot], seen)
        np.testing.assert_allclose(got[row], expected, rtol=1e-6, atol=1e-6)  # sums cancel


@pytest.mark.usefixtures("eager")
def test_banned_and_forced_tokens_hold_at_their_row_only():
    changes = ControlChanges(SLOTS, DRAFTS)
    changes.start(2, 0.0, {}, None)
    changes.set_rows(2, [RowControl((4, 5)), RowControl(), RowControl((1,), 7)])
    lines = updated(garbage(), changes)
    # As many rows as above: the operators are compiled once.
    logits = np.random.default_rng(6).normal(size=(ROWS, VOCABULARY)).astype(np.float32)
    drafts = np.zeros((SLOTS, DRAFTS), np.int32)
    number = np.arange(ROWS) % (DRAFTS + 1)
    rows = rows_of(lines, [2] * ROWS, number, np.arange(ROWS) <= DRAFTS, drafts)
    got = np.asarray(apply_controls(jax.numpy.asarray(logits), rows))
    assert np.flatnonzero(np.isneginf(got[0])).tolist() == [4, 5]
    np.testing.assert_array_equal(got[[1, 3, 4]], logits[[1, 3, 4]])
    assert np.flatnonzero(np.isfinite(got[2])).tolist() == [7]
