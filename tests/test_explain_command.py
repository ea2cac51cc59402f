"""`glm-jax explain`: what it prints of a log, and as JSON; no model is loaded."""

import json

import pytest
from observe.planted_log import CHUNK, PlantedLog

from glm_jax.cli import main
from glm_jax.engine.config import EngineConfig
from glm_jax.model.presets import PRESETS
from glm_jax.observe.log_header import header_now
from glm_jax.observe.step_log import StepLog


@pytest.fixture
def path(tmp_path):
    """A log with a chunk, a stall and a chunk that was stalled."""
    planted = PlantedLog(0)
    planted.decode(40)
    planted.chunks(6)
    planted.decode(10)
    planted.step(host=20e-3)
    planted.decode(10)
    planted.chunks(host=30e-3)
    planted.decode(3)
    path = tmp_path / "steps.jsonl"
    engine = EngineConfig(weight_dtype="fp8", kv_cache_dtype="fp8_ds_mla")
    log = StepLog(path, header_now(engine, PRESETS["glm-5.3"], "gpu"))
    for record in planted.records:
        log.add(record)
    log.close()
    return path


def test_it_names_causes_with_evidence_and_advice(path, capsys):
    assert main(["explain", str(path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        "71 steps, 420 times between tokens; 48 were too long, in 8 spikes",
        "host stall",
        "explained: 100% of the excess",
        "step 67 at",
        "r0, r1, r2, r3, r4, r5; mixing is not the cause",
        f"{CHUNK} prefill rows and 2 pads in cell (64, 8, 1): such a step takes",
        "mixing is the cause",
        "look at what else runs on the host's cores",
        "lower max_step_ms or max_num_batched_tokens",
    ):
        assert words in text, words


def test_json_has_every_spike(path, capsys):
    assert main(["explain", str(path), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert [spike["cause"] for spike in content["spikes"][:2]] == ["host stall", "host stall"]
    assert [spike["mixing"] for spike in content["spikes"][:2]] == ["no", ""]
    for spike in content["spikes"]:
        excess = spike["ms"] - spike["expected_ms"]
        assert sum(share["ms"] for share in spike["shares"]) == pytest.approx(excess, abs=0.01)
    assert list(content["ms_by_cause"]) == list(dict.fromkeys(content["ms_by_cause"]))
    assert content["advice"].keys() == {"host stall", "prefill rows"}


def test_most_bounds_the_spikes_shown(path, capsys):
    assert main(["explain", str(path), "--most", "1"]) == 0
    text = capsys.readouterr().out
    assert "7 more; --most shows them" in text
    assert text.count("usual;") == 1


def test_floor_adds_the_ledgers_least_time(path, capsys):
    assert main(["explain", str(path), "--floor", "h200", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert all(spike["floor_ms"] > 0 for spike in content["spikes"])


def test_a_log_without_spikes_says_so(path, capsys):
    assert main(["explain", str(path), "--factor", "100"]) == 0
    assert "0 were too long" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent"], "No such file"),
        ([__file__], "begins no step log"),
        (["LOG", "--factor", "1"], "factor is 1.0; allowed: a number above 1"),
        (["LOG", "--most", "-1"], "most is -1"),
    ],
)
def test_a_users_mistake_is_one_line(path, capsys, arguments, message):
    arguments = [str(path) if one == "LOG" else one for one in arguments]
    assert main(["explain", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("glm-jax explain: ")
    assert message in error
    assert error.count("\n") == 1
