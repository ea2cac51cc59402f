"""Drives the real scheduler, page pool and grid by a trace, with step times from a model.

Only the device is missing: a step takes what the model predicts, what it generates only tells that
step from others, and of a group's drafts a fixed share is accepted. A request ends as at EOS, so
nobody knows in advance. Time without work is skipped. Prompts begin alike where the trace says so,
and only then.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from bucketing.cell import Cell
from bucketing.grid import Grid
from bucketing.step_rows import StepRows
from bucketing.step_time import StepTime
from glm_jax.engine.config import EngineConfig
from glm_jax.engine.draft_policy import FixedDrafts
from glm_jax.engine.pages import PagePool
from glm_jax.engine.plan import StepPlan
from glm_jax.engine.request import Request
from glm_jax.engine.scheduler import Scheduler
from glm_jax.sampling.params import SamplingParams
from glm_jax.simulate.traces import Arrival


class Speculation(NamedTuple):
    """How groups advance.

    Attributes:
        drafts: Draft tokens of every decoding request.
        acceptance: Tokens that a group emits per step on average: accepted drafts and the bonus.
    """

    drafts: int = 0
    acceptance: float | int = 1.0

    def accepted(self, turn: int, drafts: int) -> int:
        """Return the accepted drafts of a group in its `turn`; the average is exact over turns."""
        emitted = int((turn + 1) * self.acceptance) - int(turn * self.acceptance)
        return min(max(emitted - 1, 0), drafts)


class VirtualRun:
    """What happened.

    Attributes:
        steps: The rows of every step.
        seconds: The time of every step.
        now: Virtual seconds from the first arrival to the end.
        tokens: Tokens emitted.
        ttft: Seconds from arrival to the first token, per request in order of that token.
        tbt: Seconds between steps that gave a request tokens.
        cached: Prompt tokens found in the prefix cache, per request in order of its first token.
        prefix_waits: How often a request waited a step for a page that another was writing.
        preemptions: How often a request lost its pages.
    """

    def __init__(self) -> None:
        """Nothing yet."""
        self.steps: list[StepRows] = []
        self.seconds: list[float] = []
        self.now = 0.0
        self.tokens = 0
        self.ttft: list[float] = []
        self.tbt: list[float] = []
        self.cached: list[int] = []
        self.prefix_waits = 0
        self.preemptions = 0

    def quantiles(self, name: str, shares: Sequence[float] = (0.5, 0.99)) -> list[float]:
        """Return quantiles of "ttft" or "tbt" in seconds; zeros where nothing was measured."""
        values = getattr(self, name)
        return np.quantile(values, shares).tolist() if values else [0.0] * len(shares)


class VirtualTime:
    """An engine without a device.

    Example:
        VirtualTime(config, grid, H200StepTime(), Speculation(5, 3)).run(read_trace(path))
    """

    def __init__(
        self,
        config: EngineConfig,
        grid: Grid,
        step_time: StepTime,
        speculation: Speculation | None = None,
        *,
        pool: PagePool | None = None,
    ) -> None:
        """Start with nothing queued.

        Args:
            config: The engine's options.
            grid: The cells; those of `config` or others.
            step_time: Both what the scheduler plans by and what a step takes.
            speculation: None decodes one token per step.
            pool: By default as many pages as the options say.

        Raises:
            ValueError: A group of all drafts fits no decode width, or cannot emit so many tokens.
        """
        self.speculation = speculation or Speculation()
        drafts, acceptance = self.speculation
        if not 1 <= acceptance <= drafts + 1 or drafts >= grid.widths[-1]:
            raise ValueError(
                f"{drafts} drafts with {acceptance} tokens per step do not fit decode widths "
                f"{grid.widths}; tokens per step are from 1 to drafts + 1, which must fit the "
                "largest width."
            )
        self.step_time = step_time
        pool = pool or PagePool(config.pool_pages, config.page_size)
        policy = FixedDrafts(drafts)
        self.scheduler = Scheduler(config, grid, pool, step_time, draft_policy=policy)
        self._arrived: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._left: dict[str, int] = {}

    def run(self, arrivals: Iterable[Arrival]) -> VirtualRun:
        """Serve a trace to its end; request n is named rn.

        Raises:
            RequestRefusedError: A request can never run, for example because it is too long.
        """
        run, scheduler = VirtualRun(), self.scheduler
        queue = deque(enumerate(arrivals))
        while queue or scheduler.has_unfinished:
            if not scheduler.has_unfinished:
                run.now = max(run.now, queue[0][1].time)
            while queue and queue[0][1].time <= run.now:
                number, arrival = queue.popleft()
                self._add(f"r{number}", arrival)
            self._step(run)
        run.preemptions = scheduler.preemptions
        return run

    def _add(self, name: str, arrival: Arrival) -> None:
        # Room beyond the end, or the last groups would be narrower than those of a real engine.
        most = arrival.output + self.speculation.drafts + 1
        params = SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True)
        request = Request(name, arrival.tokens(), params)
        # Prompts that nothing is known of would all be alike.
        request.reads_prefix = bool(arrival.blocks)
        self.scheduler.add(request)
        self._arrived[name] = arrival.time
        self._left[name] = arrival.output

    def _step(self, run: VirtualRun) -> None:
        plan = self.scheduler.schedule()
        assert plan is not None, "unfinished requests always give a step"
        seconds = self.step_time.predict(plan.cell, plan.pairs)
        run.now += seconds
        run.steps.append(rows_of(plan))
        run.seconds.append(seconds)
        run.prefix_waits += plan.prefix_waits
        outputs = self._outputs(plan, len(run.steps))
        for update in self.scheduler.commit(plan, *outputs):
            name = update.request_id
            arrived = self._arrived.pop(name, None)
            if arrived is None:
                run.tbt.append(run.now - self._last[name])
            else:
                run.ttft.append(run.now - arrived)
                run.cached.append(update.request.num_cached_tokens or 0)
            self._last[name] = run.now
            left = self._left[name]
            new = min(len(update.new_token_ids), left)
            run.tokens += new
            self._left[name] = left - new
            if left == new:
                self.scheduler.finish(name, "stop")
                del self._last[name], self._left[name]

    @cached_property
    def _drawn(self) -> dict[Cell, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Arrays of drawn tokens and drafts by cell."""
        return {}

    def _outputs(self, plan: StepPlan, number: int) -> tuple[np.ndarray, ...]:
        """Return what the device would: tokens of chunks and groups, accepted and new drafts."""
        cell = plan.cell
        drawn = self._drawn.get(cell)
        if drawn is None:
            chunks = self.scheduler.limits.chunks(cell)
            tokens = np.zeros((1, chunks), np.int32)
            group_tokens = np.zeros((1, cell.groups, cell.width), np.int32)
            drafts = np.zeros((1, chunks + cell.groups, self.speculation.drafts), np.int32)
            drawn = self._drawn[cell] = tokens, group_tokens, drafts
        accepted = np.zeros((1, cell.groups), np.int32)
        accepted[0, : len(plan.group_entries)] = [
            self.speculation.accepted(number + (entry.request.slot or 0), entry.drafts)
            for entry in plan.group_entries
        ]
        chunk_tokens, group_tokens, drafts = drawn
        # Odd, as no prompt's; were they alike, the cache would find what follows equal prompts.
        chunk_tokens[:] = group_tokens[:] = 2 * number + 1
        return chunk_tokens, group_tokens, accepted, drafts


def rows_of(plan: StepPlan) -> StepRows:
    """Return the shape of a planned step."""
    groups = plan.group_entries
    prefill_rows, decode_rows, width = plan.prefill_rows, 0, 1
    for entry in groups:
        rows = entry.known + entry.drafts
        decode_rows += rows
        width = max(width, rows)
    return StepRows(plan.cell, prefill_rows, decode_rows, len(groups), width, plan.pairs)
