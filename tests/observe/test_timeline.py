"""The timeline of a log: valid events, and every step and every row of a request stands in it."""

import json
from collections import Counter, defaultdict
from itertools import pairwise

import pytest
from engine.fake_executor import Story
from observe.lives import Life
from observe.planted_log import PlantedLog

from glm_jax.engine.config import EngineConfig
from glm_jax.engine.faults import RequestFaultError
from glm_jax.observe.compile_event import CompileEvent
from glm_jax.observe.log_header import header_now
from glm_jax.observe.step_line import LoggedStep
from glm_jax.observe.step_log import StepLog, StepLogFile, read_step_log
from glm_jax.observe.timeline import ENGINE, PROGRAMS, REQUESTS, make_timeline, write_timeline

LIVES = (
    {},
    {"num_speculative_tokens": 3, "num_pages": 40},
    {"decode_loop_steps": 5, "num_speculative_tokens": 2},
    {"max_num_batched_tokens": 3, "num_pages": 14},
    {"step_policy": "alternate", "max_num_seqs": 2},
    {"split_steps": True},
)
EVERY_LIFE = pytest.mark.parametrize("options", LIVES)


def lived(tmp_path, seed, **options):
    """A random life, and its log as it was written and read."""
    life = Life(seed, **options)
    names = life.live(8)
    return life, names, logged(tmp_path, life.records, life.story.config)


def logged(tmp_path, records, config=None) -> StepLogFile:
    path = tmp_path / "steps.jsonl"
    log = StepLog(path, header_now(config or EngineConfig(), device="cpu"))
    for record in records:
        log.add(record)
    log.close()
    return read_step_log(path)


def events_of(log: StepLogFile) -> list[dict]:
    return json.loads(json.dumps(make_timeline(log), allow_nan=False))["traceEvents"]


def slices(events, process, category=None):
    chosen = [event for event in events if event["ph"] == "X" and event["pid"] == process]
    return [event for event in chosen if category is None or event["cat"] in category]


def steps_of(events):
    return slices(events, ENGINE, ("prefill", "decode", "mixed", "fault", "idle"))


def tracks(events, process) -> dict[int, str]:
    return {
        event["tid"]: event["args"]["name"]
        for event in events
        if event["name"] == "thread_name" and event["pid"] == process
    }


def check_format(events) -> None:
    """What the trace-event format demands of each kind of event that we use."""
    for event in events:
        assert event["ph"] in "XCMi"
        assert isinstance(event["name"], str)
        assert all(type(event[key]) is int for key in ("ts", "pid", "tid"))
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert type(event["dur"]) is int
            assert event["dur"] >= 0
            assert isinstance(event["cat"], str)
        elif event["ph"] == "C":
            assert event["args"]
            assert all(type(value) in (int, float) for value in event["args"].values())
        elif event["ph"] == "M":
            wanted = "name" if event["name"].endswith("_name") else "sort_index"
            assert list(event["args"]) == [wanted]
        else:
            assert event["s"] == "t"


def check_nesting(events) -> None:
    """Slices of a track lie within each other or apart."""
    by_track = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            by_track[event["pid"], event["tid"]].append((event["ts"], -event["dur"]))
    for spans in by_track.values():
        open_ends: list[int] = []
        for start, minus in sorted(spans):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or start - minus <= open_ends[-1]
            open_ends.append(start - minus)


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


@EVERY_LIFE
def test_a_requests_slices_are_its_rows(tmp_path, options):
    life, names, log = lived(tmp_path, 2, **options)
    events = events_of(log)
    lines = tracks(events, REQUESTS)
    assert sorted(lines.values()) == sorted(names)
    for track, name in lines.items():
        rows, tokens = [], 0
        for event in slices(events, REQUESTS, ("prefill", "decode")):
            if event["tid"] == track:
                values = event["args"]
                rows.append(
                    (event["cat"], values["step"], values["first position"], values["rows"])
                )
                tokens += values["tokens"]
        assert rows == [
            (
                "prefill" if one.prefill else "decode",
                record.index,
                one.start,
                one.known + one.drafts,
            )
            for record in life.records
            for who, one in zip(record.request_ids, record.rows, strict=True)
            if who == name
        ]
        assert tokens == len(life.story.output(name).outputs[0].token_ids)


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
            # No step lies between two slices.
            assert not [
                step
                for step in steps
                if left <= step["ts"] and step["ts"] + step["dur"] <= right and step["dur"]
            ]


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


def as_steps(records, compiles=()) -> tuple[LoggedStep, ...]:
    steps = [LoggedStep(record) for record in records]
    return (steps[0]._replace(compiles=tuple(compiles)), *steps[1:])


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


def test_an_id_that_is_used_again_has_another_track():
    story = Story()
    for _ in range(2):
        story.add("same", [1, 2, 3], max_tokens=2)
        story.finish()
        story.engine.forget("same")
    events = events_of(StepLogFile(header_now(story.config), as_steps(story.records)))
    assert list(tracks(events, REQUESTS).values()) == ["same", "same"]
    counts = Counter(event["tid"] for event in slices(events, REQUESTS, ("prefill", "decode")))
    assert list(counts.values()) == [2, 2]


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
