"""The common part of all searchers: generations, budget, history, and resuming by replay."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from hashlib import blake2b
from itertools import groupby
from typing import Protocol

from fedloom.platform.search.base import Architecture, Interval, Scored, State
from fedloom.platform.search.sampling import IntervalSampler
from fedloom.tiers.costs import CostTable

FORMAT = 1
"""Version of the saved state."""


class Proposer(Protocol):
    """The source of candidates, the part in which searchers differ."""

    def propose(self, most: int) -> list[Architecture]:
        """At most `most` new distinct architectures inside the interval; empty if there are no more."""
        ...

    def observe(self, scored: Sequence[Scored]) -> None:
        """Receives the scores of the last proposal, in its order."""
        ...


class GenerationSearch(ABC):
    """A searcher (see `Searcher`) around a proposer that depends only on the seed.

    `budget` is the number of models to score, failed ones included.
    Raises ValueError if the options are not the cost table's or a setting is out of range.
    """

    name: str

    def __init__(self, options: Sequence[int], table: CostTable, interval: Interval, seed: int, *, budget: int) -> None:
        expected = tuple(len(row) for row in table.options)
        if tuple(options) != expected:
            raise ValueError(f"options {tuple(options)} do not fit the cost table, which has {expected}")
        self.options = expected
        self.table = table
        self.interval = interval
        self.seed = seed
        self.budget = at_least("budget", budget, 1)
        self._sampler = IntervalSampler(table, interval)
        self._clear()

    @abstractmethod
    def _start(self) -> Proposer:
        """A new proposer, identical on every call."""

    @abstractmethod
    def _settings(self) -> State:
        """The searcher's own settings, besides the seed, the space and the budget."""

    def _clear(self) -> None:
        self._proposer: Proposer | None = None
        self._pending: list[Architecture] = []
        self._history: list[Scored] = []
        self._generation = 0
        self._reason = ""

    @property
    def done(self) -> bool:
        return bool(self._reason)

    @property
    def reason(self) -> str:
        return self._reason

    @property
    def history(self) -> list[Scored]:
        return list(self._history)

    def ask(self) -> list[Architecture]:
        if not self.done and not self._pending:
            if self._proposer is None:
                self._proposer = self._start()
            self._pending = self._proposer.propose(self.budget - len(self._history))
            if not self._pending:
                self._reason = "exhausted"
        return list(self._pending)

    def tell(self, architectures: Sequence[Architecture], metrics: Sequence[float], losses: Sequence[float]) -> None:
        if not self._pending or list(architectures) != self._pending:
            raise ValueError("tell: these are not the architectures last asked: tell exactly what ask() returned")
        if not len(metrics) == len(losses) == len(architectures):
            raise ValueError(
                f"tell: {len(architectures)} architectures, {len(metrics)} metrics and {len(losses)} losses: "
                "give one metric and one loss per architecture"
            )
        scored = [self._scored(*told) for told in zip(architectures, metrics, losses, strict=True)]
        assert self._proposer is not None
        self._proposer.observe(scored)
        self._history += scored
        self._pending = []
        self._generation += 1
        if len(self._history) >= self.budget:
            self._reason = "budget"

    def _scored(self, architecture: Architecture, metric: float, loss: float) -> Scored:
        feasible = math.isfinite(metric)
        value = float(metric) if feasible else math.nan
        return Scored(architecture, value, float(loss), self.table.cost(architecture), self._generation, feasible)

    def _identity(self) -> State:
        costs = repr((self.table.measure, self.table.reduce, self.table.fixed, self.table.options))
        return {
            "searcher": self.name,
            "seed": self.seed,
            "options": list(self.options),
            "lower": _encode(self.interval.lower),
            "upper": _encode(self.interval.upper),
            "costs": blake2b(costs.encode(), digest_size=8).hexdigest(),
            "budget": self.budget,
            **self._settings(),
        }

    def state(self) -> State:
        generations = [_generation(list(told)) for _, told in groupby(self._history, key=lambda s: s.generation)]
        return {"format": FORMAT, "identity": self._identity(), "generations": generations, "reason": self._reason}

    def restore(self, state: State) -> None:
        if state["format"] != FORMAT:
            raise ValueError(f"search state has format {state['format']}, this version reads {FORMAT}: start it anew")
        saved, present = state["identity"], self._identity()
        differing = sorted(key for key in saved.keys() | present.keys() if saved.get(key) != present.get(key))
        if differing:
            changes = ", ".join(f"{key} {saved.get(key)} -> {present.get(key)}" for key in differing)
            raise ValueError(f"search state belongs to another search: {changes}; resume with the saved settings")
        self._clear()
        for number, generation in enumerate(state["generations"]):
            self._replay(number, generation)
        # The empty result of the last `ask` of an exhausted search is not saved as a generation, so ask again.
        if state["reason"] and not self.done and self.ask():
            raise ValueError(f"search state says {state['reason']!r}, but the replay goes on: it was changed")

    def _replay(self, number: int, generation: State) -> None:
        recorded = [tuple(architecture) for architecture in generation["architectures"]]
        if self.ask() != recorded:
            raise ValueError(
                f"generation {number} of the search state does not replay from seed {self.seed}: "
                "it was changed, or saved with other versions of fedloom, pymoo or numpy"
            )
        self.tell(recorded, [float(m) for m in generation["metrics"]], [float(x) for x in generation["losses"]])


def at_least(name: str, value: int, smallest: int) -> int:
    """The value, or a ValueError if it is too small."""
    if value < smallest:
        raise ValueError(f"{name} is {value}, it must be at least {smallest}")
    return value


def _generation(told: list[Scored]) -> State:
    return {
        "architectures": [list(s.architecture) for s in told],
        "metrics": [_encode(s.metric) for s in told],
        "losses": [_encode(s.loss) for s in told],
    }


def _encode(value: float) -> float | str:
    # JSON has no NaN and no infinities.
    return float(value) if math.isfinite(value) else str(float(value))
