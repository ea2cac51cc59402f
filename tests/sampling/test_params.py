import copy
import dataclasses
import pickle

import pytest

from glm_jax.sampling.params import SamplingParams


def test_defaults_are_vllms():
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.seed, params.max_tokens, params.min_tokens) == (None, 16, 0)
    assert (params.stop, params.stop_token_ids) == ((), ())
    assert (params.include_stop_str_in_output, params.ignore_eos) == (False, False)
    assert (params.detokenize, params.skip_special_tokens) == (True, True)


def test_stop_may_be_one_string_or_a_list():
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=[3]).stop_token_ids == (3,)


def test_params_can_be_hashed_copied_replaced_and_pickled():
    params = SamplingParams(temperature=0, stop=["x"], stop_token_ids=[1])
    assert hash(params) == hash(copy.deepcopy(params))
    assert pickle.loads(pickle.dumps(params)) == params
    assert dataclasses.replace(params, max_tokens=3).max_tokens == 3


def test_an_unknown_name_is_an_error_that_lists_the_allowed_ones():
    with pytest.raises(
        ValueError, match=r"unknown sampling parameter 'temprature'\. Did you mean "
    ):
        SamplingParams(temprature=0)
    with pytest.raises(ValueError, match=r"Allowed: allowed_token_ids, bad_words, .*, top_p\."):
        SamplingParams(nonsense=2, n=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", -0.1),
        ("min_p", 2),
        ("seed", 2**64),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [2**31 - 1]),
        ("stop", [""]),
    ],
)
def test_a_bad_value_is_an_error_that_names_it(name, value):
    with pytest.raises(ValueError, match=rf"{name}.* (is|holds) .*; allowed: ") as raised:
        SamplingParams(**{name: value})
    assert repr(value).strip("[]") in str(raised.value)


def test_the_ends_of_the_ranges_are_allowed():
    SamplingParams(temperature=0, top_p=1, top_k=-1, min_p=1, seed=2**64 - 1, max_tokens=1)
    SamplingParams(seed=-(2**63), max_tokens=None, min_tokens=100)


def test_min_tokens_may_not_exceed_max_tokens():
    with pytest.raises(ValueError, match="min_tokens is 17, above max_tokens 16"):
        SamplingParams(min_tokens=17)


def test_stop_strings_need_text():
    with pytest.raises(ValueError, match="detokenize is False"):
        SamplingParams(stop="a", detokenize=False)
