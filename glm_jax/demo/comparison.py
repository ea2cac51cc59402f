"""The same scenario under three step policies, on one executor with the same programs."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from glm_jax.demo.run import Run, play
from glm_jax.engine.config import EngineConfig
from glm_jax.engine.engine import Engine, Executor
from glm_jax.engine.outputs import StepRecord
from glm_jax.sampling.params import SamplingParams

POLICIES = ("prefill_first", "alternate", "mixed")


def turns(repeats: int) -> Iterator[str]:
    """Yield the policies to run: all of them per repeat, another one first each time.

    So a slow moment of the machine hits no policy more than the others.
    """
    for repeat in range(repeats):
        first = repeat % len(POLICIES)
        yield from POLICIES[first:] + POLICIES[:first]


class Comparison:
    """Runs the scenario under one policy after the other, each time on an empty pool."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        prompts: Sequence[Sequence[int]],
        *,
        vocab_size: int,
        max_tokens: int,
        watches: Sequence[Callable[[StepRecord], None]] = (),
    ) -> None:
        """Prepare; nothing runs yet.

        Args:
            config: Options of the engines; each run takes its own step policy.
            executor: Its programs are compiled.
            prompts: Token ids; the last one arrives while the others decode.
            vocab_size: Of the model.
            max_tokens: What each request generates.
            watches: Of the engine of every run; not of the warm-up.
        """
        self._config = config
        self._executor = executor
        self._prompts = prompts
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._watches = watches

    def warm_up(self) -> None:
        """Run every program once: the first execution of one is slower."""
        engine = self._engine("mixed")
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
        chunk = self._prompts[-1][: self._config.max_num_batched_tokens]
        # The first chunk finds nobody decoding, the second one does, and then both decode.
        for name in ("first", "second"):
            engine.add_request(name, chunk, params)
            engine.step()
        while engine.has_unfinished:
            engine.step()

    def run(self, policy: str, watch: Callable[[Run], None] | None = None) -> Run:
        """Run the scenario once.

        Args:
            policy: One of POLICIES.
            watch: Called after every step since the arrival with the run so far.
        """
        engine = self._engine(policy)
        engine.watches += self._watches
        return play(engine, self._prompts, self._max_tokens, watch)

    def _engine(self, policy: str) -> Engine:
        self._executor.reset()
        config = dataclasses.replace(self._config, step_policy=policy)
        return Engine(config, self._executor, vocab_size=self._vocab_size)
