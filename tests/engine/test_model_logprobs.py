"""Log-probabilities of a real model, in every mix, beside NumPy's log-softmax of `LLM.logits`.

Which rows are asked: test_logprobs.
"""

import dataclasses
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
from engine.company import Company, ask, entries

from bucketing.cell import Cell
from bucketing.step_inputs import StepOutputs
from glm_jax import SamplingParams
from glm_jax.sampling.row_logprobs import RowLogprobs, RowQuestion
from scripts.fuzz_modes import target_of
from scripts.fuzz_schedules import Asked, Schedule, make_engine, tokens_alone

TOLERANCE = 1e-5
LABELS = (3, 77)
WANTED = {"logprobs": 3, "prompt_logprobs": 2, "logprob_token_ids": LABELS}
WHOLE = 64


class Alone(NamedTuple):
    """A request's tokens, and log-probabilities [prompt + tokens, V] of what follows each row."""

    asked: Asked
    tokens: list[int]
    logprobs: np.ndarray


def log_softmax(logits: np.ndarray) -> np.ndarray:
    exact = logits.astype(np.float64)
    largest = exact.max(axis=-1, keepdims=True)
    return exact - largest - np.log(np.exp(exact - largest).sum(axis=-1, keepdims=True))


def alone(llm, asked: Asked) -> Alone:
    """The same request without company, by another way; before there is any on the same runner."""
    tokens = tokens_alone(llm, asked)
    return Alone(asked, tokens, log_softmax(llm.logits([*asked.prompt, *tokens])))


def check(expected: Alone, output) -> float:
    """Compare every number that was handed out; return the largest difference."""
    prompt, params = expected.asked
    (completion,) = output.outputs
    known, first = [*prompt, *completion.token_ids], len(prompt)
    assert completion.token_ids == expected.tokens[: len(completion.token_ids)]
    assert len(output.prompt_logprobs) == first
    assert output.prompt_logprobs[0] is None
    assert len(completion.logprobs) == len(completion.token_ids)
    worst = 0.0
    positions = [*output.prompt_logprobs[1:], *completion.logprobs]
    for place, found in enumerate(positions, 1):
        row, token = expected.logprobs[place - 1], known[place]
        drawn = place >= first
        top = params.logprobs if drawn else params.prompt_logprobs
        worst = max(worst, *(abs(one.logprob - row[id_]) for id_, one in found.items()))
        best = [one for _, one in sorted(found.items(), key=lambda pair: -pair[1].logprob)][:top]
        worst = max(worst, *np.abs(np.sort(row)[::-1][:top] - [one.logprob for one in best]))
        assert [one.rank for one in best] == [*range(1, top + 1)]
        rank = found[token].rank
        assert np.sum(row > row[token] + TOLERANCE) < rank <= np.sum(row >= row[token] - TOLERANCE)
        assert not drawn or set(LABELS) <= set(found)
        assert len(found) <= 1 + top + len(LABELS) * drawn
    assert worst < TOLERANCE
    assert abs(
        completion.cumulative_logprob
        - sum(
            expected.logprobs[first - 1 + n, token] for n, token in enumerate(completion.token_ids)
        )
    ) < TOLERANCE * max(1, len(completion.token_ids))
    return worst


def wanted(name: str, length: int, **options) -> Asked:
    return ask(Random(name), length, **{**WANTED, **options})


@pytest.mark.parametrize("drafter", ["none", "right", "half", "wrong"])
def test_mixed_steps_with_and_without_drafts_give_the_logprobs_alone(tiny_llm, drafter):
    asked = {"a": wanted("a", 4, max_tokens=30), "b": wanted("b", 19, max_tokens=30)}
    asked |= {"new": wanted("new", 90), "plain": ask(Random(2), 40)}
    reference = {name: alone(tiny_llm, one) for name, one in asked.items() if name != "plain"}
    script = {"drafts": 0} if drafter == "none" else {"drafter": drafter}
    company = Company(tiny_llm, asked, **script)
    company.add("a", "b")
    while sum(request.decoding for request in company.engine.scheduler.running) < 2:
        company.step()
    company.add("plain", "new")
    company.finish()
    mixed = [plan for plan in company.plans if plan.kind == "mixed"]
    assert [plan for plan in mixed if "new" in entries(plan)]
    assert (sum(company.accepted("a")) > 0) == (drafter in ("right", "half"))
    for name, expected in reference.items():
        check(expected, company.outputs[name])


def test_piecewise_steps_give_the_logprobs_of_full_ones(tiny_llm):
    asked = {"a": wanted("a", 4), "new": wanted("new", 90, max_tokens=5)}
    reference = {name: alone(tiny_llm, one) for name, one in asked.items()}
    target = target_of(tiny_llm, "piecewise")
    company = Company(tiny_llm, asked, target=target)
    company.add("a")
    company.step()
    company.add("new")
    company.finish()
    assert {record.mode for record in company.records} == {"PIECEWISE"}
    assert {record.kind for record in company.records} >= {"mixed"}
    for name, expected in reference.items():
        check(expected, company.outputs[name])


def test_preempted_requests_get_the_logprobs_alone(tiny_llm):
    asked = {name: wanted(name, 14, max_tokens=30) for name in "abc"}
    reference = {name: alone(tiny_llm, one) for name, one in asked.items()}
    config = dataclasses.replace(tiny_llm.config, num_pages=1 + 10, watermark=0)
    company = Company(tiny_llm, asked, config=config, drafter="half")
    company.add(*asked)
    company.finish()
    assert company.engine.scheduler.preemptions
    for name, expected in reference.items():
        check(expected, company.outputs[name])


@pytest.fixture(scope="module")
def chunked(tiny_llm) -> Alone:
    # More tokens than a row selects (16), fewer than a chunk holds.
    return alone(tiny_llm, wanted("chunked", 37, max_tokens=3))


@pytest.mark.parametrize("budget", range(1, 38))
def test_every_size_of_chunk_gives_the_logprobs_of_a_whole_prompt(tiny_llm, chunked, budget):
    engine = make_engine(tiny_llm, Schedule({}, budget, 1, 1, [], 0))
    engine.add_request("r", *chunked.asked)
    steps = [engine.step().record for _ in iter(lambda: engine.has_unfinished, False)]
    assert sum(record.kind == "prefill" for record in steps) == -(-37 // budget)
    check(chunked, engine.release("r")[0])


def test_a_warm_prefix_cache_changes_no_prompt_logprob(tiny_llm, chunked):
    plain = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    engine = make_engine(tiny_llm, Schedule({}, WHOLE, 2, 1, [], 0))
    engine.add_request("before", chunked.asked.prompt, plain)
    while engine.has_unfinished:
        engine.step()
    engine.add_request("r", *chunked.asked)
    while engine.has_unfinished:
        engine.step()
    check(chunked, engine.release("r")[0])


def test_generate_and_stream_hand_out_logprobs(tiny_llm, chunked):
    (output,) = tiny_llm.generate([chunked.asked.prompt], chunked.asked.params)
    check(chunked, output)
    deltas = [delta for _, delta in tiny_llm.stream([chunked.asked.prompt], chunked.asked.params)]
    assert [one for delta in deltas for one in delta.logprobs] == output.outputs[0].logprobs
    assert deltas[0].prompt_logprobs == output.prompt_logprobs
    assert all(delta.prompt_logprobs is None for delta in deltas[1:])


# The head program itself, on hidden rows that are made up.


def ask_head(llm, hidden: np.ndarray, *question) -> RowLogprobs:
    """Log-probabilities at rows of a step that left these hidden rows in a layout of 64."""
    assert len(hidden) == Cell(64, 0, 1).rows
    outputs = StepOutputs(*[None] * 6, hidden=hidden[None])
    return llm.runner.logprobs(outputs, RowQuestion(*question))


def test_equal_logits_are_named_by_the_lowest_id_and_share_the_last_rank(tiny_llm):
    vocab_size = tiny_llm.model_config.vocab_size
    hidden = np.zeros((64, tiny_llm.model_config.hidden_size), np.float32)
    found = ask_head(tiny_llm, hidden, [5], [7], [[119]])
    assert found.top_ids[0].tolist() == [*range(tiny_llm.config.max_logprobs)]
    assert found.rank.tolist() == [vocab_size]
    for values in (found.target, found.top[0], found.further[0, :1]):
        np.testing.assert_allclose(values, -np.log(vocab_size), rtol=1e-6)


def test_more_rows_than_one_call_takes_are_answered_in_order(tiny_llm):
    generator = np.random.default_rng(0)
    hidden = generator.normal(size=(64, tiny_llm.model_config.hidden_size)).astype(np.float32)
    # Logits up to a hundred: exponentials of them would overflow.
    hidden *= 30
    head = np.asarray(tiny_llm.runner.model.head[...]).astype(np.float64)
    expected = log_softmax(hidden @ head.T)
    assert np.abs(hidden @ head.T).max() > 100
    rows = generator.integers(0, 64, 150).tolist()
    targets = generator.integers(0, 120, 150).tolist()
    further = [generator.integers(0, 120, n % 5).tolist() for n in range(150)]
    found = ask_head(tiny_llm, hidden, rows, targets, further)
    lines = expected[rows]
    np.testing.assert_allclose(found.target, lines[range(150), targets], rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(
        found.rank, np.sum(lines >= lines[range(150), targets][:, None], axis=-1)
    )
    np.testing.assert_array_equal(found.top_ids, np.argsort(-lines, axis=-1)[:, :20])
    for row, ids in enumerate(further):
        np.testing.assert_allclose(
            found.further[row, : len(ids)], lines[row, ids], rtol=1e-5, atol=1e-4
        )
