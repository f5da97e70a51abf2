"""Subspaces: the limit holds, the client can train, nothing is dropped without need, no operator is favoured."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from fedloom.platform.methods.fedoras_sampling import GreedyPaths, communication_limit, sample_subspace
from fedloom.platform.spaces.operator_choice import OperatorChoiceSpace
from fedloom.platform.spaces.registry import build_space
from fedloom.platform.spaces.slices import Subspace
from fedloom.platform.spaces.space_config import SpaceConfig
from fedloom.tiers.costs import CostTable, size_of


def table_of(measure: str, fixed: float, rows: list[list[float]], reduce: str = "sum") -> CostTable:
    return CostTable(measure, fixed, tuple(map(tuple, rows)), reduce)


@st.composite
def problems(draw: st.DrawFn) -> tuple[CostTable, CostTable, float, float]:
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    sizes = [[float(draw(st.integers(0, 9))) for _ in range(n)] for n in shape]
    cost = st.one_of(st.integers(0, 9).map(float), st.just(math.inf))
    costs = [[draw(cost) for _ in range(n)] for n in shape]
    reduce = draw(st.sampled_from(["sum", "max"]))
    limit, budget = float(draw(st.integers(0, 60))), float(draw(st.integers(0, 30)))
    return table_of("parameters", 2, sizes), table_of("macs", 3, costs, reduce), limit, budget


def some_path_fits(sizes: CostTable, costs: CostTable, limit: float, budget: float) -> bool:
    """The slow, obvious reference."""
    paths = itertools.product(*(range(len(row)) for row in sizes.options))
    return any(sizes.cost(path) <= limit and costs.cost(path) <= budget for path in paths)


def supported(costs: CostTable) -> Subspace:
    return tuple(tuple(o for o, cost in enumerate(row) if cost < math.inf) for row in costs.options)


@settings(max_examples=300, deadline=None)
@given(problems(), st.integers(0, 99))
def test_the_laws_of_a_subspace(problem: tuple[CostTable, CostTable, float, float], seed: int) -> None:
    sizes, costs, limit, budget = problem
    rng = np.random.default_rng(seed)
    if not some_path_fits(sizes, costs, limit, budget):
        with pytest.raises(ValueError, match=r"is below|no path is within both"):
            sample_subspace(sizes, limit, rng, costs, budget)
        return
    kept = sample_subspace(sizes, limit, rng, costs, budget)
    assert size_of(sizes, kept) <= limit
    assert all(options and list(options) == sorted(set(options)) for options in kept)
    everything = supported(costs)
    for row, options, known in zip(sizes.options, kept, everything, strict=True):
        assert {o for o in known if row[o] == 0} <= set(options) <= set(known)
    GreedyPaths(costs, kept, budget).sample(rng)
    if size_of(sizes, everything) <= limit:
        assert kept == everything


@settings(max_examples=100, deadline=None)
@given(problems(), st.integers(0, 99))
def test_pruning_stops_as_soon_as_it_fits(problem: tuple[CostTable, CostTable, float, float], seed: int) -> None:
    sizes, costs, limit, budget = problem
    everything = supported(costs)
    if some_path_fits(sizes, costs, limit, budget) and size_of(sizes, everything) > limit:
        kept = sample_subspace(sizes, limit, np.random.default_rng(seed), costs, budget)
        dropped = [
            row[option]
            for row, before, after in zip(sizes.options, everything, kept, strict=True)
            for option in set(before) - set(after)
        ]
        assert size_of(sizes, kept) + max(dropped) > limit


def test_by_hand() -> None:
    sizes = table_of("parameters", 10, [[4, 0], [3, 5]])
    rng = np.random.default_rng(0)
    assert sample_subspace(sizes, 22, rng) == ((0, 1), (0, 1))
    # 13 leaves room for the smaller operator of the second layer and nothing else.
    assert sample_subspace(sizes, 13, rng) == ((1,), (0,))
    # Which operator of the three goes first decides: the 4, the 5, or the 3 and then the 4.
    found = {sample_subspace(sizes, 18, rng) for _ in range(60)}
    assert found == {((1,), (0, 1)), ((0, 1), (0,)), ((1,), (1,))}


def test_the_clients_cheapest_path_is_not_cut_off() -> None:
    sizes = table_of("parameters", 0, [[1, 5], [1, 5]])
    costs = table_of("macs", 0, [[10, 1], [10, 1]])
    rng = np.random.default_rng(0)
    kept = {sample_subspace(sizes, 6, rng, costs, 11) for _ in range(50)}
    assert kept == {((0,), (1,)), ((1,), (0,))}
    free = {sample_subspace(sizes, 6, rng) for _ in range(100)}
    assert free == kept | {((0,), (0,))}


def test_operators_that_the_device_does_not_support_are_neither_sent_nor_take_the_place_of_others() -> None:
    sizes = table_of("parameters", 0, [[4, 3, 0], [5, 2]])
    costs = table_of("macs", 0, [[math.inf, 1, math.inf], [math.inf, 1]])
    for seed in range(20):
        assert sample_subspace(sizes, 5, np.random.default_rng(seed), costs, 2) == ((1,), (1,))


def test_a_compromise_survives_where_the_smallest_and_the_cheapest_conflict() -> None:
    sizes = table_of("parameters", 0, [[1, 5, 3]] * 2)
    costs = table_of("macs", 0, [[10, 1, 3]] * 2)
    for seed in range(50):
        assert sample_subspace(sizes, 6, np.random.default_rng(seed), costs, 6) == ((2,), (2,))


def test_operators_are_pruned_with_equal_probability() -> None:
    sizes = table_of("parameters", 0, [[1] * 8 + [0]] * 4)
    rng = np.random.default_rng(0)
    counts = np.zeros((4, 9))
    for _ in range(2000):
        for layer, options in enumerate(sample_subspace(sizes, 16, rng)):
            counts[layer, list(options)] += 1
    assert (counts[:, 8] == 2000).all()
    # Half of the 32 operators stay: 1000 times each, standard deviation 22.
    assert np.abs(counts[:, :8] - 1000).max() < 100


@pytest.mark.parametrize(
    ("limit", "budget", "message"),
    [
        (12, 99, r"a communication budget of 12 parameters is below one operator per layer, which takes 13"),
        (99, 1, r"a training budget of 1 macs is below the cheapest path, which takes 2"),
        (13, 5, r"no path is within both the communication budget of 13 parameters and the training budget of 5 macs"),
    ],
)
def test_hopeless_budgets_are_refused_with_numbers(limit: float, budget: float, message: str) -> None:
    sizes = table_of("parameters", 10, [[4, 0], [3, 5]])
    costs = table_of("macs", 1, [[2, 0], [8, 1]])
    with pytest.raises(ValueError, match=message):
        sample_subspace(sizes, limit, np.random.default_rng(0), costs, budget)


def test_a_training_budget_needs_its_table() -> None:
    sizes = table_of("parameters", 10, [[4, 0]])
    with pytest.raises(ValueError, match="given together"):
        sample_subspace(sizes, 99, np.random.default_rng(0), None, 5)


@pytest.fixture(scope="module")
def digits() -> OperatorChoiceSpace:
    """The space of the digits; to count its operators' costs takes longer than all that is done with them here."""
    space = build_space(SpaceConfig("cnn_digits"))
    assert isinstance(space, OperatorChoiceSpace)
    return space


def test_communication_budgets_resolve(digits: OperatorChoiceSpace) -> None:
    table, limit = communication_limit(digits, "fraction", 0.5)
    assert (table.measure, limit) == ("parameters", digits.num_parameters.supernet / 2)
    assert communication_limit(digits, "parameters", 9e4) == (table, 9e4)
    assert communication_limit(digits, "bytes", 5e5) == (digits.cost_table("bytes"), 5e5)


@pytest.mark.parametrize(
    ("unit", "value", "message"),
    [
        ("fraction", 1.5, "above 0 and at most 1, given 1.5"),
        ("fraction", 0, "given 0"),
        ("bytes", -1, "above 0, given -1"),
        ("bytes", math.nan, "given nan"),
    ],
)
def test_impossible_communication_budgets(digits: OperatorChoiceSpace, unit: str, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        communication_limit(digits, unit, value)


@pytest.mark.parametrize("unit", ["fraction", "bytes"])
def test_what_travels_is_within_the_budget(digits: OperatorChoiceSpace, unit: str) -> None:
    value = 0.5 if unit == "fraction" else 300_000
    sizes, limit = communication_limit(digits, unit, value)
    tensors = digits.initial_weights(torch.Generator().manual_seed(0))
    rng = np.random.default_rng(0)
    for _ in range(10):
        kept = sample_subspace(sizes, limit, rng, digits.cost_table("macs"), digits.cost_table("macs").smallest)
        parts = [tensors[name] for name in digits.subspace_slices(kept)]
        if unit == "bytes":
            assert sum(t.numel() * t.element_size() for t in parts) == size_of(sizes, kept) <= limit
        else:
            assert size_of(sizes, kept) <= limit
