"""A slice of the engine's fuzzer, and that it finds what is wrong and makes it small."""

import json
from random import Random

import pytest

from glm_jax.engine.prefix import PrefixCache
from scripts.engine_fuzz.invariants import BrokenError
from scripts.engine_fuzz.life import Guest, Life, draw_life
from scripts.engine_fuzz.shrink import shrink
from scripts.engine_fuzz.wish import FEATURES, Wish
from scripts.fuzz_engine import EngineFuzz

STEPS = 2000


@pytest.mark.slow
def test_random_lives_hold_every_invariant(tiny_llm, compile_counter):
    before = compile_counter.compiled
    fuzz = EngineFuzz(tiny_llm)
    seen = fuzz.run(steps=STEPS, seed=3)
    # Only margins of sampled tokens that came out differently need a program.
    assert compile_counter.compiled - before <= (seen["close decisions"] > 0)
    # The draw must reach what it is meant to test.
    for rare in (
        "mixed",
        "preemptions",
        "pool resets",
        "evictions",
        "waits for a page",
        "queue full",
    ):
        assert seen[rare] > 0, (rare, seen)
    for end in ("stop", "length", "abort", "error"):
        assert seen[f"ended {end}"] > 0, (end, seen)
    assert seen["found tokens"] > STEPS / 2
    assert seen["positions with logprobs"] > STEPS / 10


def test_every_feature_is_a_parameter_or_an_argument(tiny_llm):
    fuzz = EngineFuzz(tiny_llm)
    fuzz.life(0, 0)
    asked = {name for wish in fuzz._block for name in wish.features}
    assert len(FEATURES) > 15
    assert len(asked) > len(FEATURES), "nothing is asked for"


def test_a_life_is_the_same_after_json(tiny_llm):
    fuzz = EngineFuzz(tiny_llm)
    life = fuzz.life(1, 5)
    assert Life.from_json(json.loads(json.dumps(life.as_json()))) == life
    again = draw_life(Random("life 1 5"), tiny_llm, fuzz._block, (("full", 1.0),))
    assert again == life


def test_pages_that_are_published_too_early_are_found(tiny_llm, monkeypatch):
    publish = PrefixCache.publish

    def early(self, request):
        request.computed += 8
        publish(self, request)
        request.computed -= 8

    monkeypatch.setattr(PrefixCache, "publish", early)
    with pytest.raises(BrokenError) as failure:
        EngineFuzz(tiny_llm).run(steps=STEPS, seed=0, seconds=1.0)
    (note,) = failure.value.__notes__
    life = Life.from_json(json.loads(note.split(": ", 1)[1]))
    with pytest.raises(BrokenError):
        EngineFuzz(tiny_llm).live(life)


def test_what_fails_is_made_smaller():
    guests = [Guest(Wish([n, 5], {"max_tokens": 8, "temperature": 0.0}), n) for n in range(4)]
    life = Life(guests, drafts=3, slots=2, options={"watermark": 0.2})

    def fails(candidate: Life) -> bool:
        return any(guest.wish.prompt[0] == 2 for guest in candidate.guests)

    least = shrink(life, fails, seconds=10.0)
    assert least.guests == [Guest(Wish([2], {"max_tokens": 1, "temperature": 0.0}), 0)]
    assert (least.drafts, least.slots, least.options["watermark"]) == (0, 4, 0.0)
