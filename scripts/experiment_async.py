"""The most that asynchronous stepping could gain: host work done while the device computes.

    python -m scripts.experiment_async [--batches 1 8] [--drafts 0 3] [--steps 120] [--rounds 5]

Planning step t + 1 while step t runs hides schedule, pack and commit behind the device at best. Per
step a second engine without a device does the host work of a step of the same size: in turns while
the real step runs, and after it has ended. What a step saves by the former, over its time without
the second engine, bounds what asynchronous stepping gains - its own costs left out: rows of
requests that had ended, pages kept a step longer. Embedded model, greedy; medians, spread of
rounds in brackets.
"""

import argparse
import statistics
import time
from typing import Any

import jax
import numpy as np

from bucketing.step_inputs import StepInputs, StepOutputs
from glm_jax import LLM, SamplingParams
from glm_jax.engine.engine import Engine
from glm_jax.engine.modes import Served, full

PROMPT, WARM_UP = 64, 20
PARAMS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, detokenize=False)


class NoDevice:
    """Answers at once what a step of the same shapes would return; drafts are never right."""

    drafts_write_ahead = False
    resets = 0

    def __init__(self, llm: LLM) -> None:
        """Stand in for the runner of an LLM."""
        self._limits = llm.config.limits()

    def serve(self, cell: Any, rows: int, loop_steps: int = 1) -> Served:
        """Run everything as its cell's program."""
        return full(cell)

    def run(self, served: Served, inputs: StepInputs) -> StepOutputs:
        """Return ones."""
        groups, chunks = inputs.group_tokens.shape[1], inputs.chunk_slot.shape[1]
        return StepOutputs(
            chunk_tokens=np.ones_like(inputs.chunk_slot),
            group_tokens=np.ones_like(inputs.group_tokens),
            group_accepted=np.zeros_like(inputs.group_slot),
            drafts=np.full((1, chunks + groups, self._limits.num_drafts), 2, np.int32),
            expert_load=np.zeros((1, 2), np.float32),
            expert_rows=np.zeros((1, 1, 1), np.int32),
            hidden=np.zeros((1, served.layout.rows, 1), np.float32),
        )

    def __getattr__(self, name: str) -> Any:
        """Do nothing of whatever else an executor does."""
        return lambda *_: None


class Beside:
    """A runner that lets other host work happen in every step.

    Attributes:
        other: That work; None is none.
        overlapped: Whether it is done while the step runs, or after it.
    """

    def __init__(self, runner: Any) -> None:
        """Wrap a runner."""
        self.other: Any = None
        self.overlapped = False
        self._runner = runner

    def run(self, served: Served, inputs: StepInputs) -> StepOutputs:
        """Run a step, and the other work."""
        outputs = self._runner.run(served, inputs)
        if self.other is not None:
            if not self.overlapped:
                jax.block_until_ready(outputs)
            self.other()
        return outputs

    def __getattr__(self, name: str) -> Any:
        """Leave everything else to the runner."""
        return getattr(self._runner, name)


def engine_of(llm: LLM, executor: Any, batch: int) -> Engine:
    """An engine whose requests all decode."""
    engine = Engine(llm.config, executor, vocab_size=llm.model_config.vocab_size)
    for number in range(batch):
        engine.add_request(f"r{number}", list(range(7 + number, 7 + number + PROMPT)), PARAMS)
    for _ in range(WARM_UP):
        engine.step()
    return engine


def seconds_per_step(engine: Engine, steps: int) -> float:
    """The median time of decode steps."""
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        record = engine.step().record
        times.append(time.perf_counter() - started)
        assert record.fault is None, f"a step failed: {record.fault}"
    return statistics.median(times)


def measure(llm: LLM, batch: int, steps: int, rounds: int) -> list[dict[str, float]]:
    """Time plain, overlapped and sequential steps in turns."""
    found = []
    for turn in range(rounds + 1):
        llm.runner.reset()
        beside = Beside(llm.runner)
        engine = engine_of(llm, beside, batch)
        other = engine_of(llm, NoDevice(llm), batch)
        times = {}
        kinds = ("plain", "overlapped", "sequential")
        for kind in kinds[turn % 3 :] + kinds[: turn % 3]:
            beside.other = None if kind == "plain" else other.step
            beside.overlapped = kind == "overlapped"
            times[kind] = seconds_per_step(engine, steps)
        if turn:
            found.append(times)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 3])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    for drafts in arguments.drafts:
        llm = LLM(
            num_speculative_tokens=drafts,
            decode_widths=(drafts + 1,),
            max_model_len=PROMPT + 4 * (arguments.steps + WARM_UP) * (drafts + 1),
            max_num_batched_tokens=64,
            prefill_buckets=(64,),
            grid_warm="all",
        )
        for batch in arguments.batches:
            rounds = measure(llm, batch, arguments.steps, arguments.rounds)
            plain = [1e3 * one["plain"] for one in rounds]
            host = [1e3 * (one["sequential"] - one["plain"]) for one in rounds]
            saved = [(one["sequential"] - one["overlapped"]) / one["plain"] for one in rounds]
            print(
                f"{drafts} drafts, batch {batch}: step {statistics.median(plain):.2f} ms, "
                f"host work of a step {statistics.median(host):.2f} ms, saved at most "
                f"{statistics.median(saved):.1%} ({min(saved):.1%} to {max(saved):.1%})"
            )


if __name__ == "__main__":
    main()
