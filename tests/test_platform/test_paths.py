"""Path samplers: the budget holds, a path is always found, every feasible path comes up."""

import itertools
import math
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fedloom.platform.methods.fedoras_sampling import GreedyPaths, RejectionPaths, path_sampler
from fedloom.platform.spaces.slices import Subspace
from fedloom.tiers.costs import CostTable

TINY = CostTable("macs", 10.0, ((1.0, 5.0, 9.0), (0.0, 4.0), (0.0, 2.0, 7.0)))
ALL: Subspace = ((0, 1, 2), (0, 1), (0, 1, 2))


def feasible(table: CostTable, kept: Subspace, budget: float) -> set[tuple[int, ...]]:
    """The slow, obvious reference."""
    return {path for path in itertools.product(*kept) if table.cost(path) <= budget}


@st.composite
def problems(draw: st.DrawFn) -> tuple[CostTable, Subspace, float]:
    costs = st.one_of(st.integers(0, 20).map(float), st.just(math.inf))
    rows = draw(st.lists(st.lists(costs, min_size=1, max_size=4), min_size=1, max_size=4))
    kept = tuple(
        tuple(sorted(draw(st.sets(st.integers(0, len(row) - 1), min_size=1, max_size=len(row))))) for row in rows
    )
    table = CostTable("macs", 5.0, tuple(map(tuple, rows)), draw(st.sampled_from(["sum", "max"])))
    return table, kept, float(draw(st.integers(0, 60)))


@settings(max_examples=200, deadline=None)
@given(problems(), st.sampled_from([GreedyPaths, RejectionPaths]), st.integers(0, 99))
def test_a_path_is_found_if_and_only_if_there_is_one(
    problem: tuple[CostTable, Subspace, float], kind: type[GreedyPaths] | type[RejectionPaths], seed: int
) -> None:
    table, kept, budget = problem
    paths = feasible(table, kept, budget)
    if not paths:
        with pytest.raises(ValueError, match="below the cheapest path"):
            kind(table, kept, budget)
        return
    sampler = kind(table, kept, budget)
    rng = np.random.default_rng(seed)
    assert {sampler.sample(rng) for _ in range(20)} <= paths


@settings(max_examples=40, deadline=None)
@given(problems())
def test_greedy_visits_every_path_within_the_budget(problem: tuple[CostTable, Subspace, float]) -> None:
    table, kept, budget = problem
    paths = feasible(table, kept, budget)
    if 0 < len(paths) <= 40:
        sampler = GreedyPaths(table, kept, budget)
        rng = np.random.default_rng(0)
        seen: set[tuple[int, ...]] = set()
        for _ in range(100):
            seen |= {sampler.sample(rng) for _ in range(100)}
            if seen == paths:
                break
        assert seen == paths


@pytest.mark.parametrize("budget", [11, 13, 18, 30, math.inf])
def test_rejection_is_uniform_over_what_fits(budget: float) -> None:
    sampler = RejectionPaths(TINY, ALL, budget)
    rng = np.random.default_rng(0)
    paths = feasible(TINY, ALL, budget)
    counts = Counter(sampler.sample(rng) for _ in range(300 * len(paths)))
    assert set(counts) == paths
    assert all(abs(count - 300) < 90 for count in counts.values())


def slow_greedy(table: CostTable, kept: Subspace, budget: float, rng: np.random.Generator) -> tuple[int, ...]:
    """The paper's words, one by one, for an additive table."""
    rows = table.options
    paying = [i for i, options in enumerate(kept) if min(rows[i][o] for o in options) > 0]
    order = [int(i) for i in rng.permutation(paying)]
    order += [int(i) for i in rng.permutation([i for i in range(len(kept)) if i not in paying])]
    path = [-1] * len(kept)
    spent = table.fixed
    for position, layer in enumerate(order):
        reserve = sum(min(rows[later][o] for o in kept[later]) for later in order[position + 1 :])
        fitting = [o for o in kept[layer] if spent + rows[layer][o] + reserve <= budget]
        path[layer] = fitting[int(rng.integers(len(fitting)))]
        spent += rows[layer][path[layer]]
    return tuple(path)


def test_greedy_draws_like_the_description() -> None:
    kept = ((0, 1, 2), (0, 1), (1, 2))
    sampler = GreedyPaths(TINY, kept, 21.0)
    draws = 6000
    rng, slow_rng = np.random.default_rng(1), np.random.default_rng(2)
    fast = Counter(sampler.sample(rng) for _ in range(draws))
    slow = Counter(slow_greedy(TINY, kept, 21.0, slow_rng) for _ in range(draws))
    assert set(fast) == set(slow) == feasible(TINY, kept, 21.0)
    assert all(abs(fast[path] - slow[path]) < 5 * math.sqrt(2 * slow[path]) + 5 for path in slow)


def test_layers_that_must_pay_come_first() -> None:
    # Alone among the fitting, the dear operator of the free layer would starve the paying layer's choice.
    table = CostTable("macs", 0.0, ((0.0, 6.0), (1.0, 7.0)))
    sampler = GreedyPaths(table, ((0, 1), (0, 1)), 7.0)
    rng = np.random.default_rng(0)
    counts = Counter(sampler.sample(rng) for _ in range(4000))
    assert counts[0, 1] / 4000 == pytest.approx(1 / 2, abs=0.04)
    assert counts[0, 0] / 4000 == pytest.approx(1 / 4, abs=0.04)
    assert counts[1, 0] / 4000 == pytest.approx(1 / 4, abs=0.04)


def test_operators_are_drawn_uniformly_where_the_budget_does_not_bind() -> None:
    sampler = GreedyPaths(TINY, ALL, 100.0)
    rng = np.random.default_rng(0)
    counts = Counter(sampler.sample(rng) for _ in range(18 * 300))
    assert len(counts) == 18
    assert all(abs(count - 300) < 90 for count in counts.values())


@pytest.mark.parametrize("kind", [GreedyPaths, RejectionPaths])
def test_a_hopeless_budget_is_refused_with_numbers(kind: type[GreedyPaths] | type[RejectionPaths]) -> None:
    with pytest.raises(ValueError, match=r"a budget of 14 macs is below .* which takes 15"):
        kind(TINY, ((1, 2), (0,), (0,)), 14)
    with pytest.raises(ValueError, match="which takes inf"):
        kind(CostTable("macs", 0.0, ((math.inf,),)), ((0,),), math.inf)


def test_rejection_gives_up() -> None:
    table = CostTable("macs", 0.0, ((0.0,) + (9.0,) * 30,) * 6)
    sampler = RejectionPaths(table, (tuple(range(31)),) * 6, 0.0, max_attempts=50)
    with pytest.raises(ValueError, match="none of 50 uniform paths was within 0 macs: use the sampler greedy"):
        sampler.sample(np.random.default_rng(0))


def test_a_subspace_of_another_space_is_refused() -> None:
    with pytest.raises(ValueError, match="the subspace has 2 layers, the macs table 3"):
        GreedyPaths(TINY, ((0,), (0,)), 50)
    with pytest.raises(ValueError, match=r"layer 1 keeps \(2,\) of the operators 0 to 1"):
        GreedyPaths(TINY, ((0,), (2,), (0,)), 50)


def test_samplers_by_name() -> None:
    assert isinstance(path_sampler("greedy", TINY, ALL, 50), GreedyPaths)
    assert isinstance(path_sampler("rejection", TINY, [[0], [1], [2]], 50), RejectionPaths)
    with pytest.raises(ValueError, match="unknown path sampler 'best': known are greedy, rejection"):
        path_sampler("best", TINY, ALL, 50)


def test_a_draw_is_the_same_for_the_same_generator() -> None:
    sampler = GreedyPaths(TINY, ALL, 20)
    first, again = np.random.default_rng(3), np.random.default_rng(3)
    assert [sampler.sample(first) for _ in range(20)] == [sampler.sample(again) for _ in range(20)]


def test_greedy_is_quick() -> None:
    rng = np.random.default_rng(0)
    table = CostTable("macs", 0.0, tuple(map(tuple, rng.integers(0, 100, (16, 9)).astype(float).tolist())))
    sampler = GreedyPaths(table, (tuple(range(9)),) * 16, table.smallest + 300)
    fastest_s = math.inf
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(50):
            sampler.sample(rng)
        fastest_s = min(fastest_s, (time.perf_counter() - start) / 50)
    assert fastest_s < 60e-6
