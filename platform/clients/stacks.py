"""Clients that train the same network with the same hyper-parameters, trained together as one batch.

The clients' weights are stacked along a new first axis (K, ...), and one vectorised forward and backward pass serves
all of them: many small matrix products become few large ones. Every client keeps its own random streams, batches,
momentum and local rule; what it computes is what it would compute alone, up to rounding.

Clients that have finished leave the stack: they are sorted by their numbers of steps, so that those at work are always
the first ones, views of the stacked tensors.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import vmap

from fedloom.platform.clients.assignments import Assignment, ClientResult, Task, client_of, own_copy, places_of
from fedloom.platform.clients.device import check_device, is_out_of_memory, peak_memory_bytes, reset_peak_memory
from fedloom.platform.clients.local_rules import (
    LinearCorrection,
    LocalClient,
    LocalRule,
    begun,
    local_client,
    local_rule,
)
from fedloom.platform.clients.networks import Network, Subnet, in_task
from fedloom.platform.clients.objectives import IGNORED, LastPosition, Objective, TopK
from fedloom.platform.clients.optimizers import optimizer_traits
from fedloom.platform.clients.trainer import Train, TrainedNetwork, received
from fedloom.platform.clients.training import (
    Corrections,
    LocalSGD,
    Optimizer,
    Samples,
    Seen,
    Trained,
    batch_indices,
    batch_sizes,
    gradient_of,
)
from fedloom.platform.clients.worker import Worker
from fedloom.platform.data.augment import augment_stack, augmentation
from fedloom.platform.data.on_device import upload
from fedloom.platform.data.trees import Tree, joined, single
from fedloom.platform.plugins import ends_process, in_one_line
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.base import SearchSpace, once
from fedloom.platform.spaces.initialisation import UniformConvolution, on_meta
from fedloom.platform.spaces.slices import Architecture, Slice, Weights, architecture_id
from fedloom.tiers.costs import CostTable

BY_SAMPLE = (
    *(nn.Conv1d, nn.Conv2d, UniformConvolution, nn.Linear, nn.Flatten, nn.Identity, nn.GroupNorm, nn.LayerNorm),
    *(nn.ReLU, nn.ReLU6, nn.GELU, nn.Tanh, nn.Sigmoid),
    *(nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d),
)
"""Layers that torch computes for a whole stack in one call, and that treat every sample on its own."""
BY_BATCH = (nn.BatchNorm1d, nn.BatchNorm2d)
"""Layers that mix the samples of a batch: with them, only clients with batches of the same size are stacked."""
OBJECTIVES = (Objective, LastPosition, TopK)

DIVERGED = "its loss in the stack was not finite"
"""Why a client is trained again alone; that training reports where it diverges."""


# -- what can be stacked ----------------------------------------------------------------------------------------------


def common_subnet(tasks: Sequence[Task]) -> Subnet | None:
    """The subnet that all tasks train in the same way, apart from the clients' shares; None if they differ in more.

    Also None for a local rule with extra passes, which need a module for each client, and for a task or a subnet of a
    derived class that trains in its own way, which a stack would not do.
    """
    first = tasks[0] if tasks else None
    if not isinstance(first, Train) or type(first).run is not Train.run or type(first.network) is not Subnet:
        return None
    if local_rule(first.local.rule).extra_passes:
        return None
    return first.network if all(task is first or task == first for task in tasks) else None


def skeleton(space: SearchSpace, architecture: Architecture) -> nn.Module | None:
    """A subnet's module without values, to be called with the tensors of many clients; None if a layer forbids that."""

    def build(space: SearchSpace) -> nn.Module | None:
        if not space.stacks:
            return None
        module = on_meta(partial(space.build_subnet, architecture)).train()
        return module if layers_stack(module) else None

    return once(space, f"skeleton {architecture_id(architecture)}", build)


def layers_stack(module: nn.Module) -> bool:
    """Whether all layers of a network can be computed for many clients at once."""
    return all(type(part) in (*BY_SAMPLE, *BY_BATCH) for part in module.modules() if not list(part.children()))


def _stackable(worker: Worker, assignments: Sequence[Assignment], most: int) -> list[list[int]]:
    """Groups of at least two clients that can be trained as one batch, as indices of the assignments."""
    places = [i for i, a in enumerate(assignments) if a.client_id is not None and a.is_done]
    subnet = common_subnet([assignments[i].task for i in places])
    if subnet is None or type(worker.objective) not in OBJECTIVES or not worker.data.dataset.normalises:
        return []
    module = skeleton(worker.space, subnet.architecture)
    if module is None:
        return []
    needs_equal_batches = any(isinstance(part, BY_BATCH) for part in module.modules())
    groups: dict[int, list[int]] = {}
    for i in places:
        splits = _task(assignments[i]).splits
        samples = sum(worker.data.size(client_of(assignments[i]), split) for split in splits)
        groups.setdefault(samples if needs_equal_batches else 0, []).append(i)
    parts = [group[start : start + most] for group in groups.values() for start in range(0, len(group), most)]
    return [part for part in parts if len(part) > 1]


LARGEST_STACK = 32
"""The most clients per stack: because of a processor's caches, larger stacks hardly gain anything."""
STACKS = 2
"""The least number of stacks of a round's clients, so that this many actors can train at once."""
GAINFUL_MACS = 2e8
"""MACs per step of a whole stack above which stacking gains nothing."""


def clients_per_stack(wanted: str, space: SearchSpace, macs: CostTable, tasks: Sequence[Task], batch_size: int) -> int:
    """The number of clients per stack; 1 if they train different networks, parts of a supernet, or large networks.

    `wanted` is `off`, `auto` or a number. The result depends on the configuration alone, never on the machine or the
    number of actors, because rounding depends on it.
    """
    subnet = None if wanted == "off" or len(tasks) < 2 else common_subnet(tasks)
    if subnet is None or skeleton(space, subnet.architecture) is None:
        return 1
    if wanted != "auto":
        return int(wanted)
    step_macs = max(1.0, batch_size * macs.cost(subnet.architecture))
    return max(1, min(LARGEST_STACK, -(-len(tasks) // STACKS), int(GAINFUL_MACS // step_macs)))


def _task(assignment: Assignment) -> Train:
    assert isinstance(assignment.task, Train), "the tasks are alike"
    return assignment.task


# -- a chunk's clients ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StackedTask:
    """A task whose result or error is known already, because its client was trained in a stack."""

    result: ClientResult | Exception

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """Returns the result, or raises the error."""
        del worker, assignment, weights
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@dataclass(frozen=True)
class Stacked:
    """What became of a chunk's clients, by index: `tasks` with known results, and why others are trained alone.

    Clients in neither were not in a stack.
    """

    tasks: dict[int, StackedTask] = field(default_factory=dict)
    fallbacks: dict[int, str] = field(default_factory=dict)


def train_in_stacks(
    worker: Worker, assignments: Sequence[Assignment], weights: Weights, most: int, begins: Callable[[int], None]
) -> Stacked:
    """Trains a chunk's clients in stacks of up to `most` clients, where that is possible.

    All other clients, and those whose training diverged, are left to be trained one by one, which also shows what is
    wrong and for which client. A stack without enough memory fails, because its results would otherwise depend on the
    share of the GPU. `begins` is called with the index of each stack's first client. Raises DeviceLostError.
    """
    done = Stacked()
    left: list[Sequence[int]] = [range(len(assignments))]
    try:
        left = [*_stackable(worker, assignments, most)]
        while left:
            places = left[0]
            begins(places[0])
            results: Sequence[ClientResult | Exception | None]
            try:
                results = _train(worker, [assignments[i] for i in places], weights)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                error.__context__ = None  # its frames hold the stack's tensors, whose memory the next stack needs
                results = [error.with_traceback(None)] * len(places)
            for i, result in zip(places, results, strict=True):
                if result is None:
                    done.fallbacks[i] = DIVERGED
                else:
                    done.tasks[i] = StackedTask(result)
            del left[0]
    except BaseException as error:
        if ends_process(error):
            raise
        check_device(error)
        done.fallbacks.update((i, in_one_line(error)) for part in left for i in part)
    return done


@dataclass
class Member:
    """One client of a stack: where its samples start in the stack's data, its random stream, its rule and its state.

    `optimizer` makes the client's steps if one call cannot make those of all clients.
    """

    assignment: Assignment
    start: int
    samples: int
    generator: torch.Generator
    rule: LocalRule
    client: LocalClient
    correct: Corrections | None
    optimizer: Optimizer | None


@dataclass
class Stack:
    """The tensors of K clients, stacked by name (K, ...), and all of their samples, client after client.

    `forward` maps one client's tensors and a batch (B, ...) to logits; `ready` writes a batch of stored samples to
    a tensor in the form that `forward` takes. `members` are sorted by their numbers of steps, most first.
    """

    forward: Callable[[Mapping[str, Tensor], Tensor], Tensor]
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    data: tuple[Tensor, Tensor]
    ready: Callable[[Tensor, Tensor], Tree]
    members: list[Member] = field(default_factory=list)


def _train(worker: Worker, assignments: Sequence[Assignment], weights: Weights) -> list[ClientResult | None]:
    """The results of clients with the same task, in the order of the assignments; None for one that diverged."""
    reset_peak_memory(worker.device)
    started = time.perf_counter()
    task = _task(assignments[0])
    assert isinstance(task.network, Subnet), "other networks are not stacked"
    network, module = task.network.on(worker), skeleton(worker.space, task.network.architecture)
    assert module is not None, "its layers stack"
    data, sizes = worker.data.clients([client_of(a) for a in assignments], task.splits)
    for each in task.processors:
        labels = torch.split(single(data[1], "a stack"), sizes)
        of_clients = zip(assignments, labels, strict=True)
        changed = [each.on_labels(client_of(a), y, worker.data.dataset.num_classes) for a, y in of_clients]
        data = data[0], joined(changed)
    data = in_task(worker, data, network)
    stack = _stack(worker, module, network, weights, data, len(assignments))
    starts = list(itertools.accumulate(sizes, initial=0))
    order = sorted(range(len(sizes)), key=lambda i: -len(batch_sizes(sizes[i], task.local)))
    for i in order:
        stack.members.append(_member(worker, assignments[i], network, weights, stack, starts[i], sizes[i]))
    figures = train_stack(stack, task.local, worker.objective)
    stacked_tensors = {**stack.parameters, **stack.buffers}
    results: list[ClientResult | None] = []
    for i in range(len(assignments)):
        k = order.index(i)
        if not math.isfinite(figures[k].loss):
            results.append(None)
            continue
        member = stack.members[k]
        tensors = {name: stacked_tensors[name][k] for name in network.slices}
        with torch.no_grad():
            member.rule.end(member.client)
        trained = TrainedNetwork(network, tensors, {}, figures[k], tuple(stack.parameters), member.client)
        if task.validation == "scored":
            worker.load(network.module, tensors, {name: Slice(name) for name in tensors})
        client_task = _task(member.assignment)
        results.append(client_task.finished(worker, member.assignment, trained, member.samples, weights))
    wall_s, peak = (time.perf_counter() - started) / len(results), peak_memory_bytes(worker.device)
    return [result and replace(result, wall_s=wall_s, peak_memory_bytes=peak) for result in results]


def _stack(worker: Worker, module: nn.Module, network: Network, weights: Weights, data: Samples, clients: int) -> Stack:
    """The received tensors of all clients, and the forward pass of one."""
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    one = received(worker, network, weights)
    copies = {name: t.unsqueeze(0).repeat(clients, *[1] * t.dim()) for name, t in one.items()}
    parameters = {name: t for name, t in copies.items() if name in trained}
    buffers = {name: t for name, t in copies.items() if name not in trained}
    forward = worker.kernels.functional(module, worker.device)
    x, y = (single(tree, "a stack") for tree in data)
    return Stack(forward, parameters, buffers, (x, y), worker.data.dataset.normalised)


def _member(
    worker: Worker, assignment: Assignment, network: Network, weights: Weights, stack: Stack, start: int, samples: int
) -> Member:
    """The stack's next member; its local rule has begun."""
    if assignment.state is not None:
        assignment = replace(assignment, state=own_copy(assignment.state))
    local = _task(assignment).local
    parameters = {name: t[len(stack.members)] for name, t in stack.parameters.items()}
    client = local_client(worker, assignment, network, weights, samples, local, parameters)
    generator = torch_stream(worker.spec.training_seed, "batches", *places_of(assignment))
    rule = local_rule(local.rule)
    optimizer = None if steps_at_once(local) else Optimizer(local, parameters, None, client, client.steps)
    return Member(assignment, start, samples, generator, rule, client, begun(rule, client), optimizer)


def steps_at_once(local: LocalSGD) -> bool:
    """Whether one optimiser call can make the steps of all clients, as their rates and numbers of steps are equal."""
    return optimizer_traits(local.optimizer.name).elementwise and not local.keeps_state and local.cosine_to is None


# -- vectorised training ----------------------------------------------------------------------------------------------


def train_stack(stack: Stack, local: LocalSGD, objective: Objective) -> list[Trained]:
    """Trains all members on their own batches; their tensors change in place.

    Returns each member's figures; the loss of one whose training diverged is not finite.
    """
    members = stack.members
    labels = [stack.data[1][m.start : m.start + m.samples] if local.balanced else None for m in members]
    batches = [
        itertools.islice(
            batch_indices(m.samples, local.batch_size, local.epochs, m.generator, balanced=of), local.steps
        )
        for m, of in zip(members, labels, strict=True)
    ]
    augment = augmentation(local.augment)
    # One buffer for all steps: a new one per step would be requested from the system every time.
    inputs, most = stack.data[0], min(local.batch_size + 1, max(m.samples for m in members))
    room = inputs.new_empty((len(members) * most, *inputs.shape[1:]), dtype=torch.float32)
    seen = [Seen(inputs.device, local.loss_norm) for _ in members]
    unclipped = replace(local, clip_norm=0.0, idle_momentum=False)
    at_work, live, optimizer = 0, cast("_Live", None), Optimizer(unclipped, stack.parameters)
    while parts := [indices for of_client in batches if (indices := next(of_client, None)) is not None]:
        if len(parts) != at_work:
            at_work = len(parts)
            live = _Live(stack, at_work, local, optimizer)
        x, y = _batch(stack, parts, room)
        if augment is not None:
            x = augment_stack(augment, x, [len(part) for part in parts], [m.generator for m in members[: len(parts)]])
        for k, measured in enumerate(zip(*live.step(x, y, objective), strict=True)):
            seen[k].record(*measured, len(parts[k]))
    sizes = [sum(batch_sizes(m.samples, local)) for m in members]
    return [part.summed_up(len(part.losses), size) for part, size in zip(seen, sizes, strict=True)]


def _batch(stack: Stack, parts: Sequence[Tensor], room: Tensor) -> tuple[Tensor, Tensor]:
    """The clients' batches as one (K, B, ...) in `room`, shorter ones padded with samples that do not count."""
    most = max(map(len, parts))
    index = torch.empty((len(parts), most), dtype=torch.int64)
    for k, part in enumerate(parts):
        index[k, : len(part)] = part
        index[k, len(part) :] = 0
        index[k] += stack.members[k].start
    all_x, all_y = stack.data
    flat = upload(index.flatten(), all_x.device)
    x = single(stack.ready(all_x.index_select(0, flat), room[: len(flat)]), "a stack")
    y = all_y.index_select(0, flat).view(*index.shape, *all_y.shape[1:])
    for k, part in enumerate(parts):
        y[k, len(part) :] = IGNORED
    return x.view(*index.shape, *x.shape[1:]), y


class _Live:
    """The clients of a stack that are still at work, which are its first ones, as tensors with gradients."""

    def __init__(self, stack: Stack, at_work: int, local: LocalSGD, optimizer: Optimizer) -> None:
        self._stack, self._clip_norm, self._norm = stack, local.clip_norm, local.loss_norm
        self._parameters = {n: t[:at_work].detach().requires_grad_() for n, t in stack.parameters.items()}
        self._buffers = {name: t[:at_work] for name, t in stack.buffers.items()}
        self._corrections = [member.correct for member in stack.members[:at_work]]
        linear = [correct for correct in self._corrections if isinstance(correct, LinearCorrection)]
        self._at_once = stacked_correction(linear) if len(linear) == at_work and are_alike(linear) else None
        self._optimizers = [member.optimizer for member in stack.members[:at_work]]
        self._optimizer = optimizer
        optimizer.narrow(self._parameters, at_work)

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
        if self._optimizers[0] is None:
            self._optimizer.step()
        else:
            self._step_one_by_one()
        return losses.detach(), correct, squares

    def _correct(self) -> None:
        names, parameters = list(self._parameters), [parameter.detach() for parameter in self._parameters.values()]
        gradients = [gradient_of(parameter) for parameter in self._parameters.values()]
        if self._at_once is not None:
            self._at_once(names, parameters, gradients)
            return
        for k, correct in enumerate(self._corrections):
            if correct is not None:
                correct(names, [p[k] for p in parameters], [g[k] for g in gradients])

    @torch.no_grad()
    def _step_one_by_one(self) -> None:
        parameters = [*self._parameters.values()]
        for k, optimizer in enumerate(self._optimizers):
            assert optimizer is not None, "all have one, or none"
            gradients = [gradient_of(parameter)[k] for parameter in parameters]
            optimizer.update([*range(len(parameters))], [p[k] for p in parameters], gradients)
        for parameter in parameters:
            parameter.grad = None

    def _clip(self) -> None:
        """Limits the norm of every client's gradient, as `torch.nn.utils.clip_grad_norm_` does for one."""
        gradients = [gradient_of(p).flatten(1) for p in self._parameters.values()]
        norms = torch.stack([torch.linalg.vector_norm(g, dim=1) for g in gradients]).norm(dim=0)
        shares = (self._clip_norm / (norms + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(shares.unsqueeze(1))


def are_alike(of_members: Sequence[LinearCorrection]) -> bool:
    """Whether corrections differ only in their values, so that one can make those of all clients."""
    forms = {(c.strength, frozenset(c.offsets), frozenset(c.anchors)) for c in of_members}
    return len(forms) == 1


def stacked_correction(of_members: Sequence[LinearCorrection]) -> LinearCorrection:
    """Combines corrections that are alike into one of the clients' stacked parameters (K, ...)."""

    def stacked(of: Callable[[LinearCorrection], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        return {name: torch.stack([of(correct)[name] for correct in of_members]) for name in of(of_members[0])}

    offsets, anchors = stacked(lambda correct: correct.offsets), stacked(lambda correct: correct.anchors)
    steps = tuple(counter for correct in of_members for counter in correct.steps)
    return LinearCorrection(offsets, of_members[0].strength, anchors, steps)
