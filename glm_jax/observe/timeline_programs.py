"""Compilations as slices of a timeline: as many tracks as ran side by side."""

from collections.abc import Iterable, Iterator

from glm_jax.observe.compile_event import CompileEvent
from glm_jax.observe.timeline_event import (
    Event,
    TimelineClock,
    Track,
    process_name,
    slice_event,
    track_name,
)


def program_events(
    compiles: Iterable[CompileEvent], clock: TimelineClock, process: int
) -> Iterator[Event]:
    """Yield the slices of all programs that became available, and the names of their tracks.

    Args:
        compiles: The programs.
        clock: Of the timeline.
        process: Group of the tracks.
    """
    # When each track is free again: slices of one must not cross.
    free: list[int] = []
    for event in sorted(compiles, key=lambda event: event.started):
        start, end = clock.at(event.started), clock.at(event.ended)
        lane = next((number for number, time in enumerate(free) if time <= start), len(free))
        track = Track(process, lane + 1)
        if lane == len(free):
            if not free:
                yield from process_name(process, "programs")
            yield from track_name(track, f"compiler {lane + 1}")
            free.append(end)
        free[lane] = end
        values = {"seconds": round(event.seconds, 3), "source": event.source}
        yield slice_event(track, event.program, start, end, category="program", values=values)
