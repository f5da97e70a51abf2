"""The network that a silo trains or scores: a part of the worker's supernet, or a subnet of fixed architecture."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from fedloom.platform.averaging.average import Update
from fedloom.platform.averaging.weighting import Work, weighting_rule
from fedloom.platform.clients.execution import Assignment, Measurement, TaskError, first_not_finite
from fedloom.platform.clients.subnets import subnet_slices
from fedloom.platform.clients.subspace import size_of
from fedloom.platform.clients.tasks import (
    architecture_id,
    check_trained,
    client_of,
    measurements_of,
    places_of,
    subspace_id,
)
from fedloom.platform.clients.training import SGD, LocalSGD, Score, Step, Trained, evaluate, train_locally
from fedloom.platform.clients.worker import Worker
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.base import Architecture, Slice, SliceMap, Weights, extract
from fedloom.platform.spaces.kept import KeptSpace
from fedloom.platform.spaces.operator_choice import Subspace

PERSONAL, GLOBAL = "personal", "global"
"""How the tables call a silo's own model and the shared one."""


@dataclass(frozen=True)
class Network:
    """A network in one of the worker's modules, which are re-used: it is loaded before each use.

    Attributes:
        forward: logits of a batch.
        slices: its tensors, and where they lie in a bag of weights.
        macs: of one sample, forward.
        name: what it is, as it stands in the tables.
        kept: the operators of a searched network, None for a fixed one.
    """

    module: nn.Module
    forward: Callable[[Tensor], Tensor]
    slices: SliceMap
    macs: float
    parameters: int
    name: str
    kept: Subspace | None = None

    @property
    def architecture(self) -> str | None:
        """A client's column `architecture`, of fixed ones."""
        return self.name if self.kept is None else None

    @property
    def subspace(self) -> str | None:
        """A client's column `subspace`, of searched ones."""
        return None if self.kept is None else self.name


def fixed_network(worker: Worker, architecture: Architecture) -> Network:
    """A subnet under its own names."""
    module = worker.subnet(architecture)
    return Network(
        module,
        lambda x: cast(Tensor, module(x)),
        subnet_slices(worker, architecture, stand_alone=True),
        worker.spec.macs_table.cost(architecture),
        int(worker.space.cost_table("parameters").cost(architecture)),
        architecture_id(architecture),
    )


def kept_network(worker: Worker, kept: Subspace | None = None, mix: Callable[[], Tensor] | None = None) -> Network:
    """The supernet's kept operators (all if not given), added up with weight 1 or with those of `mix`."""
    space, module = cast(KeptSpace, worker.space), worker.supernet
    used = space.largest_subspace if kept is None else kept
    return Network(
        module,
        lambda x: cast(Tensor, module(x, used, None if mix is None else mix())),
        space.subspace_slices(used),
        size_of(worker.spec.macs_table, used),
        int(size_of(space.parameters_table(), used)),
        subspace_id(used),
        used,
    )


@dataclass(frozen=True)
class Pull:
    """`strength` / 2 times the squared distance to `towards` is added to the loss (lambda in SPIDER and Ditto).

    What the loss does not reach (behind operators that do nothing) is not pulled, either.
    """

    strength: float
    towards: Weights


@dataclass(frozen=True)
class TrainedNetwork:
    """A network after local training: copies of its tensors, SGD's buffers, and what it cost."""

    network: Network
    tensors: dict[str, Tensor]
    momentum: dict[str, Tensor]
    figures: Trained

    @property
    def macs(self) -> float:
        """Forward, over all samples that were seen."""
        return self.network.macs * self.figures.seen_samples


def train_network(
    worker: Worker,
    assignment: Assignment,
    network: Network,
    weights: Weights,
    data: tuple[Tensor, Tensor],
    local: LocalSGD,
    *,
    pull: Pull | None = None,
    momentum: Mapping[str, Tensor] | None = None,
    step: Callable[[SGD], Step] = lambda sgd: sgd,
) -> TrainedNetwork:
    """Local SGD from `weights`; whatever networks an assignment trains, all see the same batches.

    `step` may put more into a training step than SGD over the network's parameters. Raises TaskError if it diverged:
    then what a silo keeps stays as it was.
    """
    tensors = worker.load(network.module, weights, network.slices)
    names = [name for name, tensor in tensors.items() if tensor.requires_grad]
    sgd = SGD(local, [tensors[name] for name in names])
    if pull is not None and pull.strength:
        towards = extract(pull.towards, {name: network.slices[name] for name in names})
        sgd.pull, sgd.anchors = pull.strength, [tensor.to(worker.device) for tensor in towards.values()]
    if momentum:
        sgd.momentum = {i: momentum[name].to(worker.device) for i, name in enumerate(names) if name in momentum}
    worker.set_mode(network.module, training=True)
    generator = torch_stream(worker.spec.training_seed, "batches", *places_of(assignment))
    with worker.randomness(network.module, generator):
        trained = train_locally(network.forward, sgd.parameters, data, local, generator, optimizer=step(sgd))
    check_trained(trained)
    broken = first_not_finite(tensors)
    if broken is not None:
        raise TaskError(f"the trained network is not finite (first in {broken})")
    buffers = {names[i]: buffer.clone() for i, buffer in sgd.momentum.items() if buffer is not None}
    # The module trains another network next.
    return TrainedNetwork(network, {n: t.detach().clone() for n, t in tensors.items()}, buffers, trained)


def update_of(model: TrainedNetwork, num_samples: int, weighting: str) -> Update:
    """What is sent of a trained network: all of its tensors."""
    seen = model.figures.seen_samples
    work = Work(num_samples, seen, dict.fromkeys(model.tensors, seen))
    return Update(model.tensors, model.network.slices, weighting_rule(weighting)(work))


def with_more(update: Update, tensors: Weights) -> Update:
    """The update with more tensors, which count as much as the network's own."""
    weight = max(update.weights.values())
    return Update(
        {**update.tensors, **tensors},
        {**update.slices, **{name: Slice(name) for name in tensors}},
        {**update.weights, **dict.fromkeys(tensors, weight)},
    )


def silo_data(worker: Worker, assignment: Assignment, *, joined: bool) -> tuple[Tensor, Tensor]:
    """The silo's training data, with its validation data if `joined`."""
    client_id = client_of(assignment)
    x, y = worker.client_data(client_id, "train")
    if not joined:
        return x, y
    more_x, more_y = worker.client_data(client_id, "validation")
    return torch.cat([x, more_x]), torch.cat([y, more_y])


def score_network(
    worker: Worker, assignment: Assignment, network: Network, weights: Weights, data: tuple[Tensor, Tensor]
) -> Score:
    """Loss and accuracy of the network on the samples."""
    worker.load(network.module, weights, network.slices)
    worker.set_mode(network.module, training=False)
    # The operator `noise` draws whenever it is called.
    generator = torch_stream(worker.spec.training_seed, "score", *places_of(assignment))
    with worker.randomness(network.module, generator):
        return evaluate(network.forward, data)


def final_measurements(model: str, network: Network, score: Score) -> tuple[Measurement, ...]:
    """A final evaluation's rows: the score on test data, and what the network costs."""
    costs = {"macs": network.macs, "parameters": network.parameters}
    of_costs = (Measurement(model, network.name, None, name, value, 0) for name, value in costs.items())
    return (*measurements_of(model, network.name, "test", score), *of_costs)
