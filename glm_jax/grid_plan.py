"""`glm-jax grid plan`: choose the cells of a grid from a trace and show what they waste.

Fits on the first half of the trace and scores on the second, both in virtual time.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from bucketing.axis import Axis
from bucketing.cell import Cell
from bucketing.fit import (
    FIRST_GROUPS,
    FIRST_PREFILL,
    PER_DOUBLING,
    Fit,
    Load,
    fit_grid,
    ladder,
    load_of,
)
from bucketing.grid import Grid
from bucketing.step_rows import StepRows
from bucketing.waste import UsefulTime, Waste, measure_waste
from glm_jax.engine.config import EngineConfig
from glm_jax.simulate.step_time import H200StepTime
from glm_jax.simulate.traces import Arrival, halves, read_trace, speed_up
from glm_jax.simulate.virtual_time import Speculation, VirtualRun, VirtualTime

# Cache pages of 64 tokens that 8 H200 hold beside the weights of GLM-5.3: 4.2e6 tokens of 53,940
# bytes in about 28 GB each.
NODE_PAGES = 65_625
# Prefill buckets to try: doubling ones add up to any prompt with few programs; finer ones round
# single prompts less.
PREFILL_LADDERS = (
    (128, 256, 512, 1024, 2048, 4096),
    (256, 448, 768, 1152, 1536, 2560, 4096),
    (256, 512, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 4608, 5120, 5632, 6144, 7168),
)
LADDER_REQUESTS = 1500


class Limits(NamedTuple):
    """What a planned grid must serve.

    Attributes:
        budget: Prefill rows of a step.
        max_num_seqs: Groups of a step.
        drafts: Draft tokens per group; the widths are 1 and one more than this.
        acceptance: Tokens that a group emits per step on average.
    """

    budget: int = 8192
    max_num_seqs: int = 256
    drafts: int = 5
    acceptance: float | int = 3.0

    @property
    def widths(self) -> tuple[int, ...]:
        """Rows per group: without drafts, and with all of them."""
        return (1, 1 + self.drafts) if self.drafts else (1,)

    def config(self, arrivals: Sequence[Arrival]) -> EngineConfig:
        """Return engine options under which every request of a trace can run."""
        longest = max(arrival.prompt + arrival.output for arrival in arrivals)
        return EngineConfig(
            max_model_len=longest + self.drafts + 2,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.budget,
            num_pages=NODE_PAGES,
            decode_widths=self.widths,
            max_num_partial_prefills=self.max_num_seqs,
        )

    def fine(self, prefill: Sequence[int] = ()) -> Grid:
        """Return a grid that hardly rounds groups, with these prefill buckets or all candidates.

        Traffic in it shows what it would ask for.
        """
        sizes = prefill or ladder(self.budget, FIRST_PREFILL, PER_DOUBLING)
        return Grid(
            Axis.cut("prefill rows", sizes, self.budget),
            Axis("groups", (0, *ladder(self.max_num_seqs, FIRST_GROUPS, PER_DOUBLING))),
            self.widths,
        )

    def fit(
        self,
        loads: Sequence[Load],
        step_time: UsefulTime,
        programs: int,
        prefill: Sequence[int] | None = None,
    ) -> Fit:
        """Return the best grid of at most so many programs."""
        return fit_grid(
            loads,
            step_time,
            programs=programs,
            max_num_batched_tokens=self.budget,
            max_num_seqs=self.max_num_seqs,
            widths=self.widths,
            prefill=prefill,
        )


def simulate(
    limits: Limits, grid: Grid, step_time: UsefulTime, arrivals: Sequence[Arrival]
) -> VirtualRun:
    """Serve a trace in virtual time."""
    speculation = Speculation(limits.drafts, limits.acceptance)
    return VirtualTime(limits.config(arrivals), grid, step_time, speculation).run(arrivals)


class Served:
    """A trace as it is served under each ladder of prefill buckets.

    What a step asks for depends on the buckets, since the scheduler cuts prompts to them.
    """

    def __init__(self, limits: Limits, step_time: UsefulTime, arrivals: Sequence[Arrival]) -> None:
        """Serve nothing yet."""
        self._limits = limits
        self._step_time = step_time
        self._arrivals = arrivals
        self._loads: dict[tuple[Sequence[int], int | None], Load] = {}

    def load(self, prefill: Sequence[int], most: int | None = None) -> Load:
        """Return the traffic under a ladder, of the first `most` requests; remembered."""
        asked = prefill, most
        if asked not in self._loads:
            arrivals = self._arrivals[:most]
            run = simulate(self._limits, self._limits.fine(prefill), self._step_time, arrivals)
            self._loads[asked] = load_of(run.steps, self._step_time)
        return self._loads[asked]


def fit_served(
    limits: Limits,
    step_time: UsefulTime,
    traces: Sequence[Served],
    programs: int,
    ladders: Sequence[Sequence[int]] = PREFILL_LADDERS,
) -> Grid:
    """Return the grid whose greatest expected waste over some traces is least.

    The ladder is chosen on the beginning of the traces, the cells on all of them.
    """

    def fitted(prefill: Sequence[int], most: int | None) -> Fit:
        loads = [trace.load(prefill, most) for trace in traces]
        return limits.fit(loads, step_time, programs, prefill)

    if len(ladders) == 1:
        return fitted(ladders[0], None).grid
    chosen = min(ladders, key=lambda prefill: fitted(prefill, LADDER_REQUESTS).waste)
    return fitted(chosen, None).grid


def read_log(path: str | Path) -> list[StepRows]:
    """Read a step log: JSON lines with prefill_rows, decode_rows, groups, width and pairs.

    Raises:
        ValueError: A line is no step.
    """
    steps = []
    for number, line in enumerate(Path(path).read_text().splitlines(), start=1):
        try:
            row = json.loads(line)
            counts = (int(row[name]) for name in StepRows._fields[1:])
            steps.append(StepRows(Cell(0, 0, 1), *counts))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"line {number} of step log {str(path)!r} is no step ({type(error).__name__}: "
                f"{error}); each line needs {', '.join(StepRows._fields[1:])}."
            ) from error
    return steps


def plan_from_log(
    limits: Limits, steps: Sequence[StepRows], step_time: UsefulTime, programs: int
) -> tuple[Grid, Waste]:
    """Fit on the first half of a log, score on the second as if its steps used the new cells."""
    middle = len(steps) // 2
    if middle == 0:
        raise ValueError(f"a log of {len(steps)} steps has no halves; give at least 2.")
    grid = limits.fit([load_of(steps[:middle], step_time)], step_time, programs).grid
    moved = [
        step._replace(
            cell=grid.cell_for(
                step.prefill_rows, min(step.prefill_rows, 1), step.groups, step.width
            )
        )
        for step in steps[middle:]
    ]
    return grid, measure_waste(moved, step_time)


def plan_from_trace(
    limits: Limits, arrivals: Sequence[Arrival], step_time: UsefulTime, programs: int
) -> tuple[Grid, Waste, VirtualRun]:
    """Fit on the first half of a trace, serve the second with the new grid."""
    first, second = halves(arrivals)
    grid = fit_served(limits, step_time, [Served(limits, step_time, first)], programs)
    scored = simulate(limits, grid, step_time, second)
    return grid, measure_waste(scored.steps, step_time), scored


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `grid plan`."""
    defaults = Limits()
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", help="request trace: .csv (Azure) or .jsonl (Mooncake)")
    source.add_argument("--steps", help="step log: JSON lines of a running engine")
    add = parser.add_argument
    add("--programs", type=int, default=40, help="most cells, all widths (default 40)")
    add("--max-num-seqs", type=int, default=defaults.max_num_seqs, help="groups (default 256)")
    add("--budget", type=int, default=defaults.budget, help="prefill rows (default 8192)")
    add("--draft", type=int, default=defaults.drafts, help="drafts per group (default 5)")
    add("--acceptance", type=float, default=3.0, help="tokens per group and step (default 3)")
    add("--rate", type=float, default=1.0, help="arrivals, times those of the trace (default 1)")
    add("--requests", type=int, help="only the first so many requests of the trace")
    add("--json", action="store_true", help="print one JSON object only")
    add("--output", help="write the grid to this file, for the engine to read")


def run(options: argparse.Namespace) -> int:
    """Plan, print and perhaps write a grid."""
    acceptance = min(options.acceptance, options.draft + 1.0)
    limits = Limits(options.budget, options.max_num_seqs, options.draft, acceptance)
    step_time = H200StepTime(drafts=options.draft)
    scored = None
    if options.trace:
        arrivals = speed_up(read_trace(options.trace)[: options.requests], options.rate)
        grid, waste, scored = plan_from_trace(limits, arrivals, step_time, options.programs)
    else:
        grid, waste = plan_from_log(limits, read_log(options.steps), step_time, options.programs)
    if options.output:
        Path(options.output).write_text(json.dumps(grid.as_json()) + "\n")
    if options.json:
        Console(soft_wrap=True).print_json(json.dumps(_summary(grid, waste, scored)))
        return 0
    _print(Console(), grid, waste, scored)
    return 0


def _summary(grid: Grid, waste: Waste, scored: VirtualRun | None) -> dict[str, Any]:
    """Return all figures as plain values."""
    summary: dict[str, Any] = {
        "programs": len(grid.cells()),
        "steps": waste.steps,
        "waste_time": waste.time,
        "waste_rows": waste.rows,
        "p99_step": waste.p99,
        "grid": grid.as_json(),
        "cells": [{"cell": list(cell), **use._asdict()} for cell, use in waste.cells.items()],
    }
    if scored is not None:
        summary["ttft_p50_p99"] = scored.quantiles("ttft")
        summary["tbt_p50_p99"] = scored.quantiles("tbt")
    return summary


def _print(console: Console, grid: Grid, waste: Waste, scored: VirtualRun | None) -> None:
    """Print the programs, most used first, and the totals."""
    table = Table(title=f"{len(grid.cells())} programs, scored on {waste.steps} steps")
    for name in ("prefill", "groups", "width", "steps", "time", "lost to pads"):
        table.add_column(name, justify="right")
    for cell in (*waste.cells, *(cell for cell in grid.cells() if cell not in waste.cells)):
        use = waste.cells.get(cell)
        shares = (
            ("0", "", "")
            if use is None
            else (
                str(use.steps),
                f"{use.seconds / waste.seconds:.1%}",
                f"{use.lost / waste.seconds:.2%}",
            )
        )
        table.add_row(*map(str, cell), *shares)
    console.print(table)
    console.print(
        f"waste: {waste.time:.2%} of the time of the useful rows, {waste.rows:.1%} of their "
        f"number; 99th percentile of a step {waste.p99:.1%}"
    )
    if scored is not None:
        ttft, tbt = scored.quantiles("ttft"), scored.quantiles("tbt")
        console.print(
            f"time to first token p50 {ttft[0]:.3f} s, p99 {ttft[1]:.3f} s; between tokens "
            f"p50 {tbt[0]:.3f} s, p99 {tbt[1]:.3f} s (predicted for GLM-5.3 on 8 H200)"
        )
