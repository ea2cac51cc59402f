"""What a request asks of its control line: what is resolved, and what an engine refuses."""

import math

import pytest
import tokenizers
from engine.fake_executor import Story
from tokenizers import AddedToken, decoders, models

from glm_jax.sampling.bad_words import LongWords, word_tokens
from glm_jax.sampling.control_update import ROW_BANS
from glm_jax.sampling.params import SamplingParams
from glm_jax.sampling.request_controls import controls_of
from glm_jax.sampling.thinking import ThinkingBudget, ThinkingPart, thinking_ids
from glm_jax.tokenizer import Tokenizer

VOCABULARY = 30


def asked(*, think_ids=(7, 8), tokenizer=None, stop_ids=(), **params):
    return controls_of(
        SamplingParams(**params),
        vocab_size=VOCABULARY,
        tokenizer=tokenizer,
        think_ids=think_ids,
        stop_ids=stop_ids,
    )


def spaced_tokenizer(*, merged: bool = True) -> Tokenizer:
    """Words with a space before them are tokens of their own, or the space is one."""
    names = ["a", "b", "\u0120", "ab", "\u0120a", "\u0120ab", "\u0120b"]
    merges = [("a", "b"), ("\u0120", "ab"), ("\u0120", "a"), ("\u0120", "b")][: 4 * merged]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={name: n for n, name in enumerate(names)}, merges=merges)
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


def test_a_request_that_asks_nothing_has_no_controls():
    assert asked() is None
    assert asked(temperature=0.3, top_k=4, min_tokens=3, stop_token_ids=[2]) is None


def test_only_the_allowed_ids_keep_their_bias():
    controls = asked(allowed_token_ids=[3, 4, 5], logit_bias={4: 2, 9: 100}, bad_words=[[5], [6]])
    assert controls.fill == -math.inf
    assert controls.biases == {3: 0.0, 4: 2.0, 5: -math.inf}
    assert controls.reason == ""


def test_without_allowed_ids_single_bad_words_are_biases():
    controls = asked(logit_bias={4: 2, 9: 100}, bad_words=[[9], [6]])
    assert (controls.fill, controls.biases) == (0.0, {4: 2.0, 9: -math.inf, 6: -math.inf})


def test_a_bad_word_is_encoded_with_and_without_a_space():
    tokenizer = spaced_tokenizer()
    assert tokenizer.encode(" ab") == [5]
    assert word_tokens(["ab"], tokenizer) == ((3,), (5,))
    assert word_tokens([" ab", (3, 3)], tokenizer) == ((3,), (5,), (3, 3))


def test_a_space_of_its_own_adds_no_form_of_a_bad_word():
    # Token by token, " x" is the space and then the word: its end is banned anyway.
    tokenizer = spaced_tokenizer(merged=False)
    assert tokenizer.encode(" ab") == [2, 0, 1]
    assert word_tokens(["ab"], tokenizer) == ((0, 1),)


def test_a_long_word_bans_its_end_behind_its_beginning_only():
    words = LongWords([(1, 2), (1, 2, 3), (5, 1, 9), (2, 2)])
    assert words.longest == 3
    assert words.banned_after([]) == ()
    assert set(words.banned_after([1])) == {2}
    assert set(words.banned_after([5, 1])) == {2, 9}
    assert set(words.banned_after([1, 2])) == {3, 2}
    assert set(words.banned_after([2])) == {2}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": {30: 1.0}}, "logit_bias has token id 30; allowed: 0 to 29"),
        ({"allowed_token_ids": [3, 30]}, "allowed_token_ids has token id 30; allowed: 0 to 29"),
        ({"bad_words": [[3, 99]]}, "bad_words has token id 99; allowed: 0 to 29"),
        ({"bad_words": ["no"]}, "bad_words holds the string 'no', but the engine has no tokenizer"),
        ({"allowed_token_ids": [3], "bad_words": [[3]]}, "leave no token to draw"),
        ({"allowed_token_ids": [3, 4], "bad_words": [[3, 3], [3, 4]]}, "leave no token to draw"),
        ({"bad_words": [[n] for n in range(30)]}, "leave no token to draw"),
        ({"allowed_token_ids": [2], "stop_ids": [2]}, "leave no token to draw"),
        (
            {"thinking_token_budget": 3, "think_ids": None},
            "thinking_token_budget is 3, but the engine knows no tokens <think> and </think>",
        ),
    ],
)
def test_what_no_request_can_have_is_refused_with_the_reason(params, message):
    with pytest.raises(ValueError, match=message):
        asked(**params)


def test_too_many_bad_words_with_one_beginning_are_refused():
    words = [[0, n] for n in range(ROW_BANS + 1)]
    with pytest.raises(ValueError, match=rf"has {ROW_BANS + 1} words that differ only in their la"):
        controls_of(SamplingParams(bad_words=words), vocab_size=99, tokenizer=None, think_ids=None)
    many = [[n, n + 1] for n in range(90)]
    controls_of(SamplingParams(bad_words=many), vocab_size=99, tokenizer=None, think_ids=None)


def test_an_engine_refuses_a_request_and_goes_on():
    story = Story()
    with pytest.raises(ValueError, match="logit_bias has token id 97; allowed: 0 to 96"):
        story.add("bad", [1, 2], logit_bias={97: 1.0})
    with pytest.raises(ValueError, match="thinking_token_budget is 1, but the engine knows no"):
        story.add("thoughtful", [1, 2], thinking_token_budget=1)
    story.add("good", [1, 2], logit_bias={96: 1.0})
    story.finish()
    assert story.output("good").outputs[0].token_ids == story.alone([1, 2])


def test_thinking_tokens_come_from_the_tokenizer():
    tokenizer = spaced_tokenizer()
    assert thinking_ids(tokenizer) is None
    assert thinking_ids(None) is None
    tokenizer._backend.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    assert thinking_ids(tokenizer) == (7, 8)


@pytest.mark.parametrize(
    ("text", "inside", "tokens"),
    [
        ([], False, 0),
        ([1, 7], True, 0),
        ([1, 7, 3, 4], True, 2),
        ([1, 7, 3, 8, 4], False, 1),
        ([7, 3, 7, 4], True, 1),
        ([8, 3], False, 0),
        ([7, 3, 8, 8, 7], True, 0),
    ],
)
def test_a_thinking_part_is_open_behind_the_last_start(text, inside, tokens):
    budget = ThinkingBudget(7, 8, 2)
    whole = ThinkingPart().after(text, budget)
    assert whole == (inside, tokens)
    step_by_step = ThinkingPart()
    for token in text:
        step_by_step = step_by_step.after([token], budget)
    assert step_by_step == whole


def test_the_end_is_due_behind_each_draft_that_uses_up_the_budget():
    budget = ThinkingBudget(7, 8, 2)
    assert ThinkingPart(True, 1).forced([3, 4], budget) == [False, True, True]
    assert ThinkingPart(True, 1).forced([8, 4, 7], budget) == [False, False, False, False]
    assert ThinkingPart(False, 0).forced([7], ThinkingBudget(7, 8, 0)) == [False, True]


def test_whole_numbers_are_numbers_too():
    params = SamplingParams(frequency_penalty=1, presence_penalty=2, logit_bias={3: 5})
    asked = controls_of(params, vocab_size=10, tokenizer=None, think_ids=None)
    assert asked.penalties == (2.0, 1.0, 1.0)
    assert asked.biases == {3: 5.0}
