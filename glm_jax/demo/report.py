"""The figures of the demo and what ``--json`` prints."""

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from glm_jax.demo.comparison import POLICIES
from glm_jax.demo.run import Run, Step

# How the keys of the JSON name a policy; "unmixed" is prefill-first, what engines do by default
# when they do not mix.
KEY_NAMES = {"prefill_first": "unmixed", "alternate": "alternate", "mixed": "mixed"}


class Figures(NamedTuple):
    """Medians over the runs of one policy.

    Attributes:
        worst_gap_ms: The longest time that any decoding request waited for its next token, from
            the arrival of the long prompt on.
        median_gap_ms: The median of all those waits.
        ttft_ms: From the arrival to the first token of the long prompt.
        total_ms: From the arrival until all requests are done.
        num_steps: Steps in that time.
        waste: Pad rows as a fraction of all rows computed in that time.
    """

    worst_gap_ms: float
    median_gap_ms: float
    ttft_ms: float
    total_ms: float
    num_steps: float | int
    waste: float


class Difference(NamedTuple):
    """Where a run's tokens leave those of the first run."""

    request: str
    policy: str
    position: int


def figures_of(runs: Sequence[Run]) -> dict[str, Figures]:
    """Return the figures of each policy that ran."""
    return {
        policy: _median([_figures(run) for run in runs if run.policy == policy])
        for policy in POLICIES
        if any(run.policy == policy for run in runs)
    }


def differences(runs: Sequence[Run]) -> list[Difference]:
    """Return, per run and request, the first token that is not the first run's."""
    found = []
    for run in runs[1:]:
        for request, expected in runs[0].tokens.items():
            pairs = zip(expected, run.tokens[request], strict=True)
            unequal = (index for index, (one, other) in enumerate(pairs) if one != other)
            position = next(unequal, None)
            if position is not None:
                found.append(Difference(request, run.policy, position))
    return found


def report(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the figures, whether the tokens agree, and every step of every run, as JSON values."""
    different = differences(runs)
    content: dict[str, Any] = {}
    for policy, figures in figures_of(runs).items():
        for name, value in figures._asdict().items():
            content[f"{name}_{KEY_NAMES[policy]}"] = _rounded(value)
    content["tokens_identical"] = not different
    content["token_differences"] = [difference._asdict() for difference in different]
    content["runs"] = [_run(run) for run in runs]
    return content


def _figures(run: Run) -> Figures:
    assert run.first_token is not None, f"{run.policy=} has not finished"
    pads = sum(step.pad_rows for step in run.steps)
    rows = pads + sum(step.useful_rows for step in run.steps)
    return Figures(
        worst_gap_ms=run.worst_gap * 1e3,
        median_gap_ms=run.median_gap * 1e3,
        ttft_ms=run.first_token * 1e3,
        total_ms=run.total * 1e3,
        num_steps=len(run.steps),
        waste=pads / rows,
    )


def _median(figures: Sequence[Figures]) -> Figures:
    return Figures(*(statistics.median(values) for values in zip(*figures, strict=True)))


def _run(run: Run) -> dict[str, Any]:
    figures = {name: _rounded(value) for name, value in _figures(run)._asdict().items()}
    gaps = {name: [_rounded(gap * 1e3) for gap in run.gaps(name)] for name in run.requests}
    steps = [_step(step) for step in run.steps]
    return {"policy": run.policy, **figures, "gaps_ms": gaps, "steps": steps}


def _step(step: Step) -> dict[str, Any]:
    record = step.record
    return {
        "kind": record.kind,
        "cell": list(record.cell or ()),
        "requests": list(record.request_ids),
        "prefill_rows": record.prefill_rows,
        "prefill_pad_rows": record.prefill_pad_rows,
        "decode_rows": record.decode_rows,
        "decode_pad_rows": record.decode_pad_rows,
        "draft_tokens": record.draft_tokens,
        "accepted_tokens": record.accepted_tokens,
        "waste": _rounded(step.pad_rows / (step.pad_rows + step.useful_rows)),
        "ms": _rounded(record.wall_time * 1e3),
        "end_ms": _rounded(step.end * 1e3),
    }


def _rounded(value: float | int) -> float | int:
    return round(value, 3)
