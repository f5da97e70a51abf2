"""Search with a cheap score, such as a predictor's, by evolution or NSGA-II without measurements."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fedloom.platform.search.base import Architecture, Interval, Scored, pareto_front, rank
from fedloom.platform.search.constraint import Constraint, inside_interval
from fedloom.platform.search.evolution import Evolution
from fedloom.platform.search.nsga2 import METRIC_AND_COST, NSGA2Search
from fedloom.platform.seeding import stream
from fedloom.platform.spaces.genome import Floats, Genome, Ints, as_array
from fedloom.tiers.costs import CostTable

EVERYTHING = Interval(-math.inf, math.inf)

Score = Callable[[Ints], Floats]
"""Returns predicted metrics (n,), larger is better, of architectures (n, decisions)."""


@dataclass(frozen=True, slots=True)
class PredictedCandidate:
    """An architecture with its predicted metric, its cost, and its generation; to be verified by measurement."""

    architecture: Architecture
    metric: float
    cost: float
    generation: int


def search_predicted(
    genome: Genome,
    score: Score,
    constraint: Constraint,
    *,
    seed: int,
    name: str,
    population: int = 100,
    generations: int = 50,
    parents: float = 0.25,
    mutation: float = 0.1,
    keep: int = 10,
) -> list[PredictedCandidate]:
    """The best `keep` distinct architectures inside the constraint, best first (SuperFedNAS, search stage).

    There are fewer only if no more are inside with a finite score. The random stream is (seed, "predicted_search",
    name).
    Raises ValueError if no architecture is found inside the constraint, or a setting is out of range.
    """
    _at_least_one(generations=generations, keep=keep)
    rng = stream(seed, "predicted_search", name)
    evolution = Evolution(genome, constraint, rng, population=population, parents=parents, mutation=mutation)
    best: list[Scored] = []
    for generation in range(generations):
        proposed = evolution.propose(population)
        if not proposed:
            break
        scored = _scored(proposed, score, constraint, generation)
        evolution.observe(scored)
        best = sorted([*best, *(s for s in scored if s.feasible)], key=rank)[:keep]
    if not evolution.asked:
        raise ValueError(_nothing_inside(constraint, name, rng))
    return [_candidate(s) for s in best]


def predicted_front(
    genome: Genome,
    score: Score,
    table: CostTable,
    *,
    seed: int,
    name: str,
    interval: Interval = EVERYTHING,
    population: int = 100,
    generations: int = 50,
    mutation: float = 0.1,
) -> list[PredictedCandidate]:
    """The Pareto front of predicted metric and cost in a cost range, by default the whole; sorted by cost (NSGA-II).

    The seed of the search comes from the random stream (seed, "predicted_front", name).
    Raises ValueError if the range holds no architecture or a setting is out of range.
    """
    _at_least_one(generations=generations)

    search = NSGA2Search(
        tuple(len(row) for row in table.options),
        table,
        interval,
        int(stream(seed, "predicted_front", name).integers(2**62)),
        population=population,
        offspring=population,
        mutation=mutation,
        budget=population * generations,
        genome=genome,
        objectives=METRIC_AND_COST,
    )
    while candidates := search.ask():
        metrics = score(as_array(candidates)).tolist()
        search.tell(candidates, metrics, [math.nan] * len(candidates))
    if not search.history:
        raise ValueError(
            f"{name}: no architecture costs {table.measure} in ({interval.lower:g}, {interval.upper:g}]; "
            f"the space reaches from {table.smallest:g} to {table.largest:g}: widen the range"
        )
    return [_candidate(s) for s in pareto_front(search.history)]


def _scored(proposed: Sequence[Architecture], score: Score, constraint: Constraint, generation: int) -> list[Scored]:
    rows = as_array(proposed)
    metrics, costs = score(rows), constraint.costs(rows)
    # A predicted cost at the bound may round differently between batches; the reported cost decides.
    feasible = np.isfinite(metrics) & inside_interval(costs, constraint.interval)
    told = zip(proposed, metrics.tolist(), costs.tolist(), feasible.tolist(), strict=True)
    return [Scored(a, metric, math.nan, cost, generation, ok) for a, metric, cost, ok in told]


def _candidate(scored: Scored) -> PredictedCandidate:
    return PredictedCandidate(scored.architecture, scored.metric, scored.cost, scored.generation)


def _nothing_inside(constraint: Constraint, name: str, rng: np.random.Generator) -> str:
    interval = constraint.interval
    return (
        f"{name}: no architecture found with a cost in ({interval.lower:g}, {interval.upper:g}]; "
        f"the nearest reachable cost found is {constraint.nearest(rng):g}: choose another target or widen the interval"
    )


def _at_least_one(**settings: int) -> None:
    for name, value in settings.items():
        if value < 1:
            raise ValueError(f"{name} is {value}, it must be at least 1")
