"""Catalogue D1: requests taken for what they look like, and shapes that nobody compiled."""

from functools import partial
from itertools import product
from random import Random

import jax
import numpy as np
import pytest
from catalogue.crowd import Crowd, classes, entries, watch
from engine.fake_executor import Story
from engine.harness import prompt_of

from bucketing.cell import Cell
from bucketing.step_inputs import Limits, StepInputs, input_shapes
from glm_jax.engine.request import RowClass
from glm_jax.model.rows import build_rows
from glm_jax.model.slots import slot_shapes

DECODE, PREFILL = RowClass.DECODE, RowClass.PREFILL


@pytest.mark.parametrize("drafts", range(1, 6))
def test_a_prompt_as_long_as_a_verify_group_is_not_decoded(drafts):
    """1: a prompt, or its last chunk, of k + 1 tokens has the shape of a decode."""
    for length in range(1, drafts + 3):
        alone = Crowd(num_speculative_tokens=drafts)
        alone.ask("prompt", length)
        assert alone.schedule_and_run().kind == "prefill"
        alone.end()
        for first_chunk in (0, 8):
            crowd = Crowd(num_speculative_tokens=drafts, max_num_batched_tokens=8)
            crowd.decode("a", "b")
            crowd.ask("prompt", first_chunk + length)
            if first_chunk:
                assert entries(crowd.schedule_and_run())["prompt"].known == first_chunk
            plan = crowd.schedule_and_run()
            assert classes(plan) == {"a": DECODE, "b": DECODE, "prompt": PREFILL}
            assert plan.kind == "mixed"
            assert [entries(plan)[name].drafts for name in "ab"] == [drafts] * 2
            crowd.end()


@pytest.mark.parametrize("bucket", [2, 4, 8])
def test_no_verify_group_is_split_where_the_bucket_is_not_full(bucket):
    """2: a bucket of rows that is no multiple of k + 1 cuts the last request short."""
    names = "abcdefg"[: bucket - 1]
    crowd = Crowd(num_speculative_tokens=2, max_num_seqs=8, group_buckets=(2, 4, 8))
    crowd.decode(*names, length=2)
    plan = crowd.schedule_and_run()
    assert plan.cell == Cell(0, bucket, 3)
    assert [(entry.request_id, entry.rows) for entry in plan.group_entries] == [
        (name, 3) for name in names
    ]
    crowd.end()


def test_a_tail_of_one_token_turns_no_verify_group_into_a_prefill():
    """3: sorted by rows the tail comes first, and everything behind the first prefill is one."""
    crowd = Crowd(max_num_seqs=5, max_num_batched_tokens=8)
    crowd.decode(*"abcd", max_tokens=30)
    crowd.ask("long", 9)
    assert entries(crowd.schedule_and_run())["long"].known == 8
    plan = crowd.schedule_and_run()
    assert classes(plan) == {"long": PREFILL, **dict.fromkeys("abcd", DECODE)}
    assert {name: entry.rows for name, entry in entries(plan).items() if name != "long"} == (
        dict.fromkeys("abcd", 4)
    )
    crowd.end()


@pytest.mark.parametrize("drafts", range(1, 6))
def test_a_tail_of_one_token_shares_a_step_with_and_without_drafts(drafts):
    """4: an assertion that plain decodes and verify groups never meet."""
    crowd = Crowd(num_speculative_tokens=drafts, max_num_batched_tokens=8)
    crowd.decode("drafts", max_tokens=30)
    # Its last token but one: nothing is left to draft.
    crowd.ask("plain", 2, max_tokens=2)
    crowd.schedule_and_run()
    crowd.ask("tail", 1)
    plan = crowd.schedule_and_run()
    assert classes(plan) == {"drafts": DECODE, "plain": DECODE, "tail": PREFILL}
    rows = {name: (entry.known, entry.drafts) for name, entry in entries(plan).items()}
    assert rows == {"drafts": (1, drafts), "plain": (1, 0), "tail": (1, 0)}
    crowd.end()


@pytest.mark.parametrize("budget", [317, 1000])
def test_a_full_step_has_a_bucket_whatever_the_budget(budget):
    """5: a budget between two buckets makes full steps of a shape that nobody compiled."""
    crowd = Crowd(
        max_num_batched_tokens=budget,
        prefill_buckets=(64, 256, 1024, 4096),
        max_model_len=2200,
        page_size=16,
        num_speculative_tokens=0,
    )
    crowd.ask("long", 2 * budget + 5, max_tokens=2)
    crowd.ask("short", 9, max_tokens=4)
    crowd.end()
    assert [plan.prefill_rows for plan in crowd.plans][:2] == [budget] * 2
    assert {plan.cell for plan in crowd.plans[:2]} == {Cell(budget, 0, 1)}
    assert set(crowd.shapes) <= crowd.cells
    assert all(len(lines) == 1 for lines in crowd.shapes.values())


@pytest.mark.parametrize("length", [65, 66, 100, 130])
def test_the_first_token_of_a_full_chunk_is_right_just_above_a_power_of_two(length):
    """6: chunks padded far beyond the budget; the first token was wrong for 90 % of requests."""
    crowd = Crowd(
        max_num_batched_tokens=65, prefill_buckets=(16, 32, 64, 128, 256), max_model_len=256
    )
    assert crowd.grid.prefill.largest == max(cell.prefill for cell in crowd.cells) == 65
    crowd.ask("long", length, max_tokens=1)
    crowd.end()
    assert max(plan.prefill_rows for plan in crowd.plans) == 65


def test_how_many_prompts_end_in_a_step_changes_no_shape():
    """7: a head without a bucket of its own is compiled for every number of requests."""
    crowd = Crowd(prefill_buckets=(16,), num_speculative_tokens=0)
    ended = set()
    for count in range(5):
        for number in range(count):
            crowd.ask(f"short {count} {number}", 3, max_tokens=1)
        crowd.ask(f"long {count}", 30, max_tokens=1)
        plan = crowd.schedule_and_run()
        assert plan.cell == Cell(16, 0, 1)
        ended.add(sum(entry.sampled for entry in plan.chunk_entries))
        crowd.end()
    assert ended == {0, 1, 2, 3, 4}
    assert len(crowd.shapes[Cell(16, 0, 1)]) == 1


# Everything that a request may ask of the steps that serve it.
FEATURES = {
    "nothing": {},
    "a seed": {"seed": 2**63, "temperature": 0.7, "top_k": 4, "top_p": 0.5, "min_p": 0.1},
    "min_tokens": {"min_tokens": 3, "stop_token_ids": [1, 2, 3]},
    "logprobs": {"logprobs": 3},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "penalties": {"frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "a bias": {"logit_bias": {5: 2.0}},
}


@pytest.mark.parametrize("drafts", [0, 3, "auto"])
def test_the_first_use_of_a_feature_changes_no_shape(drafts):
    """8: None in place of an array is another program; a 30 s pause at the first cache hit."""
    story = Story(num_speculative_tokens=drafts)
    shapes = watch(story.executor.device, [])
    # The first page of all but one is found in the cache.
    prompts = [prompt_of(Random(8), 5 + number) for number in range(2 * len(FEATURES))]
    for number, asked in enumerate(FEATURES.values()):
        story.add(f"{number}", prompts[number], max_tokens=6, **asked)
        story.step()
        # A mixed step with a rest, and one that is aborted.
        story.add(f"beside {number}", prompts[-1], max_tokens=3)
        story.step()
        story.add(f"aborted {number}", prompts[-2])
        story.step()
        story.engine.abort(f"aborted {number}")
    story.finish()
    assert not any(record.fault for record in story.records)
    assert story.engine.scheduler.prefix.counts.hit_tokens
    limits = story.config.limits()
    for cell, lines in shapes.items():
        specs = [(np.ndarray, spec.shape, spec.dtype) for spec in input_shapes(cell, limits)]
        assert lines == {tuple(specs)}


def test_a_feature_that_comes_and_goes_changes_no_shape():
    """9: an option that turns into None or into a static value is traced anew."""
    story = Story(num_speculative_tokens=3, max_num_batched_tokens=16, group_buckets=(4,))
    packed = []
    shapes = watch(story.executor.device, packed)
    for turn in range(2 ** len(FEATURES) // 4):
        asked = {"max_tokens": 4}
        for number, feature in enumerate(FEATURES.values()):
            asked |= feature if turn >> number & 1 else {}
        story.engine.scheduler.drafting.policy.most_drafts = 3 * (turn % 3 > 0)
        story.add(f"{turn}", prompt_of(Random(turn), 5), **asked)
        story.finish()
    assert not any(record.fault for record in story.records)
    assert {bool(inputs.drafter[0]) for inputs in packed} == {False, True}
    assert all(len(lines) == 1 for lines in shapes.values())


LIMITS = Limits(max_num_seqs=4, pages_per_seq=3, page_size=8, num_drafts=5)
CELLS = [
    Cell(prefill, groups, width)
    for prefill, groups, width in product((0, 16, 64), (0, 1, 4), (1, 6))
    if prefill + groups
]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_every_array_of_the_sparse_path_has_the_padded_row_count(cell):
    """13: queries padded to the bucket, the block table not."""
    specs = (
        jax.ShapeDtypeStruct(spec.shape[1:], spec.dtype) for spec in input_shapes(cell, LIMITS)
    )
    build = partial(build_rows, page_size=8, pool_entries=80, tile_rows=8)
    rows = jax.eval_shape(build, slot_shapes(LIMITS), StepInputs(*specs))
    for array in (rows.tokens, rows.positions, rows.valid, rows.entries, rows.slots):
        assert array.shape == (cell.rows,)
    assert rows.group_positions.shape == (cell.groups, cell.width)
    assert rows.group_page_table.shape == (cell.groups, 3)
    tiles = rows.tiles.rows.shape[0]
    assert rows.tiles.positions.shape == rows.tiles.rows.shape
    assert rows.tiles.page_table.shape == (tiles, 3)
    assert tiles == (cell.prefill // 8 + LIMITS.chunks(cell) if cell.prefill else 0)


@pytest.mark.parametrize("beyond", [1, 2, 3, 4])
@pytest.mark.parametrize("writes_ahead", [False, True])
def test_decodes_run_to_a_model_length_that_is_no_multiple_of_the_page(beyond, writes_ahead):
    """14: a page table one entry short crashed concurrent decodes near max_model_len."""
    most = 7 * 4 + beyond
    crowd = Crowd(max_model_len=most, writes_ahead=writes_ahead)
    for name in "abcd":
        crowd.ask(name, 9, max_tokens=None)
    crowd.end()
    assert {request.length for request in crowd.requests.values()} == {most}
