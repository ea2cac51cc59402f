"""n > 1: completions of one prompt, each its own request with the prompt computed once."""

from random import Random

import pytest
from engine.fake_executor import Story
from engine.harness import prompt_of

from glm_jax.sampling.params import SamplingParams

PROMPT = prompt_of(Random(2), 14)
# Pages of 4: three of them are full before the last token.
FULL_PAGES = 12


def story(**options) -> Story:
    return Story(max_num_seqs=4, max_num_batched_tokens=16, prefill_buckets=(4, 16), **options)


def run(story, name="r", **params):
    story.add(name, PROMPT, **{"temperature": 1.0, "max_tokens": 5, **params})
    story.finish()
    return story.engine.release(name)[0]


def test_completion_i_is_that_of_a_request_with_seed_plus_i():
    output = run(story(), n=3, seed=7)
    assert [one.index for one in output.outputs] == [0, 1, 2]
    for index, one in enumerate(output.outputs):
        alone = story().alone(PROMPT, temperature=1.0, max_tokens=5, seed=7 + index)
        assert one.token_ids == alone
    assert len({tuple(one.token_ids) for one in output.outputs}) == 3


def test_unseeded_completions_differ():
    output = run(story(), n=3, seed=None)
    assert len({tuple(one.token_ids) for one in output.outputs}) == 3


def test_the_prompt_is_computed_once():
    one = story()
    output = run(one, n=4)
    rows = sum(record.prefill_rows for record in one.records)
    rests = sum(record.decode_rows for record in one.records) - 4 * 4
    assert rows + rests == len(PROMPT) + 3 * (len(PROMPT) - FULL_PAGES)
    assert output.prompt_token_ids == PROMPT
    assert output.num_cached_tokens == 0, "the first completion's: it found nothing"
    one.check_idle()


def test_pieces_name_the_request_and_the_completion():
    one = story()
    one.add("r", PROMPT, temperature=1.0, max_tokens=5, n=2)
    one.finish()
    streamed: dict[int, list[int]] = {0: [], 1: []}
    for delta in one.deltas["r"]:
        streamed[delta.index] += delta.token_ids
    output = one.engine.release("r")[0]
    assert list(streamed.values()) == [done.token_ids for done in output.outputs]
    ends = [delta.index for delta in one.deltas["r"] if delta.finish_reason]
    assert sorted(ends) == [0, 1]


def test_an_abort_ends_all_completions():
    one = story()
    one.add("r", PROMPT, temperature=1.0, max_tokens=30, n=3)
    one.add("other", PROMPT[:5], max_tokens=4)
    for _ in range(3):
        one.step()
    assert one.engine.abort("r")
    assert not one.engine.abort("r")
    one.finish()
    output = one.engine.release("r")[0]
    assert [done.finish_reason for done in output.outputs] == ["abort"] * 3
    assert one.output("other").finished
    one.check_idle()


def test_where_not_all_completions_may_wait_none_is_queued():
    one = story(max_queued_requests=3)
    one.add("a", PROMPT, max_tokens=2)
    with pytest.raises(ValueError, match="max_queued_requests is 3"):
        one.engine.add_request("r", PROMPT, SamplingParams(n=3, temperature=1.0))
    assert one.engine.scheduler.num_unfinished == 1
    one.finish()
    assert one.output("a").finished
    one.check_idle()


def test_an_id_is_in_use_until_its_result_is_handed_out():
    one = story()
    one.add("r", PROMPT, max_tokens=1)
    one.finish()
    with pytest.raises(ValueError, match="'r' is in use"):
        one.engine.add_request("r", PROMPT)
    one.engine.release("r")
    one.engine.add_request("r", PROMPT)


def test_a_timeout_ends_a_request_by_the_clock():
    one = story()
    now = 100.0
    one.engine.clock = lambda: now
    one.engine.add_request("r", PROMPT, SamplingParams(max_tokens=30), timeout=2.0)
    one.deltas["r"] = []
    one.step()
    now = 102.5
    one.step()
    output = one.output("r")
    assert (output.outputs[0].finish_reason, output.finished) == ("abort", True)
    assert "deadline" in output.outputs[0].error
    one.check_idle()


@pytest.mark.parametrize("timeout", [0, -1.0])
def test_a_timeout_is_above_zero(timeout):
    with pytest.raises(ValueError, match=rf"timeout is {timeout}; allowed: None or seconds above"):
        story().engine.add_request("r", PROMPT, timeout=timeout)


def test_requests_of_the_engine_share_pages_unless_salted():
    one = story()
    for name, salt in (("a", None), ("b", None), ("c", "x")):
        one.engine.add_request(name, PROMPT, SamplingParams(max_tokens=1), cache_salt=salt)
        one.deltas[name] = []
        one.finish()
    cached = [one.output(name).num_cached_tokens for name in "abc"]
    assert cached == [0, FULL_PAGES, 0]


def test_a_split_step_says_so():
    one = story(split_steps=True)
    one.add("a", PROMPT, max_tokens=6)
    one.add("b", PROMPT[::-1], max_tokens=6)
    one.finish()
    for name in "ab":
        assert one.output(name).finished
    split = [record for record in one.records if record.halves]
    assert split
    assert all(len(record.halves) == 2 and not record.split_reason for record in split)
    whole = {record.split_reason for record in one.records if not record.halves}
    assert whole <= {"one request", ""}


def test_a_split_step_gives_the_tokens_of_a_whole_one():
    outputs = []
    for split in (False, True):
        one = story(split_steps=split)
        prompts = {"a": PROMPT, "b": PROMPT[::-1], "c": PROMPT[3:9]}
        for name, prompt in prompts.items():
            one.add(name, prompt, max_tokens=9)
        one.finish()
        outputs.append([one.output(name).outputs[0].token_ids for name in prompts])
    assert outputs[0] == outputs[1]


def test_a_watch_that_raises_loses_no_piece():
    one = story()
    one.add("r", PROMPT[:4], max_tokens=2)

    def broken(record):
        one.engine.watches.clear()
        raise OSError("the disk is full")

    one.engine.watches.append(broken)
    with pytest.raises(OSError, match="disk is full"):
        one.step()
    one.finish()
    assert len(one.output("r").outputs[0].token_ids) == 2
    one.check_idle()
