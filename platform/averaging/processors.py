"""Processors: steps that change an update between a client's training and the server's mean.

A processor has a client side, which changes the message and counts its bytes, and a server side, which completes or
undoes the change. A client applies its processors in order, the server in reverse, as in pfl-research's postprocessors:

    server   on_weights   before a round, on the shared weights of which clients receive slices
             begun        before a round: returns the processor for it, which may know the cohort's slices
    client   on_labels    on the labels of its samples, before local training
             on_client    on the message, after local training
    server   on_sums      on the sums of the updates that have arrived
             on_updates   on the updates themselves, where the server gets every single one
             on_mean      on the mean, before the server rule
             recorded     on the run's JSON state, which later stages see
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedloom.platform.plugins import PluginError, Registry, Shipped, answered
from fedloom.platform.seeding import torch_stream
from fedloom.platform.settings import SHARE
from fedloom.platform.spaces.slices import FLOAT_BYTES

if TYPE_CHECKING:
    from fedloom.platform.averaging.average import Averaged, Update, WeightedSums
    from fedloom.platform.data.trees import Tree
    from fedloom.platform.plugins import ComponentSpec
    from fedloom.platform.spaces.slices import SliceMap, Weights


class Payload(NamedTuple):
    """The traffic in one direction: its size in bytes, and the numbers of trained scalars and of their tensors."""

    size_bytes: int
    scalars: int
    tensors: int

    def recoded(self, size_bytes: int) -> Payload:
        """The payload if its scalars take `size_bytes` in total instead of 4 bytes each."""
        return self._replace(size_bytes=self.size_bytes - FLOAT_BYTES * self.scalars + size_bytes)


class Traffic(NamedTuple):
    """What a client receives and sends in a round; for parameters, it sends the changes."""

    down: Payload
    up: Payload


def no_memory(slot: str, name: str) -> Tensor:
    """The default `Message.memory`: raises PluginError, because the message carries no client state."""
    raise PluginError(f"the Message has no state {slot} of {name}: give it a memory")


@dataclass(frozen=True)
class Message:
    """What a client is about to send.

    Attributes:
        client_id: the client.
        update: the client's update, whose tensors are those of its network; a processor may change them in place.
        received: the values that the client received, by the network's tensor names; read-only.
        parameters: the names of the tensors that were trained, in the network's order.
        traffic: what the client receives and sends, after the processors applied so far.
        seed, stage, round: with the client's id, they derive random streams (`generator`).
        memory: maps (slot, parameter name) to the parameter's slice of the client's state, initially zero and changed
            in place. The state is kept until the client's next round, and costs memory for every client that took part.
    """

    client_id: int
    update: Update
    received: Weights
    parameters: tuple[str, ...]
    traffic: Traffic
    seed: int = 0
    stage: str = ""
    round: int = 0
    memory: Callable[[str, str], Tensor] = no_memory

    def generator(self, purpose: str) -> torch.Generator:
        """The client's random generator for a purpose in this round."""
        return torch_stream(self.seed, purpose, self.stage, self.round, self.client_id)

    @torch.no_grad()
    def changes(self) -> dict[str, Tensor]:
        """The change of every parameter."""
        return {name: self.update.tensors[name] - self.received[name] for name in self.parameters}

    @torch.no_grad()
    def send(self, changes: Mapping[str, Tensor]) -> None:
        """Replaces the changes of these parameters, in place."""
        for name, change in changes.items():
            self.update.tensors[name].copy_(self.received[name] + change)


@dataclass(frozen=True)
class ServerContext:
    """A round of a training stage, as the server's side of a processor sees it.

    Attributes:
        stage, round: the stage's name and the round, from 0; with `seed` they derive random streams (`torch_stream`).
        old: the shared weights before the round.
        data: the run's JSON state before the round.
        min_contributors: the number of clients that must cover a scalar for it to change.
        cohort: the round's clients, in plan order; on the server's side of an asynchronous round, those that answer.
        parameters: the names of the shared tensors that are trained.
        held: returns the slices that each client of the cohort trains, by client id.
        answered: the clients whose updates have arrived; empty before.
        expected_weights: returns each scalar's expected sum of client weights, known from tiers and sampling alone.
    """

    stage: str
    round: int
    seed: int
    old: Weights
    data: Mapping[str, Any]
    min_contributors: int
    cohort: Sequence[int] = ()
    parameters: Container[str] = ()
    held: Callable[[], Mapping[int, SliceMap]] = dict
    expected_weights: Callable[[], Mapping[str, Tensor]] = dict
    answered: Sequence[int] = ()


class Processor:
    """Base class of processors, which changes nothing; override the methods that you need.

    Processors are frozen dataclasses, because they are sent to the clients. Keyword parameters of the constructor are
    options (`method.train.options.NAME`). `shortens_updates`: the processor drops a part of the client's change, which
    rules that need whole changes refuse. `least_contributors`: the minimum number of clients that may change a scalar.
    `needs_updates`: the server must keep every single update, for `on_updates`. `kind`: what the processor does, which
    restricts its place in a chain (`check_order`).
    """

    shortens_updates: bool = False
    least_contributors: int = 1
    needs_updates: bool = False
    kind: Kind = "other"

    def on_weights(self, parameters: Weights, context: ServerContext) -> Weights | None:  # noqa: ARG002
        """The shared parameters as clients receive them in `context.round`; None leaves them unchanged.

        The server keeps its own parameters, and adds to them the clients' mean change from what they received.
        """
        return None

    def begun(self, context: ServerContext) -> Processor:  # noqa: ARG002
        """The processor to use in one round, such as one that knows which slices the cohort holds."""
        return self

    def on_labels(self, client_id: int, labels: Tree, num_classes: int) -> Tree:  # noqa: ARG002
        """The labels of a client's training samples."""
        return labels

    def on_client(self, message: Message) -> Message:
        """The message as it is sent."""
        return message

    def expected(self, traffic: Traffic) -> Traffic:
        """The traffic after `on_client`, computed without training."""
        return traffic

    def on_sums(self, sums: WeightedSums, context: ServerContext) -> WeightedSums:  # noqa: ARG002
        """The sums that the server uses, given those of the updates that have arrived."""
        return sums

    def on_updates(self, updates: Mapping[int, Update], context: ServerContext) -> Mapping[int, Update]:  # noqa: ARG002
        """The updates that the server uses, by client in plan order; called if the server keeps every single update."""
        return updates

    def on_mean(self, averaged: Averaged, context: ServerContext) -> Averaged:  # noqa: ARG002
        """The mean that the server rule sees."""
        return averaged

    def recorded(self, context: ServerContext) -> Mapping[str, Any]:  # noqa: ARG002
        """JSON values that the run's state keeps after the round."""
        return {}

    def schedules(self, context: ServerContext) -> Mapping[str, float]:  # noqa: ARG002
        """Values for the round's row."""
        return {}


Processors = tuple[Processor, ...]


Kind = Literal["clip", "noise", "sparsify", "quantise", "other"]
"""What a processor does to the client's changes; the first four must come in this order, each at most once."""

ORDER: tuple[Kind, ...] = ("clip", "noise", "sparsify", "quantise")
WHY_NOT: Mapping[tuple[Kind, Kind], str] = {
    ("clip", "clip"): "only the smaller limit would count",
    ("noise", "noise"): "two noises equal one with a larger deviation",
    ("sparsify", "sparsify"): "only one can choose what is sent",
    ("quantise", "quantise"): "values rounded to whole levels would be rounded again, to other levels",
    ("noise", "clip"): "noise must be scaled to the clipping limit, and would be clipped itself",
    ("sparsify", "clip"): "what is clipped after the choice would be missing from the memory of unsent changes",
    ("quantise", "clip"): "clipped values are no longer whole levels, for which bytes are counted",
    ("sparsify", "noise"): "noise on what is sent does not hide which changes were the largest",
    ("quantise", "noise"): "values with noise are no longer whole levels, for which bytes are counted",
    ("quantise", "sparsify"): "what is left out would be chosen, and remembered, after rounding",
}
"""Why a processor of the second kind must not come after one of the first kind."""


def check_order(named: Sequence[tuple[str, Processor]], key: str) -> None:
    """Raises ValueError for processors in an order that their theory does not allow; `key` is the stage's config key.

    The clipping of `privacy` comes after all of them, because it must bound what arrives at the server.
    """
    ordered = [(name, each.kind) for name, each in named if each.kind in ORDER]
    for (first, before), (second, after) in pairwise(ordered):
        if ORDER.index(before) >= ORDER.index(after):
            raise ValueError(
                f"{key}.processors: {second} after {first}: {WHY_NOT[before, after]}; the order is "
                f"{', '.join(ORDER)}, each at most once"
            )


def check_after_choice(named: Sequence[tuple[str, Processor]], key: str, chooser: str) -> None:
    """Raises ValueError for processors that must not follow `chooser`, whose clients send only a part of their changes.

    `key` is the stage's config key.
    """
    for name, each in named:
        why_not = WHY_NOT.get(("sparsify", "sparsify" if each.shortens_updates else each.kind))
        if why_not is not None:
            raise ValueError(
                f"{key}.processors: {name} and {chooser}, whose clients first choose which changes they send: "
                f"{why_not}; leave one out"
            )


def sent(processors: Processors, message: Message, kept_by: Callable[[str, str, str], Tensor] | None = None) -> Message:
    """The message after the client sides of all processors, in order; `kept_by` gives each a `memory` of its own."""
    for i, each in enumerate(processors, start=1):
        name = type(each).__name__
        if kept_by is not None:
            message = replace(message, memory=partial(kept_by, f"processor {i} ({name})"))
        message = answered(f"{name}.on_client", each.on_client(message), Message)
    return message


def expected_traffic(processors: Processors, traffic: Traffic) -> Traffic:
    """The traffic after all processors, in order, computed without training."""
    for each in processors:
        traffic = each.expected(traffic)
    return traffic


# -- sparsification ----------------------------------------------------------------------------------------------------


By = Literal["change", "weight"]
"""The criterion by which changes are sent: their own magnitude, or that of the trained values."""


@dataclass(frozen=True, kw_only=True)
class Sparsify(Processor):
    """Sends only the largest `share` of the changes, ranked over all parameters together; the others become 0.

    With `by=weight`, it sends the changes of the largest trained values instead.
    """

    share: Annotated[float, SHARE, "sparsify: the share of the changes that is sent"] = 0.1
    by: Annotated[By, "sparsify: ranks changes by their own size, or by the trained values' size"] = "change"
    shortens_updates = True
    kind = "sparsify"

    @torch.no_grad()
    def on_client(self, message: Message) -> Message:
        """Resets the values whose changes are not sent to the received ones, in place."""
        trained = {name: message.update.tensors[name] for name in message.parameters}
        if self.share < 1 and trained:
            left_out = smallest(trained if self.by == "weight" else message.changes(), self.share)
            for name, tensor in trained.items():
                tensor.copy_(torch.where(left_out[name], message.received[name], tensor))
        return replace(message, traffic=self.expected(message.traffic))

    def expected(self, traffic: Traffic) -> Traffic:
        return traffic._replace(up=with_fewer(traffic.up, self.share))


def with_share(processors: Processors, share: float) -> Processors:
    """The processors with `share` as the share of changes that is sent; adds a `Sparsify` if there is none."""
    if not any(isinstance(each, Sparsify) for each in processors):
        return (Sparsify(share=share), *processors)
    return tuple(replace(each, share=share) if isinstance(each, Sparsify) else each for each in processors)


def kept_of(parameters: int, share: float) -> int:
    """The number of changes that are sent for this number of parameters: at least one, if there are any."""
    return max(1, math.ceil(share * parameters)) if parameters else 0


def smallest(values: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
    """Masks of all values but the largest `share` by magnitude, ranked over all tensors; among ties the first stay."""
    size = torch.cat([value.flatten() for value in values.values()]).abs()
    left_out = torch.zeros(len(size), dtype=torch.bool, device=size.device)
    left_out[torch.argsort(size, descending=True, stable=True)[kept_of(len(size), share) :]] = True
    parts = torch.split(left_out, [value.numel() for value in values.values()])
    return {name: part.view_as(values[name]) for name, part in zip(values, parts, strict=True)}


def with_fewer(payload: Payload, share: float) -> Payload:
    """The payload if only this share of its scalars is sent; all are sent if encoding the positions would cost more."""
    num_sent = kept_of(payload.scalars, share)
    saved_bytes = saved_by(payload.scalars, payload.scalars - num_sent)
    num_sent = num_sent if saved_bytes else payload.scalars
    return payload._replace(size_bytes=payload.size_bytes - saved_bytes, scalars=num_sent)


def saved_by(parameters: int, left_out: int) -> int:
    """The bytes saved by not sending the changes of `left_out` of the parameters.

    The positions of the sent ones cost a mask of one bit per parameter, or a list of 4 bytes each if that is smaller;
    if neither saves bytes, everything is sent.
    """
    if not left_out:
        return 0
    where = min(math.ceil(parameters / 8), FLOAT_BYTES * (parameters - left_out))
    return max(0, FLOAT_BYTES * left_out - where)


# -- the registry ------------------------------------------------------------------------------------------------------

PROCESSORS: Registry[Processor] = Registry(
    "processor",
    Shipped(
        {
            "sparsify": Sparsify,
            "top_k": "fedloom.platform.averaging.compression:TopK",
            "qsgd": "fedloom.platform.averaging.compression:Qsgd",
            "uniform": "fedloom.platform.averaging.compression:Uniform",
            "clip": "fedloom.platform.averaging.compression:Clip",
            "noise": "fedloom.platform.averaging.compression:Noise",
        }
    ),
    (),
    made=True,
)


def processor(choice: ComponentSpec) -> Processor:
    """The chosen processor; raises PluginError if it is not a `Processor`."""
    made: object = PROCESSORS.make(choice)
    if not isinstance(made, Processor):
        raise PluginError(f"processor {choice.name!r} is no Processor: derive the class from {__name__}.Processor")
    return made
