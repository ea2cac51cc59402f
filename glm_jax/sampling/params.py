"""What a user asks of one request; host-only, with vLLM's names and defaults."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

from glm_jax.sampling.parameter_table import PARAMETERS, canonical, check_names

__all__ = ["SamplingParams", "check_names"]

_Class = TypeVar("_Class")


def _taking_aliases(cls: type[_Class]) -> type[_Class]:
    """Let a dataclass be made under other engines' names; checkers still see its own."""
    plain: Any = cls.__init__

    @wraps(plain)
    def init(self: Any, **options: Any) -> None:
        plain(self, **canonical(options))

    cls.__init__ = init  # pyrefly: ignore
    return cls


@_taking_aliases
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping of one request.

    `parameter_table.PARAMETERS` says what each attribute means and may hold, and README.md of this
    folder shows it. Sequences are kept as tuples, `logit_bias` as pairs of id and number.

    Order on the device, as in vLLM: allowed ids and bad words, bias, minimum length, penalties,
    then temperature, min_p, top_k and top_p. A thinking budget that is used up overrides all.
    """

    n: int = 1
    temperature: float | int = 1.0
    top_p: float | int = 1.0
    top_k: int = 0
    min_p: float | int = 0.0
    seed: int | None = None
    presence_penalty: float | int = 0.0
    frequency_penalty: float | int = 0.0
    repetition_penalty: float | int = 1.0
    logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] = ()
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str | Sequence[int]] = ()
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    thinking_token_budget: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        """Check every value by the table, then what two of them say together."""
        for name, parameter in PARAMETERS.items():
            object.__setattr__(self, name, parameter.take(name, getattr(self, name)))
        if self.n > 1 and self.temperature == 0:
            raise ValueError(
                f"n is {self.n} at temperature 0, where all outputs would be the same; allowed: 1. "
                "Raise the temperature or leave n out."
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}. "
                "Lower min_tokens or raise max_tokens."
            )
        if self.stop and not self.detokenize:
            raise ValueError(
                "stop strings need text, but detokenize is False. "
                "Use stop_token_ids or set detokenize=True."
            )
