"""The serving loop: schedule, pack, dispatch, fetch, commit - one call of ``step`` each.

For people who write their own loop; ``LLM`` is such a loop. Host-only apart from the executor.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from jaxtyping import Float

from bucketing.grid import Grid
from bucketing.grid_use import GridUse
from bucketing.step_time import StepTime, StepTimeModel
from glm_jax.engine.admission import QueueFullError
from glm_jax.engine.children import joined_output
from glm_jax.engine.config import EngineConfig
from glm_jax.engine.execution import Execution
from glm_jax.engine.executor import Executor
from glm_jax.engine.faults import POOL_LOST, FaultHook, StepFault, no_fault
from glm_jax.engine.intake import Ask, Intake
from glm_jax.engine.live_request import LiveRequest
from glm_jax.engine.logprob import PositionLogprobs
from glm_jax.engine.modes import Mode
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
from glm_jax.engine.request import FinishReason, Request
from glm_jax.engine.request_update import RequestUpdate, joined
from glm_jax.engine.scheduler import Scheduler
from glm_jax.engine.stopping import end_at_stop_string, end_with_error
from glm_jax.engine.text_stream import TextStream
from glm_jax.sampling.params import SamplingParams
from glm_jax.tokenizer import Tokenizer


class Engine:
    """Continuous batching over one executor.

    Attributes:
        scheduler: queues, pages and slots.
        steps: steps taken.
        use: how often each cell was used, and how full it was.
        clock: gives the seconds that timeouts are measured by.
        watches: called with the record of every step, once it is over.
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
        grid = grid or config.grid()
        self.scheduler = Scheduler(
            config, grid, pages, step_time, drafts_write_ahead=executor.drafts_write_ahead
        )
        self.steps = 0
        self.use = GridUse()
        self.clock: Callable[[], float] = time.monotonic
        self.watches: list[Callable[[StepRecord], None]] = []
        self._execution = Execution(config, grid, pages, executor)
        self._intake = Intake(
            config, vocab_size=vocab_size, eos_token_ids=eos_token_ids, tokenizer=tokenizer
        )
        self._fault_hook = fault_hook
        self._entries: dict[str, LiveRequest] = {}
        # Who wants something of the head program; in most steps nobody.
        self._head_users: dict[str, LiveRequest] = {}
        # The requests of each user's request: as many as it has completions.
        self._children: dict[str, list[LiveRequest]] = {}
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
        priority: int = 0,
        timeout: float | int | None = None,
        cache_salt: str | None = None,
    ) -> None:
        """Queue a request; with ``params.n`` above 1 all its completions, or none.

        Args:
            request_id: unique among unfinished requests.
            prompt: text (needs a tokenizer) or token ids.
            params: what to generate; defaults as in ``SamplingParams``.
            keep_logits: collect the float32 logits of all prompt rows.
            priority: lower is served first, where scheduling_policy is "priority".
            timeout: seconds from now after which it is ended, with finish reason "abort".
            cache_salt: it shares cached pages only with requests of the same salt.

        Raises:
            ValueError: the prompt is empty, too long, or holds a token id out of range; nothing
                was queued and other requests go on.
            QueueFullError: as many requests wait as may; likewise.
        """
        if request_id in self._children:
            raise ValueError(
                f"request id {request_id!r} is in use. Give each request its own id, or forget "
                "the finished one first."
            )
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout is {timeout!r}; allowed: None or seconds above 0.")
        deadline = None if timeout is None else self.clock() + timeout
        params = params or SamplingParams()
        ask = Ask(request_id, prompt, params, keep_logits, priority, deadline, cache_salt)
        entries = self._intake.requests(ask)
        for number, entry in enumerate(entries):
            try:
                self.scheduler.add(entry.request)
            except ValueError as error:
                for added in entries[:number]:
                    self.scheduler.abort(added.request.request_id)
                self._notes.refused += isinstance(error, QueueFullError)
                raise
        now = time.perf_counter()
        for entry in entries:
            entry.times.arrival = now
            self._notes.arrive(entry.request, now, 0 if entry.index else params.n)
            self._entries[entry.request.request_id] = entry
            if entry.reads_head:
                self._head_users[entry.request.request_id] = entry
        self._children[request_id] = entries

    def abort(self, request_id: str) -> bool:
        """End a request at any moment; False if it is unknown or already ended."""
        children = [entry.request.request_id for entry in self._children.get(request_id, ())]
        updates = [update for update in map(self.scheduler.abort, children) if update is not None]
        self._late += [self._delta(update) for update in updates]
        return bool(updates)

    def is_finished(self, request_id: str) -> bool:
        """Whether a request has ended, for whatever reason: all its completions.

        Raises:
            KeyError: the id is unknown, or was released before.
        """
        return all(entry.request.finished for entry in self._children[request_id])

    def completions(self, request_id: str) -> int:
        """How many completions a request has: its n.

        Raises:
            KeyError: the id is unknown, or was released before.
        """
        return len(self._children[request_id])

    def release(self, request_id: str) -> tuple[RequestOutput, Float[np.ndarray, "T V"] | None]:
        """Hand out a request's whole result and forget it if it has finished.

        Raises:
            KeyError: the id is unknown, or was released before.
        """
        entries = self._children[request_id]
        if self.is_finished(request_id):
            self.forget(request_id)
        outputs = [entry.output() for entry in entries]
        return joined_output(request_id, outputs), entries[0].logits

    def forget(self, request_id: str) -> None:
        """Drop what is kept of a finished request; harmless if there is nothing."""
        for entry in self._children.pop(request_id, ()):
            self._entries.pop(entry.request.request_id, None)
            self._head_users.pop(entry.request.request_id, None)
        # Its end is known now; a later request may take the id.
        self._late = [delta for delta in self._late if delta.request_id != request_id]

    def step(self) -> StepResult:
        """Run one step.

        A fault never escapes: the requests it names fail, the others go on (see ``faults``). An
        interrupt (Ctrl-C) does, after the step was undone: the next step recomputes.
        """
        started, cpu_before = time.perf_counter(), time.process_time()
        deltas, self._late = self._late, []
        clock = PhaseClock(started)
        plan: StepPlan | None = None
        notes = self._notes
        try:
            with clock.phase("schedule"):
                self._fault_hook("schedule", None)
                if self._execution.device_was_reset:
                    # No page holds what the prefix cache says, nor what requests computed.
                    self._lose_pool()
                deltas += map(self._delta, self.scheduler.expire(self.clock()))
                plan = self.scheduler.schedule()
            if plan is not None:
                self._note_admitted(plan, started)
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
        cpu_time = time.process_time() - cpu_before
        record = record_of(self.steps, plan, notes, clock.phases(), wall_time, started, cpu_time)
        # From here on what happens (an abort, an arrival) is the next step's news.
        self._notes = StepNotes()
        self._learn(record)
        self.steps += 1
        self._tell(record, deltas)
        return StepResult(deltas, record)

    def _tell(self, record: StepRecord, deltas: list[StreamDelta]) -> None:
        """Tell all watches of a step; if one raises, the caller sees it and no piece is lost."""
        try:
            for watch in self.watches:
                watch(record)
        except BaseException:
            self._late = deltas + self._late
            raise

    def _run(self, plan: StepPlan, clock: PhaseClock) -> list[StreamDelta]:
        """Everything after planning."""
        execution, notes = self._execution, self._notes
        with clock.phase("pack"):
            self._fault_hook("pack", plan)
            halves = execution.halves(plan)
            parts = [execution.pack(part) for part in halves.plans]
            notes.served, notes.split_reason = parts[0].served, halves.reason
            if len(parts) > 1:
                notes.halves = tuple(part.plan.cell for part in parts)
        with clock.phase("dispatch"):
            self._fault_hook("dispatch", plan)
            outputs = execution.dispatch(plan, parts)
        with clock.phase("device"):
            self._fault_hook("device", plan)
            execution.wait(outputs)
        with clock.phase("fetch"):
            self._fault_hook("fetch", plan)
            fetched = execution.fetch(parts, outputs)
            notes.steps, notes.expert_load = fetched.steps, fetched.expert_load
            logprobs: Mapping[str, Sequence[PositionLogprobs]] = {}
            if self._head_users:
                logprobs = execution.read_head(parts, outputs, fetched, self._head_users.get)
        with clock.phase("commit"):
            self._fault_hook("commit", plan)
            updates = fetched.commit(self.scheduler, plan)
            # Only a loop has several updates of a request.
            single = updates
            if fetched.steps > 1:
                single = joined(updates)
                notes.loop_rows = sum(1 + len(update.draft_token_ids) for update in updates)
            deltas = {
                one.request_id: self._delta(one, logprobs.get(one.request_id, ())) for one in single
            }
            self._note_drafts(updates, deltas)
            return list(deltas.values())

    def _note_admitted(self, plan: StepPlan, now: float) -> None:
        for rows in plan.entries:
            if rows.request.needs_reset:
                self._entries[rows.request_id].times.admit(now)

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
        if record.halves:
            # Not the time of any one cell.
            return
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
        self._execution.reset()

    def _delta(self, update: RequestUpdate, drawn: Sequence[PositionLogprobs] = ()) -> StreamDelta:
        """The stream piece of an update, with its text and what it keeps of ``drawn``."""
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
        self._notes.give(request.request_id, len(tokens), reason)
        if tokens:
            entry.times.give(time.perf_counter())
        # By position: one is made for every request of every step.
        ended = None if reason is None else reason.value
        stop, error = request.stop_value, request.error
        delta = StreamDelta(
            entry.parent_id, text, tokens, ended, stop, error, None, None, entry.index
        )
        return delta if entry.logprobs is None else entry.logprobs.added_to(delta, drawn)

    def _extend_text(
        self, request: Request, stream: TextStream, tokens: Sequence[int]
    ) -> tuple[str, int]:
        """New text, and how many tokens stay; ends the request at a completed stop string."""
        ended = request.finish_reason is FinishReason.STOP
        text, kept = stream.push(tokens, ended=ended)
        if stream.matched is None and request.finished:
            # Bytes that never became a character are one now, and may complete a stop string.
            text += stream.finish()
        if stream.matched is not None:
            self.scheduler.finish(request.request_id, FinishReason.STOP)
            end_at_stop_string(request, stream.matched, len(tokens) - kept)
        return text, kept
