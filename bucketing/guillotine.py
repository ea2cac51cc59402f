"""The guillotine layout: every prefill bucket has its own group sizes, for each width."""

from collections.abc import Iterable
from itertools import combinations

import numpy as np
from jaxtyping import Float, Int

from bucketing.cell import Cell
from bucketing.chain import Chain, segments
from bucketing.fit_problem import Problem

# More sizes for one prefill bucket have never paid: the rest of the programs does more elsewhere.
MOST_PER_BUCKET = 24


def fit_guillotine(problem: Problem, programs: int) -> list[Cell]:
    """Return the best layout in which every prefill bucket has its own group sizes.

    Exact over the candidates, for traffic that uses the smallest prefill bucket that holds it, or
    the largest cell, which is one of the programs. A step without prefill rows never pays for some.
    """
    n, most = len(problem.prefill), min(programs - 1, MOST_PER_BUCKET)
    best = np.full((n + 1, programs), np.inf)
    best[0, 0] = 0.0
    choice: dict[tuple[int, int], tuple[Bucket, int]] = {}
    for last in range(n):
        for first in range(min(last, 1), last + 1):
            bucket = Bucket(problem, first, last, most)
            for k in range(most + 1):
                reached = best[first, : programs - k] + bucket.costs[k]
                for used in (np.flatnonzero(reached < best[last + 1, k:]) + k).tolist():
                    best[last + 1, used] = reached[used - k]
                    choice[last + 1, used] = bucket, k
    end, used = n, int(best[n].argmin())
    cells: list[Cell] = []
    while end:
        bucket, k = choice[end, used]
        cells += bucket.cells(k)
        end, used = bucket.first, used - k
    return cells


class Bucket:
    """A prefill bucket that serves candidates first..last: its best group sizes for each width.

    Attributes:
        first: The smallest candidate that it serves.
        costs: The least cost with at most k cells, for k from 0.
    """

    def __init__(self, problem: Problem, first: int, last: int, most: int) -> None:
        """Solve each width alone; narrow groups may also use the cells of the widest."""
        self.first = first
        self._last = last
        self._problem = problem
        self._cost = problem.bucket_cost(first, last)
        self._weight = problem.weight[:, first : last + 1]
        self._options: list[_Option] = []
        widest = len(problem.widths) - 1
        narrow = [w for w in range(widest) if self._weight[w].any()]
        for count in range(len(narrow) + 1):
            for own in combinations(narrow, count):
                merged = [w for w in range(widest + 1) if w not in own]
                option = _Option(self._chain([w], w, most) for w in own)
                option.add(*self._chain(merged, widest, most))
                self._options.append(option)
        self.costs = np.min([option.costs for option in self._options], axis=0)

    def _chain(self, served: list[int], width: int, most: int) -> tuple[int, Chain]:
        """Return the chain of a width's group sizes, serving the traffic of some widths."""
        load = self._weight[served].sum(0)
        above = np.concatenate([np.cumsum(load.sum(0)[::-1])[::-1], [0.0]])
        segment = segments(load.T @ self._cost[width])
        if self._last == 0:
            # There is no cell without rows.
            segment[0, 0] = np.inf
        return width, Chain(segment, above * self._problem.largest_cost, most)

    def cells(self, most: int) -> list[Cell]:
        """Return the best cells, at most so many."""
        option = min(self._options, key=lambda option: option.costs[most])
        return [self._problem.cell(w if g else 0, self._last, g) for w, g in option.sizes(most)]


class _Option:
    """Chains of several widths that share the cells of one prefill bucket.

    Attributes:
        costs: The least cost with at most k cells, for k from 0.
    """

    def __init__(self, chains: Iterable[tuple[int, Chain]]) -> None:
        self._chains: list[tuple[int, Chain, np.ndarray]] = []
        self.costs: np.ndarray = np.zeros(0)
        for width, chain in chains:
            self.add(width, chain)

    def add(self, width: int, chain: Chain) -> None:
        """Share the cells with one more width."""
        if self._chains:
            self.costs, shares = _split(self.costs, chain.costs)
        else:
            self.costs, shares = chain.costs, np.arange(len(chain.costs))
        self._chains.append((width, chain, shares))

    def sizes(self, most: int) -> list[tuple[int, int]]:
        """Return (width, group size) indices of the best cells, at most so many."""
        found = []
        for width, chain, shares in reversed(self._chains):
            own = int(shares[most])
            found += [(width, size) for size in chain.edges(own)]
            most -= own
        return found


def _split(
    left: Float[np.ndarray, " k"], right: Float[np.ndarray, " k"]
) -> tuple[Float[np.ndarray, " k"], Int[np.ndarray, " k"]]:
    """Share k cells between two parts: the least cost, and how many the right one gets."""
    costs, shares = [], []
    for k in range(len(left)):
        options = left[k::-1] + right[: k + 1]
        shares.append(int(options.argmin()))
        costs.append(float(options.min()))
    return np.array(costs), np.array(shares)
