"""Arrival rules: how an answer counts if its client trained from weights that are older than the server's.

An answer x, trained from the received weights v, arrives when the server's weights are w, s rounds newer than v:

FedBuff   w + p(s) (x - v)                  the changes of several answers are averaged (Nguyen et al. 2022, Alg. 1)
FedAsync  w + alpha p(s) (x - w)            every answer is a round (Xie, Koyejo and Gupta 2019, Alg. 1)

p(s)      constant 1; polynomial (1 + s)^-a; hinge 1 up to s = b, then 1 / (a (s - b) + 1)   (Xie et al., Sec. 5.2)

FLSim, by FedBuff's authors, was only read for comparison, as it does not import on Python 3.11. It divides p by the p
of an average staleness, 1 by default, and also counts the answers left in the buffer at the end of an epoch.

FedBuff's paper weights a round's answers equally: weighting=plain, as its presets have it. By default they are weighted
by samples, as in FedAvg.

On slices, all of this applies to the scalars that the client holds. FedBuff's p is 1 / sqrt(1 + s), and its eta_g is
the server rule's learning rate. The rounds that use these rules are in `federation.asynchronous`.

Running statistics are values, not sums of changes: if w has moved since v was sent, w + p(s) (x - v) may be a negative
variance. A rule therefore gets w in place of v for all floating-point tensors that are not trained, so that FedBuff
takes w + p(s) (x - w), a mixture of two variances.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from torch import Tensor

from fedloom.platform.averaging.server import checked_values
from fedloom.platform.settings import SHARE, ZERO_OR_MORE
from fedloom.platform.spaces.slices import Weights, part_of

if TYPE_CHECKING:
    from fedloom.platform.averaging.average import Update


@dataclass(frozen=True)
class Arrival:
    """A client's answer for one region of a shared tensor.

    Attributes:
        name: the tensor's name in the shared weights.
        value: the client's values.
        received: the values that the client trained from, for running statistics those of `old`; read-only.
        old: the server's values before the round's answers are averaged; read-only.
        staleness: the number of rounds that ended between `received` and `old`.
    """

    name: str
    value: Tensor
    received: Tensor
    old: Tensor
    staleness: int


ArrivalRule = Callable[[Arrival], Tensor]
"""Returns the values that are averaged; keyword parameters are options (`method.train.options.NAME`)."""

Decay = Annotated[Literal["constant", "polynomial", "hinge"], "fedbuff, fedasync: how answers lose weight with age"]
Exponent = Annotated[float, ZERO_OR_MORE, "staleness=polynomial: a in (1 + s)^-a"]
HingeSlope = Annotated[float, ZERO_OR_MORE, "staleness=hinge: a in 1 / (a (s - b) + 1)"]
HingeStart = Annotated[float, ZERO_OR_MORE, "staleness=hinge: b, the age up to which an answer has its full weight"]
Mixing = Annotated[float, SHARE, "fedasync: alpha, the share of an answer in the new weights"]


def weight_at(age: int, staleness: str, exponent: float, hinge_slope: float, hinge_start: float) -> float:
    """The weight p(s) of an answer that is `age` rounds old, from 0 to 1."""
    if staleness == "polynomial":
        return float((1 + age) ** -exponent)
    if staleness == "hinge" and age > hinge_start:
        return 1 / (hinge_slope * (age - hinge_start) + 1)
    return 1.0


def fedbuff(
    arrival: Arrival,
    *,
    staleness: Decay = "polynomial",
    exponent: Exponent = 0.5,
    hinge_slope: HingeSlope = 10.0,
    hinge_start: HingeStart = 4.0,
) -> Tensor:
    """The server's weights plus the client's change, which counts less the older it is (Nguyen et al. 2022)."""
    weight = weight_at(arrival.staleness, staleness, exponent, hinge_slope, hinge_start)
    if weight == 1 and arrival.received is arrival.old:
        return arrival.value  # without rounding: if no answer is stale, FedBuff is FedAvg
    return torch.add(arrival.old, arrival.value - arrival.received, alpha=weight)


def fedasync(
    arrival: Arrival,
    *,
    mixing: Mixing = 0.6,
    staleness: Decay = "polynomial",
    exponent: Exponent = 0.5,
    hinge_slope: HingeSlope = 10.0,
    hinge_start: HingeStart = 4.0,
) -> Tensor:
    """A mixture of the server's and the client's weights, with less of older client weights (Xie et al. 2019)."""
    weight = mixing * weight_at(arrival.staleness, staleness, exponent, hinge_slope, hinge_start)
    return arrival.value if weight == 1 else torch.lerp(arrival.old, arrival.value, weight)


@torch.no_grad()
def arrived(
    update: Update,
    rule: tuple[str, ArrivalRule],
    old: Weights,
    received: Weights,
    staleness: int,
    parameters: Container[str],
) -> Update:
    """The update as the server averages it; counters stay as they are.

    `old` are the server's weights, `received` those that the client trained from; neither is changed. `parameters` are
    the names of the shared tensors that are trained. Tensors that the server no longer has, because a search has
    removed their operators meanwhile, are left out. Raises PluginError for a user's rule that returns values of another
    shape or values that are not finite.
    """
    rule_name, counted = rule
    tensors = {name: tensor for name, tensor in update.tensors.items() if update.slices[name].source in old}
    for tensor_name, tensor in tensors.items():
        if not tensor.is_floating_point():
            continue
        piece = update.slices[tensor_name]
        before = old[piece.source] if piece.region is None else part_of(old[piece.source], piece.region)
        start = received[piece.source] if piece.region is None else part_of(received[piece.source], piece.region)
        fresh = not staleness and torch.equal(start, before)  # not so where clients receive compressed weights
        if piece.source not in parameters and torch.equal(tensor, before):
            continue  # a constant, such as a mask of infinite values, which cannot be mixed
        if fresh or piece.source not in parameters:
            start = before
        values = counted(Arrival(piece.source, tensor, start, before, staleness))
        tensors[tensor_name] = checked_values(values, tensor, piece.source, "arrival rule", rule_name)
    return replace(update, tensors=tensors)
