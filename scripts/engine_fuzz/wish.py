"""What a user may ask for, drawn feature by feature; every feature is one line of `FEATURES`."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

from glm_jax import SamplingParams


@dataclass(frozen=True)
class Wish:
    """One call of `Engine.add_request`, as JSON can hold it.

    Attributes:
        prompt: Token ids.
        params: Sampling parameters by name; `logit_bias` as pairs.
        extra: What else is passed by name: priority, timeout in steps, cache_salt, keep_logits.
    """

    prompt: Sequence[int]
    params: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sampling(self) -> SamplingParams:
        """The parameters."""
        params = dict(self.params)
        if "logit_bias" in params:
            params["logit_bias"] = dict(params["logit_bias"])
        return SamplingParams(**params)

    @property
    def features(self) -> list[str]:
        """Names of all that it asks for."""
        return sorted({*self.params, *self.extra})

    def with_params(self, **params: Any) -> "Wish":
        """Return it with other parameters."""
        return dataclasses.replace(self, params={**self.params, **params})


class Known(NamedTuple):
    """What a request gets before features are added; they are drawn from it, so that they bite.

    Attributes:
        vocab: Token ids are below it.
        think: The ids of <think> and </think>.
        prompt: Its prompt.
        output: Its tokens.
        text: Their text.
        max_tokens: The most it may get.
    """

    vocab: int
    think: tuple[int, int]
    prompt: Sequence[int]
    output: Sequence[int]
    text: str
    max_tokens: int

    def token(self, rng: Random) -> int:
        """Draw a token that it has or may have."""
        return rng.choice([*self.output, *self.prompt[-3:], rng.randrange(self.vocab)])


Draw = Callable[[Random, Known], Mapping[str, Any]]


def _penalties(rng: Random, known: Known) -> Mapping[str, Any]:
    names = rng.sample(["presence_penalty", "frequency_penalty", "repetition_penalty"], 2)
    values = {"presence_penalty": [-0.5, 0.3, 1.5], "frequency_penalty": [-0.4, 0.2, 2.0]}
    return {name: rng.choice(values.get(name, [0.7, 1.1, 1.8])) for name in names}


def _bias(rng: Random, known: Known) -> Mapping[str, Any]:
    ids = dict.fromkeys(known.token(rng) for _ in range(rng.randint(1, 6)))
    return {"logit_bias": [[id_, rng.choice([-100.0, -1.5, 0.5, 2.0])] for id_ in ids]}


def _allowed(rng: Random, known: Known) -> Mapping[str, Any]:
    own = [token for token in known.output if rng.random() < 0.6]
    return {"allowed_token_ids": sorted({*own, *rng.sample(range(known.vocab), 8)})}


def _bad_words(rng: Random, known: Known) -> Mapping[str, Any]:
    words = []
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(known.output))
        words.append(list(known.output[start : start + rng.randint(1, 3)]))
    return {"bad_words": words}


def _stop_strings(rng: Random, known: Known) -> Mapping[str, Any]:
    stops = ["zzzz"]
    if known.text:
        start = rng.randrange(len(known.text))
        stop = known.text[start : start + rng.randint(1, 4)]
        # Bytes that are no text may still become some: they are no user's stop string.
        stops += [stop] if "\ufffd" not in stop else []
    return {"stop": stops, "include_stop_str_in_output": rng.random() < 0.3}


def _stop_ids(rng: Random, known: Known) -> Mapping[str, Any]:
    return {"stop_token_ids": sorted({known.token(rng) for _ in range(rng.choice([1, 2, 9]))})}


def _choices(**values: Sequence[Any]) -> Draw:
    """Return a feature whose parameters each take one of some values."""

    def draw(rng: Random, known: Known) -> Mapping[str, Any]:
        return {name: rng.choice(of) for name, of in values.items()}

    return draw


class Feature(NamedTuple):
    """Something that a request may ask for.

    Attributes:
        name: What it is.
        chance: How often it is asked for.
        draw: Gives parameters, or arguments of `Engine.add_request` (`EXTRA`).
    """

    name: str
    chance: float
    draw: Draw


EXTRA = frozenset({"priority", "timeout", "cache_salt", "keep_logits"})
# Before the tokens alone are known: what gives a request its length and its draws.
BASIC = (
    Feature("sampling", 0.5, _choices(temperature=(0.3, 0.8, 1.5))),
    Feature("top_k", 0.2, _choices(top_k=(-1, 1, 5, 50))),
    Feature("top_p", 0.2, _choices(top_p=(0.5, 0.95))),
    Feature("min_p", 0.15, _choices(min_p=(0.05, 0.3))),
    Feature("ignore_eos", 0.2, _choices(ignore_eos=(True,))),
)
FEATURES = (
    Feature("penalties", 0.2, _penalties),
    Feature("logit_bias", 0.15, _bias),
    Feature("allowed_token_ids", 0.08, _allowed),
    Feature("bad_words", 0.15, _bad_words),
    Feature("min_tokens", 0.2, lambda rng, known: {"min_tokens": rng.randint(1, known.max_tokens)}),
    Feature("stop strings", 0.2, _stop_strings),
    Feature("stop ids", 0.2, _stop_ids),
    Feature("thinking budget", 0.12, _choices(thinking_token_budget=(0, 1, 3, 6))),
    Feature("special tokens", 0.1, _choices(skip_special_tokens=(False,))),
    Feature("logprobs", 0.2, _choices(logprobs=(0, 1, 5))),
    Feature("prompt_logprobs", 0.1, _choices(prompt_logprobs=(0, 2))),
    Feature(
        "logprob_token_ids",
        0.08,
        lambda rng, known: {"logprob_token_ids": sorted({known.token(rng) for _ in range(3)})},
    ),
    Feature("n", 0.1, _choices(n=(2, 3))),
    Feature("no seed", 0.05, _choices(seed=(None,))),
    Feature("no text", 0.05, _choices(detokenize=(False,))),
    Feature("priority", 0.3, _choices(priority=(-1, 1, 7))),
    Feature("timeout", 0.06, _choices(timeout=(0.5, 3.5, 9.5))),
    Feature("cache_salt", 0.1, _choices(cache_salt=("a", "b"))),
    Feature("keep_logits", 0.05, _choices(keep_logits=(True,))),
)


def draw_basic(rng: Random, stems: Sequence[Sequence[int]], think: int, *, page: int) -> Wish:
    """Draw a prompt and how it is sampled.

    Args:
        rng: Decides.
        stems: Prompts begin with the beginning of one, cut near page ends mostly.
        think: The token that begins a thinking part; some prompts end with one.
        page: Tokens per page.
    """
    stem = rng.choice(stems)
    pages = page * rng.randint(1, len(stem) // page)
    cut = rng.choice([0, rng.randint(0, len(stem)), pages, pages])
    cut = max(0, min(len(stem), cut + rng.choice([0, 0, -1, 1])))
    vocab = think + 2
    tail = rng.choices(range(vocab - 2), k=rng.choice([0, 1, 2, rng.randint(0, 2 * page)]))
    prompt = [*stem[:cut], *tail]
    if rng.random() < 0.15:
        prompt = [*prompt, think, *prompt[: rng.randint(0, 2)]]
    max_tokens = rng.choice([1, rng.randint(2, 8), rng.randint(6, 28)])
    params: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.0}
    params["seed"] = rng.randrange(2**64)
    nothing = Known(vocab, (think, think + 1), prompt, (), "", max_tokens)
    for feature in BASIC:
        if rng.random() < feature.chance:
            params |= feature.draw(rng, nothing)
    return Wish(prompt or [rng.randrange(vocab - 2)], params)


def add_features(rng: Random, basic: Wish, known: Known) -> Wish:
    """Draw what else a request asks for; some ask for nothing."""
    drawn: dict[str, Any] = {}
    if rng.random() < 0.85:
        for feature in FEATURES:
            if rng.random() < feature.chance:
                drawn |= feature.draw(rng, known)
    if drawn.get("n", 1) > 1 and basic.params["temperature"] == 0:
        drawn["temperature"] = 0.9
    if "stop" in drawn:
        drawn.pop("detokenize", None)
    extra = {name: value for name, value in drawn.items() if name in EXTRA}
    params = {name: value for name, value in drawn.items() if name not in EXTRA}
    return Wish(basic.prompt, {**basic.params, **params}, extra)
