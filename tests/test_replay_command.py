"""`glm-jax replay`: a log with plans runs again in its programs, bit by bit."""

import argparse
import json

import pytest

from bucketing.cell import Cell
from bucketing.loop_inputs import LoopKey
from bucketing.piecewise import Piece
from glm_jax import LLM, SamplingParams, replay_step
from glm_jax.engine.engine import Engine
from glm_jax.engine.lowering import CONTROLS
from glm_jax.engine.modes import Mode, Served, full
from glm_jax.observe.log_header import header_now
from glm_jax.observe.recorded_call import RESET, RecordedCall
from glm_jax.observe.recorder import Recorder
from glm_jax.observe.step_log import StepLog, read_step_log


@pytest.fixture
def log(tiny_llm, tmp_path):
    """The log of three requests, one of them with penalties."""
    llm = tiny_llm
    llm.runner.reset()
    path = tmp_path / "steps.jsonl"
    log = StepLog(path, header_now(llm.config, llm.model_config, "cpu"))
    recorder = log.recorder = Recorder(llm.runner)
    engine = Engine(llm.config, recorder.executor, vocab_size=llm.model_config.vocab_size)
    engine.watches.append(log.add)
    for number in range(3):
        params = SamplingParams(max_tokens=9, seed=number, frequency_penalty=number % 2)
        engine.add_request(f"r{number}", [5 + number] * 20, params)
    while engine.has_unfinished:
        engine.step()
    log.close()
    return path


def run(monkeypatch, llm, log, step=None) -> int:
    """Run the command on the programs that are there."""
    monkeypatch.setattr(replay_step, "_runner", lambda *_: llm.runner)
    return replay_step.run(argparse.Namespace(log=log, step=step, model=None))


@pytest.mark.parametrize("step", [None, 0, 3])
def test_every_bit_is_equal_up_to_the_step_asked_for(monkeypatch, tiny_llm, log, capsys, step):
    assert run(monkeypatch, tiny_llm, log, step) == 0
    steps = [one.record for one in read_step_log(log).steps]
    asked = steps[-1] if step is None else steps[step]
    text = capsys.readouterr().out
    assert f"step {asked.index}: {asked.kind}, cell {tuple(asked.cell)}, FULL" in text
    assert "every bit equal" in text
    count = asked.index + 1
    assert f"{count} of {count} programs from the beginning on are equal" in text


def test_a_step_that_drew_something_else_is_told(monkeypatch, tiny_llm, log, capsys):
    lines = log.read_text().splitlines()
    last = json.loads(lines[-1])
    last["calls"][-1][-1] = "0" * 32
    log.write_text("\n".join([*lines[:-1], json.dumps(last)]) + "\n")
    assert run(monkeypatch, tiny_llm, log) == 1
    assert "DIFFERENT" in capsys.readouterr().out


def test_a_step_that_is_not_there_is_named(monkeypatch, tiny_llm, log):
    with pytest.raises(ValueError, match="step 999 ran nothing that the log knows; it knows 0 to"):
        run(monkeypatch, tiny_llm, log, 999)


def test_a_log_without_plans_says_how_to_get_them(monkeypatch, tiny_llm, tmp_path):
    path = tmp_path / "steps.jsonl"
    StepLog(path, header_now(tiny_llm.config, tiny_llm.model_config, "cpu")).close()
    with pytest.raises(ValueError, match=r"no plans\. Write one with --log-plans"):
        run(monkeypatch, tiny_llm, path)


def test_only_programs_that_the_calls_need_are_compiled(tiny_llm):
    cell = Cell(0, 4, 6)
    pieces = Served(Mode.PIECEWISE, tiny_llm.config.widest, bucket=8)
    calls = [
        RESET,
        RecordedCall("control"),
        RecordedCall("run", full(cell)),
        RecordedCall("run", pieces),
        RecordedCall("loop", full(cell)._replace(loop=True)),
        RecordedCall("run", Served(Mode.EAGER, Cell(64, 4, 6))),
    ]
    keys = replay_step._keys(tiny_llm.model_config, tiny_llm.config, calls)
    assert {CONTROLS, cell, LoopKey(4, 6, tiny_llm.config.decode_loop_steps)} < set(keys)
    others = set(keys) - {CONTROLS, cell, LoopKey(4, 6, tiny_llm.config.decode_loop_steps)}
    assert Piece("embed", 8) in others
    assert all(key.rows == 8 for key in others)


def test_plans_need_a_log():
    with pytest.raises(ValueError, match="log_plans needs a step_log"):
        LLM("tiny-random", log_plans=True, skip_tokenizer_init=True)
