import pytest

from glm_jax.engine.request import FinishReason, Request
from glm_jax.engine.stopping import append_tokens, end_at_stop_string
from glm_jax.sampling.params import SamplingParams


def request(*, max_length=10, eos=(2,), **params) -> Request:
    made = Request("r", [5, 6], SamplingParams(**params), eos_token_ids=eos)
    made.max_length = max_length
    return made


@pytest.mark.parametrize(
    ("params", "drawn", "kept", "reason", "value"),
    [
        ({}, [7, 8], [7, 8], None, None),
        ({}, [7, 2, 8], [7, 2], FinishReason.STOP, None),
        ({"ignore_eos": True}, [2, 8], [2, 8], None, None),
        ({"stop_token_ids": [8]}, [7, 8, 9], [7, 8], FinishReason.STOP, 8),
        ({"stop_token_ids": [2]}, [2], [2], FinishReason.STOP, None),
        ({"stop_token_ids": [2], "ignore_eos": True}, [2], [2], FinishReason.STOP, 2),
        ({"min_tokens": 2}, [2, 7, 2], [2, 7, 2], FinishReason.STOP, None),
        ({"max_length": 4}, [7, 8, 9], [7, 8], FinishReason.LENGTH, None),
        ({"max_length": 4}, [7, 2], [7, 2], FinishReason.STOP, None),
        ({"max_length": 4}, [2, 7], [2], FinishReason.STOP, None),
        ({"max_length": 3}, [7], [7], FinishReason.LENGTH, None),
    ],
)
def test_the_first_ending_token_wins(params, drawn, kept, reason, value):
    made = request(**params)
    assert append_tokens(made, drawn) == kept
    assert (made.finish_reason, made.stop_value) == (reason, value)
    assert made.output_token_ids == kept


def test_a_stop_string_beats_the_limit_and_drops_later_tokens():
    made = request(max_length=5)
    append_tokens(made, [7, 8, 9])
    assert made.finish_reason is FinishReason.LENGTH
    end_at_stop_string(made, "x", 1)
    assert (made.finish_reason, made.stop_value) == (FinishReason.STOP, "x")
    assert made.output_token_ids == [7, 8]
