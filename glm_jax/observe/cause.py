"""What can make tokens late, and what to do about it."""

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple


class Cause(StrEnum):
    """A reason for time beyond a usual decode step; the value is how it is called."""

    PREFILL = "prefill rows"
    PADDING = "padding"
    COMPILE = "compile"
    PIECEWISE = "piecewise fallback"
    PREEMPTION = "preemption"
    PAGE_WAIT = "page wait"
    QUEUE = "queue"
    HOST = "host stall"
    DRAFTS = "draft rejection"
    EXPERTS = "expert imbalance"
    FAULT = "fault"
    UNKNOWN = "unknown"


ADVICE = {
    Cause.PREFILL: (
        "fewer prefill rows a step: lower max_step_ms or max_num_batched_tokens, or set "
        "long_prefill_token_threshold; under another step_policy than 'mixed' nobody gets tokens "
        "from the steps of prompts"
    ),
    Cause.PADDING: (
        "a cell closer to what is asked for: `glm-jax grid plan` on a trace, or more "
        "prefill_buckets and group_buckets"
    ),
    Cause.COMPILE: (
        "compile before traffic: grid_warm 'all', or `glm-jax grid warm` once for this machine"
    ),
    Cause.PIECEWISE: (
        "let the cell's program be compiled before traffic: grid_warm 'all', or add the cell to "
        "the grid"
    ),
    Cause.PREEMPTION: "more pages or fewer requests: raise num_pages or watermark, or lower "
    "max_num_seqs",
    Cause.PAGE_WAIT: "raise num_pages, or send prompts that begin alike a step apart",
    Cause.QUEUE: "raise max_num_seqs or max_num_batched_tokens, or bound the queue with "
    "max_queued_requests",
    Cause.HOST: "look at what else runs on the host's cores; decode_loop_steps leaves it out of "
    "most steps",
    Cause.DRAFTS: "num_speculative_tokens 'auto' makes fewer drafts where they are refused",
    Cause.EXPERTS: "one expert had most rows; more rows a step even it out, or another spread of "
    "experts over devices",
    Cause.FAULT: "a step failed and was done again; its message is in the log",
    Cause.UNKNOWN: "nothing in the log tells; look at the load of the machine, or take a profile",
}


class Share(NamedTuple):
    """A part of the time that a gap was too long.

    Attributes:
        cause: Why.
        seconds: How much; below zero only where something was faster than usual (UNKNOWN).
        evidence: What in the log says so.
    """

    cause: Cause
    seconds: float
    evidence: str


def merged(shares: Iterable[Share]) -> list[Share]:
    """Return one share per cause, the largest first; the evidence is that of the largest part."""
    seconds: dict[Cause, float] = {}
    largest: dict[Cause, Share] = {}
    parts: dict[Cause, int] = {}
    for share in shares:
        if share.seconds == 0.0:
            continue
        seconds[share.cause] = seconds.get(share.cause, 0.0) + share.seconds
        parts[share.cause] = parts.get(share.cause, 0) + 1
        best = largest.get(share.cause)
        if best is None or abs(share.seconds) > abs(best.seconds):
            largest[share.cause] = share
    joined = [
        Share(cause, total, _evidence(largest[cause], parts[cause]))
        for cause, total in seconds.items()
    ]
    return sorted(joined, key=lambda share: -share.seconds)


def _evidence(largest: Share, parts: int) -> str:
    if parts == 1:
        return largest.evidence
    return f"{largest.evidence} ({largest.seconds * 1e3:.1f} ms, the largest of {parts} parts)"
