"""Tiers: half-open intervals that join without gaps, their bounds, and which client is in which."""

import math
import time
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, strategies as st

from fedloom.tiers.devices import DeviceTable
from fedloom.tiers.tier import (
    Tier,
    by_device_table,
    by_list,
    by_shares,
    check_upper_bounds,
    make_tiers,
    nearest_num_gpus,
    share_of_models,
    tier_of,
    tier_upper_bounds,
)


def test_a_tier_is_open_below_and_closed_above() -> None:
    tier = Tier("tier2", lower=120.9, upper=223.2)
    assert [tier.contains(cost) for cost in (120.9, 120.91, 223.2, 223.21)] == [False, True, True, False]


def test_unsupported_and_undefined_costs_belong_nowhere() -> None:
    tier = Tier("all", 0.0, math.inf)
    assert tier.contains(1e300)
    assert not tier.contains(math.inf)
    assert not tier.contains(math.nan)


def test_make_tiers_joins_the_published_bounds_and_holds_the_fixed_cost() -> None:
    tiers = make_tiers((120.9, 223.2, 325.4, 716.0), num_gpus=(0.25, 0.25, 0.5, 1), num_cpus=2)
    assert [tier.name for tier in tiers] == ["tier1", "tier2", "tier3", "tier4"]
    assert [(tier.lower, tier.upper) for tier in tiers] == [(0, 120.9), (120.9, 223.2), (223.2, 325.4), (325.4, 716.0)]
    assert [tier.num_gpus for tier in tiers] == [0.25, 0.25, 0.5, 1]
    assert {tier.num_cpus for tier in tiers} == {2}
    assert tiers[0].contains(18.7)  # the model of identities alone costs exactly the fixed part


@given(
    uppers=st.lists(st.integers(1, 100), min_size=1, max_size=8, unique=True).map(sorted),
    cost=st.one_of(st.integers(0, 101), st.floats(0, 101), st.just(math.inf)),
)
def test_tiers_agree_with_the_vectorised_index(uppers: list[int], cost: float) -> None:
    holders = [i for i, tier in enumerate(make_tiers(uppers)) if tier.contains(cost)]
    index = int(tier_of(np.asarray([cost]), uppers)[0])
    assert holders == ([index] if index < len(uppers) else [])


@pytest.mark.parametrize(("lower", "upper"), [(2.0, 2.0), (3.0, 2.0), (-1.0, 2.0), (math.nan, 2.0), (0.0, math.nan)])
def test_an_empty_interval_is_refused(lower: float, upper: float) -> None:
    with pytest.raises(ValueError, match=r"tier tier9: bounds .* must be 0 <= lower < upper"):
        Tier("tier9", lower, upper)


@pytest.mark.parametrize("num_gpus", [0, 0.5, 1 / 3, 1 / 7, 0.1, 0.04, 1, 2, 8.0])
def test_shares_that_fill_whole_devices_are_taken(num_gpus: float) -> None:
    assert Tier("t", 0, 1, num_gpus=num_gpus).num_gpus == num_gpus


@pytest.mark.parametrize(
    ("num_gpus", "nearest"),
    [
        (0.4, "0.3333333333333333"),
        (0.3, "0.3333333333333333"),
        (0.333, "0.3333333333333333"),
        (0.7, "0.5"),
        (0.8, "1.0"),
        (1.4, "1.0"),
        (1.7, "2.0"),
        (0.24, "0.25"),
        (1e-5, "0.0"),
        (1e-320, "0.0"),
        (-0.5, "0.0"),
        (math.nan, "0.0"),
        (math.inf, "1.0"),
    ],
)
def test_other_shares_are_refused_with_the_nearest_valid_one(num_gpus: float, nearest: str) -> None:
    with pytest.raises(ValueError, match=rf"num_gpus={num_gpus!r} .* nearest valid value is {nearest}$"):
        Tier("t", 0, 1, num_gpus=num_gpus)


@given(st.floats(0.001, 20))
def test_the_nearest_share_is_the_nearest_of_all(num_gpus: float) -> None:
    valid = [0.0, *(1 / k for k in range(1, 1200)), *(float(n) for n in range(2, 22))]
    nearest = nearest_num_gpus(num_gpus)
    assert nearest in valid
    assert abs(nearest - num_gpus) == min(abs(share - num_gpus) for share in valid)


@pytest.mark.parametrize("num_cpus", [0, -1, 1.5, math.nan, math.inf])
def test_cpus_that_cannot_be_reserved_are_refused(num_cpus: float) -> None:
    with pytest.raises(ValueError, match="num_cpus="):
        Tier("t", 0, 1, num_cpus=num_cpus)


def test_fractions_of_one_cpu_are_taken() -> None:
    assert Tier("t", 0, 1, num_cpus=0.5).num_cpus == 0.5


def test_one_value_is_that_of_every_tier() -> None:
    tiers = make_tiers((1, 2), num_gpus=[0.25], profile="a")
    assert [(tier.num_gpus, tier.num_cpus, tier.profile) for tier in tiers] == [(0.25, 1.0, "a")] * 2


def test_a_wrong_number_of_values_is_refused() -> None:
    with pytest.raises(ValueError, match="num_gpus has 2 values for 3 tiers"):
        make_tiers((1, 2, 3), num_gpus=(0.5, 0.5))
    with pytest.raises(ValueError, match="profile has 2 values for 3 tiers"):
        make_tiers((1, 2, 3), profile=["phone", "watch"])
    with pytest.raises(ValueError, match="no tier bounds"):
        make_tiers(())
    with pytest.raises(ValueError, match=r"tier tier2: bounds \(2, 1\]"):
        make_tiers((2, 1))


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


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def counts(num_clients: int, shares: tuple[float, ...]) -> list[int]:
    return [int(n) for n in np.bincount(by_shares(num_clients, shares, rng()), minlength=len(shares))]


@pytest.mark.parametrize(
    ("num_clients", "shares", "expected"),
    [
        (100, (0.25, 0.25, 0.25, 0.25), [25, 25, 25, 25]),
        (715, (0.2,) * 5, [143] * 5),  # Shakespeare, App. E.4
        (2112, (0.8, 0.0125, 0.0125, 0.175), [1690, 26, 26, 370]),  # 1689.6, 26.4, 26.4, 369.6
        (500, (0.5, 0.25, 0.125, 0.125), [250, 125, 63, 62]),  # a tie of halves: the lower tier
        (100, (0.29, 0.71), [29, 71]),  # 0.29 * 100 < 29 in floating point
        (10, (1 / 3, 1 / 3, 1 / 3), [4, 3, 3]),
        (5, (0.1, 0.2, 0.7), [1, 1, 3]),  # 0.5, 1.0, 3.5: a tie again
        (45, (0.7, 0.3), [32, 13]),  # 31.5 and 13.5, though 0.7 * 45 < 31.5 in floating point
        (3, (0.5, 0.0, 0.5), [2, 0, 1]),
        (1, (0.2, 0.8), [0, 1]),
        (7, (1.0,), [7]),
    ],
)
def test_shares_give_exact_numbers(num_clients: int, shares: tuple[float, ...], expected: list[int]) -> None:
    assert counts(num_clients, shares) == expected


@given(num_clients=st.integers(1, 3000), parts=st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_every_client_has_a_tier_and_every_tier_its_share(num_clients: int, parts: list[int]) -> None:
    parts = [part + (i == 0) for i, part in enumerate(parts)]
    shares = tuple(part / sum(parts) for part in parts)
    found = counts(num_clients, shares)
    assert sum(found) == num_clients
    assert len(found) == len(shares)
    for count, share in zip(found, shares, strict=True):
        assert abs(count - share * num_clients) < 1 + 1e-5
        assert count == 0 or share > 0


def test_membership_is_drawn_and_uniform_over_the_clients() -> None:
    assert (by_shares(50, (0.5, 0.5), rng(1)) == by_shares(50, (0.5, 0.5), rng(1))).all()
    assert (by_shares(50, (0.5, 0.5), rng(1)) != by_shares(50, (0.5, 0.5), rng(2))).any()
    draws = np.stack([by_shares(10, (0.7, 0.3), rng(seed)) for seed in range(2000)])
    # Standard deviation of each mean: sqrt(.21 / 2000) = 0.010.
    assert np.abs(draws.mean(axis=0) - 0.3).max() < 0.05


def test_a_million_clients_take_no_time() -> None:
    start = time.perf_counter()
    tiers = by_shares(1_000_000, (0.8, 0.0125, 0.0125, 0.175), rng())
    assert time.perf_counter() - start < 1.0
    assert tiers.dtype == np.int16
    assert np.bincount(tiers).tolist() == [800_000, 12_500, 12_500, 175_000]


def test_shares_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sum to 0\.9, but must sum to 1"):
        by_shares(10, (0.5, 0.4), rng())
    with pytest.raises(ValueError, match=r"sum to 1\.000002"):
        by_shares(10, (0.5, 0.500002), rng())
    for shares in ((), (1.5, -0.5), (math.nan, 1.0)):
        with pytest.raises(ValueError, match="one number per tier, none negative"):
            by_shares(10, shares, rng())
    with pytest.raises(ValueError, match="num_clients=0"):
        by_shares(0, (1.0,), rng())
    assert len(by_shares(10, (0.3333333, 0.3333333, 0.3333333), rng())) == 10  # off by 1e-7 only


def test_a_list_is_checked_and_kept() -> None:
    tiers = by_list([0, 3, 1], num_tiers=4, num_clients=3)
    assert tiers.tolist() == [0, 3, 1]
    assert tiers.dtype == np.int16
    with pytest.raises(ValueError, match=r"shape \(3,\), but there are 4 clients"):
        by_list([0, 3, 1], num_tiers=4, num_clients=4)
    with pytest.raises(ValueError, match=r"client 1 is in tier index 4, which must be from 0 \(tier1\) to 3"):
        by_list([0, 4, -1], num_tiers=4, num_clients=3)
    with pytest.raises(ValueError, match="client 0 is in tier index -1"):
        by_list([-1], num_tiers=4, num_clients=1)
    with pytest.raises(ValueError, match="whole numbers"):
        by_list(np.array([0.0, 1.5]), num_tiers=4, num_clients=2)


def table(macs_per_s: list[float]) -> DeviceTable:
    ones = np.ones(len(macs_per_s))
    return DeviceTable(np.arange(len(ones)), np.array(macs_per_s), ones, ones, ones, 0 * ones)


def test_a_device_belongs_to_the_highest_tier_it_trains_in_time() -> None:
    # 3 * upper * 10 <= macs_per_s * 2: tiers need 1500, 3000 and 6000 MACs per second.
    devices = table([1.0, 1500.0, 2999.0, 3000.0, 5999.0, 6000.0, 1e9])
    tiers = by_device_table(devices, (100.0, 200.0, 400.0), batch_size=10, max_step_s=2.0)
    assert tiers.tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert tiers.dtype == np.int16


@given(
    speeds=st.lists(st.floats(1, 1e6), min_size=1, max_size=30),
    uppers=st.lists(st.integers(1, 10_000), min_size=1, max_size=6, unique=True).map(sorted),
)
def test_the_device_rule_follows_its_words(speeds: list[float], uppers: list[int]) -> None:
    tiers = by_device_table(table(speeds), uppers, batch_size=4, max_step_s=0.5)
    for speed, tier in zip(speeds, tiers, strict=True):
        in_time = [i for i, upper in enumerate(uppers) if 3 * upper * 4 / speed <= 0.5]
        assert tier == max(in_time, default=0)


def test_device_rules_that_make_no_sense_are_refused() -> None:
    devices = table([1.0])
    for batch_size, max_step_s in ((0, 1.0), (1, 0.0), (1, math.nan)):
        with pytest.raises(ValueError, match="must be positive"):
            by_device_table(devices, (1.0,), batch_size=batch_size, max_step_s=max_step_s)
    for uppers in ((), (2.0, 1.0), (0.0, 1.0)):
        with pytest.raises(ValueError, match="strictly increasing"):
            by_device_table(devices, uppers, batch_size=1, max_step_s=1.0)
