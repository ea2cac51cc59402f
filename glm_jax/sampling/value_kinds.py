"""What a sampling parameter may hold: a check for each kind of value; host-only.

A kind takes what the user gave and returns it in the one form that the engine reads, or raises
ValueError with the name, the value and what is allowed.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Protocol, runtime_checkable

# A token id must fit the device's int32 and stay below bucketing's pad for stop ids.
LARGEST_TOKEN_ID = 2**31 - 2


@runtime_checkable
class Kind(Protocol):
    """A check of one value.

    Attributes:
        allowed: What the value may be, in words.
    """

    @property
    def allowed(self) -> str:
        """What the value may be, in words."""
        ...

    def take(self, name: str, value: Any) -> Any:
        """Return the value as the engine reads it.

        Raises:
            ValueError: It is not allowed.
        """
        ...


@dataclass(frozen=True)
class Flag:
    """True or False."""

    allowed: str = "True or False"

    def take(self, name: str, value: Any) -> bool:
        """Return the value; 0 and 1 are no flags."""
        if not isinstance(value, bool):
            raise _refused(name, value, self.allowed)
        return value


@dataclass(frozen=True)
class Number:
    """A finite number in a range.

    Attributes:
        low: The smallest, or what it must be above.
        high: The largest; None is no limit.
        above: Whether `low` itself is refused.
    """

    low: float | int
    high: float | int | None = None
    above: bool = False

    @property
    def allowed(self) -> str:
        """What the value may be, in words."""
        if self.low == -math.inf:
            return "a finite number"
        upper = "" if self.high is None else f" and <= {self.high:g}"
        return f"a finite number {'>' if self.above else '>='} {self.low:g}{upper}"

    def take(self, name: str, value: Any) -> Any:
        """Return the number as it came."""
        number = isinstance(value, Real) and not isinstance(value, bool)
        if not number or not math.isfinite(value):
            raise _refused(name, value, self.allowed)
        low = float(value) <= self.low if self.above else float(value) < self.low
        if low or (self.high is not None and float(value) > self.high):
            raise _refused(name, value, self.allowed)
        return value


@dataclass(frozen=True)
class Integer:
    """An integer in a range.

    Attributes:
        low: The smallest.
        high: The largest; None is no limit.
    """

    low: int
    high: int | None = None

    @property
    def allowed(self) -> str:
        """What the value may be, in words."""
        return f"an integer >= {self.low}" + ("" if self.high is None else f" and <= {self.high}")

    def take(self, name: str, value: Any) -> int:
        """Return the integer, as Python's own."""
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise _refused(name, value, self.allowed)
        number = int(value)
        if number < self.low or (self.high is not None and number > self.high):
            raise _refused(name, value, self.allowed)
        return number


@dataclass(frozen=True)
class OrNone:
    """A value of another kind, or None.

    Attributes:
        kind: The other kind.
    """

    kind: Kind

    @property
    def allowed(self) -> str:
        """What the value may be, in words."""
        return f"None or {self.kind.allowed}"

    def take(self, name: str, value: Any) -> Any:
        """Return None, or what the other kind makes of it."""
        if value is None:
            return None
        try:
            return self.kind.take(name, value)
        except ValueError as error:
            text = str(error)
            # Not where an entry of the value is at fault.
            if text.startswith(f"{name} is "):
                text = text.replace("; allowed: ", "; allowed: None or ", 1)
            raise ValueError(text) from None


@dataclass(frozen=True)
class Texts:
    """Strings that are not empty; a single one may come bare, None is none."""

    allowed: str = "strings that are not empty; a single one may be given bare"

    def take(self, name: str, value: Any) -> tuple[str, ...]:
        """Return the strings as a tuple."""
        texts = _several(name, (value,) if isinstance(value, str) else value, self.allowed)
        for text in texts:
            if not isinstance(text, str) or not text:
                raise ValueError(f"{name} holds {text!r}; allowed: {self.allowed}. Drop the entry.")
        return texts


@dataclass(frozen=True)
class TokenIds:
    """Token ids; None is none.

    Attributes:
        fewest: 1 refuses an empty sequence.
    """

    fewest: int = 0

    @property
    def allowed(self) -> str:
        """What the value may be, in words."""
        return f"{'at least one token id' if self.fewest else 'token ids'} >= 0"

    def take(self, name: str, value: Any) -> tuple[int, ...]:
        """Return the ids as a tuple, each once, in their order."""
        ids = _several(name, value, self.allowed)
        if len(ids) < self.fewest:
            raise _refused(name, value, self.allowed)
        return tuple(dict.fromkeys(_token_id(name, token) for token in ids))


@dataclass(frozen=True)
class Biases:
    """A number per token id: a mapping, or pairs; None or an empty one is none."""

    allowed: str = "a mapping from token ids >= 0 to finite numbers"

    def take(self, name: str, value: Any) -> tuple[tuple[int, float], ...]:
        """Return (id, number) pairs in the order of the ids."""
        pairs = value.items() if isinstance(value, Mapping) else value
        biases = {}
        for pair in _several(name, pairs, self.allowed):
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise _refused(name, value, self.allowed)
            token, bias = pair
            biases[_token_id(name, token)] = float(_FINITE.take(f"{name}[{token}]", bias))
        return tuple(sorted(biases.items()))


@dataclass(frozen=True)
class Words:
    """Words, each a string or the token ids of one; a single string may come bare."""

    allowed: str = "strings, or sequences of token ids, that are not empty"

    def take(self, name: str, value: Any) -> tuple[str | tuple[int, ...], ...]:
        """Return each word as a string or as a tuple of ids."""
        words = _several(name, (value,) if isinstance(value, str) else value, self.allowed)
        taken: list[str | tuple[int, ...]] = []
        for word in words:
            if isinstance(word, str):
                blank = not word.strip()
                taken.append(word)
            else:
                ids = _several(name, word, self.allowed)
                blank = not ids
                taken.append(tuple(_token_id(name, token) for token in ids))
            if blank:
                raise ValueError(f"{name} holds {word!r}; allowed: {self.allowed}. Drop the entry.")
        return tuple(taken)


_FINITE = Number(-math.inf)


def _several(name: str, value: Any, allowed: str) -> tuple[Any, ...]:
    """Return the entries of a sequence; callers of vLLM write None for none."""
    if value is None:
        return ()
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise _refused(name, value, allowed)
    return tuple(value)


def _token_id(name: str, token: Any) -> int:
    return Integer(0, LARGEST_TOKEN_ID).take(f"{name} entry", token)


def _refused(name: str, value: Any, allowed: str) -> ValueError:
    return ValueError(f"{name} is {value!r}; allowed: {allowed}.")
