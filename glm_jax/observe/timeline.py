"""A step log as a timeline in the trace-event format, for Perfetto (ui.perfetto.dev) or Chrome."""

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from glm_jax.observe.step_log import StepLogFile
from glm_jax.observe.timeline_counters import counter_events
from glm_jax.observe.timeline_event import Event, TimelineClock, Track, process_name, track_name
from glm_jax.observe.timeline_programs import program_events
from glm_jax.observe.timeline_requests import RequestTracks
from glm_jax.observe.timeline_steps import step_events

# Groups of tracks, from the top.
ENGINE, REQUESTS, PROGRAMS = 1, 2, 3


def make_timeline(log: StepLogFile) -> dict[str, Any]:
    """Return the timeline of a log as a JSON object.

    Steps are slices of one track, their phases lie within; each request has a track; what a step
    counts is a curve. Times are microseconds since the first thing that the log tells of.
    """
    clock = TimelineClock(_beginning(log))
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "device": log.header.device,
            "began at": log.header.epoch + clock.zero,
            "steps": len(log.steps),
        },
        "traceEvents": list(_events(log, clock)),
    }


def write_timeline(log: StepLogFile, path: Path) -> None:
    """Write the timeline of a log.

    Raises:
        OSError: The file cannot be written.
    """
    path.write_text(json.dumps(make_timeline(log), separators=(",", ":"), allow_nan=False))


def _events(log: StepLogFile, clock: TimelineClock) -> Iterator[Event]:
    steps = Track(ENGINE, 1)
    yield from process_name(ENGINE, "engine")
    yield from track_name(steps, "steps")
    yield from step_events(log.records, clock, steps)
    yield from counter_events(log.records, clock, ENGINE)
    yield from RequestTracks(log.records, clock, REQUESTS).events()
    yield from program_events(log.compiles, clock, PROGRAMS)


def _beginning(log: StepLogFile) -> float:
    """Return the earliest reading of the clock in a log; programs may be older than steps."""
    return min(
        chain(
            (record.started for record in log.records),
            (arrival.time for record in log.records for arrival in record.arrived),
            (event.started for event in log.compiles),
        ),
        default=0.0,
    )
