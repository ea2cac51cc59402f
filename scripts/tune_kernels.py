"""Tries other cuts of the GPU kernels' work than their own, and says which is fastest.

    python -m scripts.tune_kernels [--operators index_topk sparse_mla expert_matmul] [--rounds 9]
        [--compile-only] [--json FILE]

On a GPU every candidate's answer is checked, then all take turns; a table for each problem. With
--compile-only, which needs no GPU but what scripts.compile_h200 needs, every candidate is compiled
for an H200: registers, spills and shared memory tell which are out before a device is at hand.

The kernels do not read what is written here. Their cuts are rules in `config.py` and
`tile_shape.py`, with a reason for every number: a rule also answers for shapes that nobody
measured, and a table would be empty, since no GPU has run this yet. A candidate that beats a rule
(the last lines of the output, "fastest" in the JSON lines) is a reason to change the rule.

Exit status 1: a candidate was wrong, or the rule's own could not be timed or compiled cleanly.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.table import Table

from glm_jax.deployment.described_device import described_device
from scripts.facts import facts_of
from scripts.h200.assembler import Assembler
from scripts.kernels.candidates import Candidate, candidates_of
from scripts.kernels.cases import OPERATORS, problems_of
from scripts.kernels.compiler import Code, Compiler
from scripts.kernels.problem import Problem, shapes_of
from scripts.kernels.timing import Spread, measure
from scripts.kernels.trial import TOLERANCE, Trial, attempt, checker, first_line

# Of the tables, in characters, wherever they are printed.
WIDTH = 150


class Result(NamedTuple):
    """One candidate at one problem.

    Attributes:
        problem: the call.
        candidate: what was tried.
        code: None where it was not compiled for an H200 that is not there.
        trial: None where it did not run.
        spread: of its times; None where it was not timed.
        out: why it is no choice; empty if it is one.
    """

    problem: Problem
    candidate: Candidate
    code: Code | None
    trial: Trial | None
    spread: Spread | None
    out: str

    @property
    def seconds(self) -> float:
        """Median of its times, infinite where it has none."""
        return self.spread.median if self.spread else float("inf")


def time_candidates(problem: Problem, candidates: Sequence[Candidate], rounds: int) -> list[Result]:
    """Check and time the candidates of a problem."""
    inputs = jax.block_until_ready(jax.jit(problem.inputs)())
    check = checker(problem)
    trials = {
        candidate.name: attempt(candidate.call, inputs, check, TOLERANCE["gpu"])
        for candidate in candidates
    }
    ready = {name: trial.repeated for name, trial in trials.items() if trial.repeated}
    spreads = measure(ready, inputs, rounds)
    results = []
    for candidate in candidates:
        trial = trials[candidate.name]
        spread = spreads.get(candidate.name)
        results.append(Result(problem, candidate, None, trial, spread, trial.reason))
    return results


def compile_candidate(compiler: Compiler, problem: Problem, candidate: Candidate) -> Result:
    """Registers, spills and shared memory of a candidate, or why nothing came out."""
    shapes = shapes_of(problem, compiler.sharding)
    try:
        code = compiler.compile(candidate.call, shapes)
    except Exception as error:  # of JAX, Mosaic or XLA: the next one may still compile
        return Result(problem, candidate, None, None, None, first_line(error))
    return Result(problem, candidate, code, None, None, "; ".join(code.problems))


def fastest(results: Sequence[Result]) -> Result | None:
    """The fastest candidate of a problem; None where none was timed."""
    best = min(results, key=lambda result: result.seconds, default=None)
    return best if best is not None and best.spread is not None else None


def as_json(result: Result, best: Result | None, facts: dict[str, Any]) -> dict[str, Any]:
    """One line of the JSON file; times in seconds."""
    line: dict[str, Any] = {
        "operator": result.problem.operator,
        "case": result.problem.name,
        "candidate": result.candidate.name,
        "by_rule": result.candidate.by_rule,
        **facts,
        "out": result.out or None,
    }
    if result.code is not None:
        figures = result.code._asdict()
        del figures["problems"]  # are why it is out
        line |= figures
    if result.trial is not None:
        line |= {"error": result.trial.error, "fastest": result is best}
    if result.spread is not None:
        line |= {"seconds": result.spread.median, "p10": result.spread.low}
        line |= {"p90": result.spread.high}
    return line


def table(results: Sequence[Result]) -> Table:
    """The candidates of one problem, figures as far as there are any."""
    compiled = any(result.code for result in results)
    columns = ("registers", "spilled", "shared KiB", "s") if compiled else ("error", "ms", "GB/s")
    shown = Table("candidate", "", *columns, "out", box=None)
    for column in shown.columns[2:-1]:
        column.justify = "right"
    best = fastest(results)
    for result in results:
        marks = ["rule"] * result.candidate.by_rule + ["fastest"] * (result is best)
        cells = [*_figures(result)]
        cells += [""] * (len(columns) - len(cells))
        shown.add_row(result.candidate.name, " ".join(marks), *cells, result.out)
    return shown


def _figures(result: Result) -> Iterator[str]:
    code, trial, spread = result.code, result.trial, result.spread
    if code is not None:
        yield from (str(code.registers), str(code.spilled))
        yield f"{code.shared / 1024:.1f}"
        yield f"{code.compile_s:.1f}"
    if trial is not None and trial.error is not None:
        yield f"{trial.error:.1e}"
    if spread is not None:
        median, low, high = (1e3 * seconds for seconds in spread)
        yield f"{median:.4f} ({low:.4f}-{high:.4f})"
        yield f"{result.problem.bytes / spread.median / 1e9:.0f}"


def comparison(results: Sequence[Result], best: Result) -> str:
    """The measured best beside the rule's choice."""
    problem = best.problem
    rule = next(result for result in results if result.candidate.by_rule)
    gain = rule.seconds / best.seconds - 1
    return (
        f"{problem.operator} {problem.name}: fastest {best.candidate.name}, "
        f"rule {rule.candidate.name} ({gain:+.1%})"
    )


def failures(results: Sequence[Result]) -> list[str]:
    """What makes the exit status 1."""
    return [
        f"{result.problem.operator} {result.problem.name}, {result.candidate.name}"
        for result in results
        if (result.trial is not None and result.trial.wrong)
        or (result.candidate.by_rule and result.out)
    ]


def tune(
    operators: Sequence[str], try_all: Callable[[Problem, list[Candidate]], list[Result]]
) -> Iterator[list[Result]]:
    """The results of every problem that leaves a choice."""
    for problem in problems_of("gpu"):
        candidates = candidates_of(problem) if problem.operator in operators else []
        if candidates:
            yield try_all(problem, candidates)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operators", nargs="+", choices=OPERATORS, default=OPERATORS)
    parser.add_argument("--rounds", type=int, default=9, help="timed runs of each candidate")
    parser.add_argument(
        "--compile-only", action="store_true", help="for an H200 that is not here; nothing runs"
    )
    parser.add_argument("--json", type=Path, help="append one JSON line per candidate to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.compile_only:
            sharding, assembler = described_device(), Assembler(Path(folder))
            compiler = Compiler(sharding, assembler)
            device = next(iter(sharding.mesh.devices.flat)).device_kind
            facts = facts_of(f"{device} (described)") | {"ptxas": assembler.version}

            def try_all(problem: Problem, candidates: list[Candidate]) -> list[Result]:
                return [compile_candidate(compiler, problem, one) for one in candidates]

        else:
            if jax.default_backend() != "gpu":
                parser.error(
                    f"there is no GPU to time on (JAX runs on: {jax.default_backend()}). Run this "
                    "on a machine with an H200, or give --compile-only, which needs none."
                )
            facts = facts_of(jax.devices()[0].device_kind)

            def try_all(problem: Problem, candidates: list[Candidate]) -> list[Result]:
                return time_candidates(problem, candidates, options.rounds)

        return report(tune(options.operators, try_all), facts, options.json)


def report(problems: Iterator[list[Result]], facts: dict[str, Any], json_file: Path | None) -> int:
    """Print the tables as they come, then what they say about the rules; the exit status."""
    console, lines, failed = Console(width=WIDTH), [], []
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()))
    for results in problems:
        problem, best = results[0].problem, fastest(results)
        console.print(f"{problem.operator} {problem.name}")
        console.print(table(results))
        if best is not None:
            lines.append(comparison(results, best))
        failed.extend(failures(results))
        if json_file:
            with json_file.open("a") as file:
                for result in results:
                    file.write(json.dumps(as_json(result, best, facts)) + "\n")
    for line in lines:
        console.print(line)
    if failed:
        console.print(f"FAILED: {'; '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
