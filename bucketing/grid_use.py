"""How often each cell of a grid was used, and how full it was; host-only."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from bucketing.cell import Cell


class CellCount(NamedTuple):
    """Steps of one cell.

    Attributes:
        steps: Steps planned for the cell.
        useful_rows: Rows in them that some request asked for.
        seconds: Their wall time.
        piecewise: How many of them ran piece by piece.
    """

    steps: int = 0
    useful_rows: int = 0
    seconds: float = 0.0
    piecewise: int = 0


class GridUse:
    """Counts per cell."""

    def __init__(self) -> None:
        """Start at zero."""
        self._counts: dict[Cell, CellCount] = {}

    def add(self, cell: Cell, useful_rows: int, seconds: float, *, piecewise: bool) -> None:
        """Count one step."""
        old = self._counts.get(cell, CellCount())
        self._counts[cell] = CellCount(
            old.steps + 1,
            old.useful_rows + useful_rows,
            old.seconds + seconds,
            old.piecewise + piecewise,
        )

    def __add__(self, other: "GridUse") -> "GridUse":
        """The counts of both."""
        total = GridUse()
        for use in (self, other):
            for cell, count in use._counts.items():
                old = total[cell]
                total._counts[cell] = CellCount(
                    old.steps + count.steps,
                    old.useful_rows + count.useful_rows,
                    old.seconds + count.seconds,
                    old.piecewise + count.piecewise,
                )
        return total

    def __getitem__(self, cell: Cell) -> CellCount:
        """The counts of a cell, zero if it was never used."""
        return self._counts.get(cell, CellCount())

    @property
    def steps(self) -> int:
        """Steps of all cells."""
        return sum(count.steps for count in self._counts.values())

    def waste(self, cell: Cell) -> float:
        """Pad rows as a fraction of the rows computed in a cell; 0 if it was never used."""
        count = self[cell]
        rows = count.steps * cell.rows
        return 1 - count.useful_rows / rows if rows else 0.0

    def as_json(self) -> list[dict[str, Any]]:
        """The counts as plain values."""
        return [
            {"cell": list(cell), **count._asdict()} for cell, count in sorted(self._counts.items())
        ]

    @classmethod
    def from_json(cls, content: list[Mapping[str, Any]]) -> "GridUse":
        """Read what ``as_json`` wrote.

        Raises:
            ValueError: the content is something else.
        """
        use = cls()
        try:
            for entry in content:
                cell = Cell(*(int(size) for size in entry["cell"]))
                counts = {name: entry[name] for name in CellCount._fields}
                use._counts[cell] = CellCount(
                    int(counts["steps"]),
                    int(counts["useful_rows"]),
                    float(counts["seconds"]),
                    int(counts["piecewise"]),
                )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"the content holds no use of cells ({type(error).__name__}: {error}). "
                "Delete the file; it is written anew."
            ) from error
        return use
