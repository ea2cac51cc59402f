"""The table of sampling parameters: meaning, range, default and error of each; host-only.

`SamplingParams` is checked by it, README.md shows it, and tests compare the three. The names are
vLLM's; SGLang's other spellings are aliases.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from glm_jax.sampling.value_kinds import (
    Biases,
    Flag,
    Integer,
    Kind,
    Number,
    OrNone,
    Texts,
    TokenIds,
    Words,
)


class Parameter(NamedTuple):
    """One row of the table.

    Attributes:
        meaning: What it does.
        kind: What it may hold.
        default: What it is where nothing is given.
        advice: What to do about a value that is refused; may be empty.
    """

    meaning: str
    kind: Kind
    default: Any
    advice: str = ""

    def take(self, name: str, value: Any) -> Any:
        """Return a value as the engine reads it.

        Raises:
            ValueError: It is not allowed.
        """
        try:
            return self.kind.take(name, value)
        except ValueError as error:
            raise ValueError(f"{error} {self.advice}".rstrip()) from None


_COUNT = OrNone(Integer(0))
_LOGPROBS = "The engine option max_logprobs is the most."

PARAMETERS: Mapping[str, Parameter] = {
    "n": Parameter("Outputs of one prompt, each with a seed of its own.", Integer(1), 1),
    "temperature": Parameter("Divides the logits; 0 takes the most likely token.", Number(0), 1.0),
    "top_p": Parameter(
        "Keep the most likely tokens up to this mass; 1 is off.",
        Number(0, 1, above=True),
        1.0,
        "Use temperature=0 for greedy.",
    ),
    "top_k": Parameter("Keep this many tokens; 0 or -1 is off.", Integer(-1), 0),
    "min_p": Parameter(
        "Keep tokens at least this fraction as likely as the most likely one; 0 is off.",
        Number(0, 1),
        0.0,
    ),
    "seed": Parameter(
        "Same seed, same tokens, whatever shares the step; None draws one at submit.",
        OrNone(Integer(-(2**63), 2**64 - 1)),
        None,
    ),
    "presence_penalty": Parameter(
        "Subtracted from the logits of tokens that the output has; 0 is off.", Number(-2, 2), 0.0
    ),
    "frequency_penalty": Parameter(
        "Subtracted from a token's logit each time that the output has it; 0 is off.",
        Number(-2, 2),
        0.0,
    ),
    "repetition_penalty": Parameter(
        "Divides positive logits, and multiplies others, of tokens in prompt or output; 1 is off.",
        Number(0, above=True),
        1.0,
    ),
    "logit_bias": Parameter(
        "Added to the logits of these tokens; not clamped.", Biases(), (), "Give {id: number}."
    ),
    "allowed_token_ids": Parameter(
        "Only these tokens may be drawn; None is all.",
        OrNone(TokenIds(fewest=1)),
        None,
        "Leave it out to allow all.",
    ),
    "bad_words": Parameter(
        "Words that may not be completed by output tokens; a string stands for its tokens at the "
        "start of a text and behind a space.",
        Words(),
        (),
    ),
    "max_tokens": Parameter(
        "The most tokens to generate; None is up to max_model_len.", OrNone(Integer(1)), 16
    ),
    "min_tokens": Parameter("No EOS and no stop id before this many tokens.", Integer(0), 0),
    "stop": Parameter("Strings that end the text.", Texts(), ()),
    "stop_token_ids": Parameter(
        "Token ids that end the text, besides the model's EOS.", TokenIds(), ()
    ),
    "include_stop_str_in_output": Parameter("Keep the stop string in the text.", Flag(), False),
    "ignore_eos": Parameter("Do not stop at EOS.", Flag(), False),
    "thinking_token_budget": Parameter(
        "The most tokens between <think> and </think>, which is then forced; None is no limit.",
        _COUNT,
        None,
    ),
    "logprobs": Parameter(
        "Log-probabilities of each output token and of so many most likely ones, before all "
        "processing; None is none.",
        _COUNT,
        None,
        _LOGPROBS,
    ),
    "prompt_logprobs": Parameter(
        "The same for each prompt token but the first.", _COUNT, None, _LOGPROBS
    ),
    "logprob_token_ids": Parameter(
        "Log-probabilities of these tokens too, at every output token: scores of labels.",
        OrNone(TokenIds(fewest=1)),
        None,
        _LOGPROBS,
    ),
    "detokenize": Parameter("Make text; off, outputs hold token ids only.", Flag(), True),
    "skip_special_tokens": Parameter("Leave special tokens out of the text.", Flag(), True),
}

# SGLang's spellings.
ALIASES: Mapping[str, str] = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}

_BEAMS = "Beam search is not supported. Use n with a temperature above 0, and compare by logprobs."
_FORMS = (
    "Structured output is not supported. Describe the form in the prompt, or choose among labels "
    "with allowed_token_ids or logprob_token_ids."
)
_HOOKS = "Code on logits is not supported. Use logit_bias, allowed_token_ids or bad_words."
_OTHER_CUTS = "Use top_p, top_k or min_p."
_STREAMS = "LLM.stream yields every step's new tokens, LLM.generate whole results."

# Names that other engines know, and what to do instead.
UNSUPPORTED: Mapping[str, str] = {
    "best_of": "Use n, and choose among the outputs by their logprobs.",
    **dict.fromkeys(
        ("use_beam_search", "beam_width", "num_beams", "length_penalty", "early_stopping"), _BEAMS
    ),
    **dict.fromkeys(
        (
            *("json_schema", "regex", "ebnf", "structural_tag", "json", "json_object", "choice"),
            *("grammar", "response_format", "structured_outputs", "guided_decoding"),
            *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
            *("guided_json_object", "guided_decoding_backend", "guided_whitespace_pattern"),
        ),
        _FORMS,
    ),
    **dict.fromkeys(
        ("logits_processors", "custom_logit_processor", "custom_params", "extra_args"), _HOOKS
    ),
    **dict.fromkeys(("typical_p", "top_a", "tfs", "epsilon_cutoff", "eta_cutoff"), _OTHER_CUTS),
    **dict.fromkeys(("output_kind", "stream_interval"), _STREAMS),
    "lora_request": "LoRA is not supported. Merge the adapter into the checkpoint.",
    "lora_path": "LoRA is not supported. Merge the adapter into the checkpoint.",
    "stop_regex": "Use stop, with the strings themselves.",
    "spaces_between_special_tokens": "Text is the bytes of its tokens; nothing adds spaces.",
    "truncate_prompt_tokens": "Cut the prompt's token ids before you send it.",
    "prompt_logprob_start": "All positions are given by prompt_logprobs; leave the first ones out.",
    "skip_reading_prefix_cache": "Leave it out: prompt_logprobs skips the cache by itself.",
    "repetition_detection": "Use repetition_penalty or frequency_penalty.",
    "no_repeat_ngram_size": "Use repetition_penalty or frequency_penalty.",
    "do_sample": "Use temperature=0 for greedy, above 0 to draw.",
    "num_return_sequences": "Use n.",
}


def canonical(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return sampling options under their own names.

    Raises:
        ValueError: A name is unknown or unsupported, or an alias comes beside its parameter.
    """
    for name in options:
        if name in UNSUPPORTED:
            raise ValueError(f"sampling parameter {name!r} is not supported. {UNSUPPORTED[name]}")
    check_names("sampling parameter", options, (*PARAMETERS, *ALIASES))
    named: dict[str, Any] = {}
    for given, value in options.items():
        name = ALIASES.get(given, given)
        if name in named:
            raise ValueError(
                f"{name} is given twice: {given!r} is "
                f"{'its SGLang spelling' if given in ALIASES else 'beside its SGLang spelling'}. "
                "Pass one."
            )
        named[name] = value
    return named


def check_names(what: str, options: Iterable[str], allowed: Iterable[str]) -> None:
    """Raise ValueError naming unknown options, the closest known one, and all that are allowed."""
    names = sorted(allowed)
    unknown = [name for name in options if name not in names]
    if not unknown:
        return
    close = difflib.get_close_matches(unknown[0], names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(
        f"unknown {what}{'s' if len(unknown) > 1 else ''} "
        f"{', '.join(repr(name) for name in unknown)}.{hint} Allowed: {', '.join(names)}."
    )


def table_rows() -> list[str]:
    """Return the table in Markdown, as README.md has it."""
    names = ("Name", "Meaning", "Allowed", "Default", "Error adds")
    lines = [f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}"]
    for name, row in PARAMETERS.items():
        default = "none" if row.default == () else repr(row.default)
        cells = (f"`{name}`", row.meaning, row.kind.allowed, default, row.advice or "-")
        lines.append(f"| {' | '.join(cells)} |")
    return lines
