import dataclasses
import json
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketing.axis import Axis, NoCellError
from bucketing.cell import Cell, chunks_for
from bucketing.grid import Grid
from bucketing.step_time import RowEquivalents


def grid(prefill=(64, 512), groups=(1, 8), widths=(1,)) -> Grid:
    return Grid(Axis("prefill rows", (0, *prefill)), Axis("groups", (0, *groups)), widths)


def test_default_grid_has_eight_cells():
    assert grid().cells() == (
        (0, 1, 1),
        (0, 8, 1),
        (64, 0, 1),
        (64, 1, 1),
        (64, 8, 1),
        (512, 0, 1),
        (512, 1, 1),
        (512, 8, 1),
    )


def test_width_is_no_choice_without_groups():
    cells = grid(prefill=(64,), groups=(8,), widths=(1, 4)).cells()
    assert cells == ((0, 8, 1), (0, 8, 4), (64, 0, 1), (64, 8, 1), (64, 8, 4))


@pytest.mark.parametrize(
    ("prefill", "seqs", "chunks"),
    [(0, 8, 0), (1, 8, 4), (64, 8, 4), (64, 2, 2), (128, 8, 8), (8192, 256, 256), (512, 64, 32)],
)
def test_chunks_depend_on_the_prefill_bucket_only(prefill, seqs, chunks):
    assert chunks_for(prefill, seqs) == chunks


def test_cell_for_rounds_every_axis_up():
    assert grid(widths=(1, 4)).cell_for(65, 1, 2, 3) == Cell(512, 8, 4)
    assert grid(widths=(1, 4)).cell_for(64, 4, 1, 1) == Cell(64, 1, 1)
    assert grid().cell_for(0, 0, 1) == Cell(0, 1, 1)
    assert grid(widths=(1, 4)).cell_for(64, 1, 0, 4) == Cell(64, 0, 1)


def test_cell_for_takes_a_larger_bucket_when_the_chunks_need_it():
    assert grid().cell_for(10, 4, 0) == Cell(64, 0, 1)
    assert grid().cell_for(10, 5, 0) == Cell(512, 0, 1)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ((0, 0, 0, 1), "has no cell"),
        ((513, 1, 0, 1), "513 prefill rows fit no bucket"),
        ((1, 1, 9, 1), "9 groups fit no bucket"),
        ((1, 1, 1, 2), "2 rows fits no decode width"),
        ((9, 9, 0, 1), "9 chunks fit no prefill bucket"),
    ],
)
def test_cell_for_refuses_what_no_cell_holds(asked, message):
    with pytest.raises(NoCellError, match=message):
        grid().cell_for(*asked)


@given(st.data())
def test_cell_for_is_minimal_and_monotone(data):
    sizes = st.lists(st.integers(1, 200), min_size=1, max_size=4).map(lambda x: sorted(set(x)))
    widths = data.draw(st.sampled_from([(1,), (1, 3), (2, 5)]))
    g = grid(data.draw(sizes), data.draw(sizes), widths)
    rows = data.draw(st.integers(0, g.prefill.largest))
    chunks = data.draw(st.integers(bool(rows), min(rows, g.max_chunks)))
    groups = data.draw(st.integers(rows == 0, g.groups.largest))
    width = data.draw(st.integers(1, widths[-1]))
    cell = g.cell_for(rows, chunks, groups, width)

    def holds(c: Cell) -> bool:
        wide = c.groups == 0 or c.width >= width
        return c.prefill >= rows and g.chunks(c.prefill) >= chunks and c.groups >= groups and wide

    assert cell in g.cells()
    assert holds(cell)
    others = [c for c in g.cells() if holds(c)]
    assert cell.rows == min(c.rows for c in others)
    for more_rows, more_groups in product((0, 1), (0, 1)):
        if rows + more_rows <= g.prefill.largest and groups + more_groups <= g.groups.largest:
            larger = g.cell_for(rows + more_rows, max(chunks, more_rows), groups + more_groups, 1)
            assert larger.prefill >= cell.prefill
            assert larger.groups >= cell.groups


@pytest.mark.parametrize(
    ("rows", "taken"),
    [(0, 0), (1, 1), (40, 40), (64, 64), (65, 64), (128, 64), (130, 130), (500, 500), (512, 512)],
)
def test_fit_prefill_takes_the_cheaper_cut(rows, taken):
    assert grid().fit_prefill(rows, RowEquivalents()) == taken


def test_fit_prefill_charges_only_what_a_step_costs_beyond_its_decodes():
    # 100 rows: alone one padded step is cheaper; where groups decode anyway two steps are.
    g = grid(prefill=(50, 128), groups=(8,))
    assert g.fit_prefill(100, RowEquivalents()) == 100
    assert g.fit_prefill(100, RowEquivalents(), groups=1) == 50


def test_fit_prefill_counts_a_small_rest_as_a_group():
    # A rest of three rows as a ninth group would need the larger bucket of groups, a dear one.
    g = grid(prefill=(64, 80), groups=(8, 64), widths=(4,))
    assert g.fit_prefill(67, RowEquivalents(), groups=7, width=4) == 64
    assert g.fit_prefill(67, RowEquivalents(), groups=8, width=4) == 67


def test_fit_prefill_lets_nobody_wait_who_must_not():
    assert grid().fit_prefill(65, RowEquivalents(), at_least=64) == 64
    assert grid().fit_prefill(65, RowEquivalents(), at_least=65) == 65


def test_fit_prefill_stays_inside_an_incomplete_grid():
    cells = [(0, 8, 1), (64, 8, 1), (512, 0, 1)]
    g = Grid.from_cells(cells, max_num_batched_tokens=512, max_num_seqs=8)
    assert g.fit_prefill(300, RowEquivalents()) == 300
    assert g.fit_prefill(100, RowEquivalents(), groups=2) == 64
    assert g.fit_prefill(400, RowEquivalents(), groups=2) == 400


@given(st.lists(st.integers(1, 300), min_size=1, max_size=5, unique=True), st.data())
def test_fit_prefill_takes_what_must_not_wait_and_never_more_than_there_is(sizes, data):
    g = grid(prefill=tuple(sorted(sizes)), widths=(1, 4))
    rows = data.draw(st.integers(1, g.prefill.largest))
    at_least = data.draw(st.integers(0, rows))
    groups = data.draw(st.integers(0, 8))
    taken = g.fit_prefill(rows, RowEquivalents(), groups=groups, width=4, at_least=at_least)
    assert max(at_least, min(rows, g.prefill.smallest)) <= taken <= rows
    assert taken == rows or taken in g.prefill.edges


def test_fit_prefill_refuses_more_than_the_budget():
    with pytest.raises(NoCellError):
        grid().fit_prefill(513, RowEquivalents())


@pytest.mark.parametrize("widths", [(), (0,), (2, 1), (1, 1)])
def test_widths_must_ascend(widths):
    with pytest.raises(ValueError, match="decode widths"):
        grid(widths=widths)


# Grids of explicit cells.


def explicit(*cells, budget=512, seqs=16, widths=None) -> Grid:
    return Grid.from_cells(cells, max_num_batched_tokens=budget, max_num_seqs=seqs, widths=widths)


def test_each_prefill_bucket_may_have_its_own_groups():
    g = explicit((0, 1, 6), (0, 8, 6), (64, 8, 6), (512, 2, 6), (512, 16, 6))
    assert g.complete
    assert g.cell_for(0, 0, 3, 6) == (0, 8, 6)
    assert g.cell_for(10, 1, 1, 1) == (64, 8, 6)
    assert g.cell_for(100, 1, 2, 6) == (512, 2, 6)
    # Nine groups fit neither (0, 8) nor (64, 8).
    assert g.cell_for(0, 0, 9, 6) == (512, 16, 6)


def test_the_widths_may_have_different_groups():
    g = explicit((0, 4, 1), (0, 16, 6), (512, 16, 6))
    assert g.cell_for(0, 0, 4, 1) == (0, 4, 1)
    assert g.cell_for(0, 0, 5, 1) == (0, 16, 6)
    assert g.cell_for(0, 0, 1, 2) == (0, 16, 6)


def test_the_cell_with_the_fewest_rows_wins():
    g = explicit((64, 16, 6), (128, 2, 6), (512, 16, 6))
    assert g.cell_for(10, 1, 2, 6) == (128, 2, 6)
    assert g.cell_for(10, 1, 3, 6) == (64, 16, 6)


def test_what_no_cell_holds_gets_the_cell_of_the_axes():
    g = explicit((0, 8, 1), (64, 0, 1), (64, 2, 1))
    assert not g.complete
    assert g.cell_for(40, 1, 2) == (64, 2, 1)
    assert g.cell_for(40, 1, 3) == (64, 8, 1)
    assert Cell(64, 8, 1) not in g
    assert g.cell_for(65, 1, 0) == (512, 0, 1)
    assert g.cell_for(512, 1, 16) == (512, 16, 1)


def test_a_list_of_all_combinations_is_the_same_as_the_axes():
    axes = grid(widths=(1, 4))
    listed = explicit(*axes.cells(), seqs=8, widths=(1, 4))
    assert listed.cells() == axes.cells()
    for rows, groups, width in product((0, 1, 64, 65, 512), (0, 1, 2, 8), (1, 3, 4)):
        if rows or groups:
            asked = rows, min(rows, 1), groups, width
            assert listed.cell_for(*asked) == axes.cell_for(*asked)


def test_a_grid_file_gives_the_same_grid():
    for g in (explicit((0, 4, 1), (0, 16, 6), (512, 16, 6)), explicit((64, 1, 1))):
        assert Grid.from_json(json.loads(json.dumps(g.as_json()))) == g
    axes = grid(widths=(1, 4))
    assert Grid.from_json(axes.as_json()).cells() == axes.cells()


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ([], "make no grid"),
        ([(0, 0, 1)], r"\[\(0, 0, 1\)\] make no grid"),
        ([(64, -1, 1)], "make no grid"),
        ([(64, 1)], "make no grid"),
        ([(1024, 1, 1)], "outside of max_num_batched_tokens 512"),
        ([(64, 32, 1)], "max_num_seqs 16"),
    ],
)
def test_cells_that_make_no_grid_are_refused(cells, message):
    with pytest.raises(ValueError, match=message):
        explicit(*cells)


def test_a_cell_of_a_width_that_is_not_allowed_is_refused():
    with pytest.raises(ValueError, match=r"decode_widths \(1,\)"):
        explicit((0, 1, 6), widths=(1,))


def test_cells_off_the_axes_are_refused():
    with pytest.raises(ValueError, match="not on the axes"):
        dataclasses.replace(grid(), explicit=(Cell(65, 0, 1),))


@pytest.mark.parametrize("content", [{}, {"cells": 3}])
def test_a_file_that_is_no_grid_is_refused(content):
    with pytest.raises(ValueError, match="is no grid"):
        Grid.from_json(content)


CELLS = st.tuples(st.integers(0, 20), st.integers(0, 6), st.sampled_from([1, 4]))


@given(
    st.lists(CELLS.filter(lambda cell: cell[0] + cell[1] > 0), min_size=1, max_size=8), st.data()
)
def test_cells_of_an_explicit_grid_are_minimal_and_monotone(cells, data):
    g = explicit(*cells, (20, 6, 4), budget=20, seqs=6, widths=(1, 4))
    rows, groups = data.draw(st.integers(0, 20)), data.draw(st.integers(0, 6))
    if rows == groups == 0:
        return
    width = data.draw(st.integers(1, 4))
    cell = g.cell_for(rows, bool(rows), groups, width)
    wide = [c for c in g.cells() if groups == 0 or c.width >= width]
    holding = [c for c in wide if c.prefill >= rows and c.groups >= groups]
    assert cell.rows == min(c.rows for c in holding)
    for more_rows, more_groups, more_width in product((0, 1, 5), (0, 1), (0, 1)):
        asked = rows + more_rows, 1, groups + more_groups, width + more_width
        if asked[0] <= 20 and asked[2] <= 6 and asked[3] <= 4 and asked[0] and asked[2]:
            assert g.cell_for(*asked).rows >= cell.rows


@pytest.mark.parametrize("budget", [317, 1000, 16640])
def test_every_step_within_an_odd_budget_has_a_cell(budget):
    prefill = Axis.cut("prefill rows", (64, 256, 1024, 4096), budget)
    g = Grid(prefill, Axis.cut("groups", (1, 8), 100), (1, 6))
    assert g.prefill.largest == max(cell.prefill for cell in g.cells()) == budget
    for rows, groups, width in product((0, 1, 300, budget), (0, 1, 9, 100), (1, 2, 6)):
        if rows or groups:
            assert g.cell_for(rows, bool(rows), groups, width) in g
    assert g.fit_prefill(budget, RowEquivalents(), groups=100, width=6) == budget
