"""The share of its tier's budget that a client has in a round: fixed, by a schedule, or by the state of its device."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np


class Budget(Protocol):
    """Gives the share of its tier's budget that a client has in a round.

    Called for every assignment (FedorAS, "dynamic" budgets). The caller derives the generator from (seed, round,
    client), so that no state is kept per registered client and the result is the same in every process.
    """

    def factor(self, round: int, rng: np.random.Generator) -> float:
        """The share, in (0, 1]; rounds count from 0."""
        ...


@dataclass(frozen=True)
class StaticBudget:
    """The same share of the budget in every round."""

    share: float = 1.0

    def __post_init__(self) -> None:
        _check_share("share", self.share)

    def factor(self, round: int, rng: np.random.Generator) -> float:
        del round, rng
        return self.share


@dataclass(frozen=True)
class ScheduleBudget:
    """One share per round, the same for all clients; the list is repeated when it ends."""

    factors: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.factors:
            raise ValueError("a schedule budget has no factors: give at least one share")
        for position, share in enumerate(self.factors):
            _check_share(f"factors[{position}]", share)

    def factor(self, round: int, rng: np.random.Generator) -> float:
        """The share of this round; raises ValueError for a negative round."""
        del rng
        if round < 0:
            raise ValueError(f"round={round} must not be negative")
        return self.factors[round % len(self.factors)]


class DeviceState(NamedTuple):
    """A state of a device, the share of the budget available in it, and the probability of the state."""

    name: str
    factor: float
    probability: float


# Assumed values, not measured ones.
DEFAULT_STATES = (
    DeviceState("idle", 1.0, 0.6),
    DeviceState("busy", 0.5, 0.3),
    DeviceState("low_battery", 0.25, 0.1),
)


@dataclass(frozen=True)
class TraceBudget:
    """The share of a device state that is drawn independently for every round and client.

    `states` holds (name, factor, probability); the probabilities sum to 1.
    """

    states: tuple[tuple[str, float, float], ...] = DEFAULT_STATES

    def __post_init__(self) -> None:
        if not self.states:
            raise ValueError("a trace budget has no states: give at least one (name, factor, probability)")
        for name, share, probability in self.states:
            _check_share(f"state {name}: factor", share)
            if not 0 <= probability <= 1:
                raise ValueError(f"state {name}: probability={probability!r} must be from 0 to 1")
        total = sum(probability for _, _, probability in self.states)
        if abs(total - 1) > 1e-6:
            raise ValueError(f"the states' probabilities sum to {total:g}, but must sum to 1")

    def draw(self, rng: np.random.Generator) -> DeviceState:
        """Draws one state; consumes exactly one number of the generator."""
        point, passed = rng.random(), 0.0
        possible = [DeviceState(*state) for state in self.states if state[2] > 0]
        for state in possible:
            passed += state.probability
            if point < passed:
                return state
        return possible[-1]  # the probabilities may sum to a rounding error below 1

    def factor(self, round: int, rng: np.random.Generator) -> float:
        del round  # the generator depends on it
        return self.draw(rng).factor


def least_share(budget: Budget) -> float:
    """The smallest share that a budget gives; 1 for a user's own, of which it is not known."""
    match budget:
        case StaticBudget():
            return budget.share
        case ScheduleBudget():
            return min(budget.factors)
        case TraceBudget():
            return min(share for _, share, probability in budget.states if probability > 0)
        case _:
            return 1.0


KINDS = ("static", "schedule", "trace")


def make_budget(
    kind: str = "static",
    *,
    share: float | None = None,
    factors: Sequence[float] | None = None,
    states: Sequence[tuple[str, float, float]] | None = None,
) -> Budget:
    """Makes a budget from configuration values: "static" (share), "schedule" (factors) or "trace" (states).

    An option that is None has its default value. Raises ValueError for an unknown kind and for an option of another
    kind.
    """
    if kind not in KINDS:
        near = difflib.get_close_matches(kind, KINDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"budget kind {kind!r} is unknown: use one of {', '.join(KINDS)}{hint}")
    allowed = {"static": "share", "schedule": "factors", "trace": "states"}[kind]
    for name, value in (("share", share), ("factors", factors), ("states", states)):
        if value is not None and name != allowed:
            raise ValueError(f"a {kind} budget takes no {name}: leave it out, or use another kind")
    if kind == "schedule":
        return ScheduleBudget(tuple(float(value) for value in factors or ()))
    if kind == "trace":
        return TraceBudget() if states is None else TraceBudget(tuple(_state(row) for row in states))
    return StaticBudget() if share is None else StaticBudget(float(share))


def _state(row: Any) -> DeviceState:
    if isinstance(row, str) or not isinstance(row, Sequence) or len(row) != 3:
        raise ValueError(f"state {row!r:.60} must have three values: name, factor, probability")
    name, *numbers = row
    if not all(isinstance(number, int | float) for number in numbers):
        raise ValueError(f"state {row!r:.60}: factor and probability must be numbers")
    return DeviceState(str(name), float(numbers[0]), float(numbers[1]))


def _check_share(name: str, share: float) -> None:
    if not 0 < share <= 1:
        raise ValueError(f"{name}={share!r} must be a share of the budget, above 0 and at most 1")
