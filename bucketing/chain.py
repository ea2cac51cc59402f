"""The dynamic program of one axis: which of n candidate sizes become edges."""

import numpy as np
from jaxtyping import Float


class Chain:
    """Covers candidates by k edges at least cost, for every k; an edge covers up to the one before.

    What lies above the last edge spills: it costs what the caller says, and no edge.

    Attributes:
        costs: The least cost with at most k edges, for k from 0.
    """

    def __init__(
        self,
        segment: Float[np.ndarray, "n n"],
        spill: Float[np.ndarray, " n+1"],
        most: int,
    ) -> None:
        """Solve for up to `most` edges.

        Args:
            segment: Cost of candidates a..b when b is their edge, at [a, b]; infinite for b < a.
            spill: Cost of the candidates from b on without an edge, at [b]; [n] is usually 0.
            most: The most edges.
        """
        reach = np.full(len(spill), np.inf)
        reach[0] = 0.0
        self._before: list[np.ndarray] = []
        self._ends = [0]
        exact = [float(spill[0])]
        for _ in range(most):
            through = reach[:-1, None] + segment
            self._before.append(through.argmin(0))
            reach = np.concatenate([[np.inf], through.min(0)])
            ended = reach + spill
            self._ends.append(int(ended.argmin()))
            exact.append(float(ended.min()))
        self._exact = exact
        self.costs = np.minimum.accumulate(exact)

    def edges(self, most: int) -> list[int]:
        """Return the candidates that are edges in the best cover by at most so many."""
        k = int(np.argmin(self._exact[: most + 1]))
        edges, end = [], self._ends[k]
        for choice in reversed(self._before[:k]):
            edges.append(end - 1)
            end = int(choice[end - 1])
        return edges[::-1]


def segments(single: Float[np.ndarray, "n n"]) -> Float[np.ndarray, "n n"]:
    """Return the cost of candidates a..b under edge b from the cost of each a under b."""
    total = np.concatenate([np.zeros((1, len(single))), np.cumsum(single, 0)])
    cost = np.diagonal(total[1:])[None, :] - total[:-1]
    return np.where(np.tri(len(single), dtype=bool).T, cost, np.inf)
