"""The requests in a timeline: each waits, is served and ends as the log says."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

from engine.fake_executor import Story
from observe.timeline_reading import (
    EVERY_LIFE,
    as_steps,
    events_of,
    lived,
    slices,
    steps_of,
    tracks,
)

from glm_jax.observe.log_header import header_now
from glm_jax.observe.step_log import StepLogFile
from glm_jax.observe.timeline import REQUESTS


@EVERY_LIFE
def test_a_requests_slices_are_its_rows(tmp_path, options):
    life, names, log = lived(tmp_path, 2, **options)
    events = events_of(log)
    lines = tracks(events, REQUESTS)
    assert sorted(lines.values()) == sorted(names)
    for track, name in lines.items():
        own = [
            event["args"]
            for event in slices(events, REQUESTS, ("prefill", "decode"))
            if event["tid"] == track
        ]
        assert [
            (one["step"], one["first position"], one["rows"], one["segment"]) for one in own
        ] == [
            (record.index, one.start, one.known + one.drafts, segment)
            for record in life.records
            for who, one, segment in zip(
                record.request_ids, record.rows, segments(record), strict=True
            )
            if who == name
        ]
        tokens = sum(one["tokens"] for one in own)
        assert tokens == len(life.story.output(name).outputs[0].token_ids)


def segments(record) -> list[str]:
    """Where each request of a step sits: the prefill segment holds as many rows as it says."""
    found, left = [], record.prefill_rows
    for rows in record.rows:
        found.append("prefill" if left else "decode")
        left -= rows.known if left else 0
    return found


@EVERY_LIFE
def test_a_slice_says_what_its_rows_are(tmp_path, options):
    life, _, log = lived(tmp_path, 2, **options)
    events = events_of(log)
    lines = tracks(events, REQUESTS)
    kinds = {
        (record.index, name): "prefill" if rows.prefill else "decode"
        for record in life.records
        for name, rows in zip(record.request_ids, record.rows, strict=True)
    }
    shown = slices(events, REQUESTS, ("prefill", "decode"))
    assert kinds == {(event["args"]["step"], lines[event["tid"]]): event["cat"] for event in shown}
    assert all(event["name"].startswith(event["cat"]) for event in shown)


@EVERY_LIFE
def test_a_requests_end_has_its_reason_and_its_tokens(tmp_path, options):
    life, _, log = lived(tmp_path, 3, **options)
    events = events_of(log)
    ends = {
        tracks(events, REQUESTS)[event["tid"]]: (event["name"], event["args"]["tokens"])
        for event in events
        if event["ph"] == "i" and event["pid"] == REQUESTS
    }
    assert ends == {
        name: (reason, len(life.story.output(name).outputs[0].token_ids))
        for record in life.records
        for name, reason in record.ended.items()
    }


@EVERY_LIFE
def test_a_request_is_served_or_waits_from_arrival_to_its_last_step(tmp_path, options):
    _, _, log = lived(tmp_path, 4, **options)
    events = events_of(log)
    steps = steps_of(events)
    for track in tracks(events, REQUESTS):
        own = sorted(
            (event for event in slices(events, REQUESTS) if event["tid"] == track),
            key=lambda event: (event["ts"], event["dur"]),
        )
        for one, after in pairwise(own):
            left, right = one["ts"] + one["dur"], after["ts"]
            assert left <= right
            # No step lies between two slices.
            assert not [
                step
                for step in steps
                if left <= step["ts"] and step["ts"] + step["dur"] <= right and step["dur"]
            ]


def test_a_request_that_is_in_every_step_waits_once():
    story = Story()
    story.add("a", [1, 2, 3], max_tokens=5)
    story.finish()
    events = events_of(StepLogFile(header_now(story.config), as_steps(story.records)))
    assert len(slices(events, REQUESTS, ("waiting",))) == 1


def test_an_abort_between_two_steps_stands_before_the_second():
    story = Story()
    for name in ("stays", "gone"):
        story.add(name, [1, 2, 3], max_tokens=6)
    story.step()
    story.engine.abort("gone")
    story.finish()
    events = events_of(StepLogFile(header_now(story.config), as_steps(story.records)))
    ends = {event["name"]: event["ts"] for event in events if event["ph"] == "i"}
    steps = steps_of(events)
    assert ends == {"abort": steps[1]["ts"], "length": steps[-1]["ts"] + steps[-1]["dur"]}


def test_a_wait_tells_why():
    story = Story(max_num_seqs=1)
    story.add("first", [1, 2, 3], max_tokens=4)
    story.add("second", [5, 6], max_tokens=1)
    story.finish()
    events = events_of(StepLogFile(header_now(story.config), as_steps(story.records)))
    lines = tracks(events, REQUESTS)
    (wait,) = [
        event for event in slices(events, REQUESTS, ("waiting",)) if lines[event["tid"]] == "second"
    ]
    assert wait["args"] == {"steps by reason": {"no free slot": 4}, "prompt tokens": 2}


def test_a_preempted_request_waits_by_that_name():
    story = Story(num_pages=7, max_num_batched_tokens=8, watermark=0.0)
    story.add("old", [1] * 8, max_tokens=12)
    story.add("new", [2] * 8, max_tokens=12)
    story.finish()
    events = events_of(StepLogFile(header_now(story.config), as_steps(story.records)))
    waits = [
        (tracks(events, REQUESTS)[event["tid"]], event["args"]["steps by reason"]["preempted"])
        for event in slices(events, REQUESTS, ("waiting",))
        if event["name"] == "preempted"
    ]
    assert waits == [("new", 1)]


def test_an_id_that_is_used_again_has_another_track():
    story = Story()
    for _ in range(2):
        story.add("same", [1, 2, 3], max_tokens=2)
        story.finish()
        story.engine.forget("same")
    # With the lines of arrivals, and in a log that began later.
    unannounced = [replace(record, arrived=()) for record in story.records]
    for records in (story.records, unannounced):
        events = events_of(StepLogFile(header_now(story.config), as_steps(records)))
        assert list(tracks(events, REQUESTS).values()) == ["same", "same"]
        counts = Counter(event["tid"] for event in slices(events, REQUESTS, ("prefill", "decode")))
        assert list(counts.values()) == [2, 2]
