"""What a step does not own can hold anything: pads, free pages, stale tails, unused slots."""

import dataclasses
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import jax
import numpy as np
import pytest

from bucketing.grid import Cell
from bucketing.loop_inputs import LoopInputs, LoopOutputs
from bucketing.step_inputs import StepInputs, StepOutputs
from glm_jax import SamplingParams
from glm_jax.engine.draft_policy import FixedDrafts
from glm_jax.engine.engine import Engine
from glm_jax.engine.modes import Served, full
from glm_jax.engine.plan import StepPlan
from glm_jax.model.cache import Cache
from glm_jax.model.slots import Slots
from glm_jax.sampling.row_logprobs import RowLogprobs
from scripts.fuzz_drafts import ScriptedDrafts, scripts_for

# Pads are rows of this token; no request here computes it.
PAD_TOKEN = 0


class Poison(NamedTuple):
    """What stands wherever nobody may look, in arrays of numbers and of integers."""

    number: float
    integer: int


POISONS = {"nan": Poison(np.nan, 10**9), "huge": Poison(1e30, -(10**9))}


class Contaminator:
    """An executor that fills everything unowned before each step and checks what the step wrote.

    Attributes:
        seen: Bits of the drawn tokens, the drafts and the useful hidden rows, one entry a step.
        cells: Cells used.
        tokens: Of each request by id, at the end.
        owned_rows: How many of a request's computed entries count as owned; all by default.
    """

    drafts_write_ahead = False
    resets = 0

    def __init__(self, llm, poison: Poison | None) -> None:
        self.runner = llm.runner
        self.page_size = llm.config.page_size
        self.poison = poison
        self.params = list(self.runner._params)
        self.seen: list[tuple[bytes, ...]] = []
        self.cells: set[Cell] = set()
        self.owned_rows = lambda request: request.computed
        self.engine: Engine
        self.plan: StepPlan
        self.tokens: dict[str, list[int]] = {}
        self._change_weights()

    def hook(self, phase: str, plan: StepPlan | None) -> None:
        if phase == "dispatch":
            self.plan = plan

    def serve(self, cell: Cell, rows: int, loop_steps: int = 1) -> Served:
        return full(cell)

    def run_loop(self, served: Served, inputs: StepInputs, ends: LoopInputs) -> LoopOutputs:
        raise AssertionError("no step of these stories is a loop")

    def control(self, updates) -> None:
        assert not updates, "nobody asked for controls"

    def run(self, served: Served, inputs: StepInputs) -> StepOutputs:
        runner, cell = self.runner, served.layout
        cache = Cache(*map(np.array, runner._cache))
        slots = Slots(*map(np.array, runner._slots))
        if self.poison is not None:
            self._fill_cache(cache)
            self._fill_slots(slots)
        # Copies: a donated buffer must not be the array that it is compared with.
        copied = jax.tree.map(lambda array: jax.device_put(array.copy()), (cache, slots))
        program = runner.programs[cell]
        runner._cache, runner._slots, outputs = program(self.params, *copied, inputs)
        self._check_cache(cache)
        self._check_slots(slots)
        self._note(cell, outputs)
        return outputs

    def logits(self, outputs: StepOutputs, rows: Sequence[int]) -> np.ndarray:
        raise AssertionError("nobody asked for logits")

    def logprobs(self, outputs: StepOutputs, rows, targets, further) -> RowLogprobs:
        raise AssertionError("nobody asked for log-probabilities")

    def reset(self) -> None:
        self.runner.reset()

    def step(self) -> None:
        assert self.engine.step().record.fault is None

    def _change_weights(self) -> None:
        """Poison the pads' embedding; the pad token is never drafted, as it is never drawn."""
        head = np.array(self.runner._head_weight)
        for index, leaf in enumerate(self.params):
            if leaf.shape != head.shape:
                continue
            changed = np.array(leaf)
            if np.array_equal(changed, self.runner._head_weight):
                # Its logit is 0, and of the others some is larger.
                changed[PAD_TOKEN] = 0
            elif self.poison is not None:
                changed[PAD_TOKEN] = self.poison.number
            self.params[index] = jax.device_put(changed)

    def _entries(self, request, rows: range) -> list[int]:
        size = self.page_size
        return [request.pages[position // size] * size + position % size for position in rows]

    def _fill_cache(self, cache: Cache) -> None:
        """Everything but page 0 and the entries that hold a computed token of somebody."""
        pages = cache.latent.shape[2]
        free = np.arange(pages * self.page_size) >= self.page_size
        for request in self.engine.scheduler.running:
            free[self._entries(request, range(self.owned_rows(request)))] = False
        for page in self.engine.scheduler.pages.published:
            # A later request may find them.
            free[page * self.page_size : (page + 1) * self.page_size] = False
        for array in cache:
            array.reshape(*array.shape[:2], -1, array.shape[-1])[:, :, free] = self.poison.number

    def _fill_slots(self, slots: Slots) -> None:
        """Slots of nobody, and what a slot in use has not been told yet; the pad slot's pages."""
        running = [r for r in self.engine.scheduler.running if not r.needs_reset]
        unused = np.ones(slots.computed.shape[1], bool)
        unused[[request.slot for request in running]] = False
        for name, array in slots._asdict().items():
            number = np.issubdtype(array.dtype, np.floating)
            filler = np.asarray(self.poison.number if number else self.poison.integer)
            filled = unused.copy()
            # The pad slot's page table is promised to be zero.
            filled[-1] &= name != "page_table"
            # A control line says nothing unless the host made it: it keeps a book of them.
            filled &= name != "control_active"
            array[:, filled] = filler.astype(array.dtype)
        for request in running:
            slots.page_table[:, request.slot, request.synced_pages :] = self.poison.integer
            waiting = len(request.draft_token_ids)
            slots.drafts[:, request.slot, waiting:] = self.poison.integer
            if not request.decoding:
                slots.last_token[:, request.slot] = self.poison.integer

    def _check_cache(self, before: Cache) -> None:
        """The step wrote the entries of its rows and not a bit elsewhere; page 0 is zero."""
        written = np.zeros(before.latent.shape[2] * self.page_size, bool)
        # The MTP layer's plane is the last one.
        planes = slice(None) if self.plan.drafter else slice(-1)
        for entry in self.plan.entries:
            start = entry.request.computed
            written[self._entries(entry.request, range(start, start + entry.rows))] = True
        for old, new in zip(before, self.runner._cache, strict=True):
            shape = (*old.shape[:2], len(written), old.shape[-1])
            old_bits = old.view(np.uint32).reshape(shape)
            new_bits = np.array(new).view(np.uint32).reshape(shape)
            assert not new_bits[:, :, : self.page_size].any(), "page 0 was written"
            np.testing.assert_array_equal(new_bits[:, :, ~written], old_bits[:, :, ~written])
            if not self.plan.drafter:
                np.testing.assert_array_equal(new_bits[:, -1], old_bits[:, -1])
            values = np.asarray(new).reshape(shape)[:, planes][:, :, written]
            assert np.abs(values).max() < 1e3, "a row was not written, or written with poison"
            assert values.any(axis=-1).all()

    def _check_slots(self, before: Slots) -> None:
        """Only slots of the plan have changed."""
        others = np.ones(before.computed.shape[1], bool)
        others[[entry.request.slot for entry in self.plan.entries]] = False
        for old, new in zip(before, self.runner._slots, strict=True):
            kept = np.ascontiguousarray(np.asarray(new)[:, others])
            assert kept.tobytes() == np.ascontiguousarray(old[:, others]).tobytes()

    def _note(self, cell: Cell, outputs: StepOutputs) -> None:
        hidden = np.asarray(outputs.hidden)[0]
        chunk_tokens = np.asarray(outputs.chunk_tokens)[0]
        group_tokens = np.asarray(outputs.group_tokens)[0]
        drafts = np.asarray(outputs.drafts)[0]
        noted, first = [], 0
        for row, entry in enumerate(self.plan.chunk_entries):
            noted.append(drafts[row, : entry.new_drafts].tobytes())
        for row, entry in enumerate(self.plan.group_entries, len(chunk_tokens)):
            noted.append(drafts[row, : entry.new_drafts].tobytes())
            assert PAD_TOKEN not in drafts[row, : entry.new_drafts]
        for token, entry in zip(chunk_tokens, self.plan.chunk_entries, strict=False):
            noted.append(hidden[first : first + entry.rows].tobytes())
            noted.append(token.tobytes() if entry.sampled else b"")
            first += entry.rows
        for group, entry in enumerate(self.plan.group_entries):
            first = cell.prefill + group * cell.width
            noted.append(hidden[first : first + entry.rows].tobytes())
            drawn = group_tokens[group, entry.known - 1 : entry.rows]
            noted.append(drawn.tobytes() if entry.sampled else b"")
        self.seen.append(tuple(noted))
        self.cells.add(cell)


def run_story(llm, poison: Poison | None, expected=None, owned_rows=None) -> Contaminator:
    """A fixed story with chunks, mixed steps, rests as groups and a preemption.

    Args:
        expected: The tokens of its requests by id: then drafts are made, half of them right.
    """
    device = Contaminator(llm, poison)
    device.reset()
    if owned_rows is not None:
        device.owned_rows = owned_rows
    vocab_size = llm.model_config.vocab_size
    device.engine = engine = Engine(
        dataclasses.replace(llm.config, num_pages=14),
        device,
        vocab_size=vocab_size,
        fault_hook=device.hook,
    )
    if expected is None:
        engine.scheduler.drafting.policy = FixedDrafts(0)
    else:
        ScriptedDrafts(engine, llm.runner, expected, scripts_for(vocab_size)["half"])
    rng = Random(21)
    for number, length in enumerate((19, 3, 66, 25, 9, 40, 1)):
        params = SamplingParams(
            temperature=0.9 * (number % 2),
            top_k=rng.choice([0, 30]),
            top_p=rng.choice([1.0, 0.9]),
            seed=number,
            max_tokens=9,
            min_tokens=9,
            stop_token_ids=[PAD_TOKEN],
        )
        engine.add_request(f"r{number}", rng.choices(range(1, vocab_size), k=length), params)
        device.step()
        device.step()
    while engine.has_unfinished:
        device.step()
    device.tokens = {
        f"r{number}": engine.release(f"r{number}")[0].outputs[0].token_ids for number in range(7)
    }
    return device


@pytest.fixture(scope="module")
def clean(tiny_llm):
    """The story by the most drafts of a request."""
    plain = run_story(tiny_llm, None)
    return {0: plain, 5: run_story(tiny_llm, None, plain.tokens)}


def test_the_story_reaches_what_it_is_meant_to_test(tiny_llm, clean):
    cells = set().union(*(device.cells for device in clean.values()))
    assert cells == set(tiny_llm.config.grid().cells())
    assert all(device.engine.scheduler.preemptions for device in clean.values())
    acceptance = clean[5].engine.scheduler.drafting.policy.acceptance
    assert acceptance.drafts / 4 < acceptance.accepted < 3 * acceptance.drafts / 4


@pytest.mark.parametrize("drafts", [0, 5])
@pytest.mark.parametrize("name", POISONS)
def test_outputs_are_bit_identical_whatever_stands_in_what_nobody_owns(
    tiny_llm, clean, name, drafts
):
    expected = clean[0].tokens if drafts else None
    dirty = run_story(tiny_llm, POISONS[name], expected)
    assert len(dirty.seen) == len(clean[drafts].seen)
    pairs = zip(dirty.seen, clean[drafts].seen, strict=True)
    assert [step for step, (one, other) in enumerate(pairs) if one != other] == []


@pytest.mark.parametrize("drafts", [0, 5])
def test_the_comparison_notices_a_lost_entry(tiny_llm, clean, drafts):
    # The last computed token counts as free: whoever decodes reads poison.
    expected = clean[0].tokens if drafts else None
    with pytest.raises(AssertionError):
        run_story(tiny_llm, POISONS["nan"], expected, lambda request: max(request.computed - 1, 0))
