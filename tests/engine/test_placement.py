import pytest

from bucketing.axis import Axis
from bucketing.grid import Cell, Grid
from bucketing.step_inputs import Limits
from bucketing.step_time import RowEquivalents
from glm_jax.engine.chunking import Decodes, Piece
from glm_jax.engine.placement import place
from glm_jax.engine.request import Request
from glm_jax.sampling.params import SamplingParams


def request(length=100, *, slot=None, drafts=0) -> Request:
    made = Request("r", [1] * length, SamplingParams())
    made.slot, made.draft_token_ids = slot, [7] * drafts
    return made


def placed(decodes, rows, *, widths=(1,), groups=(1, 8), admitted=False, time=None, grid=None):
    """Place `decodes` decoding requests (a count, or their drafts) and pieces of these rows."""
    grid = grid or Grid(Axis("prefill rows", (0, 64, 512)), Axis("groups", (0, *groups)), widths)
    drafts = [0] * decodes if isinstance(decodes, int) else decodes
    running = [request(slot=n, drafts=d) for n, d in enumerate(drafts)]
    pieces = [Piece(request(slot=None if admitted else n), r) for n, r in enumerate(rows)]
    width = 1 + max(drafts, default=0)
    limits = Limits(groups[-1], 4, 64)
    placement = place(grid, limits, time or RowEquivalents(), Decodes(running, width), pieces)
    sizes = [[piece.rows for piece in part] for part in placement[1:3]]
    return placement.cell, *sizes


@pytest.mark.parametrize(
    ("decodes", "rows", "cell", "chunks", "groups"),
    [
        (1, [], (0, 1, 1), [], []),
        (3, [], (0, 8, 1), [], []),
        (0, [70], (512, 0, 1), [70], []),
        (3, [40, 20], (64, 8, 1), [40, 20], []),
        # A rest of one row joins the decodes instead of opening a prefill bucket.
        (3, [1], (0, 8, 1), [], [1]),
        (0, [1], (0, 1, 1), [], [1]),
        # Where it is free in the prefill bucket it stays a chunk.
        (1, [40, 1], (64, 1, 1), [40, 1], []),
        # Moving one of two single rows gets the rest into the smaller bucket.
        (3, [64, 1], (64, 8, 1), [64], [1]),
        # Five requests need the larger prefill bucket; four chunks and a group do not.
        (2, [20, 1, 10, 10, 10], (64, 8, 1), [20, 10, 10, 10], [1]),
    ],
)
def test_place_takes_the_cell_with_the_fewest_rows(decodes, rows, cell, chunks, groups):
    assert placed(decodes, rows) == (cell, chunks, groups)


def test_place_moves_rests_of_up_to_the_width():
    assert placed(2, [3, 2], widths=(1, 4)) == (Cell(0, 8, 4), [], [3, 2])
    assert placed(2, [5], widths=(1, 4)) == (Cell(64, 8, 1), [5], [])


def test_place_uses_the_width_that_the_drafts_need():
    assert placed([0, 3], [], widths=(1, 4)) == (Cell(0, 8, 4), [], [])
    assert placed([0, 0], [], widths=(1, 4)) == (Cell(0, 8, 1), [], [])


def test_place_never_resets_more_slots_than_the_cell_can():
    # Small cells reset four slots; six admitted requests need the cell that resets eight.
    cell, chunks, groups = placed(0, [1] * 6, admitted=True)
    assert (cell, len(chunks), len(groups)) == (Cell(512, 0, 1), 6, 0)
    cell, chunks, groups = placed(0, [1] * 6)
    assert (cell, len(chunks), len(groups)) == (Cell(0, 8, 1), 0, 6)
    cell, chunks, groups = placed(0, [1] * 4, admitted=True)
    assert (cell, len(chunks), len(groups)) == (Cell(0, 8, 1), 0, 4)


class GroupsCost:
    """Prefill rows are free, groups are not."""

    def predict(self, cell, pairs):
        return cell.groups


def test_place_asks_the_step_time_and_not_the_rows():
    assert placed(4, [1], groups=(4, 8)) == (Cell(0, 8, 1), [], [1])
    assert placed(4, [1], groups=(4, 8), time=GroupsCost()) == (Cell(64, 4, 1), [1], [])


def test_place_stays_inside_an_incomplete_grid_where_it_can():
    cells = [(0, 8, 1), (64, 0, 1), (64, 1, 1)]
    grid = Grid.from_cells(cells, max_num_batched_tokens=64, max_num_seqs=8)
    assert placed(1, [1], grid=grid) == (Cell(0, 8, 1), [], [1])
    assert placed(2, [5], grid=grid) == (Cell(64, 8, 1), [5], [])


def test_pairs_count_decodes_and_pieces():
    grid = Grid(Axis("prefill rows", (0, 64)), Axis("groups", (0, 8)), (1,))
    running, fresh = request(slot=0), request(slot=1)
    running.computed = 99
    decodes = Decodes([running], 1, 100)
    placement = place(grid, Limits(8, 4, 64), RowEquivalents(), decodes, [Piece(fresh, 3)])
    assert placement.pairs == 100 + 1 + 2 + 3


class SlowCell(RowEquivalents):
    """One slow first step was seen of the cell that fits; the wider one looks cheap."""

    def predict(self, cell, pairs):
        return 0.1 if cell == (0, 1, 4) else super().predict(cell, pairs)


def test_place_never_pads_groups_for_a_prediction_alone():
    assert placed([3], [], widths=(1, 4, 6), time=SlowCell()) == (Cell(0, 1, 4), [], [])
    # With a rest of five rows that only the wider one takes, it may decide.
    widths = (1, 4, 6)
    assert placed([3], [5], widths=widths, time=SlowCell()) == (Cell(0, 8, 6), [], [5])
