"""Real steps: what shares a step with a request never changes its tokens (DESIGN 10.4)."""

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

from bucketing.grid import Cell, Grid
from bucketing.loop_inputs import LoopInputs, LoopOutputs
from bucketing.step_inputs import StepInputs, StepOutputs
from glm_jax import SamplingParams
from glm_jax.engine.draft_policy import FixedDrafts
from glm_jax.engine.engine import Engine
from glm_jax.engine.modes import Served
from glm_jax.engine.request import RowClass
from glm_jax.sampling.row_logprobs import RowLogprobs
from scripts.decision_margins import TOLERANCE, decide, decisions
from scripts.fuzz_schedules import Asked, LimitedAxis, draw_asked, fuzz, tokens_alone

SCHEDULES = 300


@pytest.mark.slow
def test_random_schedules_give_every_request_its_tokens_alone(tiny_llm, capsys):
    programs = len(tiny_llm.runner.programs)
    seen = fuzz(tiny_llm, schedules=SCHEDULES, seed=0)
    with capsys.disabled():
        print(f"\n{SCHEDULES} random schedules: {dict(sorted(seen.items()))}")  # noqa: T201
    assert seen["programs"] == programs
    assert seen["close decisions"] <= seen["requests"] / 100
    # The draw must reach what it is meant to test.
    assert seen["drafts"] >= 10 * SCHEDULES
    assert seen["preemptions"] >= SCHEDULES / 10
    assert seen["mixed"] >= SCHEDULES
    for cell in tiny_llm.config.grid().cells():
        assert seen[f"cell {tuple(cell)}"] >= SCHEDULES / 10
    for reason in ("length", "stop", "abort"):
        assert seen[reason] >= SCHEDULES / 20


class PinnedGrid(Grid):
    """Every step uses the largest cell, so that no sum is ordered by a step's size."""

    def cell_for(self, prefill_rows: int, chunks: int, groups: int, width: int = 1) -> Cell:
        super().cell_for(prefill_rows, chunks, groups, width)
        return Cell(self.prefill.edges[-1], self.groups.edges[-1], self.widths[-1])


class Recorder:
    """An executor that keeps the hidden rows of every request by position.

    Attributes:
        rows: Bits of each row that stays in the cache by (request id, position, class).
        drafts: The drafts made behind a request's first tokens by (request id, their number).
        mixed: Steps with both classes.
    """

    drafts_write_ahead = False
    resets = 0

    def __init__(self, runner) -> None:
        self.runner = runner
        self.rows: dict[tuple[str, int, RowClass], bytes] = {}
        self.drafts: dict[tuple[str, int], list[int]] = {}
        self.mixed = 0

    def serve(self, cell: Cell, rows: int, loop_steps: int = 1) -> Served:
        return self.runner.serve(cell, rows)

    def run_loop(self, served: Served, inputs: StepInputs, ends: LoopInputs) -> LoopOutputs:
        raise AssertionError("no step of these stories is a loop")

    def control(self, updates) -> None:
        assert not updates, "nobody asked for controls"

    def run(self, served: Served, inputs: StepInputs) -> StepOutputs:
        self.outputs = self.runner.run(served, inputs)
        return self.outputs

    def logits(self, outputs: StepOutputs, rows: Sequence[int]) -> np.ndarray:
        raise AssertionError("nobody asked for logits")

    def logprobs(self, outputs: StepOutputs, rows, targets, further) -> RowLogprobs:
        raise AssertionError("nobody asked for log-probabilities")

    def reset(self) -> None:
        self.runner.reset()

    def hook(self, phase, plan) -> None:
        if phase != "commit":
            return
        self.mixed += plan.kind == "mixed"
        hidden = np.asarray(self.outputs.hidden)[0]
        drafts = np.asarray(self.outputs.drafts)[0].tolist()
        accepted = np.asarray(self.outputs.group_accepted)[0].tolist()
        chunks = np.asarray(self.outputs.chunk_tokens).shape[1]
        first = 0
        for entry, made in zip(plan.chunk_entries, drafts, strict=False):
            self.record(entry, hidden[first:], 0, made)
            first += entry.rows
        groups = zip(plan.group_entries, accepted, drafts[chunks:], strict=False)
        for group, (entry, count, made) in enumerate(groups):
            first = plan.cell.prefill + group * plan.cell.width
            self.record(entry, hidden[first:], count, made)

    def record(self, entry, hidden, accepted: int, made: list[int]) -> None:
        known, start = entry.known + accepted, entry.request.computed
        for offset in range(known):
            key = entry.request_id, start + offset, entry.row_class
            self.rows[key] = hidden[offset].tobytes()
        if entry.new_drafts:
            self.drafts[entry.request_id, start + known + 1] = made[: entry.new_drafts]


def record_rows(llm, requests, *, budget: int, drafts: int) -> Recorder:
    """Run requests in the pinned cell, a new one every other step."""
    compiled = llm.config.grid()
    prefill = LimitedAxis(compiled.prefill.name, compiled.prefill.edges, budget)
    grid = PinnedGrid(prefill, compiled.groups, compiled.widths)
    recorder = Recorder(llm.runner)
    recorder.reset()
    vocab_size = llm.model_config.vocab_size
    engine = Engine(
        llm.config, recorder, vocab_size=vocab_size, grid=grid, fault_hook=recorder.hook
    )
    engine.scheduler.drafting.policy = FixedDrafts(drafts)
    waiting = list(requests)
    while waiting or engine.has_unfinished:
        if waiting and engine.steps % 2 == 0:
            name, asked = waiting.pop(0)
            engine.add_request(name, asked.prompt, asked.params)
        assert engine.step().record.fault is None
    assert engine.scheduler.preemptions == 0, "a recomputed token is a row of another segment"
    return recorder


@pytest.mark.parametrize("drafts", [0, 5])
def test_rows_are_bit_equal_mixed_or_alone_in_a_pinned_cell(tiny_llm, drafts):
    rng = Random(11)
    requests = [(f"r{number}", draw_asked(rng, tiny_llm)) for number in range(12)]
    together = record_rows(tiny_llm, requests, budget=19, drafts=drafts)
    assert together.mixed >= 5
    alone: dict[tuple[str, int, RowClass], bytes] = {}
    made: dict[tuple[str, int], list[int]] = {}
    for request in requests:
        one = record_rows(tiny_llm, [request], budget=64, drafts=drafts)
        alone |= one.rows
        made |= one.drafts
    assert together.rows.keys() == alone.keys()
    different = [key for key, bits in alone.items() if together.rows[key] != bits]
    assert different == []
    assert bool(made) == bool(drafts)
    assert together.drafts == made


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"temperature": 1.2, "top_k": 40, "top_p": 0.97}]
)
def test_decisions_name_the_tokens_that_were_drawn(tiny_llm, options):
    # The rule for close decisions is only as good as its margins.
    prompt = Random(3).choices(range(tiny_llm.model_config.vocab_size), k=21)
    params = SamplingParams(seed=2**40 + 9, max_tokens=6, **options)
    tokens = tokens_alone(tiny_llm, Asked(prompt, params))
    drawn = decisions(tiny_llm, prompt, tokens, params)
    assert [decision.token for decision in drawn] == tokens
    assert min(decision.margin for decision in drawn) > 0


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_k": 1}])
def test_the_margin_is_small_where_two_tokens_are_close(options):
    logits = np.array([0.0, 3.0, 3.0 - TOLERANCE / 2, 1.0])
    close = decide(logits, SamplingParams(**options), position=4)
    assert close.token == 1
    assert 0 < close.margin < TOLERANCE
    clear = decide(logits[[0, 1, 3, 0]], SamplingParams(**options), position=4)
    assert clear.margin > 1


def test_the_margin_of_a_banned_token_does_not_count():
    logits = np.array([0.0, 3.0, 3.0, 1.0])
    decision = decide(logits, SamplingParams(temperature=0.0), position=4, banned=[1])
    assert decision == (2, 2.0)
