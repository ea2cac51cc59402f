"""What was recorded of an engine's steps runs again bit by bit, in its programs."""

import json
from random import Random

import numpy as np
import pytest
from engine.fake_executor import Story
from engine.harness import prompt_of

from glm_jax.observe.packed_array import read_array, write_array
from glm_jax.observe.recorded_call import read_call, write_call
from glm_jax.observe.recorder import Recorder
from glm_jax.observe.replay import replay
from scripts.fuzz_schedules import draw_asked, draw_schedule, run_schedule

STEPS = 500


def test_500_random_steps_of_a_model_replay_bit_by_bit(tiny_llm):
    calls = []
    for number in range(100):
        rng = Random(f"replay {number}")
        block = [draw_asked(rng, tiny_llm) for _ in range(8)]
        recorders = []

        def record(engine, recorders=recorders):
            recorders.append(Recorder(engine._execution._executor))
            engine._execution._executor = recorders[0]

        run_schedule(tiny_llm, block, draw_schedule(rng, tiny_llm, block), record)
        # Through the text of the log.
        calls += [read_call(json.loads(json.dumps(write_call(c)))) for c in recorders[0].take()]
        if sum(call.kind == "run" for call in calls) >= STEPS:
            break
    steps = list(replay(calls, tiny_llm.runner, tiny_llm.config.limits()))
    assert len(steps) >= STEPS
    assert all(step.equal for step in steps)
    assert {step.call.served.layout.prefill > 0 for step in steps} == {True, False}


def recorded(**options) -> tuple[Story, Recorder]:
    story = Story(**options)
    recorder = Recorder(story.executor)
    story.engine._execution._executor = recorder
    return story, recorder


def run(story) -> None:
    rng = Random(4)
    story.add("a", prompt_of(rng, 9), max_tokens=4, frequency_penalty=0.5)
    story.add("b", prompt_of(rng, 5), max_tokens=12)
    story.finish()


@pytest.mark.parametrize("options", [{}, {"decode_loop_steps": 4}, {"split_steps": True}])
def test_controls_loops_and_halves_are_recorded_too(options):
    story, recorder = recorded(**options)
    run(story)
    calls = recorder.take()
    assert {"reset", "control", "run"} <= {call.kind for call in calls}
    assert ("loop" in {call.kind for call in calls}) == ("decode_loop_steps" in options)
    fresh = Story(**options)
    steps = list(replay(calls, fresh.executor, fresh.config.limits()))
    assert all(step.equal for step in steps)
    assert recorder.take() == []


def test_a_step_that_computes_something_else_is_seen():
    story, recorder = recorded()
    run(story)
    calls = recorder.take()
    last = max(number for number, call in enumerate(calls) if call.kind == "run")
    changed = calls[last]._replace(digest="0" * 32)
    fresh = Story()
    steps = list(replay([*calls[:last], changed], fresh.executor, fresh.config.limits()))
    assert [step.equal for step in steps][-2:] == [True, False]


@pytest.mark.parametrize("dtype", [np.int32, np.float32, np.bool_, np.uint32])
def test_arrays_come_back_bit_by_bit(dtype):
    array = np.random.default_rng(0).integers(0, 2, (2, 3, 4)).astype(dtype)
    again = read_array(json.loads(json.dumps(write_array(array))))
    assert (again.dtype, again.shape) == (array.dtype, array.shape)
    assert again.tobytes() == array.tobytes()


@pytest.mark.parametrize("values", [[], ["<i4", [2], "AAAA"], ["<i4", [2]], [1, 2, 3]])
def test_what_is_no_packed_array_is_refused(values):
    with pytest.raises(ValueError, match="no packed array"):
        read_array(values)
