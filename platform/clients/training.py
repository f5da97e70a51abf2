"""Local training: steps over a client's samples, with the method's forward pass and gradient correction."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from fedloom.platform.clients.optimizers import LOCAL_OPTIMIZERS, MOMENTUM, Keeps, LocalStep, Memory
from fedloom.platform.data.augment import NO_AUGMENTATION, augmentation
from fedloom.platform.data.on_device import moved, upload
from fedloom.platform.data.trees import Tree, first, mapped_within, rows_of, single, taken
from fedloom.platform.plugins import Blamed, ComponentSpec, is_import_path

if TYPE_CHECKING:
    from fedloom.platform.clients.objectives import Objective

PLAIN = ComponentSpec("sgd")
"""The local optimiser SGD, and the local rule that corrects nothing."""

Samples = tuple[Tree, Tree]
"""Inputs (n, ...) and targets (n,) or (n, T), or several of each by name."""

Outputs = Any
"""A network's outputs: logits (B, classes) or (B, classes, T), or whatever its objective takes."""

Loss = Callable[["Objective", Outputs, Any], Tensor]
"""The loss of outputs on targets, given the objective whose own loss it may use."""

Correction = Callable[[str, Tensor, Tensor], None]
"""Changes a parameter's gradient in place before a step; called with (name, parameter, gradient)."""

Corrections = Callable[[list[str], list[Tensor], list[Tensor]], None]
"""Changes the gradients of all parameters that a step reaches; called with names, parameters, gradients."""


@dataclass(frozen=True)
class LocalSGD:
    """A client's local training in one round: the hyper-parameters of its SGD or other optimiser, and its local rule.

    `balanced` makes a client's classes equally likely, see `batch_indices`; `loss_norm` asks for `Trained.loss_norm`;
    with `steps`, training ends after that many steps, if not before. `idle_momentum` and `keeps_state` are explained at
    `Optimizer`, `warmup_steps` and `cosine_to` at `rate`.
    """

    epochs: int
    batch_size: int
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float = 0.0
    idle_momentum: bool = False
    augment: ComponentSpec = NO_AUGMENTATION
    balanced: bool = False
    loss_norm: bool = False
    steps: int | None = None
    rule: ComponentSpec = PLAIN
    optimizer: ComponentSpec = PLAIN
    keeps_state: bool = False
    warmup_steps: int = 0
    cosine_to: float | None = None

    @property
    def changes_rate(self) -> bool:
        """Whether the learning rate changes within a round."""
        return self.warmup_steps > 0 or self.cosine_to is not None

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step (from 0) of the client's `steps` in a round.

        It rises linearly through `warmup_steps` steps to `lr`, then falls along half a cosine to the share `cosine_to`
        of it in the last step.
        """
        if step < self.warmup_steps:
            return self.lr * (step + 1) / (self.warmup_steps + 1)
        if self.cosine_to is None:
            return self.lr
        progress = (step - self.warmup_steps) / max(1, steps - 1 - self.warmup_steps)
        return self.lr * (self.cosine_to + (1 - self.cosine_to) * (1 + math.cos(math.pi * progress)) / 2)

    @property
    def plain(self) -> LocalSGD:
        """The same without the local rule, for networks that stay with the client."""
        return replace(self, rule=PLAIN)


@dataclass(frozen=True)
class Trained:
    """Results of local training: optimiser steps, samples seen (of all epochs), mean loss and accuracy.

    `loss_norm` is the root mean square of the single targets' losses, None unless asked for.
    """

    steps: int
    seen_samples: int
    loss: float
    accuracy: float
    loss_norm: float | None = None


def train_locally(
    forward: Callable[[Tree], Outputs],
    optimizer: Step,
    data: Samples,
    local: LocalSGD,
    generator: torch.Generator,
    *,
    objective: Objective,
    passes: int = 1,
    own_loss: Loss | None = None,
) -> Trained:
    """Runs local training: one step per batch on the objective's loss of `forward`.

    Args:
        forward: maps a batch (B, ...) to outputs; may choose another path at every call.
        optimizer: makes a step per batch; parameters outside the batch's path have no gradient.
        data: all samples on the device.
        local: hyper-parameters.
        generator: shuffles and augments; always a CPU generator.
        objective: loss, metric, and which targets count.
        passes: forward and backward passes per batch; their gradients are summed (subnets of progressive shrinking).
        own_loss: the loss that passes minimise instead of the objective's; the latter is reported all the same.
    """
    x, y = data
    device, samples = first(x).device, rows_of(y)
    augment, seen, steps = augmentation(local.augment), Seen(device, local.loss_norm), 0
    balanced = single(y, "a client with balanced classes") if local.balanced else None
    batches = batch_indices(samples, local.batch_size, local.epochs, generator, device, balanced)
    for index in itertools.islice(batches, local.steps):
        x_B, y_B = taken(x, index), taken(y, index)
        if augment is not None:
            x_B = augment(single(x_B, "an augmentation"), generator)
        for _ in range(passes):
            outputs = forward(x_B)
            loss = minimised(objective, outputs, y_B, own_loss)
            loss.backward()  # type: ignore[no-untyped-call]
            outputs = mapped_within(Tensor.detach, outputs)
            # Selection and tables compare losses over clients, whose own losses may have different scales.
            seen.add(loss if own_loss is None else objective.loss(outputs, y_B), outputs, y_B, objective)
        optimizer.step()
        steps += 1
    return seen.summed_up(steps, sum(batch_sizes(samples, local)))


def minimised(objective: Objective, outputs: Outputs, targets: Tree, own_loss: Loss | None) -> Tensor:
    """The loss that a pass minimises: the network's own, or the objective's."""
    return objective.loss(outputs, targets) if own_loss is None else own_loss(objective, outputs, targets)


def batch_indices(
    num_samples: int,
    batch_size: int,
    epochs: int,
    generator: torch.Generator,
    device: torch.device = torch.device("cpu"),  # noqa: B008 - a constant
    balanced: Tensor | None = None,
) -> Iterator[Tensor]:
    """Yields batches of indices on the device, reshuffled every epoch, with the sizes of `epoch_sizes`.

    If `balanced` holds the samples' labels (n,), an epoch has the same number of steps, but each of its n samples is
    drawn with replacement: first one of the classes that the client has, all equally likely, then one of its samples
    (as in the code of FedorAS's authors for spoken words).
    """
    sizes = epoch_sizes(num_samples, batch_size)
    if balanced is not None:
        _, class_of, counts = torch.unique(balanced.cpu(), return_inverse=True, return_counts=True)
        chances = 1 / counts.double()[class_of]
    for _ in range(epochs):
        if balanced is None:
            order = torch.randperm(num_samples, generator=generator)
        else:
            order = torch.multinomial(chances, num_samples, replacement=True, generator=generator)
        yield from torch.split(upload(order, device), sizes)


def epoch_sizes(num_samples: int, batch_size: int) -> list[int]:
    """The sizes of an epoch's batches: the last may be smaller; a single remaining sample joins the batch before it.

    Batch norms cannot train on a single sample with a 1x1 feature map, because it has no variance.
    """
    full, rest = divmod(num_samples, batch_size)
    if rest == 1 and full:
        return [batch_size] * (full - 1) + [batch_size + 1]
    return [batch_size] * full + ([rest] if rest else [])


def batch_sizes(num_samples: int, local: LocalSGD) -> list[int]:
    """The sizes of the batches of `batch_indices` over all epochs."""
    return (epoch_sizes(num_samples, local.batch_size) * local.epochs)[: local.steps]


@dataclass
class Seen:
    """Losses and metrics of the batches, left on the device: one synchronisation per client, not one per step."""

    device: torch.device
    norm: bool
    losses: list[Tensor] = field(default_factory=list)
    correct: list[Tensor] = field(default_factory=list)
    targets: list[Tensor | int] = field(default_factory=list)
    squares: list[Tensor] = field(default_factory=list)

    def add(self, loss: Tensor, outputs: Outputs, y_B: Tree, objective: Objective) -> None:
        """Measures a batch; no gradient flows through `outputs`."""
        correct, counted = objective.metric_sum(outputs, y_B), objective.counted(outputs, y_B)
        squares = objective.losses(outputs, y_B).double().square().sum() if self.norm else loss
        self.record(loss.detach(), correct, squares, counted)

    def record(self, loss: Tensor, correct: Tensor, squares: Tensor, counted: Tensor | int) -> None:
        """Adds a batch's mean loss, its metric and (if `norm`) squared losses as sums, and its number of targets."""
        self.losses.append(loss)
        self.correct.append(correct)
        self.targets.append(counted)
        if self.norm:
            self.squares.append(squares)

    def summed_up(self, steps: int, samples: int) -> Trained:
        """The means over all batches; NaN if none of the targets counts."""
        if any(isinstance(t, Tensor) for t in self.targets):
            numbers = [torch.as_tensor(t, dtype=torch.float64, device=self.device) for t in self.targets]
            counts = torch.stack(numbers)
        else:  # counts that do not depend on the data: one copy
            counts = upload(torch.tensor(self.targets, dtype=torch.float64), self.device)
        sums = [counts.sum(), torch.dot(torch.stack(self.losses).double(), counts), torch.stack(self.correct).sum()]
        sums += [torch.stack(self.squares).sum()] if self.norm else []
        total, loss, correct, *squares = torch.stack([s.double() for s in sums]).cpu().tolist()
        total = total or math.nan  # none of the targets counts
        return Trained(
            steps=steps,
            seen_samples=samples,
            loss=loss / total,
            accuracy=correct / total,
            loss_norm=math.sqrt(squares[0] / total) if self.norm else None,
        )


class Step(Protocol):
    """The update that follows a batch's backward pass."""

    def step(self) -> None:
        """Applies the gradients and clears them."""


class Optimizer:
    """Steps of SGD, or of another optimiser, over the parameters with a gradient, corrected and clipped.

    It calls torch's functional optimisers, because an `Optimizer` object of torch's visits all operators of a supernet
    at every step, which costs more than a small client's arithmetic.

    A parameter outside a batch's path has no gradient, and neither it nor its state changes, as in torch from 2.0 on.
    With `idle_momentum` its gradient is zero from its first step on, so that momentum keeps moving it and weight decay
    shrinks it, as in torch before 2.0, whose `zero_grad()` set gradients to zero. The authors of FedorAS trained with
    1.13.1 (requirements.txt of their code), where operators moved 1.5 to 3.5 times as far.

    With `keeps_state` the state (momentum, Adam's moments and numbers of steps) is part of the client's state, in the
    coordinates of the shared weights. A tensor has one number of steps, even if the client trained other slices of it.
    """

    def __init__(
        self,
        local: LocalSGD,
        parameters: Mapping[str, Tensor],
        correct: Corrections | None = None,
        client: Keeps | None = None,
        steps: int = 1,
    ) -> None:
        """`correct` changes the gradients of a step; `client`, with `steps` steps per round, may keep the state."""
        self.local, self.correct, self._steps, self._made = local, correct, steps, 0
        self.names, self.parameters = tuple(parameters), tuple(parameters.values())
        rule, name = LOCAL_OPTIMIZERS.make(local.optimizer), local.optimizer.name
        self._rule = Blamed(LOCAL_OPTIMIZERS.kind, name, rule) if is_import_path(name) else rule
        self._memory = Memory(self.names, client if local.keeps_state else None)
        for parameter in self.parameters:
            parameter.grad = None

    def resume(self, momentum: Mapping[str, Tensor], correct: Corrections | None = None) -> Optimizer:
        """Continues with the momentum buffers of earlier training, and with another correction if one is given."""
        buffers = moved(momentum, self.parameters[0].device) if momentum else {}
        there = self._memory.slots.setdefault(MOMENTUM, {})
        there.update((i, buffers[name]) for i, name in enumerate(self.names) if name in buffers)
        self.correct = self.correct if correct is None else correct
        return self

    def narrow(self, parameters: Mapping[str, Tensor], clients: int) -> None:
        """Continues with the first `clients` of a stack, whose tensors (K, ...) are `parameters`."""
        self.parameters = tuple(parameters.values())
        for tensors in self._memory.slots.values():
            tensors.update((i, tensor[:clients]) for i, tensor in tensors.items() if tensor.dim())

    @property
    def momentum(self) -> dict[str, Tensor]:
        """SGD's momentum buffers by parameter, where there is one."""
        return {self.names[i]: buffer for i, buffer in self._memory.slots.get(MOMENTUM, {}).items()}

    @torch.no_grad()
    def step(self) -> None:
        """Makes one step and clears the gradients, to zeros with `idle_momentum`; other parameters do not change."""
        local = self.local
        touched = [i for i, p in enumerate(self.parameters) if p.grad is not None]
        parameters = [self.parameters[i] for i in touched]
        gradients = [gradient_of(p) for p in parameters]
        if self.correct is not None and touched:
            self.correct([self.names[i] for i in touched], parameters, gradients)
        if local.clip_norm > 0:
            torch.nn.utils.clip_grad_norm_(parameters, local.clip_norm)
        self.update(touched, parameters, gradients)
        if local.idle_momentum:
            torch._foreach_zero_(gradients)
            return
        for parameter in parameters:
            parameter.grad = None

    def update(self, touched: list[int], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        """Applies the final gradients to the parameters of the indices `touched`."""
        local = self.local
        lr = local.rate(self._made, self._steps) if local.changes_rate else local.lr
        self._made += 1
        self._rule(LocalStep(parameters, gradients, lr, local.momentum, local.weight_decay, touched, self._memory))


def gradient_of(parameter: Tensor) -> Tensor:
    """The gradient of a parameter that has one."""
    assert parameter.grad is not None, "only parameters that were reached take a step"
    return parameter.grad
