"""The explicit state of a run, an immutable value that is saved in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fedloom.platform.results.bag import Bag

if TYPE_CHECKING:
    from fedloom.platform.spaces.slices import Weights

CLIENT = "client-"
"""Prefix of the bags of client states, followed by the client's id."""

Json = Any
"""A JSON value, such as a searcher's history, winners or counters."""


@dataclass(frozen=True)
class RunState:
    """The state of a run: the next round of the current stage, all tensors, and all other values.

    Attributes:
        stage: index of the current stage; equal to the number of stages when the run is finished.
        round: the next round of that stage, from 0.
        bags: named bags of tensors (the supernet, each tier's model, client states).
        data: JSON values by name.
        simulated_s: the virtual clock in seconds.
    """

    stage: int = 0
    round: int = 0
    bags: Mapping[str, Bag] = field(default_factory=dict)
    data: Mapping[str, Json] = field(default_factory=dict)
    simulated_s: float = 0.0

    def with_bag(self, name: str, tensors: Weights) -> RunState:
        """The state with one bag replaced and its version incremented."""
        version = self.bags[name].version + 1 if name in self.bags else 0
        return replace(self, bags={**self.bags, name: Bag(tensors, version)})

    def without_bags(self, *names: str) -> RunState:
        """The state without these bags."""
        return replace(self, bags={name: bag for name, bag in self.bags.items() if name not in names})

    def with_data(self, name: str, value: Json) -> RunState:
        """The state with one JSON value replaced."""
        return replace(self, data={**self.data, name: value})

    def without_data(self, *names: str) -> RunState:
        """The state without these JSON values."""
        return replace(self, data={name: value for name, value in self.data.items() if name not in names})

    def with_client_states(self, states: Mapping[int, Weights]) -> RunState:
        """The state with the states of these clients replaced, one bag per client."""
        state = self
        for client_id, tensors in states.items():
            state = state.with_bag(f"{CLIENT}{client_id}", tensors)
        return state

    def without_client_tensors(self, prefix: str) -> RunState:
        """The state without the client tensors of this name prefix, and without client bags that become empty."""
        state = self
        for name, bag in self.bags.items():
            left = {n: t for n, t in bag.tensors.items() if not n.startswith(prefix)}
            if name.startswith(CLIENT) and len(left) < len(bag.tensors):
                state = state.with_bag(name, left) if left else state.without_bags(name)
        return state

    def client_state(self, client_id: int) -> Weights | None:
        """The client's saved state for its next assignment; None if it has none."""
        bag = self.bags.get(f"{CLIENT}{client_id}")
        return None if bag is None else bag.tensors

    def weights(self, name: str) -> Weights:
        """The tensors of a bag."""
        return self.bags[name].tensors

    def version(self, name: str) -> str:
        """A string that changes whenever the bag does."""
        return f"{name}@{self.bags[name].version}"
