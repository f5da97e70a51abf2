"""Local rules: corrections of the gradients in local training, and the tensors that they send or keep.

A rule is a function of a `LocalClient` that returns a correction, or None for plain SGD. A rule that also sends tensors
or keeps state between rounds (such as SCAFFOLD's control variates) is a subclass of `LocalRule`.

Rules use the parameters' names in the network that the client trains, a whole network or slices of a supernet. Shared
tensors and client state are stored in the coordinates of the shared weights, so that a client that trains other slices
in a later round reads the entries that belong to them.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import Tensor

from fedloom.platform.averaging.server import checked_values
from fedloom.platform.clients.assignments import Assignment, client_of, places_of
from fedloom.platform.clients.training import (
    PLAIN,
    Correction,
    Corrections,
    LocalSGD,
    Samples,
    batch_sizes,
    epoch_sizes,
    minimised,
)
from fedloom.platform.data.on_device import moved
from fedloom.platform.data.trees import rows_of, split
from fedloom.platform.plugins import ComponentSpec, PluginError, Registry, Shipped, blaming, is_import_path
from fedloom.platform.seeding import torch_stream
from fedloom.platform.settings import ZERO_OR_MORE
from fedloom.platform.spaces.slices import Slice, SliceMap, Weights

if TYPE_CHECKING:
    from fedloom.platform.averaging.server import ServerStep
    from fedloom.platform.clients.networks import Network
    from fedloom.platform.clients.worker import Worker

STATE = "rule/"
"""Prefix of the entries of rules, optimisers and processors in a client's state, which may also hold a method's."""

COUNTERS = "counters/"
"""Prefix of the slots of scalar counters, which stay in main memory."""


@dataclass
class LocalClient:
    """A client at the start of its local training.

    Attributes:
        client_id, round: the client and the round, from 0.
        samples: the number of its training samples.
        steps: the number of optimiser steps.
        local: its hyper-parameters.
        parameters: the trained tensors by name, initially with the received values; training changes them in place.
        slices, weights: the parameters' slices of the shared weights, and the shared weights.
        state: this client's state of the rule and of the optimiser, by slot and shared tensor.
        gradients: computes the mean gradient of all samples at the received weights, by parameter; only for a rule that
            declares `extra_passes`.
        notes: whatever the rule's `begin` leaves for its `end`.
        factors: numbers per parameter for the server rule, set at the end (`ServerStep.factor`).
        instead: per parameter, the values that are sent instead of the trained ones, set at the end.
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
    gradients: Callable[[], Mapping[str, Tensor]] = dict
    notes: Any = None
    factors: dict[str, float] = field(default_factory=dict)
    instead: dict[str, Tensor] = field(default_factory=dict)
    sent: dict[str, Tensor] = field(default_factory=dict)
    sent_slices: dict[str, Slice] = field(default_factory=dict)
    sent_weights: dict[str, float | None] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)

    @cached_property
    def received(self) -> Mapping[str, Tensor]:
        """The received value of every parameter; read-only."""
        return {name: self._part(self.slices[name].source, name) for name in self.parameters}

    def shared(self, slot: str, name: str) -> Tensor:
        """The parameter's slice of a tensor that the server shares, in a slot of the rule's `shared`; read-only."""
        return self._part(self._slot_name(slot, self.slices[name].source), name)

    def kept(self, slot: str, name: str) -> Tensor:
        """The parameter's slice of the client's state in a slot, initially zero; the rule changes it in place."""
        return self.kept_by("the local rule", slot, name)

    def kept_by(self, owner: str, slot: str, name: str) -> Tensor:
        """`kept` of a processor, or of another owner. Raises PluginError for the slot of somebody else."""
        if self.owners.setdefault(slot, owner) != owner:
            raise PluginError(f"{owner} and {self.owners[slot]} keep client state called {slot!r}: rename one of them")
        piece = self.slices[name]
        slot_name = place_of(slot, piece.source)
        if slot_name not in self.state:
            self.state[slot_name] = torch.zeros_like(self.weights[piece.source], device=self.parameters[name].device)
        return piece.of(self.state[slot_name])

    def counter(self, slot: str, name: str) -> Tensor:
        """The client's counter in a slot for the parameter's shared tensor: a scalar, initially 0, in main memory."""
        slot_name = place_of(f"{COUNTERS}{slot}", self.slices[name].source)
        return self.state.setdefault(slot_name, torch.zeros(()))

    def send(self, slot: str, name: str, value: Tensor, weight: float | None = None) -> None:
        """Sends a value for the parameter's slice of a shared slot.

        Its weight is the largest weight of the model's tensors unless `weight` is given. Raises ValueError for a slot
        that is not shared, and for an invalid value or weight.
        """
        piece, like = self.slices[name], self.parameters[name]
        slot_name = self._slot_name(slot, piece.source)
        if not isinstance(value, Tensor) or value.shape != like.shape or not value.is_floating_point():
            sent = f"{value.dtype} of {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{slot}: {sent} is sent for {name}: give floats of its shape {tuple(like.shape)}")
        if weight is not None and not 0 <= weight < math.inf:
            raise ValueError(f"{slot}: the weight {weight} is sent for {name}: give a finite number of at least 0")
        self.sent[slot_name] = value.detach()
        self.sent_slices[slot_name], self.sent_weights[slot_name] = Slice(slot_name, piece.region), weight

    def _slot_name(self, slot: str, source: str) -> str:
        slot_name = place_of(slot, source)
        if slot_name not in self.weights:
            raise ValueError(f"there is no shared slot {slot!r}: name it in `shared`")
        return slot_name

    def _part(self, shared: str, name: str) -> Tensor:
        return self.slices[name].of(self.weights[shared]).to(self.parameters[name].device)


def local_client(
    worker: Worker,
    assignment: Assignment,
    network: Network,
    weights: Weights,
    samples: int,
    local: LocalSGD,
    parameters: Mapping[str, Tensor],
) -> LocalClient:
    """A client as its local rule sees it, with `parameters` at the received values."""
    states = {n.removeprefix(STATE): t for n, t in (assignment.state or {}).items() if n.startswith(STATE)}
    counters = {name: t for name, t in states.items() if name.startswith(COUNTERS)}
    return LocalClient(
        client_id=client_of(assignment),
        round=assignment.round,
        samples=samples,
        steps=len(batch_sizes(samples, local)),
        local=local,
        parameters=parameters,
        slices=network.slices,
        weights=weights,
        state={**moved(states, worker.device), **counters},
    )


def gradients_at(
    worker: Worker, assignment: Assignment, network: Network, weights: Weights, data: Samples, local: LocalSGD
) -> dict[str, Tensor]:
    """The mean gradient of all samples at the received weights, by parameter; the module is reloaded afterwards.

    It is the gradient of the loss that training minimises. The network is one that is the same in every pass, which
    `refuse_extra_passes` sees to.
    """
    tensors = worker.load(network.module, weights, network.slices)
    parameters = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
    found: dict[str, Tensor] = {}
    worker.set_mode(network.module, training=True)
    objective, (x, y) = worker.objective.for_client(data[1]), data
    generator = torch_stream(worker.spec.training_seed, "gradients", *places_of(assignment))
    sizes = epoch_sizes(rows_of(y), local.batch_size)
    batches = zip(split(x, sizes), split(y, sizes), strict=True)
    with worker.randomness(network.module, generator):
        for x_B, y_B in batches:
            loss = minimised(objective, network.forward(x_B), y_B, network.loss)
            share = loss * (rows_of(y_B) / rows_of(y))
            # Not backward(), which would also add to what is trained beside the network, such as a router.
            gradients = torch.autograd.grad(share, list(parameters.values()), allow_unused=True)
            for name, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    found[name] = found[name] + gradient if name in found else gradient
    worker.load(network.module, weights, network.slices)  # the passes have changed the running statistics
    return {name: found[name] if name in found else torch.zeros_like(t) for name, t in parameters.items()}


def place_of(slot: str, source: str) -> str:
    """The name of a slot's tensor for a shared tensor: `SLOT/TENSOR`."""
    return f"{slot}/{source}"


class LocalRule:
    """Base class of rules that exchange tensors with the server or keep state at the clients; override `begin`.

    `shared` names slots of tensors that are sent with the model: one per parameter, of its shape, initially zero.
    `server` names the server rule that belongs to it, if there is one. `extra_passes` is the number of forward and
    backward passes over the client's samples besides its training. `needs_whole_change` says that what the rule sends
    or keeps is computed from the whole change of the client's weights, as SCAFFOLD's control variates are. Such a rule
    is refused where clients send only part of their change (ZeroFL, PyramidFL); a rule for which this does not matter
    sets it to False. `sends_only_change` says that a client's message is nothing but the change of its weights, as
    differential privacy and secure aggregation require; it is True of rules that are functions.
    Keyword parameters of the constructor are options (`method.train.options.NAME`).
    """

    shared: tuple[str, ...] = ()
    server: str | None = None
    extra_passes: int = 0
    needs_whole_change: bool = True
    sends_only_change: bool = False

    def refuses(self, local: LocalSGD) -> str | None:  # noqa: ARG002
        """Why it cannot be used with these hyper-parameters, and what can be done; None if it can."""
        return None

    def begin(self, client: LocalClient) -> Correction | LinearCorrection | None:
        """Called before the first step; returns the correction of every step's gradients."""
        raise NotImplementedError

    def end(self, client: LocalClient) -> None:
        """Called after the last step, with the trained `client.parameters`."""

    def merge(self, step: ServerStep) -> Tensor:
        """The server's new values of one region of a shared slot: the clients' mean unless overridden."""
        return step.mean


def not_plain(local: LocalSGD, why: str) -> str | None:
    """Why a rule refuses an optimiser other than SGD, or a rate that changes within a round; None for plain SGD."""
    if local.optimizer != PLAIN:
        return f"optimizer={local.optimizer.name}: {why}; use optimizer=sgd"
    if local.changes_rate:
        key, none = ("local_warmup_steps", "0") if local.warmup_steps else ("local_cosine_to", "null")
        return f"{key}={local.warmup_steps or local.cosine_to}: {why} with one rate; use {key}={none}"
    return None


def sgd(client: LocalClient) -> Correction | None:
    """Plain SGD."""
    del client
    return None


@dataclass(frozen=True)
class LinearCorrection:
    """The correction gradient + offset + strength (parameter - anchor) of all parameters at once: few kernels per step.

    A parameter without a gradient in a step (such as one behind a zero operator) is not changed. `steps` count every
    parameter's steps.
    """

    offsets: Mapping[str, Tensor] = field(default_factory=dict)
    strength: float = 0.0
    anchors: Mapping[str, Tensor] = field(default_factory=dict)
    steps: tuple[Counter[str], ...] = ()

    def __call__(self, names: list[str], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        """Changes the gradients in place."""
        for counter in self.steps:
            counter.update(names)
        if self.offsets:
            torch._foreach_add_(gradients, [self.offsets[name] for name in names])
        if self.strength:
            ways = torch._foreach_sub(parameters, [self.anchors[name] for name in names])
            torch._foreach_add_(gradients, ways, alpha=self.strength)


def pull_towards(strength: float, anchors: Mapping[str, Tensor]) -> LinearCorrection | None:
    """Adds the gradient of `strength` / 2 times the squared distance to the anchors; None for a strength of 0."""
    return LinearCorrection(strength=strength, anchors=anchors) if strength else None


def one_by_one(correct: Correction) -> Corrections:
    """Turns a correction of a single gradient into one of all gradients."""

    def all_of(names: list[str], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        for name, parameter, gradient in zip(names, parameters, gradients, strict=True):
            correct(name, parameter, gradient)

    return all_of


def begun(rule: LocalRule, client: LocalClient) -> Corrections | None:
    """Begins a rule's local training; returns its correction of the gradients of every step."""
    correct = rule.begin(client)
    return correct if correct is None or isinstance(correct, LinearCorrection) else one_by_one(correct)


def fedprox(
    client: LocalClient,
    *,
    mu: Annotated[float, ZERO_OR_MORE, "strength of the pull towards the received weights"] = 0.01,
) -> LinearCorrection | None:
    """FedProx: mu / 2 times the squared distance to the received weights is added to the loss (Li et al. 2020)."""
    return pull_towards(mu, client.received)


RuleFunction = Callable[[LocalClient], Correction | LinearCorrection | None]
"""A rule without tensors of its own."""

LOCAL_RULES: Registry[RuleFunction | LocalRule] = Registry(
    "local rule", Shipped({"sgd": sgd, "fedprox": fedprox}), ("client",), made=True
)


class _Simple(LocalRule):
    """Adapts a function to a `LocalRule`: it corrects gradients alone."""

    needs_whole_change = False
    sends_only_change = True

    def __init__(self, function: RuleFunction) -> None:
        self.function = function

    def begin(self, client: LocalClient) -> Correction | LinearCorrection | None:
        return self.function(client)


class _Own(LocalRule):
    """Wraps a user's own rule so that its errors name it."""

    def __init__(self, name: str, rule: LocalRule) -> None:
        self.name, self.rule, self.shared = name, rule, rule.shared
        self.server, self.extra_passes, self.refuses = rule.server, rule.extra_passes, rule.refuses  # type: ignore[method-assign]
        self.needs_whole_change, self.sends_only_change = rule.needs_whole_change, rule.sends_only_change

    def begin(self, client: LocalClient) -> Correction | LinearCorrection | None:
        with blaming("local rule", self.name):
            correct = self.rule.begin(client)
        if correct is None or isinstance(correct, LinearCorrection):
            return correct
        if not callable(correct):
            raise PluginError(f"local rule {self.name!r} gives {correct!r:.60}: give a {CORRECTION}, or None")

        def blamed(name: str, parameter: Tensor, gradient: Tensor) -> None:
            with blaming("local rule", self.name):
                returned: object = correct(name, parameter, gradient)
            if returned is not None and returned is not gradient:
                raise PluginError(f"local rule {self.name!r} has a correction that gives something back: {IN_PLACE}")

        return blamed

    def end(self, client: LocalClient) -> None:
        with blaming("local rule", self.name):
            self.rule.end(client)

    def merge(self, step: ServerStep) -> Tensor:
        with blaming("local rule", self.name):
            values = self.rule.merge(step)
        return checked_values(values, step.old, step.name, "local rule", self.name)


CORRECTION = "function of (name, parameter, gradient)"
IN_PLACE = "change the gradient in place, as gradient.add_(...) does"


def local_rule(choice: ComponentSpec) -> LocalRule:
    """The chosen rule; PluginError if it does not exist or is a class that does not derive from `LocalRule`."""
    made, blame = LOCAL_RULES.make(choice), f"local rule {choice.name!r}"
    if not isinstance(made, LocalRule):
        if inspect.isclass(LOCAL_RULES.find(choice.name)):
            raise PluginError(f"{blame} is no LocalRule: derive the class from {__name__}.LocalRule")
        made = _Simple(made)
    if not is_import_path(choice.name):
        return made
    if type(made).begin is LocalRule.begin:
        raise PluginError(f"{blame} has no begin(client): write one, which gives a {CORRECTION}, or None")
    if not (isinstance(made.shared, tuple) and all(isinstance(slot, str) for slot in made.shared)):
        raise PluginError(f"{blame} has shared = {made.shared!r:.60}: give a tuple of names, such as ('control',)")
    return _Own(choice.name, made)


def refuse_extra_passes(choice: ComponentSpec, key: str) -> None:
    """Raises ValueError if the rule needs the gradient of one network, because clients train another in every pass."""
    if local_rule(choice).extra_passes:
        raise ValueError(
            f"{key}.local_rule={choice.name} with these options needs the gradient of one network, but clients train "
            "another one in every pass: use option=2 (of scaffold), or another rule"
        )


def refuse_parts(choice: ComponentSpec, key: str, senders: str, instead: str) -> None:
    """Raises ValueError if the rule needs whole changes, because the clients of `senders` send only part of theirs.

    `key` is the configuration key of the stage; `instead` says what can be used.
    """
    if not local_rule(choice).needs_whole_change:
        return
    of_a_user = is_import_path(choice.name)
    remedy = ", or set needs_whole_change = False in the rule if it needs none" if of_a_user else ""
    raise ValueError(
        f"{key}.local_rule={choice.name} needs whole changes, but {senders}'s clients send only parts: use "
        f"{instead}{remedy}"
    )
