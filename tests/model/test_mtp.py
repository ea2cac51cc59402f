"""The MTP layer against the one that `scripts/oracle/mtp.py` composes from transformers' layer.

One jitted program serves all tests: a step of a chunk and a group with the MTP layer behind it.
What a mutant does otherwise is an argument of it, or a change of weights.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model.drafting_step import OF_NEXT_ROW, OF_TARGET, Found, Mutation, drafting_step
from model.open_step import read_parameters

from bucketing.grid import Cell
from bucketing.pack import Chunk, Group, RankRows, SlotReset, SlotSettings, pack
from bucketing.step_inputs import Limits, input_shapes
from glm_jax.model.cache import CACHE_FORMATS, cache_shapes
from glm_jax.model.config import GlmConfig
from glm_jax.model.layer import Form
from glm_jax.model.mtp import Drafts
from glm_jax.model.parameters import parameter_specs
from glm_jax.model.slots import empty_slots, slot_shapes
from glm_jax.model.storage import ParameterStore, abstract_model, split_model

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "mtp"
TOLERANCE = 1e-4
# A mutant counts as noticed when it is wrong by much more than the tolerance.
NOTICED = 10 * TOLERANCE

NUM_DRAFTS = 5
CELL = Cell(64, 1, 1 + NUM_DRAFTS)
LIMITS = Limits(max_num_seqs=2, pages_per_seq=8, page_size=16, num_drafts=NUM_DRAFTS)
REQUESTS = LIMITS.chunks(CELL) + CELL.groups
NUM_PAGES = 2 * LIMITS.pages_per_seq + 1
GREEDY = SlotSettings(0.0, 0, 1.0, 0.0, 0, 0, ())


class Golden(NamedTuple):
    config: GlmConfig
    parameters: dict[str, np.ndarray]
    reference: dict[str, np.ndarray]

    @property
    def prompt(self) -> np.ndarray:
        return self.reference["tokens"][: self.reference["prompt_tokens"]]

    @property
    def generated(self) -> np.ndarray:
        return self.reference["tokens"][self.reference["prompt_tokens"] :]


@functools.cache
def golden() -> Golden:
    # transformers' eps of the latent norms.
    config = GlmConfig.from_hf(GOLDEN).replace(latent_norm_eps=1e-6)
    with np.load(GOLDEN / "reference.npz") as reference:
        return Golden(config, read_parameters(GOLDEN, config), dict(reference))


@functools.cache
def compiled_step() -> Callable:
    model = abstract_model(golden().config, dtype="float32", storage="per_layer")
    merge, _ = split_model(model)
    return jax.jit(drafting_step(merge, Form(golden().config, CACHE_FORMATS["float32"])))


def leaves_of(parameters: dict[str, np.ndarray]) -> list:
    store = ParameterStore(golden().config, dtype="float32", storage="per_layer")
    for name in parameter_specs(golden().config):
        store.destination(name)[...] = parameters[name]
    return split_model(store.to_device(jax.devices("cpu")[0]))[1]


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
        self.slots = empty_slots(LIMITS, 1)
        self.cache = jax.tree.map(
            lambda spec: np.zeros((1, *spec.shape), spec.dtype),
            cache_shapes(
                golden().config,
                CACHE_FORMATS["float32"],
                num_pages=NUM_PAGES,
                page_size=LIMITS.page_size,
            ),
        )

    def step(self, *, lengths: int = NUM_DRAFTS, **rows: list) -> Found:
        self.cache, self.slots, found = jax.device_get(
            compiled_step()(
                self.leaves,
                self.cache,
                self.slots,
                pack(CELL, LIMITS, [RankRows(**rows)]),
                np.full(REQUESTS, lengths, np.int32),
                self.mutation,
            )
        )
        return found

    def draft(self, slot: int, tokens: np.ndarray) -> None:
        """Put drafts of our own in place of those that the step made."""
        drafts = self.slots.drafts.copy()
        drafts[0, slot] = tokens
        self.slots = self.slots._replace(drafts=drafts)


def chunk(slot: int, start: int, stop: int) -> Chunk:
    """Some of the prompt; the token after the prompt is not known."""
    prompt = golden().prompt
    following = np.append(prompt, 0)[start + 1 : stop + 1].astype(np.int32)
    return Chunk(slot, prompt[start:stop], following, sampled=stop == len(prompt))


def reset(slot: int, pages: range) -> SlotReset:
    return SlotReset(slot, pages, 0, GREEDY)


def prefill(requests: Requests, **options: int) -> Found:
    """The prompt as one chunk in slot 0."""
    return requests.step(
        chunks=[chunk(0, 0, len(golden().prompt))], resets=[reset(0, range(1, 9))], **options
    )


def verify_beside_a_prompt(requests: Requests) -> Found:
    """Slot 0 verifies two right drafts and three wrong ones; slot 1 prefills the prompt.

    The pages of slot 1 descend: its entries and positions are in different orders.
    """
    right, size = golden().generated[1:3], golden().config.vocab_size
    wrong = (golden().generated[3:6] + 1) % size
    requests.draft(0, np.concatenate([right, wrong]))
    return requests.step(
        groups=[Group(0, True, 1, NUM_DRAFTS, None, None, True)],
        chunks=[chunk(1, 0, len(golden().prompt))],
        resets=[reset(1, range(16, 8, -1))],
    )


@functools.cache
def both_steps() -> tuple[Found, Found]:
    requests = Requests()
    return prefill(requests), verify_beside_a_prompt(requests)


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
    first = requests.step(chunks=[chunk(0, 0, 20)], resets=[reset(0, range(1, 9))])
    second = requests.step(chunks=[chunk(0, 20, rows)])
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
    check_drafts(getattr(found, kind), LIMITS.chunks(CELL), kind, 1)


def test_the_selection_matters_to_the_reference():
    """Where sharing makes no difference no test of sharing can fail."""
    expected = golden().reference
    difference = np.abs(expected["shared_logits"] - expected["indexed_logits"])
    assert difference[:, 0].max() == 0
    assert difference[:, 1:].max(axis=(1, 2)).min() > NOTICED


@pytest.mark.parametrize("length", [0, 1, 3])
def test_a_request_gets_as_many_drafts_as_it_wants(length):
    found = prefill(Requests(), lengths=length)
    expected = golden().reference["shared_drafts"][0].copy()
    expected[length:] = 0
    assert found.shared.tokens[0].tolist() == expected.tolist()
    assert not found.shared.tokens[1:].any()


def test_shared_passes_leave_the_cache_as_the_first_pass_left_it():
    without, drafting = Requests(), Requests()
    prefill(without, lengths=0)
    prefill(drafting)
    jax.tree.map(np.testing.assert_array_equal, without.cache, drafting.cache)
    for array in drafting.cache:
        assert not array[0, :, 0].any()  # the reserved page


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
    found, group = verify_beside_a_prompt(requests), LIMITS.chunks(CELL)
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
    lengths = jax.ShapeDtypeStruct((REQUESTS,), jnp.int32)
    arguments = leaves, with_rank(cache), with_rank(slot_shapes(LIMITS)), inputs
    *_, found = jax.eval_shape(drafting_step(merge, form), *arguments, lengths, Mutation())
    assert found.y.dtype == jnp.bfloat16
    assert found.shared.tokens.shape == found.indexed.tokens.shape == (REQUESTS, NUM_DRAFTS)
