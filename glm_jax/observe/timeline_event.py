"""Events of the trace-event format that Chrome and Perfetto show; times are whole microseconds."""

from collections.abc import Mapping
from typing import Any, NamedTuple

Event = dict[str, Any]


class Track(NamedTuple):
    """A line of the timeline: a thread of a process, as the format calls it."""

    process: int
    thread: int


class TimelineClock:
    """Turns seconds of ``time.perf_counter`` into microseconds since the log began."""

    def __init__(self, zero: float) -> None:
        """Begin at a reading."""
        self.zero = zero

    def at(self, seconds: float) -> int:
        """Return the time of a reading, in microseconds."""
        return round((seconds - self.zero) * 1e6)


def process_name(process: int, name: str) -> list[Event]:
    """Return the events that name a group of tracks; groups stand in the order of their numbers."""
    track = Track(process, 0)
    return [
        _metadata("process_name", track, {"name": name}),
        _metadata("process_sort_index", track, {"sort_index": process}),
    ]


def track_name(track: Track, name: str) -> list[Event]:
    """Return the events that name a track; tracks stand in the order of their numbers."""
    return [
        _metadata("thread_name", track, {"name": name}),
        _metadata("thread_sort_index", track, {"sort_index": track.thread}),
    ]


def slice_event(
    track: Track,
    name: str,
    start: int,
    end: int,
    *,
    category: str,
    values: Mapping[str, Any],
) -> Event:
    """Return something that took time.

    Args:
        track: Where; slices of a track lie within each other or apart.
        name: What is written on it.
        start: Microseconds.
        end: Microseconds; not before `start`.
        category: What viewers filter by.
        values: What is shown of it when it is clicked.
    """
    assert start <= end, f"{name} {start=} {end=}"
    return {
        **_placed("X", track, name, start),
        "dur": end - start,
        "cat": category,
        "args": dict(values),
    }


def instant_event(track: Track, name: str, time: int, values: Mapping[str, Any]) -> Event:
    """Return something that happened at one moment, in microseconds."""
    return {**_placed("i", track, name, time), "s": "t", "args": dict(values)}


def counter_event(process: int, name: str, time: int, values: Mapping[str, float | int]) -> Event:
    """Return numbers that hold from a moment on, in microseconds; they are drawn as a stack."""
    return {**_placed("C", Track(process, 0), name, time), "args": dict(values)}


def _metadata(name: str, track: Track, values: Mapping[str, Any]) -> Event:
    return {**_placed("M", track, name, 0), "args": dict(values)}


def _placed(phase: str, track: Track, name: str, time: int) -> Event:
    return {"ph": phase, "name": name, "pid": track.process, "tid": track.thread, "ts": time}
