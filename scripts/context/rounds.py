"""Everything that is timed, in rounds: each thing once a round, in a new order every time."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from scripts.context.operators import Operators
from scripts.context.steps import FORMS, SEED, WORKS, Steps, Work

# A side that takes longer refills the caches many times over: its first run counts.
LONG_SECONDS = 0.2


class Side(NamedTuple):
    """One thing that is timed.

    Attributes:
        context: keys that its last row sees.
        work: a name of WORKS.
        part: "step", or an operator for all layers of it: "indexer", "attention".
        form: one of FORMS; "both" for what is the same in both.
    """

    context: int
    work: str
    part: str
    form: str


class Figures(NamedTuple):
    """A side and its milliseconds per token: the median, the 10th and the 90th percentile."""

    context: int
    work: str
    part: str
    form: str
    ms_per_token: float
    p10: float
    p90: float


def sides_at(steps: Steps, operators: Operators, context: int) -> dict[Side, Callable[[], float]]:
    """Everything that is timed at a context; each call returns its seconds.

    Raises:
        ValueError: sparse and dense results differ.
    """
    sides: dict[Side, Callable[[], float]] = {}
    for work in WORKS:
        operands, selection = operators.operands(work, context)
        operators.compare(work, operands, selection)
        steps.compare(work, context)
        sides[Side(context, work.name, "indexer", "both")] = functools.partial(
            operators.indexer, work, operands
        )
        for form in FORMS:
            sides[Side(context, work.name, "attention", form)] = functools.partial(
                operators.attention, work, form, operands, selection
            )
            sides[Side(context, work.name, "step", form)] = functools.partial(
                _seconds, steps, work, form, context
            )
    return sides


def measure(
    sides: Mapping[Side, Callable[[], float]], rounds: int, report: Callable[[int], None]
) -> list[Figures]:
    """Time all sides, round by round.

    A short side runs twice and the second time counts, so that it finds in the processor's caches
    what it left there itself, not what another side did: as when a server runs steps of one kind.

    Args:
        sides: what is timed, by name.
        rounds: times that count, of each.
        report: called after each round with the number of rounds done.
    """
    times: dict[Side, list[float]] = {side: [] for side in sides}
    names = list(sides)
    rng = np.random.default_rng(SEED)
    for number in range(rounds):
        for place in rng.permutation(len(names)):
            side = names[place]
            first = sides[side]()
            times[side].append(first if first > LONG_SECONDS else sides[side]())
        report(number + 1)
    tokens = {work.name: work.tokens for work in WORKS}
    return [Figures(*side, *_spread(seconds, tokens[side.work])) for side, seconds in times.items()]


def growth(rows: Sequence[Figures], work: str, part: str, form: str) -> float:
    """How many times longer the longest context takes than the shortest one."""
    line = {
        row.context: row.ms_per_token
        for row in rows
        if (row.work, row.part, row.form) == (work, part, form)
    }
    return line[max(line)] / line[min(line)]


def _seconds(steps: Steps, work: Work, form: str, context: int) -> float:
    return steps.run(work, form, context)[0]


def _spread(seconds: Sequence[float], tokens: int) -> list[float]:
    """Median, 10th and 90th percentile in milliseconds per token."""
    chosen = np.percentile(seconds, (50, 10, 90)) * 1e3 / tokens
    return [round(float(value), 5) for value in chosen]
