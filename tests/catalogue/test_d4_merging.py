"""Catalogue D4: what goes wrong where decodes and prompts are merged into one step."""

from itertools import product

import pytest
from catalogue.crowd import Crowd, entries
from engine.fake_program import tokens_alone

from glm_jax.engine.request import FinishReason, RequestStatus, RowClass


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("offset", range(11))
def test_a_prompt_of_several_chunks_may_arrive_at_any_step_of_a_decode(offset, drafts):
    """32: decode tokens that were not staged for the merged step: a crash at the arrival."""
    crowd = Crowd(num_speculative_tokens=drafts, max_num_batched_tokens=8)
    crowd.ask("decoding", 6, max_tokens=24)
    for _ in range(offset):
        crowd.schedule_and_run()
    crowd.ask("long", 21)
    crowd.end()
    assert drafts or "mixed" in {plan.kind for plan in crowd.plans}


def test_prompts_of_a_single_token_beside_decodes_all_end():
    """33: a batch that is taken for prefill only loses the requests merged into it."""
    crowd = Crowd()
    crowd.decode("a", "b", max_tokens=30)
    for number in range(9):
        crowd.ask(f"single {number}", 1 + 3 * number, max_tokens=1)
        crowd.schedule_and_run()
    crowd.end()
    assert {len(crowd.outputs[f"single {number}"]) for number in range(9)} == {1}


def test_a_request_that_ends_at_its_first_token_in_a_mixed_step_frees_its_slot():
    """34: the slot of a request that ended with its prefill was never given back."""
    crowd = Crowd()
    crowd.decode("decoding", max_tokens=30)
    prompt = [5, 7, 11]
    options = {"eos": (), "max_model_len": 64}
    params = crowd.ask("free", 1, max_tokens=1).params
    (first,) = tokens_alone(prompt, params, seed=5, **options)
    free = list(crowd.scheduler._residents.free_slots)
    crowd.schedule_and_run()
    request = crowd.add("r", prompt, eos=[first], max_tokens=9, seed=5)
    assert crowd.schedule_and_run().kind == "mixed"
    assert (request.finish_reason, request.slot) == (FinishReason.STOP, None)
    assert crowd.outputs["r"] == [first]
    assert sorted(crowd.scheduler._residents.free_slots) == sorted(free)
    crowd.end()


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_prefix_that_was_computed_in_mixed_steps_is_as_good_as_a_cold_one(drafts):
    """37: state that a mixed step was given and did not write; every tenth answer changes."""
    crowd = Crowd(num_speculative_tokens=drafts, max_num_batched_tokens=8, max_num_seqs=3)
    crowd.decode("a", "b", max_tokens=50)
    first = crowd.ask("first", 21, max_tokens=9)
    while not first.finished:
        assert crowd.schedule_and_run().kind in ("mixed", "decode")
    text = [*first.prompt_token_ids, *first.output_token_ids]
    again = crowd.add("again", [*text, 1, 2, 3], max_tokens=12, seed=5)
    crowd.schedule_and_run()
    # The drafter's entry of a page's last row is made with the token behind it, which is known.
    assert again.num_cached_tokens == (len(text) - 1) // 4 * 4
    crowd.end()


def preempt(crowd: Crowd, name: str) -> None:
    assert crowd.scheduler.running[-1].request_id == name
    crowd.scheduler._preempt(crowd.scheduler.running[-1])


@pytest.mark.parametrize("chunk", range(5))
@pytest.mark.parametrize("happens", ["abort", "finish", "preempt"])
def test_a_prompt_may_end_or_be_preempted_behind_any_of_its_chunks(chunk, happens):
    """38: a request that leaves between two chunks has no owner, and its pages leak."""
    crowd = Crowd(max_num_batched_tokens=8)
    crowd.decode("decoding", max_tokens=30)
    crowd.ask("long", 35)
    for _ in range(chunk):
        assert entries(crowd.schedule_and_run())["long"].row_class is RowClass.PREFILL
    request = crowd.requests["long"]
    assert request.computed == 8 * chunk
    if happens == "abort":
        crowd.scheduler.abort("long")
    elif happens == "finish":
        crowd.scheduler.finish("long", "stop", stop_value="text")
    elif chunk:
        preempt(crowd, "long")
        assert (request.status, request.pages) == (RequestStatus.PREEMPTED, [])
    crowd.check_state()
    crowd.end()
    expected = {"abort": FinishReason.ABORT, "finish": FinishReason.STOP}
    assert request.finish_reason is expected.get(happens, FinishReason.LENGTH)


@pytest.mark.parametrize("spare", range(4))
def test_a_prompt_that_takes_the_last_free_pages_breaks_no_decode_at_a_page_end(spare):
    """40: a mixed step that does not check the memory of its decodes fails to allocate."""
    # Two decodes of 8 known tokens stand before their third page each; the prompt takes the rest.
    crowd = Crowd(num_pages=1 + 4 + 3 + spare, watermark=0, num_speculative_tokens=0)
    crowd.decode("a", "b", length=7, max_tokens=6)
    crowd.ask("prompt", 11, max_tokens=1)
    crowd.end()
    assert all(request.finish_reason is FinishReason.LENGTH for request in crowd.requests.values())


@pytest.mark.parametrize("budget", range(1, 9))
def test_tiny_budgets_lose_no_chunk(budget):
    """42: continuations of chunks that are lost where max_num_tokens is small."""
    crowd = Crowd(
        max_num_batched_tokens=budget,
        prefill_buckets=(budget,),
        max_num_seqs=8,
        num_speculative_tokens=2,
    )
    for number, (length, most) in enumerate(product((13, 21), (1, 4, 6, 9))):
        crowd.ask(f"r{number}", length, max_tokens=most)
    crowd.end()
    assert [len(tokens) for tokens in crowd.outputs.values()] == [1, 4, 6, 9] * 2
