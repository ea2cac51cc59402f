"""Who waits, who passes whom, who is preempted, and who is sent away."""

from random import Random

import pytest
from engine.harness import Loop, prompt_of

from glm_jax.engine.admission import QueueFullError
from glm_jax.engine.request import RequestStatus

RNG = Random(3)
OPTIONS = {
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "page_size": 4,
    "prefill_buckets": (4, 16),
    "group_buckets": (1, 4),
    "watermark": 0.0,
}


def loop_of(**options) -> Loop:
    return Loop(**{**OPTIONS, **options})


def add(loop, name, length, *, max_tokens=12, **options):
    return loop.add(name, prompt_of(RNG, length), max_tokens=max_tokens, **options)


def check_end(loop) -> None:
    loop.finish()
    for name in loop.requests:
        loop.check_tokens(name)
    loop.check_idle()


def waiting(loop) -> list[str]:
    return [request.request_id for request in loop.scheduler.waiting]


def test_the_lowest_priority_value_is_admitted_first_then_who_came_first():
    loop = loop_of(scheduling_policy="priority", max_num_seqs=1)
    for name, priority in (("a", 1), ("b", 0), ("c", -2), ("d", 0)):
        add(loop, name, 3, max_tokens=1, priority=priority)
    assert waiting(loop) == ["c", "b", "d", "a"]
    loop.finish()
    assert [plan.request_ids[0] for plan in loop.plans] == ["c", "b", "d", "a"]
    check_end(loop)


def test_first_come_first_served_knows_no_priority():
    loop = loop_of()
    for name, priority in (("a", 1), ("b", -1)):
        add(loop, name, 3, priority=priority)
    assert waiting(loop) == ["a", "b"]
    check_end(loop)


def test_the_highest_priority_value_is_preempted_whenever_it_was_admitted():
    loop = loop_of(scheduling_policy="priority", num_pages=7)
    add(loop, "low", 7, priority=5)
    loop.step()
    add(loop, "high", 7, priority=0)
    while not loop.scheduler.preemptions:
        loop.step()
    assert loop.requests["low"].status is RequestStatus.PREEMPTED
    assert loop.requests["high"].preemptions == 0
    check_end(loop)


def test_a_victim_that_drafted_gives_everything_back():
    loop = loop_of(scheduling_policy="priority", num_pages=7, num_speculative_tokens=3)
    low = add(loop, "low", 7, priority=5)
    loop.step()
    add(loop, "high", 7, priority=0)
    while not low.preemptions:
        plan = loop.schedule()
        if low.preemptions:
            assert "low" not in plan.request_ids
            assert (low.draft_token_ids, low.pages, low.slot) == ((), [], None)
        loop.commit(plan, loop.run(plan))
    check_end(loop)


def test_nobody_passes_a_request_that_finds_no_pages():
    loop = loop_of(num_pages=9)
    add(loop, "runs", 15)
    loop.step()
    add(loop, "long", 20, max_tokens=4)
    add(loop, "short", 3)
    loop.step()
    assert waiting(loop) == ["long", "short"]
    check_end(loop)


def test_a_request_is_overtaken_at_most_as_often_as_allowed():
    loop = loop_of(num_pages=9, max_overtakes=2)
    add(loop, "runs", 15)
    loop.step()
    long = add(loop, "long", 20, max_tokens=4)
    for n in range(4):
        add(loop, f"s{n}", 3, max_tokens=1)
        loop.step()
    assert long.overtaken == 2
    assert waiting(loop) == ["long", "s2", "s3"]
    check_end(loop)


def test_a_request_is_not_overtaken_where_nobody_could_pass():
    loop = loop_of(num_pages=9, max_overtakes=2)
    add(loop, "runs", 15)
    loop.step()
    long = add(loop, "long", 20, max_tokens=4)
    for _ in range(3):
        loop.step()
    assert long.overtaken == 0
    check_end(loop)


def test_more_than_may_wait_are_refused_and_the_others_go_on():
    loop = loop_of(max_num_seqs=1, max_queued_requests=2)
    for name in ("a", "b"):
        add(loop, name, 3)
    with pytest.raises(QueueFullError, match=r"'c' finds 2 waiting; max_queued_requests is 2"):
        add(loop, "c", 3)
    loop.step()
    add(loop, "d", 3)
    check_end(loop)


def test_a_request_ends_at_its_deadline_wherever_it_is():
    loop = loop_of(max_num_seqs=1)
    runs, waits = (add(loop, name, 3, deadline=5.0) for name in ("runs", "waits"))
    add(loop, "lasts", 3, deadline=9.0)
    loop.step()
    assert loop.scheduler.expire(4.9) == []
    ended = loop.scheduler.expire(5.0)
    assert [update.request_id for update in ended] == ["runs", "waits"]
    assert {runs.finish_reason, waits.finish_reason} == {"abort"}
    assert "deadline" in runs.error
    assert loop.scheduler.expire(6.0) == []
    check_end(loop)


def test_a_deadline_during_a_step_drops_its_result():
    loop = loop_of()
    late = add(loop, "late", 3, deadline=5.0)
    plan = loop.schedule()
    outputs = loop.run(plan)
    free = loop.pool.free
    loop.scheduler.expire(6.0)
    assert loop.pool.free == free, "the step still writes to its pages"
    assert loop.commit(plan, outputs) == []
    assert late.output_token_ids == []
    check_end(loop)
