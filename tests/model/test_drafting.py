"""Drafting inside the step: what FULL writes and drafts, and PIECEWISE beside it.

One jitted program serves all tests: the step as `build_step` makes it, and the same step by pieces.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from model.golden_mtp import (
    CHUNKS,
    GREEDY,
    LIMITS,
    NUM_DRAFTS,
    chunk,
    empty_state,
    golden,
    half_right_drafts,
    inputs_of,
    leaves_of,
    reset,
    verify,
    verify_beside_a_prompt,
    with_drafts,
)

from bucketing.pack import RankRows, SlotReset
from bucketing.step_inputs import StepInputs, StepOutputs
from glm_jax.engine.piecewise import PiecewiseStep
from glm_jax.model.cache import CACHE_FORMATS, Cache
from glm_jax.model.layer import Form
from glm_jax.model.pieces import Pieces
from glm_jax.model.slots import Slots
from glm_jax.model.step import build_step
from glm_jax.model.storage import abstract_model, split_model

FORM = Form(golden().config, CACHE_FORMATS["float32"])
CACHE_TOLERANCE = 1e-5
# Rows of the pieces: fewer than the layout has, enough for every step here.
BUCKET = 56
SHORT_PROMPT = 24
UNTOUCHED = 77


class Outcome(NamedTuple):
    cache: Cache
    slots: Slots
    outputs: StepOutputs


def step_by_pieces(decided: StepInputs, kinds: list[str]) -> Callable:
    """A step by pieces inside one trace.

    Which pieces run is decided on the host, by `decided`; they compute with the inputs that are
    passed. `kinds` notes them.
    """
    config = golden().config
    shapes = abstract_model(config, dtype="float32", storage="per_layer")
    merge, _ = split_model(shapes)
    functions = Pieces(shapes, FORM, LIMITS.page_size).functions()

    def step(params: list, cache: Cache, slots: Slots, inputs: StepInputs) -> tuple:
        def piece(kind: str) -> Callable:
            def run(*arguments: Any) -> Any:
                arguments = [inputs if a is decided else a for a in arguments]
                size = {"size": BUCKET} if kind == "embed" else {}
                return functions[kind].call(*arguments, **size)

            kinds.append(kind)
            return run

        runner = PiecewiseStep(merge(params), config)
        outcome = runner(piece, cache, slots, decided)
        assert runner.dispatches == len(kinds)
        return outcome

    return step


@functools.cache
def compiled_steps() -> Callable:
    """One step in both modes, from the same state; by pieces it is one that needs all of them."""
    shapes = abstract_model(golden().config, dtype="float32", storage="per_layer")
    full = build_step(split_model(shapes)[0], FORM, loop="unrolled")
    by_pieces = step_by_pieces(inputs_of(verify_beside_a_prompt(), NUM_DRAFTS), [])
    return jax.jit(lambda *arguments: (full(*arguments), by_pieces(*arguments)))


@functools.cache
def leaves() -> list:
    return leaves_of(golden().parameters)


class Requests:
    """Two slots driven by hand; every step that drafts is compared in both modes."""

    def __init__(self) -> None:
        self.cache, self.slots = empty_state()

    def step(self, rows: RankRows, *, new_drafts: int = NUM_DRAFTS) -> StepOutputs:
        inputs = inputs_of(rows, new_drafts)
        found = compiled_steps()(leaves(), self.cache, self.slots, inputs)
        full, by_pieces = (Outcome(*outcome) for outcome in jax.device_get(found))
        if rows.drafter:
            check_same(full, by_pieces, rows)
        self.cache, self.slots, outputs = full
        return jax.tree.map(lambda array: array[0], outputs)

    def prefill(self, tokens: np.ndarray, size: int, slot: int = 0) -> None:
        """A text from its start on, in chunks."""
        resets = [reset(slot, range(1, 9))]
        for start in range(0, len(tokens), size):
            stop = min(start + size, len(tokens))
            self.step(
                RankRows(
                    chunks=[chunk(slot, start, stop, tokens=tokens)], resets=resets, drafter=True
                )
            )
            resets = []

    def planes(self, positions: int) -> tuple[np.ndarray, np.ndarray]:
        """The MTP layer's latents and index keys of slot 0's first positions; pages ascend."""
        size = LIMITS.page_size
        return tuple(
            array[0, -1, 1 : 1 + LIMITS.pages_per_seq].reshape(
                LIMITS.pages_per_seq * size, array.shape[-1]
            )[:positions]
            for array in self.cache
        )


def check_same(full: Outcome, by_pieces: Outcome, rows: RankRows) -> None:
    """PIECEWISE leaves the same cache, slots and drafts as FULL."""
    for array, other in zip(full.cache, by_pieces.cache, strict=True):
        np.testing.assert_allclose(other, array, rtol=0, atol=CACHE_TOLERANCE)
    jax.tree.map(np.testing.assert_array_equal, full.slots, by_pieces.slots)
    np.testing.assert_array_equal(full.outputs.drafts, by_pieces.outputs.drafts)
    for request, entry in enumerate(rows.chunks):
        if entry.sampled:
            drawn = (outcome.outputs.chunk_tokens[0, request] for outcome in (full, by_pieces))
            assert len(set(map(int, drawn))) == 1


def check_planes(requests: Requests, expected: Requests, positions: int) -> None:
    pairs = zip(requests.planes(positions), expected.planes(positions), strict=True)
    for found, wanted in pairs:
        assert np.abs(wanted).max(axis=-1).min() > 0  # every position is there
        np.testing.assert_allclose(found, wanted, rtol=0, atol=CACHE_TOLERANCE)


def whole_prompt(slot: int = 0, **changes: Any) -> RankRows:
    rows = RankRows(
        chunks=[chunk(slot, 0, len(golden().prompt))],
        resets=[reset(slot, range(1, 9))],
        drafter=True,
    )
    return rows._replace(**changes)


@functools.cache
def after_prompt() -> tuple[Requests, StepOutputs]:
    requests = Requests()
    return requests, requests.step(whole_prompt())


def continued() -> Requests:
    """Slot 0 with the prompt in the cache."""
    requests, source = Requests(), after_prompt()[0]
    requests.cache, requests.slots = source.cache, source.slots
    return requests


@functools.cache
def one_shot() -> Requests:
    requests = Requests()
    requests.prefill(golden().tokens[:SHORT_PROMPT], SHORT_PROMPT)
    return requests


def test_a_finished_prompt_drafts_what_the_reference_drafts():
    requests, outputs = after_prompt()
    expected = golden().reference["shared_drafts"][0].tolist()
    assert outputs.chunk_tokens[0] == golden().generated[0]
    assert outputs.drafts[0].tolist() == expected
    assert requests.slots.drafts[0, 0].tolist() == expected
    assert not outputs.drafts[1:].any()


def test_a_partly_accepted_group_and_a_prompt_beside_it_draft_what_the_reference_drafts():
    requests = continued()
    requests.slots = with_drafts(requests.slots, 0, half_right_drafts())
    outputs = requests.step(verify_beside_a_prompt())
    expected = golden().reference["shared_drafts"]
    assert outputs.group_accepted.tolist() == [2]
    assert outputs.drafts[CHUNKS].tolist() == expected[1].tolist()
    assert outputs.drafts[0].tolist() == expected[0].tolist()
    assert requests.slots.drafts[0, :2].tolist() == [expected[1].tolist(), expected[0].tolist()]


def test_the_next_step_verifies_the_drafts_that_this_step_made():
    requests = continued()
    outputs = requests.step(RankRows(groups=[verify(0)], drafter=True))
    drafts = golden().reference["shared_drafts"][0]
    agree = np.cumprod(drafts == golden().generated[1 : 1 + NUM_DRAFTS])
    assert outputs.group_accepted.tolist() == [agree.sum()]


@pytest.mark.parametrize("length", [0, 2])
def test_a_request_that_wants_fewer_drafts_gets_zeros_behind_them(length):
    requests = Requests()
    outputs = requests.step(whole_prompt(), new_drafts=length)
    expected = golden().reference["shared_drafts"][0].copy()
    expected[length:] = 0
    assert outputs.drafts[0].tolist() == expected.tolist()


def test_a_request_without_new_drafts_keeps_what_its_slot_holds():
    requests = Requests()
    requests.slots = with_drafts(requests.slots, 0, UNTOUCHED)
    requests.step(whole_prompt(), new_drafts=0)
    assert (requests.slots.drafts[0, 0] == UNTOUCHED).all()


def test_a_chunk_that_draws_no_token_drafts_nothing():
    requests = Requests()
    for slot in range(LIMITS.max_num_seqs + 1):
        requests.slots = with_drafts(requests.slots, slot, UNTOUCHED)
    rows = whole_prompt(chunks=[chunk(0, 0, 20)])
    outputs = requests.step(rows)
    assert (requests.slots.drafts == UNTOUCHED).all()
    assert not outputs.drafts.any()


def test_without_the_drafter_a_step_leaves_its_cache_and_the_drafts_alone():
    requests = Requests()
    requests.slots = with_drafts(requests.slots, 0, UNTOUCHED)
    outputs = requests.step(whole_prompt(drafter=False))
    assert outputs.chunk_tokens[0] == golden().generated[0]
    assert not outputs.drafts.any()
    assert (requests.slots.drafts[0, 0] == UNTOUCHED).all()
    for array in requests.cache:
        assert array[0, 0].any()  # the target wrote its own
        assert not array[0, -1].any()


@pytest.mark.parametrize("size", range(1, SHORT_PROMPT))
def test_the_drafters_cache_does_not_depend_on_the_chunks(size):
    requests = Requests()
    requests.prefill(golden().tokens[:SHORT_PROMPT], size)
    check_planes(requests, one_shot(), SHORT_PROMPT)


@pytest.mark.parametrize("size", [7, 64])
def test_a_resumed_request_has_the_drafters_cache_of_one_that_ran_through(size):
    """Behind the old prompt's end stands a known token, not one that the step draws."""
    through = continued()
    for _ in range(3):
        through.step(RankRows(groups=[verify(0)], drafter=True))
    computed = int(through.slots.computed[0, 0])
    assert computed > len(golden().prompt)
    resumed = Requests()
    resumed.prefill(golden().tokens[:computed], size)
    check_planes(resumed, through, computed)


def test_a_resume_behind_a_prefix_in_the_cache_completes_the_drafters_cache():
    tokens = golden().tokens[:SHORT_PROMPT]
    requests, prefix = Requests(), LIMITS.page_size
    requests.prefill(tokens, SHORT_PROMPT)
    rows = RankRows(
        chunks=[chunk(1, prefix, SHORT_PROMPT, tokens=tokens)],
        # The first page is shared, the second its own: one that slot 0 has not reached.
        resets=[SlotReset(1, [1, 9], prefix, GREEDY)],
        drafter=True,
    )
    requests.step(rows)
    for array, expected in zip(requests.cache, one_shot().cache, strict=True):
        found, wanted = array[0, -1, 9], expected[0, -1, 2]
        np.testing.assert_allclose(found, wanted, rtol=0, atol=CACHE_TOLERANCE)


@pytest.mark.parametrize("drafter", [False, True])
def test_pieces_of_the_drafter_run_only_where_it_runs(drafter):
    kinds = []
    inputs = inputs_of(whole_prompt(drafter=drafter), NUM_DRAFTS)
    jax.eval_shape(step_by_pieces(inputs, kinds), leaves(), *empty_state(), inputs)
    behind = kinds[kinds.index("head") + 1 :]
    layer = ["before_full", "chunks_full", "after_moe"]
    assert behind == (["draft_begin", *layer, "draft_end"] if drafter else [])
