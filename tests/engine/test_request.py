import numpy as np

from glm_jax.engine.request import Request, RequestStatus, RowClass
from glm_jax.sampling.params import SamplingParams


def request(prompt=(5, 6, 7), eos=(), **params) -> Request:
    made = Request("r", list(prompt), SamplingParams(**params), eos_token_ids=eos)
    made.max_length = 100
    return made


def test_a_new_request_waits_with_its_prompt_only():
    made = request()
    assert (made.status, made.length, made.computed) == (RequestStatus.WAITING, 3, 0)
    assert (made.prompt_token_ids, made.output_token_ids) == ([5, 6, 7], [])


def test_appended_tokens_are_output():
    made = request()
    for token in range(40):
        made.append(token)
    assert made.prompt_token_ids == [5, 6, 7]
    assert made.output_token_ids == list(range(40))
    assert (made.length, made.num_output_tokens, made.token(3)) == (43, 40, 0)


def test_class_follows_state_not_counts():
    made = request(prompt=[5])
    assert made.row_class is RowClass.PREFILL
    made.computed = 1
    made.append(9)
    assert made.row_class is RowClass.DECODE
    # Readmitted, with a single token missing: again a prefill.
    made.computed, made.prefill_end = 1, 2
    assert made.row_class is RowClass.PREFILL


def test_rows_carry_the_token_that_follows():
    made = request()
    tokens, following = made.rows(2)
    assert (tokens.tolist(), following.tolist()) == ([5, 6], [6, 7])
    made.computed = 2
    tokens, following = made.rows(1)
    assert (tokens.tolist(), following.tolist()) == ([7], [0])
    assert tokens.dtype == following.dtype == np.int32


def test_settings_of_plain_params():
    made = request(eos=[2], temperature=0.5, top_k=-1, top_p=0.9, min_p=0.1, stop_token_ids=[4])
    made.seed = 77
    assert made.settings() == (0.5, 0, 0.9, 0.1, 77, 0, ())


def test_settings_ban_the_ending_ids_below_the_minimum_length():
    made = request(eos=[2, 3], min_tokens=4, stop_token_ids=[4, 2])
    assert made.settings()[5:] == (7, (2, 3, 4))
    made = request(eos=[2, 3], min_tokens=4, stop_token_ids=[4], ignore_eos=True)
    assert made.settings()[5:] == (7, (4,))


def test_the_last_token_never_needs_a_row():
    made = request()
    made.max_length = 5
    assert (made.most_rows, made.admission_rows) == (4, 4)
    made.max_length = 4
    assert (made.most_rows, made.admission_rows) == (3, 3)


def test_the_prompt_is_copied():
    prompt = [1, 2]
    made = request(prompt=prompt)
    prompt[0] = 9
    assert made.prompt_token_ids == [1, 2]
