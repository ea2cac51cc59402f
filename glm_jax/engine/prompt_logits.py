"""Collects the logits of a prompt's rows, step by step, for the requests that asked for them."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Float

from bucketing.cell import Cell
from glm_jax.engine.plan import StepPlan

LogitsOf = Callable[[Sequence[int]], Float[np.ndarray, "rows V"]]


def collect_logits(
    plan: StepPlan,
    layout: Cell,
    logits_of: LogitsOf,
    wanted: Mapping[str, Float[np.ndarray, "T V"] | None],
) -> None:
    """Fill in the logits of a step's prompt rows, before its plan is committed.

    Args:
        plan: the step.
        layout: the cell its rows were packed for.
        logits_of: gives the logits of rows of the step.
        wanted: by request id, the logits of its prompt to be filled in; None if nobody asked.
    """
    for entry, first in zip(plan.entries, _first_rows(plan, layout), strict=True):
        logits, start = wanted[entry.request_id], entry.request.computed
        if logits is None or start >= len(logits):
            continue
        count = min(entry.known, len(logits) - start)
        logits[start : start + count] = logits_of(range(first, first + count))


def _first_rows(plan: StepPlan, layout: Cell) -> Iterator[int]:
    """The first row of each entry of a plan in a layout, prefill segment first."""
    row = 0
    for entry in plan.chunk_entries:
        yield row
        row += entry.rows
    for group in range(len(plan.group_entries)):
        yield layout.prefill + group * layout.width
