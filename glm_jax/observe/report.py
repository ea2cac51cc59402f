"""An explanation for people, and as JSON values."""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from glm_jax.engine.outputs import StepRecord
from glm_jax.observe.cause import ADVICE, Cause
from glm_jax.observe.explanation import Explanation, Spike
from glm_jax.observe.first_token import FirstToken, first_tokens
from glm_jax.observe.floor import StepFloor

# Shares of a spike that are shown: from this part of it on.
_SMALL = 0.05
_MIXING = {
    "yes": "mixing is the cause",
    "partly": "mixing is a part of it",
    "no": "mixing is not the cause",
}


def print_explanation(
    console: Console,
    explanation: Explanation,
    records: Sequence[StepRecord],
    *,
    most: int,
    floor: StepFloor | None = None,
) -> None:
    """Print what was found: the sums, then the worst spikes one by one.

    Args:
        console: Where.
        explanation: What was found.
        records: The steps it is of.
        most: Spikes to show.
        floor: Gives the least time of a spike's last step; None leaves it out.
    """
    spikes = explanation.spikes
    late = sum(len(spike.requests) for spike in spikes)
    console.print(
        f"{len(records)} steps, {explanation.gaps} times between tokens; {late} were too long, in "
        f"{len(spikes)} spikes",
        highlight=False,
    )
    _print_first_tokens(console, records)
    if not spikes:
        return
    console.print(_sums(explanation))
    console.print(f"explained: {explanation.explained:.0%} of the excess", highlight=False)
    for spike in spikes[:most]:
        console.print()
        for line in _lines(spike, records, floor):
            console.print(line, highlight=False, markup=False)
    if len(spikes) > most:
        console.print(f"\n{len(spikes) - most} more; --most shows them", highlight=False)
    console.print()
    for cause in _worst(explanation):
        console.print(f"{cause}: {ADVICE[cause]}", highlight=False, markup=False)


def as_json(
    explanation: Explanation, records: Sequence[StepRecord], floor: StepFloor | None = None
) -> dict[str, Any]:
    """Return an explanation as JSON values.

    Args:
        explanation: What was found.
        records: The steps it is of.
        floor: Gives the least time of a spike's last step; None leaves it out.
    """
    return {
        "steps": len(records),
        "gaps": explanation.gaps,
        "explained": round(explanation.explained, 4),
        "ms_by_cause": {cause: _ms(seconds) for cause, seconds in explanation.seconds.items()},
        "advice": {cause: ADVICE[cause] for cause in _worst(explanation)},
        "first_tokens": [_first_json(one) for one in first_tokens(records)],
        "spikes": [_spike_json(spike, records, floor) for spike in explanation.spikes],
    }


def _first_json(first: FirstToken) -> dict[str, Any]:
    return {
        "request": first.request_id,
        "ms": _ms(first.seconds),
        "computed_ms": _ms(first.computed),
        "steps": first.steps,
        "waited_ms": {str(reason): _ms(seconds) for reason, seconds in first.waited.items()},
    }


def _print_first_tokens(console: Console, records: Sequence[StepRecord]) -> None:
    """Print what first tokens waited for, all requests together."""
    firsts = first_tokens(records)
    if not firsts:
        return
    total = sum(first.seconds for first in firsts)
    parts = {"computing their rows": sum(first.computed for first in firsts)}
    for first in firsts:
        for reason, seconds in first.waited.items():
            parts[str(reason)] = parts.get(str(reason), 0.0) + seconds
    shares = ", ".join(
        f"{reason} {seconds / total:.0%}"
        for reason, seconds in sorted(parts.items(), key=lambda item: -item[1])
        if seconds >= _SMALL * total
    )
    usual = median(first.seconds for first in firsts)
    console.print(
        f"{len(firsts)} first tokens, after {usual * 1e3:.1f} ms in the median: {shares}",
        highlight=False,
    )


def _spike_json(
    spike: Spike, records: Sequence[StepRecord], floor: StepFloor | None
) -> dict[str, Any]:
    told = spike.told
    last = records[told.gap.last]
    values = {
        "requests": list(spike.requests),
        "steps": [records[told.gap.first].index, last.index],
        "at_seconds": round(last.started - records[0].started, 6),
        "ms": _ms(told.gap.seconds),
        "expected_ms": _ms(told.expected),
        "tokens": told.gap.tokens,
        "cause": told.cause,
        "mixing": spike.mixing,
        "shares": [
            {"cause": share.cause, "ms": _ms(share.seconds), "evidence": share.evidence}
            for share in told.shares
        ],
    }
    least = None if floor is None else floor.seconds(last)
    return values if least is None else {**values, "floor_ms": _ms(least)}


def _sums(explanation: Explanation) -> Table:
    table = Table("cause", box=None, pad_edge=False)
    for column in ("ms too long", "share"):
        table.add_column(column, justify="right")
    total = sum(explanation.seconds.values())
    for cause, seconds in sorted(explanation.seconds.items(), key=lambda item: -item[1]):
        table.add_row(cause, f"{seconds * 1e3:.1f}", f"{seconds / total:.0%}")
    return table


def _lines(spike: Spike, records: Sequence[StepRecord], floor: StepFloor | None) -> Iterator[str]:
    """Yield a spike as text."""
    told = spike.told
    gap = told.gap
    first, last = records[gap.first], records[gap.last]
    steps = f"step {last.index}" if first is last else f"steps {first.index} to {last.index}"
    who = ", ".join(spike.requests[:6]) + (", ..." if len(spike.requests) > 6 else "")
    tokens = "" if gap.tokens == 1 else f" for {gap.tokens} tokens"
    verdict = f"; {_MIXING[spike.mixing]}" if spike.mixing else ""
    since = last.started - records[0].started
    yield (
        f"{steps} at {since:.2f} s ({last.kind}, cell {tuple(last.cell or ())}): "
        f"{gap.seconds * 1e3:.1f} ms{tokens}, {told.expected * 1e3:.1f} usual; {who}{verdict}"
    )
    for share in told.shares:
        if abs(share.seconds) >= _SMALL * told.excess:
            yield f"  {share.seconds * 1e3:+8.1f} ms  {share.cause}: {share.evidence}"
    least = None if floor is None else floor.seconds(last)
    if least is not None:
        yield f"  the ledger's floor of step {last.index} is {least * 1e3:.2f} ms"


def _worst(explanation: Explanation) -> list[Cause]:
    """Return the causes that matter over all spikes, worst first."""
    total = sum(explanation.seconds.values())
    named = (item for item in explanation.seconds.items() if item[1] > _SMALL * total)
    return [cause for cause, _ in sorted(named, key=lambda item: -item[1])]


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
