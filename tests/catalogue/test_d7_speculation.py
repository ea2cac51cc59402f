"""Catalogue D7: drafts and results that come too late, and seeds."""

import dataclasses
from random import Random

import pytest
from catalogue.crowd import Crowd
from engine.company import Company, ask
from engine.fake_executor import Story
from engine.harness import prompt_of

from bucketing.grid import Grid
from scripts.fuzz_schedules import LimitedAxis


def misses(crowd: Crowd) -> int:
    """How often a request had rows in a step, none in the next, and some later."""
    served = [set(plan.request_ids) for plan in crowd.plans]
    return sum(
        len(one & set().union(*served[number + 2 :]) - served[number + 1])
        for number, one in enumerate(served[:-1])
    )


@pytest.mark.parametrize("policy", ["mixed", "prefill_first", "alternate"])
def test_every_token_id_of_a_step_is_one_even_where_a_request_missed_the_last(policy):
    """56: a placeholder of -1 that survives a skipped step reaches the embedding."""
    missed = 0
    for num_pages in (1 + 8, 1 + 16):
        crowd = Crowd(step_policy=policy, num_pages=num_pages, watermark=0, max_model_len=32)
        for number, length in enumerate((9, 2, 13, 6)):
            crowd.ask(f"r{number}", length, max_tokens=14)
            crowd.schedule_and_run()
        crowd.end()
        missed += misses(crowd)
        for inputs in crowd.packed:
            for name in ("prefill_tokens", "prefill_next", "group_tokens", "group_next"):
                assert getattr(inputs, name).min(initial=0) >= 0
        for plan in crowd.plans:
            assert all(min(entry.draft_token_ids, default=0) >= 0 for entry in plan.entries)
    assert missed


@pytest.mark.parametrize("drafts", [0, 1, 3, 5])
def test_a_late_result_changes_no_request_that_lost_its_pages_meanwhile(drafts):
    """57: the output of a step is applied to a request that was preempted after its dispatch."""
    crowd = Crowd(num_speculative_tokens=drafts)
    crowd.decode("a", "b", max_tokens=20)
    for _ in range(3):
        plan = crowd.schedule()
        outputs = crowd.run(plan)
        lengths = {name: request.length for name, request in crowd.requests.items()}
        crowd.lose_pool()
        with pytest.raises(RuntimeError, match="is not in flight"):
            crowd.scheduler.commit(plan, *outputs[:4])
        for name, request in crowd.requests.items():
            assert (request.length, request.computed) == (lengths[name], 0)
            assert not len(request.draft_token_ids)
        crowd.schedule_and_run()
    crowd.end()


@pytest.mark.parametrize(
    "penalty", [{"frequency_penalty": 0.4}, {"presence_penalty": 1.0}, {"repetition_penalty": 1.3}]
)
@pytest.mark.parametrize("drafts", [1, 3])
def test_penalties_count_each_token_once_whatever_was_drafted(drafts, penalty):
    """63: counts of the request for all of its rows, or accepted drafts counted twice."""
    accepted = 0
    for seed in range(3):
        params = {"max_tokens": 24, "ignore_eos": True, "seed": seed, **penalty}
        story = Story(num_speculative_tokens=drafts, max_num_batched_tokens=16)
        prompts = {name: prompt_of(Random(name), 9) for name in ("penalised", "free")}
        story.add("free", prompts["free"], max_tokens=24, ignore_eos=True)
        story.step()
        story.add("penalised", prompts["penalised"], **params)
        story.finish()
        assert [record.fault for record in story.records if record.fault] == []
        output = story.output("penalised")
        assert output.outputs[0].token_ids == story.alone(prompts["penalised"], **params)
        accepted += output.drafts.accepted_tokens
    assert accepted > 8


SEEDED = {"temperature": 1.0, "top_k": 40, "top_p": 0.95, "seed": 2**63 + 11}


def test_a_seed_draws_the_same_tokens_in_a_batch_of_the_same_seed(tiny_llm):
    """62: a generator per batch, or settings copied from one request to the next."""
    asked = {name: ask(Random(1), 9, **SEEDED) for name in "ab"}
    asked["c"] = ask(Random(1), 9, **{**SEEDED, "seed": 4})
    company = Company(tiny_llm, asked)
    assert company.expected["a"] == company.expected["b"] != company.expected["c"]
    company.add("c")
    company.step()
    company.add("a", "b")
    company.finish()


def test_a_seed_draws_the_same_tokens_in_mixed_steps_chunk_by_chunk(tiny_llm):
    """62: draws that depend on where in the step a row stands."""
    grid = tiny_llm.config.grid()
    small = LimitedAxis(grid.prefill.name, grid.prefill.edges, 7)
    asked = {name: ask(Random(name), 5 + 13 * n, **SEEDED) for n, name in enumerate("abcd")}
    company = Company(tiny_llm, asked, grid=Grid(small, grid.groups, grid.widths))
    for name in asked:
        company.add(name)
        company.step()
    company.finish()
    assert {record.kind for record in company.records} == {"prefill", "mixed", "decode"}


def test_a_seed_draws_the_same_tokens_after_a_preemption(tiny_llm):
    """62: a generator that was advanced before the pages were lost."""
    asked = {name: ask(Random(name), 14, **{**SEEDED, "max_tokens": 30}) for name in "abc"}
    config = dataclasses.replace(tiny_llm.config, num_pages=1 + 10, watermark=0)
    company = Company(tiny_llm, asked, config=config)
    company.add(*asked)
    company.finish()
    assert company.engine.scheduler.preemptions
