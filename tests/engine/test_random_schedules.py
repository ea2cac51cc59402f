"""Ten thousand random lives of the scheduler, every step checked by harness.Loop."""

from collections import Counter

import pytest
from engine.random_schedule import run_random_schedule
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_jax.engine.request import FinishReason, RowClass

SCHEDULES = 10_000
BLOCK = 2_500


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, SCHEDULES, BLOCK))
def test_random_schedules_hold_the_invariants(first):
    seen = Counter()
    for seed in range(first, first + BLOCK):
        try:
            loop = run_random_schedule(seed)
        except Exception as error:
            error.add_note(f"run_random_schedule({seed})")
            raise
        seen["preemptions"] += loop.scheduler.preemptions
        seen["pool resets"] += loop.scheduler.pool_resets
        seen.update(request.finish_reason for request in loop.requests.values())
        seen.update(plan.kind for plan in loop.plans)
        seen["rests as groups"] += sum(
            entry.row_class is RowClass.PREFILL
            for plan in loop.plans
            for entry in plan.group_entries
        )
    # The draw must reach what it is meant to test.
    for rare in ("mixed", "preemptions", "pool resets", "rests as groups", *FinishReason):
        assert seen[rare] >= BLOCK // 100, (rare, seen)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.integers(10**6, 10**9))
def test_other_random_schedules_too(seed):
    run_random_schedule(seed)
