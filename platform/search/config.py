"""The configuration of a search, and the registry of searchers."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

from fedloom.platform.clients.networks import ESTIMATED, STATISTICS
from fedloom.platform.plugins import PluginError, Registry, is_import_path
from fedloom.platform.search.base import Interval, Searcher
from fedloom.platform.search.criterion import METRIC_TEXT, METRICS
from fedloom.platform.search.evolution import EvolutionSearch
from fedloom.platform.search.nsga2 import METRIC, OBJECTIVES, NSGA2Search
from fedloom.platform.search.own import OwnSearcher, check_searcher
from fedloom.platform.search.random_search import RandomSearch
from fedloom.platform.settings import ONE_OR_MORE, PART, SHARE, UP_TO_A_MILLION, ComponentName, OneOf, component_specs
from fedloom.platform.spaces.genome import Genome
from fedloom.tiers.costs import CostTable


@dataclass
class SearchConfig:
    """Search of one tier (FedorAS, stage 2); the defaults are the paper's for CIFAR."""

    searcher: Annotated[str, ComponentName("searcher"), "the search algorithm"] = "nsga2"
    population: Annotated[int, UP_TO_A_MILLION, "nsga2 and evolution: models per population"] = 128
    offspring: Annotated[int, UP_TO_A_MILLION, "nsga2 and random: models per generation"] = 64
    mutation: Annotated[float, PART, "probability that a gene changes"] = 0.1
    parents: Annotated[float, SHARE, "evolution: number of parents as a share of the population"] = 0.25
    budget: Annotated[int, ONE_OR_MORE, "number of models to score"] = 1000
    metric: Annotated[str, METRICS, METRIC_TEXT] = "accuracy"
    objectives: Annotated[
        str, OneOf(OBJECTIVES), "nsga2: ranks by the metric (cost is a constraint), or by metric and cost"
    ] = METRIC
    statistics: Annotated[
        str,
        OneOf(STATISTICS),
        "batch norms of a path: estimated for it on unlabelled samples, or averaged over clients",
    ] = ESTIMATED
    validation_share: Annotated[float, SHARE, "share of the validation data used for scoring (App. K.1)"] = 1.0
    options: Annotated[dict[str, Any], "options of a user's own searcher, by name"] = field(default_factory=dict)


@dataclass(frozen=True)
class SearchProblem:
    """A searcher's problem: the architectures of a space whose cost lies in an interval.

    Attributes:
        options: number of options per decision.
        genome: how architectures are drawn, mutated and crossed.
        table: costs, in the interval's unit.
        seed: the root of the search's random streams; tiers with the same seed differ by their intervals.
        budget: the number of models to score, failed ones included.
        config: the other settings.
    """

    options: tuple[int, ...]
    genome: Genome
    table: CostTable
    interval: Interval
    seed: int
    budget: int
    config: SearchConfig


def nsga2(problem: SearchProblem) -> Searcher:
    """NSGA-II (FedorAS, stage 2)."""
    p, config = problem, problem.config
    return NSGA2Search(
        p.options,
        p.table,
        p.interval,
        p.seed,
        population=config.population,
        offspring=config.offspring,
        mutation=config.mutation,
        budget=p.budget,
        genome=p.genome,
        objectives=config.objectives,
    )


def evolution(problem: SearchProblem) -> Searcher:
    """Evolution by mutation and crossover of the best (OFA, SuperFedNAS)."""
    p, config = problem, problem.config
    return EvolutionSearch(
        p.options,
        p.table,
        p.interval,
        p.seed,
        population=config.population,
        parents=config.parents,
        mutation=config.mutation,
        budget=p.budget,
        genome=p.genome,
    )


def random(problem: SearchProblem) -> Searcher:
    """Uniform draws inside the interval, the baseline at equal budget."""
    p = problem
    return RandomSearch(p.options, p.table, p.interval, p.seed, batch=p.config.offspring, budget=p.budget)


SEARCHERS: Registry[Callable[[SearchProblem], Searcher]] = Registry(
    "searcher", {"nsga2": nsga2, "random": random, "evolution": evolution}, ("problem",)
)


def build_searcher(problem: SearchProblem, key: str = "method.search") -> Searcher:
    """The configured searcher for a problem.

    Raises ValueError for an unknown searcher or a setting out of range, PluginError for an object that is no searcher.
    """
    config = problem.config
    try:
        choice = component_specs([(SEARCHERS, config.searcher)], config.options, f"{key}.options")[0]
    except PluginError as error:
        raise PluginError(f"{key}.searcher: {error}") from error
    searcher = SEARCHERS.make(choice)(problem)
    if not is_import_path(config.searcher):
        return searcher
    return OwnSearcher(config.searcher, searcher, problem.options, problem.table, problem.interval)


def generations_left(problem: SearchProblem, scored: int) -> int:
    """The number of generations in which the rest of the budget is scored; a user's own searcher may need others."""
    config, left = problem.config, problem.budget - scored
    first = config.offspring if config.searcher == "random" else config.population
    later = config.population if config.searcher == "evolution" else config.offspring
    if scored == 0:
        return 1 + math.ceil(max(0, left - first) / later)
    return math.ceil(max(0, left) / later)


def try_searcher(problem: SearchProblem, key: str = "method.search") -> None:
    """Tests a user's searcher on the problem; a one-line PluginError if it fails."""
    if is_import_path(problem.config.searcher):
        check_searcher(problem.config.searcher, build_searcher(problem, key), build_searcher(problem, key))
