"""Why requests that want prefill rows, or decode, got none in a step."""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

from glm_jax.engine.request import Request

# Ids that are named where many requests wait; the count tells of all.
MOST_NAMES = 16


class Reason(StrEnum):
    """What stood in the way; the value is what logs and metrics show."""

    HELD = "held for a better fit"
    FIT = "the bucket is full"
    STEP_TIME = "max_step_ms"
    CHUNKS = "no chunk left"
    BUDGET = "the step's rows are taken"
    PARTIAL = "too many partial prefills"
    WRITING = "waits for a page being written"
    NO_PAGES = "no free pages"
    OVERTAKEN = "behind one that may not be overtaken"
    NO_SLOTS = "no free slot"
    PREEMPTION = "a step that preempts admits nobody"
    POLICY = "step_policy does not mix"


class Declined(NamedTuple):
    """Requests that got no rows in a step for one reason.

    Attributes:
        reason: Why.
        request_ids: Who, the first few of them.
        count: How many.
    """

    reason: Reason
    request_ids: tuple[str, ...]
    count: int


def declined(reason: Reason, requests: Sequence[Request]) -> Declined:
    """Return the note of some requests, in their order."""
    names = tuple(request.request_id for request in requests[:MOST_NAMES])
    return Declined(reason, names, len(requests))


def by_reason(pairs: Iterable[tuple[Reason, Sequence[Request]]]) -> tuple[Declined, ...]:
    """Return one note per reason, in order of the first; reasons without requests are left out."""
    merged: dict[Reason, list[Request]] = {}
    for reason, requests in pairs:
        if requests:
            merged.setdefault(reason, []).extend(requests)
    return tuple(declined(reason, requests) for reason, requests in merged.items())
