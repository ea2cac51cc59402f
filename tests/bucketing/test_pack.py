import numpy as np
import pytest

from bucketing.grid import Cell
from bucketing.pack import (
    Chunk,
    Group,
    PackError,
    PageUpdate,
    RankRows,
    SlotReset,
    SlotSettings,
    pack,
)
from bucketing.step_inputs import Limits, neutral_inputs

LIMITS = Limits(max_num_seqs=4, pages_per_seq=3, page_size=4, stop_ids=3)
SETTINGS = SlotSettings(0.5, 7, 0.9, 0.25, (3 << 32) + 5, 9, (11, 12))


def chunk(slot, tokens, following, sampled=False) -> Chunk:
    return Chunk(slot, np.array(tokens, np.int32), np.array(following, np.int32), sampled)


def test_pack_lays_chunks_one_after_another():
    rows = RankRows(chunks=[chunk(2, [5, 6, 7], [6, 7, 8]), chunk(0, [9, 4], [4, 0], True)])
    inputs = pack(Cell(8, 0, 1), LIMITS, [rows])
    assert inputs.prefill_tokens.tolist() == [[5, 6, 7, 9, 4, 0, 0, 0]]
    assert inputs.prefill_next.tolist() == [[6, 7, 8, 4, 0, 0, 0, 0]]
    assert inputs.chunk_start.tolist() == [[0, 3, 5, 5, 5]]
    assert inputs.chunk_slot.tolist() == [[2, 0, 4, 4]]
    assert inputs.chunk_sampled.tolist() == [[False, True, False, False]]


def test_pack_places_decodes_and_rests_in_groups():
    rest = np.array([5, 6], np.int32), np.array([6, 0], np.int32)
    rows = RankRows(
        groups=[
            Group(3, True, 1, 2, None, None, True),
            Group(1, False, 2, 0, *rest, True),
        ]
    )
    inputs = pack(Cell(0, 3, 3), LIMITS, [rows])
    assert inputs.group_slot.tolist() == [[3, 1, 4]]
    assert inputs.group_decodes.tolist() == [[True, False, False]]
    assert inputs.group_known.tolist() == [[1, 2, 0]]
    assert inputs.group_drafts.tolist() == [[2, 0, 0]]
    assert inputs.group_tokens.tolist() == [[[0, 0, 0], [5, 6, 0], [0, 0, 0]]]
    assert inputs.group_next.tolist() == [[[0, 0, 0], [6, 0, 0], [0, 0, 0]]]
    assert inputs.group_sampled.tolist() == [[True, True, False]]


def test_pack_writes_resets():
    rows = RankRows(resets=[SlotReset(1, (7, 8), 6, SETTINGS)])
    inputs = pack(Cell(0, 1, 1), LIMITS, [rows])
    assert inputs.reset_slot.tolist() == [[1, 5, 5, 5]]
    assert inputs.reset_pages.tolist() == [[[7, 8, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]]
    assert inputs.reset_computed.tolist() == [[6, 0, 0, 0]]
    assert inputs.reset_temperature.tolist() == [[0.5, 0, 0, 0]]
    assert inputs.reset_top_k.tolist() == [[7, 0, 0, 0]]
    np.testing.assert_array_equal(inputs.reset_top_p, np.float32([[0.9, 1, 1, 1]]))
    assert inputs.reset_min_p.tolist() == [[0.25, 0, 0, 0]]
    assert inputs.reset_seed.tolist() == [[[5, 3], [0, 0], [0, 0], [0, 0]]]
    assert inputs.reset_min_length.tolist() == [[9, 0, 0, 0]]
    assert inputs.reset_stop_ids[0, 0].tolist() == [11, 12, 2**31 - 1]
    assert (inputs.reset_stop_ids[0, 1:] == 2**31 - 1).all()


def test_pack_writes_page_updates():
    rows = RankRows(pages=[PageUpdate(2, 1, 9), PageUpdate(0, 2, 3)])
    inputs = pack(Cell(0, 1, 1), LIMITS, [rows])
    assert inputs.page_slot.tolist() == [[2, 0]]
    assert inputs.page_index.tolist() == [[1, 2]]
    assert inputs.page_value.tolist() == [[9, 3]]


def test_pack_keeps_neutral_arrays_where_nothing_is_said():
    cell = Cell(8, 2, 1)
    neutral = neutral_inputs(cell, LIMITS, 1)
    inputs = pack(cell, LIMITS, [RankRows(groups=[Group(0, True, 1, 0, None, None, True)])])
    changed = {
        name for name, a, b in zip(inputs._fields, inputs, neutral, strict=True) if a is not b
    }
    names = {"slot", "decodes", "known", "drafts", "sampled", "new_drafts"}
    assert changed == {f"group_{name}" for name in names}


def test_pack_fills_every_rank_on_its_own():
    rows = [
        RankRows(chunks=[chunk(0, [1], [2])], pages=[PageUpdate(0, 0, 1)]),
        RankRows(chunks=[chunk(1, [3, 4], [4, 5]), chunk(2, [6], [0], True)]),
        RankRows(groups=[Group(3, True, 1, 0, None, None, True)]),
    ]
    inputs = pack(Cell(4, 1, 1), LIMITS, rows)
    assert inputs.prefill_tokens.tolist() == [[1, 0, 0, 0], [3, 4, 6, 0], [0, 0, 0, 0]]
    assert inputs.chunk_start[:, :3].tolist() == [[0, 1, 1], [0, 2, 3], [0, 0, 0]]
    assert inputs.chunk_slot[:, :2].tolist() == [[0, 4], [1, 2], [4, 4]]
    assert inputs.group_slot.tolist() == [[4], [4], [3]]
    assert inputs.page_slot[:, 0].tolist() == [0, 5, 5]


def test_pack_holds_a_full_cell():
    rows = RankRows(
        chunks=[chunk(0, [1] * 5, [1] * 5), chunk(1, [2] * 3, [2] * 3)],
        groups=[Group(2, True, 1, 0, None, None, True), Group(3, True, 1, 0, None, None, True)],
    )
    inputs = pack(Cell(8, 2, 1), LIMITS, [rows])
    assert inputs.prefill_tokens.tolist() == [[1, 1, 1, 1, 1, 2, 2, 2]]
    assert inputs.chunk_start.tolist() == [[0, 5, 8, 8, 8]]
    assert inputs.group_slot.tolist() == [[2, 3]]


DECODE = Group(0, True, 1, 0, None, None, True)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (RankRows(chunks=[chunk(0, [1] * 9, [1] * 9)]), "9 prefill rows do not fit"),
        (RankRows(chunks=[chunk(0, [1], [1])] * 5), "5 chunks do not fit"),
        (RankRows(groups=[DECODE] * 2), "2 groups do not fit"),
        (RankRows(resets=[SlotReset(0, (), 0, SETTINGS)] * 5), "5 slot resets do not fit"),
        (RankRows(pages=[PageUpdate(0, 0, 1)] * 13), "13 page updates do not fit"),
        (RankRows(groups=[DECODE._replace(drafts=1)]), "1 known tokens and 1 drafts"),
        (RankRows(groups=[DECODE._replace(known=0)]), "0 known tokens"),
        (RankRows(resets=[SlotReset(0, (1,) * 4, 0, SETTINGS)]), "a page table of 4 pages"),
        (
            RankRows(resets=[SlotReset(0, (), 0, SETTINGS._replace(stop_ids=(1,) * 4))]),
            "4 stop ids do not fit",
        ),
    ],
)
def test_pack_refuses_what_does_not_fit(rows, message):
    with pytest.raises(PackError, match=message):
        pack(Cell(8, 1, 1), LIMITS, [rows])
