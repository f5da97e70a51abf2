"""The explicit state of a run: a value that is checkpointed as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fedloom.platform.results.bag import Bag

if TYPE_CHECKING:
    from fedloom.platform.spaces.slices import Weights

CLIENT = "client-"
"""Bags of this prefix and a client's id hold what that client keeps between rounds."""

Json = Any
"""Whatever JSON can hold: the searchers' histories, winners, counters."""


@dataclass(frozen=True)
class RunState:
    """Where a run stands: the next round of the present stage, all tensors, and all other values.

    Attributes:
        stage: index of the present stage; equal to the number of stages when the run is finished.
        round: the next round of that stage, from 0.
        bags: named bags of tensors (the supernet, each tier's model, clients' own states).
        data: JSON values by name.
        simulated_s: the virtual clock.
    """

    stage: int = 0
    round: int = 0
    bags: Mapping[str, Bag] = field(default_factory=dict)
    data: Mapping[str, Json] = field(default_factory=dict)
    simulated_s: float = 0.0

    def with_bag(self, name: str, tensors: Weights) -> RunState:
        """The same state with one bag replaced; its version tells that it changed."""
        version = self.bags[name].version + 1 if name in self.bags else 0
        return replace(self, bags={**self.bags, name: Bag(tensors, version)})

    def without_bags(self, *names: str) -> RunState:
        """The same state without these bags."""
        return replace(self, bags={name: bag for name, bag in self.bags.items() if name not in names})

    def with_data(self, name: str, value: Json) -> RunState:
        """The same state with one JSON value replaced."""
        return replace(self, data={**self.data, name: value})

    def without_data(self, *names: str) -> RunState:
        """The same state with JSON values that are not needed any more taken out."""
        return replace(self, data={name: value for name, value in self.data.items() if name not in names})

    def with_client_states(self, states: Mapping[int, Weights]) -> RunState:
        """The same state with what these clients keep until they are asked again; a bag for each."""
        state = self
        for client_id, tensors in states.items():
            state = state.with_bag(f"{CLIENT}{client_id}", tensors)
        return state

    def without_client_tensors(self, prefix: str) -> RunState:
        """The same state without what clients keep under names of this prefix, and without bags that hold no more."""
        state = self
        for name, bag in self.bags.items():
            left = {n: t for n, t in bag.tensors.items() if not n.startswith(prefix)}
            if name.startswith(CLIENT) and len(left) < len(bag.tensors):
                state = state.with_bag(name, left) if left else state.without_bags(name)
        return state

    def client_state(self, client_id: int) -> Weights | None:
        """What the client kept from its last work, for its next assignment; None if it never took part."""
        bag = self.bags.get(f"{CLIENT}{client_id}")
        return None if bag is None else bag.tensors

    def weights(self, name: str) -> Weights:
        """The tensors of a bag."""
        return self.bags[name].tensors

    def version(self, name: str) -> str:
        """A text that changes whenever the bag does."""
        return f"{name}@{self.bags[name].version}"
