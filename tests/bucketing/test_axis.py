import pytest

from bucketing.axis import Axis, NoCellError


def test_cut_keeps_sizes_below_the_limit_and_ends_at_it():
    assert Axis.cut("rows", (64, 512), 64).edges == (0, 64)
    assert Axis.cut("rows", (64, 512), 100).edges == (0, 64, 100)
    assert Axis.cut("rows", (64, 512), 512).edges == (0, 64, 512)
    assert Axis.cut("rows", (512, 64, 0), 2048).edges == (0, 64, 512, 2048)
    assert Axis.cut("rows", (), 3).edges == (0, 3)


def test_ceiling_is_the_smallest_size_that_holds_the_count():
    axis = Axis("rows", (0, 4, 16))
    assert [axis.ceiling(n) for n in (0, 1, 4, 5, 16)] == [0, 4, 4, 16, 16]


def test_floor_is_the_largest_size_that_the_count_fills():
    axis = Axis("rows", (0, 4, 16))
    assert [axis.floor(n) for n in (0, 3, 4, 15, 16, 99)] == [0, 0, 4, 4, 16, 16]


def test_ends():
    axis = Axis("rows", (0, 4, 16))
    assert (axis.smallest, axis.largest) == (4, 16)


@pytest.mark.parametrize("count", [17, -1])
def test_ceiling_refuses_what_no_bucket_holds(count):
    with pytest.raises(NoCellError, match=r"rows fit no bucket \(largest: 16\).*0, 4, 16"):
        Axis("rows", (0, 4, 16)).ceiling(count)


@pytest.mark.parametrize("edges", [(), (0,), (1, 4), (0, 4, 4), (0, 16, 4)])
def test_edges_must_ascend_from_zero(edges):
    with pytest.raises(ValueError, match="must ascend strictly from 0"):
        Axis("rows", edges)


def test_cut_refuses_negative_sizes_and_empty_limits():
    with pytest.raises(ValueError, match="sizes must be >= 0"):
        Axis.cut("rows", (-1, 4), 8)
    with pytest.raises(ValueError, match="limit >= 1"):
        Axis.cut("rows", (4,), 0)
