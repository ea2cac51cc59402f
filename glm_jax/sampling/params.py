"""What a user asks of one request; host-only, with vLLM's names and defaults."""

import difflib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

# A stop id must fit the device's int32 and stay below bucketing's pad for stop ids.
_LARGEST_TOKEN_ID = 2**31 - 2


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping of one request.

    Order on the device: minimum length, temperature, then min_p, top_k and top_p.

    Attributes:
        temperature: 0 takes the most likely token.
        top_p: Keep the most likely tokens up to this mass; 1 is off.
        top_k: Keep this many tokens; 0 or -1 is off.
        min_p: Keep tokens at least this fraction as likely as the most likely one; 0 is off.
        seed: Same seed, same tokens, whatever shares the step; None draws one at submit.
        max_tokens: The most tokens to generate; None means up to max_model_len.
        min_tokens: No EOS and no stop id before this many tokens.
        stop: Strings that end the text; a single one may be given bare.
        stop_token_ids: Token ids that end the text, besides the model's EOS.
        include_stop_str_in_output: Keep the stop string in the text.
        ignore_eos: Do not stop at EOS.
        detokenize: Whether text is made at all; off, outputs hold token ids only.
        skip_special_tokens: Leave special tokens out of the text.
    """

    temperature: float | int = 1.0
    top_p: float | int = 1.0
    top_k: int = 0
    min_p: float | int = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __new__(cls, *_: Any, **options: Any) -> "SamplingParams":
        """Refuse unknown names with the list of allowed ones, before __init__ sees them."""
        check_names("sampling parameter", options, cls.__dataclass_fields__)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Turn `stop` and `stop_token_ids` into tuples and check every value."""
        # Callers of vLLM write None for none.
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        self._check_numbers()
        self._check_stops()

    def _check_numbers(self) -> None:
        _check_real("temperature", self.temperature, 0.0, None)
        _check_real("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise ValueError("top_p is 0; allowed: above 0, up to 1. Use temperature=0 for greedy.")
        _check_integer("top_k", self.top_k, -1)
        _check_real("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_integer("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, 1)
        _check_integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}. "
                "Lower min_tokens or raise max_tokens."
            )

    def _check_stops(self) -> None:
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ValueError(
                    f"stop holds {text!r}; allowed: strings that are not empty. Drop the entry."
                )
        if self.stop and not self.detokenize:
            raise ValueError(
                "stop strings need text, but detokenize is False. "
                "Use stop_token_ids or set detokenize=True."
            )
        for token in self.stop_token_ids:
            _check_integer("stop_token_ids entry", token, 0, _LARGEST_TOKEN_ID)


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


def _check_real(name: str, value: Any, low: float, high: float | None) -> None:
    """Raise ValueError unless value is a finite number in [low, high]."""
    ceiling = float("inf") if high is None else high
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not low <= float(value) <= ceiling:
        upper = "" if high is None else f" and <= {high:g}"
        raise ValueError(f"{name} is {value!r}; allowed: a finite number >= {low:g}{upper}.")


def _check_integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Raise ValueError unless value is an integer in [low, high]."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or int(value) < low or (high is not None and int(value) > high):
        upper = "" if high is None else f" and <= {high}"
        raise ValueError(f"{name} is {value!r}; allowed: an integer >= {low}{upper}.")
