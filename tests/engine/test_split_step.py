"""A step run as two halves gives the tokens of the whole step, or is not split."""

from random import Random

import numpy as np
import pytest
from engine.fake_program import FakeDevice
from engine.harness import Loop, prompt_of
from engine.random_schedule import add_random, random_options

from bucketing.pack import Chunk, RankRows, SlotReset, pack
from glm_jax.engine.chunking import scored_pairs
from glm_jax.engine.config import EngineConfig
from glm_jax.engine.plan import PlanEntry, StepPlan
from glm_jax.engine.request import Request, RowClass
from glm_jax.engine.split_step import SHARED_PAGES, split_step
from glm_jax.sampling.params import SamplingParams

CONFIG = EngineConfig(
    max_model_len=32,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    page_size=4,
    prefill_buckets=(4, 8),
    group_buckets=(1, 2),
)
PROMPT = prompt_of(Random(8), 12)


class SplitLoop(Loop):
    """A loop that runs every step as two halves where it may; ``splits`` counts them."""

    splits = 0

    def run(self, plan):
        parts = split_step(plan, self.grid, self.scheduler.limits).plans
        self.splits += len(parts) - 1
        if len(parts) == 1:
            return super().run(plan)
        self.prepare(plan)
        outputs = []
        for part in parts:
            inputs = pack(part.cell, self.scheduler.limits, part.rows)
            outputs.append((part, self.device.program(part.cell)(inputs)[:4]))
        return outputs

    def commit(self, plan, outputs):
        if not isinstance(outputs, list):
            return super().commit(plan, outputs)
        updates = self.scheduler.commit_parts(plan, outputs)
        for update in updates:
            self.outputs[update.request_id] += update.new_token_ids
        self.check_state()
        return updates


def test_halves_give_the_tokens_of_whole_steps():
    splits = 0
    for seed in range(100):
        rng = Random(f"split {seed}")
        options = random_options(Random(seed // 20)) | {"decode_loop_steps": 0}
        loop = SplitLoop(**options)
        for n in range(rng.randint(2, 5)):
            add_random(loop, rng, f"r{n}")
            if rng.random() < 0.5:
                loop.step()
        loop.finish()
        for name in loop.requests:
            loop.check_tokens(name)
        loop.check_idle()
        splits += loop.splits
    assert splits > 100


def plan_of(*, reader_pages, reader_computed) -> StepPlan:
    """A reader, then a writer of pages 1 to 3, both prefilling."""
    reader = Request("reader", [*PROMPT[:reader_computed], 5, 6], SamplingParams(seed=1))
    writer = Request("writer", PROMPT, SamplingParams(seed=2))
    chunks, entries, resets = [], [], []
    for slot, (request, pages) in enumerate(((reader, reader_pages), (writer, [1, 2, 3]))):
        request.slot, request.pages = slot, pages
        request.computed = reader_computed if request is reader else 0
        rows = request.length - request.computed
        chunks.append(Chunk(slot, *request.rows(rows), True))
        entries.append(PlanEntry(request, RowClass.PREFILL, rows, (), True))
        resets.append(SlotReset(slot, pages, request.computed, request.settings()))
    pairs = sum(scored_pairs(entry.request.computed, entry.rows) for entry in entries)
    cell = CONFIG.grid().cell_for(14, 2, 0)
    return StepPlan(cell, (RankRows(chunks, (), resets),), tuple(entries), (), pairs)


def split(plan):
    return split_step(plan, CONFIG.grid(), CONFIG.limits())


def run(plans) -> list[int]:
    """The tokens that the plans draw, in the order of their entries."""
    device = FakeDevice(CONFIG.limits(), 20)
    drawn = []
    for plan in plans:
        outputs = device.program(plan.cell)(pack(plan.cell, CONFIG.limits(), plan.rows))
        drawn += outputs.chunk_tokens[0, : len(plan.chunk_entries)].tolist()
    return drawn


def test_a_step_whose_reader_begins_with_pages_written_in_it_stays_whole():
    plan = plan_of(reader_pages=[1, 2, 4], reader_computed=8)
    halves = split(plan)
    assert (halves.plans, halves.reason) == ((plan,), SHARED_PAGES)
    # In one program the writes come first, so the reader finds them.
    alone = plan_of(reader_pages=[1, 2, 4], reader_computed=8).entries[0].request
    device = FakeDevice(CONFIG.limits(), 20)
    expected = run([plan])
    device.run(plan.cell, pack(plan.cell, CONFIG.limits(), plan.rows))
    history = [device.tokens[page * 4 + offset] for page in (1, 2, 4) for offset in range(4)]
    assert history[:10] == alone.prompt_token_ids
    assert min(expected) >= 0


def test_without_the_veto_the_reader_reads_stale_entries(monkeypatch):
    monkeypatch.setattr("glm_jax.engine.split_step._reads_what_is_written", lambda *_: False)
    halves = split(plan_of(reader_pages=[1, 2, 4], reader_computed=8))
    with pytest.raises(AssertionError, match="reads a stale entry"):
        run(halves.plans)


@pytest.mark.parametrize(("pages", "computed"), [([5, 6, 4], 8), ([4, 5, 6], 3)])
def test_only_pages_that_are_read_and_written_keep_a_step_whole(pages, computed):
    plan = plan_of(reader_pages=pages, reader_computed=computed)
    halves = split(plan)
    assert (len(halves.plans), halves.reason) == (2, "")
    assert [part.request_ids for part in halves.plans] == [("reader",), ("writer",)]
    assert sum(part.pairs for part in halves.plans) == plan.pairs
    assert sum(part.useful_rows for part in halves.plans) == plan.useful_rows


def test_a_request_that_goes_on_in_a_page_it_half_filled_reads_only_its_own():
    plan = plan_of(reader_pages=[7, 8, 9], reader_computed=6)
    assert split(plan).reason == ""


def test_one_request_is_not_split():
    loop = Loop(max_model_len=32, page_size=4, num_pages=9)
    loop.add("only", PROMPT, max_tokens=2)
    assert split_step(loop.schedule(), loop.grid, loop.scheduler.limits).reason == "one request"


def test_halves_have_about_as_many_rows():
    loop = Loop(max_model_len=64, page_size=4, max_num_batched_tokens=64, max_num_seqs=8)
    for n, length in enumerate((20, 6, 5, 4, 3)):
        loop.add(f"r{n}", prompt_of(Random(n), length), max_tokens=2)
    plan = loop.schedule()
    first, second = split_step(plan, loop.grid, loop.scheduler.limits).plans
    assert (first.useful_rows, second.useful_rows) == (20, 15)
    assert np.isin([*first.request_ids, *second.request_ids], plan.request_ids).all()
