"""What an engine had computed is gone once another engine resets the device they share."""

from random import Random

from engine.fake_executor import Story
from engine.harness import prompt_of

PROMPT = prompt_of(Random(5), 12)


def test_an_engine_notices_that_another_reset_its_device():
    one = Story()
    one.add("first", PROMPT, max_tokens=3)
    one.finish()
    one.executor.reset()
    one.add("second", PROMPT, max_tokens=3)
    one.finish()
    assert one.output("second").num_cached_tokens == 0, "the pages it published are gone"
    assert one.output("first").outputs[0].token_ids == one.alone(PROMPT, max_tokens=3)
    one.check_idle()


def test_requests_in_the_middle_recompute_when_another_reset_their_device():
    one = Story()
    one.add("r", PROMPT, max_tokens=9)
    for _ in range(4):
        one.step()
    one.executor.reset()
    one.finish()
    assert one.output("r").outputs[0].token_ids == one.alone(PROMPT, max_tokens=9)
    one.check_idle()
