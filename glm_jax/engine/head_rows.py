"""Asks for logits and log-probabilities of a step's rows, for the requests that want them.

Which rows these are is read off the plan and its layout, before the plan is committed; it never
changes what is planned.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from bucketing.cell import Cell
from glm_jax.engine.logprob import PositionLogprobs
from glm_jax.engine.plan import StepPlan
from glm_jax.engine.request_logprobs import RequestLogprobs
from glm_jax.engine.results import Result
from glm_jax.sampling.row_logprobs import RowLogprobs, RowQuestion

LogitsOf = Callable[[Sequence[int]], Float[np.ndarray, "rows V"]]
LogprobsOf = Callable[[RowQuestion], RowLogprobs]


def collect_logits(
    plan: StepPlan,
    layout: Cell,
    logits_of: LogitsOf,
    wanted: Mapping[str, Float[np.ndarray, "T V"]],
) -> None:
    """Fill in the logits of a step's prompt rows.

    Args:
        plan: the step.
        layout: the cell its rows were packed for.
        logits_of: gives the logits of rows of the step.
        wanted: by request id, the logits of its prompt to be filled in.
    """
    for entry, first in zip(plan.entries, _first_rows(plan, layout), strict=True):
        logits, start = wanted.get(entry.request_id), entry.request.computed
        if logits is None or start >= len(logits):
            continue
        count = min(entry.known, len(logits) - start)
        logits[start : start + count] = logits_of(range(first, first + count))


class _Part(NamedTuple):
    """Whose rows come next in a question: those of its prompt, then those that drew tokens."""

    record: RequestLogprobs
    prompt_rows: int
    tokens: Sequence[int]


def collect_logprobs(
    plan: StepPlan,
    layout: Cell,
    results: Iterable[Result],
    logprobs_of: LogprobsOf,
    wanted: Mapping[str, RequestLogprobs],
) -> dict[str, list[PositionLogprobs]]:
    """Ask once for all rows: those of prompts are kept at once, those that drew are returned.

    Args:
        plan: the step.
        layout: the cell its rows were packed for.
        results: what it drew, in plan order.
        logprobs_of: gives the log-probabilities at rows of the step.
        wanted: by request id, what it asked for.

    Returns:
        By request id, those of the tokens that the step drew; an end may still drop some.
    """
    rows: list[int] = []
    targets: list[int] = []
    further: list[Sequence[int]] = []
    parts: dict[str, _Part] = {}
    for entry, first, result in zip(plan.entries, _first_rows(plan, layout), results, strict=True):
        record, request = wanted.get(entry.request_id), entry.request
        if record is None or request.finished:
            continue
        prompt = record.prompt_rows(entry)
        rows += [first + position - request.computed for position in prompt]
        targets += [request.token(position + 1) for position in prompt]
        tokens = [] if record.outputs is None else result.tokens
        # Draw j is at the row of draft j, the first at the last known row.
        last_known = first + entry.known - 1
        rows += range(last_known, last_known + len(tokens))
        targets += tokens
        further += [()] * len(prompt) + [record.further] * len(tokens)
        parts[entry.request_id] = _Part(record, len(prompt), tokens)
    if not rows:
        return {}
    answer = logprobs_of(RowQuestion(rows, targets, further))
    drawn, start = {}, 0
    for name, (record, prompt_rows, tokens) in parts.items():
        middle, stop = start + prompt_rows, start + prompt_rows + len(tokens)
        if prompt_rows:
            record.take_prompt(_between(answer, start, middle))
        if tokens:
            drawn[name] = record.read_drawn(tokens, _between(answer, middle, stop))
        start = stop
    return drawn


def _between(answer: RowLogprobs, start: int, stop: int) -> RowLogprobs:
    return RowLogprobs(*(array[start:stop] for array in answer))


def _first_rows(plan: StepPlan, layout: Cell) -> Iterator[int]:
    """The first row of each entry of a plan in a layout, prefill segment first."""
    row = 0
    for entry in plan.chunk_entries:
        yield row
        row += entry.rows
    for group in range(len(plan.group_entries)):
        yield layout.prefill + group * layout.width
