"""Tiers: half-open intervals that join without gaps, and GPU shares that fill whole devices."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.tiers.bounds import tier_of
from fedloom.tiers.tier import Tier, make_tiers, nearest_num_gpus


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


def test_a_wrong_number_of_values_is_refused() -> None:
    with pytest.raises(ValueError, match="num_gpus has 2 values for 3 tiers"):
        make_tiers((1, 2, 3), num_gpus=(0.5, 0.5))
    with pytest.raises(ValueError, match="profile has 1 values for 3 tiers"):
        make_tiers((1, 2, 3), profile=["phone"])
    with pytest.raises(ValueError, match="no tier bounds"):
        make_tiers(())
    with pytest.raises(ValueError, match=r"tier tier2: bounds \(2, 1\]"):
        make_tiers((2, 1))
