import numpy as np

from bucketing.grid import Cell
from bucketing.step_inputs import Limits, StepInputs, input_shapes, neutral_inputs

LIMITS = Limits(max_num_seqs=8, pages_per_seq=5, page_size=64, stop_ids=16)


def test_limits_of_a_cell():
    cell = Cell(512, 8, 1)
    assert (LIMITS.pad_slot, LIMITS.dropped_slot) == (8, 9)
    assert (LIMITS.chunks(cell), LIMITS.resets(cell)) == (8, 8)
    assert LIMITS.page_updates(cell) == 512 // 64 + 2 * (8 + 8)
    assert LIMITS.resets(Cell(0, 8, 1)) == 4
    assert LIMITS._replace(max_num_seqs=2).resets(Cell(0, 2, 1)) == 2


def test_a_group_wider_than_a_page_has_room_for_its_pages():
    limits = Limits(max_num_seqs=2, pages_per_seq=9, page_size=2)
    # Five rows reach into at most three new pages.
    assert limits.page_updates(Cell(0, 1, 5)) >= 3


def test_input_shapes_of_a_cell():
    shapes = input_shapes(Cell(64, 2, 3), LIMITS, ranks=2)
    assert {name: spec.shape for name, spec in shapes._asdict().items()} == {
        "prefill_tokens": (2, 64),
        "prefill_next": (2, 64),
        "chunk_start": (2, 5),
        "chunk_slot": (2, 4),
        "chunk_sampled": (2, 4),
        "chunk_new_drafts": (2, 4),
        "group_slot": (2, 2),
        "group_decodes": (2, 2),
        "group_known": (2, 2),
        "group_drafts": (2, 2),
        "group_tokens": (2, 2, 3),
        "group_next": (2, 2, 3),
        "group_sampled": (2, 2),
        "group_new_drafts": (2, 2),
        "drafter": (2,),
        "reset_slot": (2, 4),
        "reset_pages": (2, 4, 5),
        "reset_computed": (2, 4),
        "reset_temperature": (2, 4),
        "reset_top_k": (2, 4),
        "reset_top_p": (2, 4),
        "reset_min_p": (2, 4),
        "reset_seed": (2, 4, 2),
        "reset_min_length": (2, 4),
        "reset_stop_ids": (2, 4, 16),
        "page_slot": (2, 13),
        "page_index": (2, 13),
        "page_value": (2, 13),
    }
    other = {name: spec.dtype for name, spec in shapes._asdict().items() if spec.dtype != "int32"}
    assert other == {
        "chunk_sampled": np.bool_,
        "drafter": np.bool_,
        "group_decodes": np.bool_,
        "group_sampled": np.bool_,
        "reset_temperature": np.float32,
        "reset_top_p": np.float32,
        "reset_min_p": np.float32,
        "reset_seed": np.uint32,
    }


def test_neutral_inputs_name_the_pad_slot_and_drop_every_update():
    neutral = neutral_inputs(Cell(64, 2, 1), LIMITS, 1)
    nonzero = {
        name: set(np.unique(array).tolist())
        for name, array in neutral._asdict().items()
        if array.any()
    }
    assert nonzero == {
        "chunk_slot": {8},
        "group_slot": {8},
        "reset_slot": {9},
        "reset_top_p": {1.0},
        "reset_stop_ids": {2**31 - 1},
        "page_slot": {9},
    }


def test_neutral_inputs_have_the_shapes_and_cannot_be_written():
    cell = Cell(64, 0, 1)
    neutral = neutral_inputs(cell, LIMITS, 1)
    assert isinstance(neutral, StepInputs)
    for array, spec in zip(neutral, input_shapes(cell, LIMITS, 1), strict=True):
        assert (array.shape, array.dtype) == (spec.shape, spec.dtype)
        assert not array.flags.writeable
    assert neutral_inputs(cell, LIMITS, 1) is neutral
