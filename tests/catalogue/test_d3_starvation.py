"""Catalogue D3: who waits for whom, and what is computed twice."""

import pytest
from catalogue.crowd import Crowd, classes, entries

from glm_jax.engine.request import RequestStatus, RowClass


def tokens_in(crowd: Crowd, plan, name: str) -> int:
    """Tokens that a step added to a request."""
    before = len(crowd.outputs[name])
    crowd.commit(plan, crowd.run(plan))
    return len(crowd.outputs[name]) - before


def test_a_decode_gets_tokens_in_every_step_of_a_stream_of_long_prompts():
    """21: prefill first with arrivals without end: one decode step per 24 s."""
    crowd = Crowd(num_speculative_tokens=0, max_num_seqs=12)
    crowd.decode("decoding", max_tokens=40)
    for turn in range(36):
        crowd.ask(f"long {turn}", 33, max_tokens=1)
        plan = crowd.schedule()
        assert plan.kind == "mixed"
        assert tokens_in(crowd, plan, "decoding") == 1
    crowd.end()


@pytest.mark.parametrize("cap", [4, 8])
def test_a_long_prompt_beside_decodes_is_computed_in_chunks_of_the_cap(cap):
    """22: full budgets in every mixed step slowed decodes 40 times while a prompt was computed."""
    crowd = Crowd(
        long_prefill_token_threshold=cap, max_num_batched_tokens=32, prefill_buckets=(4, 8, 16)
    )
    crowd.decode("a", "b", max_tokens=40)
    crowd.ask("long", 44, max_tokens=1)
    steps = 0
    while not crowd.requests["long"].finished:
        plan = crowd.schedule_and_run()
        steps += 1
        assert entries(plan)["long"].known <= cap
        assert plan.useful_rows <= cap + sum(entry.rows for entry in plan.group_entries)
    assert steps == -(-44 // cap)
    crowd.end()


def test_a_prompt_that_is_alone_uses_the_whole_budget():
    """24: a threshold that also holds where nobody gains by it."""
    crowd = Crowd(long_prefill_token_threshold=4, num_speculative_tokens=0)
    crowd.ask("long", 3 * 16)
    assert entries(crowd.schedule_and_run())["long"].known == 16
    crowd.ask("second", 20)
    plan = crowd.schedule_and_run()
    assert {name: entry.known for name, entry in entries(plan).items()} == {"long": 4, "second": 4}
    crowd.end()


def test_an_allocation_preempts_as_few_as_it_needs():
    """29: pages that are not free at once, and so the next victim, and the next."""
    crowd = Crowd(num_pages=1 + 12, num_speculative_tokens=0, watermark=0)
    for name in "abc":
        crowd.ask(name, 12, max_tokens=20)
    while not crowd.scheduler.preemptions:
        running = list(crowd.scheduler.running)
        crowd.schedule_and_run()
    # Everyone needs a fifth page at once; the pages of one are enough for the other two.
    assert crowd.scheduler.preemptions == 1
    assert [request.status for request in running] == [
        RequestStatus.RUNNING,
        RequestStatus.RUNNING,
        RequestStatus.PREEMPTED,
    ]
    crowd.end()


def test_nobody_is_preempted_for_pages_that_a_step_in_flight_still_writes():
    """29: a victim whose pages are fenced frees nothing now."""
    crowd = Crowd(num_pages=1 + 12, num_speculative_tokens=0, watermark=0)
    crowd.decode("a", "b", "c", length=12, max_tokens=20)
    plan = crowd.schedule()
    outputs = crowd.run(plan)
    free = crowd.pool.free
    crowd.scheduler.abort("c")
    assert crowd.pool.free == free
    with pytest.raises(RuntimeError, match="a step is in flight"):
        crowd.scheduler.schedule()
    assert crowd.scheduler.preemptions == 0
    crowd.commit(plan, outputs)
    assert crowd.pool.free > free
    for _ in range(4):
        crowd.schedule_and_run()
    assert crowd.scheduler.preemptions == 0
    crowd.end()


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("budget", [1, 3, 8, 32])
def test_no_budget_of_prompt_rows_stops_a_decode(budget, drafts):
    """31: decodes that share the batch size with prompts freeze while one is computed."""
    crowd = Crowd(
        max_num_batched_tokens=budget, prefill_buckets=(budget,), num_speculative_tokens=drafts
    )
    crowd.decode("a", "b", max_tokens=50)
    for turn in range(12):
        if turn % 3 == 0:
            crowd.ask(f"prompt {turn}", min(2 * budget + turn, 60), max_tokens=2)
        kinds = classes(crowd.schedule_and_run())
        assert (kinds["a"], kinds["b"]) == (RowClass.DECODE, RowClass.DECODE)
    crowd.end()
