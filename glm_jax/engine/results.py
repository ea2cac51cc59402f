"""Reads the fetched outputs of a step back into tokens per request; nothing is changed here."""

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Integer

from glm_jax.engine.plan import PlanEntry, StepPlan
from glm_jax.engine.request import RowClass


class Result(NamedTuple):
    """What a step did for one request.

    Attributes:
        entry: Of the plan.
        advance: Rows that stay in the cache.
        tokens: Tokens it drew.
        drafts: Drafts made for the next step.
    """

    entry: PlanEntry
    advance: int
    tokens: list[int]
    drafts: Sequence[int]


def read_results(
    plan: StepPlan,
    chunk_tokens: Integer[np.ndarray, "ranks J"],
    group_tokens: Integer[np.ndarray, "ranks G Q"],
    group_accepted: Integer[np.ndarray, "ranks G"],
    drafts: Integer[np.ndarray, "ranks R k"] | None = None,
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
        or (drafts is not None and drafts.shape[1] != len(chunk_draws) + len(accepted))
    ):
        raise RuntimeError(
            f"outputs of shapes {chunk_tokens.shape}, {group_tokens.shape}, "
            f"{group_accepted.shape} do not belong to a step of cell {tuple(cell)} with "
            f"{len(plan.chunk_entries)} chunks."
        )
    chunk_drafts, group_drafts = _drafts_of(plan, drafts, len(chunk_draws))
    results = []
    for entry, token, made in zip(plan.chunk_entries, chunk_draws, chunk_drafts, strict=False):
        tokens = [token] if entry.sampled else []
        results.append(Result(entry, entry.known, tokens, made[: entry.new_drafts]))
    group_lines = zip(plan.group_entries, group_draws, accepted, group_drafts, strict=False)
    for entry, draws, count, made in group_lines:
        if entry.row_class is RowClass.PREFILL:
            tokens = [draws[entry.known - 1]] if entry.sampled else []
            results.append(Result(entry, entry.known, tokens, made[: entry.new_drafts]))
            continue
        if not 0 <= count <= entry.drafts:
            raise RuntimeError(
                f"request {entry.request_id!r} had {entry.drafts} drafts, but the device accepted "
                f"{count}; allowed: 0 to {entry.drafts}."
            )
        first = entry.known - 1
        tokens = draws[first : first + count + 1]
        results.append(Result(entry, entry.known + count, tokens, made[: entry.new_drafts]))
    for entry, _, tokens, _ in results:
        if tokens and min(tokens) < 0:
            raise RuntimeError(
                f"request {entry.request_id!r} drew token ids {tokens}; ids are >= 0. "
                "The device computed garbage."
            )
    return results


def _drafts_of(
    plan: StepPlan, drafts: Integer[np.ndarray, "ranks R k"] | None, chunks: int
) -> tuple[Iterable[Sequence[int]], Iterable[Sequence[int]]]:
    """Return the lines of drafts behind chunks and behind groups, as far as the plan has any.

    Raises:
        RuntimeError: Drafts were asked for that are not there.
    """
    if plan.drafter and drafts is not None:
        made = drafts[0].tolist()
        return made, made[chunks:]
    for entry in plan.entries if plan.drafter else ():
        if entry.new_drafts:
            raise RuntimeError(
                f"{entry.new_drafts} drafts were planned for request {entry.request_id!r}, "
                "but the step returned none. Pass its drafts to commit."
            )
    return itertools.repeat(()), itertools.repeat(())
