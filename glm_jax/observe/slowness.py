"""Why a step took longer than steps like it: what the log shows of it, in order of certainty."""

from collections.abc import Mapping, Sequence
from statistics import median

from bucketing.cell import Cell
from glm_jax.engine.modes import Mode
from glm_jax.engine.outputs import StepRecord
from glm_jax.observe.cause import Cause, Share
from glm_jax.observe.overlap import Overlap
from glm_jax.observe.typical import FEWEST, Typical, TypicalSteps, host_seconds

# The busiest expert counts as overloaded beyond this multiple of its usual load.
UNEVEN = 1.5
# A process that uses less than this many cores all the time waits for another device.
_BUSY = 0.75


class Slowness:
    """Divides the time of a step above its usual time among causes that its line shows."""

    def __init__(
        self,
        records: Sequence[StepRecord],
        typical: TypicalSteps,
        overlaps: Mapping[int, Overlap],
    ) -> None:
        """Take a log and what is usual in it."""
        self._records = records
        self._typical = typical
        self._overlaps = overlaps
        self._loads = _usual_loads(records)
        self._effects: dict[Cell, list[tuple[int, float]]] = {}
        self._find_effects()

    def shares(self, place: int, seconds: float, usual: Typical) -> list[Share]:
        """Return who is to blame for some seconds of a step; together exactly those.

        Args:
            place: Of the step.
            seconds: Above the usual, not below zero.
            usual: What the step takes as a FULL step.
        """
        parts = _Parts(seconds)
        record, overlap = self._records[place], self._overlaps.get(place)
        steps = record.loop_steps
        if overlap is not None and overlap.inside:
            parts.take(Cause.COMPILE, overlap.seconds, _beside(overlap))
        host = host_seconds(record) - usual.host * steps
        if record.mode not in (Mode.FULL, ""):
            host = self._pieces(parts, place, usual)
        parts.take(Cause.HOST, host, _host_evidence(record, usual))
        parts.take(Cause.HOST, *_starved(record, usual))
        if self._uneven(record):
            effect = self._effect(place)
            evidence = (
                f"the busiest expert got {record.expert_rows_max} rows, "
                f"{_load(record):.1f} times the mean; usual is {self._usual_load(record):.1f}"
            )
            parts.take(Cause.EXPERTS, parts.left if effect is None else effect, evidence)
        if overlap is not None:
            parts.take(Cause.COMPILE, parts.left, _beside(overlap))
        parts.take(Cause.UNKNOWN, parts.left, f"slower than {usual.basis}, and nothing tells why")
        return parts.shares

    def _pieces(self, parts: "_Parts", place: int, usual: Typical) -> float:
        """Charge the steps that are not FULL; return the host's time above theirs."""
        record = self._records[place]
        assert record.cell is not None, f"{record.mode=} without a cell"
        evidence = f"ran {record.mode}: {record.mode_reason or 'no reason was given'}"
        like = self._typical.of(record.cell, record.mode, record.pairs, without=place)
        if like is not None:
            parts.take(Cause.PIECEWISE, like.seconds - usual.seconds, evidence)
            return host_seconds(record) - max(like.host, usual.host)
        # Many programs are dispatched, so only the host's other phases can be told apart.
        host = host_seconds(record) - record.phases.dispatch - usual.host
        stall = min(max(0.0, host), parts.left)
        parts.take(Cause.PIECEWISE, parts.left - stall, evidence)
        return stall

    def _uneven(self, record: StepRecord) -> bool:
        usual = self._usual_load(record)
        return usual > 0 and _load(record) > UNEVEN * usual

    def _usual_load(self, record: StepRecord) -> float:
        return self._loads.get(record.cell, self._loads.get(None, 0.0))

    def _effect(self, place: int) -> float | None:
        """Return what an uneven load costs in other steps of the cell; None where none tell."""
        cell = self._records[place].cell
        others = [
            seconds
            for other, seconds in self._effects.get(cell, ())  # pyrefly: ignore
            if other != place
        ]
        return median(others) if len(others) >= FEWEST else None

    def _find_effects(self) -> None:
        for place, record in enumerate(self._records):
            if place in self._overlaps or record.mode != Mode.FULL or not self._uneven(record):
                continue
            assert record.cell is not None, f"{record.mode=} without a cell"
            usual = self._typical.of(record.cell, record.mode, record.pairs, without=place)
            if usual is not None and record.loop_steps == 1:
                host = max(0.0, host_seconds(record) - usual.host)
                effect = record.wall_time - usual.seconds - host
                self._effects.setdefault(record.cell, []).append((place, max(0.0, effect)))


class _Parts:
    """Seconds that are given away until none are left."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds
        self.shares: list[Share] = []

    def take(self, cause: Cause, seconds: float, evidence: str) -> None:
        seconds = min(seconds, self.left)
        if seconds > 0:
            self.shares.append(Share(cause, seconds, evidence))
            self.left -= seconds


def _load(record: StepRecord) -> float:
    """Return how many times the mean the busiest expert got."""
    return record.expert_rows_max / record.expert_rows_mean if record.expert_rows_mean else 0.0


def _usual_loads(records: Sequence[StepRecord]) -> dict[Cell | None, float]:
    """Return the median load of each cell with enough steps; under None, of all steps."""
    loads: dict[Cell | None, list[float]] = {}
    for record in records:
        if record.cell is not None and record.expert_rows_mean:
            for key in (record.cell, None):
                loads.setdefault(key, []).append(_load(record))
    return {
        key: median(values) for key, values in loads.items() if len(values) > FEWEST or key is None
    }


def _beside(overlap: Overlap) -> str:
    doing = "was loaded" if overlap.source == "loaded" else "was compiled"
    where = "in the step" if overlap.inside else "beside the step"
    return f"{overlap.program} {doing} {where} for {overlap.seconds * 1e3:.1f} ms of it"


def _starved(record: StepRecord, usual: Typical) -> tuple[float, str]:
    """Return the time in which a step on the CPU got fewer cores than usual, and the evidence.

    Its work takes the core-seconds it used; with the usual cores they would have passed sooner.
    Where the process waits for another device its core-seconds tell nothing: they are few anyway.
    """
    if not usual.cpu or usual.cpu < _BUSY * usual.seconds:
        return 0.0, ""
    cores = usual.cpu / usual.seconds
    lost = record.wall_time - record.cpu_time / cores
    return lost, (
        f"the process got {record.cpu_time / record.wall_time:.1f} cores, usual are {cores:.1f}: "
        "something else ran"
    )


def _host_evidence(record: StepRecord, usual: Typical) -> str:
    phases = record.phases._replace(device=0.0)._asdict()
    longest = max(phases, key=lambda name: phases[name])
    return (
        f"the host took {host_seconds(record) * 1e3:.1f} ms, usual is "
        f"{usual.host * record.loop_steps * 1e3:.1f}; longest: {longest}, "
        f"{phases[longest] * 1e3:.1f} ms"
    )
