"""The page pool's size from what the compiler says of the largest cell."""

import pytest

from bucketing.cell import Cell
from bucketing.piecewise import Piece
from glm_jax.engine.memory_plan import (
    DoesNotFitError,
    MemoryNeed,
    check_pages,
    memory_budget,
    plan_pages,
)

MIB = 1 << 20
BIG, SMALL = Cell(512, 8, 1), Cell(0, 1, 1)
NEED = MemoryNeed(
    weights=100 * MIB,
    state=MIB,
    temporaries={SMALL: 2 * MIB, BIG: 39 * MIB, Piece("embed", 8): 5 * MIB},
    page=2 * MIB,
)


def test_the_hungriest_program_counts_once():
    assert NEED.hungriest == (BIG, 39 * MIB)
    # 200 - 100 - 1 - 39 = 60 MiB are 30 pages.
    assert plan_pages(NEED, budget=200 * MIB, wanted=1000, least=2) == 30


def test_no_more_pages_than_wanted():
    assert plan_pages(NEED, budget=200 * MIB, wanted=7, least=2) == 7


@pytest.mark.parametrize("budget", [0, 100, 150, 159])
def test_an_engine_that_cannot_hold_one_request_says_which_cell_and_by_how_much(budget):
    missing = 160 - budget  # 100 + 1 + 39 + 10 pages of 2
    with pytest.raises(DoesNotFitError) as caught:
        plan_pages(NEED, budget=budget * MIB, wanted=1000, least=10)
    assert f"cell (512, 8, 1) does not fit by {missing}.0 MiB" in str(caught.value)
    assert "temporaries of the cell 39.0 MiB" in str(caught.value)
    assert f"budget of {budget}.0 MiB" in str(caught.value)


def test_a_pool_holds_at_least_one_page_besides_the_reserved_one():
    with pytest.raises(DoesNotFitError, match=r"by 1\.0 MiB"):
        plan_pages(NEED, budget=143 * MIB, wanted=1000, least=0)
    assert plan_pages(NEED, budget=144 * MIB, wanted=1000, least=0) == 2


def test_a_fixed_pool_fits_exactly_or_is_refused():
    check_pages(NEED, budget=160 * MIB, pages=10)
    with pytest.raises(DoesNotFitError, match=r"does not fit by 2\.0 MiB.*11 pages 22\.0 MiB"):
        check_pages(NEED, budget=160 * MIB, pages=11)


def test_programs_without_temporaries_name_no_cell():
    need = NEED._replace(temporaries={})
    assert need.hungriest == (None, 0)
    with pytest.raises(DoesNotFitError, match="cell does not fit"):
        check_pages(need, budget=0, pages=2)


def test_budget_is_a_share_of_the_device():
    assert memory_budget(1000, 0.9) == 900
