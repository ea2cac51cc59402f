"""Drives the real scheduler and pack against FakeDevice and checks every step's invariants."""

from collections import Counter
from random import Random

from engine.fake_loop import run_loop
from engine.fake_program import VOCABULARY, FakeDevice, tokens_alone

from bucketing.loop_inputs import LoopOutputs
from bucketing.pack import pack
from glm_jax.engine.config import EngineConfig
from glm_jax.engine.control_book import ControlBook
from glm_jax.engine.looping import loop_ends
from glm_jax.engine.pages import PagePool
from glm_jax.engine.plan import StepPlan
from glm_jax.engine.request import FinishReason, Request, RequestStatus, RowClass
from glm_jax.engine.scheduler import Scheduler
from glm_jax.sampling.params import SamplingParams
from glm_jax.sampling.request_controls import controls_of

# The tokens that begin and end a thinking part here.
THINK = (7, 8)


class Loop:
    """An engine loop without an engine; `step` checks what must hold in every step.

    Attributes:
        requests: Every request ever added, by id.
        outputs: The tokens that commits reported, by id.
        plans: Every plan, in order.
        loops: Decode loops that ran, and `loop_steps`, their steps.
        schedules: Calls of schedule; a loop that never ends fails instead of hanging.
    """

    def __init__(self, *, writes_ahead: bool = False, **options) -> None:
        self.config = EngineConfig(**options)
        self.writes_ahead = writes_ahead
        self.grid = self.config.grid()
        self.pool = PagePool(self.config.pool_pages, self.config.page_size)
        self.scheduler = Scheduler(
            self.config, self.grid, self.pool, drafts_write_ahead=writes_ahead
        )
        self.cells = set(self.grid.cells())
        self.device = self._device()
        self.controls = ControlBook(self.config.limits())
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.plans: list[StepPlan] = []
        self.schedules = 0
        self.loops = 0
        self.loop_steps = 0

    def _device(self) -> FakeDevice:
        return FakeDevice(
            self.config.limits(), self.config.pool_pages, writes_ahead=self.writes_ahead
        )

    def add(
        self, name, prompt, *, eos=(), priority=0, salt=None, deadline=None, **params
    ) -> Request:
        request = Request(
            name,
            prompt,
            SamplingParams(**params),
            eos_token_ids=eos,
            priority=priority,
            cache_salt=salt,
            deadline=deadline,
        )
        request.controls = controls_of(
            request.params, vocab_size=VOCABULARY, tokenizer=None, think_ids=THINK
        )
        self.scheduler.add(request)
        self.requests[name] = request
        self.outputs[name] = []
        return request

    def schedule(self) -> StepPlan | None:
        self.schedules += 1
        assert self.schedules < 5_000, "the loop does not come to an end"
        runnable = [r for r in self.scheduler.running if r.decoding]
        plan = self.scheduler.schedule()
        if plan is None:
            return None
        self.plans.append(plan)
        self.check_plan(plan, runnable)
        return plan

    def run(self, plan: StepPlan):
        """Pack and dispatch, after making stale every entry that holds no computed token."""
        inputs = pack(plan.cell, self.scheduler.limits, plan.rows)
        self.prepare(plan)
        if plan.loop_steps > 1:
            self.loops += 1
            ends = loop_ends(self.pool, self.scheduler.limits, plan)
            return run_loop(self.device, plan.cell, inputs, ends)
        outputs = self.device.program(plan.cell)(inputs)
        self.check_writes(plan)
        return outputs

    def prepare(self, plan: StepPlan) -> None:
        """Make stale what nobody may read, and tell the device the controls of a step."""
        held = [(r.pages, r.computed) for r in self.scheduler.running]
        published = [([page], self.config.page_size) for page in self.pool.published]
        self.device.keep_only(held + published)
        for update in self.controls.updates(plan):
            self.device.controls.update(update)

    def commit(self, plan: StepPlan, outputs):
        if isinstance(outputs, LoopOutputs):
            self.loop_steps += int(outputs.steps[0])
            updates = self.scheduler.commit_loop(plan, outputs)
        else:
            updates = self.scheduler.commit(plan, *outputs[:4])
        for update in updates:
            self.outputs[update.request_id] += update.new_token_ids
        self.check_state()
        return updates

    def step(self):
        plan = self.schedule()
        return None if plan is None else self.commit(plan, self.run(plan))

    def schedule_and_run(self) -> StepPlan:
        """Run one step and return its plan."""
        plan = self.schedule()
        assert plan is not None
        self.commit(plan, self.run(plan))
        return plan

    def finish(self, limit: int = 10_000) -> None:
        for _ in range(limit):
            if self.step() is None:
                return
        raise AssertionError(f"requests are still unfinished after {limit} steps")

    def lose_pool(self) -> None:
        """What a fault at or after dispatch does: cache and slots are gone."""
        self.scheduler.reset_pool()
        self.device = self._device()
        self.controls.clear()
        self.check_state()

    def check_plan(self, plan: StepPlan, runnable: list[Request]) -> None:
        assert plan.cell in self.cells
        (rows,) = plan.rows
        assert plan.prefill_rows <= self.config.max_num_batched_tokens
        assert len(plan.chunk_entries) == len(rows.chunks)
        assert len(plan.group_entries) == len(rows.groups)
        assert len(set(plan.request_ids)) == len(plan.request_ids)
        for entry in plan.entries:
            request = entry.request
            assert request.status is RequestStatus.RUNNING
            decoding = request.computed == request.length - 1 >= request.prefill_end
            assert entry.row_class is (RowClass.DECODE if decoding else RowClass.PREFILL)
            assert request.computed + entry.known <= request.length
            assert request.computed + entry.rows <= request.most_rows
            assert not entry.drafts or decoding
            assert not entry.new_drafts or (entry.sampled and plan.drafter)
            last = request.computed + entry.known == request.length
            assert entry.sampled == last, "sampled rows are exactly those of the last known token"
        served = {id(entry.request) for entry in plan.entries}
        if self.config.step_policy == "mixed":
            missed = [r for r in runnable if r.decoding and id(r) not in served]
            assert all(r.status is RequestStatus.PREEMPTED or r.finished for r in missed)
        else:
            assert plan.kind != "mixed"

    def check_writes(self, plan: StepPlan) -> None:
        """The step wrote exactly the entries of its rows, in pages of their owners."""
        size = self.config.page_size
        owned, ahead = [], []
        for entry in plan.entries:
            request = entry.request
            stop = request.computed + entry.rows
            for position in range(request.computed, stop + entry.rows_ahead):
                place = request.pages[position // size] * size + position % size
                (owned if position < stop else ahead).append(place)
        assert sorted(self.device.written) == sorted(owned)
        published = set(self.pool.published)
        for entry in owned:
            assert self.pool.references(entry // size) == 1, "a shared page is written"
            assert entry // size not in published, "a published page is written"
        assert set(self.device.ahead) <= {*owned, *ahead}
        assert self.writes_ahead or not ahead, "pages are held that nothing writes"

    def check_state(self) -> None:
        scheduler, pool = self.scheduler, self.pool
        held = Counter(page for request in scheduler.running for page in request.pages)
        assert all(len(set(request.pages)) == len(request.pages) for request in scheduler.running)
        assert all(pool.references(page) == count for page, count in held.items())
        assert set(pool.published) >= {page for page, count in held.items() if count > 1}
        assert 0 not in held
        assert pool.free + len(held) == pool.capacity
        slots = [request.slot for request in scheduler.running]
        assert sorted(slots + scheduler._residents.free_slots) == list(
            range(self.config.max_num_seqs)
        )
        for request in scheduler.running:
            assert request.computed <= len(request.pages) * pool.page_size
            assert request.computed < request.length <= request.max_length
            assert request.synced_pages <= len(request.pages)
            assert request.published * pool.page_size <= request.computed
        for request in scheduler.waiting:
            assert (request.computed, request.slot, request.pages) == (0, None, [])

    def check_idle(self) -> None:
        assert not self.scheduler.has_unfinished
        assert self.pool.free == self.pool.capacity
        assert sorted(self.scheduler._residents.free_slots) == list(range(self.config.max_num_seqs))
        assert not any(self.pool.references(page) for page in range(self.pool.num_pages))

    def expected(self, name: str) -> list[int]:
        request = self.requests[name]
        return tokens_alone(
            request.prompt_token_ids,
            request.params,
            seed=request.seed,
            eos=request.eos_token_ids,
            max_model_len=self.config.max_model_len,
            think=THINK,
        )

    def check_tokens(self, name: str) -> None:
        """A request that ended by itself has its tokens alone; another one has a prefix of them."""
        request, expected = self.requests[name], self.expected(name)
        assert self.outputs[name] == request.output_token_ids
        by_itself = request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if by_itself and not isinstance(request.stop_value, str):
            assert request.output_token_ids == expected
        else:
            assert request.output_token_ids == expected[: request.num_output_tokens]


def prompt_of(rng: Random, length: int) -> list[int]:
    """Random token ids; some repeat, so that token values alone do not tell positions apart."""
    return rng.choices(range(VOCABULARY), k=length)
