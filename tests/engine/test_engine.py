"""The engine's loop on a fake device: streams, stops, aborts, limits and refusals; no JAX."""

from random import Random

import numpy as np
import pytest
from engine.fake_executor import Story, character_tokenizer, text_of
from engine.fake_program import VOCABULARY
from engine.harness import prompt_of

from glm_jax.engine.admission import RequestRefusedError
from glm_jax.engine.engine import Executor
from glm_jax.engine.request import RequestStatus
from glm_jax.engine.text_stream import TextStream
from glm_jax.sampling.params import SamplingParams

TOKENIZER = character_tokenizer()
PROMPT = prompt_of(Random(5), 6)
OTHER = prompt_of(Random(6), 9)


def tokens_of(prompt=PROMPT, **params) -> list[int]:
    return Story().alone(prompt, **params)


def run_one(prompt=PROMPT, *, eos=(), engine=None, **params):
    """Generate for one prompt beside another one, which must not notice."""
    story = Story(tokenizer=TOKENIZER, eos=eos, **(engine or {}))
    story.add("other", OTHER, max_tokens=12, ignore_eos=True)
    story.add("r", prompt, **params)
    story.finish()
    other = story.output("other").outputs[0]
    assert other.token_ids == story.alone(OTHER, max_tokens=12, ignore_eos=True)
    (completion,) = story.output("r").outputs
    story.check_idle()
    return completion, story


def test_the_fake_is_an_executor():
    assert isinstance(Story().executor, Executor)


def test_stream_pieces_add_up_to_the_tokens_and_text_of_the_request_alone():
    completion, story = run_one(max_tokens=10)
    alone = tokens_of(max_tokens=10)
    assert completion.token_ids == alone
    assert completion.text == text_of(alone)
    assert [len(delta.token_ids) for delta in story.deltas["r"]] == [1] * 10
    assert completion.finish_reason == "length"
    assert completion.stop_reason is None


def test_a_text_prompt_is_encoded_and_returned():
    story = Story(tokenizer=TOKENIZER)
    story.add("r", text_of(PROMPT), max_tokens=3)
    story.finish()
    output = story.output("r")
    assert output.prompt == text_of(PROMPT)
    assert output.prompt_token_ids == PROMPT
    assert output.outputs[0].token_ids == tokens_of(max_tokens=3)


def test_without_detokenize_there_are_tokens_and_no_text():
    completion, _ = run_one(max_tokens=4, detokenize=False)
    assert completion.token_ids == tokens_of(max_tokens=4)
    assert completion.text == ""


def test_a_stop_string_over_several_tokens_ends_the_request_and_stays_hidden():
    alone = tokens_of(max_tokens=10)
    stop = text_of(alone[3:6])
    completion, story = run_one(max_tokens=10, stop=["never there", stop])
    assert completion.text == text_of(alone[:3])
    assert completion.token_ids == alone[:6]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    # Held back while it could become the stop string: tokens come, text does not.
    pieces = [delta.text for delta in story.deltas["r"]]
    assert pieces == [*text_of(alone[:3]), "", "", ""]


def test_a_stop_string_is_kept_when_asked_for():
    alone = tokens_of(max_tokens=10)
    stop = text_of(alone[3:6])
    completion, _ = run_one(max_tokens=10, stop=stop, include_stop_str_in_output=True)
    assert completion.text == text_of(alone[:6])
    assert completion.stop_reason == stop


def test_text_held_back_comes_out_when_the_stop_string_does_not_complete():
    alone = tokens_of(max_tokens=6)
    begun = text_of(alone[4:6]) + "?"
    completion, story = run_one(max_tokens=6, stop=[begun])
    assert completion.finish_reason == "length"
    assert completion.text == text_of(alone)
    assert [delta.text for delta in story.deltas["r"]][-2:] == ["", text_of(alone[4:6])]


def test_the_stop_string_that_is_complete_first_wins():
    alone = tokens_of(max_tokens=10)
    early, late = text_of(alone[4:6]), text_of(alone[2:7])
    completion, _ = run_one(max_tokens=10, stop=[late, early])
    assert completion.stop_reason == early
    assert completion.text == text_of(alone[:4])


def test_a_stop_string_beats_the_length_limit_at_the_same_token():
    alone = tokens_of(max_tokens=5)
    completion, _ = run_one(max_tokens=5, stop=[text_of(alone[4:])])
    assert (completion.finish_reason, completion.text) == ("stop", text_of(alone[:4]))


def test_eos_before_a_stop_string_wins_and_has_no_text():
    alone = tokens_of(max_tokens=10)
    first = alone.index(alone[4])
    stop = text_of(alone[first + 1 : first + 3])
    completion, _ = run_one(max_tokens=10, stop=[stop], eos=(alone[4],))
    assert completion.token_ids == alone[: first + 1]
    assert completion.text == text_of(alone[:first])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)


def test_a_stop_token_is_named_and_kept_among_the_tokens_only():
    alone = tokens_of(max_tokens=10)
    first = alone.index(alone[3])
    completion, _ = run_one(max_tokens=10, stop_token_ids=[alone[3]])
    assert completion.token_ids == alone[: first + 1]
    assert completion.text == text_of(alone[:first])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", alone[3])


def test_eos_as_the_first_token():
    alone = tokens_of(max_tokens=10)
    completion, story = run_one(max_tokens=10, eos=(alone[0],))
    assert completion.token_ids == alone[:1]
    assert (completion.text, completion.finish_reason) == ("", "stop")
    assert len(story.deltas["r"]) == 1


def test_ignore_eos_goes_on():
    alone = tokens_of(max_tokens=10)
    completion, _ = run_one(max_tokens=10, eos=(alone[0],), ignore_eos=True)
    assert completion.token_ids == alone
    assert completion.finish_reason == "length"


def test_max_tokens_1():
    completion, story = run_one(max_tokens=1)
    assert completion.token_ids == tokens_of(max_tokens=1)
    assert completion.finish_reason == "length"
    assert len(story.deltas["r"]) == 1


def test_a_prompt_of_max_model_len_minus_one_gives_one_token():
    prompt = prompt_of(Random(1), 47)
    completion, _ = run_one(prompt, max_tokens=10)
    assert completion.token_ids == tokens_of(prompt, max_tokens=10)
    assert len(completion.token_ids) == 1
    assert completion.finish_reason == "length"


def test_max_tokens_none_runs_to_max_model_len():
    completion, _ = run_one(max_tokens=None)
    assert completion.token_ids == tokens_of(max_tokens=None)
    assert len(PROMPT) + len(completion.token_ids) == 48


def test_min_tokens_bans_eos_and_stop_ids_on_the_device():
    free = tokens_of(max_tokens=8)
    params = {"max_tokens": 8, "min_tokens": 5, "stop_token_ids": [free[1]]}
    story = Story(eos=(free[0],))
    expected = story.alone(PROMPT, **params)
    assert len(expected) >= 5
    assert not {free[0], free[1]} & set(expected[:5])
    completion, _ = run_one(eos=(free[0],), **params)
    assert completion.token_ids == expected


def test_min_tokens_lets_stop_strings_pass_unnoticed():
    alone = tokens_of(max_tokens=10)
    stop = text_of(alone[2:4])
    completion, _ = run_one(max_tokens=10, min_tokens=4, stop=[stop])
    assert completion.text == text_of(alone)
    later = text_of(alone[5:7])
    completion, _ = run_one(max_tokens=10, min_tokens=4, stop=[later])
    assert completion.text == text_of(alone[:5])


@pytest.mark.parametrize("steps", range(9))
def test_abort_in_every_state_twice(steps):
    # Waiting, in the middle of the prompt, decoding, ended.
    story = Story(tokenizer=TOKENIZER)
    story.add("r", prompt_of(Random(2), 19), max_tokens=4)
    story.add("other", OTHER, max_tokens=8)
    for _ in range(steps):
        story.step()
    ended = any(delta.finish_reason for delta in story.deltas["r"])
    seen = story.streamed("r")
    assert story.engine.abort("r") is not ended
    assert story.engine.abort("r") is False
    story.finish()
    completion = story.output("r").outputs[0]
    assert completion.finish_reason == ("length" if ended else "abort")
    assert completion.token_ids == seen
    assert story.output("other").outputs[0].token_ids == story.alone(OTHER, max_tokens=8)
    story.check_idle()


def test_abort_of_a_preempted_request():
    story = Story(num_pages=7, max_num_seqs=2)
    story.add("r0", prompt_of(Random(2), 10), max_tokens=12)
    story.add("r1", prompt_of(Random(3), 10), max_tokens=12)
    victim = story.engine.scheduler.get("r1")
    while victim.status is not RequestStatus.PREEMPTED:
        story.step()
    assert story.engine.abort("r1")
    story.finish()
    assert story.output("r1").outputs[0].finish_reason == "abort"
    assert len(story.output("r0").outputs[0].token_ids) == 12
    story.check_idle()


@pytest.mark.parametrize("phase", ["pack", "dispatch", "device", "fetch", "commit"])
def test_abort_while_its_step_runs_drops_what_the_step_drew(phase):
    aborts = []

    def hook(current, plan):
        if current == phase and len(story.records) == 4:
            aborts.append(story.engine.abort("r"))
            aborts.append(story.engine.abort("r"))

    story = Story(hook=hook)
    story.add("r", PROMPT, max_tokens=9)
    story.add("other", OTHER, max_tokens=9)
    story.finish()
    assert aborts == [True, False]
    completion = story.output("r").outputs[0]
    alone = story.alone(PROMPT, max_tokens=9)
    assert completion.finish_reason == "abort"
    assert 0 < len(completion.token_ids) < 9
    assert completion.token_ids == alone[: len(completion.token_ids)]
    assert story.output("other").outputs[0].token_ids == story.alone(OTHER, max_tokens=9)
    assert all(record.fault is None for record in story.records)
    story.check_idle()


def test_abort_gives_out_the_text_held_back():
    alone = tokens_of(max_tokens=10)
    story = Story(tokenizer=TOKENIZER)
    story.add("r", PROMPT, max_tokens=10, stop=[text_of(alone[2:9])])
    while len(story.deltas["r"]) < 4:
        story.step()
    assert "".join(delta.text for delta in story.deltas["r"]) == text_of(alone[:2])
    story.engine.abort("r")
    story.finish()
    assert story.output("r").outputs[0].text == text_of(alone[:4])


def test_abort_of_an_unknown_id_is_false():
    assert Story().engine.abort("nobody") is False


@pytest.mark.parametrize(
    ("prompt", "params", "options", "message"),
    [
        ([], {}, {}, "empty prompt"),
        ([1] * 48, {}, {}, "at most 47"),
        ([1] * 20, {"max_tokens": 20}, {"num_pages": 8}, "needs 10 pages.* the pool has 7"),
        ([1, VOCABULARY], {}, {}, "token id 97 is out of range; allowed: 0 to 96"),
        ([-1], {}, {}, "token id -1 is out of range"),
        ("text", {}, {}, "needs a tokenizer"),
        ([1], {"stop": ["x"]}, {}, "need text"),
        ([1], {"min_tokens": 1, "stop_token_ids": [*range(17)]}, {}, "17 EOS and stop ids"),
        ([1], {"request_id": "other"}, {}, "id 'other' is in use"),
    ],
)
def test_a_refused_request_is_nobody_elses_business(prompt, params, options, message):
    story = Story(**options)
    story.add("other", OTHER, max_tokens=6)
    story.step()
    name = params.pop("request_id", "r")
    with pytest.raises(ValueError, match=message):
        story.engine.add_request(name, prompt, SamplingParams(**params))
    story.finish()
    assert story.output("other").outputs[0].token_ids == story.alone(OTHER, max_tokens=6)
    with pytest.raises(KeyError):
        story.engine.release("r")
    story.check_idle()


def test_refusals_by_the_scheduler_have_their_own_error():
    with pytest.raises(RequestRefusedError):
        Story().add("r", [])


def test_release_of_a_running_request_is_a_look_and_of_a_finished_one_its_end():
    story = Story()
    story.add("r", PROMPT, max_tokens=4)
    story.step()
    output, logits = story.engine.release("r")
    assert (output.finished, logits) == (False, None)
    assert output.outputs[0].token_ids == story.alone(PROMPT, max_tokens=4)[:1]
    story.finish()
    story.output("r")
    with pytest.raises(KeyError):
        story.engine.release("r")


def test_has_unfinished_until_the_abort_was_handed_out():
    story = Story()
    story.add("r", PROMPT)
    story.engine.abort("r")
    assert story.engine.has_unfinished
    assert [delta.finish_reason for delta in story.step().deltas] == ["abort"]
    assert not story.engine.has_unfinished
    assert story.records[-1].kind == "idle"


def test_an_id_released_after_an_abort_starts_afresh():
    story = Story()
    story.add("r", PROMPT)
    story.step()
    story.engine.abort("r")
    assert story.engine.release("r")[0].outputs[0].finish_reason == "abort"
    assert not story.engine.has_unfinished
    story.add("r", OTHER, max_tokens=3)
    story.finish()
    assert story.output("r").outputs[0].token_ids == story.alone(OTHER, max_tokens=3)
    story.check_idle()


def test_kept_logits_cover_every_prompt_row_once_known():
    story = Story(num_pages=9, max_num_seqs=2)
    story.add("old", OTHER, max_tokens=20)
    for _ in range(6):
        story.step()
    params = SamplingParams(max_tokens=9, seed=1)
    story.engine.add_request("r", prompt_of(Random(3), 13), params, keep_logits=True)
    story.deltas["r"] = []
    story.finish()
    assert story.engine.scheduler.preemptions
    _, logits = story.engine.release("r")
    assert logits.shape == (13, VOCABULARY)
    np.testing.assert_array_equal(logits.sum(axis=1), 1)


def test_records_tell_what_each_step_did():
    story = Story()
    story.step()
    assert (story.records[0].kind, story.records[0].cell) == ("idle", None)
    story.add("r0", PROMPT[:4], max_tokens=4)
    story.step()
    story.add("r1", OTHER, max_tokens=2)
    story.finish()
    kinds = [record.kind for record in story.records]
    assert kinds == ["idle", "prefill", "mixed", "mixed", "decode"]
    mixed = story.records[2]
    assert mixed.cell == (8, 1, 1)
    assert (mixed.prefill_rows, mixed.prefill_pad_rows) == (8, 0)
    assert (mixed.decode_rows, mixed.decode_pad_rows) == (1, 0)
    assert mixed.request_ids == ("r1", "r0")
    assert [record.index for record in story.records] == [*range(5)]
    assert all(min(record.phases) >= 0 for record in story.records)
    assert all(sum(record.phases) <= record.wall_time for record in story.records)


def push_together(tokens, **params) -> tuple[TextStream, tuple[str, int]]:
    stream = TextStream(TOKENIZER, SamplingParams(**params))
    return stream, stream.push(tokens, ended=False)


def test_tokens_after_the_one_that_completes_a_stop_string_are_dropped():
    # Several tokens in one step: accepted drafts.
    stream, (text, kept) = push_together([0, 1, 2, 3, 4], stop=["#$"])
    assert (text, kept) == ('!"', 4)
    assert stream.matched == "#$"


def test_the_ending_token_of_several_is_hidden():
    stream = TextStream(TOKENIZER, SamplingParams())
    assert stream.push([0, 1, 2], ended=True) == ('!"', 3)
    stream = TextStream(TOKENIZER, SamplingParams(include_stop_str_in_output=True))
    assert stream.push([0, 1, 2], ended=True) == ('!"#', 3)


def test_min_tokens_counts_tokens_across_pushes():
    stream, _ = push_together([0], stop=["#", "%"], min_tokens=3)
    assert stream.push([1, 2, 3, 4, 5], ended=False) == ('"#$', 4)
    assert stream.matched == "%"
