"""FULL, PIECEWISE and EAGER give every request the same tokens; each step says how it ran."""

import dataclasses
from random import Random

import numpy as np
import pytest

from bucketing.cell import Cell
from bucketing.piecewise import Piece
from bucketing.programs import NoProgramError, ProgramTable
from glm_jax import SamplingParams
from glm_jax.engine.engine import Engine
from glm_jax.engine.lowering import Lowering, logits_key
from glm_jax.engine.outputs import RequestOutput
from glm_jax.engine.runner import Runner
from scripts.fuzz_modes import PIECE_BUCKETS, ModeTarget, fuzz_modes, target_of

SCHEDULES = 100


@pytest.fixture(scope="module")
def piecewise(tiny_llm):
    return target_of(tiny_llm, "piecewise")


def engine_of(target, **options) -> Engine:
    target.runner.reset()
    return Engine(
        target.config, target.runner, vocab_size=target.model_config.vocab_size, **options
    )


def run_all(engine: Engine, prompts) -> tuple[list[list[int]], list]:
    outputs, records = finish_all(engine, prompts)
    return [output.outputs[0].token_ids for output in outputs], records


def finish_all(engine: Engine, prompts, **asked) -> tuple[list[RequestOutput], list]:
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=6, ignore_eos=True, **asked)
    for number, prompt in enumerate(prompts):
        engine.add_request(f"r{number}", prompt, params)
    records = []
    while engine.has_unfinished:
        records.append(engine.step().record)
    assert [record.fault for record in records if record.fault] == []
    return [engine.release(f"r{number}")[0] for number in range(len(prompts))], records


@pytest.fixture(scope="module")
def prompts(tiny_llm):
    rng = Random(8)
    return [
        rng.choices(range(tiny_llm.model_config.vocab_size), k=length)
        for length in (3, 40, 17, 70, 8)
    ]


@pytest.mark.slow
def test_piecewise_gives_the_tokens_of_full_over_random_schedules(tiny_llm, piecewise):
    seen = fuzz_modes(tiny_llm, [piecewise], schedules=SCHEDULES, seed=0)
    assert seen["FULL"] == seen["PIECEWISE"] >= 10 * SCHEDULES
    assert seen["close decisions"] <= seen["requests"] / 100


def test_a_piecewise_step_says_so(piecewise, prompts):
    _, records = run_all(engine_of(piecewise), prompts[:2])
    assert {(record.mode, record.mode_reason) for record in records} == {
        ("PIECEWISE", "execution_mode is piecewise")
    }


def test_a_full_step_needs_no_reason(tiny_llm, prompts):
    _, records = run_all(engine_of(tiny_llm), prompts[:2])
    assert {(record.mode, record.mode_reason) for record in records} == {("FULL", "")}


def without(llm, missing, **options) -> ModeTarget:
    """The model of ``llm`` without some programs."""
    config = dataclasses.replace(llm.config, piecewise_buckets=PIECE_BUCKETS, **options)
    known, source = ProgramTable(), llm.runner.programs
    for key in source:
        if key not in missing:
            known.add(key, source[key], source.reports[key])
    runner = Runner(llm.runner.model, Lowering(llm.model_config, config), known)
    return ModeTarget(config, llm.model_config, runner)


@pytest.mark.usefixtures("piecewise")
def test_a_cell_that_is_not_compiled_yet_is_served_piece_by_piece(tiny_llm, prompts):
    expected, _ = run_all(engine_of(tiny_llm), prompts)
    late = Cell(0, 4, 6)
    target = without(tiny_llm, {late})
    tokens, records = run_all(engine_of(target), prompts)
    assert tokens == expected
    assert {record.mode for record in records if record.cell != late} == {"FULL"}
    waiting = {(record.mode, record.mode_reason) for record in records if record.cell == late}
    assert waiting == {("PIECEWISE", "cell not compiled yet")}


@pytest.mark.usefixtures("piecewise")
def test_a_program_that_becomes_ready_is_used_from_the_next_step_on(tiny_llm, prompts):
    expected, _ = run_all(engine_of(tiny_llm), prompts)
    cells = set(tiny_llm.config.grid().cells())
    target = without(tiny_llm, cells)
    engine, source = engine_of(target), tiny_llm.runner.programs

    def promote(phase, plan) -> None:
        if phase == "commit" and engine.steps % 4 == 3 and cells:
            cell = cells.pop()
            target.runner.programs.add(cell, source[cell], source.reports[cell])

    engine._fault_hook = promote
    tokens, records = run_all(engine, prompts * 3)
    assert tokens[: len(prompts)] == expected
    assert not cells
    # PIECEWISE at first, and none once everything is there.
    assert records[0].mode == "PIECEWISE"
    last = max(record.index for record in records if record.mode == "PIECEWISE")
    assert last <= 4 * 5
    assert records[-1].mode == "FULL"


@pytest.mark.usefixtures("piecewise")
def test_a_shape_outside_the_grid_is_served_piece_by_piece(tiny_llm, prompts):
    expected, _ = run_all(engine_of(tiny_llm), prompts)
    grid = ((64, 0, 1), (0, 4, 1), (0, 4, 6))
    mixed = {cell for cell in tiny_llm.config.grid().cells() if cell.prefill and cell.groups}
    target = without(tiny_llm, mixed, grid_cells=grid)
    tokens, records = run_all(engine_of(target), prompts)
    assert tokens == expected
    modes = {(record.cell in mixed, record.mode, record.mode_reason) for record in records}
    assert modes == {(False, "FULL", ""), (True, "PIECEWISE", "outside the grid")}


def test_without_program_and_pieces_a_step_fails_and_names_what_there_is(tiny_llm):
    target = without(tiny_llm, set(tiny_llm.runner.programs))
    with pytest.raises(NoProgramError, match="pieces are ready for 0 rows"):
        target.runner.serve(Cell(0, 4, 1), 3)


@pytest.mark.slow
def test_decode_rows_on_the_path_of_prefill_rows_give_the_same_tokens(tiny_llm, piecewise):
    # Only the pieces that select for groups differ: two programs.
    pieces = piecewise.runner.pieces
    buckets = pieces.axis.edges[1:]
    target = without(
        tiny_llm,
        {Piece("groups_full", rows) for rows in buckets},
        execution_mode="piecewise",
        decode_path="extend",
    )
    target.runner.compile([*pieces.first, *pieces.rest])
    seen = fuzz_modes(tiny_llm, [target], schedules=SCHEDULES // 4, seed=1)
    assert seen["PIECEWISE"] == seen["FULL"] >= 10 * (SCHEDULES // 4)
    assert seen["close decisions"] <= seen["requests"] / 100


def test_logits_of_a_piecewise_step_are_those_of_a_full_one(tiny_llm, piecewise, prompts):
    piecewise.runner.compile([logits_key(piecewise.config.widest)])
    whole = tiny_llm.logits(prompts[3])
    engine = engine_of(piecewise)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    engine.add_request("r", prompts[3], params, keep_logits=True)
    while engine.has_unfinished:
        engine.step()
    _, logits = engine.release("r")
    # Two programs round differently: 1e-5 of the largest logit.
    np.testing.assert_allclose(logits, whole, rtol=0, atol=1e-5 * np.abs(whole).max())


@pytest.mark.slow
def test_eager_gives_the_tokens_and_logprobs_of_full(tiny_llm, prompts, compile_counter):
    asked = {"logprobs": 2, "prompt_logprobs": 1}
    (expected,), _ = finish_all(engine_of(tiny_llm), prompts[:1], **asked)
    # Every operator is a program of its own: that is what EAGER means. So only two small cells
    # here; scripts/fuzz_modes.py runs all of them.
    with compile_counter.single_operators():
        (output,), records = finish_all(
            engine_of(target_of(tiny_llm, "eager")), prompts[:1], **asked
        )
    assert {record.mode for record in records} == {"EAGER"}
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    positions = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    likewise = [*expected.prompt_logprobs[1:], *expected.outputs[0].logprobs]
    for one, other in zip(positions, likewise, strict=True):
        assert one.keys() == other.keys()
        for token, likely in one.items():
            assert abs(likely.logprob - other[token].logprob) < 1e-5
