"""Local rules: what a client adds to the gradients of its steps, and what that takes beside the model.

A rule is a function of a `LocalClient` that returns a correction, or None for plain SGD. One that also sends something,
or keeps something between rounds (SCAFFOLD's control variates), is a class with the methods of `LocalRule`.

Everything is by the parameters' names in the network that the client trains, be it a whole network or slices of a
supernet: what is shared or kept lies in the coordinates of the shared weights, so that a client that holds another part
of them in another round finds what belongs to it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated

import torch
from torch import Tensor

from fedloom.platform.plugins import Chosen, PluginError, Slot
from fedloom.platform.settings import ZERO_OR_MORE
from fedloom.platform.spaces.slices import Slice, SliceMap, Weights

if TYPE_CHECKING:
    from fedloom.platform.averaging.server import ServerStep
    from fedloom.platform.clients.training import Correction, LocalSGD

PLAIN = Chosen("sgd")
STATE = "rule/"
"""What a rule keeps has this before its names in a client's state: a method may keep something of its own beside it."""


@dataclass
class LocalClient:
    """A client at the beginning of its local training.

    Attributes:
        client_id, round: who trains, and when; rounds count from 0.
        samples: how many training samples it has.
        steps: how many optimiser steps it takes.
        local: its hyper-parameters.
        parameters: the trained tensors by name, at the values that were received; training changes them.
        slices, weights: where the parameters lie in the shared weights.
        state: what the rule keeps with this client, by slot and shared tensor.
    """

    client_id: int
    round: int
    samples: int
    steps: int
    local: LocalSGD
    parameters: Mapping[str, Tensor]
    slices: SliceMap
    weights: Weights
    state: dict[str, Tensor]
    sent: dict[str, Tensor] = field(default_factory=dict)
    sent_slices: dict[str, Slice] = field(default_factory=dict)
    sent_weights: dict[str, float | None] = field(default_factory=dict)

    @cached_property
    def received(self) -> Mapping[str, Tensor]:
        """The values that every parameter was received with; only to be read."""
        return {name: self._part(self.slices[name].source, name) for name in self.parameters}

    def shared(self, slot: str, name: str) -> Tensor:
        """The parameter's part of what the server shares in a slot of the rule's `shared`; only to be read."""
        return self._part(place_of(slot, self.slices[name].source), name)

    def kept(self, slot: str, name: str) -> Tensor:
        """The parameter's part of what this client keeps in a slot, to be changed in place; zeros at first."""
        piece = self.slices[name]
        place = place_of(slot, piece.source)
        if place not in self.state:
            self.state[place] = torch.zeros_like(self.weights[piece.source], device=self.parameters[name].device)
        return piece.of(self.state[place])

    def send(self, slot: str, name: str, value: Tensor, weight: float | None = None) -> None:
        """Sends a value for the parameter's part of a shared slot.

        It counts as much as the model's own tensors, unless a weight is given.
        """
        piece = self.slices[name]
        place = place_of(slot, piece.source)
        self.sent[place] = value.detach()
        self.sent_slices[place], self.sent_weights[place] = Slice(place, piece.region), weight

    def _part(self, shared: str, name: str) -> Tensor:
        return self.slices[name].of(self.weights[shared]).to(self.parameters[name].device)


def place_of(slot: str, source: str) -> str:
    """The name of a slot's tensor beside the shared tensor that it belongs to."""
    return f"{slot}/{source}"


class LocalRule:
    """A rule that shares something with the server, or keeps something with the clients; `begin` is to be written.

    `shared` names slots of tensors that travel with the model, one of each parameter's shape, zeros at first. Keyword
    parameters of the constructor are options (`method.train.options.NAME`).
    """

    shared: tuple[str, ...] = ()

    def begin(self, client: LocalClient) -> Correction | None:
        """Called before the first step; returns what is done to the gradients of every step."""
        raise NotImplementedError

    def end(self, client: LocalClient) -> None:
        """Called after the last step, when `client.parameters` are trained."""

    def merge(self, step: ServerStep) -> Tensor:
        """The server's new values of a shared slot, region by region; the clients' mean if not overridden."""
        return step.mean


def sgd(client: LocalClient) -> Correction | None:
    """Plain SGD."""
    del client
    return None


def pull_towards(strength: float, anchors: Mapping[str, Tensor]) -> Correction | None:
    """The gradient of `strength` / 2 times the squared distance to the anchors; None for a strength of 0.

    A parameter that the loss does not reach in a step (behind operators that do nothing) is not pulled, either.
    """

    def correct(name: str, parameter: Tensor, gradient: Tensor) -> None:
        gradient.add_(parameter - anchors[name], alpha=strength)

    return correct if strength else None


def fedprox(
    client: LocalClient,
    *,
    mu: Annotated[float, ZERO_OR_MORE, "strength of the pull towards the received weights"] = 0.01,
) -> Correction | None:
    """FedProx: mu / 2 times the squared distance to the received weights is added to the loss (Li et al. 2020)."""
    return pull_towards(mu, client.received)


LOCAL_RULES: Slot[Callable[[LocalClient], Correction | None] | LocalRule] = Slot(
    "local rule", {"sgd": sgd, "fedprox": fedprox}, ("client",), made=True
)


class _Simple(LocalRule):
    """A rule that is a function alone."""

    def __init__(self, function: Callable[[LocalClient], Correction | None]) -> None:
        self.function = function

    def begin(self, client: LocalClient) -> Correction | None:
        return self.function(client)


def local_rule(choice: Chosen) -> LocalRule:
    """The chosen rule; PluginError if there is none, or a class that is no `LocalRule`."""
    made = LOCAL_RULES.make(choice)
    if isinstance(made, LocalRule):
        return made
    if inspect.isclass(LOCAL_RULES.find(choice.name)):
        raise PluginError(f"local rule {choice.name!r} is no LocalRule: derive the class from {__name__}.LocalRule")
    return _Simple(made)
