"""Drafts that a step leaves on the device are verified in the next one."""

import numpy as np
import pytest

from glm_jax.engine.config import EngineConfig
from glm_jax.engine.pages import PagePool
from glm_jax.engine.request import FinishReason, Request
from glm_jax.engine.scheduler import Scheduler
from glm_jax.sampling.params import SamplingParams


def scheduler_with(max_tokens, prompt=3, count=1) -> Scheduler:
    config = EngineConfig(
        max_model_len=64, max_num_seqs=4, page_size=4, num_pages=65, num_speculative_tokens=5
    )
    scheduler = Scheduler(config, config.grid(), PagePool(config.pool_pages, 4))
    for n in range(count):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        scheduler.add(Request(f"r{n}", [1] * prompt, params))
    return scheduler


def step(scheduler, accepted=0):
    """Run one step in which every group accepts so many of its drafts."""
    plan = scheduler.schedule()
    groups = np.ones((1, plan.cell.groups, plan.cell.width), np.int32)
    counts = np.zeros((1, plan.cell.groups), np.int32)
    counts[0, : len(plan.group_entries)] = [
        min(accepted, entry.drafts) for entry in plan.group_entries
    ]
    chunks = np.ones((1, scheduler.limits.chunks(plan.cell)), np.int32)
    made = np.ones((1, chunks.shape[1] + plan.cell.groups, 5), np.int32)
    updates = scheduler.commit(plan, chunks, groups, counts, made)
    return plan, updates


def test_a_group_verifies_the_drafts_of_the_step_before():
    scheduler = scheduler_with(max_tokens=40)
    step(scheduler)
    plan, updates = step(scheduler, accepted=2)
    assert plan.cell == (0, 1, 6)
    assert (plan.group_entries[0].known, plan.group_entries[0].drafts) == (1, 5)
    assert [len(update.new_token_ids) for update in updates] == [3]
    # Rows at positions 3 to 8 score themselves and what is before them.
    assert plan.pairs == sum(range(4, 10))


def test_without_drafts_the_next_group_is_one_row():
    scheduler = scheduler_with(max_tokens=40)
    step(scheduler)
    scheduler.running[0].speculates = False
    scheduler.drafting.policy.most_drafts = 0
    step(scheduler, accepted=1)
    plan, _ = step(scheduler)
    assert plan.cell == (0, 1, 1)


def test_drafts_that_were_planned_must_come_back():
    scheduler = scheduler_with(max_tokens=40)
    plan = scheduler.schedule()
    chunks = np.ones((1, scheduler.limits.chunks(plan.cell)), np.int32)
    groups = np.ones((1, plan.cell.groups, plan.cell.width), np.int32)
    with pytest.raises(RuntimeError, match="5 drafts were planned for request 'r0'"):
        scheduler.commit(plan, chunks, groups, np.zeros((1, plan.cell.groups), np.int32))


def test_no_draft_is_verified_beyond_the_end():
    scheduler = scheduler_with(max_tokens=5)
    rows = []
    while scheduler.has_unfinished:
        plan, updates = step(scheduler, accepted=0)
        rows.append(plan.group_entries[0].rows if plan.group_entries else 0)
        for request in scheduler.running:
            assert request.computed + 1 + len(request.draft_token_ids) <= request.most_rows
    # The prompt of three rows fits a group as well.
    assert rows == [3, 4, 3, 2, 1]
    assert updates[0].finish_reason is FinishReason.LENGTH


def test_pages_of_drafts_are_there_before_their_rows():
    scheduler = scheduler_with(max_tokens=30, count=3)
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        for entry in plan.entries:
            request = entry.request
            assert request.computed + entry.rows <= 4 * len(request.pages)
        scheduler.cancel(plan)
        step(scheduler, accepted=3)
    assert scheduler.pages.free == scheduler.pages.capacity
