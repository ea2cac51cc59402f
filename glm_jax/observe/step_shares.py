"""Where the time of one step went, for a request that was in it and for one that was not."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bucketing.cell import Cell
from glm_jax.engine.modes import Mode
from glm_jax.engine.outputs import StepRecord
from glm_jax.observe.cause import Cause, Share
from glm_jax.observe.compile_event import CompileEvent
from glm_jax.observe.overlap import overlaps_of
from glm_jax.observe.slowness import Slowness
from glm_jax.observe.typical import Typical, TypicalSteps, decode_pairs


class StepTold(NamedTuple):
    """A step as a request saw it.

    Attributes:
        normal: Seconds that it may take; 0 for a request that got nothing from it.
        shares: The rest, exactly.
    """

    normal: float
    shares: list[Share]


class StepShares:
    """Divides the time of each step of a log.

    Attributes:
        typical: What is usual in the log.
    """

    def __init__(self, records: Sequence[StepRecord], compiles: Iterable[CompileEvent]) -> None:
        """Take a log."""
        self._records = records
        overlaps = overlaps_of(records, compiles)
        self.typical = TypicalSteps(records, overlaps)
        self._slowness = Slowness(records, self.typical, overlaps)
        # Every request of a step asks the same.
        self._alone: dict[int, Typical | None] = {}
        self._present: dict[tuple[int, Cause | None], StepTold] = {}

    def alone(self, place: int) -> Typical | None:
        """Return the usual decode step of a step's decodes, at their context.

        Of the smallest cell that holds them, with no prefill rows and no more pads than must be.
        """
        if place not in self._alone:
            self._alone[place] = self._find_alone(place)
        return self._alone[place]

    def _find_alone(self, place: int) -> Typical | None:
        record = self._records[place]
        groups = sum(not rows.prefill for rows in record.rows)
        width = max(
            (rows.known + rows.drafts for rows in record.rows if not rows.prefill), default=1
        )
        pairs = decode_pairs(record)
        for mode in dict.fromkeys((Mode.FULL, record.mode or Mode.FULL)):
            cells = [
                cell
                for cell in self.typical.decode_cells(mode)
                if cell.groups >= groups and cell.width >= width
            ]
            for cell in sorted(cells, key=lambda cell: (cell.rows, cell.groups)):
                found = self.typical.of(cell, mode, pairs, without=place)
                if found is not None:
                    return found
        return None

    def present(self, place: int, alone: Typical, *, own: Cause | None = None) -> StepTold:
        """Divide a step that gave a request its tokens.

        Args:
            place: Of the step.
            alone: Its decodes in a step of their own, usually.
            own: Why the request had prefill rows itself, if it had.
        """
        known = self._present.get((place, own))
        if known is None:
            known = self._present[place, own] = self._divide(place, alone, own)
        return known

    def _divide(self, place: int, alone: Typical, own: Cause | None) -> StepTold:
        record = self._records[place]
        normal = alone.seconds * record.loop_steps
        usual = self._usual(place, alone)
        whole, shares = self._apart(place, usual)
        regular = whole - normal
        if regular < 0:
            shares.append(Share(Cause.UNKNOWN, regular, f"faster than {alone.basis}"))
        elif own is not None:
            evidence = f"its own rows were computed again beside {_rows(record)}"
            shares.append(Share(own, regular, evidence))
        else:
            shares += _mixed(record, regular, usual, alone)
        return StepTold(normal, shares)

    def absent(self, place: int, cause: Cause, evidence: str) -> StepTold:
        """Divide a step that a request had to wait for.

        Args:
            place: Of the step.
            cause: Why it was not served.
            evidence: What says so.
        """
        record = self._records[place]
        if record.cell is None or record.fault is not None:
            return StepTold(0.0, [Share(cause, record.wall_time, evidence)])
        whole, shares = self._apart(place, self._usual(place, None))
        if cause is Cause.PREFILL:
            return StepTold(0.0, shares + _divided(record, whole, record.pad_rows, evidence))
        return StepTold(0.0, [*shares, Share(cause, whole, evidence)])

    def _apart(self, place: int, usual: Typical) -> tuple[float, list[Share]]:
        """Return what a step usually takes, and whose the time above it is.

        A step can be faster than those it is compared with; over many steps that evens out, so it
        is kept. One that was only guessed at is no slower than it was.
        """
        record = self._records[place]
        wall, whole = record.wall_time, usual.seconds * record.loop_steps
        if whole <= wall:
            return whole, self._slowness.shares(place, wall - whole, usual)
        if not usual.measured:
            return wall, []
        return whole, [Share(Cause.UNKNOWN, wall - whole, f"faster than {usual.basis}")]

    def _usual(self, place: int, alone: Typical | None) -> Typical:
        """Return what a step takes as a FULL step of its cell."""
        record = self._records[place]
        assert record.cell is not None, f"step {record.index} has no cell"
        known = self.typical.of(record.cell, Mode.FULL, record.pairs, without=place)
        if known is None and alone is not None and alone.cell == record.cell:
            known = alone
        known = known or self.typical.guess(record, alone)
        if known is not None:
            return known
        # Nothing like it is in the log: all of it is taken for usual.
        seconds = record.wall_time / record.loop_steps
        return Typical(seconds, seconds, "nothing else in the log", measured=False)


def _mixed(record: StepRecord, regular: float, usual: Typical, alone: Typical) -> list[Share]:
    """Divide what a step usually takes beyond its decodes alone."""
    evidence = (
        f"{_rows(record)}: such a step takes {usual.seconds * 1e3:.1f} ms ({usual.basis}), its "
        f"decodes alone {alone.seconds * 1e3:.1f} ms ({alone.basis})"
    )
    pads = record.pad_rows
    if alone.cell is not None:
        # Pads that the decodes have alone as well are no surprise.
        pads = max(0, pads - max(0, alone.cell.rows - _decode_rows(record)))
    return _divided(record, regular, pads, evidence)


def _divided(record: StepRecord, seconds: float, pads: int, evidence: str) -> list[Share]:
    """Divide seconds between prefill rows and pads, each row worth the same."""
    rows = _prefill_rows(record)
    if rows + pads == 0:
        return [Share(Cause.UNKNOWN, seconds, evidence)]
    padding = seconds * pads / (rows + pads)
    return [
        Share(Cause.PREFILL, seconds - padding, evidence),
        Share(Cause.PADDING, padding, f"{pads} pad rows; {evidence}"),
    ]


def _prefill_rows(record: StepRecord) -> int:
    return sum(rows.known for rows in record.rows if rows.prefill)


def _decode_rows(record: StepRecord) -> int:
    return sum(rows.known + rows.drafts for rows in record.rows if not rows.prefill)


def _rows(record: StepRecord) -> str:
    cell = tuple(record.cell or Cell(0, 0, 1))
    return f"{_prefill_rows(record)} prefill rows and {record.pad_rows} pads in cell {cell}"
