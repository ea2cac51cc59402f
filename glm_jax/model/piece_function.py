"""What a piece is before it is compiled, and the rank axis that its arrays keep."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax


class Function(NamedTuple):
    """A piece before it is compiled: the function and the arguments that are donated to it."""

    call: Callable[..., Any]
    donated: tuple[int, ...]


def first_rank(tree: Any) -> Any:
    """The one rank's part."""
    return jax.tree.map(lambda array: array[0], tree)


def with_rank(tree: Any) -> Any:
    """The rank axis, of size 1, in front of every array."""
    return jax.tree.map(lambda array: array[None], tree)
