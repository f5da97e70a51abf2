"""The state of a run between rounds, and what a stage makes of it: the plan of a round, its results, its update.

All are values: a stage is a set of pure functions over them, so that a run can be stored and resumed after any round.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from fedloom.platform.clients.assignments import Assignment
from fedloom.platform.spaces.slices import TensorGroup, Weights

if TYPE_CHECKING:
    from fedloom.platform.averaging.aggregators import Sums
    from fedloom.platform.averaging.processors import Processors
    from fedloom.platform.clients.assignments import ClientResult

# -- the state of a run ------------------------------------------------------------------------------------------------

SUPERNET = "supernet"
"""The name of the tensors that are the shared weights of a supernet."""
CLIENT = "client-"
"""Prefix of the names of client states, followed by the client's id."""
HISTORY, MEMORY = "history", "selection"
"""JSON values of the current stage: its clients' history, and what its selection rule remembers."""


@dataclass(frozen=True)
class RunState:
    """The state of a run: the next round of the current stage, all tensors, and all other values.

    Attributes:
        stage: index of the current stage; equal to the number of stages when the run is finished.
        round: the next round of that stage, from 0.
        groups: the tensor groups by name (the supernet, each tier's model, client states).
        data: JSON values by name.
        simulated_s: the virtual clock in seconds.
    """

    stage: int = 0
    round: int = 0
    groups: Mapping[str, TensorGroup] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    simulated_s: float = 0.0

    def with_group(self, name: str, tensors: Weights) -> RunState:
        """The state with one tensor group replaced and its version incremented."""
        version = self.groups[name].version + 1 if name in self.groups else 0
        return replace(self, groups={**self.groups, name: TensorGroup(tensors, version)})

    def without_groups(self, *names: str) -> RunState:
        """The state without these tensor groups."""
        return replace(self, groups={name: group for name, group in self.groups.items() if name not in names})

    def with_data(self, name: str, value: Any) -> RunState:
        """The state with one JSON value replaced."""
        return replace(self, data={**self.data, name: value})

    def without_data(self, *names: str) -> RunState:
        """The state without these JSON values."""
        return replace(self, data={name: value for name, value in self.data.items() if name not in names})

    def with_client_states(self, states: Mapping[int, Weights]) -> RunState:
        """The state with the states of these clients replaced, one tensor group per client."""
        state = self
        for client_id, tensors in states.items():
            state = state.with_group(f"{CLIENT}{client_id}", tensors)
        return state

    def without_client_tensors(self, prefix: str) -> RunState:
        """The state without the client tensors of this name prefix, and without groups that become empty."""
        state = self
        for name, group in self.groups.items():
            left = {n: t for n, t in group.tensors.items() if not n.startswith(prefix)}
            if name.startswith(CLIENT) and len(left) < len(group.tensors):
                state = state.with_group(name, left) if left else state.without_groups(name)
        return state

    def client_state(self, client_id: int) -> Weights | None:
        """The client's saved state for its next assignment; None if it has none."""
        group = self.groups.get(f"{CLIENT}{client_id}")
        return None if group is None else group.tensors

    def weights(self, name: str) -> Weights:
        """The tensors of a group."""
        return self.groups[name].tensors

    def version(self, name: str) -> str:
        """A string that changes whenever the tensor group does."""
        return f"{name}@{self.groups[name].version}"


# -- a stage, its plan and its results ---------------------------------------------------------------------------------

Row = tuple[str, Mapping[str, Any]]
"""A table's name and the row's columns; the loop adds stage and round."""


@dataclass(frozen=True)
class Plan:
    """A round's assignments, and the tensor group of the state whose weights they get."""

    assignments: Sequence[Assignment]
    group: str
    schedules: Mapping[str, float] = field(default_factory=dict)
    """The schedules' values in this round, such as lr and beta."""
    chunk_size: int | None = None
    """Assignments per chunk if the stage overrides the configuration."""
    stack: int = 1
    """Clients of a chunk that are trained as one batch."""
    memory: Mapping[str, Any] | None = None
    """The JSON values that the selection rule leaves to itself for the next round."""
    processors: Processors = ()
    """The round's processors, which the server undoes in reverse."""
    keeps_updates: bool = False
    """Whether the server gets every single update, for an aggregator that compares clients."""


@dataclass(frozen=True)
class RoundResult:
    """A round's results: the weighted sums of all updates, or these, and one result per assignment in plan order."""

    sums: Sums
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
    def trains(self) -> bool:
        """Whether clients train in it; otherwise networks are scored."""
        return False

    @property
    def counted(self) -> str:
        """What its rounds are to people, in the plural."""
        return "rounds"

    def macs_left(self, state: RunState) -> float | None:  # noqa: ARG002
        """The MACs that are expected from this state on, from which the time left is estimated; None if unknown.

        They are those of forward passes, and `TRAINING_FACTOR` times those where clients train. For a stage to come,
        the state is an earlier stage's (with round 0), without what `begin` will add to it.
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
