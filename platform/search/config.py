"""The configuration of a search, the registry of searchers, and the checks of a user's own."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Annotated, Any, Literal

from fedloom.platform.plugins import PluginError, Registry, blaming, is_import_path
from fedloom.platform.search.base import METRIC_TEXT, Architecture, Interval, Metric, Scored, Searcher, State
from fedloom.platform.search.generations import EvolutionSearch, NSGA2Search, RandomSearch
from fedloom.platform.settings import ONE_OR_MORE, PART, SHARE, UP_TO_A_MILLION, ComponentName, component_specs
from fedloom.platform.spaces.genome import Genome
from fedloom.tiers.costs import CostTable

# -- a user's searcher: tested before a run, its answers checked, its errors reported with its name -------------------

KIND = "searcher"
MEMBERS = ("done", "reason", "history", "ask", "tell", "state", "restore")


class CheckedSearcher:
    """Wraps a user's searcher: PluginError, with the searcher's name, for its errors and invalid answers."""

    def __init__(self, name: str, searcher: Any, options: Sequence[int], table: CostTable, interval: Interval) -> None:
        missing = [member for member in MEMBERS if not hasattr(searcher, member)]
        if missing:
            raise PluginError(
                f"searcher {name!r} gives {type(searcher).__name__}, which has no {', '.join(missing)}: see "
                "fedloom.platform.search.base.Searcher"
            )
        self.name, self.searcher = name, searcher
        self.options, self.table, self.interval = options, table, interval

    @property
    def done(self) -> bool:
        with blaming(KIND, self.name):
            return bool(self.searcher.done)

    @property
    def reason(self) -> str:
        with blaming(KIND, self.name):
            return str(self.searcher.reason)

    @property
    def history(self) -> list[Scored]:
        with blaming(KIND, self.name):
            history = list(self.searcher.history)
        if not all(isinstance(scored, Scored) for scored in history):
            raise PluginError(
                f"searcher {self.name!r}: its history holds {history!r:.60}: give Scored of what was told"
            )
        return history

    def ask(self) -> list[Architecture]:
        with blaming(KIND, self.name):
            answer = self.searcher.ask()
        if not isinstance(answer, list | tuple):
            raise PluginError(f"searcher {self.name!r}: ask gives {answer!r:.60}: give a list of architectures")
        asked = [self._architecture(architecture) for architecture in answer]
        if len(set(asked)) < len(asked):
            raise PluginError(f"searcher {self.name!r}: ask gives an architecture twice")
        return asked

    def _architecture(self, answer: Any) -> Architecture:
        options, table, interval = self.options, self.table, self.interval
        try:
            architecture = tuple(map(index, answer))
        except TypeError:
            architecture = ()
        if len(architecture) != len(options) or not all(0 <= a < n for a, n in zip(architecture, options, strict=True)):
            raise PluginError(
                f"searcher {self.name!r}: ask gives {answer!r:.60}: give tuples of {len(options)} whole numbers, each "
                "below its entry of problem.options"
            )
        cost = table.cost(architecture)
        if not interval.contains(cost):
            raise PluginError(
                f"searcher {self.name!r}: ask gives an architecture of {cost:.6g} {table.measure}, which is outside "
                f"problem.interval ({interval.lower:.6g}, {interval.upper:.6g}]"
            )
        return architecture

    def tell(self, architectures: Sequence[Architecture], metrics: Sequence[float], losses: Sequence[float]) -> None:
        with blaming(KIND, self.name):
            self.searcher.tell(architectures, metrics, losses)

    def state(self) -> State:
        with blaming(KIND, self.name):
            answer = self.searcher.state()
        try:
            state: State = json.loads(json.dumps(answer, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise PluginError(f"searcher {self.name!r}: its state cannot be written as JSON: {error}") from error
        return state

    def restore(self, state: State) -> None:
        with blaming(KIND, self.name):
            self.searcher.restore(state)


def check_searcher(name: str, first: Searcher, second: Searcher) -> None:
    """Tests a searcher on a generation with invented scores, then restores its state; PluginError if it fails."""
    asked = first.ask()
    if asked:
        first.tell(asked, [0.5] * len(asked), [1.0] * len(asked))
    state = first.state()
    second.restore(state)
    for what, there, here in (
        ("the length of its history", len(asked), len(first.history)),
        ("the state that it restores", state, second.state()),
        ("what it asks for when it is restored", first.ask(), second.ask()),
    ):
        if there != here:
            raise PluginError(f"searcher {name!r}: after a generation, {what} is {here!r:.60}: give {there!r:.60}")


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
    return CheckedSearcher(config.searcher, searcher, problem.options, problem.table, problem.interval)


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
