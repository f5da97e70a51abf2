"""The configuration of a search, and a searcher's problem."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fedloom.platform.search.base import METRIC_TEXT, Interval, Metric
from fedloom.platform.settings import ONE_OR_MORE, PART, SHARE, UP_TO_A_MILLION, ComponentName
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
    metric: Annotated[Metric, METRIC_TEXT] = "accuracy"
    objectives: Annotated[
        Literal["metric", "metric_and_cost"], "nsga2: ranks by the metric (cost is a constraint), or by metric and cost"
    ] = "metric"
    statistics: Annotated[
        Literal["estimated", "averaged"],
        "batch norms of a path: estimated for it on unlabelled samples, or averaged over clients",
    ] = "estimated"
    validation_share: Annotated[float, SHARE, "share of the server's validation data used for scoring (App. K.1)"] = 1.0
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
