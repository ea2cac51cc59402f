"""The padding rules that fitted grids are compared with."""

import pytest

from bucketing.cell import Cell
from bucketing.step_rows import StepRows
from glm_jax.simulate.step_time import H200StepTime
from scripts.bench_waste import (
    SCHEMES,
    default_multipliers,
    pad_powers,
    pad_sglang,
    pad_vllm,
    score_scheme,
)


def step(prefill_rows, groups, width=6):
    return StepRows(Cell(0, 0, 1), prefill_rows, groups * width, groups, width, 0)


@pytest.mark.parametrize(
    ("shape", "powers", "vllm", "sglang"),
    [
        # A decode step: groups are doubled; total rows go up by eights; requests are doubled.
        ((0, 5), (0, 48, 8, True), (0, 32, 5, True), (0, 48, 8, True)),
        # A mixed step: both axes; beyond vLLM's list; the total to a power of two.
        ((700, 5), (1024, 48, 8, True), (700, 30, 5, False), (994, 30, 5, True)),
        # A small mixed step, pads counted as prefill rows.
        ((10, 5), (64, 48, 8, True), (10, 30, 5, True), (34, 30, 5, True)),
    ],
)
def test_rules_round_what_they_say(shape, powers, vllm, sglang):
    assert pad_powers(step(*shape)) == powers
    assert pad_vllm(step(*shape)) == vllm
    assert pad_sglang(step(*shape)) == sglang


def test_a_score_tells_pads_and_steps_without_a_graph():
    steps = [step(0, 8), step(1000, 8)]
    scores = {s.name: score_scheme("t", 1, s, steps, H200StepTime()) for s in SCHEMES}
    assert scores["powers of two"].rows == pytest.approx(24 / 1096)
    assert scores["vLLM capture list"].off_graph == 0.5
    assert scores["vLLM capture list"].time == pytest.approx(0.0, abs=1e-9)
    for score in scores.values():
        assert 0 <= score.skip <= score.time + 1e-9


def test_loads_go_from_idle_to_near_capacity():
    assert default_multipliers("AzureLLMInferenceTrace_conv_2023.csv") == (1, 3, 6)
    assert default_multipliers("AzureLLMInferenceTrace_code_2023.csv") == (1, 3, 5)
    assert default_multipliers("mooncake_conversation_trace.jsonl") == (0.5, 1, 1.5)
