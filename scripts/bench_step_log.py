"""What the step log and the metrics cost: decode steps with and without, in turns.

`python -m scripts.bench_step_log [--groups 8] [--steps 600] [--model FOLDER] [--json]`. Blocks of
steps take turns (nothing, log, metrics, both), so that a slow moment of the machine or a growing
context hits none more than the others. A step is timed around `Engine.step`, observers included.
"""

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from glm_jax import LLM, SamplingParams
from glm_jax.observe.log_header import header_now
from glm_jax.observe.metrics import Metrics
from glm_jax.observe.step_log import StepLog

PROMPT_TOKENS = 16
BLOCK = 10
WARM_UP_STEPS = 30
ARMS = ("nothing", "log", "metrics", "both")


def measure(llm: LLM, groups: int, steps: int, log: StepLog) -> dict[str, list[float]]:
    """Decode with ``groups`` requests; return seconds of every step by what observed it."""
    metrics = Metrics(llm.config)
    watches = {
        "nothing": [],
        "log": [log.add],
        "metrics": [metrics.add],
        "both": [log.add, metrics.add],
    }
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    for number in range(groups):
        llm.engine.add_request(f"request-{number}", [1 + number] * PROMPT_TOKENS, params)
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for _ in range(groups + WARM_UP_STEPS):
        llm.engine.step()
    for block in range(len(ARMS) * -(-steps // BLOCK)):
        turn, place = divmod(block, len(ARMS))
        # Another arm first in each turn.
        arm = ARMS[(place + turn) % len(ARMS)]
        llm.engine.watches[:] = watches[arm]
        for _ in range(BLOCK):
            start = time.perf_counter()
            record = llm.engine.step().record
            taken = time.perf_counter() - start
            if record.fault is not None or len(record.request_ids) != groups:
                raise RuntimeError(f"not a decode step of {groups} groups: {record}")
            seconds[arm].append(taken)
    for number in range(groups):
        llm.engine.abort(f"request-{number}")
    return seconds


def summary(seconds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Medians in milliseconds, and what each arm adds: of all, and the spread over its blocks."""
    base = np.array(seconds["nothing"])
    rows = {}
    for arm, values in seconds.items():
        taken = np.array(values)
        rows[arm] = {
            "median_ms": round(float(np.median(taken)) * 1e3, 4),
            "p10_ms": round(float(np.percentile(taken, 10)) * 1e3, 4),
            "p90_ms": round(float(np.percentile(taken, 90)) * 1e3, 4),
            "added": round(float(np.median(taken) / np.median(base)) - 1, 4),
            **_spread(base, taken),
        }
    return rows


def _spread(base: np.ndarray, taken: np.ndarray) -> dict[str, float]:
    """Quartiles of what one block adds to the block of the same turn."""
    blocks = [np.median(values.reshape(-1, BLOCK), axis=1) for values in (base, taken)]
    ratios = blocks[1] / blocks[0] - 1
    low, high = np.percentile(ratios, [25, 75])
    return {"block_p25": round(float(low), 4), "block_p75": round(float(high), 4)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=8, help="decoding requests")
    parser.add_argument("--steps", type=int, default=600, help="measured steps of each kind")
    parser.add_argument("--model", default=None, help="checkpoint folder; default: embedded")
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args(arguments)
    steps = len(ARMS) * (options.steps + BLOCK) + options.groups + WARM_UP_STEPS
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
        rows = summary(measure(llm, options.groups, options.steps, log))
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
            f"{row['p90_ms']:.3f})  adds {row['added']:+.2%} (blocks {row['block_p25']:+.2%} to "
            f"{row['block_p75']:+.2%})"
        )
    print(f"{line_bytes:.0f} bytes a step")


if __name__ == "__main__":
    main()
