"""Rank correlation, against literal numbers."""

import math

import pytest

from fedloom.platform.search.ranking import kendall_tau


def test_kendall_tau_of_literal_rankings() -> None:
    assert kendall_tau([1, 2, 3, 4], [1, 2, 3, 4])[0] == 1.0
    assert kendall_tau([1, 2, 3, 4], [4, 3, 2, 1])[0] == -1.0
    tau, p_value = kendall_tau([1, 2, 3, 4], [1, 2, 4, 3])  # five pairs agree, one does not
    assert tau == pytest.approx(4 / 6)
    assert p_value == pytest.approx(8 / 24)  # of the 24 orders, 4 reach 4/6 or more, and 4 as much below
    assert math.isnan(kendall_tau([1, 1, 1], [1, 2, 3])[0])


def test_rankings_that_cannot_be_compared_are_refused() -> None:
    for a, b in (([1.0], [1.0]), ([1.0, 2.0], [1.0, 2.0, 3.0])):
        with pytest.raises(ValueError, match="two at least"):
            kendall_tau(a, b)
    with pytest.raises(ValueError, match="leave failed models out"):
        kendall_tau([1.0, math.nan], [1.0, 2.0])
