"""Chooses the cells of a grid from traffic: the least predicted time for a number of programs.

Two layouts, by dynamic programming over candidate sizes. Separable: the same group sizes for every
prefill bucket. Guillotine: each prefill bucket has its own; it wins where decodes alone need fine
steps of G (few rows hit few experts) and mixed steps do not.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bucketing.axis import Axis
from bucketing.cell import Cell
from bucketing.fit_problem import CUT_SHARE, Candidates, Problem, Shape
from bucketing.grid import Grid
from bucketing.guillotine import fit_guillotine
from bucketing.separable import fit_separable
from bucketing.step_rows import StepRows
from bucketing.step_time import StepTime
from bucketing.waste import UsefulTime

# Candidate sizes per doubling, and the smallest of each axis.
PER_DOUBLING = 8
FIRST_PREFILL, FIRST_GROUPS = 16, 1
# Tomorrow has busier moments than the traffic that was seen: (factor on groups, share of steps).
HEADROOM = ((1.2, 0.01), (1.5, 0.004), (2.5, 0.002))
# The same for widths: share of steps in which nobody has drafts, so that those have programs too.
NARROW_SHARE = 0.001
# Rounds in which loads that waste more than others gain weight.
ROUNDS = 8


class Load(NamedTuple):
    """Traffic of one kind.

    Attributes:
        shapes: Weight of each shape; a step of all useful rows together weighs one second.
        exact: What the shapes take without pads, scored pairs left out, in the same measure.
    """

    shapes: Mapping[Shape, float]
    exact: float


class Fit(NamedTuple):
    """A fitted grid and the greatest waste of any load that it is expected to have."""

    grid: Grid
    waste: float


def load_of(steps: Sequence[StepRows], step_time: UsefulTime) -> Load:
    """Return the load that steps are, one second of useful time in all.

    Raises:
        ValueError: There is no step.
    """
    if not steps:
        raise ValueError("no steps make no load; give a trace or a log with at least one step.")
    second = 1 / sum(step_time.useful(*step[1:4], step.pairs) for step in steps)
    shapes: defaultdict[Shape, float] = defaultdict(float)
    for step in steps:
        shapes[Shape(step.prefill_rows, step.groups, step.width)] += second
    return Load(shapes, second * sum(step_time.useful(*step[1:4], 0) for step in steps))


def ladder(largest: int, first: int, per_doubling: int) -> tuple[int, ...]:
    """Return candidate sizes up to `largest`: multiples of `first`, then so many per doubling.

    Example:
        ladder(100, 4, 4) = 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 100.
    """
    sizes, size, step = [], 0, first
    while size < largest:
        if size >= 2 * per_doubling * step:
            step *= 2
        size += step
        sizes.append(min(size, largest))
    return tuple(sizes)


def fit_grid(
    loads: Sequence[Load],
    step_time: StepTime,
    *,
    programs: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    widths: Sequence[int],
    prefill: Sequence[int] | None = None,
) -> Fit:
    """Return the grid of at most `programs` cells, all widths together, that wastes least time.

    The greatest waste of any load counts.

    Args:
        loads: Traffic to serve, one per kind (trace, arrival rate, ...).
        step_time: Predicts the time of a cell.
        programs: The most cells.
        max_num_batched_tokens: The budget: the largest prefill bucket.
        max_num_seqs: The largest group bucket.
        widths: Decode widths, ascending.
        prefill: The prefill buckets under which the traffic was scheduled, and from which the
            grid's are taken. None takes fine candidates: the traffic was not cut to any bucket.

    Raises:
        ValueError: No traffic, no program, or a shape beyond the limits.
    """
    if programs < 1 or not loads:
        raise ValueError(
            f"{programs} programs and {len(loads)} loads make no grid; both must be at least 1."
        )
    _check(loads, Shape(max_num_batched_tokens, max_num_seqs, max(widths)))
    cuts = CUT_SHARE if prefill is None else 0.0
    sizes = prefill or ladder(max_num_batched_tokens, FIRST_PREFILL, PER_DOUBLING)
    candidates = Candidates(
        Axis.cut("prefill rows", sizes, max_num_batched_tokens).edges,
        (0, *ladder(max_num_seqs, FIRST_GROUPS, PER_DOUBLING)),
        tuple(widths),
    )
    cost = candidates.price(step_time)
    seen = [Problem(candidates, cost, candidates.weigh(load.shapes), cuts) for load in loads]
    spread = [candidates.weigh(_with_headroom(load.shapes, candidates)) for load in loads]
    weights = np.ones(len(loads))
    best: Fit | None = None
    for _ in range(ROUNDS if len(loads) > 1 else 1):
        mixed = sum(weight * load for weight, load in zip(weights, spread, strict=True))
        grid = _fit_mixed(Problem(candidates, cost, np.asarray(mixed), cuts), programs)
        wastes = np.array(
            [problem.seconds(grid) - load.exact for problem, load in zip(seen, loads, strict=True)]
        )
        if best is None or wastes.max() < best.waste:
            best = Fit(grid, float(wastes.max()))
        # A floor, since a load without waste must not lose all its weight.
        weights = weights * np.maximum(wastes, max(wastes.max() / 10, 1e-9))
        weights /= weights.sum()
    assert best is not None, f"{ROUNDS=}"
    return best


def _check(loads: Sequence[Load], most: Shape) -> None:
    for load in loads:
        for shape in load.shapes:
            if any(size > limit for size, limit in zip(shape, most, strict=True)):
                raise ValueError(
                    f"shape {tuple(shape)} is beyond the limits {tuple(most)} (budget, "
                    "max_num_seqs, width). Raise them or leave the step out."
                )


def _with_headroom(shapes: Mapping[Shape, float], candidates: Candidates) -> dict[Shape, float]:
    """Return the shapes with a small share of steps that have more groups, or narrower ones."""
    spread: defaultdict[Shape, float] = defaultdict(float)
    for shape, weight in shapes.items():
        spread[shape] += weight
        if shape.groups == 0:
            continue
        for factor, share in HEADROOM:
            groups = min(candidates.groups[-1], math.ceil(shape.groups * factor))
            spread[shape._replace(groups=groups)] += share * weight
        for width in candidates.widths:
            if width < shape.width:
                spread[shape._replace(width=width)] += NARROW_SHARE * weight
    return spread


def _fit_mixed(problem: Problem, programs: int) -> Grid:
    """Return the better layout for one mix of loads."""
    layouts: list[list[Cell]] = [fit_guillotine(problem, programs)]
    if separable := fit_separable(problem, programs):
        layouts.append(separable)
    return min((problem.grid(cells) for cells in layouts), key=problem.seconds)
