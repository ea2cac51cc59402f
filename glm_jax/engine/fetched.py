"""What a dispatch drew, fetched to the host."""

from typing import NamedTuple

import numpy as np

from bucketing.loop_inputs import LoopOutputs
from bucketing.step_inputs import StepOutputs
from glm_jax.engine.plan import StepPlan
from glm_jax.engine.request_update import RequestUpdate
from glm_jax.engine.results import Result, read_results
from glm_jax.engine.scheduler import Scheduler


class Fetched(NamedTuple):
    """Host arrays of a step, or of a decode loop.

    Attributes:
        drawn: Of a step, in the order `Scheduler.commit` takes them; of a loop, all its lines.
        steps: Steps that ran.
        expert_load: Most rows of an expert in any step, and their mean over steps.
    """

    drawn: tuple[np.ndarray, ...] | LoopOutputs
    steps: int
    expert_load: tuple[float, float]

    def results(self, plan: StepPlan) -> list[Result]:
        """Read them back into tokens per request, in plan order; those of a step."""
        assert not isinstance(self.drawn, LoopOutputs), "a loop has a plan for each of its steps"
        return read_results(plan, *self.drawn)

    def commit(self, scheduler: Scheduler, plan: StepPlan) -> list[RequestUpdate]:
        """Give the results to the scheduler."""
        if isinstance(self.drawn, LoopOutputs):
            return scheduler.commit_loop(plan, self.drawn)
        return scheduler.commit(plan, *self.drawn)


def fetch(outputs: StepOutputs | LoopOutputs, *, drafter: bool) -> Fetched:
    """Wait for the device and fetch what the host needs.

    Args:
        outputs: Of a step or a loop, on the device.
        drafter: Whether drafts were made.
    """
    if isinstance(outputs, LoopOutputs):
        lines = LoopOutputs(*map(np.asarray, outputs))
        steps = int(lines.steps[0])
        load = lines.expert_load[0, :steps]
        return Fetched(lines, steps, (float(load[:, 0].max()), float(load[:, 1].mean())))
    drawn = outputs.chunk_tokens, outputs.group_tokens, outputs.group_accepted
    if drafter:
        drawn = *drawn, outputs.drafts
    most, mean = np.asarray(outputs.expert_load)[0].tolist()
    return Fetched(tuple(map(np.asarray, drawn)), 1, (most, mean))
