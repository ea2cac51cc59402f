"""Runs a planned step on an executor: as one program, a decode loop, or two halves."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from bucketing.grid import Grid
from bucketing.loop_inputs import LoopInputs, LoopOutputs
from bucketing.pack import pack
from bucketing.step_inputs import Limits, StepInputs, StepOutputs
from glm_jax.engine.config import EngineConfig
from glm_jax.engine.control_book import ControlBook
from glm_jax.engine.executor import Executor
from glm_jax.engine.fetched import Fetched, fetch
from glm_jax.engine.head_rows import collect_logits, collect_logprobs
from glm_jax.engine.live_request import LiveRequest
from glm_jax.engine.logprob import PositionLogprobs
from glm_jax.engine.looping import loop_ends
from glm_jax.engine.modes import Served
from glm_jax.engine.pages import PagePool
from glm_jax.engine.plan import StepPlan
from glm_jax.engine.split_step import Halves, split_step


class Packed(NamedTuple):
    """What one dispatch takes.

    Attributes:
        plan: The step, or the half of it.
        served: How it runs.
        inputs: Packed for the layout it runs in.
        ends: What ends it, if it is a loop.
    """

    plan: StepPlan
    served: Served
    inputs: StepInputs
    ends: LoopInputs | None


class Execution:
    """The way of a plan through an executor, in the phases of a step."""

    def __init__(
        self, config: EngineConfig, grid: Grid, pages: PagePool, executor: Executor
    ) -> None:
        """Take what every step needs.

        Args:
            config: The engine's options.
            grid: Its cells.
            pages: The pool of the rank.
            executor: Runs the programs.
        """
        self._splits = config.split_steps
        self._grid = grid
        self._limits: Limits = config.limits()
        self._pages = pages
        self._executor = executor
        self._controls = ControlBook(self._limits)
        self._resets = executor.resets

    def halves(self, plan: StepPlan) -> Halves:
        """Return the plans that a step runs as."""
        return split_step(plan, self._grid, self._limits) if self._splits else Halves((plan,))

    def pack(self, plan: StepPlan) -> Packed:
        """Choose how a plan runs, and pack it; nothing has reached the device."""
        served = self._executor.serve(plan.cell, plan.useful_rows, plan.loop_steps)
        inputs = pack(served.layout, self._limits, plan.rows)
        ends = loop_ends(self._pages, self._limits, plan) if served.loop else None
        return Packed(plan, served, inputs, ends)

    def dispatch(self, plan: StepPlan, parts: Sequence[Packed]) -> list[StepOutputs | LoopOutputs]:
        """Start the programs of a step; their outputs are on the device."""
        executor = self._executor
        # Not before: from here on a fault loses the slots, so the book and they stay in step.
        executor.control(self._controls.updates(plan))
        return [
            executor.run(part.served, part.inputs)
            if part.ends is None
            else executor.run_loop(part.served, part.inputs, part.ends)
            for part in parts
        ]

    def wait(self, outputs: Sequence[StepOutputs | LoopOutputs]) -> None:
        """Wait for the programs; what fails on the device fails here."""
        for made in outputs:
            # Small, kept by the array once it is here, and there with all the others.
            np.asarray(made.expert_load)

    def fetch(
        self, parts: Sequence[Packed], outputs: Sequence[StepOutputs | LoopOutputs]
    ) -> Fetched:
        """Fetch what the programs drew."""
        return fetch([(part.plan, made) for part, made in zip(parts, outputs, strict=True)])

    def read_head(
        self,
        parts: Sequence[Packed],
        outputs: Sequence[StepOutputs | LoopOutputs],
        fetched: Fetched,
        user: Callable[[str], LiveRequest | None],
    ) -> dict[str, Sequence[PositionLogprobs]]:
        """Collect what a step's requests want of its rows.

        Args:
            parts: The step.
            outputs: Its outputs, on the device.
            fetched: What was drawn.
            user: Gives a request that wants something by its id, None for others.

        Returns:
            By request id, the log-probabilities of the tokens drawn.
        """
        found: dict[str, Sequence[PositionLogprobs]] = {}
        for part, made, drawn in zip(parts, outputs, fetched.parts, strict=True):
            # A loop has no prompt rows, and none of its requests wants log-probabilities.
            if isinstance(made, LoopOutputs):
                continue
            users = [one for one in map(user, part.plan.request_ids) if one is not None]
            found |= self._read_rows(part, made, drawn.results, users)
        return found

    def _read_rows(
        self,
        part: Packed,
        outputs: StepOutputs,
        results: Callable[[], list],
        users: Sequence[LiveRequest],
    ) -> Mapping[str, Sequence[PositionLogprobs]]:
        """Collect what is wanted of the rows of one program."""
        plan, layout = part.plan, part.served.layout
        logits: dict[str, Float[np.ndarray, "T V"]] = {
            one.request.request_id: one.logits for one in users if one.logits is not None
        }
        if logits:
            collect_logits(plan, layout, partial(self._executor.logits, outputs), logits)
        wanted = {one.request.request_id: one.logprobs for one in users if one.logprobs is not None}
        if not wanted:
            return {}
        logprobs_of = partial(self._executor.logprobs, outputs)
        return collect_logprobs(plan, layout, results(), logprobs_of, wanted)

    @property
    def device_was_reset(self) -> bool:
        """Whether somebody else reset the device: another engine on it, or a tool."""
        return self._executor.resets != self._resets

    def reset(self) -> None:
        """Start over with an empty device: the donated cache may be gone, or half written."""
        if not self.device_was_reset:
            self._executor.reset()
        self._resets = self._executor.resets
        self._controls.clear()
