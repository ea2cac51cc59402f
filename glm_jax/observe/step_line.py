"""One step as a line of the log: a JSON object without what has its usual value."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bucketing.cell import Cell
from glm_jax.engine.declined import Declined, Reason
from glm_jax.engine.outputs import HostPhases, RequestRows, StepRecord
from glm_jax.engine.plan import Occupancy
from glm_jax.engine.step_notes import Arrival, GroupDrafts
from glm_jax.observe.compile_event import CompileEvent

# Fields of a record that are numbers, words or lists of them; they stand in a line as they are.
_PLAIN = (
    "prefill_rows",
    "prefill_pad_rows",
    "decode_rows",
    "decode_pad_rows",
    "chunks",
    "loop_rows",
    "pairs",
    "mode",
    "mode_reason",
    "fault",
    "drafter",
    "new_drafts",
    "loop_steps",
    "loop_reason",
    "split_reason",
    "cached_tokens",
    "queried_tokens",
    "prefix_waits",
    "tokens",
    "ended",
    "refused",
)
_LISTS = ("halves", "preempted", "arrived", "declined", "drafts")
_USUAL: Mapping[str, Any] = {
    name: field.default
    for name, field in StepRecord.__dataclass_fields__.items()
    if name in (*_PLAIN, *_LISTS)
}
# A microsecond: finer than what a step's times mean.
_DIGITS = 6
# Lines hold no object twice, so nothing is circular.
_ENCODE = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


class LoggedStep(NamedTuple):
    """A step as it was logged.

    Attributes:
        record: What the engine said of it.
        compiles: Programs that appeared since the line before.
        calls: What the executor was told since then, as `recorded_call.write_call` writes it; empty
            where plans are not logged.
    """

    record: StepRecord
    compiles: tuple[CompileEvent, ...] = ()
    calls: Sequence[Any] = ()


def write_line(step: LoggedStep) -> str:
    """Return the line of a step, without its end."""
    record = step.record
    line: dict[str, Any] = {
        "step": record.index,
        "kind": record.kind,
        "t": round(record.started, _DIGITS),
        "wall": round(record.wall_time, _DIGITS),
        "cpu": round(record.cpu_time, _DIGITS),
    }
    if record.cell is not None:
        line["cell"] = record.cell
    # In the order of the prefill segment, then the decode segment.
    line["requests"] = [
        (name, *rows) for name, rows in zip(record.request_ids, record.rows, strict=True)
    ]
    for name in _PLAIN:
        value = getattr(record, name)
        # Counts, words and mappings: what is empty is usual, or else the default says so.
        if value and value != _USUAL[name]:
            line[name] = value
    for name in _LISTS:
        value = getattr(record, name)
        if value:
            line[name] = value
    line["occupancy"] = record.occupancy
    line["phases"] = [round(seconds, _DIGITS) for seconds in record.phases]
    line["predicted"] = round(record.predicted, _DIGITS)
    if record.expert_rows_max:
        line["experts"] = record.expert_rows_max, round(record.expert_rows_mean, 3)
    if step.compiles:
        line["compiles"] = step.compiles
    if step.calls:
        line["calls"] = step.calls
    return _ENCODE(line)


def read_line(text: str) -> LoggedStep:
    """Return the step of a line.

    Raises:
        ValueError: It is no line of a step log.
    """
    try:
        line = json.loads(text)
        compiles = _tuples(CompileEvent, line.get("compiles", ()))
        return LoggedStep(_record(line), compiles, line.get("calls", ()))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{text[:60]!r} is no line of a step log ({type(error).__name__}: {error})."
        ) from error


def _record(line: Mapping[str, Any]) -> StepRecord:
    most, mean = line.get("experts", (0, 0.0))
    cell = line.get("cell")
    return StepRecord(
        index=line["step"],
        kind=line["kind"],
        cell=None if cell is None else Cell(*cell),
        request_ids=tuple(name for name, *_ in line["requests"]),
        rows=tuple(RequestRows(*rows) for _, *rows in line["requests"]),
        phases=HostPhases(*line["phases"]),
        started=line["t"],
        wall_time=line["wall"],
        cpu_time=line["cpu"],
        predicted=line["predicted"],
        expert_rows_max=most,
        expert_rows_mean=mean,
        occupancy=Occupancy(*line["occupancy"]),
        halves=_tuples(Cell, line.get("halves", ())),
        arrived=_tuples(Arrival, line.get("arrived", ())),
        preempted=tuple(line.get("preempted", ())),
        declined=tuple(
            Declined(Reason(reason), tuple(names), count)
            for reason, names, count in line.get("declined", ())
        ),
        drafts=tuple(
            GroupDrafts(name, tuple(ids), accepted)
            for name, ids, accepted in line.get("drafts", ())
        ),
        **_plain(line),
    )


def _plain(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain fields; rows of a segment have no default of their own."""
    required = dict.fromkeys(_PLAIN[:4], 0)
    return required | {name: line[name] for name in _PLAIN if name in line}


def _tuples(kind: type, listed: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    return tuple(kind(*one) for one in listed)
