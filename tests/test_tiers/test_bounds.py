"""Tier bounds: the arithmetic of FedorAS App. E.4 with literal numbers, its published figures, and its laws."""

import math
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fedloom.tiers.bounds import check_upper_bounds, share_of_models, tier_of, tier_upper_bounds

# Cumulated: 1 3 6 10 15 21 28 36 45 55, of 55.
ONE_TO_TEN = np.arange(1.0, 11.0)


def bounds_by_hand(
    costs: list[float], fixed: float, largest: float, tiers: int, low: float, high: float
) -> list[float]:
    """The same steps, one number at a time."""

    def first_above(rho: float) -> float:
        running = 0.0
        for cost in sorted(costs):
            running += cost
            if running / sum(costs) > rho:
                return cost
        raise AssertionError

    top = first_above(high)
    if low > 0:
        bottom, gaps = first_above(low), tiers - 2
        return [*(bottom + (top - bottom) * i / gaps for i in range(gaps + 1)), largest]
    return [*(fixed + (top - fixed) * i / (tiers - 1) for i in range(1, tiers)), largest]


def test_bounds_are_evenly_spaced_from_the_fixed_cost() -> None:
    # 36/55 = .654 <= .7 < 45/55 = .818: the top tier begins at 9; from 0 in thirds.
    assert tier_upper_bounds(ONE_TO_TEN, 0.0, 12.0, 4, 0.0, 0.7) == (3.0, 6.0, 9.0, 12.0)
    assert tier_upper_bounds(ONE_TO_TEN[::-1], 0.6, 12.0, 3, 0.0, 0.7) == pytest.approx((4.8, 9.0, 12.0))


def test_bounds_are_evenly_spaced_between_the_two_shares() -> None:
    # 10/55 = .182 <= .2 < 15/55 = .273: tier 1 ends at 5.
    assert tier_upper_bounds(ONE_TO_TEN, 0.0, 12.0, 4, 0.2, 0.7) == (5.0, 7.0, 9.0, 12.0)
    assert tier_upper_bounds(ONE_TO_TEN, 0.0, 12.0, 3, 0.2, 0.7) == (5.0, 9.0, 12.0)


def test_the_share_must_be_exceeded_not_met() -> None:
    # 1 + 3 of 8 meets .5 exactly, so 4 is the first to exceed it.
    assert tier_upper_bounds(np.array([1.0, 3.0, 4.0]), 0.0, 5.0, 2, 0.0, 0.5) == (4.0, 5.0)
    assert tier_upper_bounds(np.array([1.0, 3.0, 4.0]), 0.0, 5.0, 2, 0.0, 0.49) == (3.0, 5.0)


def test_one_tier_is_the_whole_space_whatever_the_shares() -> None:
    assert tier_upper_bounds(ONE_TO_TEN, 0.0, 12.0, 1, 0.0, 0.0) == (12.0,)


def test_the_published_bounds_are_evenly_spaced() -> None:
    """Tab. 8: with a sample whose top tier begins as published, the bounds below come out as published."""
    for high, published in ((325.4, (120.9, 223.2)), (297.1, (111.5, 204.3))):
        bounds = tier_upper_bounds(np.array([18.7, high]), 18.7, 716.0, 4, 0.0, 0.9)
        assert [round(bound, 1) for bound in bounds] == [*published, high, 716.0]
    speech = tier_upper_bounds(np.array([5.0, 10.1]), 1.0, 20.0, 4, 0.3, 0.925)
    assert speech == pytest.approx((5.0, 7.55, 10.1, 20.0))
    shakespeare = tier_upper_bounds(np.array([7.8, 22.8]), 1.0, 33.8, 5, 0.1, 0.77)
    assert shakespeare == pytest.approx((7.8, 12.8, 17.8, 22.8, 33.8))


def cifar_paths() -> tuple[npt.NDArray[np.float64], float, float]:
    """Drawn paths, fixed cost and largest path of cnn_cifar in MMACs, written out from the operators' definitions."""

    def ds(c: int, hw: int, k: int, e: float) -> float:
        m = int(c * e)
        return hw * (k * k * c * m / min(c, m) + m * c)

    def mb(c: int, hw: int, k: int, e: float) -> float:
        m = int(c * e)
        return hw * (k * k * c * m + m * c) + 2 * m * m  # squeeze-and-excitation works on one position

    layers, c, hw = [], 64, 32 * 32
    for _ in range(4):
        separable = [ds(c, hw, 3, e) for e in (0.5, 1, 2)]
        dense = [mb(c, hw, 1, 2), *(mb(c, hw, 3, e) for e in (0.5, 1, 2))]
        layers += [[cost / 1e6 for cost in (hw * c * c, *separable, *dense, 0)]] * 4
        c, hw = int(c * 1.5), hw // 4
    table, fixed = np.array(layers), 18.18
    drawn = np.random.default_rng(0).integers(0, 9, (100_000, 16))
    return table[np.arange(16), drawn].sum(axis=1) + fixed, fixed, float(table.max(axis=1).sum()) + fixed


def test_cifar_comes_out_as_published_but_for_normalisation_and_activation() -> None:
    """Read as a plain quantile of the models, the rule would give 298 and not 325 M for the top tier."""
    costs, fixed, largest = cifar_paths()
    assert largest == pytest.approx(710.9, abs=0.1)
    cifar10 = tier_upper_bounds(costs, fixed, largest, 4, 0.0, 0.95)
    assert cifar10 == pytest.approx((120.9, 223.2, 325.4, 716.0), rel=0.015)
    cifar100 = tier_upper_bounds(costs, fixed, largest, 4, 0.0, 0.9)
    assert cifar100 == pytest.approx((111.5, 204.3, 297.1, 716.0), rel=0.015)
    assert share_of_models(costs, cifar10) == pytest.approx((0.1292, 0.5880, 0.2575, 0.0253), abs=0.01)
    assert sum(share_of_models(costs, cifar10)) == pytest.approx(1)


@given(
    costs=st.lists(st.integers(1, 1000), min_size=8, max_size=60, unique=True),
    tiers=st.integers(2, 6),
    low=st.sampled_from([0.0, 0.1, 0.3]),
    high=st.sampled_from([0.5, 0.77, 0.9]),
)
def test_bounds_follow_the_slow_reference_and_hold_every_path_once(
    costs: list[int], tiers: int, low: float, high: float
) -> None:
    assume(not (tiers == 2 and low > 0))
    expected = bounds_by_hand([float(c) for c in costs], 0.5, 1001.0, tiers, low, high)
    assume(all(a < b for a, b in pairwise(expected)))
    uppers = tier_upper_bounds(np.array(costs, dtype=float), 0.5, 1001.0, tiers, low, high)
    assert uppers == pytest.approx(expected)
    assert len(uppers) == tiers
    assert sum(share_of_models(costs, uppers)) == pytest.approx(1)


@given(st.permutations(list(range(1, 13))))
def test_the_order_of_the_paths_does_not_matter(costs: list[int]) -> None:
    given_order = tier_upper_bounds(np.array(costs, dtype=float), 0.5, 12.0, 4, 0.2, 0.8)
    assert given_order == tier_upper_bounds(np.arange(1.0, 13.0), 0.5, 12.0, 4, 0.2, 0.8)


@given(st.sampled_from([2.0**k for k in range(-20, 21)]))
def test_the_unit_of_cost_does_not_matter(scale: float) -> None:
    plain = tier_upper_bounds(ONE_TO_TEN, 0.5, 12.0, 4, 0.2, 0.7)
    scaled = tier_upper_bounds(ONE_TO_TEN * scale, 0.5 * scale, 12.0 * scale, 4, 0.2, 0.7)
    assert scaled == tuple(bound * scale for bound in plain)


def test_unsupported_paths_are_left_out() -> None:
    costs = np.append(ONE_TO_TEN, math.inf)
    assert tier_upper_bounds(costs, 0.0, 12.0, 4, 0.0, 0.7) == (3.0, 6.0, 9.0, 12.0)
    with pytest.raises(ValueError, match="no path of finite, positive cost"):
        tier_upper_bounds(np.array([math.inf]), 0.0, 12.0, 4, 0.0, 0.7)


def test_a_rounding_error_above_the_largest_leaves_no_path_out() -> None:
    above = np.nextafter(10.0, 11.0)
    uppers = tier_upper_bounds(np.append(ONE_TO_TEN, above), 0.0, 10.0, 4, 0.0, 0.7)
    assert uppers[-1] == above


@pytest.mark.parametrize(
    ("tiers", "low", "high", "message"),
    [
        (0, 0.0, 0.9, "num_tiers=0"),
        (4, 0.9, 0.9, "0 <= rho_low < rho_high < 1"),
        (4, -0.1, 0.9, "0 <= rho_low < rho_high < 1"),
        (4, 0.0, 1.0, "0 <= rho_low < rho_high < 1"),
        (4, math.nan, 0.9, "0 <= rho_low < rho_high < 1"),
        (2, 0.3, 0.9, "two tiers have one bound"),
        (4, 0.30, 0.31, "leaves a tier empty: use fewer tiers than 4"),
    ],
)
def test_splits_that_make_no_sense_are_refused(tiers: int, low: float, high: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tier_upper_bounds(ONE_TO_TEN, 0.0, 12.0, tiers, low, high)


def test_costs_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="not negative"):
        tier_upper_bounds(np.array([1.0, math.nan]), 0.0, 12.0, 4, 0.0, 0.7)
    with pytest.raises(ValueError, match=r"largest=9 must be .* a drawn path costs 10"):
        tier_upper_bounds(ONE_TO_TEN, 0.0, 9.0, 4, 0.0, 0.7)
    with pytest.raises(ValueError, match="largest=inf"):
        tier_upper_bounds(ONE_TO_TEN, 0.0, math.inf, 4, 0.0, 0.7)
    with pytest.raises(ValueError, match="leaves a tier empty"):  # the fixed cost lies above the top tier's lower end
        tier_upper_bounds(ONE_TO_TEN, 9.5, 12.0, 4, 0.0, 0.7)


def test_explicit_bounds_are_kept_and_the_last_reaches_the_largest() -> None:
    assert check_upper_bounds([120.9, 223.2, 325.4, 716.0], 18.7, 710.9) == (120.9, 223.2, 325.4, 716.0)
    assert check_upper_bounds([120.9, 710.0], 18.7, 716.0) == (120.9, 716.0)
    assert check_upper_bounds([18.7, 716.0], 18.7, 716.0) == (18.7, 716.0)
    assert check_upper_bounds([716.0], 18.7, 716.0) == (716.0,)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([], "no tier bounds"),
        ([100.0, 100.0, 716.0], "100 / 100 / 716 must be finite and strictly increasing"),
        ([300.0, 200.0, 716.0], "strictly increasing"),
        ([math.nan, 716.0], "must be finite"),
        ([100.0, math.inf], "must be finite"),
        ([10.0, 716.0], "first tier's bound 10 is below the smallest model's cost 18.7"),
        ([100.0, 600.0], "last tier's bound 600 leaves out models that cost up to 716: end with 716"),
        ([100.0, 716.0, 800.0], r"top tier \(above 716\) is empty"),
    ],
)
def test_explicit_bounds_that_make_no_sense_are_refused(bounds: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_upper_bounds(bounds, 18.7, 716.0)


def test_tier_of_is_half_open() -> None:
    costs = np.array([[0.0, 3.0, 3.1], [6.0, 9.0, 12.0], [12.1, math.inf, math.nan]])
    assert tier_of(costs, (3.0, 6.0, 9.0, 12.0)).tolist() == [[0, 0, 1], [1, 2, 3], [4, 4, 4]]


def test_share_of_models_leaves_out_what_no_tier_holds() -> None:
    assert share_of_models([1, 3, 4, 20], (3.0, 12.0)) == (0.5, 0.25)
    assert share_of_models([1, 1], (3.0, 12.0)) == (1.0, 0.0)
    with pytest.raises(ValueError, match="no path costs"):
        share_of_models([], (3.0, 12.0))
