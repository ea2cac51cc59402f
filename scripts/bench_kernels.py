"""Times the operators: each implementation that runs on this device, at the sizes that matter.

    python -m scripts.bench_kernels [--operators index_topk sparse_mla expert_matmul] [--rounds 9]
        [--json FILE]

On a GPU at GLM-5.3's sizes the Mosaic kernels beside XLA; elsewhere at the embedded model's sizes
XLA beside the reference. Every answer is compared with the reference's first: `error` is its
largest difference, relative to the reference's largest value (index_topk: of the scores of what is
selected). Implementations take turns, medians with the 10th and 90th percentile. The percentages
are of what this device reached in this run with one large matrix product and one large copy. Bytes
count what must move once: what a kernel reads twice lowers its figure, and what stays in a cache
from one layer to the next can take it over 100 %.

Exit status 1: an answer was wrong, or what runs by default on this device could not run.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pallas_kernels.dispatch import default_implementation
from scripts.facts import facts_of
from scripts.kernels.cases import OPERATORS, problems_of
from scripts.kernels.ceilings import Ceilings, measure_ceilings
from scripts.kernels.problem import Problem, implementation_of
from scripts.kernels.timing import Spread, measure
from scripts.kernels.trial import TOLERANCE, Trial, attempt, checker, first_line

# mosaic_gpu on a CPU says that it cannot. The reference on a GPU would not fit at these sizes.
IMPLEMENTATIONS = {"gpu": ("mosaic_gpu", "xla"), "cpu": ("mosaic_gpu", "xla", "reference")}
COLUMNS = ("operator", "case", "implementation", "error", "ms", "TFLOP/s", "%", "GB/s", "%")
# Of the table, in characters, wherever it is printed.
WIDTH = 170


class Result(NamedTuple):
    """One implementation at one problem.

    Attributes:
        problem: the call.
        implementation: its name.
        trial: how its answer was.
        spread: of its times; None where it was not timed.
    """

    problem: Problem
    implementation: str
    trial: Trial
    spread: Spread | None


def bench(problem: Problem, platform: str, rounds: int) -> list[Result]:
    """Check and time all implementations of one problem."""
    inputs = jax.block_until_ready(jax.jit(problem.inputs)())
    check = checker(problem)
    trials = {}
    for name in IMPLEMENTATIONS[platform]:
        try:
            call = implementation_of(problem, name)
        except ImportError as error:
            trials[name] = Trial(None, None, first_line(error))
            continue
        trials[name] = attempt(call, inputs, check, TOLERANCE[platform])
    ready = {name: trial.repeated for name, trial in trials.items() if trial.repeated}
    spreads = measure(ready, inputs, rounds)
    return [Result(problem, name, trial, spreads.get(name)) for name, trial in trials.items()]


def as_json(result: Result, ceilings: Ceilings, facts: dict[str, Any]) -> dict[str, Any]:
    """One line of the JSON file; times in seconds, rates per second."""
    problem, spread = result.problem, result.spread
    line: dict[str, Any] = {
        "operator": problem.operator,
        "case": problem.name,
        "implementation": result.implementation,
        **facts,
        "flops": problem.flops,
        "bytes": problem.bytes,
        "ceilings": ceilings._asdict(),
        "error": result.trial.error,
        "not_timed": result.trial.reason or None,
    }
    if spread is not None:
        line |= {"seconds": spread.median, "p10": spread.low, "p90": spread.high}
        line |= {"flops_per_s": problem.flops / spread.median}
        line |= {"bytes_per_s": problem.bytes / spread.median}
    return line


def table(results: Sequence[Result], ceilings: Ceilings) -> Table:
    """One row per result; what was not timed has the number of a reason below."""
    reasons = list(dict.fromkeys(result.trial.reason for result in results if result.trial.reason))
    notes = [f"not timed ({number}): {reason}" for number, reason in enumerate(reasons, 1)]
    shown = Table(*COLUMNS, box=None, caption=Text("\n".join(notes)), caption_justify="left")
    for column in shown.columns[3:]:
        column.justify = "right"
    for result in results:
        shown.add_row(
            result.problem.operator,
            result.problem.name,
            result.implementation,
            *_figures(result, ceilings, reasons),
        )
    return shown


def _figures(result: Result, ceilings: Ceilings, reasons: Sequence[str]) -> Iterator[str]:
    error, spread = result.trial.error, result.spread
    yield "-" if error is None else f"{error:.1e}"
    if spread is None:
        yield f"not timed ({reasons.index(result.trial.reason) + 1})"
        return
    median, low, high = (1e3 * seconds for seconds in spread)
    yield f"{median:.3f} ({low:.3f}-{high:.3f})"
    for work, ceiling, unit in (
        (result.problem.flops, ceilings.flops, 1e12),
        (result.problem.bytes, ceilings.bytes, 1e9),
    ):
        rate = work / spread.median
        yield f"{rate / unit:.3g}"
        yield f"{rate / ceiling:.0%}"


def failures(results: Sequence[Result], default: str) -> list[str]:
    """What makes the exit status 1."""
    return [
        f"{result.problem.operator} {result.problem.name}, {result.implementation}"
        for result in results
        if result.trial.wrong or (result.spread is None and result.implementation == default)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operators", nargs="+", choices=OPERATORS, default=OPERATORS)
    parser.add_argument("--rounds", type=int, default=9, help="timed runs of each implementation")
    parser.add_argument("--json", type=Path, help="append one JSON line per result to this file")
    options = parser.parse_args()
    device = jax.devices()[0]
    console, results = Console(width=WIDTH), []
    problems = problems_of(device.platform)
    facts = facts_of(device.device_kind)
    ceilings = measure_ceilings(device.platform, options.rounds)
    for problem in problems:
        if problem.operator not in options.operators:
            continue
        print(f"{problem.operator} {problem.name}", file=sys.stderr, flush=True)
        results.extend(bench(problem, device.platform, options.rounds))
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()))
    console.print(
        f"ceilings: {ceilings.flops / 1e12:.3g} TFLOP/s (matrix product), "
        f"{ceilings.bytes / 1e9:.4g} GB/s (copy)"
    )
    console.print(table(results, ceilings))
    if options.json:
        with options.json.open("a") as file:
            for result in results:
                file.write(json.dumps(as_json(result, ceilings, facts)) + "\n")
    failed = failures(results, default_implementation())
    if failed:
        console.print(f"FAILED: {'; '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
