"""What tests of timelines share: lives and their logs, events by sort, the rules of the format."""

import json
from collections import defaultdict

import pytest
from observe.lives import Life

from glm_jax.engine.config import EngineConfig
from glm_jax.observe.log_header import header_now
from glm_jax.observe.step_line import LoggedStep
from glm_jax.observe.step_log import StepLog, StepLogFile, read_step_log
from glm_jax.observe.timeline import ENGINE, make_timeline

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


def as_steps(records, compiles=()) -> tuple[LoggedStep, ...]:
    steps = [LoggedStep(record) for record in records]
    return (steps[0]._replace(compiles=tuple(compiles)), *steps[1:])
