"""Lives a life: adds its guests, makes its faults, and checks every step."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from glm_jax.engine.admission import QueueFullError
from glm_jax.engine.engine import Engine
from glm_jax.engine.faults import RequestFaultError
from glm_jax.engine.outputs import RequestOutput, StepResult, StreamDelta
from glm_jax.engine.plan import StepPlan
from glm_jax.engine.request import Request
from glm_jax.tokenizer import Tokenizer
from scripts.engine_fuzz.invariants import (
    check,
    check_books,
    check_idle,
    check_plan,
    check_programs,
)
from scripts.engine_fuzz.judge import EOS
from scripts.engine_fuzz.life import Fault, Life
from scripts.engine_fuzz.shadow import Shadow
from scripts.fuzz_drafts import ScriptedDrafts, scripts_for
from scripts.fuzz_schedules import Target, make_engine

# No life is near it: some six guests of at most 128 rows.
MOST_STEPS = 3000


class Ended(NamedTuple):
    """What a guest got.

    Attributes:
        number: Which guest.
        output: Its result.
        logits: Of its prompt.
        seeds: Of its completions.
    """

    number: int
    output: RequestOutput
    logits: np.ndarray | None
    seeds: Sequence[int]


class Living:
    """A life while it is lived.

    Attributes:
        engine: The engine.
        seen: What was reached.
        ended: What the guests got, once it is over.
    """

    def __init__(
        self,
        target: Target,
        life: Life,
        tokenizer: Tokenizer,
        expected: Mapping[str, Sequence[int]],
    ) -> None:
        """Begin.

        Args:
            target: The model in the life's mode.
            life: What happens.
            tokenizer: Makes text.
            expected: What each completion will get, by the id of its own request; only scripts of
                drafts need it.
        """
        self.seen: Counter[str] = Counter()
        self.ended: list[Ended] = []
        self._life = life
        self._target = target
        self._step = 0
        self._decoding: list[Request] = []
        self._broken: Exception | None = None
        self._faults = {(fault.step, fault.phase): fault for fault in life.faults}
        self._raised: Fault | None = None
        self._aborts: dict[tuple[int, str], list[str]] = {}
        for number, guest in enumerate(life.guests):
            if guest.abort is not None:
                self._aborts.setdefault(guest.abort, []).append(f"r{number}")
        self._deltas: dict[tuple[str, int], list[StreamDelta]] = {}
        self._seeds: dict[str, list[int]] = {}
        self.engine: Engine = make_engine(
            target,
            life.schedule,
            tokenizer=tokenizer,
            eos_token_ids=(EOS,),
            fault_hook=self._hook,
        )
        self.engine.clock = lambda: float(self._step)
        self._shadow = Shadow(self.engine.scheduler.pages)
        if life.drafter != "own":
            script = scripts_for(target.model_config.vocab_size)[life.drafter]
            ScriptedDrafts(self.engine, target.runner, expected, script)

    def live(self) -> None:
        """Live it to its end.

        Raises:
            BrokenError: Something does not hold.
        """
        engine, last = self.engine, self._life.last_step
        while engine.has_unfinished or self._step <= last:
            if not engine.has_unfinished and self.seen["idle"]:
                self._skip()
            self._come()
            self._abort("")
            self._take_step()
            check(self._step < MOST_STEPS, "it does not come to an end")
        self._end()

    def _skip(self) -> None:
        """Go on when the next guest comes; one step with nothing to do is enough."""
        later = [guest.step for guest in self._life.guests if guest.step >= self._step]
        self._step = min(later, default=self._step)

    def _come(self) -> None:
        for number, guest in enumerate(self._life.guests):
            if guest.step != self._step:
                continue
            name, wish, scheduler = f"r{number}", guest.wish, self.engine.scheduler
            waiting, most = len(scheduler.waiting), self.engine.config.max_queued_requests
            try:
                self.engine.add_request(name, list(wish.prompt), wish.sampling, **wish.extra)
            except QueueFullError:
                self.seen["queue full"] += 1
                check(most is not None, "a queue without a limit is full")
                check(waiting + wish.params.get("n", 1) > (most or 0), "the queue was not full")
                check(len(scheduler.waiting) == waiting, "a refused request is queued")
                continue
            children = self.engine._children[name]
            seeds = self._seeds[name] = [child.request.seed for child in children]
            _check_seeds(wish.params.get("seed"), seeds, wish.params.get("n", 1))
            self.seen.update(f"asked {feature}" for feature in wish.features)

    def _abort(self, phase: str) -> None:
        for name in self._aborts.get((self._step, phase), ()):
            if name not in self._seeds:
                continue
            finished = self.engine.is_finished(name)
            check(self.engine.abort(name) != finished, f"abort of {name} says otherwise")
            check(not self.engine.abort(name), f"{name} is aborted twice")
            self.seen[f"abort {phase or 'between steps'}"] += not finished

    def _hook(self, phase: str, plan: StepPlan | None) -> None:
        try:
            self._watch(phase, plan)
        except Exception as error:
            # The engine would take it for a fault of the step.
            self._broken = self._broken or error
        fault = self._faults.get((self._step, phase))
        if fault is None:
            return
        self._raised = fault
        self.seen[f"fault {phase} {fault.kind}"] += 1
        if fault.kind == "interrupt":
            raise KeyboardInterrupt
        if fault.kind == "culprit" and plan is not None:
            raise RequestFaultError("injected", plan.request_ids[:1])
        raise RuntimeError("injected")

    def _watch(self, phase: str, plan: StepPlan | None) -> None:
        scheduler = self.engine.scheduler
        if phase == "schedule":
            self._decoding = [one for one in scheduler.running if one.decoding]
        elif phase == "pack" and plan is not None:
            self.seen["found tokens"] += plan.cached_tokens
            self.seen["waits for a page"] += plan.prefix_waits
            check_plan(self.engine, plan, self._decoding)
            self._shadow.before(plan)
        self._abort(phase)

    def _take_step(self) -> None:
        self._raised = None
        resets = self.engine.scheduler.pool_resets
        try:
            result = self.engine.step()
        except KeyboardInterrupt:
            result = None
            check(self._raised is not None, "an interrupt that nobody made")
        self._step += 1
        if self._broken is not None:
            raise self._broken
        check_books(self.engine)
        if self.engine.scheduler.pool_resets > resets:
            self._shadow.forget()
        self._shadow.after()
        if result is not None:
            self._note(result)

    def _note(self, result: StepResult) -> None:
        record, seen = result.record, self.seen
        check((record.fault is None) == (self._raised is None), f"fault: {record.fault}")
        for delta in result.deltas:
            self._deltas.setdefault((delta.request_id, delta.index), []).append(delta)
        seen["steps"] += 1
        seen[record.kind] += 1
        seen[record.mode or "nothing run"] += 1
        seen[f"drafts {self._life.drafter}"] += record.draft_tokens
        seen[f"accepted {self._life.drafter}"] += record.accepted_tokens
        seen["loops"] += record.loop_steps > 1
        seen["steps in loops"] += record.loop_steps if record.loop_steps > 1 else 0
        seen["split steps"] += bool(record.halves)
        if record.split_reason:
            seen[f"whole: {record.split_reason}"] += 1
        if record.mode == "FULL":
            assert record.cell is not None
            cells = record.halves or (record.cell,)
            check_programs(cells, [cell for cell in cells if cell in self._target.runner.programs])

    def _end(self) -> None:
        """Take the results and check that nothing is left."""
        engine, seen = self.engine, self.seen
        for number in range(len(self._life.guests)):
            name = f"r{number}"
            if name not in self._seeds:
                continue
            check(engine.is_finished(name), f"{name} is unfinished")
            for child in engine._children[name]:
                seen["overtaken"] += child.request.overtaken
                seen["deadlines passed"] += "deadline" in (child.request.error or "")
            output, logits = engine.release(name)
            self._check_deltas(output)
            self._check_reasons(number, output)
            self.ended.append(Ended(number, output, logits, self._seeds[name]))
        check_idle(engine)
        for array in self._target.runner.snapshot():
            check(not array[..., 0, :, :].any(), "page 0 was written")
        scheduler = engine.scheduler
        seen["preemptions"] += scheduler.preemptions
        seen["pool resets"] += scheduler.pool_resets
        seen["evictions"] += scheduler.pages.evictions

    def _check_deltas(self, output: RequestOutput) -> None:
        for completion in output.outputs:
            deltas = self._deltas.get((output.request_id, completion.index), [])
            tokens = [token for delta in deltas for token in delta.token_ids]
            check(tokens == completion.token_ids, f"streamed {tokens}, got {completion}")
            text = "".join(delta.text for delta in deltas)
            check(text == completion.text, f"streamed {text!r}, got {completion}")
            if completion.logprobs is not None:
                streamed = [one for delta in deltas for one in delta.logprobs or ()]
                check(streamed == completion.logprobs, f"streamed {streamed}, got {completion}")
            told = [delta for delta in deltas if delta.finish_reason is not None]
            check(told == deltas[-1:], f"the end of {output.request_id} is told {len(told)} times")

    def _check_reasons(self, number: int, output: RequestOutput) -> None:
        guest = self._life.guests[number]
        reasons = {completion.finish_reason for completion in output.outputs}
        self.seen.update(f"ended {completion.finish_reason}" for completion in output.outputs)
        check(None not in reasons, f"{output.request_id} has no end")
        wanted = guest.abort is not None or "timeout" in guest.wish.extra
        check("abort" not in reasons or wanted, f"{output.request_id} was aborted by nobody")
        failed = "error" in reasons
        check(not failed or bool(self._life.faults), f"{output.request_id} failed: {output}")


def _check_seeds(wished: int | None, seeds: Sequence[int], count: int) -> None:
    """Completion i draws by seed + i; without a seed, each by its own."""
    check(len(set(seeds)) == count, f"seeds {seeds} of {count} completions")
    if wished is not None:
        check(list(seeds) == [(wished + i) % 2**64 for i in range(count)], f"seeds {seeds}")
