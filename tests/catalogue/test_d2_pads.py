"""Catalogue D2: what stands in pad rows and in memory that nobody owns."""

from random import Random

import numpy as np
import pytest
from catalogue.crowd import Crowd, entries

from bucketing.cell import Cell
from bucketing.pack import Chunk, Group, RankRows, SlotReset, SlotSettings, pack
from glm_jax.engine.modes import full
from scripts.fuzz_schedules import draw_asked, draw_schedule, run_schedule

GREEDY = SlotSettings(0.0, 0, 1.0, 0.0, 0, 0, ())
STEPS = 100


def test_pad_rows_compute_finite_numbers(tiny_llm):
    """15: a softmax over nothing, or an output that nobody wrote: NaN everywhere."""
    runner = tiny_llm.runner
    runner.reset()

    def step(cell, **rows):
        outputs = runner.run(full(cell), pack(cell, runner.limits, [RankRows(**rows)]))
        assert np.isfinite(np.asarray(outputs.hidden)).all(), cell

    tokens = np.arange(1, 21, dtype=np.int32)
    chunk = Chunk(0, tokens, np.append(tokens[1:], 0).astype(np.int32), True, 5)
    step(
        Cell(64, 0, 1), chunks=[chunk], resets=[SlotReset(0, [1, 2, 3, 4], 0, GREEDY)], drafter=True
    )
    group = Group(0, True, 1, 0, None, None, True, 5)
    for cell in tiny_llm.config.grid().cells():
        if cell.groups:
            # One request alone in four groups, then nobody.
            step(cell, groups=[group], drafter=True)
            step(cell)
    runner.reset()


def test_the_reserved_page_keeps_its_bits_over_100_random_steps(tiny_llm):
    """18: pads that write the reserved page, which masked tiles read: 0 * NaN."""
    rng, steps, number = Random(18), 0, 0
    while steps < STEPS:
        block = [draw_asked(rng, tiny_llm) for _ in range(6)]
        steps += len(run_schedule(tiny_llm, block, draw_schedule(rng, tiny_llm, block)).steps)
        number += 1
        for array in tiny_llm.runner.snapshot():
            assert not array[:, :, 0].view(np.uint32).any(), number
    assert number > 1


@pytest.mark.parametrize("live", [1, 2, 3])
def test_a_step_with_drafts_answers_its_live_requests_only(live):
    """20: a sampler that reads padded results hands out tokens that nobody drew."""
    names = "abc"[:live]
    crowd = Crowd(group_buckets=(4,))
    crowd.decode(*names, max_tokens=20)
    while not crowd.requests["a"].finished:
        plan = crowd.schedule()
        assert plan.cell.groups == 4
        counts = {name: entry.rows for name, entry in entries(plan).items()}
        updates = crowd.commit(plan, crowd.run(plan))
        assert {one.request_id for one in updates} == set(counts)
        for one in updates:
            assert 1 <= len(one.new_token_ids) <= counts[one.request_id]
            assert one.accepted <= counts[one.request_id] - 1
    crowd.end()
