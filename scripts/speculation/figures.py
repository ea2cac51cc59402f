"""Figures of the rounds: speeds, ratios, and what is asked of them."""

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

# What speculation owes at batch 1 where it accepts enough.
OWED_SPEED = 1.25
# How far "auto" may stay behind the best fixed draft length.
SHORTFALL = 0.03


class Spread(NamedTuple):
    """Median, lowest and highest of the rounds."""

    median: float
    low: float
    high: float


class Verdict(NamedTuple):
    """Whether a draft length owes its speed at batch 1, and whether it has it.

    Attributes:
        length: mean accepted length.
        step_ratio: t(k+1) / t(1), time of a step with k drafts over that of one without.
        threshold: the length above which the speed is owed: 1 + 0.25 t(k+1) / t(1).
        needed: the length that gives the speed where steps take all the time: 1.25 t(k+1) / t(1).
        speed: times that of no drafts.
        owed: whether the length is above the threshold.
        met: whether it is as fast as asked.
    """

    length: float
    step_ratio: float
    threshold: float
    needed: float
    speed: float
    owed: bool
    met: bool


def spread_of(values: Sequence[float]) -> Spread:
    """Median, lowest and highest."""
    return Spread(statistics.median(values), min(values), max(values))


def ratios(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """Round by round: all that runs in a round meets the same prompts and a like machine."""
    return [value / other for value, other in zip(values, base, strict=True)]


def best_fixed(rates: Mapping[str, Sequence[float]]) -> str:
    """The fastest draft length, "0" included and "auto" not.

    Medians of the ratios to no drafts are compared, so that a round of slow text counts like any.
    """
    fixed = [name for name in rates if name != "auto"]
    return max(fixed, key=lambda name: statistics.median(ratios(rates[name], rates["0"])))


def judge(length: float, step_ratio: float, speed: float) -> Verdict:
    """Compare a draft length with what is owed at batch 1."""
    threshold = 1 + (OWED_SPEED - 1) * step_ratio
    return Verdict(
        length=length,
        step_ratio=step_ratio,
        threshold=threshold,
        needed=OWED_SPEED * step_ratio,
        speed=speed,
        owed=length > threshold,
        met=speed >= OWED_SPEED,
    )


def equal_outputs(one: Sequence[list[int]], other: Sequence[list[int]]) -> float:
    """The share of outputs that are equal to the end."""
    return float(np.mean([a == b for a, b in zip(one, other, strict=True)]))
