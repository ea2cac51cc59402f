"""Whatever is cut to fit a bucket, a prompt's end waits at most one step for it."""

from random import Random

import numpy as np
import pytest

from bucketing.step_time import RowEquivalents, StepTimeModel
from glm_jax.engine.config import EngineConfig
from glm_jax.engine.pages import PagePool
from glm_jax.engine.request import Request
from glm_jax.engine.scheduler import Scheduler
from glm_jax.sampling.params import SamplingParams


class FreeSteps(RowEquivalents):
    """Beside decodes another step costs nothing: cuts pay whenever they save a pad."""

    def predict(self, cell, pairs):
        return 1.0 + cell.prefill * 1e-6


class FreeRows(RowEquivalents):
    """A step with prefill rows costs the same for any number of them: cuts never pay."""

    def predict(self, cell, pairs):
        return 1.0 + bool(cell.prefill)


def scheduler_of(rng, step_time, **options) -> Scheduler:
    budget = rng.choice([32, 100, 317])
    config = EngineConfig(
        max_model_len=2 * budget,
        max_num_seqs=64,
        max_num_batched_tokens=budget,
        page_size=4,
        prefill_buckets=sorted(rng.sample(range(4, budget), 3)),
        group_buckets=(4, 16),
        decode_widths=rng.choice([(1,), (1, 6)]),
        max_num_partial_prefills=64,
        # All prompts are alike.
        enable_prefix_caching=False,
        **options,
    )
    pool = PagePool(config.pool_pages, config.page_size)
    return Scheduler(config, config.grid(), pool, step_time)


def commit(scheduler, plan) -> None:
    cell = plan.cell
    chunks = np.ones((1, scheduler.limits.chunks(cell)), np.int32)
    groups = np.ones((1, cell.groups, cell.width), np.int32)
    scheduler.commit(plan, chunks, groups, np.zeros((1, cell.groups), np.int32))


def wanted_ends(scheduler) -> list[str]:
    """Prompts that could all end in the next step: in order, within budget and chunks."""
    left = scheduler.grid.prefill.largest
    names = []
    for request in [*scheduler.running, *scheduler.waiting]:
        if request.decoding:
            continue
        left -= request.prefill_end - request.computed
        if left < 0:
            break
        names.append(request.request_id)
    return names[: scheduler.grid.max_chunks]


@pytest.mark.parametrize("step_time", [RowEquivalents(), FreeSteps(), StepTimeModel()])
@pytest.mark.parametrize("seed", range(25))
def test_an_end_waits_at_most_one_step(step_time, seed):
    rng = Random(seed)
    scheduler = scheduler_of(rng, step_time)
    waited: dict[str, int] = {}
    for n in range(60):
        if n < 40 and rng.random() < 0.7:
            length = rng.randint(1, scheduler.grid.prefill.largest)
            params = SamplingParams(max_tokens=rng.randint(1, 9), ignore_eos=True)
            scheduler.add(Request(f"r{n}", [1] * length, params))
        ends = wanted_ends(scheduler)
        plan = scheduler.schedule()
        if plan is None:
            continue
        ended = {entry.request_id for entry in plan.entries if entry.sampled}
        # Ends may also wait for a chunk of a smaller bucket than the largest; few enough never do.
        for name in ends[:4]:
            if name not in ended:
                waited[name] = waited.get(name, 0) + 1
        commit(scheduler, plan)
    assert max(waited.values(), default=0) <= 1


def test_cuts_save_pads_where_rows_cost_and_steps_do_not():
    pads = []
    for step_time in (FreeSteps(), FreeRows()):
        rng, scheduler = Random(4), scheduler_of(Random(3), step_time)
        scheduler.add(Request("decode", [1], SamplingParams(max_tokens=200, ignore_eos=True)))
        pads.append(0)
        for n in range(60):
            length = rng.randint(1, scheduler.grid.prefill.largest)
            scheduler.add(Request(f"r{n}", [1] * length, SamplingParams(max_tokens=1)))
            plan = scheduler.schedule()
            pads[-1] += plan.prefill_pad_rows
            commit(scheduler, plan)
    assert pads[0] < 0.7 * pads[1]


@pytest.mark.parametrize("most", [0.2, 0.5, 1.0])
def test_a_step_keeps_to_its_time_and_prompts_end(most):
    rng = Random(7)
    scheduler = scheduler_of(rng, RowEquivalents(), max_step_ms=most)
    floor = scheduler.grid.prefill.smallest
    for n in range(12):
        length = rng.randint(1, scheduler.config.max_model_len - 5)
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        scheduler.add(Request(f"r{n}", [1] * length, params))
    steps = 0
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        seconds = scheduler.step_time.predict(plan.cell, plan.pairs)
        assert seconds <= most / 1e3 or plan.prefill_rows <= floor
        commit(scheduler, plan)
        steps += 1
        assert steps < 2000
