from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketing.axis import Axis, NoCellError
from bucketing.grid import Cell, Grid, chunks_for


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
    [(0, 0), (1, 1), (40, 40), (64, 64), (65, 64), (130, 64), (288, 288), (500, 500), (512, 512)],
)
def test_fit_prefill_takes_the_cheaper_cut(rows, taken):
    assert grid().fit_prefill(rows) == taken


@given(st.lists(st.integers(1, 300), min_size=1, max_size=5, unique=True), st.data())
def test_fit_prefill_always_takes_something_and_never_more_than_there_is(sizes, data):
    g = grid(prefill=tuple(sorted(sizes)))
    rows = data.draw(st.integers(1, g.prefill.largest))
    taken = g.fit_prefill(rows)
    assert min(rows, g.prefill.smallest) <= taken <= rows
    assert taken == rows or taken in g.prefill.edges


def test_fit_prefill_refuses_more_than_the_budget():
    with pytest.raises(NoCellError):
        grid().fit_prefill(513)


@pytest.mark.parametrize("widths", [(), (0,), (2, 1), (1, 1)])
def test_widths_must_ascend(widths):
    with pytest.raises(ValueError, match="decode widths"):
        grid(widths=widths)
