"""Changes of control lines, packed into the arrays of the controls program; host-only."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from typing import Any, NamedTuple

import numpy as np

from glm_jax.sampling.control_update import (
    NO_TOKEN,
    ROW_BANS,
    UPDATE_LINES,
    UPDATE_TOKENS,
    ControlUpdate,
    empty_update,
)


class RowControl(NamedTuple):
    """What holds at one verify row besides the line.

    Attributes:
        bans: Tokens that are forbidden.
        force: The only token that is allowed; NO_TOKEN where it is free.
    """

    bans: tuple[int, ...] = ()
    force: int = NO_TOKEN


_OFF = (0.0, 0.0, 1.0)


class ControlChanges:
    """What the lines must be told before one step."""

    def __init__(self, slots: int, num_drafts: int) -> None:
        """Start with nothing.

        Args:
            slots: Lines of the device, the pad slot's included.
            num_drafts: k.
        """
        self._slots = slots
        self._num_drafts = num_drafts
        # Each tuple has one value per array of its kind in `ControlUpdate`.
        self._lines: list[tuple[Any, ...]] = []
        self._counts: list[tuple[Any, ...]] = []
        self._biases: list[tuple[Any, ...]] = []
        self._rows: list[tuple[Any, ...]] = []

    def clear(self, slot: int) -> None:
        """Let a line say nothing."""
        self._lines.append((slot, False, 0.0, _OFF))

    def start(
        self,
        slot: int,
        fill: float,
        biases: Mapping[int, float],
        penalties: tuple[float, float, float] | None,
    ) -> None:
        """Begin a line, without counts; its rows must follow.

        Args:
            slot: Whose line.
            fill: The bias of tokens that ``biases`` does not name.
            biases: Of single tokens.
            penalties: Presence, frequency, repetition; None is off.
        """
        self._lines.append((slot, True, fill, penalties or _OFF))
        self._biases += ((slot, token, bias) for token, bias in biases.items())

    def count(self, slot: int, tokens: Iterable[int], more: int = 1) -> None:
        """Add to the count of each token; one that comes twice is added twice."""
        self._counts += ((slot, token, more) for token in tokens)

    def set_rows(self, slot: int, rows: Sequence[RowControl]) -> None:
        """Replace the rows of a line; those that are not given are free."""
        bans = np.full((self._num_drafts + 1, ROW_BANS), NO_TOKEN, np.int32)
        force = np.full(self._num_drafts + 1, NO_TOKEN, np.int32)
        for number, row in enumerate(rows):
            bans[number, : len(row.bans)] = row.bans
            force[number] = row.force
        self._rows.append((slot, bans, force))

    def packed(self) -> Iterator[ControlUpdate]:
        """Yield the arrays of each call that it takes; nothing changed is no call."""
        lines = _parts(self._lines, UPDATE_LINES)
        # A line that starts forgets its counts: they come with the last lines or after them.
        wait: list[list[tuple[Any, ...]]] = [[] for _ in lines[1:]]
        counts = [*wait, *_parts(self._counts, UPDATE_TOKENS)]
        biases = [*wait, *_parts(self._biases, UPDATE_TOKENS)]
        rows = _parts(self._rows, UPDATE_LINES)
        for call in zip_longest(lines, counts, biases, rows, fillvalue=()):
            update = empty_update(self._slots, self._num_drafts)
            arrays = iter(update)
            for part, kind in zip(call, _ARRAYS, strict=True):
                for array, values in zip(
                    list(islice(arrays, kind)), zip(*part, strict=True), strict=False
                ):
                    array[0, : len(part)] = values
            yield update


# Arrays of `ControlUpdate` for lines, counts, biases, rows.
_ARRAYS = (4, 3, 3, 3)


def _parts(items: list[tuple[Any, ...]], size: int) -> list[list[tuple[Any, ...]]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
