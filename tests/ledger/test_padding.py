"""Whole blocks: what a program computes for a step, counted by hand and in a compiled program."""

from collections.abc import Callable

import numpy as np
import pytest

from bucketing.cell import Cell
from glm_jax.engine.lowering import Lowering
from glm_jax.ledger.ledger import FULL, LAYER, SPARSE, STEP
from glm_jax.ledger.padding import Blocks, program_passes
from glm_jax.ledger.shape import ChunkShape, GroupShape, StepShape
from glm_jax.model.presets import PRESETS
from scripts.check_ledger import ALLOWED, compare, zero_router_params

TINY = PRESETS["tiny-random"]


def never(first: int, last: int) -> bool:
    return False


def blocks(expands: Callable[[int, int], bool] = never) -> Blocks:
    return Blocks(
        tile_rows=16,
        score_keys=8,
        attend_rows=4,
        expand_keys=8,
        expert_rows=(8, 64),
        selected=16,
        expands=expands,
    )


def passes_of(cell, expands=never, shares=None, drafts=0, **rows):
    shape = StepShape(cell=cell, new_drafts=drafts, max_num_seqs=8, **rows)
    return program_passes(TINY, shape, blocks(expands), shares)


def test_groups_are_scored_together_as_far_as_the_longest_reaches():
    groups = (GroupShape(40), GroupShape(17))
    segment = passes_of(Cell(0, 4, 2), groups=groups).target.groups
    assert segment.scored == 4 * 2 * 40
    assert segment.attended == 4 * 16  # rows 0 and 2 lie in the first block of four


def test_groups_that_may_see_all_their_keys_are_not_scored():
    assert passes_of(Cell(0, 4, 1), groups=(GroupShape(16),)).target.groups.scored == 0
    assert passes_of(Cell(0, 4, 1), groups=(GroupShape(17),)).target.groups.scored == 4 * 24


def test_tiles_are_scored_one_by_one_in_whole_blocks():
    chunks = passes_of(Cell(64, 0, 1), chunks=(ChunkShape(40, 4),)).target.chunks
    # Rows 4..19, 20..35, 36..43 see up to 20, 36 and 44 keys.
    assert chunks.scored == 16 * (24 + 40 + 48)
    assert chunks.attended == (16 + 16 + 8) * 16
    assert (chunks.expanded, chunks.masked) == (0, 0)


def test_expanded_tiles_make_each_key_once_and_attend_to_all():
    work = passes_of(
        Cell(64, 4, 1), lambda first, last: True, chunks=(ChunkShape(40, 0),), groups=()
    ).target
    # Tiles end at 16, 32 and 40 keys, whole blocks each.
    assert work.chunks.expanded == 40
    assert work.chunks.masked == 16 * (16 + 32 + 40)
    assert work.chunks.attended == 0
    assert work.up_rows == 4


def test_a_block_that_was_expanded_in_part_is_made_again():
    work = passes_of(Cell(64, 0, 1), lambda first, last: True, chunks=(ChunkShape(20, 3),)).target
    # Tiles end at 19 and 23 keys: 24, then from key 16 on again.
    assert work.chunks.expanded == 24 + 8


def test_experts_get_whole_blocks():
    even = passes_of(Cell(64, 0, 1), chunks=(ChunkShape(20),)).target
    # 64 x 2 / 8 = 16 rows a block; 5 rows for each expert.
    assert (even.assignments, even.hit) == (8 * 16, 8)
    shares = [1.0, 1.0] + [0.0] * 6
    all_same = passes_of(Cell(64, 0, 1), chunks=(ChunkShape(20),), shares=shares).target
    assert (all_same.assignments, all_same.hit) == (2 * 32, 2)


def test_later_passes_have_a_line_for_each_chunk_and_group_of_the_cell():
    found = passes_of(Cell(64, 4, 6), drafts=5, groups=(GroupShape(50, 1, 5),) * 3)
    assert found.first.sampled == found.later.rows == 4 + 4
    assert found.later.groups.attended == 8 * 16
    assert found.later.groups.scored == 0


def test_a_program_is_named_by_a_cell():
    with pytest.raises(ValueError, match="names no cell"):
        program_passes(TINY, StepShape(groups=(GroupShape(5),)), blocks())


def test_products_of_a_compiled_mixed_program_are_the_ledgers(tiny_llm, compile_counter):
    """One program that the suite compiles anyway; ``scripts.check_ledger`` has the larger model."""
    lowering = Lowering(tiny_llm.model_config, tiny_llm.config)
    cell, new_drafts = lowering.engine.widest, lowering.limits.num_drafts
    drafts = min(new_drafts, cell.width - 1)
    shape = StepShape(
        chunks=(ChunkShape(30, 40), ChunkShape(21, 0)),
        groups=(GroupShape(90, 1, drafts), GroupShape(33, 1, drafts)),
        cell=cell,
        new_drafts=new_drafts,
        max_num_seqs=lowering.engine.max_num_seqs,
    )
    params, before = zero_router_params(lowering.model), compile_counter.compiled
    lines = compare(lowering, tiny_llm.runner.programs[cell], params, shape)
    products = {line.key: line for line in lines if line.ledger or line.program}
    assert {
        (LAYER, "sparse MLA, chunks"),
        (LAYER, "sparse MLA, groups"),
        (FULL, "index scores"),
        (SPARSE, "routed experts"),
        (STEP, "head"),
    } < products.keys()
    assert np.max([abs(line.difference) for line in products.values()]) < ALLOWED
    assert compile_counter.compiled == before
    # What is no product of the model is listed apart.
    assert {line.key[1] for line in lines if line.sums} == {"index scores", "top-k"}
    assert sum(line.elementwise for line in lines) > 0
