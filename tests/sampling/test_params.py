import copy
import dataclasses
import pickle
from pathlib import Path

import pytest

import glm_jax.sampling
from glm_jax.sampling.parameter_table import ALIASES, PARAMETERS, UNSUPPORTED, table_rows
from glm_jax.sampling.params import SamplingParams

README = Path(glm_jax.sampling.__file__).parent / "README.md"
# What each parameter takes, refuses, and what the refusal says is allowed.
EXAMPLES = {
    "n": (1, [0, 1.5, True], "an integer >= 1"),
    "temperature": (0, [-0.1, float("nan"), float("inf"), True], "a finite number >= 0"),
    "top_p": (0.5, [0, 1.1], "a finite number > 0 and <= 1"),
    "top_k": (-1, [-2, 2.0], "an integer >= -1"),
    "min_p": (1, [-0.1, 2], "a finite number >= 0 and <= 1"),
    "seed": (-(2**63), [2**64, 0.5], "None or an integer >= "),
    "presence_penalty": (-2, [-2.1, 2.1, "1"], "a finite number >= -2 and <= 2"),
    "frequency_penalty": (2, [-2.1, float("nan")], "a finite number >= -2 and <= 2"),
    "repetition_penalty": (3.5, [0, -1, float("inf")], "a finite number > 0"),
    "logit_bias": (
        {3: -200, 4: 1.5},
        [[3], {-1: 0.0}, {3: float("nan")}, {"3": 1.0}, {3: "x"}, 7],
        "(a mapping from token ids|an integer >= 0|a finite number)",
    ),
    "allowed_token_ids": ([5, 6], [[], [-1], 5, "5"], "(None or at least one|an integer)"),
    "bad_words": (["ab", [1, 2]], [[""], [" "], [[]], [[-1]], 5], "(strings, or|an integer)"),
    "max_tokens": (None, [0, 1.5], "None or an integer >= 1"),
    "min_tokens": (16, [-1, None], "an integer >= 0"),
    "stop": ("ab", [[""], [3], 3], "strings that are not empty"),
    "stop_token_ids": ([3], [[-1], [2**31 - 1], ["a"], 3], "(token ids|an integer) >= 0"),
    "include_stop_str_in_output": (True, [1, None], "True or False"),
    "ignore_eos": (True, [0, "yes"], "True or False"),
    "thinking_token_budget": (0, [-1, 1.5], "None or an integer >= 0"),
    "logprobs": (0, [-1, True], "None or an integer >= 0"),
    "prompt_logprobs": (None, [-1, 2.5], "None or an integer >= 0"),
    "logprob_token_ids": ([7], [[], [-1], 7], "(None or at least one token id|an integer)"),
    "detokenize": (False, [None], "True or False"),
    "skip_special_tokens": (False, ["no"], "True or False"),
}


def untyped(**options):
    """Parameters as a caller without type checks makes them."""
    plain = object.__new__(SamplingParams)
    defaults = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    plain.__dict__.update(defaults | options)
    plain.__post_init__()
    return plain


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
    params = SamplingParams(temperature=0, stop=["x"], stop_token_ids=[1], logit_bias={2: 3})
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
    ("name", "value"), [(name, bad) for name, (_, bads, _) in EXAMPLES.items() for bad in bads]
)
def test_a_bad_value_is_an_error_that_names_it_and_what_is_allowed(name, value):
    with pytest.raises(ValueError, match=rf"^{name}.* (is|holds) .*; allowed: {EXAMPLES[name][2]}"):
        untyped(**{name: value})


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_good_value_is_taken(name):
    value = EXAMPLES[name][0]
    SamplingParams(**{name: value})


def test_every_parameter_has_a_row_in_the_table_with_its_default():
    fields = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    assert list(PARAMETERS) == list(fields) == list(EXAMPLES)
    for name, row in PARAMETERS.items():
        assert (row.default, type(row.default)) == (fields[name], type(fields[name]))
        assert getattr(SamplingParams(), name) == row.default
        assert row.meaning[0].isupper()
        assert row.meaning.endswith(".")


def test_the_readme_shows_the_table_and_the_other_names():
    text = README.read_text()
    assert "\n".join(table_rows()) in text
    for name, other in ALIASES.items():
        assert f"| `{name}` | `{other}` |" in text
    for name in UNSUPPORTED:
        assert f"`{name}`" in text


@pytest.mark.parametrize("alias", ALIASES)
def test_an_sglang_spelling_means_the_same(alias):
    name = ALIASES[alias]
    value = EXAMPLES[name][0]
    assert SamplingParams(**{alias: value}) == SamplingParams(**{name: value})


def test_an_alias_beside_its_parameter_is_refused():
    with pytest.raises(ValueError, match=r"max_tokens is given twice: 'max_new_tokens'"):
        SamplingParams(max_tokens=3, max_new_tokens=3)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_others_know_is_refused_by_name_with_what_to_do(name):
    with pytest.raises(ValueError, match=rf"'{name}' is not supported\. [A-Z]") as raised:
        SamplingParams(**{name: None})
    assert str(raised.value).endswith(".")
    assert name not in {*PARAMETERS, *ALIASES}


def test_several_greedy_outputs_are_refused():
    with pytest.raises(ValueError, match=r"n is 2 at temperature 0.*Raise the temperature"):
        SamplingParams(n=2, temperature=0)


def test_sequences_and_mappings_become_tuples():
    params = SamplingParams(
        logit_bias={5: 1, 2: -0.5}, allowed_token_ids=[4, 4, 3], bad_words=["a", [1, 2]]
    )
    assert params.logit_bias == ((2, -0.5), (5, 1.0))
    assert params.allowed_token_ids == (4, 3)
    assert params.bad_words == ("a", (1, 2))
    assert SamplingParams(logit_bias={}, bad_words="ab").bad_words == ("ab",)


def test_min_tokens_may_not_exceed_max_tokens():
    with pytest.raises(ValueError, match="min_tokens is 17, above max_tokens 16"):
        SamplingParams(min_tokens=17)


def test_stop_strings_need_text():
    with pytest.raises(ValueError, match="detokenize is False"):
        SamplingParams(stop="a", detokenize=False)
