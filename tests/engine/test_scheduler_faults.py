"""Aborts at any moment, plans that never ran, and a lost pool."""

import dataclasses
from random import Random

import numpy as np
import pytest
from engine.harness import Loop, prompt_of

from glm_jax.engine.request import FinishReason, RequestStatus

OPTIONS = {
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 8,
    "page_size": 4,
    "prefill_buckets": (4,),
    "group_buckets": (1,),
}
RNG = Random(2)


def loop_with(*lengths, **options) -> Loop:
    loop = Loop(**{**OPTIONS, **options})
    for n, length in enumerate(lengths):
        loop.add(f"r{n}", prompt_of(RNG, length), max_tokens=6)
    return loop


def finish_and_check(loop: Loop) -> None:
    loop.finish()
    for name in loop.requests:
        loop.check_tokens(name)
    loop.check_idle()


@pytest.mark.parametrize("steps", range(8))
def test_abort_between_steps_frees_everything_and_twice_is_harmless(steps):
    # Before any step, in the middle of the prompt, while decoding, and after the end.
    loop = loop_with(20, 9)
    for _ in range(steps):
        loop.step()
    update = loop.scheduler.abort("r0")
    assert update.finish_reason is FinishReason.ABORT
    assert loop.scheduler.abort("r0") is None
    assert loop.requests["r0"].pages == []
    finish_and_check(loop)
    assert loop.requests["r1"].finish_reason is FinishReason.LENGTH


def test_abort_of_an_unknown_or_finished_request_is_nothing():
    loop = loop_with(3)
    assert loop.scheduler.abort("nobody") is None
    finish_and_check(loop)
    assert loop.scheduler.abort("r0") is None


def test_abort_of_a_preempted_request():
    loop = loop_with(num_pages=7)
    loop.add("r0", prompt_of(RNG, 7), max_tokens=12)
    second = loop.add("r1", prompt_of(RNG, 7), max_tokens=12)
    while second.status is not RequestStatus.PREEMPTED:
        loop.step()
    loop.scheduler.abort("r1")
    finish_and_check(loop)


@pytest.mark.parametrize("steps", range(6))
def test_abort_in_flight_drops_the_result_and_holds_the_pages_until_the_step_is_over(steps):
    loop = loop_with(20, 9)
    for _ in range(steps):
        loop.step()
    plan = loop.schedule()
    outputs = loop.run(plan)
    free, length = loop.pool.free, loop.requests["r0"].length
    loop.scheduler.abort("r0")
    assert loop.scheduler.abort("r0") is None
    assert loop.pool.free == free
    updates = loop.commit(plan, outputs)
    assert "r0" not in {update.request_id for update in updates}
    assert loop.requests["r0"].length == length
    assert loop.requests["r0"].slot is None
    finish_and_check(loop)


def test_an_id_aborted_in_flight_can_be_used_again_at_once():
    loop = loop_with(3)
    loop.step()
    plan = loop.schedule()
    outputs = loop.run(plan)
    loop.scheduler.abort("r0")
    loop.add("r0", prompt_of(RNG, 4), max_tokens=3)
    assert loop.commit(plan, outputs) == []
    finish_and_check(loop)
    assert len(loop.outputs["r0"]) == 3


def test_a_cancelled_plan_costs_nothing():
    loop = loop_with(20, 9)
    for n in range(40):
        plan = loop.schedule()
        if plan is None:
            break
        if n % 2:
            loop.commit(plan, loop.run(plan))
        else:
            loop.scheduler.cancel(plan)
    finish_and_check(loop)


class SmallBucket:
    """Every row above the smallest bucket is dear."""

    def predict(self, cell, pairs):
        return 1.0 if cell.prefill <= 2 else 1000.0


def test_a_cancelled_large_chunk_may_return_as_a_small_one():
    # The pages of the cancelled chunk are more than the small cell has updates for.
    loop = loop_with(4, max_num_batched_tokens=32, page_size=1, prefill_buckets=(2, 32))
    loop.add("long", prompt_of(RNG, 60), max_tokens=2)
    loop.step()
    plan = loop.schedule()
    assert plan.prefill_rows > 20
    loop.scheduler.cancel(plan)
    loop.scheduler.config = dataclasses.replace(loop.config, max_step_ms=1000.0)
    loop.scheduler.step_time = SmallBucket()
    plan = loop.schedule()
    assert plan.prefill_rows == 2
    loop.commit(plan, loop.run(plan))
    finish_and_check(loop)


def test_fail_ends_the_named_requests_only():
    loop = loop_with(9, 9)
    plan = loop.schedule()
    loop.scheduler.cancel(plan)
    (update,) = loop.scheduler.fail(["r1", "nobody"], "pack: injected")
    assert update.request is loop.requests["r1"]
    assert (update.finish_reason, update.request.error) == (FinishReason.ERROR, "pack: injected")
    finish_and_check(loop)
    assert loop.requests["r0"].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("steps", range(8))
def test_a_lost_pool_costs_time_but_no_token(steps, in_flight):
    loop = loop_with(9, 5, 3)
    for _ in range(steps):
        loop.step()
    order = [*loop.scheduler.running, *loop.scheduler.waiting]
    if in_flight:
        plan = loop.schedule()
        loop.run(plan)
        order = [*loop.scheduler.running, *loop.scheduler.waiting]
    loop.lose_pool()
    assert loop.scheduler.running == []
    assert list(loop.scheduler.waiting) == order
    assert loop.pool.free == loop.pool.capacity
    assert loop.scheduler.pool_resets == 1
    finish_and_check(loop)


def test_pool_resets_are_counted():
    loop = loop_with(9)
    loop.schedule()
    loop.lose_pool()
    loop.schedule()
    loop.lose_pool()
    loop.step()
    assert loop.scheduler.pool_resets == 2


def test_a_request_that_ends_in_flight_is_gone_after_a_lost_pool():
    loop = loop_with(9, 5)
    plan = loop.schedule()
    loop.run(plan)
    loop.scheduler.abort("r0")
    loop.lose_pool()
    assert [request.request_id for request in loop.scheduler.waiting] == ["r1"]
    finish_and_check(loop)


def test_a_second_plan_while_one_is_in_flight_is_an_error():
    loop = loop_with(9)
    plan = loop.schedule()
    with pytest.raises(RuntimeError, match="a step is in flight"):
        loop.scheduler.schedule()
    loop.commit(plan, loop.run(plan))


def test_a_plan_is_committed_or_cancelled_once():
    loop = loop_with(9)
    plan = loop.schedule()
    outputs = loop.run(plan)
    loop.commit(plan, outputs)
    with pytest.raises(RuntimeError, match="is not in flight"):
        loop.scheduler.commit(plan, *outputs[:3])
    with pytest.raises(RuntimeError, match="is not in flight"):
        loop.scheduler.cancel(plan)


def test_a_commit_of_wrong_outputs_changes_nothing():
    loop = loop_with(3)
    loop.step()
    plan = loop.schedule()
    outputs = loop.run(plan)
    wrong = np.zeros((1, 0), np.int32), np.full((1, 1, 1), -1), np.zeros((1, 1), np.int32)
    with pytest.raises(RuntimeError, match="garbage"):
        loop.scheduler.commit(plan, *wrong)
    assert loop.requests["r0"].num_output_tokens == 1
    loop.commit(plan, outputs)
    finish_and_check(loop)
