"""Clients to tiers: exact numbers, uniform membership, checked lists, and the rule for device tables."""

import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.tiers.assignment import by_device_table, by_list, by_shares
from fedloom.tiers.devices import DeviceTable


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
