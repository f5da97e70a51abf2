"""The interfaces of methods and stages: what a method declares, and what the loop calls on its stages.

A method is a list of stages. A stage is a set of pure functions of the run's state: in every round it makes a plan, the
plan's tasks are executed wherever the clients are, and their results are merged into the next state. Most methods need
no stage class of their own: `TrainingStage` implements the FedAvg round, and a method supplies the initial weights and
the clients' tasks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from fedloom.platform.federation.algorithm import Plan, RoundResult, RoundUpdate, RunState

if TYPE_CHECKING:
    from fedloom.platform.federation.world import World
    from fedloom.platform.spaces.base import SearchSpace

Kind = Literal["tiers", "subnets", "silos", "shared"]
"""The final models of a run: one per tier, subnets of an elastic supernet, one per client, or one for all."""
Own = Literal["nothing", "model", "cells"]
"""The personal state that every silo keeps between rounds: nothing, a model, or the cells after a shared base."""


@dataclass(frozen=True)
class SharedTraining:
    """The first `stages` of a method, which runs can share if they differ only in later parts.

    `later` names the parts of the method's configuration that these stages do not depend on.
    """

    later: tuple[str, ...]
    stages: int = 1


def nothing_shared(_config: Any) -> SharedTraining | None:
    """No training is shared: every run trains its own model."""
    return None


@dataclass(frozen=True)
class Method:
    """A method that a configuration can name.

    Attributes:
        config: a dataclass with a field `name`, whose fields are the keys `method.*`.
        stages: makes the stages from a configuration and a world; ValueError for invalid settings.
        kind: the kind of its final models, used by reports and exports.
        lacks: the tables that its runs leave empty.
        own: for cross-silo methods, each silo's personal state.
        searchable: whether its runs store a supernet that `fedloom search` can search for new targets.
        shared_training: the training that runs of a configuration can share; None if there is none.
        needs: given a space and the method's name, raises ValueError if it cannot use the space; called before data is
            prepared, which may take minutes.
        tasks: whether tiers may have different tasks (`tiers.tasks`).
        budgets: whether what clients train depends on their budgets of the round (`tiers.budget`).
    """

    config: type
    stages: Callable[[Any, World], list[Stage]]
    kind: Kind
    lacks: tuple[str, ...] = ()
    own: Own = "nothing"
    searchable: Callable[[Any], bool] = lambda _config: False
    shared_training: Callable[[Any], SharedTraining | None] = nothing_shared
    needs: Callable[[SearchSpace, str], object] | None = None
    tasks: bool = False
    budgets: Callable[[Any], bool] = lambda _config: False

    def traits(self, config: Any) -> Mapping[str, Any]:
        """The properties of the method that a run records, as JSON values."""
        searchable = self.searchable(config)
        return {"kind": self.kind, "lacks": list(self.lacks), "own": self.own, "searchable": searchable}


class Stage(Protocol):
    """A part of a method with its own rounds. All functions are pure: equal states give equal results."""

    name: str

    def begin(self, state: RunState) -> RunState:
        """Prepares the state for round 0 (initial weights, empty histories)."""
        return state

    @property
    def trains(self) -> bool:
        """Whether clients train in this stage; otherwise it scores networks."""
        return False

    @property
    def counted(self) -> str:
        """The plural noun for its rounds in messages."""
        return "rounds"

    def macs_left(self, state: RunState) -> float | None:  # noqa: ARG002
        """The MACs expected from this state on, from which the time left is estimated; None if unknown.

        Scoring counts the MACs of its forward passes, training `TRAINING_FACTOR` times those of its own. For a later
        stage, the state is that of an earlier stage (with round 0), without what `begin` will add to it.
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
