"""Real steps with drafts: whatever is drafted, every request has the tokens it has alone without.

`Company` runs requests together and checks that. Its drafts are scripted: the golden model's own
are hardly ever right. The same on the host alone: test_speculative_steps.
"""

import dataclasses
from random import Random

import numpy as np
import pytest
from engine.company import Company, K, ask, classes, decoding, entries

from bucketing.cell import Cell
from bucketing.grid import Grid
from glm_jax.engine.engine import Engine
from glm_jax.engine.request import RowClass
from scripts.fuzz_drafts import CASES, DRAFTERS, OWN_CASES, Case, DraftFuzz
from scripts.fuzz_modes import target_of
from scripts.fuzz_schedules import LimitedAxis, tokens_alone

SEEDS = 12 * len(CASES)
PIECEWISE_SEEDS = 2 * len(CASES)
LOOP_SEEDS = 10 * len(OWN_CASES)


@pytest.fixture(scope="module")
def fuzz(tiny_llm) -> DraftFuzz:
    return DraftFuzz(tiny_llm)


@pytest.mark.slow
def test_random_schedules_with_drafts_give_the_tokens_alone_without(
    tiny_llm, fuzz, compile_counter
):
    tokens_alone(tiny_llm, ask(Random(0), 5))
    before = compile_counter.compiled
    for seed in range(SEEDS):
        fuzz.run(tiny_llm, seed, CASES[seed % len(CASES)])
    seen = fuzz.seen
    assert compile_counter.compiled == before or seen["close decisions"]
    assert seen["close decisions"] <= seen["requests"] / 100
    # The draw must reach what it is meant to test.
    assert seen["mixed"] >= SEEDS / 2
    assert seen["preemptions"] >= SEEDS / 20
    # Some are behind the end of their request.
    assert 0.95 * seen["drafts right"] < seen["accepted right"] > SEEDS
    assert seen["drafts half"] / 4 < seen["accepted half"] < 3 * seen["drafts half"] / 4
    assert seen["accepted wrong"] == 0 < seen["drafts wrong"]
    assert seen["drafts own"] >= SEEDS


@pytest.mark.slow
def test_random_schedules_with_drafts_give_the_same_tokens_piece_by_piece(tiny_llm, fuzz):
    target = target_of(tiny_llm, "piecewise")
    before = fuzz.seen.copy()
    for seed in range(PIECEWISE_SEEDS):
        fuzz.run(target, seed, CASES[seed % len(CASES)])
    seen = fuzz.seen - before
    assert seen["PIECEWISE"] >= 10 * PIECEWISE_SEEDS
    assert seen["FULL"] == 0
    assert seen["accepted half"] >= PIECEWISE_SEEDS / 2


@pytest.mark.slow
def test_random_schedules_with_drafts_give_the_same_tokens_in_loops_on_the_device(tiny_llm, fuzz):
    # Steps that verify nothing are single here: one program fewer.
    target = target_of(tiny_llm, "loop", widths=(K + 1,))
    before = fuzz.seen.copy()
    for seed in range(LOOP_SEEDS):
        fuzz.run(target, seed, OWN_CASES[seed % len(OWN_CASES)])
    seen = fuzz.seen - before
    assert seen["steps in loops"] >= 3 * LOOP_SEEDS
    assert seen["drafts own"] >= LOOP_SEEDS


@pytest.mark.slow
def test_drafts_give_the_same_tokens_operator_by_operator(tiny_llm, compile_counter):
    asked = ask(Random(1), 3, max_tokens=5)
    company = Company(tiny_llm, {"r": asked}, target=target_of(tiny_llm, "eager"), drafts=2)
    company.add("r")
    # Every operator is a program of its own.
    with compile_counter.single_operators():
        company.finish()
    assert {record.mode for record in company.records} == {"EAGER"}
    assert company.accepted("r")


# Shapes that look alike.


@pytest.mark.parametrize("drafts", [1, 3, K])
def test_a_prompt_as_long_as_a_verify_group_does_not_decode(tiny_llm, drafts):
    for length in range(1, drafts + 3):
        newcomer = ask(Random(length), length, max_tokens=7)
        company = decoding(tiny_llm, "ab", newcomer=newcomer, drafts=drafts)
        company.add("new")
        plan = company.step()
        rows = {name: (entry.known, entry.drafts) for name, entry in entries(plan).items()}
        assert rows == {"a": (1, drafts), "b": (1, drafts), "new": (length, 0)}
        assert entries(plan)["new"].row_class is RowClass.PREFILL
        assert plan.kind == company.records[-1].kind == "mixed"
        company.finish()


@pytest.mark.parametrize("length", range(1, K + 3))
def test_a_prompt_as_long_as_a_verify_group_is_prefilled_alone(tiny_llm, length):
    company = Company(tiny_llm, {"r": ask(Random(length), length)})
    company.add("r")
    assert classes(company.step()) == [RowClass.PREFILL]
    assert company.step().kind == "decode"
    company.finish()


BUDGET = 16


@pytest.mark.parametrize("tail", range(1, K + 3))
def test_a_tail_beside_verify_groups_turns_none_of_them_into_a_prefill(tiny_llm, tail):
    grid = tiny_llm.config.grid()
    small = LimitedAxis(grid.prefill.name, grid.prefill.edges, BUDGET)
    newcomer = ask(Random(tail), BUDGET + tail)
    grid = Grid(small, grid.groups, grid.widths)
    company = decoding(tiny_llm, newcomer=newcomer, grid=grid)
    company.add("new")
    assert entries(company.step())["new"].known == BUDGET
    plan = company.step()
    assert classes(plan) == [RowClass.DECODE] * 3 + [RowClass.PREFILL]
    assert entries(plan)["new"].known == tail
    assert [entries(plan)[name].drafts for name in "abc"] == [K] * 3
    assert entries(plan)["new"].new_drafts == K
    company.finish()


@pytest.mark.parametrize("live", [1, 2, 3])
def test_fewer_groups_than_the_bucket_are_not_split(tiny_llm, live):
    # Groups of three rows in a program of four groups of six.
    company = decoding(tiny_llm, "abc"[:live], drafts=2)
    plan = company.step()
    assert plan.cell == Cell(0, 4, K + 1)
    assert [entry.rows for entry in plan.group_entries] == [3] * live
    company.finish()


# Rests of a prefill.


@pytest.mark.parametrize("rest", range(1, K + 2))
def test_a_rest_leaves_the_same_cache_and_tokens_in_either_segment(tiny_llm, rest):
    limits = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "widths": (1, K + 1)}
    mixed = [(64, 0, 1), (64, 4, K + 1)]
    caches = []
    for as_group in (True, False):
        cells = [*mixed, (0, 4, K + 1)] if as_group else mixed
        newcomer = ask(Random(rest), 64 + rest)
        grid = Grid.from_cells(cells, **limits)
        company = decoding(tiny_llm, "ab", newcomer=newcomer, grid=grid)
        company.add("new")
        company.step()
        plan = company.step()
        assert entries(plan)["new"].known == rest
        assert ("new" in {entry.request_id for entry in plan.group_entries}) == as_group
        caches.append(rows_of(tiny_llm, company.engine, "new"))
        company.finish()
    for one, other in zip(*caches, strict=True):
        assert one.shape[1] == 64 + rest
        assert one[-1].any(axis=-1).all(), "the MTP layer's plane"
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def rows_of(llm, engine: Engine, name: str) -> list[np.ndarray]:
    """What the cache holds of a request, [planes, rows, width] per array."""
    request, size = engine.scheduler.get(name), llm.config.page_size
    places = [request.pages[row // size] * size + row % size for row in range(request.computed)]
    arrays = [array[0] for array in llm.runner.snapshot()]
    return [array.reshape(len(array), -1, array.shape[-1])[:, places] for array in arrays]


# What is accepted.


def test_groups_of_one_step_accept_none_some_and_all_of_their_drafts(tiny_llm):
    counts = {"a": 0, "b": 2, "c": K}

    def script(name, tokens, place):
        return [token if n < counts[name] else (token + 1) % 120 for n, token in enumerate(tokens)]

    company = decoding(tiny_llm, drafter=script)
    lengths = {name: company.engine.scheduler.get(name).length for name in "abc"}
    computed = {name: company.engine.scheduler.get(name).computed for name in "abc"}
    plan = company.step()
    assert plan.cell == Cell(0, 4, K + 1)
    record = company.records[-1]
    assert {group.request_id: group.accepted for group in record.drafts} == counts
    for name, count in counts.items():
        request = company.engine.scheduler.get(name)
        assert request.length == lengths[name] + count + 1
        assert request.computed == computed[name] + count + 1
    company.finish()


@pytest.mark.parametrize("max_tokens", range(1, K + 5))
def test_accepted_drafts_end_where_max_tokens_says(tiny_llm, max_tokens):
    company = Company(tiny_llm, {"r": ask(Random(4), 7, max_tokens=max_tokens)}, drafter="right")
    company.add("r")
    company.finish()
    # The last token of all is never computed: it is behind a draft, or no draft was needed.
    drafted = sum(len(group.draft_token_ids) for r in company.records for group in r.drafts)
    assert drafted == sum(company.accepted("r")) <= max(0, max_tokens - 2)


def test_accepted_drafts_end_where_the_model_does(tiny_llm):
    most = tiny_llm.config.max_model_len
    for length in range(most - 2 * K, most):
        asked = ask(Random(length), length, max_tokens=None)
        company = Company(tiny_llm, {"r": asked}, drafter="right")
        assert len(company.expected["r"]) == most - length
        company.add("r")
        company.finish()


@pytest.mark.parametrize("place", range(1, K + 1))
def test_a_stop_token_among_accepted_drafts_drops_what_follows(tiny_llm, place):
    free = ask(Random(5), 9, temperature=0.0)
    stop = tokens_alone(tiny_llm, free)[place]
    asked = ask(Random(5), 9, temperature=0.0, stop_token_ids=[stop])
    company = Company(tiny_llm, {"r": asked}, drafter=lambda name, tokens, start: right[start:][:K])
    right = [*tokens_alone(tiny_llm, free), *range(K)]
    assert company.expected["r"] == right[: right.index(stop) + 1]
    company.add("r")
    company.finish()
    # One token behind the prompt, and the drafts up to the stop.
    assert sum(company.accepted("r")) == right.index(stop)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_seed_draws_the_same_tokens_however_they_are_drafted(tiny_llm, drafter):
    settings = {"temperature": 1.0, "top_k": 30, "top_p": 0.9, "min_p": 0.02, "seed": 2**63 + 5}
    for drafts in (1, 3, K):
        newcomer = ask(Random(6), 21, min_tokens=6, stop_token_ids=[*range(16)], **settings)
        company = decoding(tiny_llm, "ab", newcomer=newcomer, drafts=drafts, drafter=drafter)
        company.add("new")
        company.finish()


# Requests that miss a step.


@pytest.mark.parametrize("policy", ["prefill_first", "alternate"])
def test_drafts_of_a_request_that_misses_a_step_are_verified_in_the_next(tiny_llm, policy):
    newcomer = ask(Random(7), 9)
    config = dataclasses.replace(tiny_llm.config, step_policy=policy)
    company = decoding(tiny_llm, "ab", newcomer=newcomer, config=config)
    company.step()
    held = {name: list(company.engine.scheduler.get(name).draft_token_ids) for name in "ab"}
    assert all(held.values())
    company.add("new")
    assert set(entries(company.step())) == {"new"}
    plan = company.step()
    for name, drafts in held.items():
        assert list(entries(plan)[name].draft_token_ids) == drafts
    company.finish()


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_preempted_requests_drafts_are_forgotten(tiny_llm, drafter):
    asked = {name: ask(Random(name), 14, max_tokens=30) for name in "abc"}
    config = dataclasses.replace(tiny_llm.config, num_pages=1 + 10, watermark=0)
    company = Company(tiny_llm, asked, config=config, drafter=drafter)
    company.add(*asked)
    lost = 0
    scheduler = company.engine.scheduler
    while scheduler.has_unfinished:
        drafts = {request.request_id: request.draft_token_ids for request in scheduler.running}
        preempted = {request.request_id: request.preemptions for request in scheduler.running}
        company.step()
        for name, count in preempted.items():
            request = scheduler.get(name)
            if request is not None and request.preemptions > count:
                lost += bool(drafts[name])
                assert not request.draft_token_ids
    assert lost
    company.finish()


def test_a_request_aborted_while_its_drafts_are_verified_gets_nothing_more(tiny_llm):
    company = decoding(tiny_llm)
    before = company.engine.scheduler.get("a").num_output_tokens

    def abort(phase, plan):
        if phase == "device":
            company.engine.abort("a")

    company.engine._fault_hook = abort
    result = company.engine.step()
    assert {delta.request_id for delta in result.deltas} >= {"b", "c"}
    company.records.append(result.record)
    assert company.engine.is_finished("a")
    output, _ = company.engine.release("a")
    assert len(output.outputs[0].token_ids) == before
    del company.expected["a"]
    company.finish()


def test_case_names_are_those_of_the_drafters():
    assert {case.drafter for case in CASES} == set(DRAFTERS)
    assert {case.drafts for case in CASES} == {0, 1, 3, K, "auto"}
    assert Case(0, "own") in CASES
