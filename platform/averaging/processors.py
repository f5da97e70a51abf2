"""Processors: what happens to an update between a client's training and the server's mean.

A processor has a client side, which changes what is sent and counts its bytes, and a server side, which completes or
undoes that. A client applies its processors in order, the server in reverse, as in pfl-research's postprocessors:

    server   begun        before a round, on what its clients train
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
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedloom.platform.plugins import PluginError, Registry, Shipped
from fedloom.platform.settings import SHARE
from fedloom.platform.spaces.slices import FLOAT_BYTES

if TYPE_CHECKING:
    from torch import Tensor

    from fedloom.platform.averaging.average import Averaged, Update, WeightedSums
    from fedloom.platform.data.trees import Tree
    from fedloom.platform.plugins import ComponentSpec
    from fedloom.platform.spaces.slices import SliceMap, Weights


class Traffic(NamedTuple):
    """The bytes that a client receives and sends in a round, and how many scalars' changes are among what it sends."""

    down_bytes: int
    up_bytes: int
    changes: int


@dataclass(frozen=True)
class Message:
    """What a client is about to send.

    Attributes:
        client_id: the client.
        update: its tensors are those of the client's network, which a processor may change in place.
        received: the values that the client has received, by the network's names; read-only.
        parameters: the names of the tensors that were trained, in the network's order.
        traffic: what the client receives and sends, so far.
    """

    client_id: int
    update: Update
    received: Weights
    parameters: tuple[str, ...]
    traffic: Traffic


@dataclass(frozen=True)
class ServerContext:
    """A round of a training stage, as the server's side of a processor sees it.

    Attributes:
        stage, round: the stage's name and the round, from 0; with `seed` they derive random streams (`torch_stream`).
        old: the shared weights before the round.
        data: the run's JSON state before the round.
        min_contributors: the fewest clients that change a scalar.
        cohort: the round's clients, in plan order.
        parameters: the names of the shared tensors that are trained.
        held: the slices that every client of the cohort trains, by client id.
        answered: the clients whose updates have arrived, once they have.
        expected_weights: finds the expected sum of the clients' weights of every scalar, from tiers and sampling alone.
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
    """Base class of processors, which changes nothing; override what is needed.

    Processors are frozen dataclasses, as they are sent to the clients. Keyword parameters of the constructor are
    options (`method.train.options.NAME`). `shortens_updates` says that a part of the client's change is left out,
    which rules that need whole changes refuse. `least_contributors` is the fewest clients that may change a scalar;
    `needs_updates` asks for every single update, for `on_updates`.
    """

    shortens_updates: bool = False
    least_contributors: int = 1
    needs_updates: bool = False

    def begun(self, context: ServerContext) -> Processor:  # noqa: ARG002
        """The processor of one round, such as one that knows what the cohort's clients hold."""
        return self

    def on_labels(self, client_id: int, labels: Tree, num_classes: int) -> Tree:  # noqa: ARG002
        """The labels of a client's training samples."""
        return labels

    def on_client(self, message: Message) -> Message:
        """The message as it is sent."""
        return message

    def expected(self, traffic: Traffic) -> Traffic:
        """What `on_client` makes of this traffic, without training."""
        return traffic

    def on_sums(self, sums: WeightedSums, context: ServerContext) -> WeightedSums:  # noqa: ARG002
        """The sums of the updates, given those that have arrived."""
        return sums

    def on_updates(self, updates: Mapping[int, Update], context: ServerContext) -> Mapping[int, Update]:  # noqa: ARG002
        """The updates that have arrived by client, in plan order, where the server gets every single one."""
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


def sent(processors: Processors, message: Message) -> Message:
    """The message after all client sides, in order."""
    for each in processors:
        after: object = each.on_client(message)
        if not isinstance(after, Message):
            raise PluginError(f"{type(each).__name__}.on_client gives {after!r:.60}: give a {__name__}.Message")
        message = after
    return message


def expected_traffic(processors: Processors, traffic: Traffic) -> Traffic:
    """What all processors make of this traffic, in order."""
    for each in processors:
        traffic = each.expected(traffic)
    return traffic


# -- sparsification ----------------------------------------------------------------------------------------------------


By = Literal["change", "weight"]
"""What decides which changes are sent: their own size, or that of the trained values."""


@dataclass(frozen=True, kw_only=True)
class Sparsify(Processor):
    """Sends a share of the changes, the largest of all parameters together; the others count as no change."""

    share: Annotated[float, SHARE, "sparsify: the share of the changes that is sent"] = 0.1
    by: Annotated[By, "sparsify: largest by their own size, or by that of the trained values"] = "change"
    shortens_updates = True

    def on_client(self, message: Message) -> Message:
        """Resets the other parameters to the received values, in place."""
        parameters = {name: message.update.tensors[name] for name in message.parameters}
        if self.share < 1 and parameters:
            sparsified(parameters, message.received, self.share, self.by)
        return replace(message, traffic=self.expected(message.traffic))

    def expected(self, traffic: Traffic) -> Traffic:
        num_sent = kept_of(traffic.changes, self.share)
        saved_bytes = saved_by(traffic.changes, traffic.changes - num_sent)
        return traffic._replace(
            up_bytes=traffic.up_bytes - saved_bytes, changes=num_sent if saved_bytes else traffic.changes
        )


def with_share(processors: Processors, share: float) -> Processors:
    """The processors with another share of a client's changes to be sent."""
    if not any(isinstance(each, Sparsify) for each in processors):
        return (Sparsify(share=share), *processors)
    return tuple(replace(each, share=share) if isinstance(each, Sparsify) else each for each in processors)


def kept_of(parameters: int, share: float) -> int:
    """The number of changes that are sent of so many parameters, at least one."""
    return max(1, math.ceil(share * parameters)) if parameters else 0


@torch.no_grad()
def sparsified(
    parameters: Mapping[str, Tensor], received: Mapping[str, Tensor], share: float, by: str = "change"
) -> int:
    """Resets all but the largest changes, by magnitude over all parameters, to the received values, in place.

    With `by` weight, those of the largest trained values stay. Returns the number of changes that are left out; of
    equal ones the first are kept.
    """
    values = [parameters[name] if by == "weight" else parameters[name] - received[name] for name in parameters]
    size = torch.cat([value.flatten() for value in values]).abs()
    num_sent = kept_of(len(size), share)
    if num_sent == len(size):
        return 0
    order = torch.argsort(size, descending=True, stable=True)
    left_out = torch.ones(len(size), dtype=torch.bool, device=size.device)
    left_out[order[:num_sent]] = False
    parts = torch.split(left_out, [t.numel() for t in parameters.values()])
    for (name, parameter), part in zip(parameters.items(), parts, strict=True):
        parameter.copy_(torch.where(part.view_as(parameter), received[name], parameter))
    return len(size) - num_sent


def saved_by(parameters: int, left_out: int) -> int:
    """The bytes that are saved if the changes of `left_out` of so many parameters are not sent.

    A mask of one bit per parameter, or a list of places if that is smaller, says which are; if neither pays, everything
    is sent.
    """
    if not left_out:
        return 0
    where = min(math.ceil(parameters / 8), FLOAT_BYTES * (parameters - left_out))
    return max(0, FLOAT_BYTES * left_out - where)


# -- the registry ------------------------------------------------------------------------------------------------------

PROCESSORS: Registry[Processor] = Registry("processor", Shipped({"sparsify": Sparsify}), (), made=True)


def processor(choice: ComponentSpec) -> Processor:
    """The chosen processor; PluginError if it is none."""
    made: object = PROCESSORS.make(choice)
    if not isinstance(made, Processor):
        raise PluginError(f"processor {choice.name!r} is no Processor: derive the class from {__name__}.Processor")
    return made
