"""The steps of a log as slices of a timeline: one per step, its phases within, faults as marks."""

from collections.abc import Iterator, Sequence
from typing import Any

from bucketing.cell import Cell
from glm_jax.engine.faults import PHASES
from glm_jax.engine.outputs import StepRecord
from glm_jax.observe.timeline_event import (
    Event,
    TimelineClock,
    Track,
    instant_event,
    slice_event,
)


def step_events(
    records: Sequence[StepRecord], clock: TimelineClock, track: Track
) -> Iterator[Event]:
    """Yield the slices of all steps and of their phases.

    Args:
        records: The steps, in order.
        clock: Of the timeline.
        track: Where they stand.
    """
    for record, (start, end) in zip(records, step_spans(records, clock), strict=True):
        values = step_values(record)
        name = " ".join([record.kind, cell_name(record.cell)]).strip()
        yield slice_event(track, name, start, end, category=record.kind, values=values)
        yield from _phase_events(record, start, end, track)
        if record.fault is not None:
            yield instant_event(track, "fault", end, {"message": record.fault})


def step_spans(records: Sequence[StepRecord], clock: TimelineClock) -> list[tuple[int, int]]:
    """Return where each step begins and ends, in microseconds; none reaches into the next."""
    starts = [clock.at(record.started) for record in records]
    ends = [clock.at(record.started + record.wall_time) for record in records]
    # Times were rounded for the log, so an end may lie behind the next beginning.
    limits = [*starts[1:], *ends[-1:]]
    return [
        (start, max(start, min(end, limit)))
        for start, end, limit in zip(starts, ends, limits, strict=True)
    ]


def step_values(record: StepRecord) -> dict[str, Any]:
    """Return what a step says of itself; what has its usual value is left out."""
    told = {
        "step": record.index,
        "cell": cell_name(record.cell),
        "mode": record.mode,
        "mode reason": record.mode_reason,
        "requests": len(record.request_ids),
        "prefill segment rows": record.prefill_rows,
        "decode segment rows": record.decode_rows,
        "pad rows": record.pad_rows,
        "drafts verified": record.draft_tokens,
        "drafts accepted": record.accepted_tokens,
        "steps in the loop": record.loop_steps if record.loop_steps > 1 else 0,
        "why no loop": record.loop_reason,
        "halves": [cell_name(cell) for cell in record.halves],
        "tokens": sum(record.tokens.values()),
        "predicted ms": round(record.predicted * 1e3, 3),
        "busiest expert / mean": _imbalance(record),
        "declined": {note.reason.value: note.count for note in record.declined},
        "preempted": list(record.preempted),
        "refused": record.refused,
        "fault": record.fault,
    }
    return {"step": record.index} | {name: value for name, value in told.items() if value}


def cell_name(cell: Cell | None) -> str:
    """Return a cell as prefill rows x groups x width; empty for none."""
    return "" if cell is None else f"{cell.prefill}x{cell.groups}x{cell.width}"


def _imbalance(record: StepRecord) -> float | int:
    mean = record.expert_rows_mean
    return round(record.expert_rows_max / mean, 2) if mean else 0


def _phase_events(record: StepRecord, start: int, end: int, track: Track) -> Iterator[Event]:
    """Yield the phases, one after the other from the beginning of the step."""
    spent, left = 0.0, start
    for name in PHASES:
        seconds = getattr(record.phases, name)
        if seconds <= 0:
            continue
        spent += seconds
        right = min(end, start + round(spent * 1e6))
        values = {"ms": round(seconds * 1e3, 3)}
        yield slice_event(track, name, left, right, category="phase", values=values)
        left = right
