"""The interface of a method's stages: pure functions of the run's state, executed by the loop."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from fedloom.platform.averaging.average import WeightedSums
    from fedloom.platform.clients.assignments import Assignment, ClientResult
    from fedloom.platform.federation.state import RunState
    from fedloom.platform.spaces.slices import Weights

Row = tuple[str, Mapping[str, Any]]
"""A table's name and the row's columns; the loop adds stage and round."""


@dataclass(frozen=True)
class Plan:
    """A round's assignments, and the bag of the state whose weights they get."""

    assignments: Sequence[Assignment]
    bag: str
    schedules: Mapping[str, float] = field(default_factory=dict)
    """The schedules' values in this round, such as lr and beta."""
    chunk_size: int | None = None
    """Assignments per chunk if the stage overrides the configuration."""
    stack: int = 1
    """Clients of a chunk that are trained as one batch."""
    memory: Mapping[str, Any] | None = None
    """The JSON values that the selection rule leaves to itself for the next round."""


@dataclass(frozen=True)
class RoundResult:
    """A round's results: the weighted sums of all updates, and one result per assignment in plan order."""

    sums: WeightedSums
    client_results: Sequence[ClientResult]


@dataclass(frozen=True)
class KeptModel:
    """A model to be stored with the results."""

    name: str
    tier: str
    architecture: str
    macs: float
    parameters: int
    tensors: Weights


@dataclass(frozen=True)
class PostRoundEvaluation:
    """Measurements of a round's new state before the round ends, and the rows made from them."""

    plan: Plan
    rows: Callable[[RoundResult], Sequence[Row]]


@dataclass(frozen=True)
class RoundUpdate:
    """The state after a round (or at a stage's end), with its rows and models."""

    state: RunState
    rows: Sequence[Row] = ()
    models: Sequence[KeptModel] = ()
    evaluation: PostRoundEvaluation | None = None


class Stage(Protocol):
    """A part of a method with its own rounds. All functions are pure: equal states give equal results."""

    name: str

    def begin(self, state: RunState) -> RunState:
        """Prepares the state for round 0 (initial weights, empty histories)."""
        return state

    @property
    def countable(self) -> bool:
        """Whether its assignments and their costs are known without training, so that a dry run can count them."""
        return False

    @property
    def trains(self) -> bool:
        """Whether clients train in it; otherwise networks are scored."""
        return False

    @property
    def counted(self) -> str:
        """What its rounds are to people, in the plural."""
        return "rounds"

    def macs_left(self, state: RunState) -> float | None:  # noqa: ARG002
        """The MACs that are expected from this state on, from which the time left is estimated; None if unknown.

        They are those of forward passes, and `TRAINING` times those where clients train. For a stage to come, the state
        is an earlier stage's (with round 0), without what `begin` will add to it.
        """
        return None

    @abstractmethod
    def rounds_left(self, state: RunState) -> int:
        """The number of remaining rounds, as far as it is known; 0 ends the stage."""
        ...

    @abstractmethod
    def plan(self, state: RunState) -> Plan:
        """The assignments of round `state.round`, in the order in which updates are summed."""
        ...

    @abstractmethod
    def merge(self, state: RunState, plan: Plan, result: RoundResult, /) -> RoundUpdate:
        """The state after the round; the loop increments `state.round`."""
        ...

    def end(self, state: RunState) -> RoundUpdate:
        """The state at the end of the stage."""
        return RoundUpdate(state)


def evaluation_rows(results: Iterable[ClientResult], tier: str | None = None) -> list[Row]:
    """One row of `evaluations` per measured value; `tier` is the model's tier, by default the client's."""
    return [
        (
            "evaluations",
            {
                "model": m.model,
                "tier": tier if tier is not None else result.tier,
                "architecture": m.architecture,
                "client_id": result.client_id,
                "split": m.split,
                "metric": m.metric,
                "value": m.value,
                "samples": m.samples,
                "detail": m.detail,
            },
        )
        for result in results
        for m in result.measurements
    ]
