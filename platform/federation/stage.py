"""What a stage of a method is: pure functions over the run's state; the loop does everything else."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from fedloom.platform.averaging.average import WeightedSums
    from fedloom.platform.clients.assignments import Assignment, Report
    from fedloom.platform.federation.state import RunState
    from fedloom.platform.spaces.slices import Weights

Row = tuple[str, Mapping[str, Any]]
"""A table's name and the row's columns; the loop adds stage and round."""


@dataclass(frozen=True)
class Plan:
    """A round's work: who does what, on which bag of the state."""

    assignments: Sequence[Assignment]
    bag: str
    schedules: Mapping[str, float] = field(default_factory=dict)
    """The schedules' values in this round, such as lr and beta."""
    chunk_size: int | None = None
    """Assignments per chunk where the stage knows better than the configuration."""


@dataclass(frozen=True)
class RoundResult:
    """What came back: the sums over all updates, and one report per assignment in plan order."""

    sums: WeightedSums
    reports: Sequence[Report]


@dataclass(frozen=True)
class KeptModel:
    """A model to be stored beside the tables."""

    name: str
    tier: str
    architecture: str
    macs: float
    parameters: int
    tensors: Weights


@dataclass(frozen=True)
class Review:
    """What is measured of a round's new state before the round ends, and the rows that it gives."""

    plan: Plan
    rows: Callable[[RoundResult], Sequence[Row]]


@dataclass(frozen=True)
class Merged:
    """The state after a round (or at a stage's end), with the rows and models that it gave."""

    state: RunState
    rows: Sequence[Row] = ()
    models: Sequence[KeptModel] = ()
    review: Review | None = None


class Stage(Protocol):
    """One loop of a method. All methods are pure: the same state gives the same answer."""

    name: str

    def begin(self, state: RunState) -> RunState:
        """Prepares the state for round 0 (first weights, empty histories)."""
        return state

    @property
    def countable(self) -> bool:
        """Whether its assignments, and what they cost, are known without training: then a dry run counts them."""
        return False

    @abstractmethod
    def rounds_left(self, state: RunState) -> int:
        """How many rounds are still to come, as far as is known; 0 ends the stage."""
        ...

    @abstractmethod
    def plan(self, state: RunState) -> Plan:
        """The work of round `state.round`, in the order in which updates are summed."""
        ...

    @abstractmethod
    def merge(self, state: RunState, plan: Plan, result: RoundResult, /) -> Merged:
        """The state after the round; the loop moves `state.round` on."""
        ...

    def end(self, state: RunState) -> Merged:
        """The state at the end of the stage."""
        return Merged(state)


def evaluation_rows(reports: Iterable[Report], tier: str | None = None) -> list[Row]:
    """One row of `evaluations` per measured value; `tier` is the model's tier, the client's own if not given."""
    return [
        (
            "evaluations",
            {
                "model": m.model,
                "tier": tier if tier is not None else report.tier,
                "architecture": m.architecture,
                "client_id": report.client_id,
                "split": m.split,
                "metric": m.metric,
                "value": m.value,
                "samples": m.samples,
            },
        )
        for report in reports
        for m in report.measurements
    ]
