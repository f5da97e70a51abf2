"""The searchers by name, and the checks of a user's own searcher."""

import json
import math
from collections.abc import Callable, Sequence
from operator import index
from typing import Any

from fedloom.platform.plugins import PluginError, Registry, blaming, is_import_path
from fedloom.platform.search.base import Architecture, Scored, Searcher, State
from fedloom.platform.search.config import SearchProblem
from fedloom.platform.search.generations import EvolutionSearch, NSGA2Search, RandomSearch
from fedloom.platform.settings import component_specs

SEARCHERS: Registry[Callable[[SearchProblem], Searcher]] = Registry(
    "searcher", {"nsga2": NSGA2Search, "random": RandomSearch, "evolution": EvolutionSearch}, ("problem",)
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
    return CheckedSearcher(config.searcher, searcher, problem) if is_import_path(config.searcher) else searcher


def generations_left(problem: SearchProblem, num_scored: int) -> int:
    """The number of generations that score the rest of the budget; a user's own searcher may need another number."""
    config, left = problem.config, problem.budget - num_scored
    first = config.offspring if config.searcher == "random" else config.population
    later = config.population if config.searcher == "evolution" else config.offspring
    if num_scored == 0:
        return 1 + math.ceil(max(0, left - first) / later)
    return math.ceil(max(0, left) / later)


# -- a user's searcher: tested before a run, its answers checked, its errors reported with its name -------------------

KIND = "searcher"
MEMBERS = ("history", "ask", "tell", "state", "restore")


class CheckedSearcher:
    """Wraps a user's searcher: PluginError, with the searcher's name, for its errors and invalid answers."""

    def __init__(self, name: str, searcher: Any, problem: SearchProblem) -> None:
        missing = [member for member in MEMBERS if not hasattr(searcher, member)]
        if missing:
            raise PluginError(
                f"searcher {name!r} gives {type(searcher).__name__}, which has no {', '.join(missing)}: see "
                "fedloom.platform.search.base.Searcher"
            )
        self.name, self.searcher, self.problem = name, searcher, problem

    @property
    def history(self) -> list[Scored]:
        with blaming(KIND, self.name):
            history = list(self.searcher.history)
        if not all(isinstance(scored, Scored) for scored in history):
            raise PluginError(
                f"searcher {self.name!r}: its history holds {history!r:.60}: give one Scored for each architecture told"
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
        options, table, interval = self.problem.options, self.problem.table, self.problem.interval
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


def try_searcher(problem: SearchProblem, key: str = "method.search") -> None:
    """Tries a user's searcher on a generation with invented scores, and restores its state; PluginError if it fails."""
    name = problem.config.searcher
    if not is_import_path(name):
        return
    first, second = build_searcher(problem, key), build_searcher(problem, key)
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
