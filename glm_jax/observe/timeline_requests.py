"""The requests of a log as tracks of a timeline: waiting, chunks, decode steps, the end."""

from collections.abc import Iterator, Sequence
from typing import Any

from glm_jax.engine.outputs import StepRecord
from glm_jax.observe.timeline_event import (
    Event,
    TimelineClock,
    Track,
    instant_event,
    process_name,
    slice_event,
    track_name,
)
from glm_jax.observe.timeline_lives import Life, Service, Wait, lives_of
from glm_jax.observe.timeline_steps import step_spans


class RequestTracks:
    """Makes the tracks of the requests of a log."""

    def __init__(self, records: Sequence[StepRecord], clock: TimelineClock, process: int) -> None:
        """Take a log.

        Args:
            records: The steps, in order.
            clock: Of the timeline.
            process: Group of the tracks.
        """
        self._records = records
        self._clock = clock
        self._process = process
        self._spans = step_spans(records, clock)

    def events(self) -> Iterator[Event]:
        """Yield the events of all requests, each on a track of its own."""
        yield from process_name(self._process, "requests")
        for number, life in enumerate(lives_of(self._records), start=1):
            yield from self._track(life, Track(self._process, number))

    def _track(self, life: Life, track: Track) -> Iterator[Event]:
        yield from track_name(track, life.request_id)
        for wait in life.waits:
            yield self._wait(life, wait, track)
        for service in life.services:
            yield self._service(service, track)
        if life.end is not None:
            yield self._end(life, life.end, track)

    def _wait(self, life: Life, wait: Wait, track: Track) -> Event:
        end = self._spans[wait.place][0]
        values: dict[str, Any] = {"steps by reason": wait.reasons}
        if wait.since is not None:
            start = self._spans[wait.since][1]
        else:
            assert life.arrival is not None, f"{life.request_id} waits since nothing"
            start = min(end, self._clock.at(life.arrival.time))
            values["prompt tokens"] = life.arrival.prompt_tokens
        name = "preempted" if "preempted" in wait.reasons else "waiting"
        return slice_event(track, name, start, end, category="waiting", values=values)

    def _service(self, service: Service, track: Track) -> Event:
        record, rows = self._records[service.place], service.rows
        values: dict[str, Any] = {
            "step": record.index,
            "first position": rows.start,
            "rows": rows.known + rows.drafts,
            "segment": "prefill" if service.chunk else "decode",
            "tokens": service.tokens,
        }
        if rows.prefill:
            name = f"prefill {rows.known} rows"
        else:
            name = "decode" if record.loop_steps == 1 else f"decode, {record.loop_steps} steps"
        if service.verified:
            values |= {"drafts": service.verified, "accepted": service.accepted}
            name += f", {service.accepted} of {service.verified} drafts"
        if record.fault is not None:
            name += ", lost"
        start, end = self._spans[service.place]
        category = "prefill" if rows.prefill else "decode"
        return slice_event(track, name, start, end, category=category, values=values)

    def _end(self, life: Life, place: int, track: Track) -> Event:
        start, end = self._spans[place]
        # An abort between two steps is told by the second.
        inside = life.request_id in self._records[place].request_ids
        values = {"tokens": life.tokens}
        return instant_event(track, life.reason or "ended", end if inside else start, values)
