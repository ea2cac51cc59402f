"""First tokens: computed or waiting, and for what; the parts are the whole."""

import pytest
from engine.fake_executor import Story
from observe.lives import Life

from glm_jax.engine.declined import Reason
from glm_jax.observe.first_token import OTHER, first_tokens


def test_the_parts_are_the_time_to_the_first_token():
    for seed in range(6):
        life = Life(seed, num_pages=60)
        names = life.live(8)
        outputs = {name: life.story.output(name) for name in names}
        firsts = first_tokens(life.records)
        assert {one.request_id for one in firsts} == {
            name for name, output in outputs.items() if output.outputs[0].token_ids
        }
        for one in firsts:
            times = outputs[one.request_id].times
            assert one.seconds == pytest.approx(one.computed + sum(one.waited.values()))
            assert one.steps >= 1
            # To the end of the step, a little after the token.
            assert times.first_token - times.arrival <= one.seconds
            assert one.seconds < times.first_token - times.arrival + 0.1


def test_it_says_what_a_request_waited_for():
    story = Story(max_num_seqs=1, max_num_batched_tokens=4)
    story.add("first", [1] * 6, max_tokens=5)
    story.add("second", [2] * 6, max_tokens=1)
    story.finish()
    first, second = first_tokens(story.records)
    assert (first.request_id, first.steps, set(first.waited)) == ("first", 2, {OTHER})
    assert (second.request_id, second.steps) == ("second", 2)
    assert second.waited[Reason.NO_SLOTS] > 0.5 * (second.seconds - second.computed)


def test_a_request_without_a_token_is_left_out():
    story = Story()
    story.add("gone", [1] * 30, max_tokens=5)
    story.step()
    story.engine.abort("gone")
    story.step()
    assert first_tokens(story.records) == []
