"""The separable layout: every prefill bucket with every group size of the largest width."""

import numpy as np
from jaxtyping import Float, Int

from bucketing.cell import Cell
from bucketing.chain import Chain, segments
from bucketing.fit_problem import Problem


def fit_separable(problem: Problem, programs: int) -> list[Cell]:
    """Return the best separable layout; empty where the programs are too few for any.

    The two axes are solved in turn, each exactly for the other's edges; P buckets and G sizes are
    shared out in every way. All groups use the largest width.
    """
    best: tuple[float, list[int], list[int]] = (np.inf, [], [])
    weight = problem.weight.sum(0)
    for buckets in range(1, programs):
        sizes = (programs - buckets) // (buckets + 1)
        if sizes < 1:
            break
        # First as if every prefill candidate were a bucket.
        prefill = list(range(len(problem.prefill)))
        for _ in range(2):
            groups = [0, *_group_edges(problem, prefill, sizes)]
            prefill = [0, *_prefill_edges(problem, groups, buckets)]
        cost = float((weight * problem.cost[-1][np.ix_(_up(prefill), _up(groups))]).sum())
        if cost < best[0]:
            best = cost, prefill, groups
    _, prefill, groups = best
    return [problem.cell(-1 if g else 0, p, g) for p in prefill for g in groups if p or g]


def _group_edges(problem: Problem, prefill: list[int], most: int) -> list[int]:
    """Return the best group sizes for given prefill buckets; steps without groups need none."""
    weight = problem.weight.sum(0)[:, 1:]
    return _edges(weight.T @ problem.cost[-1][_up(prefill), 1:], most)


def _prefill_edges(problem: Problem, groups: list[int], most: int) -> list[int]:
    """Return the best prefill buckets for given group sizes; no prefill rows need none."""
    weight = problem.weight.sum(0)[1:]
    return _edges(weight @ problem.cost[-1][1:, _up(groups)].T, most)


def _up(edges: list[int]) -> Int[np.ndarray, " n"]:
    """Return the edge of every candidate; the last edge is the last candidate."""
    return np.array(edges)[np.searchsorted(edges, np.arange(edges[-1] + 1))]


def _edges(single: Float[np.ndarray, "n n"], most: int) -> list[int]:
    """Solve one axis without its zero; its largest size must be an edge."""
    spill = np.full(len(single) + 1, np.inf)
    spill[-1] = 0.0
    return [edge + 1 for edge in Chain(segments(single), spill, most).edges(most)]
