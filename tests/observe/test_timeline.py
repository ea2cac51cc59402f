"""The timeline of a log: valid events, every step with its phases, curves that add up."""

import json
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from engine.fake_executor import Story
from observe.planted_log import PlantedLog
from observe.timeline_reading import (
    EVERY_LIFE,
    as_steps,
    check_format,
    check_nesting,
    events_of,
    lived,
    slices,
    steps_of,
    tracks,
)

from glm_jax.engine.config import EngineConfig
from glm_jax.engine.faults import RequestFaultError
from glm_jax.observe.compile_event import CompileEvent
from glm_jax.observe.log_header import header_now
from glm_jax.observe.step_log import StepLogFile
from glm_jax.observe.timeline import ENGINE, PROGRAMS, REQUESTS, make_timeline, write_timeline


@EVERY_LIFE
def test_events_follow_the_format_and_slices_nest(tmp_path, options):
    for seed in range(3):
        _, _, log = lived(tmp_path, seed, **options)
        events = events_of(log)
        check_format(events)
        check_nesting(events)
        named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
        used = {(event["pid"], event["tid"]) for event in events if event["ph"] in "Xi"}
        assert used == named


@EVERY_LIFE
def test_each_step_is_a_slice_with_its_phases_within(tmp_path, options):
    life, _, log = lived(tmp_path, 1, **options)
    events = events_of(log)
    steps = steps_of(events)
    wanted = [record for record in life.records if record.cell is not None]
    shown = [event for event in steps if event["cat"] != "idle"]
    assert [event["args"]["step"] for event in shown] == [record.index for record in wanted]
    assert [event["cat"] for event in shown] == [record.kind for record in wanted]
    phases = slices(events, ENGINE, ("phase",))
    for event, record in zip(shown, wanted, strict=True):
        assert event["dur"] == pytest.approx(record.wall_time * 1e6, abs=2)
        assert event["args"].get("pad rows", 0) == record.pad_rows
        assert event["args"]["mode"] == record.mode
        end = event["ts"] + event["dur"]
        inner = [one for one in phases if event["ts"] <= one["ts"] and one["ts"] < end]
        order = [one["name"] for one in sorted(inner, key=lambda one: one["ts"])]
        assert order == [
            name
            for name in ("schedule", "pack", "dispatch", "device", "fetch", "commit")
            if name in order
        ]
        known = sum(record.phases) * 1e6
        assert sum(one["dur"] for one in inner) == pytest.approx(known, abs=6)


def test_rounded_times_do_not_make_steps_cross():
    planted = PlantedLog(0)
    planted.decode(3)
    first, second, third = planted.records
    first = replace(first, wall_time=second.started - first.started + 3e-6)
    log = StepLogFile(header_now(EngineConfig()), as_steps([first, second, third]))
    events = events_of(log)
    check_nesting(events)
    one, two, _ = steps_of(events)
    assert one["ts"] + one["dur"] == two["ts"]


@EVERY_LIFE
def test_curves_add_up(tmp_path, options):
    life, _, log = lived(tmp_path, 5, **options)
    sums: dict[str, Counter] = defaultdict(Counter)
    for event in events_of(log):
        if event["ph"] == "C":
            sums[event["name"]].update(event["args"])
    records = [record for record in life.records if record.cell is not None]
    prompt = sum(rows.known for record in records for rows in record.rows if rows.prefill)
    useful = sum(record.prefill_rows + record.loop_rows for record in records)
    assert sums["rows of a step"] == {"prefill": prompt, "decode": useful - prompt}
    accepted = sum(record.accepted_tokens for record in records)
    verified = sum(record.draft_tokens for record in records)
    assert sums["drafts of a step"].total() == verified
    assert sums["drafts of a step"]["accepted"] == accepted


def test_curves_end_with_the_log_and_repeat_nothing(tmp_path):
    _, _, log = lived(tmp_path, 5, num_speculative_tokens=2)
    events = events_of(log)
    curves = defaultdict(list)
    for event in events:
        if event["ph"] == "C":
            curves[event["name"]].append(event)
    end = max(event["ts"] + event["dur"] for event in steps_of(events))
    for name in ("rows of a step", "drafts of a step"):
        last = curves[name][-1]
        assert last["ts"] == pytest.approx(end, abs=2)
        assert set(last["args"].values()) == {0}
    for name in ("requests", "pages without owner"):
        values = [event["args"] for event in curves[name]]
        assert all(one != after for one, after in pairwise(values))


def test_curves_hold_what_the_step_was_planned_with(tmp_path):
    life, _, log = lived(tmp_path, 6)
    events = events_of(log)
    starts = {event["args"]["step"]: event["ts"] for event in steps_of(events)}
    for name, fields in (
        ("requests", lambda one: {"running": one.running, "waiting": one.waiting}),
        (
            "pages without owner",
            lambda one: {"cached": one.cached_pages, "empty": one.free_pages - one.cached_pages},
        ),
    ):
        curve = [event for event in events if event["name"] == name]
        for record in life.records:
            if record.cell is not None:
                known = [event for event in curve if event["ts"] <= starts[record.index]]
                assert known[-1]["args"] == fields(record.occupancy)


def test_programs_that_compile_side_by_side_have_tracks_of_their_own():
    planted = PlantedLog(0)
    planted.decode(3)
    compiles = [
        CompileEvent("one", "compiled", 4.0, 100.0),
        CompileEvent("two", "compiled", 1.0, 99.0),
        CompileEvent("three", "loaded", 0.5, 99.75),
        CompileEvent("four", "loaded", 0.5, 99.9),
    ]
    events = events_of(StepLogFile(header_now(EngineConfig()), as_steps(planted.records, compiles)))
    check_nesting(events)
    lines = tracks(events, PROGRAMS)
    assert [
        (event["name"], lines[event["tid"]], event["ts"], event["dur"])
        for event in slices(events, PROGRAMS)
    ] == [
        ("one", "compiler 1", 0, 4_000_000),
        ("two", "compiler 2", 2_000_000, 1_000_000),
        ("three", "compiler 2", 3_250_000, 500_000),
        ("four", "compiler 3", 3_400_000, 500_000),
    ]


def test_a_lost_step_is_marked_and_its_rows_are_not_counted():
    def hook(phase, plan):
        if phase == "dispatch" and story.engine.steps == 1:
            raise RequestFaultError("broken", ("a",))

    story = Story(hook=hook)
    story.add("a", [1, 2, 3], max_tokens=4)
    story.add("b", [4, 5, 6], max_tokens=2)
    story.finish()
    log = StepLogFile(header_now(story.config), as_steps(story.records))
    events = events_of(log)
    (fault,) = [event for event in events if event["name"] == "fault"]
    assert "broken" in fault["args"]["message"]
    lost = [event for event in slices(events, REQUESTS) if event["name"].endswith(", lost")]
    assert {event["args"]["step"] for event in lost} == {1}
    counted = sum(
        event["args"]["prefill"] + event["args"]["decode"]
        for event in events
        if event["name"] == "rows of a step"
    )
    assert counted == sum(
        record.prefill_rows + record.loop_rows for record in story.records if record.fault is None
    )


def test_the_file_is_the_timeline(tmp_path):
    _, _, log = lived(tmp_path, 0)
    write_timeline(log, tmp_path / "trace.json")
    content = json.loads((tmp_path / "trace.json").read_text())
    assert content == make_timeline(log)
    assert content["displayTimeUnit"] == "ms"
    assert content["otherData"]["steps"] == len(log.steps)


def test_a_log_without_steps_is_an_empty_timeline():
    log = StepLogFile(header_now(EngineConfig()), ())
    events = events_of(log)
    check_format(events)
    assert {event["ph"] for event in events} == {"M"}
