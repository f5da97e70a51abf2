"""Client selection: uniform, distinct, and as cheap among a million clients as among a hundred."""

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from fedloom.platform.federation.history import ClientRecord
from fedloom.platform.federation.selection import DRAWS_PER_CLIENT, SELECTION_RULES, Choice, Cohort, check_selection, select
from fedloom.platform.plugins import Chosen, PluginError
from fedloom.platform.seeding import stream


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 10_000), unique=True, max_size=30), st.integers(0, 40), st.integers(0, 99), st.booleans()
)
def test_a_cohort_is_distinct_ascending_and_eligible(ids: list[int], size: int, seed: int, asked: bool) -> None:
    eligible = np.array(sorted(ids), dtype=np.int64)
    cohort = select_uniform(eligible, size, stream(seed, "test"), (lambda _: True) if asked else None)
    assert len(cohort.client_ids) == min(size, len(ids))
    assert list(cohort.client_ids) == sorted(set(cohort.client_ids))
    assert set(cohort.client_ids) <= set(ids)
    assert all(type(c) is int for c in cohort.client_ids)
    if asked:
        assert math.isnan(cohort.probability)  # it depends on how many others are available
    else:
        assert cohort.probability == (min(size, len(ids)) / len(ids) if ids else 0.0)


@pytest.mark.parametrize("asked", [False, True])
def test_over_a_thousand_rounds_all_clients_are_chosen_alike(asked: bool) -> None:
    eligible = np.arange(100, 140)
    counts = np.zeros(40)
    pairs = np.zeros((40, 40))
    for round_ in range(1000):
        rng = stream(1, "select", "train", round_)
        chosen = np.array(select_uniform(eligible, 10, rng, (lambda _: True) if asked else None).client_ids) - 100
        counts[chosen] += 1
        pairs[np.ix_(chosen, chosen)] += 1
    # Draws without replacement spread less than the chi-square law; scaled by 1/(1 - 10/40) they follow it.
    statistic = chisquare(counts).statistic / (1 - 10 / 40)
    assert 15 < statistic < 65  # 39 degrees of freedom: 0.01 % and 99.4 %
    expected_pair = 1000 * 10 * 9 / (40 * 39)
    off_diagonal = pairs[np.triu_indices(40, k=1)]
    assert abs(off_diagonal - expected_pair).max() < 6 * expected_pair**0.5


def test_the_chi_square_bound_would_notice_a_favoured_client() -> None:
    counts = np.full(40, 250.0)
    counts[0] += 150
    counts[1] -= 150
    assert not 15 < chisquare(counts).statistic / (1 - 10 / 40) < 65


def test_only_available_clients_are_chosen_uniformly() -> None:
    counts = np.zeros(20)
    for round_ in range(500):
        cohort = select_uniform(np.arange(20), 4, stream(1, "select", round_), lambda c: c % 2 == 0)
        assert len(cohort.client_ids) == 4
        assert cohort.reason == "uniform among available"
        counts[list(cohort.client_ids)] += 1
    assert counts[1::2].sum() == 0
    assert chisquare(counts[::2]).statistic / (1 - 4 / 10) < 30  # 9 degrees of freedom: 99.96 %


def test_too_few_available_clients_make_a_smaller_cohort() -> None:
    assert select_uniform(np.arange(50), 10, stream(1, "x"), lambda c: c in (3, 40)).client_ids in (
        (3, 40),
        (3,),
        (40,),
    )
    assert select_uniform(np.arange(50), 10, stream(1, "x"), lambda _: False).client_ids == ()
    assert select_uniform(np.arange(5), 5, stream(1, "x"), lambda c: c == 3).client_ids == (3,)


def test_nobody_is_asked_twice_and_never_too_many() -> None:
    asked: list[int] = []

    def available(client_id: int) -> bool:
        asked.append(client_id)
        return False

    select_uniform(np.arange(1_000_000), 10, stream(1, "x"), available)
    assert len(asked) == len(set(asked)) <= 10 * DRAWS_PER_CLIENT


def test_no_eligible_client_is_no_cohort() -> None:
    for available in (None, lambda _: True):
        assert select_uniform(np.empty(0, dtype=np.int64), 3, stream(1, "x"), available).client_ids == ()


@pytest.mark.parametrize("asked", [False, True])
def test_a_million_registered_clients_cost_no_more_than_a_hundred(asked: bool) -> None:
    def fastest_s(eligible: np.ndarray) -> float:
        times = []
        for seed in range(40):
            rng = stream(seed, "x")
            started = time.perf_counter()
            select_uniform(eligible, 10, rng, (lambda _: True) if asked else None)
            times.append(time.perf_counter() - started)
        return min(times)

    # A permutation of a million takes a thousand times as long as this bound allows.
    assert fastest_s(np.arange(1_000_000)) < 20 * fastest_s(np.arange(100)) + 1e-3
