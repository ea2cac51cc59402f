"""The floors against the table that they are derived from: milliseconds of GLM-5.3 on 8 H200."""

import pytest

from bucketing.cell import Cell
from bucketing.step_time import StepTime
from bucketing.waste import UsefulTime
from glm_jax.simulate.step_time import H200StepTime

MODEL = H200StepTime()
CONTEXT = 131072
DECODE_PAIRS = 32 * 6 * CONTEXT


def milliseconds(prefill, groups, *, prefix=0):
    pairs = prefill * prefix + prefill * prefill // 2 + groups * 6 * CONTEXT
    return 1e3 * MODEL.predict(Cell(prefill, groups, 6), pairs)


def test_it_is_a_step_time_for_cells_and_for_useful_rows():
    assert isinstance(MODEL, StepTime)
    assert isinstance(MODEL, UsefulTime)
    assert MODEL.predict(Cell(64, 8, 6), 1000) == pytest.approx(MODEL.useful(64, 48, 8, 1000))


@pytest.mark.parametrize(
    ("prefill", "groups", "expected"),
    [(0, 32, 28.5), (8192, 0, 97.1), (8192, 32, 101.2), (2048, 32, 40.2), (512, 32, 30.9)],
)
def test_floors_are_those_of_the_table(prefill, groups, expected):
    # Up to 9 % above it: here every row attends index_topk keys, there only those it can see.
    assert expected * 0.99 < milliseconds(prefill, groups) < expected * 1.09


@pytest.mark.parametrize(
    ("prefill", "groups", "expected"),
    [(0, 32, 28.51), (8192, 0, 97.05), (8192, 32, 101.21), (2048, 32, 40.15), (512, 32, 30.85)],
)
def test_without_any_waste_floors_are_exactly_those_of_the_table(prefill, groups, expected):
    milliseconds = 1e3 * MODEL.floor(Cell(prefill, groups, 6), CONTEXT)
    assert milliseconds == pytest.approx(expected, abs=0.006)


def test_without_drafts_a_floor_has_no_passes_of_the_mtp_layer():
    floor = H200StepTime(drafts=0).floor(Cell(0, 32, 1), CONTEXT)
    assert 1e3 * floor == pytest.approx(18.43, abs=0.006)


def test_a_long_prefix_costs_the_indexer():
    # 17.4 ms of index scores and top-k in the table.
    longer = milliseconds(8192, 32, prefix=122880) - milliseconds(8192, 32)
    assert longer == pytest.approx(16.2, rel=0.03)


def test_mixing_reads_the_experts_once():
    apart = milliseconds(8192, 0) + milliseconds(0, 32)
    assert milliseconds(8192, 32) / apart == pytest.approx(0.81, abs=0.01)


def test_more_rows_never_cost_less():
    cells = [Cell(p, g, q) for p in (0, 64, 4096, 8192) for g in (1, 8, 256) for q in (1, 6)]
    for small in cells:
        for large in cells:
            if all(a <= b for a, b in zip(small, large, strict=True)):
                assert MODEL.predict(small, 0) <= MODEL.predict(large, 0)


def test_few_rows_hit_few_experts():
    assert MODEL.predict(Cell(0, 1, 1), 0) < 0.4 * MODEL.predict(Cell(0, 32, 6), 0)


def test_skipping_pads_costs_between_the_useful_rows_and_the_cell():
    useful = MODEL.useful(100, 60, 10, 500)
    skipped = MODEL.skipping((256, 96), 100, 60, 10, 500)
    assert useful < skipped < MODEL.predict(Cell(256, 16, 6), 500)
    assert MODEL.skipping((100, 60), 100, 60, 10, 500) == pytest.approx(useful)
