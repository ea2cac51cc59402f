"""The MTP layer against the one that `scripts/oracle/mtp.py` composes from transformers' layer.

One jitted program serves all tests: a step of a chunk and a group with the MTP layer behind it.
What a mutant does otherwise is an argument of it, or a change of weights.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model.drafting_step import OF_NEXT_ROW, OF_TARGET, Found, Mutation, drafting_step
from model.golden_mtp import (
    CELL,
    CHUNKS,
    LIMITS,
    NUM_DRAFTS,
    NUM_PAGES,
    REQUESTS,
    chunk,
    empty_state,
    golden,
    half_right_drafts,
    inputs_of,
    leaves_of,
    reset,
    verify_beside_a_prompt,
    with_drafts,
)

from bucketing.pack import RankRows
from bucketing.step_inputs import input_shapes
from glm_jax.model.cache import CACHE_FORMATS, Cache, cache_shapes
from glm_jax.model.layer import Form
from glm_jax.model.mtp import Drafts
from glm_jax.model.slots import slot_shapes
from glm_jax.model.storage import abstract_model, split_model

TOLERANCE = 1e-4
# A mutant counts as noticed when it is wrong by much more than the tolerance.
NOTICED = 10 * TOLERANCE


@functools.cache
def compiled_step() -> Callable:
    model = abstract_model(golden().config, dtype="float32", storage="per_layer")
    merge, _ = split_model(model)
    return jax.jit(drafting_step(merge, Form(golden().config, CACHE_FORMATS["float32"])))


class Requests:
    """Two slots driven by hand through the one program."""

    def __init__(
        self, mutation: Mutation | None = None, parameters: dict[str, np.ndarray] | None = None
    ) -> None:
        width = golden().config.hidden_size
        mutation = mutation or Mutation()
        scale = np.broadcast_to(np.float32(mutation.recycle_scale), width)
        self.mutation = mutation._replace(recycle_scale=scale)
        self.leaves = leaves_of(parameters or golden().parameters)
        self.cache, self.slots = empty_state()

    def step(self, rows: RankRows, *, new_drafts: int = NUM_DRAFTS) -> Found:
        inputs = inputs_of(rows._replace(drafter=True), new_drafts)
        self.cache, self.slots, found = jax.device_get(
            compiled_step()(self.leaves, self.cache, self.slots, inputs, self.mutation)
        )
        return found

    def verify_beside_a_prompt(self) -> Found:
        """Two of slot 0's drafts are right."""
        self.slots = with_drafts(self.slots, 0, half_right_drafts())
        return self.step(verify_beside_a_prompt())


def prefill(requests: Requests, **options: int) -> Found:
    """The prompt as one chunk in slot 0."""
    whole = chunk(0, 0, len(golden().prompt))
    return requests.step(RankRows(chunks=[whole], resets=[reset(0, range(1, 9))]), **options)


@functools.cache
def both_steps() -> tuple[Found, Found]:
    requests = Requests()
    return prefill(requests), requests.verify_beside_a_prompt()


def logits(hidden: np.ndarray) -> np.ndarray:
    return hidden @ golden().parameters["head"].T


def check_first_pass(y: np.ndarray, start: int) -> None:
    """Hidden rows, and their logits, from position `start` on."""
    expected = golden().reference
    rows = slice(start, start + len(y))
    np.testing.assert_allclose(y, expected["hidden"][rows], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(logits(y), expected["logits"][rows], rtol=0, atol=TOLERANCE)


def check_selection(found: Found, rows: slice, start: int) -> None:
    masks = np.unpackbits(golden().reference["selected"], axis=-1).astype(bool)
    for number, row in enumerate(range(rows.start, rows.stop)):
        keys = found.positions[row, : found.count[row]]
        assert sorted(keys) == np.flatnonzero(masks[start + number]).tolist()


def check_drafts(drafts: Drafts, request: int, kind: str, place: int) -> None:
    """Drafts of a request against those behind `draft_rows[place]`."""
    expected = golden().reference
    np.testing.assert_allclose(
        logits(drafts.hidden[:, request]), expected[f"{kind}_logits"][place], atol=TOLERANCE, rtol=0
    )
    assert drafts.tokens[request].tolist() == expected[f"{kind}_drafts"][place].tolist()


def logit_error(drafts: Drafts, request: int, place: int) -> float:
    found = logits(drafts.hidden[:, request])
    return float(np.abs(found - golden().reference["shared_logits"][place]).max())


def test_first_pass_over_a_prompt_equals_transformers_layer():
    found, _ = both_steps()
    rows = len(golden().prompt)
    assert rows > 2 * golden().config.index_topk
    check_first_pass(found.y[:rows], 0)
    check_selection(found, slice(0, rows), 0)


def test_first_pass_over_verified_rows_equals_transformers_layer():
    _, found = both_steps()
    assert found.accepted.tolist() == [2]
    verified = slice(CELL.prefill, CELL.prefill + 3)
    check_first_pass(found.y[verified], len(golden().prompt))
    check_selection(found, verified, len(golden().prompt))


def test_first_pass_in_two_chunks_equals_transformers_layer():
    requests, rows = Requests(), len(golden().prompt)
    start = RankRows(chunks=[chunk(0, 0, 20)], resets=[reset(0, range(1, 9))])
    first, second = requests.step(start), requests.step(RankRows(chunks=[chunk(0, 20, rows)]))
    check_first_pass(np.concatenate([first.y[:20], second.y[: rows - 20]]), 0)
    check_drafts(second.shared, 0, "shared", 0)


@pytest.mark.parametrize("kind", ["shared", "indexed"])
def test_drafts_behind_a_prompt_equal_transformers_layer(kind):
    found, _ = both_steps()
    check_drafts(getattr(found, kind), 0, kind, 0)


@pytest.mark.parametrize("kind", ["shared", "indexed"])
def test_drafts_behind_a_partly_accepted_group_beside_a_prompt_equal_transformers_layer(kind):
    _, found = both_steps()
    accepted_row = len(golden().prompt) + found.accepted[0]
    assert golden().reference["draft_rows"].tolist() == [len(golden().prompt) - 1, accepted_row]
    check_drafts(getattr(found, kind), 0, kind, 0)
    check_drafts(getattr(found, kind), CHUNKS, kind, 1)


def test_the_selection_matters_to_the_reference():
    """Where sharing makes no difference no test of sharing can fail."""
    expected = golden().reference
    difference = np.abs(expected["shared_logits"] - expected["indexed_logits"])
    assert difference[:, 0].max() == 0
    assert difference[:, 1:].max(axis=(1, 2)).min() > NOTICED


@pytest.mark.parametrize("length", [0, 1, 3])
def test_a_request_gets_as_many_drafts_as_it_wants(length):
    found = prefill(Requests(), new_drafts=length)
    expected = golden().reference["shared_drafts"][0].copy()
    expected[length:] = 0
    assert found.shared.tokens[0].tolist() == expected.tolist()
    assert not found.shared.tokens[1:].any()


def test_shared_passes_leave_the_cache_as_the_first_pass_left_it():
    without, drafting = Requests(), Requests()
    prefill(without, new_drafts=0)
    prefill(drafting)
    jax.tree.map(np.testing.assert_array_equal, without.cache, drafting.cache)
    for array in drafting.cache:
        assert not array[0, :, 0].any()  # the reserved page


def rows_written(before: Cache, after: Cache) -> set[int]:
    """Entries of the MTP layer that differ in either array."""
    changed = [
        (old[0, -1] != new[-1]).any(axis=-1).reshape(-1)
        for old, new in zip(before, after, strict=True)
    ]
    assert (changed[0] == changed[1]).all()
    return set(np.flatnonzero(changed[0]).tolist())


def text(length: int) -> np.ndarray:
    return np.resize(golden().prompt, length)


def prefill_text(requests: Requests, length: int, pages: range) -> Found:
    """A text of some length in slot 0, in chunks as large as the cell; the last step's findings."""
    resets = [reset(0, pages)]
    for start in range(0, length, CELL.prefill):
        part = chunk(0, start, min(start + CELL.prefill, length), tokens=text(length))
        found = requests.step(RankRows(chunks=[part], resets=resets))
        resets = []
    return found


@pytest.mark.parametrize("length", [29, 30])
def test_passes_that_do_not_share_write_behind_the_last_row(length):
    requests = Requests()
    found = prefill_text(requests, length, range(1, 4))
    # Sharing writes nothing, and the program keeps that cache. Pages ascend from page 1.
    first = LIMITS.page_size + length
    written = rows_written(requests.cache, found.indexed_cache)
    assert written == set(range(first, first + NUM_DRAFTS - 1))


@pytest.mark.parametrize("length", [30, 32])
def test_passes_write_nowhere_where_the_request_has_no_page(length):
    requests = Requests()
    found = prefill_text(requests, length, range(1, 3))
    first, end = LIMITS.page_size + length, 3 * LIMITS.page_size
    assert rows_written(requests.cache, found.indexed_cache) == set(range(first, end))
    for array in found.indexed_cache:
        assert not array[:, 0].any()


@pytest.mark.parametrize("length", [126, 128])
def test_passes_write_nowhere_past_the_page_tables_end(length):
    requests = Requests()
    assert LIMITS.pages_per_seq * LIMITS.page_size == 128
    found = prefill_text(requests, length, range(1, 9))
    first, end = LIMITS.page_size + length, LIMITS.page_size + 128
    assert rows_written(requests.cache, found.indexed_cache) == set(range(first, end))


def test_sharing_passes_need_no_page_for_their_positions():
    """All drafts have a meaning: they are those of a request with pages to spare."""
    length, tight, spare = 2 * LIMITS.page_size, Requests(), Requests()
    found, expected = (
        prefill_text(tight, length, range(1, 3)),
        prefill_text(spare, length, range(1, 9)),
    )
    np.testing.assert_array_equal(found.shared.tokens, expected.shared.tokens)
    assert found.shared.tokens[0].any()


def prenorm_recycling() -> Mutation:
    """The next pass norms what it gets, so only the norm's scale is lost."""
    return Mutation(recycle_scale=1 / golden().parameters["mtp.norm"])


@pytest.mark.parametrize(
    "mutant",
    [
        prenorm_recycling,
        lambda: Mutation(later_shift=1),
        lambda: Mutation(selection=OF_TARGET),
        lambda: Mutation(selection=OF_NEXT_ROW),
    ],
    ids=["pre-norm recycling", "position i+1", "the target's selection", "a rejected row's"],
)
def test_the_drafts_notice(mutant):
    requests = Requests(mutant())
    prefill(requests)
    found, group = requests.verify_beside_a_prompt(), CHUNKS
    with pytest.raises(AssertionError):
        check_drafts(found.shared, group, "shared", 1)
    assert logit_error(found.shared, group, 1) > NOTICED


def test_the_first_pass_notices_position_i_plus_1():
    found = prefill(Requests(Mutation(first_shift=1)))
    rows = len(golden().prompt)
    error = np.abs(logits(found.y[:rows]) - golden().reference["logits"][:rows])
    assert error.max() > NOTICED


def test_the_first_pass_notices_a_swapped_concatenation():
    parameters, width = golden().parameters, golden().config.hidden_size
    swapped = np.roll(parameters["mtp.merge"], width, axis=0)
    found = prefill(Requests(parameters=parameters | {"mtp.merge": swapped}))
    rows = len(golden().prompt)
    error = np.abs(logits(found.y[:rows]) - golden().reference["logits"][:rows])
    assert error.max(axis=-1).min() > NOTICED


@pytest.mark.parametrize("storage", ["per_layer", "stacked"])
@pytest.mark.parametrize("weight_dtype", ["bfloat16", "fp8"])
def test_drafting_traces_in_every_form_of_the_weights(storage, weight_dtype):
    config = golden().config.replace(intermediate_size=128, moe_intermediate_size=128)
    model = abstract_model(config, dtype="bfloat16", storage=storage, weight_dtype=weight_dtype)
    merge, leaves = split_model(model)
    form = Form(config, CACHE_FORMATS["bfloat16"], dtype="bfloat16")

    def with_rank(tree):
        return jax.tree.map(lambda spec: jax.ShapeDtypeStruct((1, *spec.shape), spec.dtype), tree)

    cache = cache_shapes(config, form.cache_format, num_pages=NUM_PAGES, page_size=LIMITS.page_size)
    inputs = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype),
        input_shapes(CELL, LIMITS),
        is_leaf=lambda leaf: hasattr(leaf, "dtype"),
    )
    arguments = leaves, with_rank(cache), with_rank(slot_shapes(LIMITS)), inputs
    *_, found = jax.eval_shape(drafting_step(merge, form), *arguments, Mutation())
    assert found.y.dtype == jnp.bfloat16
    assert found.shared.tokens.shape == found.indexed.tokens.shape == (REQUESTS, NUM_DRAFTS)
