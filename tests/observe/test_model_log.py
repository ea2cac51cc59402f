"""The step log of a real model."""

from itertools import pairwise
from statistics import median

import pytest

from glm_jax import SamplingParams
from glm_jax.ledger.hardware import HARDWARE
from glm_jax.observe.explanation import explain
from glm_jax.observe.floor import StepFloor
from glm_jax.observe.log_header import header_now
from glm_jax.observe.step_log import StepLog, read_step_log


@pytest.fixture
def log(tiny_llm, tmp_path, monkeypatch):
    """The log of three requests, and their outputs."""
    path = tmp_path / "steps.jsonl"
    log = StepLog(path, header_now(tiny_llm.config, tiny_llm.model_config, "cpu"))
    # Others use this model too.
    monkeypatch.setattr(tiny_llm.engine, "watches", [])
    monkeypatch.setattr(tiny_llm, "_observers", [])
    tiny_llm.watch(log)
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    prompts = [[1, 2, 3], list(range(30)), [7] * 12]
    outputs = tiny_llm.generate(prompts, params)
    log.close()
    return read_step_log(path), outputs


def test_it_says_what_ran_and_for_how_long(log, tiny_llm):
    written, outputs = log
    assert written.header.engine == tiny_llm.config
    assert written.header.model == tiny_llm.model_config
    records = written.records
    assert {record.mode for record in records} == {"FULL"}
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert sum(sum(record.tokens.values()) for record in records) == tokens
    assert sum(len(record.arrived) for record in records) == len(outputs)
    for record in records:
        phases = record.phases
        assert phases.device > 0
        assert sum(phases) <= record.wall_time
        assert record.cpu_time > 0
        assert record.expert_rows_max >= record.expert_rows_mean > 0
    # All of a step is in a phase, but for a little before and after them.
    assert median(sum(one.phases) / one.wall_time for one in records) > 0.9
    for before, after in pairwise(records):
        assert before.started + before.wall_time <= after.started


def test_every_step_has_a_floor(log):
    written, _ = log
    floor = StepFloor(written.header, HARDWARE["h200"]["specified"])
    for record in written.records:
        seconds = floor.seconds(record)
        assert seconds is not None
        assert 0 < seconds < record.wall_time


def test_it_can_be_explained(log):
    written, outputs = log
    explanation = explain(written.records, written.compiles)
    steps = sum(len(record.tokens) for record in written.records)
    assert explanation.gaps == steps - len(outputs)
    for spike in explanation.spikes:
        total = sum(share.seconds for share in spike.told.shares)
        assert total == pytest.approx(spike.told.excess, abs=1e-9)
