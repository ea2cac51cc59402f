"""The scheduler: decides every step's rows, pages and slots, and takes its results back.

Per step: `schedule()` -> StepPlan, then `commit(plan, ...)` once its outputs are known, or
`cancel(plan)` if it never reached the device, or `reset_pool()` if the device state was lost.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Integer

from bucketing.grid import Grid
from bucketing.loop_inputs import LoopOutputs
from bucketing.step_time import RowEquivalents, StepTime
from glm_jax.engine.admission import check_queue, check_request
from glm_jax.engine.chunking import Choice, Decodes, Rules, choose_pieces
from glm_jax.engine.config import EngineConfig
from glm_jax.engine.decode_rows import choose_decodes
from glm_jax.engine.draft_policy import DraftPolicy
from glm_jax.engine.drafting import Drafting, policy_of
from glm_jax.engine.looping import choose_loop, loop_results
from glm_jax.engine.pages import PagePool
from glm_jax.engine.placement import place
from glm_jax.engine.plan import Occupancy, StepPlan
from glm_jax.engine.plan_rows import pages_told, write_plan
from glm_jax.engine.prefix import PrefixCache
from glm_jax.engine.request import FinishReason, Request, RequestStatus
from glm_jax.engine.request_book import RequestBook
from glm_jax.engine.request_update import RequestUpdate, apply_result, follow
from glm_jax.engine.residents import Residents
from glm_jax.engine.results import Result, read_results
from glm_jax.engine.waiting import WaitingQueue


class Scheduler:
    """Queues, pages and slots of one attention rank.

    Decode first: a decoding request gets its rows in every step (mixed policy). Then running
    prefills in order of admission, then the waiting ones in order of arrival. When a decode finds
    no page, the request admitted last loses its pages and recomputes them later; its tokens stay.
    With scheduling_policy "priority" the lowest value comes first everywhere, then who came first.

    Attributes:
        config: The engine's options.
        grid: The cells a step can use.
        step_time: Predicts the time of a step; cuts and places prefill rows.
        pages: The pool of the rank.
        prefix: Finds and publishes its pages.
        waiting: Requests without a slot, next first.
        drafting: Decides which drafts are made.
        preemptions: How often a request lost its pages to another.
        pool_resets: How often the whole pool was lost.
    """

    def __init__(
        self,
        config: EngineConfig,
        grid: Grid,
        pages: PagePool,
        step_time: StepTime | None = None,
        *,
        draft_policy: DraftPolicy | None = None,
        drafts_write_ahead: bool = False,
    ) -> None:
        """Start empty.

        Args:
            config: The engine's options.
            grid: The cells a step can use.
            pages: All free.
            step_time: Without it a step costs its rows.
            draft_policy: How many drafts to make; by default as the config says.
            drafts_write_ahead: Whether making drafts writes positions behind a step's rows (models
                without `index_share_for_mtp_iteration`).
        """
        self.config = config
        self.grid = grid
        self.pages = pages
        self.step_time = step_time or RowEquivalents()
        policy = draft_policy or policy_of(config, grid, self.step_time)
        self.drafting = Drafting(policy, pages, writes_ahead=drafts_write_ahead)
        self.limits = config.limits()
        by_priority = config.scheduling_policy == "priority"
        self.prefix = PrefixCache(
            pages, enabled=config.enable_prefix_caching, drafts=config.num_drafts > 0
        )
        self.waiting = WaitingQueue(by_priority=by_priority)
        self.preemptions = 0
        self.pool_resets = 0
        self._residents = Residents(
            pages, self.prefix, config.max_num_seqs, by_priority=by_priority
        )
        self._book = RequestBook(config.seed)
        self._in_flight: StepPlan | None = None
        self._last_step_prefilled = False
        self._preempted: list[str] = []  # while planning the step at hand
        # Prompts that could have ended in the last planned step, but wait for a better fit.
        self._held: frozenset[str] = frozenset()

    # Requests come and go.

    @property
    def running(self) -> Sequence[Request]:
        """Requests with a slot, first served first."""
        return self._residents.requests

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return len(self._book) > 0

    @property
    def num_unfinished(self) -> int:
        """How many requests wait or run."""
        return len(self._book)

    def get(self, request_id: str) -> Request | None:
        """Return an unfinished request."""
        return self._book.get(request_id)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestRefusedError: It can never run: empty, too long for max_model_len or the pool,
                or its id is in use. Nothing was queued.
            QueueFullError: As many wait as may; nothing was queued.
        """
        check_request(request, self.config, self.pages, self._book)
        check_queue(request, self.config, len(self.waiting))
        self._book.add(request)
        self.waiting.add(request)

    def abort(self, request_id: str) -> RequestUpdate | None:
        """End a request at any moment; None if the id is unknown or ended, so twice is harmless.

        If a step with it is in flight, that step's result is dropped, and its pages and slot are
        free only after the step, which still writes to them.
        """
        return self.finish(request_id, FinishReason.ABORT)

    def finish(
        self,
        request_id: str,
        reason: FinishReason | str,
        *,
        stop_value: int | str | None = None,
        error: str | None = None,
    ) -> RequestUpdate | None:
        """End a request from outside, for example at a stop string; None if it is not running."""
        request = self._book.get(request_id)
        if request is None:
            return None
        request.stop_value = stop_value
        request.error = error
        self._end(request, FinishReason(reason))
        return RequestUpdate(request, [], request.finish_reason)

    def expire(self, now: float) -> list[RequestUpdate]:
        """End the requests whose deadline has passed, wherever they are."""
        error = "its deadline passed before it ended; give it more time, or ask for fewer tokens"
        late = self._book.expired(now)
        updates = (self.finish(name, FinishReason.ABORT, error=error) for name in late)
        return [update for update in updates if update is not None]

    def fail(self, request_ids: Iterable[str], error: str) -> list[RequestUpdate]:
        """End the named requests with an error; the others are not touched."""
        updates = (self.finish(name, FinishReason.ERROR, error=error) for name in request_ids)
        return [update for update in updates if update is not None]

    def _end(self, request: Request, reason: FinishReason) -> None:
        """Take a request out of the queues and free what it held, after a step in flight."""
        if request.status is RequestStatus.RUNNING:
            self._residents.leave(request, in_flight=self._in_flight is not None)
        else:
            self.waiting.remove(request)
        self._book.remove(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason

    # One step.

    def schedule(self) -> StepPlan | None:
        """Decide the next step; None when no request is waiting or running.

        Until the plan is committed the device is taken to know nothing of it, so a cancelled plan
        costs nothing: the next one carries the same resets and page updates again.

        Raises:
            RuntimeError: The last plan was neither committed nor cancelled.
        """
        if self._in_flight is not None:
            raise RuntimeError(
                f"a step is in flight ({self._in_flight.kind}, cell "
                f"{tuple(self._in_flight.cell)}). Commit or cancel it before the next one."
            )
        if not self.has_unfinished:
            return None
        self._preempted.clear()
        queried = self.prefix.counts.queried_tokens
        decodes, choice = self._choose()
        pieces = choice.pieces
        assert decodes.requests or pieces, (
            f"no rows for {self.running=} {self.waiting=} {self.pages.free=}"
        )
        placement = place(self.grid, self.limits, self.step_time, decodes, pieces)
        cached = self._admit(choice)
        for piece in pieces:
            self.pages.extend(piece.request.pages, piece.start + piece.rows)
        following = self.drafting.decide(decodes, pieces, self.running)
        idle = len(self.running) + len(self.waiting) - len(decodes.requests)
        looping = choose_loop(self.config, self.step_time, placement, decodes, idle)
        if looping.steps > 1:
            following = looping.grow(self.pages, self.limits, decodes, following)
        plan = write_plan(self.pages, placement, decodes.requests, following)
        self._in_flight = plan = dataclasses.replace(
            plan,
            loop_steps=looping.steps,
            loop_reason=looping.reason,
            cached_tokens=cached,
            queried_tokens=self.prefix.counts.queried_tokens - queried,
            prefix_waits=choice.prefix_waits,
            declined=choice.declined,
            preempted=tuple(self._preempted),
            predicted=self.step_time.predict(plan.cell, plan.pairs),
            occupancy=Occupancy(
                len(self.waiting), len(self.running), self.pages.free, self.pages.cached
            ),
        )
        return plan

    def _choose(self) -> tuple[Decodes, Choice]:
        """Return who decodes and which prefill rows are computed, by the step policy."""
        if self.config.step_policy == "mixed":
            decodes = choose_decodes(self._residents.requests, self.pages, self._preempt)
            return decodes, self._choose_pieces(decodes)
        if self.config.step_policy == "prefill_first" or not self._last_step_prefilled:
            choice = self._choose_pieces(Decodes())
            if choice.pieces:
                return Decodes(), choice.unmixed([r for r in self.running if r.decoding])
        decodes = choose_decodes(self._residents.requests, self.pages, self._preempt)
        if decodes.requests:
            others = [r for r in (*self.running, *self.waiting) if not r.decoding]
            return decodes, Choice().unmixed(others)
        return decodes, self._choose_pieces(decodes)

    def _choose_pieces(self, decodes: Decodes) -> Choice:
        """Return the prefill rows; a step that preempted admits nobody."""
        waiting = tuple(self.waiting)
        # Together with all that run and wait, as far as there are slots.
        together = min(self.config.max_num_seqs, len(self.running) + len(waiting))
        drafter = self.drafting.policy.would_draft(together)
        rules = Rules(self.config, self.grid, self.pages, self.step_time, self.prefix, drafter)
        admit = not self._preempted
        choice = choose_pieces(rules, decodes, self.running, waiting, self._held, admit=admit)
        self._held = choice.held
        return choice

    def _admit(self, choice: Choice) -> int:
        """Give slots to the waiting requests of a choice; return their tokens found in the cache.

        All cached pages are taken before anybody is given a new one, which may evict one.
        """
        found = 0
        for request in choice.overtaken:
            request.overtaken += 1
        for piece in choice.pieces:
            request = piece.request
            if request.slot is not None:
                continue
            together = min(self.config.max_num_seqs, len(self.running) + len(self.waiting))
            self.waiting.remove(request)
            self.drafting.policy.admit(request, together)
            self._residents.admit(request, piece.cached)
            found += piece.start
        return found

    def _preempt(self, request: Request) -> None:
        """Take a running request's pages and slot; it waits for its turn to be recomputed."""
        self.preemptions += 1
        self._preempted.append(request.request_id)
        request.preemptions += 1
        self._residents.leave(request, in_flight=False)
        self._requeue(request)

    def _requeue(self, request: Request) -> None:
        """Let a request wait again, its tokens kept, its rows to be recomputed."""
        request.status = RequestStatus.PREEMPTED
        request.computed = 0
        request.prefill_end = request.length
        request.draft_token_ids = ()
        self.waiting.add(request)

    def commit(
        self,
        plan: StepPlan,
        chunk_tokens: Integer[np.ndarray, "ranks J"],
        group_tokens: Integer[np.ndarray, "ranks G Q"],
        group_accepted: Integer[np.ndarray, "ranks G"],
        drafts: Integer[np.ndarray, "ranks R k"] | None = None,
    ) -> list[RequestUpdate]:
        """Take the outputs of a step: append tokens, end requests, free their pages and slots.

        Args:
            plan: The step in flight.
            chunk_tokens: Token drawn after each chunk.
            group_tokens: Tokens drawn at the rows of each group.
            group_accepted: Accepted drafts of each group.
            drafts: Drafts made behind each chunk, then each group; None where none were planned.

        Returns:
            One update per request that drew tokens and was not aborted meanwhile, in plan order.

        Raises:
            RuntimeError: `plan` is not in flight, or the outputs cannot be its outputs; nothing
                was changed.
        """
        drawn = chunk_tokens, group_tokens, group_accepted
        drawn = drawn if drafts is None else (*drawn, drafts)
        return self.commit_parts(plan, [(plan, drawn)])

    def commit_parts(
        self, plan: StepPlan, parts: Iterable[tuple[StepPlan, Sequence[np.ndarray]]]
    ) -> list[RequestUpdate]:
        """Take the outputs of a step that ran as several programs; as `commit` does.

        Args:
            plan: The step in flight.
            parts: The plan of each program, and what it drew, in the order `commit` takes it.
        """
        self._check_in_flight(plan)
        results = [result for part, drawn in parts for result in read_results(part, *drawn)]
        self._land()
        return self._apply(plan, results)

    def commit_loop(self, plan: StepPlan, outputs: LoopOutputs) -> list[RequestUpdate]:
        """Take the outputs of a loop, step by step; returns and raises as `commit` does.

        Args:
            plan: The loop's first step, in flight.
            outputs: Fetched.
        """
        self._check_in_flight(plan)
        updates: list[RequestUpdate] = []
        for current, results in loop_results(plan, outputs):
            if current is plan:
                self._land()
            updates += self._apply(current, results)
        return updates

    def _apply(self, plan: StepPlan, results: Iterable[Result]) -> list[RequestUpdate]:
        """Advance the requests of a step."""
        self._last_step_prefilled = plan.kind != "decode"
        updates = []
        for result in results:
            request = result.entry.request
            if request.finished:
                # Ended meanwhile. In a loop it goes on until the loop ends.
                follow(result)
                continue
            request.synced_pages = pages_told(self.pages, result.entry)
            update = apply_result(result)
            self.prefix.publish(request)
            if update is None:
                continue
            updates.append(update)
            if update.draft_token_ids:
                self.drafting.policy.observe(request, update.offered, update.accepted)
            if request.finish_reason is not None:
                self._end(request, request.finish_reason)
        return updates

    def cancel(self, plan: StepPlan) -> None:
        """Drop a plan that never reached the device; its requests keep slots, pages and tokens."""
        self._check_in_flight(plan)
        self._land()

    def reset_pool(self) -> None:
        """Start over with an empty pool after the device's cache and slots were lost.

        Everyone running goes back to the queue, oldest first, to be recomputed; tokens stay. The
        step in flight, if any, is dropped.
        """
        self.pool_resets += 1
        self._in_flight = None
        for request in self._residents.clear():
            self._requeue(request)

    def _check_in_flight(self, plan: StepPlan) -> None:
        if plan is not self._in_flight:
            raise RuntimeError(
                f"plan {tuple(plan.cell)} is not in flight. Commit or cancel each plan once, in "
                "the order of schedule()."
            )

    def _land(self) -> None:
        """The step in flight is over."""
        self._in_flight = None
        self._residents.land()
