"""Local optimisers: how a step of a client's training turns gradients into new parameters.

An optimiser is called once per step, with all parameters that the step reaches, and has no state of its own: what lasts
from step to step is in the step's state, which a client resets in every round or keeps between its rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Protocol

import torch
from torch import Tensor
from torch.optim.adam import adam as torch_adam
from torch.optim.adamw import adamw as torch_adamw
from torch.optim.sgd import sgd as torch_sgd

from fedloom.platform.plugins import Registry, Shipped, declares
from fedloom.platform.settings import BELOW_ONE, POSITIVE

MOMENTUM, STEPS = "momentum", "steps"
Beta1 = Annotated[float, BELOW_ONE, "decay of the mean gradient"]
Beta2 = Annotated[float, BELOW_ONE, "decay of the squared gradient"]
Eps = Annotated[float, POSITIVE, "what is added to the root of the squared gradient"]


class Keeps(Protocol):
    """A client (`LocalClient`) that keeps an optimiser's state between its rounds."""

    def kept(self, slot: str, name: str) -> Tensor:
        """A tensor like the parameter, initially 0."""

    def counter(self, slot: str, name: str) -> Tensor:
        """A scalar counter of the parameter, initially 0."""


@dataclass
class Memory:
    """An optimiser's state: tensors by slot and parameter index, stored by `client` if it keeps them between rounds."""

    names: tuple[str, ...]
    client: Keeps | None = None
    slots: dict[str, dict[int, Tensor]] = field(default_factory=dict)

    def of(self, slot: str, touched: list[int], like: list[Tensor] | None) -> list[Tensor]:
        """A slot's tensors for the parameters of the indices `touched`, shaped as `like`; scalars if that is None."""
        tensors = self.slots.setdefault(slot, {})
        for position, i in enumerate(touched):
            if i in tensors:
                continue
            if self.client is not None:
                kept = self.client.counter if like is None else self.client.kept
                tensors[i] = kept(f"optimizer/{slot}", self.names[i])
            else:
                tensors[i] = torch.zeros(()) if like is None else torch.zeros_like(like[position])
        return [tensors[i] for i in touched]


@dataclass
class LocalStep:
    """An optimiser's input: one step of one client.

    Attributes:
        parameters: the parameters that the step reaches, to be changed in place; all others rest, with their state.
        gradients: theirs, after the local rule's correction and clipping.
        lr: the learning rate of this step.
        momentum, weight_decay: as configured.
    """

    parameters: list[Tensor]
    gradients: list[Tensor]
    lr: float
    momentum: float
    weight_decay: float
    _touched: list[int] = field(repr=False)
    _memory: Memory = field(repr=False)

    def state(self, slot: str) -> list[Tensor]:
        """A tensor per parameter, of its shape and 0 before its first step, which the optimiser changes in place."""
        return self._memory.of(slot, self._touched, self.parameters)

    def counters(self, slot: str) -> list[Tensor]:
        """A number per parameter, 0 before its first step: scalar tensors in main memory, changed in place."""
        return self._memory.of(slot, self._touched, None)

    def begun(self, slot: str) -> list[Tensor | None]:
        """As `state`, but None before a parameter's first step, unless the client keeps its state."""
        if self._memory.client is not None:
            return [*self.state(slot)]
        there = self._memory.slots.get(slot, {})
        return [there.get(i) for i in self._touched]

    def keep(self, slot: str, tensors: list[Tensor | None]) -> None:
        """Stores the tensors that replace the None values returned by `begun`."""
        there = self._memory.slots.setdefault(slot, {})
        there.update((i, tensor) for i, tensor in zip(self._touched, tensors, strict=True) if tensor is not None)


LocalOptimizer = Callable[[LocalStep], None]
"""Changes the step's parameters in place; keyword parameters are options (`method.train.options.NAME`)."""


@dataclass(frozen=True)
class OptimizerTraits:
    """What an optimiser declares with `declares`; one that declares nothing has the defaults.

    Attributes:
        elementwise: whether every scalar's step depends on its own gradients alone, so that one call may make the
            steps of several clients, whose tensors are stacked.
    """

    elementwise: bool = False


@declares(OptimizerTraits(elementwise=True))
def sgd(step: LocalStep) -> None:
    """SGD: v <- momentum v + g;  x <- x - lr v."""
    # Where a velocity is None, torch copies the first gradient, which costs less than to add it to zeros.
    nothing: list[Tensor | None] = [None] * len(step.parameters)
    velocities = step.begun(MOMENTUM) if step.momentum else nothing
    torch_sgd(
        step.parameters,
        step.gradients,
        velocities,
        foreach=_foreach(step),
        lr=step.lr,
        momentum=step.momentum,
        weight_decay=step.weight_decay,
        dampening=0.0,
        nesterov=False,
        maximize=False,
    )
    if step.momentum:
        step.keep(MOMENTUM, velocities)


@declares(OptimizerTraits(elementwise=True))
def adam(step: LocalStep, *, beta1: Beta1 = 0.9, beta2: Beta2 = 0.999, eps: Eps = 1e-8) -> None:
    """Adam, whose weight decay is a part of the gradient (Kingma and Ba 2015, Alg. 1)."""
    _adam(torch_adam, step, beta1, beta2, eps)


@declares(OptimizerTraits(elementwise=True))
def adamw(step: LocalStep, *, beta1: Beta1 = 0.9, beta2: Beta2 = 0.999, eps: Eps = 1e-8) -> None:
    """AdamW, whose weight decay shrinks the parameters apart from the gradient (Loshchilov and Hutter 2019, Alg. 2)."""
    _adam(torch_adamw, step, beta1, beta2, eps)


def _adam(function: Callable[..., None], step: LocalStep, beta1: float, beta2: float, eps: float) -> None:
    function(
        step.parameters,
        step.gradients,
        step.state("mean"),
        step.state("square"),
        [],
        step.counters(STEPS),
        foreach=_foreach(step),
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=step.lr,
        weight_decay=step.weight_decay,
        eps=eps,
        maximize=False,
    )


def _foreach(step: LocalStep) -> bool:
    return len(step.parameters) > 4


LOCAL_OPTIMIZERS: Registry[LocalOptimizer] = Registry(
    "local optimizer", Shipped({"sgd": sgd, "adam": adam, "adamw": adamw}), ("step",), made=True
)


def optimizer_traits(name: str) -> OptimizerTraits:
    """What the local optimiser of that name declares."""
    return LOCAL_OPTIMIZERS.traits_of(name, OptimizerTraits())
