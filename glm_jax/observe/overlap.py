"""Which steps ran while a program was compiled or loaded."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from glm_jax.engine.outputs import StepRecord
from glm_jax.observe.compile_event import CompileEvent


class Overlap(NamedTuple):
    """The part of a step that ran beside a compilation.

    Attributes:
        seconds: Of the step.
        program: What was compiled; the longest beside the step.
        source: "compiled" or "loaded".
        inside: Whether it began and ended within the step, which then waited for it.
    """

    seconds: float
    program: str
    source: str
    inside: bool


def overlaps_of(
    records: Sequence[StepRecord], compiles: Iterable[CompileEvent]
) -> dict[int, Overlap]:
    """Return the overlap of each step that has one, by its place."""
    starts = [record.started for record in records]
    found: dict[int, Overlap] = {}
    for event in compiles:
        low = max(0, bisect_right(starts, event.started) - 1)
        for place in range(low, bisect_left(starts, event.ended)):
            record = records[place]
            end = record.started + record.wall_time
            seconds = min(end, event.ended) - max(record.started, event.started)
            if seconds <= 0 or (place in found and found[place].seconds >= seconds):
                continue
            inside = event.started >= record.started and event.ended <= end
            found[place] = Overlap(seconds, event.program, event.source, inside)
    return found
