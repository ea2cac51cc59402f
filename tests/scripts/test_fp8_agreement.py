"""The figures by which greedy outputs are compared."""

import pytest

from scripts.fp8_agreement import Agreement, agreement, first_difference


def test_first_difference_is_the_place_and_none_where_all_is_equal():
    assert first_difference([4, 5, 6], [4, 5, 6]) is None
    assert first_difference([4, 5, 6], [4, 9, 6]) == 1


def test_agreement_counts_outputs_and_tokens():
    reference = [[1, 2, 3, 4], [5, 6, 7, 8]]
    found = agreement(reference, [[1, 2, 3, 4], [5, 9, 7, 0]], {(1, 1): 0.25})
    assert found == Agreement(identical=0.5, tokens=pytest.approx(6 / 8), first=[1], margins=[0.25])
