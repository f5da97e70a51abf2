"""Training of a chunk's clients as one batch, where their tasks allow it; see `fedloom.platform.clients.stacked`."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from fedloom.platform.clients.assignments import (
    Assignment,
    ClientResult,
    check_device,
    client_of,
    own_copy,
    places_of,
)
from fedloom.platform.clients.local_rules import LocalClient, LocalRule, local_rule
from fedloom.platform.clients.memory import peak_memory_bytes, reset_peak_memory
from fedloom.platform.clients.networks import Network, Subnet, in_task
from fedloom.platform.clients.stacked import (
    OBJECTIVES,
    Member,
    Stack,
    needs_equal_batches,
    skeleton,
    stacked,
    train_stack,
)
from fedloom.platform.clients.trainer import Train, TrainedNetwork, common_subnet, ended, local_client, received
from fedloom.platform.clients.training import Samples, batch_sizes
from fedloom.platform.clients.worker import Worker
from fedloom.platform.plugins import ends_process, in_one_line
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.slices import Slice, Weights

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Ready:
    """A task whose outcome is known, because its client was trained together with others; or the error of that."""

    outcome: ClientResult | Exception

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """Returns the outcome, or raises the error."""
        del worker, assignment, weights
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@dataclass(frozen=True)
class Together:
    """What became of a chunk's clients, by place: those whose outcome is known, and why others are trained alone.

    Who is in neither was not in a stack.
    """

    ready: dict[int, Ready] = field(default_factory=dict)
    fallbacks: dict[int, str] = field(default_factory=dict)


DIVERGED = "its loss in the stack was not finite"
"""Why a client is trained again alone, which says where."""


def trained_together(
    worker: Worker, assignments: Sequence[Assignment], weights: Weights, most: int, begins: Callable[[int], None]
) -> Together:
    """Trains a chunk's clients as batches of up to `most` clients, as far as that is possible.

    All others, and those whose training diverged, are left to be trained one by one, which also says what is wrong and
    who is to blame. A stack without enough memory fails, because its results would otherwise depend on the share of the
    GPU. `begins` is told the place of the first client of each batch. Raises DeviceLostError.
    """
    done = Together()
    left: list[Sequence[int]] = [range(len(assignments))]
    try:
        left = [*_parts(worker, assignments, most)]
        while left:
            places = left[0]
            begins(places[0])
            try:
                outcomes: Sequence[ClientResult | Exception | None] = _trained(
                    worker, [assignments[i] for i in places], weights
                )
            except torch.OutOfMemoryError as error:
                error.__context__ = None  # its frames hold the stack's tensors, whose memory the next stack needs
                outcomes = [error.with_traceback(None)] * len(places)
            for i, outcome in zip(places, outcomes, strict=True):
                if outcome is None:
                    done.fallbacks[i] = DIVERGED
                else:
                    done.ready[i] = Ready(outcome)
            del left[0]
    except BaseException as error:
        if ends_process(error):
            raise
        check_device(error)
        done.fallbacks.update((i, in_one_line(error)) for part in left for i in part)
    return done


def _parts(worker: Worker, assignments: Sequence[Assignment], most: int) -> list[list[int]]:
    """The places of clients that can be trained as one batch, at least two in each."""
    places = [i for i, a in enumerate(assignments) if a.client_id is not None and not a.dropped]
    subnet = common_subnet([assignments[i].task for i in places])
    if subnet is None or type(worker.objective) not in OBJECTIVES or worker.data.dataset.kind == "tokens":
        return []
    module = skeleton(worker.space, subnet.architecture)
    if module is None:
        return []
    groups: dict[int, list[int]] = {}
    by_samples = needs_equal_batches(module)
    for i in places:
        groups.setdefault(_samples(worker, assignments[i]) if by_samples else 0, []).append(i)
    parts = [group[start : start + most] for group in groups.values() for start in range(0, len(group), most)]
    return [part for part in parts if len(part) > 1]


def _samples(worker: Worker, assignment: Assignment) -> int:
    return sum(worker.data.size(client_of(assignment), split) for split in _task(assignment).splits)


def _task(assignment: Assignment) -> Train:
    assert isinstance(assignment.task, Train), "the tasks are alike"
    return assignment.task


@dataclass
class _Client:
    """One client of a stack, with its place in it."""

    assignment: Assignment
    task: Train
    start: int
    samples: int
    place: int = 0


def _trained(worker: Worker, assignments: Sequence[Assignment], weights: Weights) -> list[ClientResult | None]:
    """The outcomes of clients with the same task, in the order of the assignments."""
    reset_peak_memory(worker.device)
    started = time.perf_counter()
    task = _task(assignments[0])
    data, sizes = worker.clients_data([client_of(a) for a in assignments], task.splits)
    starts = itertools.accumulate(sizes, initial=0)
    clients = [_client(a, start, size) for a, start, size in zip(assignments, starts, sizes, strict=False)]
    ordered = sorted(clients, key=lambda client: -len(batch_sizes(client.samples, task.local)))
    for place, client in enumerate(ordered):
        client.place = place
    assert isinstance(task.network, Subnet), "other networks are not stacked"
    network, module = task.network.on(worker, assignments[0]), skeleton(worker.space, task.network.architecture)
    assert module is not None, "its layers stack"
    data = in_task(worker, data, network)
    stack = _stack(worker, module, network, weights, data, len(clients))
    begun = [_begin(worker, client, network, weights, stack) for client in ordered]
    figures = train_stack(stack, task.local, worker.objective)
    outcomes: list[ClientResult | None] = []
    for client in clients:
        k = client.place
        if not math.isfinite(figures[k].loss):
            outcomes.append(None)
            continue
        tensors = stack.of(k)
        own = {name: tensors[name] for name in network.slices}
        trained = TrainedNetwork(network, own, {}, figures[k], tuple(stack.parameters), *ended(*begun[k]))
        if task.scored:
            worker.load(network.module, own, {name: Slice(name) for name in own})
        outcomes.append(client.task.finished(worker, client.assignment, trained, client.samples, weights))
    wall_s, peak = (time.perf_counter() - started) / len(clients), peak_memory_bytes(worker.device)
    return [o and replace(o, wall_s=wall_s, peak_memory_bytes=peak) for o in outcomes]


def _client(assignment: Assignment, start: int, samples: int) -> _Client:
    task = _task(assignment)
    if assignment.state is not None:
        assignment = replace(assignment, state=own_copy(assignment.state))
    return _Client(assignment, task, start, samples)


def _stack(worker: Worker, module: nn.Module, network: Network, weights: Weights, data: Samples, clients: int) -> Stack:
    """The received tensors of all clients, and the forward pass of one."""
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    own = stacked(received(worker, network, weights), clients)
    forward = worker.kernels.functional(module, worker.device)
    parameters = {name: t for name, t in own.items() if name in trained}
    buffers = {name: t for name, t in own.items() if name not in trained}
    return Stack(forward, parameters, buffers, data, worker.data.dataset.normalised)


def _begin(
    worker: Worker, client: _Client, network: Network, weights: Weights, stack: Stack
) -> tuple[LocalRule, LocalClient]:
    """Adds a client to the stack as its next member, and begins the local rule."""
    parameters = {name: t[client.place] for name, t in stack.parameters.items()}
    assignment = client.assignment
    local = local_client(worker, assignment, network, weights, client.samples, client.task.local, parameters)
    generator = torch_stream(worker.spec.training_seed, "batches", *places_of(assignment))
    rule = local_rule(client.task.local.rule)
    stack.members.append(Member(client.start, client.samples, generator, rule.begin(local)))
    return rule, local
