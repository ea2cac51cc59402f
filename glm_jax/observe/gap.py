"""The times between a request's tokens, as its user saw them."""

from collections.abc import Sequence
from typing import NamedTuple

from glm_jax.engine.outputs import StepRecord


class Gap(NamedTuple):
    """The time from one step that gave a request tokens to the end of the next one that did.

    Attributes:
        request_id: Whose.
        first: Place in the log of the first step after the earlier tokens.
        last: Place of the step that brought the next ones.
        seconds: From end to end.
        tokens: How many came then, together.
    """

    request_id: str
    first: int
    last: int
    seconds: float
    tokens: int


def gaps_of(records: Sequence[StepRecord]) -> list[Gap]:
    """Return all gaps, in the order in which they end; a first token ends none."""
    before: dict[str, tuple[int, float]] = {}
    gaps = []
    for place, record in enumerate(records):
        end = record.started + record.wall_time
        for name, tokens in record.tokens.items():
            if not tokens:
                continue
            if name in before:
                last_place, last_end = before[name]
                gaps.append(Gap(name, last_place + 1, place, end - last_end, tokens))
            before[name] = place, end
        for name in record.ended:
            # Another request may take the id.
            before.pop(name, None)
    return gaps
