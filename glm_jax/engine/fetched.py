"""What the programs of a step drew, fetched to the host."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bucketing.loop_inputs import LoopOutputs
from bucketing.step_inputs import StepOutputs
from glm_jax.engine.plan import StepPlan
from glm_jax.engine.request_update import RequestUpdate
from glm_jax.engine.results import Result, read_results
from glm_jax.engine.scheduler import Scheduler


class Drawn(NamedTuple):
    """Host arrays of one program.

    Attributes:
        plan: What it ran.
        arrays: Of a step, in the order `Scheduler.commit` takes them; of a loop, all its lines.
    """

    plan: StepPlan
    arrays: tuple[np.ndarray, ...] | LoopOutputs

    def results(self) -> list[Result]:
        """Read them back into tokens per request, in plan order; those of a step."""
        assert not isinstance(self.arrays, LoopOutputs), "a loop has a plan for each of its steps"
        return read_results(self.plan, *self.arrays)


class Fetched(NamedTuple):
    """What a step drew.

    Attributes:
        parts: One for each of its programs: one, or two halves.
        steps: Steps that ran; more than one in a loop.
        expert_load: Most rows of an expert in any program or step, and their mean over them.
    """

    parts: tuple[Drawn, ...]
    steps: int
    expert_load: tuple[float, float]

    def commit(self, scheduler: Scheduler, plan: StepPlan) -> list[RequestUpdate]:
        """Give the results to the scheduler."""
        first = self.parts[0].arrays
        if isinstance(first, LoopOutputs):
            return scheduler.commit_loop(plan, first)
        return scheduler.commit_parts(plan, self.parts)


def fetch(parts: Sequence[tuple[StepPlan, StepOutputs | LoopOutputs]]) -> Fetched:
    """Wait for the device and fetch what the host needs.

    Args:
        parts: The plan of each program and its outputs, on the device; a loop is alone.
    """
    first_plan, first = parts[0]
    if isinstance(first, LoopOutputs):
        lines = LoopOutputs(*map(np.asarray, first))
        steps = int(lines.steps[0])
        load = lines.expert_load[0, :steps]
        highest, mean = float(load[:, 0].max()), float(load[:, 1].mean())
        return Fetched((Drawn(first_plan, lines),), steps, (highest, mean))
    drawn, loads = [], []
    for plan, outputs in parts:
        assert isinstance(outputs, StepOutputs), "a loop is not one of two halves"
        arrays = outputs.chunk_tokens, outputs.group_tokens, outputs.group_accepted
        if plan.drafter:
            arrays = *arrays, outputs.drafts
        drawn.append(Drawn(plan, tuple(map(np.asarray, arrays))))
        loads.append(np.asarray(outputs.expert_load)[0].tolist())
    most, means = zip(*loads, strict=True)
    return Fetched(tuple(drawn), 1, (max(most), sum(means) / len(means)))
