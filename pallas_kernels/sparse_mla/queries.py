"""The two parts of a head's query."""

from typing import NamedTuple

from jaxtyping import Array, Float


class Queries(NamedTuple):
    """Queries of rows, before the key up-projection is absorbed."""

    nope: Float[Array, "N H A"]
    rope: Float[Array, "N H B"]  # rotated, float32
