"""A batch of requests generated with the record of every step."""

import time
from collections.abc import Sequence
from typing import NamedTuple

from glm_jax.engine.engine import Engine
from glm_jax.engine.outputs import StepRecord
from glm_jax.sampling.params import SamplingParams


class Generation(NamedTuple):
    """What became of a batch.

    Attributes:
        tokens: new tokens of each request.
        times: when each of them was there, in seconds since the prompts were handed over.
        records: of all steps, in order.
    """

    tokens: list[list[int]]
    times: list[list[float]]
    records: list[StepRecord]

    @property
    def decode_rate(self) -> float:
        """Tokens per second from the moment all requests have a first token to the last of all."""
        begun = max(times[0] for times in self.times)
        ended = max(times[-1] for times in self.times)
        later = sum(moment > begun for times in self.times for moment in times)
        return later / (ended - begun)


def generate(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> Generation:
    """Run a batch to its end on an engine that has nothing else to do.

    Raises:
        RuntimeError: a step failed.
    """
    names = [f"speculation-{index}" for index in range(len(prompts))]
    made = Generation([[] for _ in names], [[] for _ in names], [])
    started = time.perf_counter()
    for name, prompt, param in zip(names, prompts, params, strict=True):
        engine.add_request(name, prompt, param)
    place = {name: index for index, name in enumerate(names)}
    while engine.has_unfinished:
        deltas, record = engine.step()
        moment = time.perf_counter() - started
        if record.fault is not None:
            raise RuntimeError(f"step {record.index} failed: {record.fault}")
        made.records.append(record)
        for delta in deltas:
            index = place[delta.request_id]
            made.tokens[index] += delta.token_ids
            made.times[index] += [moment] * len(delta.token_ids)
    for name in names:
        engine.forget(name)
    return made
