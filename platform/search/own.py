"""A user's searcher: tested before a run, its answers checked, its errors reported with its name."""

import json
from collections.abc import Sequence
from operator import index
from typing import Any

from fedloom.platform.plugins import PluginError, blaming
from fedloom.platform.search.base import Architecture, Interval, Scored, Searcher, State
from fedloom.tiers.costs import CostTable

KIND = "searcher"
MEMBERS = ("done", "reason", "history", "ask", "tell", "state", "restore")


class OwnSearcher:
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
            given = self.searcher.ask()
        if not isinstance(given, list | tuple):
            raise PluginError(f"searcher {self.name!r}: ask gives {given!r:.60}: give a list of architectures")
        asked = [self._architecture(architecture) for architecture in given]
        if len(set(asked)) < len(asked):
            raise PluginError(f"searcher {self.name!r}: ask gives an architecture twice")
        return asked

    def _architecture(self, given: Any) -> Architecture:
        options, table, interval = self.options, self.table, self.interval
        try:
            architecture = tuple(map(index, given))
        except TypeError:
            architecture = ()
        if len(architecture) != len(options) or not all(0 <= a < n for a, n in zip(architecture, options, strict=True)):
            raise PluginError(
                f"searcher {self.name!r}: ask gives {given!r:.60}: give tuples of {len(options)} whole numbers, each "
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
            given = self.searcher.state()
        try:
            state: State = json.loads(json.dumps(given, allow_nan=False))
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
