"""Groups with drafts beside prompts: shapes that look alike, rests, skips, preemption, ends.

The device is FakeDevice: three of four drafts are right, and it refuses a draft that nobody made, a
stale row, and a drafter's cache that is not that of the request alone.
"""

from random import Random

import pytest
from engine.harness import Loop, prompt_of

from glm_jax.engine.request import RowClass

K = 3


def loop_with(**options) -> Loop:
    defaults = {
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "page_size": 4,
        "prefill_buckets": (8,),
        "group_buckets": (1,),
        "num_speculative_tokens": K,
    }
    return Loop(**{**defaults, **options})


def add(loop: Loop, name: str, length: int, **params) -> None:
    options = {"max_tokens": 20, "ignore_eos": True, "seed": 5, **params}
    loop.add(name, prompt_of(Random(name), length), **options)


def finish(loop: Loop) -> None:
    """Run to the end: everyone has the tokens that it has alone."""
    loop.finish()
    for name in loop.requests:
        loop.check_tokens(name)
    loop.check_idle()


def entries(loop: Loop, name: str) -> list:
    return [entry for plan in loop.plans for entry in plan.entries if entry.request_id == name]


def counts(loop: Loop) -> tuple[int, int]:
    acceptance = loop.scheduler.drafting.policy.acceptance
    return acceptance.drafts, acceptance.accepted


def test_drafts_are_accepted_in_part():
    loop = loop_with()
    for n in range(3):
        add(loop, f"r{n}", 5 + n)
    finish(loop)
    drafts, accepted = counts(loop)
    assert 0.5 * drafts < accepted < 0.9 * drafts
    verified = [entry for plan in loop.plans for entry in plan.group_entries if entry.drafts]
    assert len(verified) < 3 * 20 - 10, "tokens came in steps of one"


def test_a_prompt_of_the_length_of_a_group_is_no_group():
    loop = loop_with()
    add(loop, "decoding", 6)
    loop.schedule_and_run()
    add(loop, "prompt", K + 1)
    plan = loop.schedule_and_run()
    assert plan.kind == "mixed"
    classes = {entry.request_id: entry.row_class for entry in plan.entries}
    assert classes == {"decoding": RowClass.DECODE, "prompt": RowClass.PREFILL}
    rows = {entry.request_id: (entry.known, entry.drafts) for entry in plan.entries}
    assert rows == {"decoding": (1, K), "prompt": (K + 1, 0)}
    finish(loop)


@pytest.mark.parametrize("tail", range(1, K + 2))
def test_a_tail_beside_groups_of_drafts_is_prefilled(tail):
    loop = loop_with(max_num_batched_tokens=8)
    add(loop, "decoding", 6)
    loop.schedule_and_run()
    add(loop, "long", 8 + tail)
    plans = [loop.schedule_and_run() for _ in range(2)]
    assert [entries_of(plan, "long").known for plan in plans] == [8, tail]
    last = entries_of(plans[1], "long")
    assert (last.row_class, last.sampled) == (RowClass.PREFILL, True)
    assert last.new_drafts == K
    finish(loop)


def entries_of(plan, name: str):
    (entry,) = (entry for entry in plan.entries if entry.request_id == name)
    return entry


@pytest.mark.parametrize("rest", range(1, K + 2))
@pytest.mark.parametrize("as_group", [True, False])
def test_a_rest_has_the_same_tokens_in_either_segment(rest, as_group):
    # Where the grid has no mixed cell with two groups, the rest must be a chunk.
    cells = [(0, 4, K + 1)] if as_group else [(8, 1, K + 1), (0, 1, K + 1)]
    loop = loop_with(max_num_batched_tokens=8, grid_cells=[(8, 0, 1), (8, 4, K + 1), *cells])
    add(loop, "decoding", 6)
    loop.schedule_and_run()
    add(loop, "long", 8 + rest)
    loop.schedule_and_run()
    plan = loop.schedule_and_run()
    in_group = {entry.request_id for entry in plan.group_entries}
    assert ("long" in in_group) == as_group
    finish(loop)


@pytest.mark.parametrize("policy", ["prefill_first", "alternate"])
def test_drafts_of_a_step_without_the_request_wait_for_the_next(policy):
    loop = loop_with(step_policy=policy)
    add(loop, "decoding", 6)
    loop.schedule_and_run()
    loop.schedule_and_run()
    held = list(loop.requests["decoding"].draft_token_ids)
    assert held
    add(loop, "prompt", 6)
    plan = loop.schedule_and_run()
    assert plan.request_ids == ("prompt",)
    assert list(loop.requests["decoding"].draft_token_ids) == held
    plan = loop.schedule_and_run()
    assert "decoding" in plan.request_ids
    assert list(entries_of(plan, "decoding").draft_token_ids) == held
    finish(loop)


def test_a_preempted_request_forgets_its_drafts():
    loop = loop_with(num_pages=1 + 9, max_model_len=32)
    for n in range(2):
        add(loop, f"r{n}", 12, max_tokens=16)
    finish(loop)
    assert loop.scheduler.preemptions
    resumed = next(entry for entry in entries(loop, "r1") if entry.request.preemptions)
    assert resumed is not None


def test_drafts_without_a_free_page_are_dropped_before_anyone_is_preempted():
    loop = loop_with(num_pages=1 + 4, max_model_len=16, max_num_seqs=2, watermark=0)
    add(loop, "a", 6, max_tokens=2)
    add(loop, "b", 7, max_tokens=8)
    finish(loop)
    short = [entry for entry in entries(loop, "b") if entry.row_class is RowClass.DECODE]
    assert any(entry.drafts < K for entry in short)
    assert not loop.scheduler.preemptions


def test_no_draft_is_made_or_verified_beyond_the_end():
    for max_tokens in range(1, 9):
        loop = loop_with()
        add(loop, "r", 5, max_tokens=max_tokens)
        finish(loop)
        for entry in entries(loop, "r"):
            assert entry.new_drafts <= max(0, max_tokens - 2)
        assert len(loop.outputs["r"]) == max_tokens


def test_an_end_inside_accepted_drafts_drops_what_follows():
    ended = 0
    for seed in range(40):
        loop = loop_with()
        add(loop, f"r{seed}", 5, max_tokens=20, ignore_eos=False, stop_token_ids=[3, 30, 60, 90])
        loop.finish()
        (update,) = [loop.requests[f"r{seed}"]]
        loop.check_tokens(f"r{seed}")
        ended += update.finish_reason == "stop"
    assert ended >= 10


def test_a_request_aborted_while_its_drafts_are_verified_leaves_nothing():
    loop = loop_with()
    add(loop, "a", 5)
    add(loop, "b", 6)
    loop.schedule_and_run()
    plan = loop.schedule()
    assert plan is not None
    outputs = loop.run(plan)
    loop.scheduler.abort("a")
    updates = loop.commit(plan, outputs)
    assert [update.request_id for update in updates] == ["b"]
    finish_others(loop, "b")


def finish_others(loop: Loop, name: str) -> None:
    loop.finish()
    loop.check_tokens(name)
    loop.check_idle()


def test_writing_ahead_holds_pages_only_for_what_is_written():
    sharing, ahead = loop_with(), loop_with(writes_ahead=True)
    for loop in (sharing, ahead):
        add(loop, "r", 7, max_tokens=30)
        loop.schedule_and_run()
        loop.schedule_and_run()
    held = [len(loop.requests["r"].pages) for loop in (sharing, ahead)]
    # Rows 7 to 10, and 12 of later passes: three pages, or four.
    assert [entries(loop, "r")[-1].rows_ahead for loop in (sharing, ahead)] == [0, K - 1]
    assert held[1] >= held[0]
    for loop in (sharing, ahead):
        finish(loop)
