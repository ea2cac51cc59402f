import pytest

from glm_jax.engine.pages import OutOfPagesError, PagePool


def test_page_zero_is_never_handed_out():
    pool = PagePool(4, 64)
    assert pool.capacity == pool.free == 3
    assert sorted(pool.allocate(3)) == [1, 2, 3]
    assert pool.free == 0


def test_allocation_is_all_or_nothing():
    pool = PagePool(4, 64)
    pool.allocate(2)
    with pytest.raises(OutOfPagesError, match="2 pages were asked for, 1 of 3 are free"):
        pool.allocate(2)
    assert pool.free == 1


def test_released_pages_can_be_allocated_again():
    pool = PagePool(4, 64)
    first = pool.allocate(2)
    pool.release(first)
    assert pool.free == 3
    assert sorted(pool.allocate(3)) == [1, 2, 3]


def test_references_count_owners():
    pool = PagePool(4, 64)
    (page,) = pool.allocate(1)
    assert pool.references(page) == 1
    pool.release([page])
    assert pool.references(page) == 0


@pytest.mark.parametrize("page", [0, -1, 4, 2])
def test_releasing_what_is_not_handed_out_is_an_error(page):
    pool = PagePool(4, 64)
    pool.allocate(1)
    with pytest.raises(ValueError, match=f"page {page} is not handed out"):
        pool.release([page])
    assert pool.free == 2


def test_releasing_twice_is_an_error():
    pool = PagePool(4, 64)
    (page,) = pool.allocate(1)
    pool.release([page])
    with pytest.raises(ValueError, match="Release each reference once"):
        pool.release([page])
    assert pool.free == 3


def test_pages_for_rounds_up():
    pool = PagePool(4, 4)
    assert [pool.pages_for(tokens) for tokens in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]


def test_clear_forgets_all_owners():
    pool = PagePool(4, 64)
    (page,) = pool.allocate(1)
    pool.clear()
    assert (pool.free, pool.references(page)) == (3, 0)


@pytest.mark.parametrize(("pages", "size"), [(1, 64), (2, 0)])
def test_a_pool_must_hold_something(pages, size):
    with pytest.raises(ValueError, match="page 0 is reserved"):
        PagePool(pages, size)
