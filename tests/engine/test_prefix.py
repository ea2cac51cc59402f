"""Requests that begin alike share pages: found when published, waited for while written."""

from random import Random

import numpy as np
import pytest
from engine.harness import Loop, prompt_of

from glm_jax.engine.page_keys import KEY_BYTES, PageKeys
from glm_jax.engine.request import RowClass

RNG = Random(11)
SHARED = prompt_of(RNG, 20)
OPTIONS = {
    "max_model_len": 48,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 16,
    "page_size": 4,
    "prefill_buckets": (8,),
    "group_buckets": (1,),
}


def loop_of(**options) -> Loop:
    return Loop(**{**OPTIONS, **options})


def rows_of(plan) -> dict[str, int]:
    """Prefill rows of each request of a plan."""
    return {e.request_id: e.known for e in plan.entries if e.row_class is RowClass.PREFILL}


def prefill_rows(loop) -> dict[str, int]:
    """Prefill rows of each request over all steps so far."""
    total: dict[str, int] = {}
    for plan in loop.plans:
        for name, rows in rows_of(plan).items():
            total[name] = total.get(name, 0) + rows
    return total


def check_end(loop) -> None:
    loop.finish()
    for name in loop.requests:
        loop.check_tokens(name)
    loop.check_idle()


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_later_request_computes_only_what_is_not_in_full_pages(drafts):
    loop = loop_of(num_speculative_tokens=drafts)
    loop.add("first", SHARED, max_tokens=2)
    loop.finish()
    loop.add("second", [*SHARED, 1, 2], max_tokens=6)
    plan = loop.schedule_and_run()
    # With drafts a page is found only if the token after it is the same too: not the fifth.
    found = 16 if drafts else 20
    assert loop.requests["second"].num_cached_tokens == plan.cached_tokens == found
    assert rows_of(plan) == {"second": 22 - found}
    check_end(loop)


def test_at_least_one_row_is_computed_however_much_is_found():
    loop = loop_of()
    loop.add("first", SHARED, max_tokens=1)
    loop.finish()
    loop.add("second", SHARED, max_tokens=3)
    assert rows_of(loop.schedule_and_run()) == {"second": 4}
    check_end(loop)


def test_two_equal_prompts_in_one_step_cost_one_prefill():
    loop = loop_of()
    loop.add("first", SHARED[:14], max_tokens=6)
    loop.add("second", SHARED[:14], max_tokens=6)
    plan = loop.schedule_and_run()
    assert (rows_of(plan), plan.prefix_waits) == ({"first": 14}, 1)
    check_end(loop)
    assert prefill_rows(loop) == {"first": 14, "second": 2}


def test_a_prompt_of_many_chunks_is_waited_for_chunk_by_chunk():
    loop = loop_of()
    prompt = prompt_of(RNG, 40)
    loop.add("first", prompt, max_tokens=6)
    loop.add("second", prompt, max_tokens=6)
    check_end(loop)
    assert prefill_rows(loop) == {"first": 40, "second": 4}


def test_a_request_that_waits_for_a_page_holds_up_nobody_behind_it():
    loop = loop_of()
    loop.add("first", SHARED[:12], max_tokens=4)
    loop.add("second", SHARED[:12], max_tokens=4)
    loop.add("third", prompt_of(RNG, 3), max_tokens=4)
    assert rows_of(loop.schedule_and_run()) == {"first": 12, "third": 3}
    assert rows_of(loop.schedule_and_run()) == {"second": 4}
    check_end(loop)


def test_nothing_is_found_before_the_step_that_wrote_it_is_committed():
    loop = loop_of()
    loop.add("first", SHARED, max_tokens=4)
    plan = loop.schedule()
    outputs = loop.run(plan)
    assert loop.pool.published == ()
    loop.commit(plan, outputs)
    assert len(loop.pool.published) == 4
    check_end(loop)


def test_a_cancelled_step_publishes_nothing():
    loop = loop_of()
    loop.add("first", SHARED, max_tokens=4)
    loop.scheduler.cancel(loop.schedule())
    assert loop.pool.published == ()
    check_end(loop)


def test_an_abort_of_the_writer_leaves_the_one_that_waits_to_write_itself():
    loop = loop_of()
    loop.add("first", SHARED, max_tokens=4)
    loop.add("second", SHARED, max_tokens=4)
    plan = loop.schedule()
    outputs = loop.run(plan)
    loop.scheduler.abort("first")
    loop.commit(plan, outputs)
    assert loop.pool.published == ()
    assert rows_of(loop.schedule_and_run()) == {"second": 16}
    check_end(loop)


def test_a_lost_pool_forgets_its_pages():
    loop = loop_of()
    loop.add("first", SHARED, max_tokens=2)
    loop.finish()
    loop.lose_pool()
    assert loop.pool.published == ()
    loop.add("second", SHARED, max_tokens=2)
    assert rows_of(loop.schedule_and_run()) == {"second": 16}
    check_end(loop)


def test_a_preempted_request_finds_its_own_pages_again():
    loop = loop_of(num_pages=10, max_num_seqs=2)
    loop.add("first", prompt_of(RNG, 14), max_tokens=12)
    loop.add("second", prompt_of(RNG, 14), max_tokens=12)
    second = loop.requests["second"]
    while not second.preemptions:
        loop.step()
    known = second.length
    while second.slot is None:
        plan = loop.schedule_and_run()
    assert plan.cached_tokens > 0
    assert rows_of(plan)["second"] == known - plan.cached_tokens
    check_end(loop)


def test_pages_of_another_salt_are_not_found():
    loop = loop_of()
    loop.add("first", SHARED, max_tokens=1, salt="a")
    loop.finish()
    for name, salt, rows in (("same", "a", 4), ("other", "b", 16), ("none", None, 16)):
        loop.add(name, SHARED, max_tokens=1, salt=salt)
        assert rows_of(loop.schedule_and_run()) == {name: rows}
        loop.finish()
    check_end(loop)


def test_a_request_that_wants_every_row_reads_no_pages_but_writes_them():
    loop = loop_of()
    loop.add("first", SHARED, max_tokens=1).reads_prefix = False
    loop.finish()
    loop.add("again", SHARED, max_tokens=1).reads_prefix = False
    assert rows_of(loop.schedule_and_run()) == {"again": 16}
    loop.finish()
    loop.add("reader", SHARED, max_tokens=1)
    assert rows_of(loop.schedule_and_run()) == {"reader": 4}
    check_end(loop)


def test_switched_off_nothing_is_shared():
    loop = loop_of(enable_prefix_caching=False)
    for name in ("first", "second"):
        loop.add(name, SHARED, max_tokens=1)
    loop.finish()
    assert prefill_rows(loop) == {"first": 20, "second": 20}
    assert loop.scheduler.prefix.counts == (0, 0)


def test_the_tail_of_what_was_left_longest_ago_is_evicted_first():
    loop = loop_of(num_pages=13)
    loop.add("old", SHARED, max_tokens=1)
    loop.finish()
    loop.add("new", prompt_of(RNG, 16), max_tokens=1)
    loop.finish()
    # 5 + 4 pages are cached (the last of "new" is full, but ends with its last token): 3 free.
    loop.add("other", prompt_of(RNG, 18), max_tokens=1)
    loop.finish()
    assert loop.pool.evictions == 2
    loop.add("again", SHARED, max_tokens=1)
    assert rows_of(loop.schedule_and_run()) == {"again": 8}, "three of its five pages are left"
    check_end(loop)


def test_pages_found_are_not_evicted_for_those_admitted_beside_them():
    loop = loop_of(num_pages=10, max_num_seqs=2)
    loop.add("old", SHARED, max_tokens=1)
    loop.finish()
    loop.add("new", prompt_of(RNG, 16), max_tokens=1)
    loop.finish()
    assert loop.pool.cached == loop.pool.capacity
    # Three pages for "other" are evicted from the oldest, whose first four "again" begins with.
    loop.add("other", prompt_of(RNG, 9), max_tokens=1)
    loop.add("again", [*SHARED[:16], 5, 6], max_tokens=2)
    plan = loop.schedule_and_run()
    assert rows_of(plan) == {"other": 9, "again": 2}
    check_end(loop)


def test_counts_say_what_was_asked_for_and_found():
    loop = loop_of()
    for name in ("first", "second"):
        loop.add(name, SHARED, max_tokens=1)
        loop.finish()
    assert loop.scheduler.prefix.counts == (40, 16)


def test_a_page_whose_drafter_rows_are_missing_is_not_taken_by_one_that_drafts():
    loop = loop_of(num_speculative_tokens=3)
    loop.scheduler.drafting.policy.most_drafts = 0
    loop.add("plain", SHARED, max_tokens=1)
    loop.finish()
    loop.scheduler.drafting.policy.most_drafts = 3
    loop.add("drafts", SHARED, max_tokens=12)
    assert rows_of(loop.schedule_and_run()) == {"drafts": 16}
    loop.finish()
    # Its own pages, which are complete, took the place of the others.
    loop.add("again", SHARED, max_tokens=12)
    assert rows_of(loop.schedule_and_run()) == {"again": 4}
    check_end(loop)


def test_keys_grow_with_the_tokens_and_depend_on_all_before():
    tokens = np.array(SHARED, np.int32)
    keys = PageKeys(None, with_next=False)
    short = list(keys.upto(tokens[:9], 4))
    whole = list(keys.upto(tokens, 4))
    assert [len(key) for key in whole] == [KEY_BYTES] * 5
    assert whole[:2] == short
    assert whole == PageKeys(None, with_next=False).upto(tokens, 4)
    tokens[0] += 1
    changed = PageKeys(None, with_next=False).upto(tokens, 4)
    assert not set(changed) & set(whole)


def test_a_key_that_depends_on_the_next_token_waits_for_it():
    tokens = np.array(SHARED, np.int32)
    assert len(PageKeys(None, with_next=True).upto(tokens, 4)) == 4
    assert len(PageKeys(None, with_next=True).upto(tokens[:17], 4)) == 4
    assert len(PageKeys(None, with_next=True).upto(tokens[:16], 4)) == 3


def test_a_page_that_the_last_token_of_a_prompt_ends_is_waited_for_too():
    loop = loop_of(max_num_batched_tokens=32)
    loop.add("first", SHARED, max_tokens=4)
    loop.add("second", [*SHARED, 1, 2], max_tokens=4)
    assert rows_of(loop.schedule_and_run()) == {"first": 20}
    assert rows_of(loop.schedule_and_run()) == {"second": 2}
    check_end(loop)


def test_what_was_found_is_looked_up_again_once_the_pool_lost_a_page():
    loop = loop_of(num_pages=13, max_num_seqs=1)
    loop.add("old", SHARED, max_tokens=1)
    loop.finish()
    loop.add("runs", prompt_of(RNG, 16), max_tokens=20)
    loop.step()
    again = loop.add("again", SHARED, max_tokens=1)
    loop.scheduler.prefix.hit(again, complete=False)
    assert len(again.found[2]) == 4
    # The running one grows into the pages that were found.
    loop.finish()
    assert loop.pool.evictions > 0
    assert again.num_cached_tokens < 16
    check_end(loop)


def test_a_salt_is_no_token():
    tokens = np.array(SHARED, np.int32)
    salts = (None, "", "plain", "salt:", "tokens:")
    chains = [tuple(PageKeys(salt, with_next=False).upto(tokens, 4)) for salt in salts]
    assert len(set(chains)) == len(salts)
