"""Reads the fetched outputs of a step back into tokens per request; nothing is changed here."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Integer

from glm_jax.engine.plan import PlanEntry, StepPlan
from glm_jax.engine.request import RowClass


class Result(NamedTuple):
    """What a step did for one request: rows that stay in the cache, and the tokens it drew."""

    entry: PlanEntry
    advance: int
    tokens: list[int]


def read_results(
    plan: StepPlan,
    chunk_tokens: Integer[np.ndarray, "ranks J"],
    group_tokens: Integer[np.ndarray, "ranks G Q"],
    group_accepted: Integer[np.ndarray, "ranks G"],
) -> list[Result]:
    """Return the result of every request of the plan, in plan order.

    Raises:
        RuntimeError: The arrays are too small for the plan, or name impossible tokens: they are
            not this plan's outputs, or the device computed garbage.
    """
    drawn = (chunk_tokens[0].tolist(), group_tokens[0].tolist(), group_accepted[0].tolist())
    chunk_draws, group_draws, accepted = drawn
    cell = plan.cell
    if (
        len(chunk_draws) < len(plan.chunk_entries)
        or group_tokens.shape[1] < cell.groups
        or group_tokens.shape[2] < cell.width
        or len(accepted) < cell.groups
    ):
        raise RuntimeError(
            f"outputs of shapes {chunk_tokens.shape}, {group_tokens.shape}, "
            f"{group_accepted.shape} do not belong to a step of cell {tuple(cell)} with "
            f"{len(plan.chunk_entries)} chunks."
        )
    results = []
    for entry, token in zip(plan.chunk_entries, chunk_draws, strict=False):
        results.append(Result(entry, entry.known, [token] if entry.sampled else []))
    for entry, draws, count in zip(plan.group_entries, group_draws, accepted, strict=False):
        if entry.row_class is RowClass.PREFILL:
            tokens = [draws[entry.known - 1]] if entry.sampled else []
            results.append(Result(entry, entry.known, tokens))
            continue
        if not 0 <= count <= entry.drafts:
            raise RuntimeError(
                f"request {entry.request_id!r} had {entry.drafts} drafts, but the device accepted "
                f"{count}; allowed: 0 to {entry.drafts}."
            )
        first = entry.known - 1
        results.append(Result(entry, entry.known + count, draws[first : first + count + 1]))
    for entry, _, tokens in results:
        if tokens and min(tokens) < 0:
            raise RuntimeError(
                f"request {entry.request_id!r} drew token ids {tokens}; ids are >= 0. "
                "The device computed garbage."
            )
    return results
