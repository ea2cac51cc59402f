"""The sums of a log's signals: steps by kind and by mode, times between tokens."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from glm_jax.observe.timeline_signals import Signals, Wait

KINDS = ("prefill", "decode", "mixed")


class KindSums(NamedTuple):
    """All steps of a kind.

    Attributes:
        kind: "prefill", "decode" or "mixed".
        steps: How many.
        prefill_rows: Rows of prompts.
        decode_rows: Rows of decoding requests, drafts included.
        pad_share: Pads as a part of all rows; of a loop, its first step's pads.
        median_ms: Of a step.
        p99_ms: Likewise.
    """

    kind: str
    steps: int
    prefill_rows: int
    decode_rows: int
    pad_share: float
    median_ms: float
    p99_ms: float


class WaitSums(NamedTuple):
    """All times between tokens of a sort.

    Attributes:
        sort: Which.
        waits: How many.
        median_ms: Of them.
        p99_ms: Likewise.
        longest_ms: Likewise.
    """

    sort: str
    waits: int
    median_ms: float
    p99_ms: float
    longest_ms: float


def sums_by_kind(signals: Signals) -> list[KindSums]:
    """Return the sums of each kind of which there are steps."""
    kinds = np.array(signals.kinds)
    milliseconds = (signals.ends - signals.starts) * 1e3
    found = []
    for kind in KINDS:
        chosen = kinds == kind
        if not chosen.any():
            continue
        prefill, decode, pads = (
            int(values[chosen].sum()) for values in (signals.prefill, signals.decode, signals.pads)
        )
        median, p99 = np.percentile(milliseconds[chosen], [50, 99])
        rows = prefill + decode + pads
        found.append(
            KindSums(
                kind, int(chosen.sum()), prefill, decode, pads / rows, float(median), float(p99)
            )
        )
    return found


def sums_of_waits(waits: Sequence[Wait]) -> list[WaitSums]:
    """Return the sums of the times between tokens with and without prompt rows meanwhile."""
    found = []
    for beside, sort in ((False, "no prompt rows meanwhile"), (True, "prompt rows meanwhile")):
        milliseconds = [wait.seconds * 1e3 for wait in waits if (wait.prefill_rows > 0) is beside]
        if milliseconds:
            median, p99, longest = map(float, np.percentile(milliseconds, [50, 99, 100]))
            found.append(WaitSums(sort, len(milliseconds), median, p99, longest))
    return found


def title_of(signals: Signals, device: str) -> str:
    """Return a line about a log: how many steps of each kind, how long, on what."""
    kinds = ", ".join(f"{one.steps} {one.kind}" for one in sums_by_kind(signals))
    where = f" on {device}" if device else ""
    seconds = float(signals.ends[-1])
    return f"{len(signals.kinds)} steps in {seconds:.3g} s{where}: {kinds}"
