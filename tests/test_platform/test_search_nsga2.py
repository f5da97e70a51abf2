"""What NSGA-II does beyond the contract of searchers, and its operators."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from pymoo.core.population import Population
from pymoo.core.problem import Problem

from fedloom.platform.search.base import Architecture, Interval, Searcher, pareto_front, winner
from fedloom.platform.search.config import SearchConfig, SearchProblem
from fedloom.platform.search.generations import NSGA2Search, RandomSearch
from fedloom.platform.search.nsga2_proposer import (
    DistinctSampling,
    GenomeMutation,
    HalfGeneCrossover,
    IntervalRepair,
    NewOnly,
)
from fedloom.platform.search.sampling import IntervalSampler, sample_new
from fedloom.platform.spaces.genome import PlainGenome
from fedloom.tiers.costs import CostTable

ROWS = tuple(tuple(float((7 * d + 13 * o * o) % 41) for o in range(9)) for d in range(16))
LARGE = CostTable("macs", 100.0, ROWS)
TIER = Interval(350.0, 420.0)
VALUES = np.random.Generator(np.random.PCG64(5)).normal(size=(16, 9))


def separable(architecture: Architecture, values: np.ndarray = VALUES) -> float:
    """A synthetic metric: the sum of one value per (decision, option)."""
    return float(sum(values[i, o] for i, o in enumerate(architecture)))


def problem_of(table: CostTable, interval: Interval, seed: int, budget: int, **config: Any) -> SearchProblem:
    options = tuple(len(row) for row in table.options)
    return SearchProblem(options, PlainGenome(options), table, interval, seed, budget, SearchConfig(**config))


def run(searcher: Searcher, values: np.ndarray) -> None:
    while candidates := searcher.ask():
        metrics = [separable(a, values) for a in candidates]
        searcher.tell(candidates, metrics, [-metric for metric in metrics])


def test_ranking_by_the_metric_alone_finds_the_best_winners() -> None:
    """On eight landscapes, of as many models: with cost as an objective, most of them are only cheap."""
    winners: dict[str, list[float]] = {"metric": [], "metric_and_cost": [], "random": []}
    for seed in range(8):
        values = np.random.Generator(np.random.PCG64(seed)).normal(size=(16, 9))
        searches: dict[str, Searcher] = {
            ranked: NSGA2Search(problem_of(LARGE, TIER, seed, 500, population=64, offspring=32, objectives=ranked))
            for ranked in ("metric", "metric_and_cost")
        }
        searches["random"] = RandomSearch(problem_of(LARGE, TIER, seed, 500))
        for name, searcher in searches.items():
            run(searcher, values)
            assert len(searcher.history) == 500
            winners[name].append(winner(searcher.history).metric)
    means = {name: round(float(np.mean(metrics)), 1) for name, metrics in winners.items()}
    assert means == {"metric": 17.9, "metric_and_cost": 15.7, "random": 10.2}


def test_nsga2_finds_the_optimum_of_an_easy_problem() -> None:
    """Every model's metric is its cost: all lie on the front, and the best model is the largest of the tier."""
    table = CostTable("macs", 0.0, ((0.0, 1.0, 2.0),) * 8)
    searcher = NSGA2Search(problem_of(table, Interval(-1.0, 12.0), 0, 600, population=32, offspring=16))
    while candidates := searcher.ask():
        searcher.tell(candidates, [float(sum(a)) for a in candidates], [0.0] * len(candidates))
    assert winner(searcher.history).metric == 12.0
    front = pareto_front(searcher.history)
    assert [s.cost for s in front] == [s.metric for s in front]


@pytest.mark.filterwarnings("error")
def test_nsga2_breeds_from_no_failed_model_while_there_are_sound_ones() -> None:
    """The cheapest models fail: on cost alone they would be non-dominated and crowd the population."""
    searcher = NSGA2Search(problem_of(LARGE, TIER, 0, 200, population=32, offspring=16))
    while candidates := searcher.ask():
        failed = [LARGE.cost(a) < 380 for a in candidates]
        metrics = [math.nan if f else separable(a) for f, a in zip(failed, candidates, strict=True)]
        searcher.tell(candidates, metrics, [0.0] * len(candidates))
    assert sum(not s.feasible for s in searcher.history) > 20
    parents = searcher._proposer.algorithm.pop  # type: ignore[union-attr]
    assert len(parents) == 32
    assert all(LARGE.cost(individual.X) >= 380 for individual in parents)


# --- operators


def choices_of(table: CostTable) -> Problem:
    last = np.array([len(row) - 1 for row in table.options])
    return Problem(len(last), n_obj=2, n_ieq_constr=1, xl=np.zeros_like(last), xu=last, vtype=int)


def test_thousands_of_children_are_valid() -> None:
    """The tier is narrow and some operators unsupported, so that most children need repair."""
    rows = tuple((*row[:8], float("inf")) for row in ROWS)
    table, interval = CostTable("macs", 100.0, rows), Interval(420.0, 424.0)
    sampler, problem = IntervalSampler(table, interval), choices_of(table)
    rng = np.random.Generator(np.random.PCG64(0))
    parents = DistinctSampling(lambda n, rng: sample_new(sampler, n, (), rng))(problem, 200, random_state=rng)
    pairs = parents[rng.integers(200, size=(1_000, 2))]
    children = HalfGeneCrossover()(problem, pairs, random_state=rng)
    children = GenomeMutation(PlainGenome((9,) * 16), 0.3)(problem, children, random_state=rng)
    bred = children.get("X").copy()
    X = IntervalRepair(sampler)(problem, children, random_state=rng).get("X")
    assert X.shape == (2_000, 16)
    assert np.issubdtype(X.dtype, np.integer)
    assert X.min() >= 0
    assert X.max() <= 7
    costs = [table.cost(row) for row in X.tolist()]
    assert all(interval.contains(cost) for cost in costs)
    assert sum(not interval.contains(table.cost(row)) for row in bred.tolist()) > 1_000
    # A repair keeps most genes: a fresh draw would share about one in eight.
    assert (bred == X).mean() > 0.7


@given(st.integers(1, 17), st.integers(0, 99))
def test_crossover_takes_half_of_the_genes_from_the_other(genes: int, seed: int) -> None:
    problem = Problem(genes, n_obj=2, xl=np.zeros(genes, dtype=int), xu=np.ones(genes, dtype=int), vtype=int)
    zero, one = Population.new("X", np.stack([np.zeros(genes, dtype=int), np.ones(genes, dtype=int)]))
    pairs = np.array([[zero, one]] * 8).view(Population)
    rng = np.random.Generator(np.random.PCG64(seed))
    X = HalfGeneCrossover()(problem, pairs, random_state=rng).get("X")
    first, second = X[:8], X[8:]
    assert set(first.sum(axis=1)) <= {genes // 2, (genes + 1) // 2}
    assert np.array_equal(first + second, np.ones_like(first))


def test_crossover_takes_every_gene_equally_often() -> None:
    problem = Problem(4, n_obj=2, xl=np.zeros(4, dtype=int), xu=np.ones(4, dtype=int), vtype=int)
    zero, one = Population.new("X", np.stack([np.zeros(4, dtype=int), np.ones(4, dtype=int)]))
    pairs = np.array([[zero, one]] * 4000).view(Population)
    X = HalfGeneCrossover()(problem, pairs, random_state=np.random.Generator(np.random.PCG64(0))).get("X")[:4000]
    assert np.abs(X.mean(axis=0) - 0.5).max() < 0.04  # five standard deviations
    assert len({tuple(row) for row in X.tolist()}) == 6


def test_mutation_moves_to_every_other_option_at_its_rate() -> None:
    last = np.array([3, 0, 1])
    problem = Problem(3, n_obj=2, xl=np.zeros_like(last), xu=last, vtype=int)
    before = np.tile([2, 0, 1], (5_000, 1))
    rng = np.random.Generator(np.random.PCG64(0))
    genome = PlainGenome((4, 1, 2))
    after = GenomeMutation(genome, 0.3)(problem, Population.new("X", before.copy()), random_state=rng).get("X")
    shares = [np.bincount(after[:, gene], minlength=4) / 5_000 for gene in range(3)]
    assert np.allclose(shares[0], [0.1, 0.1, 0.7, 0.1], atol=0.03)
    assert shares[1].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert np.allclose(shares[2], [0.3, 0.7, 0.0, 0.0], atol=0.03)
    few = before[:100]
    still = GenomeMutation(genome, 0.0)(problem, Population.new("X", few.copy()), random_state=rng).get("X")
    assert np.array_equal(still, few)


def test_repair_leaves_sound_children_alone_and_moves_others_little() -> None:
    table = CostTable("macs", 0.0, ((0.0, 1.0, 2.0),) * 4)
    repair = IntervalRepair(IntervalSampler(table, Interval(3.0, 4.0)))
    rng = np.random.Generator(np.random.PCG64(0))
    assert repair.repair_one((1, 1, 1, 1), rng) == (1, 1, 1, 1)
    for _ in range(20):
        repaired = repair.repair_one((1, 1, 1, 0), rng)
        assert sum(repaired) == 4
        assert sum(a != b for a, b in zip(repaired, (1, 1, 1, 0), strict=True)) == 1


def test_repair_draws_anew_where_no_single_move_helps() -> None:
    # From (0, 0) every single move leaves 6, 11 or 100 for the tier's 5.
    table = CostTable("macs", 0.0, ((1.0, 3.0, 100.0), (5.0, 2.0, 100.0)))
    repair = IntervalRepair(IntervalSampler(table, Interval(4.5, 5.0)))
    assert repair.repair_one((0, 0), np.random.Generator(np.random.PCG64(0))) == (1, 1)


def test_duplicates_of_anything_asked_are_dropped() -> None:
    asked: set[Architecture] = {(0, 0)}
    children = Population.new("X", np.array([[0, 0], [1, 0], [1, 0], [1, 1], [0, 1]]))
    others = Population.new("X", np.array([[1, 1]]))
    assert NewOnly(asked).do(children, others).get("X").tolist() == [[1, 0], [0, 1]]
