"""Pure decode steps: their time, the host's part of it, and the drafter's."""

import statistics
import time
from collections.abc import Iterable, Sequence
from unittest import mock

import numpy as np

from bucketing.cell import Cell
from bucketing.step_inputs import StepInputs
from glm_jax import LLM, SamplingParams
from glm_jax.engine.modes import Mode, Served
from glm_jax.engine.outputs import StepRecord
from glm_jax.engine.runner import Runner
from scripts.bench_host import HOST_PHASES

# Steps of either kind that are timed for the drafter's share.
REPLAYS = 20


def full_decodes(records: Iterable[StepRecord], groups: int, width: int) -> list[StepRecord]:
    """The steps in which all groups decode all their rows, as one program."""
    return [
        record
        for record in records
        if record.kind == "decode"
        and record.mode == Mode.FULL
        and record.cell == Cell(0, groups, width)
        and record.decode_rows == groups * width
    ]


def step_seconds(records: Sequence[StepRecord]) -> float:
    """The median time of steps."""
    return statistics.median(record.wall_time for record in records)


def host_seconds(records: Sequence[StepRecord]) -> dict[str, float]:
    """The median time that the host spends on a step in every phase, and in all of them together.

    The wait for the device is left out. On a CPU the program begins during the dispatch and shares
    the processors with it: ``scripts.bench_host`` measures without that.
    """
    spent = {phase: [getattr(record.phases, phase) for record in records] for phase in HOST_PHASES}
    spent["all"] = [sum(phases) for phases in zip(*spent.values(), strict=True)]
    return {phase: statistics.median(seconds) for phase, seconds in spent.items()}


def drafter_share(llm: LLM, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """The part of a step's time that the drafter takes, its later passes included.

    One packed step is replayed with the drafter and without it, in turn. The requests are dropped
    afterwards, since the device's state has left them.

    Args:
        llm: makes drafts; idle.
        prompts: one for each group of the step.
        tokens: that each of the requests may generate; they hold the pages of the replays.
    """
    engine, runner = llm.engine, llm.runner
    names = [f"replayed-{index}" for index in range(len(prompts))]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(name, prompt, params)
    width = llm.config.num_drafts + 1
    with mock.patch.object(runner, "run", wraps=runner.run) as run:
        while not full_decodes([engine.step().record], len(prompts), width):
            pass
    served, inputs = run.call_args.args[:2]
    without = inputs._replace(drafter=np.zeros_like(inputs.drafter))
    times: tuple[list[float], list[float]] = [], []
    for _ in range(REPLAYS):
        for kept, replayed in zip(times, (inputs, without), strict=True):
            kept.append(_replay(runner, served, replayed))
    for name in names:
        engine.abort(name)
        engine.forget(name)
    drafting, verifying = map(statistics.median, times)
    return 1 - verifying / drafting


def _replay(runner: Runner, served: Served, inputs: StepInputs) -> float:
    """Seconds of a step until its tokens and drafts are on the host."""
    started = time.perf_counter()
    outputs = runner.run(served, inputs)
    for drawn in (outputs.group_tokens, outputs.drafts):
        np.asarray(drawn)
    return time.perf_counter() - started
