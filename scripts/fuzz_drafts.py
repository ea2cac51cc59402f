"""Random schedules with drafts: every request must get the tokens it gets alone without them.

`python -m scripts.fuzz_drafts --schedules 200 --seed 0 [--modes full piecewise eager loop]` runs
each schedule with several draft lengths and drafters: the model's own, and scripts that are right,
wrong, or right at first. It fails at a difference that rounding does not explain (DESIGN 10.4), at
a draft that was accepted or refused against the tokens, and at a program that is compiled. In a
decode loop on the device only the model's own drafts can be verified.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from random import Random
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from bucketing.loop_inputs import LoopInputs, LoopOutputs
from bucketing.step_inputs import StepInputs, StepOutputs
from glm_jax import LLM, SamplingParams
from glm_jax.engine.engine import Engine
from glm_jax.engine.executor import Executor
from glm_jax.engine.modes import Served
from glm_jax.engine.outputs import NO_DRAFTS, DraftCounts, GroupDrafts
from glm_jax.engine.plan import StepPlan
from glm_jax.engine.results import read_results
from glm_jax.engine.runner import Runner
from scripts.decision_margins import decisions
from scripts.fuzz_modes import target_of
from scripts.fuzz_schedules import (
    BLOCK_REQUESTS,
    BLOCK_SCHEDULES,
    MODEL,
    OPTIONS,
    Asked,
    Lived,
    Schedule,
    Target,
    differs,
    draw_asked,
    draw_schedule,
    run_schedule,
    tokens_alone,
)

# JAX asks for an executable.
COMPILED = "/jax/core/compile/backend_compile_duration"

# Gets a request's id, its next tokens if drawn as expected, and a number that tells its place.
Script = Callable[[str, Sequence[int], int], Sequence[int]]


class Case(NamedTuple):
    """How many drafts a request makes, and what makes them."""

    drafts: int | str
    drafter: str


class ScriptedDrafts:
    """An executor that puts drafts of a script in place of those that a step made.

    Attributes:
        drafts_write_ahead: as the runner's.
    """

    def __init__(
        self,
        engine: Engine,
        runner: Runner,
        expected: Mapping[str, Sequence[int]],
        script: Script,
    ) -> None:
        """Take the place of an engine's executor, and give it the steps.

        Args:
            engine: its executor runs the steps.
            runner: holds the slots.
            expected: what each request will generate, by id.
            script: makes the drafts.
        """
        self.drafts_write_ahead = runner.drafts_write_ahead
        self._engine = engine
        self._executor = engine._execution._executor
        self._runner = runner
        self._expected = expected
        self._script = script
        engine._execution._executor = cast("Executor", self)

    def __getattr__(self, name: str) -> Any:
        """Leave everything else to the executor."""
        return getattr(self._executor, name)

    def run(self, served: Served, inputs: StepInputs) -> StepOutputs:
        """Run a step and replace its drafts, in the outputs and on the device."""
        outputs = self._executor.run(served, inputs)
        plan = self._engine.scheduler._in_flight
        assert plan is not None, "a step runs that nobody planned"
        if not plan.drafter:
            return outputs
        drafts = np.array(outputs.drafts)
        slots = np.array(self._runner._slots.drafts)
        for row, slot, line in self._scripted(plan, outputs):
            drafts[0, row] = slots[0, slot] = line
        # Copies: the next step takes the slots' buffer over.
        on_device = jax.device_put(slots.copy())
        self._runner._slots = self._runner._slots._replace(drafts=on_device)
        return outputs._replace(drafts=drafts)

    def run_loop(self, served: Served, inputs: StepInputs, ends: LoopInputs) -> LoopOutputs:
        """Refuse: a loop makes and verifies drafts on the device.

        Raises:
            ValueError: always.
        """
        raise ValueError("drafts cannot be scripted inside a loop; set decode_loop_steps=0.")

    def _scripted(
        self, plan: StepPlan, outputs: StepOutputs
    ) -> Iterable[tuple[int, int, np.ndarray]]:
        """Yield the row, the slot and the new drafts of every request that makes some."""
        drawn = outputs.chunk_tokens, outputs.group_tokens, outputs.group_accepted
        chunk_tokens, group_tokens, group_accepted = map(np.asarray, drawn)
        made = np.asarray(outputs.drafts)
        results = read_results(plan, chunk_tokens, group_tokens, group_accepted, made)
        chunks = len(plan.chunk_entries)
        for place, (entry, _, tokens, _) in enumerate(results):
            if not entry.new_drafts:
                continue
            request = entry.request
            assert request.slot is not None
            known = request.num_output_tokens + len(tokens)
            count = made.shape[-1]
            following = [*self._expected[request.request_id][known:], *range(count)][:count]
            row = place if place < chunks else chunk_tokens.shape[1] + place - chunks
            line = np.zeros(count, np.int32)
            line[:] = self._script(request.request_id, following, known)
            yield row, request.slot, line


def scripts_for(vocab_size: int) -> dict[str, Script]:
    """The scripts by name; each knows what a request will draw."""

    def right(name: str, tokens: Sequence[int], place: int) -> Sequence[int]:
        return tokens

    def wrong(name: str, tokens: Sequence[int], place: int) -> Sequence[int]:
        return [(token + 1) % vocab_size for token in tokens]

    def half(name: str, tokens: Sequence[int], place: int) -> Sequence[int]:
        # One is wrong, and those behind it are right again: they must not be accepted.
        count = Random(f"{name} {place}").randint(0, len(tokens))
        return [(token + (n == count)) % vocab_size for n, token in enumerate(tokens)]

    return {"right": right, "wrong": wrong, "half": half}


DRAFTERS = ("own", "right", "wrong", "half")
OWN_CASES = tuple(Case(drafts, "own") for drafts in (0, 1, 3, 5, "auto"))
CASES = (Case(0, "own"), *(Case(*case) for case in product((1, 3, 5, "auto"), DRAFTERS)))


class DraftFuzz:
    """Schedules of one model, and what their requests generate alone; made when first needed.

    Attributes:
        seen: What the runs reached so far.
    """

    def __init__(self, llm: LLM, seed: int = 0) -> None:
        """Take the model; another seed draws other requests and schedules."""
        self.seen: Counter[str] = Counter()
        self._llm = llm
        self._seed = seed
        self._scripts = scripts_for(llm.model_config.vocab_size)
        self._blocks: dict[int, list[Asked]] = {}
        self._alone: dict[tuple[int, int], list[int]] = {}

    def run(self, target: Target, number: int, case: Case) -> Lived:
        """Run a schedule once and check it.

        Args:
            target: the model in some execution mode.
            number: of the schedule.
            case: the drafts.

        Raises:
            AssertionError: a request's tokens differ from those alone where no decision was close,
                or a draft was accepted or refused against them.
        """
        block_number = number // BLOCK_SCHEDULES
        block = self._block(block_number)
        schedule = draw_schedule(Random(f"drafts {self._seed} {number}"), self._llm, block)
        schedule = schedule._replace(drafts=case.drafts)
        expected = {
            f"r{place}": self._tokens_alone(block_number, arrival.number)
            for place, arrival in enumerate(schedule.arrivals)
        }

        def prepare(engine: Engine) -> None:
            if case.drafter != "own":
                script = self._scripts[case.drafter]
                ScriptedDrafts(engine, target.runner, expected, script)

        try:
            lived = run_schedule(target, block, schedule, prepare)
            same = self._check_tokens(block, schedule, lived, expected)
            check_drafts(lived, case, same)
        except AssertionError as error:
            error.add_note(f"{case} of schedule {number}, seed {self._seed}: {schedule}")
            raise
        self._count(lived, case)
        return lived

    def _block(self, number: int) -> list[Asked]:
        if number not in self._blocks:
            rng = Random(f"draft block {self._seed} {number}")
            self._blocks[number] = [draw_asked(rng, self._llm) for _ in range(BLOCK_REQUESTS)]
        return self._blocks[number]

    def _tokens_alone(self, block: int, number: int) -> list[int]:
        key = block, number
        if key not in self._alone:
            self._alone[key] = tokens_alone(self._llm, self._block(block)[number])
        return self._alone[key]

    def _check_tokens(
        self,
        block: Sequence[Asked],
        schedule: Schedule,
        lived: Lived,
        expected: Mapping[str, Sequence[int]],
    ) -> set[str]:
        """Return the requests whose tokens are those alone."""
        same = set()
        outcomes = zip(
            expected.items(), schedule.arrivals, lived.tokens, lived.reasons, strict=True
        )
        for (name, alone), arrival, got, reason in outcomes:
            asked, aborted = block[arrival.number], reason == "abort"
            if differs(self._llm, asked, got, alone, aborted=aborted):
                self.seen["close decisions"] += 1
            else:
                same.add(name)
        return same

    def _count(self, lived: Lived, case: Case) -> None:
        seen = self.seen
        seen["runs"] += 1
        seen["requests"] += len(lived.tokens)
        seen["preemptions"] += lived.preemptions
        seen.update(str(reason) for reason in lived.reasons)
        for record in lived.records:
            seen["steps"] += 1
            seen["steps in loops"] += record.loop_steps if record.loop_steps > 1 else 0
            seen[record.mode or record.kind] += 1
            seen[record.kind] += bool(record.mode)
            seen["drafts"] += record.draft_tokens
            seen[f"drafts {case.drafter}"] += record.draft_tokens
            seen[f"accepted {case.drafter}"] += record.accepted_tokens


def check_drafts(lived: Lived, case: Case, same: set[str]) -> None:
    """Check what the steps say of drafts against the tokens of the requests.

    Args:
        lived: a schedule.
        case: its drafts.
        same: the requests whose tokens are those that a script expected.

    Raises:
        AssertionError: a step made or verified too many, or accepted other drafts than the tokens
            say, or the counts of a request are not those of the steps.
    """
    finals = {f"r{place}": tokens for place, tokens in enumerate(lived.tokens)}
    emitted = dict.fromkeys(finals, 0)
    counts = dict.fromkeys(finals, NO_DRAFTS)
    most = 5 if case.drafts == "auto" else int(case.drafts)
    for deltas, record in lived.steps:
        assert record.new_drafts <= most
        assert record.drafter or not record.new_drafts
        assert (
            isinstance(case.drafts, str) or not record.request_ids or record.drafter == (most > 0)
        )
        for delta in deltas:
            name, count = delta.request_id, len(delta.token_ids)
            groups = [group for group in record.drafts if group.request_id == name]
            kept = finals[name][emitted[name] :]
            emitted[name] += count
            if not groups:
                continue
            assert _tell(groups, kept, count, record.loop_steps), f"{groups} do not tell of {delta}"
            for group in groups:
                assert 0 < len(group.draft_token_ids) <= most
                steps, drafts, accepted = counts[name]
                counts[name] = DraftCounts(
                    steps + 1, drafts + len(group.draft_token_ids), accepted + group.accepted
                )
            if name in same:
                _check_script(groups[0], kept, case.drafter)
    assert emitted == {name: len(tokens) for name, tokens in finals.items()}
    assert list(counts.values()) == lived.drafts


def _tell(groups: Sequence[GroupDrafts], kept: Sequence[int], count: int, steps: int) -> bool:
    """Whether groups accept exactly the drafts that equal a request's next tokens.

    Args:
        groups: its drafts and how many were accepted; one a step, none where there was no room.
        kept: the tokens of the request from there to its end.
        count: how many of them the steps added.
        steps: how many steps that were.
    """
    without = steps - len(groups)
    place = 0
    for group in groups:
        while _right(group, kept[place:]) != group.accepted:
            place, without = place + 1, without - 1
            if without < 0:
                return False
        place = min(place + group.accepted + 1, len(kept))
    return count == place + without


def _right(group: GroupDrafts, kept: Sequence[int]) -> int:
    """How many drafts equal the tokens that follow, until the first that does not."""
    right = 0
    for draft, token in zip(group.draft_token_ids, kept, strict=False):
        if draft != token:
            break
        right += 1
    return right


def _check_script(group: GroupDrafts, kept: Sequence[int], drafter: str) -> None:
    """Check the accepted count against what a script promises."""
    if drafter == "right":
        assert group.accepted == min(len(group.draft_token_ids), len(kept))
    if drafter == "wrong":
        assert group.accepted == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="another seed, other schedules")
    parser.add_argument("--modes", nargs="+", default=["full"])
    arguments = parser.parse_args()
    llm = LLM(MODEL, **OPTIONS)
    # Margins of sampled tokens need a program of their own.
    decisions(llm, [1], [2], SamplingParams())
    compiled: list[float] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration_secs, **_: (
            compiled.append(duration_secs) if event == COMPILED else None
        )
    )
    fuzz = DraftFuzz(llm, arguments.seed)
    for mode in arguments.modes:
        target = llm if mode == "full" else target_of(llm, mode)
        compiled.clear()
        started = time.perf_counter()
        for number in range(arguments.schedules):
            for case in OWN_CASES if mode == "loop" else CASES:
                fuzz.run(target, number, case)
            if (number + 1) % 10 == 0 or mode == "eager":
                print(f"{mode}: {number + 1} schedules", file=sys.stderr, flush=True)
        # Operators of EAGER steps are compiled one by one.
        assert mode == "eager" or not compiled, f"{len(compiled)} programs were compiled late"
        fuzz.seen[f"seconds {mode}"] += round(time.perf_counter() - started)
    print(json.dumps(dict(sorted(fuzz.seen.items())), indent=2))


if __name__ == "__main__":
    main()
