"""The allowed sizes of one dimension; a grid is made of two axes and the decode widths."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass


class NoCellError(ValueError):
    """Rows were asked for that fit no bucket or no cell."""


@dataclass(frozen=True)
class Axis:
    """Sorted, distinct sizes; the first is always 0 (the segment is absent).

    Attributes:
        name: What the sizes count, for messages.
        edges: The sizes, ascending.
    """

    name: str
    edges: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check that the sizes ascend from 0 and that at least one is positive."""
        ascending = all(low < high for low, high in zip(self.edges, self.edges[1:], strict=False))
        if len(self.edges) < 2 or self.edges[0] != 0 or not ascending:
            raise ValueError(
                f"axis {self.name!r} has edges {self.edges}; they must ascend strictly from 0 and "
                "hold at least one positive size. Build it with Axis.cut."
            )

    @classmethod
    def cut(cls, name: str, sizes: Iterable[int], limit: int) -> "Axis":
        """Make an axis of the sizes below `limit` and of `limit` itself.

        Cut to a budget, the largest bucket is the budget exactly: a step can never be padded past
        it, and a full step never misses a bucket.

        Example:
            sizes 64, 512 with limit 64 give 0, 64; with limit 100 they give 0, 64, 100; with
            limit 2048 they give 0, 64, 512, 2048.
        """
        kept = list(sizes)
        bad = [size for size in kept if size < 0]
        if bad or limit < 1:
            raise ValueError(
                f"axis {name!r} got sizes {kept} and limit {limit}; sizes must be >= 0 and the "
                "limit >= 1. Change the bucket list or the limit."
            )
        return cls(name, tuple(sorted({0, limit, *(size for size in kept if size < limit)})))

    @property
    def largest(self) -> int:
        """The largest size."""
        return self.edges[-1]

    @property
    def smallest(self) -> int:
        """The smallest size above 0."""
        return self.edges[1]

    def ceiling(self, count: int) -> int:
        """Return the smallest size that holds `count`.

        Raises:
            NoCellError: `count` is above the largest size.
        """
        if not 0 <= count <= self.edges[-1]:
            raise NoCellError(
                f"{count} {self.name} fit no bucket (largest: {self.largest}). "
                f"Plan fewer or add a larger bucket; buckets: {self.edges}."
            )
        return self.edges[bisect_left(self.edges, count)]

    def floor(self, count: int) -> int:
        """Return the largest size that `count` fills completely; 0 if there is none."""
        return self.edges[bisect_right(self.edges, count) - 1]
