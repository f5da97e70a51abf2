"""Rank correlation and hypervolume, against literal numbers."""

import math

import numpy as np
import pytest

from fedloom.platform.search.base import Scored
from fedloom.platform.search.ranking import Reference, hypervolume, kendall_interval, kendall_tau, reference_of


def scored(metric: float, cost: float) -> Scored:
    return Scored((int(cost),), metric, 0.0, cost, 0, math.isfinite(metric))


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
    with pytest.raises(ValueError, match="confidence"):
        kendall_interval([1.0, 2.0], [1.0, 2.0], rng=np.random.Generator(np.random.PCG64(0)), confidence=95)


def interval(size: int, confidence: float = 0.95) -> tuple[float, float]:
    rng = np.random.Generator(np.random.PCG64(2))
    truth = rng.normal(size=size)
    noisy = truth + rng.normal(size=size)  # correlation sqrt(1/2): tau = 1/2
    return kendall_interval(truth, noisy, rng=rng, confidence=confidence, resamples=200)


def test_the_interval_holds_the_true_tau_and_narrows() -> None:
    low, high = interval(200)
    assert low < 0.5 < high
    assert high - low < 0.25
    small_low, small_high = interval(20)
    assert small_high - small_low > high - low
    assert interval(200) == (low, high)
    half_low, half_high = interval(200, 0.5)
    assert low < half_low < half_high < high


def test_the_interval_of_perfect_agreement_is_one() -> None:
    rng = np.random.Generator(np.random.PCG64(0))
    assert kendall_interval(range(20), range(20), rng=rng, resamples=50) == pytest.approx((1.0, 1.0))
    assert math.isnan(kendall_interval([1, 1, 1], [1, 2, 3], rng=rng, resamples=5)[0])


def test_hypervolume_of_literal_fronts() -> None:
    reference = Reference(ideal_metric=1.0, nadir_metric=0.0, ideal_cost=100.0, nadir_cost=300.0, point=1.0)
    assert hypervolume([scored(1.0, 100.0)], reference) == pytest.approx(1.0)
    assert hypervolume([scored(0.5, 200.0)], reference) == pytest.approx(0.25)
    # Two steps: 0.5 x 1 of the cheap half-good model, and 0.5 x 0.5 more of the good one at half the cost.
    assert hypervolume([scored(0.5, 100.0), scored(1.0, 200.0)], reference) == pytest.approx(0.75)
    with_poor = [scored(0.5, 100.0), scored(1.0, 200.0), scored(0.4, 250.0), scored(math.nan, 100.0)]
    assert hypervolume(with_poor, reference) == pytest.approx(0.75)
    assert hypervolume([], reference) == 0.0
    assert hypervolume([scored(-1.0, 100.0)], reference) == 0.0
    assert hypervolume([scored(0.0, 300.0)], Reference(1.0, 0.0, 100.0, 300.0)) == pytest.approx(0.01)


def test_a_common_frame_comes_from_all_fronts() -> None:
    fronts = [[scored(0.5, 100.0), scored(0.8, 150.0)], [scored(0.6, 90.0), scored(math.nan, 1.0)]]
    assert reference_of(fronts) == Reference(0.8, 0.5, 90.0, 150.0)
    with pytest.raises(ValueError, match="nothing to compare"):
        reference_of([[]])
    with pytest.raises(ValueError, match="larger metric and a smaller cost"):
        reference_of([[scored(0.5, 100.0)]])
