"""How many decode steps run in one dispatch, and the plan of each of them."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from bucketing.loop_inputs import LoopGroup, LoopInputs, LoopOutputs, pack_loop
from bucketing.step_inputs import Limits
from bucketing.step_time import StepTime
from glm_jax.engine.chunking import Decodes, scored_pairs
from glm_jax.engine.config import EngineConfig
from glm_jax.engine.drafting import NextDrafts
from glm_jax.engine.pages import PagePool
from glm_jax.engine.placement import Placement
from glm_jax.engine.plan import PlanEntry, StepPlan
from glm_jax.engine.plan_rows import pages_told
from glm_jax.engine.request import Request
from glm_jax.engine.request_logprobs import of_outputs
from glm_jax.engine.results import Result, read_results


class Looping(NamedTuple):
    """How long the device decodes on its own.

    Attributes:
        steps: At most so many; 1 is a step as any other.
        reason: Why it is 1, where loops are switched on; empty otherwise.
    """

    steps: int = 1
    reason: str = ""

    def grow(
        self,
        pool: PagePool,
        limits: Limits,
        decodes: Decodes,
        following: NextDrafts,
    ) -> NextDrafts:
        """Give the groups of a loop pages ahead, as far as the step can tell them.

        A loop stops where a group's pages end, so fewer are no harm.

        Args:
            pool: Of the rank.
            limits: Of the engine.
            decodes: The groups.
            following: The drafts that their first step makes.

        Returns:
            ``following`` with the rows ahead of each request.
        """
        # Nobody is in the middle of a prefill, so every free page may be taken.
        size, spare = pool.page_size, pool.free
        # As many as a step of one row may tell in any cell (`Limits.page_updates`).
        most_new = (1 + limits.num_drafts) // size + 2
        ahead = dict(following.ahead)
        for request in decodes.requests:
            name, held = request.request_id, len(request.pages)
            end = request.computed + 1 + len(request.draft_token_ids)
            per_step = 1 + following.lengths.get(name, 0)
            wanted = min(end + (self.steps - 1) * per_step, request.most_rows)
            pages = min(pool.pages_for(wanted), held + spare)
            if not request.needs_reset:
                pages = min(pages, request.synced_pages + most_new)
            pool.extend(request.pages, pages * size)
            spare -= len(request.pages) - held
            ahead[name] = max(ahead.get(name, 0), min(wanted, pages * size) - end)
        return following._replace(ahead=ahead)


NO_LOOP = Looping()


def choose_loop(
    config: EngineConfig,
    step_time: StepTime,
    placement: Placement,
    decodes: Decodes,
    idle: int,
) -> Looping:
    """Return how many steps may run before the host looks again.

    A request that arrives meanwhile waits for the loop's end: its predicted time is at most
    `tbt_target_ms`. Whatever the host must see after every step keeps it at 1.

    Args:
        config: The engine's options.
        step_time: Predicts a step.
        placement: Of the step.
        decodes: Its groups.
        idle: Requests that wait, or run and are not in the step.
    """
    if config.decode_loop_steps <= 1:
        return NO_LOOP
    if placement.chunks or placement.groups:
        return Looping(reason="prefill rows")
    if idle:
        return Looping(reason="a request waits")
    most_ids = config.limits().stop_ids
    for request in decodes.requests:
        reason = _needs_the_host(request, most_ids)
        if reason:
            return Looping(reason=reason)
    steps = config.decode_loop_steps
    if config.tbt_target_ms is not None:
        seconds = step_time.predict(placement.cell, decodes.pairs)
        steps = min(steps, int(config.tbt_target_ms / 1e3 / seconds))
    if steps <= 1:
        return Looping(reason="a step takes as long as tbt_target_ms")
    return Looping(steps)


def _needs_the_host(request: Request, most_ids: int) -> str:
    """Return what a request needs the host for after every step; empty where nothing."""
    if request.params.stop:
        return "stop strings"
    if request.controls is not None and request.controls.reason:
        return request.controls.reason
    if of_outputs(request.params):
        # Only the hidden rows of a single step are still there afterwards.
        return "log-probabilities"
    return f"more than {most_ids} end ids" if len(request.banned_ids()) > most_ids else ""


def loop_ends(pool: PagePool, limits: Limits, plan: StepPlan) -> LoopInputs:
    """Return what ends the loop of a plan."""
    groups = [
        LoopGroup(
            most_rows=entry.request.most_rows,
            page_rows=pages_told(pool, entry) * pool.page_size,
            min_length=entry.request.prompt_length + entry.request.params.min_tokens,
            end_ids=entry.request.banned_ids(),
        )
        for entry in plan.group_entries
    ]
    return pack_loop(plan.cell.groups, limits, [groups], steps=plan.loop_steps)


def loop_results(first: StepPlan, outputs: LoopOutputs) -> Iterator[tuple[StepPlan, list[Result]]]:
    """Yield the plan and the results of each step of a loop.

    The plan of a step is made once the results of the one before were applied to its requests.

    Raises:
        RuntimeError: The outputs cannot be those of the plan.
    """
    steps = int(outputs.steps[0])
    if not 1 <= steps <= first.loop_steps:
        raise RuntimeError(
            f"a loop of at most {first.loop_steps} steps ran {steps}. The device computed garbage."
        )
    no_chunks = np.zeros((1, 0), np.int32)
    plan = first
    for step in range(steps):
        tokens, accepted, drafts = (array[:, step] for array in outputs[1:4])
        yield plan, read_results(plan, no_chunks, tokens, accepted, drafts)
        plan = _next_in_loop(plan, first)


def _next_in_loop(plan: StepPlan, first: StepPlan) -> StepPlan:
    """Return the plan of a loop's next step, after the results of ``plan`` were applied.

    Args:
        plan: The step before.
        first: The loop's first one, whose draft lengths all steps aim at.
    """
    entries = tuple(
        PlanEntry(
            before.request,
            before.row_class,
            before.known,
            before.request.draft_token_ids,
            sampled=True,
            new_drafts=max(
                0,
                min(wanted.new_drafts, before.request.most_rows - before.request.computed - 2),
            ),
            start=before.request.computed,
        )
        for before, wanted in zip(plan.group_entries, first.group_entries, strict=True)
    )
    pairs = sum(scored_pairs(entry.request.computed, entry.rows) for entry in entries)
    return dataclasses.replace(first, group_entries=entries, pairs=pairs)
