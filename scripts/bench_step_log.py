"""What the step log and the metrics cost: decode steps with and without, in turns.

`python -m scripts.bench_step_log [--groups 8] [--steps 600] [--model FOLDER] [--json]`. Steps take
turns (nothing, log, metrics, both; another one first each time), so that a slow moment of the
machine or a growing context hits none more than the others. A step is timed around `Engine.step`,
observers included; beside it stands what the observers took themselves.
"""

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from glm_jax import LLM, SamplingParams
from glm_jax.engine.outputs import StepRecord
from glm_jax.observe.log_header import header_now
from glm_jax.observe.metrics import Metrics
from glm_jax.observe.step_log import StepLog

PROMPT_TOKENS = 16
WARM_UP_STEPS = 30
ARMS = ("nothing", "log", "metrics", "both")
# Parts of the run whose medians show how much the figures vary.
SLICES = 10


class Stopwatch:
    """Calls observers and keeps what they took.

    Attributes:
        seconds: Of every step.
    """

    def __init__(self, *observers: StepLog | Metrics) -> None:
        self.seconds: list[float] = []
        self._observers = observers

    def __call__(self, record: StepRecord) -> None:
        """Take a step."""
        start = time.perf_counter()
        for observer in self._observers:
            observer.add(record)
        self.seconds.append(time.perf_counter() - start)


def measure(
    llm: LLM, groups: int, steps: int, watches: Mapping[str, Stopwatch]
) -> dict[str, list[float]]:
    """Decode with ``groups`` requests; return seconds of every step by what observed it."""
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    for number in range(groups):
        llm.engine.add_request(f"request-{number}", [1 + number] * PROMPT_TOKENS, params)
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for _ in range(groups + WARM_UP_STEPS):
        llm.engine.step()
    for turn in range(steps):
        for place in range(len(ARMS)):
            arm = ARMS[(place + turn) % len(ARMS)]
            llm.engine.watches[:] = [watches[arm]]
            start = time.perf_counter()
            record = llm.engine.step().record
            taken = time.perf_counter() - start
            if record.fault is not None or len(record.request_ids) != groups:
                raise RuntimeError(f"not a decode step of {groups} groups: {record}")
            seconds[arm].append(taken)
    for number in range(groups):
        llm.engine.abort(f"request-{number}")
    return seconds


def summary(
    seconds: Mapping[str, Sequence[float]], watches: Mapping[str, Stopwatch]
) -> dict[str, dict[str, float]]:
    """Medians, and what each arm adds to the median step: of all, and over slices of the run."""
    base = np.array(seconds["nothing"])
    rows = {}
    for arm, values in seconds.items():
        taken = np.array(values)
        slices = [
            np.median(part) / np.median(usual) - 1
            for part, usual in zip(
                np.array_split(taken, SLICES), np.array_split(base, SLICES), strict=True
            )
        ]
        own = float(np.median(watches[arm].seconds))
        rows[arm] = {
            "median_ms": round(float(np.median(taken)) * 1e3, 4),
            "p10_ms": round(float(np.percentile(taken, 10)) * 1e3, 4),
            "p90_ms": round(float(np.percentile(taken, 90)) * 1e3, 4),
            "added": round(float(np.median(taken) / np.median(base)) - 1, 4),
            "added_p25": round(float(np.percentile(slices, 25)), 4),
            "added_p75": round(float(np.percentile(slices, 75)), 4),
            "observers_us": round(own * 1e6, 1),
            "observers_share": round(own / float(np.median(base)), 5),
        }
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=8, help="decoding requests")
    parser.add_argument("--steps", type=int, default=600, help="measured steps of each kind")
    parser.add_argument("--model", default=None, help="checkpoint folder; default: embedded")
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args(arguments)
    steps = len(ARMS) * options.steps + options.groups + WARM_UP_STEPS
    llm = LLM(
        options.model,
        max_num_seqs=options.groups,
        group_buckets=(options.groups,),
        max_num_batched_tokens=64,
        prefill_buckets=(64,),
        max_model_len=PROMPT_TOKENS + steps + 1,
        grid_warm="all",
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.jsonl"
        log = StepLog(path, header_now(llm.config, llm.model_config, jax.default_backend()))
        metrics = Metrics(llm.config)
        watches = {
            "nothing": Stopwatch(),
            "log": Stopwatch(log),
            "metrics": Stopwatch(metrics),
            "both": Stopwatch(log, metrics),
        }
        rows = summary(measure(llm, options.groups, options.steps, watches), watches)
        log.close()
        line_bytes = path.stat().st_size / max(log.steps, 1)
    result = {
        "groups": options.groups,
        "steps": options.steps,
        "bytes_per_step": round(line_bytes),
        "device": jax.devices()[0].device_kind,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "observed_by": rows,
    }
    if options.json:
        print(json.dumps(result))
        return
    print(f"{options.steps} decode steps of {options.groups} groups, observed by:")
    for arm, row in rows.items():
        print(
            f"{arm:>8}  {row['median_ms']:8.3f} ms (p10 {row['p10_ms']:.3f}, p90 "
            f"{row['p90_ms']:.3f})  adds {row['added']:+.2%} (slices {row['added_p25']:+.2%} to "
            f"{row['added_p75']:+.2%}); themselves {row['observers_us']:.0f} us, "
            f"{row['observers_share']:.2%}"
        )
    print(f"{line_bytes:.0f} bytes a step")


if __name__ == "__main__":
    main()
