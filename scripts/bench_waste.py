"""What pads cost: fitted grids beside the bucket lists of other engines, in virtual time.

`python -m scripts.bench_waste TRACE... [--programs 40] [--requests N] [--json]`, with Azure's CSV
and Mooncake's JSON-lines traces, each at three arrival multipliers (or `TRACE:1,2,4`). Whole traces
take about five minutes on one core, `--requests 2000` (of each half) a quarter of it. Edges are
fitted on the first half of a trace and scored on the second. Waste is the time of the steps' cells
beyond that of their useful rows, by the H200 step-time model; pads are charged in full, and beside
it as if kernels skipped tiles of pads. Ours runs its own scheduler on its own grid. The others'
padding rules are applied to the steps of the same scheduler without buckets.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from bucketing.grid import Grid
from bucketing.step_rows import StepRows
from bucketing.waste import measure_waste
from glm_jax.grid_plan import Limits, Served, fit_served, simulate
from glm_jax.simulate.step_time import H200StepTime
from glm_jax.simulate.traces import halves, read_trace, speed_up
from glm_jax.simulate.virtual_time import VirtualRun

LIMITS = Limits()
MOST_WASTE = 0.03
# vLLM's default CUDA graph capture sizes; a larger step runs without a graph and without pads.
VLLM = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
# sglang-jax: powers of two of tokens where a step prefills, of requests where it does not. Its
# list ends at 8192; the last entry holds our budget and all groups.
SGLANG_TOKENS = (*(1 << n for n in range(6, 14)), 9728)
POWERS_PREFILL = (0, *(1 << n for n in range(6, 14)))
POWERS_GROUPS = (0, *(1 << n for n in range(9)))


class Padded(NamedTuple):
    """Rows of a padded step, its groups, and whether it ran as one program."""

    prefill: int
    decode: int
    groups: int
    graph: bool = True


class Scheme(NamedTuple):
    """A padding rule and how many programs it needs."""

    name: str
    programs: int
    pad: Callable[[StepRows], Padded]


class Score(NamedTuple):
    """What a scheme wastes on one trace at one multiplier."""

    trace: str
    multiplier: float
    scheme: str
    programs: int
    time: float
    skip: float
    rows: float
    p99: float
    off_graph: float


def up(sizes: Sequence[int], count: int) -> int:
    """The smallest size that holds a count."""
    return sizes[int(np.searchsorted(sizes, count))]


def pad_powers(step: StepRows) -> Padded:
    groups = up(POWERS_GROUPS, step.groups)
    return Padded(up(POWERS_PREFILL, step.prefill_rows), groups * _width(step), groups)


def pad_vllm(step: StepRows) -> Padded:
    if step.useful_rows > VLLM[-1]:
        return Padded(step.prefill_rows, step.decode_rows, step.groups, graph=False)
    return _pad_total(step, up(VLLM, step.useful_rows))


def pad_sglang(step: StepRows) -> Padded:
    if step.prefill_rows:
        return _pad_total(step, up(SGLANG_TOKENS, step.useful_rows))
    groups = up(POWERS_GROUPS, step.groups)
    return Padded(0, groups * _width(step), groups)


def _pad_total(step: StepRows, total: int) -> Padded:
    """Pads of a total count as prefill rows, or as decode rows where there are no others."""
    pads = total - step.useful_rows
    if step.prefill_rows:
        return Padded(step.prefill_rows + pads, step.decode_rows, step.groups)
    return Padded(0, total, step.groups + pads // _width(step))


def _width(step: StepRows) -> int:
    return up(LIMITS.widths, step.width)


SCHEMES = (
    Scheme(
        "powers of two",
        len(POWERS_PREFILL) * (1 + len(LIMITS.widths) * (len(POWERS_GROUPS) - 1)) - 1,
        pad_powers,
    ),
    Scheme("vLLM capture list", len(VLLM), pad_vllm),
    Scheme("sglang-jax defaults", len(SGLANG_TOKENS) + len(POWERS_GROUPS) - 1, pad_sglang),
)


def score_scheme(
    trace: str, multiplier: float, scheme: Scheme, steps: Sequence[StepRows], model: H200StepTime
) -> Score:
    """Judge a padding rule on steps that were made without buckets."""
    padded = [scheme.pad(step) for step in steps]
    useful = np.array([model.useful(*step[1:4], step.pairs) for step in steps])
    taken = np.array(
        [model.useful(*shape[:3], step.pairs) for shape, step in zip(padded, steps, strict=True)]
    )
    skip = sum(
        model.skipping(shape[:2], *step[1:4], step.pairs)
        for shape, step in zip(padded, steps, strict=True)
    )
    rows = sum(shape.prefill + shape.decode for shape in padded)
    return Score(
        trace,
        multiplier,
        scheme.name,
        scheme.programs,
        float(taken.sum() / useful.sum() - 1),
        float(skip / useful.sum() - 1),
        rows / sum(step.useful_rows for step in steps) - 1,
        float(np.quantile(taken / useful - 1, 0.99)),
        sum(not shape.graph for shape in padded) / len(padded),
    )


def score_grid(
    trace: str, multiplier: float, name: str, grid: Grid, run: VirtualRun, model: H200StepTime
) -> Score:
    """Judge a run on its own grid."""
    waste = measure_waste(run.steps, model)
    cells = [(step.cell.prefill, step.cell.groups * step.cell.width) for step in run.steps]
    useful = sum(model.useful(*step[1:4], step.pairs) for step in run.steps)
    skip = sum(
        model.skipping(cell, *step[1:4], step.pairs)
        for cell, step in zip(cells, run.steps, strict=True)
    )
    outside = sum(step.cell not in grid for step in run.steps) / len(run.steps)
    figures = waste.time, skip / useful - 1, waste.rows, waste.p99, outside
    return Score(trace, multiplier, name, len(grid.cells()), *figures)


def bench(
    path: str, multipliers: Sequence[float], programs: int, requests: int | None
) -> list[Score]:
    """Return all scores of one trace."""
    name, model = Path(path).name, H200StepTime(drafts=LIMITS.drafts)
    first, second = halves(read_trace(path), requests)
    served = {m: Served(LIMITS, model, speed_up(first, m)) for m in multipliers}
    common = fit_served(LIMITS, model, list(served.values()), programs)
    scores = []
    for m in multipliers:
        late = speed_up(second, m)
        own = fit_served(LIMITS, model, [served[m]], programs)
        for label, grid in (("ours, a grid per trace", common), ("ours, a grid per load", own)):
            run = simulate(LIMITS, grid, model, late)
            scores.append(score_grid(name, m, label, grid, run, model))
        natural = simulate(LIMITS, LIMITS.fine(), model, late)
        scores += [score_scheme(name, m, scheme, natural.steps, model) for scheme in SCHEMES]
    return scores


def default_multipliers(path: str) -> tuple[float, ...]:
    """The arrival multipliers of the acceptance line: from idle to near capacity."""
    if path.endswith(".jsonl"):
        return (0.5, 1, 1.5)
    return (1, 3, 5) if "code" in Path(path).name else (1, 3, 6)


def print_scores(console: Console, scores: Sequence[Score]) -> None:
    table = Table(title="waste by time, beyond the useful rows")
    for column in ("trace", "load", "scheme"):
        table.add_column(column, no_wrap=True)
    for column in ("programs", "time", "tile skip", "rows", "p99 step", "no graph"):
        table.add_column(column, justify="right")
    for score in scores:
        shares = (f"{share:.1%}" for share in score[6:])
        table.add_row(
            score.trace.split(".")[0]
            .removeprefix("AzureLLMInferenceTrace_")
            .removesuffix("_trace"),
            f"x{score.multiplier:g}",
            score.scheme,
            str(score.programs),
            f"{score.time:.2%}",
            f"{score.skip:.2%}",
            *shares,
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+", help="PATH or PATH:1,3,6 (arrival multipliers)")
    parser.add_argument("--programs", type=int, default=40)
    parser.add_argument("--requests", type=int, help="only the first so many of each half")
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    arguments = parser.parse_args()
    started = time.perf_counter()
    scores: list[Score] = []
    for trace in arguments.traces:
        path, _, listed = trace.partition(":")
        multipliers = [float(m) for m in listed.split(",")] if listed else default_multipliers(path)
        scores += bench(path, multipliers, arguments.programs, arguments.requests)
    worst: dict[str, float] = {}
    for score in scores:
        worst[score.scheme] = max(worst.get(score.scheme, 0.0), score.time)
    if arguments.json:
        print(json.dumps({"worst": worst, "scores": [score._asdict() for score in scores]}))
        return
    console = Console(width=120)
    print_scores(console, scores)
    for scheme, waste in worst.items():
        console.print(f"worst of {scheme}: {waste:.2%} (at most {MOST_WASTE:.0%} is wanted)")
    console.print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
