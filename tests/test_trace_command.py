"""`glm-jax trace`: what it writes of a log; no model is loaded."""

import json

import pytest
from observe.planted_log import PlantedLog

from glm_jax.cli import main
from glm_jax.engine.config import EngineConfig
from glm_jax.observe.log_header import header_now
from glm_jax.observe.step_log import StepLog


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A log with two chunks among decodes; the working folder is empty."""
    planted = PlantedLog(0)
    planted.decode(5)
    planted.chunks(2)
    log = StepLog(tmp_path / "steps.jsonl", header_now(EngineConfig(), device="cpu"))
    for record in planted.records:
        log.add(record)
    log.close()
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return log.path


def test_it_writes_the_timeline_here(path, tmp_path, capsys):
    assert main(["trace", str(path)]) == 0
    assert [one.name for one in (tmp_path / "here").iterdir()] == ["trace.json"]
    content = json.loads((tmp_path / "here" / "trace.json").read_text())
    steps = [event for event in content["traceEvents"] if event.get("cat") in ("decode", "mixed")]
    assert [event["name"] for event in steps if event["pid"] == 1] == [
        *["decode 0x8x1"] * 5,
        *["mixed 64x8x1"] * 2,
    ]
    assert capsys.readouterr().out == "written: trace.json\n"


def test_it_writes_what_is_asked_for(path, tmp_path, capsys):
    flags = ["--output", "a.json", "--png", "b.png", "--html", "c.html"]
    assert main(["trace", str(path), *flags]) == 0
    found = sorted(one.name for one in (tmp_path / "here").iterdir())
    assert found == ["a.json", "b.png", "c.html"]
    assert capsys.readouterr().out.split() == [
        "written:", "a.json", "written:", "b.png", "written:", "c.html"
    ]  # fmt: skip


def test_a_picture_alone_is_no_timeline(path, tmp_path):
    assert main(["trace", str(path), "--png", "b.png"]) == 0
    assert [one.name for one in (tmp_path / "here").iterdir()] == ["b.png"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent"], "No such file"),
        ([__file__], "begins no step log"),
        (["LOG", "--output", "absent/trace.json"], "No such file"),
    ],
)
def test_a_users_mistake_is_one_line(path, capsys, arguments, message):
    arguments = [str(path) if one == "LOG" else one for one in arguments]
    assert main(["trace", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("glm-jax trace: ")
    assert message in error
    assert error.count("\n") == 1
