"""The ask/tell interface of searchers, and the metrics by which models are ranked."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Architecture = tuple[int, ...]
"""One chosen option index per decision of the space."""

State = dict[str, Any]
"""A searcher's state: JSON values only (NaN and infinities as strings)."""


@dataclass(frozen=True, slots=True)
class Interval:
    """The half-open cost interval (lower, upper] of a tier, in the cost table's unit.

    Raises ValueError unless lower < upper; -inf and inf are allowed.
    """

    lower: float
    upper: float

    def __post_init__(self) -> None:
        if not self.lower < self.upper:
            raise ValueError(f"interval ({self.lower}, {self.upper}]: the lower bound must be below the upper bound")

    def contains(self, cost: float) -> bool:
        """Whether a cost is inside; an infinite cost (unsupported by the device) never is."""
        return self.lower < cost <= self.upper and math.isfinite(cost)


@dataclass(frozen=True, slots=True)
class Scored:
    """One architecture and its score; generations count from 0.

    A larger `metric` is better; for a failed model it is NaN and `feasible` is False.
    """

    architecture: Architecture
    metric: float
    loss: float
    cost: float
    generation: int
    feasible: bool


class Searcher(Protocol):
    """Ask/tell search for the architectures with the best metric inside one cost interval.

    Use: `while candidates := searcher.ask(): searcher.tell(candidates, metrics, losses)`.
    The candidates depend only on the seed and the scores told so far.
    """

    @property
    def history(self) -> list[Scored]:
        """All scores told so far, in order."""
        ...

    def ask(self) -> list[Architecture]:
        """The next generation: distinct valid architectures inside the interval, none scored before.

        It is empty when the search has ended. Repeated calls before `tell` return the same list.
        """
        ...

    def tell(self, architectures: Sequence[Architecture], metrics: Sequence[float], losses: Sequence[float]) -> None:
        """Reports the scores of the last generation, in its order; larger metrics are better.

        A metric that is not finite marks a failed model, which is infeasible, counted, and never asked again.
        Raises ValueError if these are not the architectures of the last `ask`.
        """
        ...

    def state(self) -> State:
        """The scored generations and the settings, as JSON values."""
        ...

    def restore(self, state: State) -> None:
        """Restores a saved state by replaying it from the seed.

        Raises ValueError if the state belongs to another search or the replay differs.
        """
        ...


def pareto_front(history: Iterable[Scored]) -> list[Scored]:
    """The feasible models that no other dominates (larger metric, smaller cost), sorted by cost.

    Models that tie in both metric and cost are all kept, in order of architecture.
    """
    feasible = sorted((s for s in history if s.feasible), key=lambda s: (s.cost, -s.metric, s.architecture))
    front: list[Scored] = []
    for scored in feasible:
        last = front[-1] if front else None
        if last is None or scored.metric > last.metric or (scored.metric, scored.cost) == (last.metric, last.cost):
            front.append(scored)
    return front


def rank(scored: Scored) -> tuple[float, float, Architecture]:
    """Sort key of feasible models, best first: metric, then the lower cost, then the smaller architecture."""
    return -scored.metric, scored.cost, scored.architecture


def winner(history: Iterable[Scored]) -> Scored:
    """The model with the best metric; ties go to the lower cost, then to the smaller architecture.

    Raises ValueError if no model is feasible.
    """
    feasible = [s for s in history if s.feasible]
    if not feasible:
        raise ValueError("no feasible model was scored: widen the tier's interval or look at the failed models")
    return min(feasible, key=rank)


# -- the metric that ranks models: accuracy, or loss (SuperFedNAS, Eq. 6) ---------------------------------------------

Metric = Literal["accuracy", "loss"]
METRIC_TEXT = "models are ranked by accuracy, or by loss (of texts, the logarithm of perplexity)"


def merit(metric: str, accuracy: float, loss: float) -> float:
    """The value that a search maximises: the accuracy, or the loss with its sign changed."""
    return accuracy if metric == "accuracy" else -loss


def in_unit(metric: str, value: float) -> float:
    """Converts a merit back to its metric: the inverse of `merit`."""
    return value if metric == "accuracy" else -value
