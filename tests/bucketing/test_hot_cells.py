"""The cells to have ready first."""

from bucketing.axis import Axis
from bucketing.cell import Cell
from bucketing.grid import Grid
from bucketing.hot_cells import hot_cells


def test_hot_cells_of_two_axes_are_the_ends_and_the_corner():
    grid = Grid(Axis.cut("prefill", (64, 512), 512), Axis.cut("groups", (1, 4, 8), 8), (1, 4))
    assert hot_cells(grid) == (
        Cell(64, 0, 1),
        Cell(0, 1, 1),
        Cell(0, 8, 1),
        Cell(512, 8, 4),
        Cell(512, 0, 1),
    )


def test_hot_cells_with_one_bucket_per_axis_are_named_once():
    grid = Grid(Axis.cut("prefill", (64,), 64), Axis.cut("groups", (4,), 4))
    assert hot_cells(grid) == (Cell(64, 0, 1), Cell(0, 4, 1), Cell(64, 4, 1))


def test_hot_cells_of_an_explicit_grid_are_its_own():
    grid = Grid.from_cells([(64, 0, 1), (64, 2, 1)], max_num_batched_tokens=64, max_num_seqs=2)
    assert hot_cells(grid) == (Cell(64, 0, 1), Cell(64, 2, 1))


def test_hot_decode_cells_are_as_wide_as_groups_with_their_drafts():
    grid = Grid(Axis.cut("prefill", (64,), 64), Axis.cut("groups", (1, 8), 8), (1, 2, 4, 6))
    decode = [cell for cell in hot_cells(grid, 4) if not cell.prefill]
    assert decode == [Cell(0, 1, 4), Cell(0, 8, 4)]
    narrow = Grid(Axis.cut("prefill", (64,), 64), Axis.cut("groups", (8,), 8), (1, 2))
    assert Cell(0, 8, 1) in hot_cells(narrow, 4)
