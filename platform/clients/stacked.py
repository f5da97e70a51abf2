"""Clients that train the same network with the same hyper-parameters, trained together as one batch.

The clients' weights are stacked along a new first axis (K, ...), and one vectorised forward and backward pass serves
all of them: many small matrix products become few large ones. Every client keeps its own random streams, batches,
momentum and local rule; what it computes is what it would compute alone, up to rounding.

Clients that have finished leave the stack: they are sorted by their numbers of steps, so that those at work are always
the first ones, views of the stacked tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import vmap

from fedloom.platform.clients.objectives import IGNORED, LastPosition, Objective, TopK
from fedloom.platform.clients.training import (
    SGD,
    Correction,
    LocalSGD,
    Samples,
    Seen,
    Trained,
    batch_indices,
    gradient_of,
)
from fedloom.platform.data.augment import augment_stack, augmentation
from fedloom.platform.data.on_device import upload
from fedloom.platform.spaces.base import SearchSpace, once
from fedloom.platform.spaces.initialisation import UniformConvolution, on_meta
from fedloom.platform.spaces.slices import Architecture, architecture_id

TOGETHER = (
    *(nn.Conv1d, nn.Conv2d, UniformConvolution, nn.Linear, nn.Flatten, nn.Identity, nn.GroupNorm, nn.LayerNorm),
    *(nn.ReLU, nn.ReLU6, nn.GELU, nn.Tanh, nn.Sigmoid),
    *(nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d),
)
"""Layers whose stacked form torch computes in one call, and which treat every sample alone."""
BY_BATCH = (nn.BatchNorm1d, nn.BatchNorm2d)
"""Those that do not treat every sample alone: only batches of the same size are stacked."""
OBJECTIVES = (Objective, LastPosition, TopK)


def skeleton(space: SearchSpace, architecture: Architecture) -> nn.Module | None:
    """A subnet without values, whose layers are called with the tensors of many clients; None if some cannot be."""

    def build(space: SearchSpace) -> nn.Module | None:
        module = on_meta(partial(space.build_subnet, architecture)).train()
        return module if layers_stack(module) else None

    return once(space, f"skeleton {architecture_id(architecture)}", build)


def layers_stack(module: nn.Module) -> bool:
    """Whether all layers of a network can be computed for many clients at once."""
    return all(type(part) in (*TOGETHER, *BY_BATCH) for part in module.modules() if not list(part.children()))


def needs_equal_batches(module: nn.Module) -> bool:
    """Whether the network has layers in which a batch's samples affect each other."""
    return any(isinstance(part, BY_BATCH) for part in module.modules())


@dataclass
class Member:
    """One client of a stack: its place among all samples, its random stream, and its local rule's correction."""

    start: int
    samples: int
    generator: torch.Generator
    correct: Correction | None = None


@dataclass
class Stack:
    """The tensors of K clients, stacked by name (K, ...), and all of their samples, one client's after the other's.

    `forward` maps one client's tensors and a batch (B, ...) to logits; `ready` writes a batch of stored samples to
    a tensor as it takes them. `members` are sorted by their numbers of steps, most first.
    """

    forward: Callable[[Mapping[str, Tensor], Tensor], Tensor]
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    data: Samples
    ready: Callable[[Tensor, Tensor], Tensor]
    members: list[Member] = field(default_factory=list)

    def of(self, member: int) -> dict[str, Tensor]:
        """One client's tensors, as views."""
        return {name: t[member] for name, t in {**self.parameters, **self.buffers}.items()}


def stacked(tensors: Mapping[str, Tensor], clients: int) -> dict[str, Tensor]:
    """Copies of the tensors for each of the clients (K, ...)."""
    return {name: t.unsqueeze(0).repeat(clients, *[1] * t.dim()) for name, t in tensors.items()}


def train_stack(stack: Stack, local: LocalSGD, objective: Objective) -> list[Trained]:
    """Trains all members on their own batches; their tensors change in place.

    Returns each member's figures; the loss of one whose training diverged is not finite.
    """
    members = stack.members
    labels = [stack.data[1][m.start : m.start + m.samples] if local.balanced else None for m in members]
    batches = [
        batch_indices(m.samples, local.batch_size, local.epochs, m.generator, balanced=of)
        for m, of in zip(members, labels, strict=True)
    ]
    augment = augmentation(local.augment)
    # One for all steps: the memory of a batch of many clients would be asked of the system anew at every step.
    inputs, most = stack.data[0], min(local.batch_size + 1, max(m.samples for m in members))
    room = inputs.new_empty((len(members) * most, *inputs.shape[1:]), dtype=torch.float32)
    seen = [Seen(inputs.device, local.loss_norm) for _ in members]
    at_work, live, momentum = 0, cast("_Live", None), dict[str, Tensor]()
    while parts := _next(batches):
        if len(parts) != at_work:
            at_work = len(parts)
            live = _Live(stack, at_work, local, momentum)
        x, y = _batch(stack, parts, room)
        if augment is not None:
            x = augment_stack(augment, x, [len(part) for part in parts], [m.generator for m in members[: len(parts)]])
        for k, found in enumerate(zip(*live.step(x, y, objective), strict=True)):
            seen[k].record(*found, len(parts[k]))
        momentum = live.momentum
    return [part.summed_up(len(part.losses), m.samples * local.epochs) for part, m in zip(seen, members, strict=True)]


def _next(batches: Sequence[Iterator[Tensor]]) -> list[Tensor]:
    """The next batch's indices of every client that has one."""
    found = [next(of, None) for of in batches]
    return [part for part in found if part is not None]


def _batch(stack: Stack, parts: Sequence[Tensor], room: Tensor) -> Samples:
    """Batches as one (K, B, ...) in `room`, shorter ones filled up with samples that do not count."""
    most = max(map(len, parts))
    index = torch.empty((len(parts), most), dtype=torch.int64)
    for k, part in enumerate(parts):
        index[k, : len(part)] = part
        index[k, len(part) :] = 0
        index[k] += stack.members[k].start
    all_x, all_y = stack.data
    place = upload(index.flatten(), all_x.device)
    x = stack.ready(all_x.index_select(0, place), room[: len(place)])
    y = all_y.index_select(0, place).view(*index.shape, *all_y.shape[1:])
    for k, part in enumerate(parts):
        y[k, len(part) :] = IGNORED
    return x.view(*index.shape, *x.shape[1:]), y


class _Live:
    """The first clients of a stack, those that are at work, as tensors that take gradients."""

    def __init__(self, stack: Stack, at_work: int, local: LocalSGD, momentum: Mapping[str, Tensor]) -> None:
        self._stack, self._clip_norm, self._norm = stack, local.clip_norm, local.loss_norm
        self._parameters = {n: t[:at_work].detach().requires_grad_() for n, t in stack.parameters.items()}
        self._buffers = {name: t[:at_work] for name, t in stack.buffers.items()}
        self._corrections = [member.correct for member in stack.members[:at_work]]
        unclipped = LocalSGD(1, 1, local.lr, local.momentum, local.weight_decay)
        self._sgd = SGD(unclipped, self._parameters, None, {n: buffer[:at_work] for n, buffer in momentum.items()})

    @property
    def momentum(self) -> dict[str, Tensor]:
        return self._sgd.momentum

    def step(self, x: Tensor, y: Tensor, objective: Objective) -> tuple[Tensor, Tensor, Tensor]:
        """Makes one step; returns each client's mean loss, and the sums of its metric and its squared losses."""
        outputs = vmap(self._stack.forward)({**self._parameters, **self._buffers}, x)
        losses = vmap(objective.loss)(outputs, y)
        losses.sum().backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            correct = vmap(objective.metric_sum)(outputs.detach(), y)
            squares = (
                vmap(objective.losses)(outputs.detach(), y).double().square().sum(dim=1) if self._norm else correct
            )
            self._correct()
            if self._clip_norm > 0:
                self._clip()
        self._sgd.step()
        return losses.detach(), correct, squares

    def _correct(self) -> None:
        for k, correct in enumerate(self._corrections):
            if correct is not None:
                for name, parameter in self._parameters.items():
                    correct(name, parameter.detach()[k], gradient_of(parameter)[k])

    def _clip(self) -> None:
        """Limits the norm of every client's gradient, as `torch.nn.utils.clip_grad_norm_` does for one."""
        gradients = [gradient_of(p).flatten(1) for p in self._parameters.values()]
        norms = torch.stack([torch.linalg.vector_norm(g, dim=1) for g in gradients]).norm(dim=0)
        shares = (self._clip_norm / (norms + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(shares.unsqueeze(1))
