"""Which searcher, and how much it may score."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedloom.platform.search.base import Interval, Searcher
from fedloom.platform.search.evolution import EvolutionSearch
from fedloom.platform.search.nsga2 import NSGA2Search
from fedloom.platform.search.random_search import RandomSearch
from fedloom.platform.spaces.genome import Genome
from fedloom.tiers.costs import CostTable

SEARCHERS = ("nsga2", "random", "evolution")


@dataclass
class SearchConfig:
    """Search of one tier (FedorAS, stage 2); the defaults are the paper's for CIFAR.

    `budget` is in models; `validation_share` is the part of the validation set that scores them (App. K.1).
    `random` asks for `offspring` models at a time; `evolution` breeds each generation of `population` models from the
    best, `parents` being their share of the population.
    """

    searcher: str = "nsga2"
    population: int = 128
    offspring: int = 64
    mutation: float = 0.1
    parents: float = 0.25
    budget: int = 1000
    validation_share: float = 1.0


def build_searcher(
    config: SearchConfig,
    options: Sequence[int],
    table: CostTable,
    interval: Interval,
    seed: int,
    budget: int | None = None,
    genome: Genome | None = None,
) -> Searcher:
    """The configured searcher for one tier; `budget` (models) takes the place of the configured one.

    `genome` is what nsga2 and evolution vary, by default every decision as one gene.
    Tiers may share the seed: their streams differ by the interval.
    Raises ValueError for an unknown searcher or a setting out of range.
    """
    if not 0 < config.validation_share <= 1:
        raise ValueError(f"validation_share is {config.validation_share}, it must lie in (0, 1]")
    models = config.budget if budget is None else budget
    if config.searcher == "nsga2":
        return NSGA2Search(
            options,
            table,
            interval,
            seed,
            population=config.population,
            offspring=config.offspring,
            mutation=config.mutation,
            budget=models,
            genome=genome,
        )
    if config.searcher == "evolution":
        return EvolutionSearch(
            options,
            table,
            interval,
            seed,
            population=config.population,
            parents=config.parents,
            mutation=config.mutation,
            budget=models,
            genome=genome,
        )
    if config.searcher == "random":
        return RandomSearch(options, table, interval, seed, batch=config.offspring, budget=models)
    raise ValueError(f"unknown searcher {config.searcher!r}: choose one of {', '.join(SEARCHERS)}")
