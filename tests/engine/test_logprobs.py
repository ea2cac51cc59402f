"""Log-probabilities on the fake device, whose values tell the row and the token asked about.

A wrong row, a wrong token, a row too many or one too few is another number. The values of a real
model: test_logprobs_of_a_model.
"""

from random import Random

import pytest
from engine.fake_executor import Story, character_tokenizer, rank_of, text_of, top_ids_of
from engine.fake_program import VOCABULARY, hidden_of
from engine.harness import prompt_of
from engine.said_logprobs import check

from glm_jax.engine.draft_policy import FixedDrafts
from glm_jax.engine.request import RequestStatus

TOKENIZER = character_tokenizer()
PROMPT = prompt_of(Random(5), 6)
LONG = prompt_of(Random(7), 29)
OTHER = prompt_of(Random(6), 9)
# Of everything: three of the most likely, and two labels.
ALL = {"logprobs": 3, "prompt_logprobs": 2, "logprob_token_ids": [7, 50]}
SPECULATING = {"num_speculative_tokens": 4, "decode_loop_steps": 0}


def speculating(drafts=4, **options) -> Story:
    story = Story(tokenizer=TOKENIZER, **SPECULATING, **options)
    story.engine.scheduler.drafting.policy = FixedDrafts(drafts)
    return story


# What is handed out.


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"logprobs": 0},
        {"logprobs": 5},
        {"prompt_logprobs": 0},
        {"prompt_logprobs": 4},
        {"logprob_token_ids": [3, 96, 3]},
        ALL,
    ],
)
def test_what_was_asked_for_is_there_and_nothing_else(asked):
    story = Story()
    story.add("r", PROMPT, max_tokens=5, **asked)
    story.add("other", OTHER, max_tokens=5)
    story.finish()
    check(story, "r", PROMPT, **asked)
    check(story, "other", OTHER)
    story.check_idle()


def test_a_prompt_of_one_token_has_no_logprobs_of_its_own():
    story = Story()
    story.add("r", [4], max_tokens=2, **ALL)
    story.finish()
    assert check(story, "r", [4], **ALL).prompt_logprobs == [None]


def test_decoded_tokens_are_there_with_a_tokenizer_only():
    for tokenizer, detokenize, there in ((TOKENIZER, True, True), (TOKENIZER, False, False)):
        story = Story(tokenizer=tokenizer)
        story.add("r", PROMPT, max_tokens=3, detokenize=detokenize, **ALL)
        story.finish()
        output = check(story, "r", PROMPT, **ALL)
        for position in (*output.prompt_logprobs[1:], *output.outputs[0].logprobs):
            for token, one in position.items():
                assert one.decoded_token == (text_of([token]) if there else None)


def test_a_rank_beyond_the_top_is_told_and_that_of_a_label_is_not():
    story = Story()
    story.add("r", PROMPT, max_tokens=1, logprobs=1, logprob_token_ids=[*range(10)])
    story.finish()
    (completion,) = story.output("r").outputs
    (position,) = completion.logprobs
    (token,) = completion.token_ids
    hidden = hidden_of(len(PROMPT) - 1, PROMPT[-1])
    best = top_ids_of(hidden)[0]
    assert position[token].rank == rank_of(hidden, token) > 1
    assert position[best].rank == 1
    assert {position[label].rank for label in {*range(10)} - {token, best}} == {None}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"logprobs": 21}, "logprobs is 21; allowed: at most 20"),
        ({"prompt_logprobs": 21}, "prompt_logprobs is 21; allowed: at most 20"),
        ({"logprob_token_ids": [*range(21)]}, "logprob_token_ids is 21; allowed: at most 20"),
        ({"logprob_token_ids": [3, VOCABULARY]}, "holds 97; allowed: 0 to 96"),
    ],
)
def test_more_than_the_head_program_gives_is_refused(asked, message):
    story = Story()
    with pytest.raises(ValueError, match=message):
        story.add("r", PROMPT, **asked)
    assert not story.engine.has_unfinished


def test_max_logprobs_raises_the_limit():
    story = Story(max_logprobs=200)
    story.add("r", PROMPT, max_tokens=2, logprobs=VOCABULARY)
    story.finish()
    check(story, "r", PROMPT, logprobs=VOCABULARY)


# Mixed steps.


def crowd(story: Story, asked) -> list[tuple]:
    """Requests that decode, and long prompts that join them; what every step did."""
    # Alone in its step, decoding, and in chunks beside others.
    story.add("first", PROMPT, max_tokens=40, ignore_eos=True, **asked)
    for _ in range(3):
        story.step()
    story.add("plain", OTHER, max_tokens=10)
    story.add("long", LONG, max_tokens=6, **asked)
    story.finish()
    return [
        (one.kind, one.cell, one.request_ids, one.prefill_rows, one.decode_rows, one.mode)
        for one in story.records
    ]


@pytest.mark.parametrize("drafts", [0, 4])
def test_decodes_do_not_sit_out_a_step_because_a_request_wants_logprobs(drafts):
    # One request's wish keeps all decodes out of mixed steps elsewhere.
    steps = [crowd(speculating(drafts), asked) for asked in ({}, ALL)]
    assert steps[0] == steps[1]
    mixed = [step for step in steps[1] if step[0] == "mixed"]
    assert len(mixed) >= 4
    assert all("first" in step[2] for step in mixed)


@pytest.mark.parametrize("drafts", [0, 1, 4])
def test_logprobs_do_not_belong_to_another_token_after_a_mixed_step(drafts):
    # Partial prefills and verify rows in one step: offsets must count all of them.
    story = speculating(drafts)
    crowd(story, ALL)
    check(story, "first", PROMPT, **ALL)
    check(story, "long", LONG, **ALL)
    check(story, "plain", OTHER)
    assert {record.kind for record in story.records} >= {"mixed", "decode"}
    assert drafts == 0 or any(record.accepted_tokens for record in story.records)


def test_decodes_in_mixed_steps_are_neither_late_nor_doubled():
    story = Story()
    for name, prompt in (("a", PROMPT), ("b", OTHER)):
        story.add(name, prompt, max_tokens=12, **ALL)
    while len(story.deltas["b"]) < 2:
        story.step()
    story.add("long", LONG, max_tokens=2, **ALL)
    mixed = 0
    while not story.deltas["long"]:
        result = story.step()
        mixed += result.record.kind == "mixed"
        counts = {delta.request_id: len(delta.logprobs) for delta in result.deltas}
        assert {name: counts[name] for name in "ab"} == {"a": 1, "b": 1}
    assert mixed >= 4
    story.finish()
    for name, prompt in (("a", PROMPT), ("b", OTHER), ("long", LONG)):
        check(story, name, prompt, **ALL)


# Chunks.


@pytest.mark.parametrize("budget", range(1, 9))
def test_prompt_logprobs_do_not_depend_on_where_chunks_end(budget):
    # A chunk's last row needs the token that begins the next one.
    story = Story(max_num_batched_tokens=budget, prefill_buckets=(4,))
    for length in range(1, 12):
        story.add(f"r{length}", LONG[:length], max_tokens=2, **ALL)
    story.finish()
    for length in range(1, 12):
        check(story, f"r{length}", LONG[:length], **ALL)


def test_a_partial_prefill_hands_nothing_out():
    story = Story()
    story.add("other", OTHER, max_tokens=20)
    while not story.deltas["other"]:
        story.step()
    story.add("r", LONG, max_tokens=3, prompt_logprobs=1)
    chunks = 0
    while not story.deltas["r"]:
        assert story.engine.release("r")[0].prompt_logprobs is None
        chunks += "r" in story.step().record.request_ids
    assert chunks >= 3
    story.finish()
    assert len(check(story, "r", LONG, prompt_logprobs=1).prompt_logprobs) == len(LONG)


def test_an_abort_in_the_middle_of_the_prompt_hands_out_no_part_of_it():
    story = Story()
    story.add("r", LONG, max_tokens=3, **ALL)
    story.step()
    story.step()
    story.engine.abort("r")
    story.finish()
    output = check(story, "r", LONG, **ALL)
    assert output.prompt_logprobs is None
    assert output.outputs[0].logprobs == []


# Pages that are lost, or found.


def test_prompt_logprobs_survive_a_preemption_between_chunks():
    # Elsewhere they are lost with the batch slot, doubled, or lack the last one.
    story = Story(num_pages=10, max_num_seqs=2, watermark=0.0, max_num_batched_tokens=4)
    story.add("old", OTHER, max_tokens=24)
    while not story.deltas["old"]:
        story.step()
    story.add("r", prompt_of(Random(3), 21), max_tokens=3, **ALL)
    request = story.engine.scheduler.get("r")
    while not request.preemptions:
        computed = request.computed
        story.step()
    assert 0 < computed < request.prompt_length
    story.finish()
    output = check(story, "r", prompt_of(Random(3), 21), **ALL)
    assert len(output.prompt_logprobs) == 21


def test_logprobs_of_tokens_drawn_before_a_preemption_are_kept_once():
    story = Story(num_pages=7, max_num_seqs=2, watermark=0.0)
    prompts = {name: prompt_of(Random(name), 10) for name in ("r0", "r1")}
    for name, prompt in prompts.items():
        story.add(name, prompt, max_tokens=12, **ALL)
    victim = story.engine.scheduler.get("r1")
    while victim.status is not RequestStatus.PREEMPTED:
        story.step()
    assert victim.num_output_tokens > 1
    story.finish()
    for name, prompt in prompts.items():
        check(story, name, prompt, **ALL)


@pytest.mark.parametrize("phase", ["dispatch", "device", "fetch", "commit"])
def test_a_step_that_is_lost_and_repeated_doubles_nothing(phase):
    failed = []

    def hook(current, plan):
        if current == phase and len(story.records) in (2, 7) and len(story.records) not in failed:
            failed.append(len(story.records))
            raise RuntimeError("injected")

    story = Story(hook=hook)
    # The second time its prompt is cut elsewhere: the other one has grown.
    story.add("other", OTHER, max_tokens=8, **ALL)
    story.add("r", LONG[:13], max_tokens=8, **ALL)
    story.finish()
    assert failed == [2, 7]
    check(story, "other", OTHER, **ALL)
    check(story, "r", LONG[:13], **ALL)


def test_prompt_logprobs_of_a_cached_prompt_are_neither_stale_nor_short():
    # Cached pages have no hidden rows: whoever wants logprobs of the prompt computes it.
    story = Story()
    story.add("cold", LONG, max_tokens=3, **ALL)
    story.finish()
    cold = check(story, "cold", LONG, **ALL)
    story.add("plain", LONG, max_tokens=3)
    story.finish()
    story.add("warm", LONG, max_tokens=3, **ALL)
    story.finish()
    assert sum(record.prefill_rows for record in story.records[-6:]) == len(LONG)
    story.add("tokens only", LONG, max_tokens=3, logprobs=3)
    story.finish()
    # The last page is not full.
    assert story.records[-3].decode_rows + story.records[-3].prefill_rows == 1
    assert not any(record.fault for record in story.records)
    warm = check(story, "warm", LONG, **ALL)
    assert warm.prompt_logprobs == cold.prompt_logprobs
    assert warm.outputs[0].logprobs == cold.outputs[0].logprobs
    check(story, "tokens only", LONG, logprobs=3)


# Ends.


@pytest.mark.parametrize("place", range(1, 5))
def test_no_logprobs_ids_or_text_go_past_a_stop_string_among_accepted_drafts(place):
    params = {"max_tokens": 16, "ignore_eos": True}
    prompt, drafted = PROMPT, 4
    # A seed whose first verify step accepts all of its drafts.
    for seed in range(200):
        story = speculating(drafted)
        story.add("r", prompt, seed=seed, **params, **ALL)
        story.step()
        story.step()
        if len(story.deltas["r"]) == 2 and len(story.deltas["r"][1].token_ids) == drafted + 1:
            break
    tokens = story.streamed("r")
    stop = text_of(tokens[place - 1 : place + 1])
    assert stop not in text_of(tokens[:place])
    story = speculating(drafted)
    story.add("r", prompt, seed=seed, stop=[stop], **params, **ALL)
    story.finish()
    output = check(story, "r", prompt, **ALL)
    (completion,) = output.outputs
    assert completion.token_ids == tokens[: place + 1]
    assert completion.text == text_of(tokens[: place - 1])
    assert len(completion.logprobs) == place + 1
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    story.check_idle()


@pytest.mark.parametrize("drafts", [0, 1, 4])
def test_nothing_is_counted_that_an_end_cut_off(drafts):
    """What usage is made of: tokens, their logprobs and accepted drafts, however a request ends."""
    alone = Story().alone(PROMPT, max_tokens=20)
    ends = [{"stop": [text_of(alone[n : n + 2])]} for n in range(4, 9)] + [
        {"stop_token_ids": [alone[n]]} for n in range(4, 9)
    ]
    ends += [{"max_tokens": n} for n in range(1, 9)]
    for end in ends:
        story = speculating(drafts)
        story.add("r", PROMPT, **{"max_tokens": 20, **end}, **ALL)
        story.finish()
        output = check(story, "r", PROMPT, **ALL)
        (completion,) = output.outputs
        emitted = len(completion.token_ids)
        assert completion.token_ids == alone[:emitted]
        assert len(completion.logprobs) == emitted == len(story.streamed("r"))
        verified = sum(record.accepted_tokens for record in story.records)
        assert verified == output.drafts.accepted_tokens < emitted
        # The first token, then one and its accepted drafts a step.
        assert emitted - 1 <= output.drafts.accepted_tokens + len(story.deltas["r"]) - 1


def test_an_abort_while_the_step_runs_keeps_logprobs_and_tokens_equally_long():
    def hook(current, plan):
        if current == "fetch" and len(story.records) == 4:
            story.engine.abort("r")

    story = Story(hook=hook)
    story.add("r", PROMPT, max_tokens=9, **ALL)
    story.add("other", OTHER, max_tokens=9, **ALL)
    story.finish()
    output = check(story, "r", PROMPT, **ALL)
    assert 0 < len(output.outputs[0].logprobs) < 9
    check(story, "other", OTHER, **ALL)


def test_a_request_that_wants_logprobs_of_tokens_is_stepped_one_by_one():
    # The steps of a decode loop leave no hidden rows behind.
    story = Story(decode_loop_steps=4)
    story.add("r", PROMPT, max_tokens=9, logprobs=1)
    story.finish()
    check(story, "r", PROMPT, logprobs=1)
    assert {record.loop_steps for record in story.records} == {1}
    assert "log-probabilities" in {record.loop_reason for record in story.records}
    story.add("prompt", PROMPT, max_tokens=9, prompt_logprobs=1)
    story.finish()
    check(story, "prompt", PROMPT, prompt_logprobs=1)
    assert max(record.loop_steps for record in story.records) > 1
