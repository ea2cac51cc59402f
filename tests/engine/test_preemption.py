"""Pool pressure: who loses its pages, what it keeps, and that nobody thrashes."""

from random import Random

import pytest
from engine.harness import Loop, prompt_of

from glm_jax.engine.request import RequestStatus

OPTIONS = {
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "page_size": 4,
    "prefill_buckets": (4, 16),
    "group_buckets": (1, 4),
    "watermark": 0.0,
}
RNG = Random(1)


def loop_with(num_pages, *lengths, max_tokens=12, **options) -> Loop:
    loop = Loop(**OPTIONS, num_pages=num_pages, **options)
    for n, length in enumerate(lengths):
        loop.add(f"r{n}", prompt_of(RNG, length), max_tokens=max_tokens)
    return loop


def check_end(loop: Loop) -> None:
    for name in loop.requests:
        loop.check_tokens(name)
    loop.check_idle()


def test_the_last_admitted_is_preempted_and_keeps_its_tokens():
    # Two requests of seven rows share six pages; each grows to five.
    loop = loop_with(7, 7, 7)
    first, second = loop.requests.values()
    while not second.preemptions:
        loop.step()
        kept = second.output_token_ids
    assert (first.preemptions, first.status) == (0, RequestStatus.RUNNING)
    assert (second.status, second.computed, second.pages) == (RequestStatus.PREEMPTED, 0, [])
    assert second.output_token_ids == kept != []
    loop.finish()
    check_end(loop)


def test_a_resumed_request_recomputes_prompt_and_output_as_a_prefill():
    loop = loop_with(7, 7, 7)
    second = loop.requests["r1"]
    while not second.preemptions:
        loop.step()
    known = second.length
    while second.status is RequestStatus.PREEMPTED:
        plan = loop.schedule_and_run()
    (entry,) = (entry for entry in plan.entries if entry.request is second)
    assert (entry.row_class, second.num_cached_tokens) == ("prefill", 0)
    found = plan.cached_tokens
    assert found % loop.config.page_size == 0, "full pages that nobody took meanwhile are found"
    assert entry.known == known - found
    assert second.length == known + 1, "its last known row draws the next token"


def test_no_one_is_admitted_in_a_step_that_preempts():
    loop = loop_with(7, 7, 7)
    second = loop.requests["r1"]
    loop.step()
    loop.add("late", prompt_of(RNG, 1), max_tokens=1)
    late = loop.requests["late"]
    loop.scheduler.waiting.remove(late)
    while not second.preemptions:
        if loop.pool.free == 0 and late not in loop.scheduler.waiting:
            loop.scheduler.waiting.add(late)
        plan = loop.schedule_and_run()
    assert plan.request_ids == ("r0",)
    assert [request.request_id for request in loop.scheduler.waiting] == ["r1", "late"]


def test_preempted_requests_resume_before_later_arrivals_in_their_old_order():
    loop = loop_with(10, 7, 7, 7, max_tokens=20)
    loop.step()
    loop.step()
    loop.add("late", prompt_of(RNG, 2), max_tokens=2)
    while loop.scheduler.preemptions < 2:
        loop.step()
    waiting = [request.request_id for request in loop.scheduler.waiting]
    assert waiting in (["r1", "r2", "late"], ["r2", "late"], ["r1", "r2"])
    order = []
    while loop.scheduler.has_unfinished:
        for entry in loop.schedule_and_run().entries:
            order.append(entry.request_id)
    if "late" in waiting:
        assert order.index("r2") < order.index("late")
    check_end(loop)


@pytest.mark.parametrize("lengths", [(40, 40), (40, 40, 40), (40, 8, 40, 8)])
def test_long_prompts_in_a_pool_of_one_and_a_half_do_not_thrash(lengths):
    loop = loop_with(1 + 15, *lengths, max_tokens=8)
    computed = 0
    while (plan := loop.schedule()) is not None:
        computed += sum(entry.rows for entry in plan.entries)
        loop.commit(plan, loop.run(plan))
    check_end(loop)
    assert computed <= 2 * sum(length + 8 for length in lengths)


def test_a_prefill_waits_for_pages_without_preempting_a_decode():
    # Admission reserves the long prompt's pages; the older decode grows into them meanwhile.
    loop = Loop(**{**OPTIONS, "max_num_batched_tokens": 2, "prefill_buckets": (2,)}, num_pages=8)
    loop.add("decode", prompt_of(RNG, 3), max_tokens=20)
    loop.step()
    loop.step()
    loop.add("long", prompt_of(RNG, 19), max_tokens=2)
    loop.finish()
    assert loop.requests["decode"].preemptions == 0
    check_end(loop)


def test_decodes_never_starve_a_blocked_prefill_forever():
    loop = loop_with(1 + 9, 12, 12, 12, max_tokens=20)
    loop.finish(limit=300)
    check_end(loop)


@pytest.mark.parametrize("policy", ["mixed", "prefill_first", "alternate"])
@pytest.mark.parametrize("num_pages", range(6, 14))
def test_every_pool_size_and_policy_gives_the_same_tokens(policy, num_pages):
    loop = loop_with(num_pages, 7, 2, 8, 5, step_policy=policy)
    loop.finish(limit=500)
    check_end(loop)


def test_seeds_survive_preemption():
    loop = Loop(**OPTIONS, num_pages=7)
    loop.add("r0", prompt_of(RNG, 7), max_tokens=12)
    loop.add("r1", prompt_of(RNG, 7), max_tokens=12, seed=5, temperature=0.7)
    loop.finish()
    assert loop.requests["r1"].preemptions > 0
    check_end(loop)
