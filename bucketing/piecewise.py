"""PIECEWISE: a step as a row of small programs on one-dimensional buckets.

Where a whole step (FULL) needs the program of its cell, a piece needs one for a number of rows. So
few programs serve every step, at the price of a dispatch per piece: how an engine starts before its
cells are compiled, and how it serves a step that has no cell.
"""

from collections.abc import Container, Iterable
from typing import NamedTuple

from bucketing.axis import Axis


class Piece(NamedTuple):
    """The key of a piece's program: its kind, and its bucket of rows."""

    kind: str
    rows: int

    def __str__(self) -> str:
        """Short, for progress and messages."""
        return f"{self.kind} of {self.rows} rows"


class PieceBuckets:
    """The buckets of the row axis, and which of them can be used already.

    Attributes:
        kinds: Kinds of pieces that a step needs.
        axis: Sizes of the row axis; the largest holds any step.
    """

    def __init__(self, kinds: Iterable[str], axis: Axis, ready: Container[object]) -> None:
        """Look on at a table of programs.

        Args:
            kinds: Kinds of pieces.
            axis: Sizes of the row axis.
            ready: Holds the pieces that are compiled; it may grow at any time.
        """
        self.kinds = tuple(kinds)
        self.axis = axis
        self._ready = ready
        self._usable: set[int] = set()

    def pieces(self, rows: int) -> tuple[Piece, ...]:
        """The pieces of one bucket."""
        return tuple(Piece(kind, rows) for kind in self.kinds)

    @property
    def first(self) -> tuple[Piece, ...]:
        """The pieces to start with: those of the largest bucket, which holds any step."""
        return self.pieces(self.axis.largest)

    @property
    def rest(self) -> tuple[Piece, ...]:
        """The other pieces, bucket by bucket from the smallest, which saves most."""
        return tuple(piece for rows in self.axis.edges[1:-1] for piece in self.pieces(rows))

    @property
    def largest(self) -> int:
        """The most rows that can be served now; 0 while no bucket has all its pieces."""
        return max(filter(self._is_usable, self.axis.edges[1:]), default=0)

    def bucket_for(self, rows: int) -> int | None:
        """The smallest bucket that holds ``rows`` and has all its pieces; None if none has."""
        for size in self.axis.edges[1:]:
            if size >= rows and self._is_usable(size):
                return size
        return None

    def _is_usable(self, size: int) -> bool:
        """Programs never go away, so a bucket that is complete once stays so."""
        if size not in self._usable:
            if not all(piece in self._ready for piece in self.pieces(size)):
                return False
            self._usable.add(size)
        return True
