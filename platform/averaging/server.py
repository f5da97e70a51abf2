"""Server rules: the server optimiser's step from the weights before a round and the clients' mean to the new weights.

A rule is called for one region of one parameter at a time, and only for regions that enough clients cover: values that
no client covers stay unchanged, whatever the server's momentum. Buffers (running statistics, counters) are averaged
without a rule.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import torch
from annotated_types import Interval
from torch import Tensor

from fedloom.platform.averaging.average import Averaged
from fedloom.platform.plugins import PluginError, Registry, Shipped, is_import_path
from fedloom.platform.settings import POSITIVE
from fedloom.platform.spaces.slices import Region, Weights, part_of, widened

DECAY = Interval(ge=0, lt=1)
ServerLR = Annotated[float, POSITIVE, "the server's learning rate"]
Beta1 = Annotated[float, DECAY, "decay of the mean change"]
Beta2 = Annotated[float, DECAY, "decay of the squared change"]
Tau = Annotated[float, POSITIVE, "adaptivity: keeps the denominator above 0"]


@dataclass(frozen=True)
class ServerRound:
    """The round that a rule is called for: its number (from 0), cohort size and number of registered clients."""

    round: int
    cohort: int
    num_clients: int


@dataclass(frozen=True)
class ServerStep:
    """A server rule's input: one region of one parameter.

    Attributes:
        name: the parameter's name in the shared weights.
        old: the values before the round, in float32 instead of a type of 16 bits; read-only.
        mean: the clients' weighted mean, likewise; read-only.
        contributors: the number of clients whose updates cover the region.
        about: the round.
        factor: the weighted mean of the factors of these updates, 1 unless the local rule sets them.
    """

    name: str
    old: Tensor
    mean: Tensor
    contributors: int
    about: ServerRound
    _state: Callable[[str, float], Tensor] = field(repr=False)
    factor: float = 1.0

    @property
    def change(self) -> Tensor:
        """The mean minus the old values: the negative pseudo-gradient."""
        return self.mean - self.old

    def state(self, slot: str, first: float = 0.0) -> Tensor:
        """The region of a tensor of server state that persists between rounds; the rule changes it in place.

        The tensor has the parameter's shape and is filled with `first` before its first use.
        """
        return self._state(slot, first)


ServerRule = Callable[[ServerStep], Tensor]
"""Returns the new values of the region; keyword parameters are options (`method.train.options.NAME`)."""


@dataclass(frozen=True)
class ServerTraits:
    """What a server rule declares with `declares`; a rule that declares nothing has the defaults.

    Attributes:
        local_rule: the local rule that it must be used with, if it is the server's half of an algorithm.
        needs_every_contributor: whether it refuses `min_contributors` above 1.
    """

    local_rule: str | None = None
    needs_every_contributor: bool = False


def replace(step: ServerStep) -> Tensor:
    """Plain averaging: the mean replaces the old values (McMahan et al. 2017)."""
    return step.mean


def fedavgm(step: ServerStep, *, server_lr: ServerLR = 1.0, server_momentum: Beta1 = 0.9) -> Tensor:
    """Server momentum: v <- beta v + change; x <- x + eta v (Hsu, Qi and Brown 2019)."""
    velocity = step.state("momentum")
    velocity.mul_(server_momentum).add_(step.change)
    return step.old + server_lr * velocity


def fedadagrad(step: ServerStep, *, server_lr: ServerLR = 0.1, beta_1: Beta1 = 0.0, tau: Tau = 1e-3) -> Tensor:
    """FedAdagrad: v <- v + change^2 (Reddi et al. 2021, Alg. 2)."""
    variance = step.state("variance", tau**2)
    variance.add_(step.change.square())
    return _adaptive(step, variance, server_lr, beta_1, tau)


def fedadam(
    step: ServerStep, *, server_lr: ServerLR = 0.01, beta_1: Beta1 = 0.9, beta_2: Beta2 = 0.99, tau: Tau = 1e-3
) -> Tensor:
    """FedAdam: v <- beta_2 v + (1 - beta_2) change^2 (Reddi et al. 2021, Alg. 2)."""
    variance = step.state("variance", tau**2)
    variance.mul_(beta_2).add_(step.change.square(), alpha=1 - beta_2)
    return _adaptive(step, variance, server_lr, beta_1, tau)


def fedyogi(
    step: ServerStep, *, server_lr: ServerLR = 0.01, beta_1: Beta1 = 0.9, beta_2: Beta2 = 0.99, tau: Tau = 1e-3
) -> Tensor:
    """FedYogi: v <- v - (1 - beta_2) change^2 sign(v - change^2) (Reddi et al. 2021, Alg. 2)."""
    variance, square = step.state("variance", tau**2), step.change.square()
    variance.sub_(square * torch.sign(variance - square), alpha=1 - beta_2)
    return _adaptive(step, variance, server_lr, beta_1, tau)


def _adaptive(step: ServerStep, variance: Tensor, server_lr: float, beta_1: float, tau: float) -> Tensor:
    """m <- beta_1 m + (1 - beta_1) change; x <- x + eta m / (sqrt(v) + tau).

    m starts at 0 and v at tau^2, so that the first step is defined and at most eta. There is no bias correction, as in
    the paper.
    """
    mean = step.state("mean")
    mean.mul_(beta_1).add_(step.change, alpha=1 - beta_1)
    return step.old + server_lr * mean / (variance.sqrt() + tau)


SERVER_RULES: Registry[ServerRule] = Registry(
    "server rule",
    Shipped({rule.__name__: rule for rule in (replace, fedavgm, fedadagrad, fedadam, fedyogi)}),
    ("step",),
)

ARRIVAL_RULES: Registry[Callable[..., Tensor]] = Registry(
    "arrival rule",
    Shipped({rule: f"fedloom.platform.averaging.staleness:{rule}" for rule in ("fedbuff", "fedasync")}),
    ("arrival",),
)
"""How an answer counts in an asynchronous round (`averaging.staleness`)."""


def server_traits(name: str) -> ServerTraits:
    """What the server rule of that name declares."""
    return SERVER_RULES.traits_of(name, ServerTraits())


@torch.no_grad()
def serve(
    rules: Mapping[str, tuple[str, ServerRule]],
    old: Weights,
    averaged: Averaged,
    state: Weights,
    about: ServerRound,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the weights after the round and the server's state for the next one.

    Args:
        rules: per parameter the rule's name and the rule; tensors without a rule are averaged.
        old: the weights before the round; neither they nor `state` are changed.
        averaged: the clients' mean and the regions that it covers.
        state: the server's state by `SLOT/PARAMETER`.

    Raises PluginError for a user's rule that returns values of another shape or values that are not finite.
    """
    weights, after = dict(averaged.weights), dict(state)

    def part_of_state(parameter: str, region: Region, slot: str, first: float) -> Tensor:
        # Copied at its first use in a round: the previous state may still be being written to disk.
        name = f"{slot}/{parameter}"
        if after.get(name) is state.get(name):
            before = state.get(name)
            after[name] = torch.full_like(widened(old[parameter]), first) if before is None else before.clone()
        return part_of(after[name], region)

    for name, covered in averaged.coverage.items():
        if name not in rules:
            continue
        rule_name, rule = rules[name]
        result = old[name].clone()
        for region, coverage in covered.items():
            mean, before = (widened(part_of(each[name], region)) for each in (averaged.weights, old))
            state_of = partial(part_of_state, name, region)
            values = rule(ServerStep(name, before, mean, coverage.contributors, about, state_of, coverage.factor))
            part_of(result, region).copy_(checked_values(values, before, name, "server rule", rule_name))
        weights[name] = result
    return weights, after


def of_shape(values: object, like: Tensor, gives: str, part: str, needed: str) -> Tensor:
    """What a user's code `gives` for a `part` of a model; PluginError for anything but a tensor of the same shape."""
    if isinstance(values, Tensor) and values.shape == like.shape:
        return values
    actual = f"the shape {tuple(values.shape)}" if isinstance(values, Tensor) else repr(values)[:60]
    raise PluginError(f"{gives} {actual} for {part} of the shape {tuple(like.shape)}: give {needed} of the same shape")


def checked_values(values: object, like: Tensor, parameter: str, kind: str, rule: str) -> Tensor:
    """A region's new values; PluginError naming the rule for another shape, integers, or values that are not finite."""
    blame = f"{kind} {rule!r}"
    values = of_shape(values, like, f"{blame} gave", f"a region of {parameter}", "new values")
    if not values.is_floating_point():
        raise PluginError(f"{blame} gave values of {values.dtype} for {parameter}: give floats")
    if is_import_path(rule) and not bool(torch.isfinite(values).all()):
        raise PluginError(f"{blame} gave values for {parameter} that are not finite")
    return values
