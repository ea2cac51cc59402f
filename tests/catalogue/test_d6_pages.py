"""Catalogue D6: what the prefix cache says of a page, and how long a page belongs to whom."""

from random import Random

import numpy as np
import pytest
from catalogue.crowd import Crowd, entries
from engine.harness import prompt_of

from glm_jax.engine.page_keys import PageKeys

PAGE = 4
BEGINNING = prompt_of(Random(55), 16)


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("how", ["abort", "finish"])
def test_pages_of_a_request_that_ends_in_flight_are_not_handed_out_before_the_step_is_over(
    how, drafts
):
    """53: pages freed and reused while a step still writes to them."""
    crowd = Crowd(num_pages=1 + 8, watermark=0, num_speculative_tokens=drafts)
    crowd.decode("leaves", length=15, max_tokens=12)
    crowd.ask("stays", 9, max_tokens=8)
    plan = crowd.schedule()
    outputs = crowd.run(plan)
    pages, free = list(crowd.requests["leaves"].pages), crowd.pool.free
    if how == "abort":
        crowd.scheduler.abort("leaves")
    else:
        crowd.scheduler.finish("leaves", "stop", stop_value="text")
    assert crowd.pool.free == free
    assert all(crowd.pool.references(page) == 1 for page in pages)
    crowd.ask("next", 15, max_tokens=8)
    crowd.commit(plan, outputs)
    crowd.schedule_and_run()
    # It takes over what has just become free.
    assert set(crowd.requests["next"].pages) & set(pages)
    crowd.end()


def check_keys(crowd: Crowd, texts: dict[bytes, list[int]]) -> int:
    """Add the keys of all texts as they are now; no key that ever was finds other tokens."""
    for request in crowd.requests.values():
        keys = PageKeys(None, with_next=crowd.config.num_drafts > 0)
        tokens = np.array([*request.prompt_token_ids, *request.output_token_ids], np.int32)
        for number, key in enumerate(keys.upto(tokens, PAGE)):
            texts[key] = tokens[number * PAGE :][:PAGE].tolist()
    found = {key: page for key in texts if (page := crowd.pool.find(key)) is not None}
    for key, page in found.items():
        assert crowd.device.tokens[page * PAGE :][:PAGE] == texts[key]
    assert len(set(found.values())) == len(found)
    return len(texts) - len(found)


@pytest.mark.parametrize("drafts", [0, 3])
def test_no_key_of_an_earlier_text_finds_a_page_of_a_later_one(drafts):
    """54: a key that was replaced, or whose page was evicted, comes back."""
    crowd = Crowd(num_pages=1 + 14, watermark=0, num_speculative_tokens=drafts)
    texts: dict[bytes, list[int]] = {}
    missed = 0
    for turn in range(8):
        # Page by page through the prompt and token by token behind it; every other one is known.
        crowd.ask(f"r{turn}", 13 + turn, max_tokens=14)
        crowd.add(f"again {turn}", crowd.requests[f"r{turn // 2}"].prompt_token_ids, max_tokens=9)
        while crowd.scheduler.has_unfinished:
            crowd.schedule_and_run()
            missed = max(missed, check_keys(crowd, texts))
    assert crowd.pool.evictions > 20
    assert missed > 20
    crowd.end()


def drafts_of(crowd: Crowd, tails: dict[str, list[int]]) -> dict[str, list[list[int]]]:
    """What is drafted in every step for the beginning with each of these tails."""
    for name, tail in tails.items():
        crowd.add(name, [*BEGINNING, *tail], max_tokens=12, ignore_eos=True, seed=5)
        while crowd.scheduler.has_unfinished:
            crowd.schedule_and_run()
    crowd.end()
    return {
        name: [
            list(entries(plan)[name].draft_token_ids)
            for plan in crowd.plans
            if name in plan.request_ids and plan.kind == "decode"
        ]
        for name in tails
    }


def test_the_drafters_entry_at_a_page_end_is_that_of_the_token_behind_it():
    """55: a hit that ends at a page: the drafter's last row was made with another successor."""
    tails = {"first": [1, 2], "other": [3, 2], "same": [1, 7], "fork": [3, 8]}
    warm = Crowd()
    drafts = drafts_of(warm, tails)
    assert drafts == drafts_of(Crowd(enable_prefix_caching=False), tails)
    assert any(drafts["other"])
    found = {name: request.num_cached_tokens for name, request in warm.requests.items()}
    # No page more is given up than the one whose successor differs.
    assert found == {"first": 0, "other": 12, "same": 16, "fork": 16}
