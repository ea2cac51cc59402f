"""The spikes of a log and their causes."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from glm_jax.engine.outputs import StepRecord
from glm_jax.observe.cause import Cause
from glm_jax.observe.compile_event import CompileEvent
from glm_jax.observe.gap_causes import GapCauses, GapTold

# A gap is a spike beyond this multiple of what it may take.
FACTOR = 1.5
# Mixing is no cause where it has less than this part of a spike.
BLAME = 0.25
MIXING = (Cause.PREFILL, Cause.PADDING)


class Spike(NamedTuple):
    """A gap that was too long, for all requests that saw the same.

    Attributes:
        told: The first request's.
        requests: Whose.
    """

    told: GapTold
    requests: tuple[str, ...]

    @property
    def mixing(self) -> str:
        """Whether mixing is to blame: "yes", "partly", "no"; empty where nothing was mixed."""
        told = self.told
        if not told.prefill_rows:
            return ""
        part = told.seconds(*MIXING) / told.excess
        return "no" if part < BLAME else "partly" if part < 1 - BLAME else "yes"


class Explanation(NamedTuple):
    """What a log tells of late tokens.

    Attributes:
        gaps: All gaps.
        spikes: Those that were too long, the longest excess first.
        seconds: By cause, over the spikes of every request.
    """

    gaps: int
    spikes: list[Spike]
    seconds: dict[Cause, float]

    @property
    def explained(self) -> float:
        """The part of the spikes' excess that has a cause; 1 without spikes."""
        total = sum(self.seconds.values())
        if total <= 0:
            return 1.0
        return 1 - abs(self.seconds.get(Cause.UNKNOWN, 0.0)) / total


def explain(
    records: Sequence[StepRecord],
    compiles: Iterable[CompileEvent] = (),
    *,
    factor: float | int = FACTOR,
) -> Explanation:
    """Find the spikes of a log and divide each among its causes.

    Args:
        records: The steps, in order.
        compiles: Programs that appeared meanwhile.
        factor: A gap is a spike beyond this multiple of what it may take.

    Raises:
        ValueError: The factor is none.
    """
    if factor <= 1:
        raise ValueError(f"factor is {factor}; allowed: a number above 1.")
    causes = GapCauses(records, compiles)
    late = [causes.tell(gap) for gap in causes.gaps if gap.seconds > factor * causes.expected(gap)]
    seconds: dict[Cause, float] = {}
    for one in late:
        for share in one.shares:
            seconds[share.cause] = seconds.get(share.cause, 0.0) + share.seconds
    return Explanation(len(causes.gaps), _spikes(late), seconds)


def _spikes(late: Iterable[GapTold]) -> list[Spike]:
    """Put together the requests that saw the same steps for the same causes."""
    seen: dict[tuple[int, int, Cause], list[GapTold]] = {}
    for one in late:
        seen.setdefault((one.gap.first, one.gap.last, one.cause), []).append(one)
    spikes = [
        Spike(max(same, key=lambda one: one.excess), tuple(one.gap.request_id for one in same))
        for same in seen.values()
    ]
    return sorted(spikes, key=lambda spike: -spike.told.excess)
