"""Why a request's tokens came late: the steps between them, one by one."""

from collections.abc import Iterable, Sequence
from statistics import fmean, median
from typing import NamedTuple

from glm_jax.engine.declined import Reason
from glm_jax.engine.outputs import StepRecord
from glm_jax.observe.cause import Cause, Share, merged
from glm_jax.observe.compile_event import CompileEvent
from glm_jax.observe.gap import Gap, gaps_of
from glm_jax.observe.step_shares import StepShares, StepTold

# What kept a request that had lost its pages from coming back.
_WAITS = {
    Reason.WRITING: Cause.PAGE_WAIT,
    Reason.NO_PAGES: Cause.PAGE_WAIT,
    Reason.OVERTAKEN: Cause.PAGE_WAIT,
    Reason.PREEMPTION: Cause.PREEMPTION,
}


class GapTold(NamedTuple):
    """A gap and where its time went.

    Attributes:
        gap: The gap.
        expected: Seconds that it may take: a usual decode step and the pause before it, for as
            many tokens as came.
        shares: The rest by cause, the largest first; together exactly that.
        prefill_rows: Useful prefill rows of other requests in its last step.
    """

    gap: Gap
    expected: float
    shares: list[Share]
    prefill_rows: int

    @property
    def excess(self) -> float:
        """Seconds beyond the expected ones."""
        return self.gap.seconds - self.expected

    @property
    def cause(self) -> Cause:
        """The largest share's."""
        return self.shares[0].cause if self.shares else Cause.UNKNOWN

    def seconds(self, *causes: Cause) -> float:
        """Return what some causes are to blame for, together."""
        return sum((share.seconds for share in self.shares if share.cause in causes), 0.0)


class GapCauses:
    """Tells the gaps of a log."""

    def __init__(self, records: Sequence[StepRecord], compiles: Iterable[CompileEvent]) -> None:
        """Take a log.

        Args:
            records: Its steps, in order.
            compiles: The programs that appeared meanwhile.
        """
        self._records = records
        self._steps = StepShares(records, compiles)
        self.gaps = gaps_of(records)
        self._usual_tokens = _usual_tokens(records)
        self._usual_gap = median([gap.seconds for gap in self.gaps] or [0.0])

    def expected(self, gap: Gap) -> float:
        """Return the seconds that a gap may take, as ``tell`` does."""
        record = self._records[gap.last]
        alone = self._steps.alone(gap.last)
        if alone is None:
            normal = min(self._usual_gap, record.wall_time)
        else:
            normal = alone.seconds * record.loop_steps
        usual = self._usual_tokens.get(gap.request_id, 1.0) * record.loop_steps
        return normal * min(1.0, gap.tokens / usual) + self._steps.typical.pause

    def tell(self, gap: Gap) -> GapTold:
        """Divide the time of a gap."""
        pause = self._steps.typical.pause
        shares: list[Share] = []
        before = self._records[gap.first - 1]
        end, out, normal = before.started + before.wall_time, None, 0.0
        for place in range(gap.first, gap.last + 1):
            record = self._records[place]
            idle = record.started - end
            shares.append(_pause_share(idle - pause, record))
            told, out = self._told(gap, place, out)
            normal += told.normal
            shares += told.shares
            if place != gap.last:
                # What usually passes between steps is part of the wait for this one.
                shares.append(Share(_main(told), pause, "the pause before the step"))
            end = record.started + record.wall_time
        last = self._records[gap.last]
        fewer = self._fewer_tokens(gap, last, normal)
        shares += fewer
        expected = normal + pause - sum(share.seconds for share in fewer)
        others = sum(
            rows.known
            for name, rows in zip(last.request_ids, last.rows, strict=True)
            if rows.prefill and name != gap.request_id
        )
        return GapTold(gap, expected, merged(shares), others)

    def _told(self, gap: Gap, place: int, out: Cause | None) -> tuple[StepTold, Cause | None]:
        """Return what a step of a gap means, and why the request is out after it, if it is.

        Args:
            gap: The gap.
            place: Of the step.
            out: Why the request lost its place before, if it did.
        """
        record, name = self._records[place], gap.request_id
        if name in record.preempted:
            out = Cause.PREEMPTION
        if record.fault is not None:
            return self._steps.absent(place, Cause.FAULT, record.fault), out or Cause.FAULT
        rows = dict(zip(record.request_ids, record.rows, strict=True)).get(name)
        if place == gap.last:
            return self._last(place, own=out if rows is not None and rows.prefill else None), None
        if rows is not None:
            cause = out or Cause.PREEMPTION
            evidence = f"{rows.known} of its rows were computed again in step {record.index}"
            return self._steps.absent(place, cause, evidence), cause
        if out is None:
            evidence = f"step {record.index} had only prefill rows: {_policy(record, name)}"
            cause = Cause.PREFILL if record.kind == "prefill" else Cause.UNKNOWN
            return self._steps.absent(place, cause, evidence), None
        cause, evidence = _wait(record, name, out)
        return self._steps.absent(place, cause, evidence), out

    def _last(self, place: int, *, own: Cause | None) -> StepTold:
        """Divide the step that brought the tokens."""
        alone = self._steps.alone(place)
        if alone is not None:
            return self._steps.present(place, alone, own=own)
        record = self._records[place]
        normal = min(self._usual_gap, record.wall_time)
        evidence = "no decode step like it is in the log to compare with"
        cause = Cause.PREFILL if record.kind == "mixed" else Cause.UNKNOWN
        return StepTold(normal, [Share(cause, record.wall_time - normal, evidence)])

    def _fewer_tokens(self, gap: Gap, last: StepRecord, normal: float) -> list[Share]:
        """Return the time that refused drafts cost: with usual luck it brings more tokens."""
        usual = self._usual_tokens.get(gap.request_id, 1.0) * last.loop_steps
        if gap.tokens >= usual:
            return []
        drafts = [group for group in last.drafts if group.request_id == gap.request_id]
        verified = sum(len(group.draft_token_ids) for group in drafts)
        accepted = sum(group.accepted for group in drafts)
        evidence = (
            f"{accepted} of {verified} drafts were accepted: {gap.tokens} tokens, usual are "
            f"{usual:.1f}"
        )
        return [Share(Cause.DRAFTS, normal * (1 - gap.tokens / usual), evidence)]


def _usual_tokens(records: Sequence[StepRecord]) -> dict[str, float]:
    """Return the mean tokens per step of the requests that drafts were verified for."""
    counts: dict[str, list[float]] = {}
    drafting: set[str] = set()
    for record in records:
        drafting.update(group.request_id for group in record.drafts)
        decoding = (
            name
            for name, rows in zip(record.request_ids, record.rows, strict=True)
            if not rows.prefill
        )
        for name in decoding:
            if record.tokens.get(name):
                counts.setdefault(name, []).append(record.tokens[name] / record.loop_steps)
    return {name: fmean(counts[name]) for name in drafting if name in counts}


def _pause_share(seconds: float, record: StepRecord) -> Share:
    cause = Cause.HOST if seconds > 0 else Cause.UNKNOWN
    evidence = f"{seconds * 1e3:.1f} ms more than usual passed before step {record.index} began"
    return Share(cause, seconds, evidence)


def _main(told: StepTold) -> Cause:
    return max(told.shares, key=lambda share: share.seconds).cause


def _wait(record: StepRecord, name: str, out: Cause) -> tuple[Cause, str]:
    """Return why a request that had lost its place did not get it back in a step."""
    reason = _reason(record, name)
    if reason is None:
        return out, f"it was out in step {record.index}"
    cause = _WAITS.get(reason, Cause.QUEUE)
    return (out if cause is Cause.PREEMPTION else cause), f"step {record.index}: {reason}"


def _reason(record: StepRecord, name: str) -> Reason | None:
    """Return why a request got no rows in a step; of many that wait only the first are named."""
    for note in record.declined:
        if name in note.request_ids:
            return note.reason
    unnamed = [note.reason for note in record.declined if note.count > len(note.request_ids)]
    return unnamed[0] if unnamed else None


def _policy(record: StepRecord, name: str) -> str:
    reason = _reason(record, name)
    return f"{len(record.rows)} requests" if reason is None else str(reason)
