"""The serving loop: schedule, pack, dispatch, fetch, commit - one call of ``step`` each.

For people who write their own loop; ``LLM`` is such a loop. Host-only apart from the executor.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from bucketing.grid import Cell, Grid
from bucketing.grid_use import GridUse
from bucketing.loop_inputs import LoopInputs, LoopOutputs
from bucketing.pack import pack
from bucketing.step_inputs import StepInputs, StepOutputs
from bucketing.step_time import StepTime, StepTimeModel
from glm_jax.engine.config import EngineConfig
from glm_jax.engine.faults import POOL_LOST, FaultHook, StepFault, no_fault
from glm_jax.engine.fetched import fetch
from glm_jax.engine.live_request import LiveRequest
from glm_jax.engine.looping import loop_ends
from glm_jax.engine.modes import Mode, Served
from glm_jax.engine.outputs import (
    GroupDrafts,
    RequestOutput,
    StepNotes,
    StepRecord,
    StepResult,
    StreamDelta,
    record_of,
)
from glm_jax.engine.pages import PagePool
from glm_jax.engine.phase_clock import PhaseClock
from glm_jax.engine.plan import StepPlan
from glm_jax.engine.prompt import prompt_tokens
from glm_jax.engine.prompt_logits import collect_logits
from glm_jax.engine.request import FinishReason, Request
from glm_jax.engine.request_update import RequestUpdate, joined
from glm_jax.engine.scheduler import Scheduler
from glm_jax.engine.stopping import end_at_stop_string, end_with_error
from glm_jax.engine.text_stream import TextStream
from glm_jax.sampling.params import SamplingParams
from glm_jax.tokenizer import Tokenizer


@runtime_checkable
class Executor(Protocol):
    """Runs packed steps; ``Runner`` on a device, a fake in tests.

    Attributes:
        drafts_write_ahead: whether making drafts writes the cache behind a step's rows.
    """

    drafts_write_ahead: bool

    def serve(self, cell: Cell, rows: int, loop_steps: int = 1) -> Served:
        """Say how a step of so many useful rows will run, and in which layout to pack it.

        Where ``loop_steps`` is more than one and the loop's program is there, it is a loop.
        """
        ...

    def run(self, served: Served, inputs: StepInputs) -> StepOutputs:
        """Dispatch one step."""
        ...

    def run_loop(self, served: Served, inputs: StepInputs, ends: LoopInputs) -> LoopOutputs:
        """Dispatch a decode loop."""
        ...

    def logits(self, outputs: StepOutputs, rows: Sequence[int]) -> Float[np.ndarray, "rows V"]:
        """Logits of chosen rows of a step."""
        ...

    def reset(self) -> None:
        """Make a new zero cache and empty slots."""
        ...


class Engine:
    """Continuous batching over one executor.

    Attributes:
        scheduler: queues, pages and slots.
        steps: steps taken.
        use: how often each cell was used, and how full it was.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        *,
        vocab_size: int,
        eos_token_ids: Iterable[int] = (),
        tokenizer: Tokenizer | None = None,
        grid: Grid | None = None,
        step_time: StepTime | None = None,
        fault_hook: FaultHook = no_fault,
    ) -> None:
        """Start empty.

        Args:
            config: the engine's options.
            executor: runs the steps; its programs are compiled.
            vocab_size: token ids below it are valid.
            eos_token_ids: the model's end tokens.
            tokenizer: None works on token ids only.
            grid: the compiled cells; by default the grid of ``config``.
            step_time: predicts steps for the scheduler; a ``StepTimeModel`` also learns from every
                FULL step. By default a step costs its rows.
            fault_hook: called at the start of each phase; tests raise in it.
        """
        self.config = config
        pages = PagePool(config.pool_pages, config.page_size)
        self.scheduler = Scheduler(
            config,
            grid or config.grid(),
            pages,
            step_time,
            drafts_write_ahead=executor.drafts_write_ahead,
        )
        self.steps = 0
        self.use = GridUse()
        self._executor = executor
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._tokenizer = tokenizer
        self._fault_hook = fault_hook
        self._entries: dict[str, LiveRequest] = {}
        self._late: list[StreamDelta] = []
        self._faults_without_progress = 0
        self._notes = StepNotes()

    @property
    def has_unfinished(self) -> bool:
        """Whether a request is waiting or running, or an end has not been handed out."""
        return self.scheduler.has_unfinished or bool(self._late)

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        keep_logits: bool = False,
    ) -> None:
        """Queue a request.

        Args:
            request_id: unique among unfinished requests.
            prompt: text (needs a tokenizer) or token ids.
            params: what to generate; defaults as in ``SamplingParams``.
            keep_logits: collect the float32 logits of all prompt rows.

        Raises:
            ValueError: the prompt is empty, too long, or holds a token id out of range; nothing
                was queued and other requests go on.
        """
        params = params or SamplingParams()
        text, token_ids = prompt_tokens(prompt, self._tokenizer, self._vocab_size)
        stream = None
        if params.detokenize and self._tokenizer is not None:
            stream = TextStream(self._tokenizer, params)
        elif params.stop:
            raise ValueError(
                f"stop strings {params.stop} need text, but the engine has no tokenizer "
                "(skip_tokenizer_init). Use stop_token_ids."
            )
        request = Request(request_id, token_ids, params, eos_token_ids=self._eos_token_ids)
        entry = LiveRequest(request, text, stream)
        if keep_logits:
            entry.logits = np.zeros((len(token_ids), self._vocab_size), np.float32)
        self.scheduler.add(request)
        self._entries[request_id] = entry

    def abort(self, request_id: str) -> bool:
        """End a request at any moment; False if it is unknown or already ended."""
        update = self.scheduler.abort(request_id)
        if update is None:
            return False
        self._late.append(self._delta(update))
        return True

    def is_finished(self, request_id: str) -> bool:
        """Whether a request has ended, for whatever reason.

        Raises:
            KeyError: the id is unknown, or was released before.
        """
        return self._entries[request_id].request.finished

    def release(self, request_id: str) -> tuple[RequestOutput, Float[np.ndarray, "T V"] | None]:
        """Hand out a request's whole result and forget it if it has finished.

        Raises:
            KeyError: the id is unknown, or was released before.
        """
        entry = self._entries[request_id]
        if entry.request.finished:
            self.forget(request_id)
        return entry.output(), entry.logits

    def forget(self, request_id: str) -> None:
        """Drop what is kept of a finished request; harmless if there is nothing."""
        self._entries.pop(request_id, None)
        # Its end is known now; a later request may take the id.
        self._late = [delta for delta in self._late if delta.request_id != request_id]

    def step(self) -> StepResult:
        """Run one step.

        A fault never escapes: the requests it names fail, the others go on (see ``faults``). An
        interrupt (Ctrl-C) does, after the step was undone: the next step recomputes.
        """
        started = time.perf_counter()
        deltas, self._late = self._late, []
        clock = PhaseClock(started)
        plan: StepPlan | None = None
        notes = self._notes = StepNotes()
        try:
            with clock.phase("schedule"):
                self._fault_hook("schedule", None)
                plan = self.scheduler.schedule()
            if plan is not None:
                new = self._run(plan, clock)
                deltas += new
                # A chunk alone is no progress: after a reset it is computed again.
                if new:
                    self._faults_without_progress = 0
        except StepFault as error:
            notes.fault = str(error)
            deltas += self._recover(plan, error)
        except BaseException:
            self._late = deltas + self._late
            self._lose_pool()
            raise
        wall_time = time.perf_counter() - started
        record = record_of(self.steps, plan, notes, clock.phases(), wall_time)
        self._learn(record)
        self.steps += 1
        return StepResult(deltas, record)

    def _run(self, plan: StepPlan, clock: PhaseClock) -> list[StreamDelta]:
        """Everything after planning."""
        scheduler, executor, notes = self.scheduler, self._executor, self._notes
        with clock.phase("pack"):
            self._fault_hook("pack", plan)
            served = notes.served = executor.serve(plan.cell, plan.useful_rows, plan.loop_steps)
            inputs = pack(served.layout, scheduler.limits, plan.rows)
            ends = loop_ends(scheduler.pages, scheduler.limits, plan) if served.loop else None
        with clock.phase("dispatch"):
            self._fault_hook("dispatch", plan)
            if ends is None:
                outputs = executor.run(served, inputs)
            else:
                outputs = executor.run_loop(served, inputs, ends)
        with clock.phase("device"):
            self._fault_hook("device", plan)
            wanted = {name: self._entries[name].logits for name in plan.request_ids}
            asked = any(one is not None for one in wanted.values())
            # A loop has no prompt rows.
            if asked and isinstance(outputs, StepOutputs):
                logits_of = partial(executor.logits, outputs)
                collect_logits(plan, served.layout, logits_of, wanted)
        with clock.phase("fetch"):
            self._fault_hook("fetch", plan)
            fetched = fetch(outputs, drafter=plan.drafter)
            notes.steps, notes.expert_load = fetched.steps, fetched.expert_load
        with clock.phase("commit"):
            self._fault_hook("commit", plan)
            updates = fetched.commit(scheduler, plan)
            # Only a loop has several updates of a request.
            single = updates if fetched.steps == 1 else joined(updates)
            deltas = {one.request_id: self._delta(one) for one in single}
            self._note_drafts(updates, deltas)
            return list(deltas.values())

    def _note_drafts(
        self, updates: Sequence[RequestUpdate], deltas: Mapping[str, StreamDelta]
    ) -> None:
        """Count what was verified; a draft behind a stop string is not among the accepted."""
        noted = []
        for update in updates:
            if not update.draft_token_ids:
                continue
            accepted = min(update.accepted, len(deltas[update.request_id].token_ids))
            verified = GroupDrafts(update.request_id, tuple(update.draft_token_ids), accepted)
            self._entries[update.request_id].count_drafts(verified)
            noted.append(verified)
        self._notes.drafts = tuple(noted)

    def _learn(self, record: StepRecord) -> None:
        """Count a step, and let the step-time model see one that ran as its cell's program."""
        if record.cell is None or record.fault is not None:
            return
        model, seconds = self.scheduler.step_time, record.wall_time / record.loop_steps
        rows = record.prefill_rows + record.decode_rows
        self.use.add(record.cell, rows, seconds, piecewise=record.mode == Mode.PIECEWISE)
        if record.mode == Mode.FULL:
            if isinstance(model, StepTimeModel):
                model.observe(record.cell, record.pairs, seconds)
            self.scheduler.drafting.policy.observe_step(
                record.cell, record.drafter, record.new_drafts, record.pairs, seconds
            )

    def _recover(self, plan: StepPlan | None, fault: StepFault) -> list[StreamDelta]:
        """Fail the culprits, keep everyone else.

        A fault that names nobody who is still here is taken for transient once; the second without
        a new token in between fails the requests of the step (or, while planning, all).
        """
        if fault.phase in POOL_LOST:
            self._lose_pool()
        elif plan is not None:
            self.scheduler.cancel(plan)
        error = f"step {self.steps} failed in phase {fault}"
        updates = self.scheduler.fail(fault.request_ids, error)
        self._faults_without_progress += 1
        if not updates and self._faults_without_progress >= 2:
            everyone = plan.request_ids if plan is not None else tuple(self._entries)
            updates = self.scheduler.fail(everyone, error)
        if updates:
            self._faults_without_progress = 0
        return [self._delta(update) for update in updates]

    def _lose_pool(self) -> None:
        """Start over with an empty cache: the donated one may be gone, or half written."""
        self.scheduler.reset_pool()
        self._executor.reset()

    def _delta(self, update: RequestUpdate) -> StreamDelta:
        """The stream piece of an update, with its text."""
        entry = self._entries[update.request_id]
        request, tokens, text = entry.request, update.new_token_ids, ""
        if entry.stream is not None:
            try:
                text, kept = self._extend_text(request, entry.stream, tokens)
                tokens = tokens[:kept]
            except Exception as error:  # one request's text: the step was sound, the others go on
                self.scheduler.finish(request.request_id, FinishReason.ERROR)
                end_with_error(request, f"making text failed: {type(error).__name__}: {error}")
        reason = request.finish_reason
        return StreamDelta(
            request.request_id,
            text,
            tokens,
            None if reason is None else reason.value,
            request.stop_value,
            request.error,
        )

    def _extend_text(
        self, request: Request, stream: TextStream, tokens: Sequence[int]
    ) -> tuple[str, int]:
        """New text, and how many tokens stay; ends the request at a completed stop string."""
        ended = request.finish_reason is FinishReason.STOP
        text, kept = stream.push(tokens, ended=ended)
        if stream.matched is not None:
            self.scheduler.finish(request.request_id, FinishReason.STOP)
            end_at_stop_string(request, stream.matched, len(tokens) - kept)
        elif request.finished:
            text += stream.finish()
        return text, kept
