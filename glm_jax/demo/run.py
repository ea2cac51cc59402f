"""One run of the scenario under one step policy, and what it records."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from glm_jax.demo.scenario import SETTLED_TOKENS
from glm_jax.engine.engine import Engine
from glm_jax.engine.outputs import StepRecord, StepResult
from glm_jax.sampling.params import SamplingParams

NEWCOMER = "new"


class Step(NamedTuple):
    """A step after the arrival.

    Attributes:
        record: What the engine says of it.
        end: When it ended, in seconds since the arrival.
        gaps: Seconds since the previous token, of each decoding request that got one now.
    """

    record: StepRecord
    end: float
    gaps: dict[str, float]

    @property
    def useful_rows(self) -> int:
        """Rows that some request asked for."""
        return self.record.prefill_rows + self.record.decode_rows

    @property
    def pad_rows(self) -> int:
        """Rows that fill the cell."""
        return self.record.prefill_pad_rows + self.record.decode_pad_rows


@dataclass
class Run:
    """A run of the scenario, from the arrival of the long prompt on.

    Its clock adds up the wall times of the steps, so what happens between steps (drawing a table)
    does not count. It starts when every decoding request has just got a token.

    Attributes:
        policy: The engine's step policy.
        requests: The decoding requests.
        steps: What happened.
        tokens: What every request generated, before the arrival too.
        first_token: When the newcomer got its first token, in seconds; None before.
    """

    policy: str
    requests: tuple[str, ...]
    steps: list[Step] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    first_token: float | None = None
    _last_token: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Seconds until the last step so far; at the end, until all requests are done."""
        return self.steps[-1].end if self.steps else 0.0

    def gaps(self, request: str) -> list[float]:
        """Return the seconds between one request's tokens; the first counts from the arrival."""
        return [step.gaps[request] for step in self.steps if request in step.gaps]

    @property
    def worst_gap(self) -> float:
        """The longest time any decoding request waited for a token, in seconds."""
        return max((gap for step in self.steps for gap in step.gaps.values()), default=0.0)

    @property
    def median_gap(self) -> float:
        """The median over all gaps of all decoding requests, in seconds."""
        return statistics.median(gap for step in self.steps for gap in step.gaps.values())

    def settle(self, result: StepResult) -> None:
        """Take a step before the arrival: only its tokens are kept."""
        _check(result)
        for delta in result.deltas:
            self.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)

    def add(self, result: StepResult) -> None:
        """Take a step after the arrival."""
        self.settle(result)
        end = self.total + result.record.wall_time
        gaps: dict[str, float] = {}
        for delta in result.deltas:
            if not delta.token_ids:
                continue
            if delta.request_id != NEWCOMER:
                gaps[delta.request_id] = end - self._last_token.get(delta.request_id, 0.0)
                self._last_token[delta.request_id] = end
            elif self.first_token is None:
                self.first_token = end
        self.steps.append(Step(result.record, end, gaps))


def play(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    watch: Callable[[Run], None] | None = None,
) -> Run:
    """Run the scenario on an engine that has nothing to do.

    The last prompt arrives when all others have SETTLED_TOKENS tokens. Everything is greedy and of
    fixed length, so that every policy has the same work.

    Args:
        engine: Its config says the policy.
        prompts: Token ids; the last is the long one.
        max_tokens: What each request generates.
        watch: Called after every step since the arrival.

    Raises:
        RuntimeError: A step failed, or a request did.
    """
    params = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
    )
    names = tuple(f"r{number}" for number in range(1, len(prompts)))
    run = Run(engine.config.step_policy, names)
    for name, prompt in zip(names, prompts[:-1], strict=True):
        engine.add_request(name, prompt, params)
    while min(len(run.tokens.get(name, ())) for name in names) < SETTLED_TOKENS:
        run.settle(engine.step())
    engine.add_request(NEWCOMER, prompts[-1], params)
    while engine.has_unfinished:
        run.add(engine.step())
        if watch is not None:
            watch(run)
    return run


def _check(result: StepResult) -> None:
    """A demo on a broken step would show nonsense."""
    if result.record.fault is not None:
        raise RuntimeError(f"step {result.record.index} failed: {result.record.fault}")
    for delta in result.deltas:
        if delta.error is not None:
            raise RuntimeError(f"request {delta.request_id} failed: {delta.error}")
