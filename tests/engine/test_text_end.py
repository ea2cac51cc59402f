"""Bytes that never became a character end the text as U+FFFD, which may complete a stop string."""

import pytest
from engine.fake_executor import Story, character_tokenizer

from glm_jax.tokenizer import Tokenizer


class HalfCharacter:
    """A decoder that never gets the last byte."""

    def push(self, token_ids) -> str:
        return ""

    def finish(self) -> str:
        return "\ufffd"


@pytest.mark.parametrize(
    ("stop", "text", "reason"), [([], "\ufffd", "length"), (["\ufffd"], "", "stop")]
)
def test_a_stop_string_completed_by_the_end_of_the_text_is_the_reason(
    monkeypatch, stop, text, reason
):
    monkeypatch.setattr(Tokenizer, "incremental_decoder", lambda self, **_: HalfCharacter())
    story = Story(tokenizer=character_tokenizer())
    story.add("r", [3, 4, 5], max_tokens=2, stop=stop)
    story.finish()
    (completion,) = story.output("r").outputs
    assert (completion.text, completion.finish_reason) == (text, reason)
    assert completion.stop_reason == (stop[0] if stop else None)
    assert len(completion.token_ids) == 2
    story.check_idle()
