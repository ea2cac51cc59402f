"""The keys of compiled programs as JSON and as file names; host-only."""

from collections.abc import Sequence
from typing import Any

from bucketing.cell import Cell
from bucketing.loop_inputs import LoopKey
from bucketing.piecewise import Piece

ProgramKey = Cell | Piece | LoopKey

_TYPES: dict[str, type[Cell] | type[Piece] | type[LoopKey]] = {
    "Cell": Cell,
    "Piece": Piece,
    "LoopKey": LoopKey,
}


def encode_key(key: ProgramKey) -> list[Any]:
    """A key as JSON: the name of its type, then its fields."""
    return [type(key).__name__, *key]


def decode_key(content: Sequence[Any]) -> ProgramKey:
    """Read what ``encode_key`` wrote.

    Raises:
        ValueError: the content is no key.
    """
    kind = _TYPES.get(str(content[0])) if content else None
    if kind is None or len(content) != 1 + len(kind._fields):
        raise ValueError(
            f"{content!r} is no program key; it must be one of {', '.join(_TYPES)} followed by its "
            "fields."
        )
    return kind(*content[1:])


def key_name(key: ProgramKey) -> str:
    """A key as the stem of a file name, for example ``Cell-64-8-1``."""
    name = "-".join(map(str, encode_key(key)))
    # A kind of piece is an identifier; anything else must not become part of a path.
    assert all(part.isidentifier() or part.isdecimal() for part in name.split("-")), f"{name=}"
    return name
