"""The client trainer: local training of a network with a local rule, and the update that the client sends."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedloom.platform.averaging.average import Update
from fedloom.platform.averaging.processors import Message, Processors, Traffic, expected_traffic, sent
from fedloom.platform.averaging.weighting import FEDAVG, Work, weighting_rule, weights_of
from fedloom.platform.clients.assignments import (
    Assignment,
    ClientResult,
    ClientState,
    Measurement,
    Task,
    TaskError,
    client_of,
    places_of,
)
from fedloom.platform.clients.local_rules import STATE, LocalClient, LocalRule, local_rule
from fedloom.platform.clients.networks import Subnet, in_task
from fedloom.platform.clients.scoring import GLOBAL, measurements_of, score_loaded
from fedloom.platform.clients.training import (
    SGD,
    LocalSGD,
    Samples,
    Step,
    Trained,
    batch_sizes,
    train_locally,
)
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.slices import FLOAT_BYTES, Slice, Weights, bytes_of, extract, first_not_finite

if TYPE_CHECKING:
    from fedloom.platform.clients.networks import Countable, Network
    from fedloom.platform.clients.objectives import Objective
    from fedloom.platform.clients.worker import Worker
    from fedloom.platform.plugins import ComponentSpec


@dataclass(frozen=True)
class RuleUpdate:
    """What a local rule sends with the model: tensors by their shared names, their slices and weights.

    A weight of None stands for the largest weight of the model's own tensors. `factors` belong to the model's tensors.
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    slices: Mapping[str, Slice] = field(default_factory=dict)
    weights: Mapping[str, float | None] = field(default_factory=dict)
    factors: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainedNetwork:
    """A network after local training.

    Attributes:
        tensors: the worker's module's tensors by name, valid until another network is loaded into the module.
        momentum: SGD's momentum buffers by parameter, where there is one.
        parameters: the names of the trained tensors, in the network's order.
        rule_update, state: what the local rule sends with the model, and its state for the client.
        rule_macs: forward MACs of the local rule's own passes.
        rows: the ranges of rows that count of a tensor, where not all do.
    """

    network: Network
    tensors: Mapping[str, Tensor]
    momentum: Mapping[str, Tensor]
    figures: Trained
    parameters: tuple[str, ...]
    rule_update: RuleUpdate = RuleUpdate()
    state: ClientState = field(default_factory=dict)
    rule_macs: float = 0.0
    rows: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)

    @property
    def macs(self) -> float:
        """MACs of the forward passes over all samples seen, and of the local rule's."""
        return self.network.macs_of(self.figures) + self.rule_macs

    @property
    def num_parameters(self) -> int:
        """The number of trained scalars."""
        return sum(self.tensors[name].numel() for name in self.parameters)

    def checked(self) -> TrainedNetwork:
        """Returns itself; raises TaskError for tensors that are not finite (possible after a finite last loss)."""
        broken = first_not_finite(self.tensors)
        if broken is not None:
            raise TaskError(f"the trained network is not finite (first in {broken})")
        return self

    def copied(self) -> TrainedNetwork:
        """A copy with tensors of its own, needed when the module is re-used for another network.

        Raises TaskError for tensors that are not finite, so that the client's state stays unchanged.
        """
        self.checked()
        return replace(self, tensors={name: tensor.detach().clone() for name, tensor in self.tensors.items()})


def client_samples(worker: Worker, assignment: Assignment, *, use_validation: bool = False) -> Samples:
    """The client's training data, with its validation data if `use_validation`."""
    client_id = client_of(assignment)
    x, y = worker.client_data(client_id, "train")
    if not use_validation:
        return x, y
    more_x, more_y = worker.client_data(client_id, "validation")
    return torch.cat([x, more_x]), torch.cat([y, more_y])


def train_network(
    worker: Worker,
    assignment: Assignment,
    network: Network,
    weights: Weights,
    data: Samples,
    local: LocalSGD,
    optimiser: Callable[[SGD], Step] = lambda sgd: sgd,
) -> TrainedNetwork:
    """Trains a network locally from `weights`; all networks that an assignment trains see the same batches.

    `optimiser` makes the optimiser from SGD over the network's parameters, for example one that goes on with the
    momentum of an earlier round (`SGD.resume`) or also updates further variables. Raises TaskError if the training
    diverged.
    """
    tensors = worker.load(network.module, weights, network.slices)
    data = in_task(worker, data, network)
    parameters = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
    rule = local_rule(local.rule)
    client = local_client(worker, assignment, network, weights, len(data[1]), local, parameters)
    if rule.extra_passes:
        from fedloom.platform.clients.gradients import gradients_at  # what hardly any rule needs

        draws = torch_stream(worker.spec.training_seed, "gradients", *places_of(assignment))
        client.gradients = partial(gradients_at, worker, network, weights, data, local, draws)
    sgd = SGD(local, parameters, rule.begin(client))
    worker.set_mode(network.module, training=True)
    generator = torch_stream(worker.spec.training_seed, "batches", *places_of(assignment))
    objective = worker.objective.for_client(data[1])
    with worker.randomness(network.module, generator):
        figures = _locally(network, optimiser(sgd), data, local, generator, objective)
    rule_macs = rule.extra_passes * network.macs * len(data[1])
    classes = objective.counted_classes
    rows = {} if classes is None else _rows_of_classes(worker, network.module, tensors, classes)
    return TrainedNetwork(
        network, tensors, sgd.momentum, figures, tuple(parameters), *ended(rule, client), rule_macs, rows
    )


def _rows_of_classes(
    worker: Worker, module: nn.Module, tensors: Mapping[str, Tensor], classes: Tensor
) -> dict[str, tuple[tuple[int, int], ...]]:
    """The rows of these classes, in ranges, of the classifier: the last layer with as many as there are classes."""
    outputs = [len(task.names) for task in worker.spec.label_sets] or [worker.spec.space.num_classes]
    names, layers = {id(tensor): name for name, tensor in tensors.items()}, list[list[str]]()
    for part in module.modules():
        own = [parameter for parameter in part.parameters(recurse=False) if id(parameter) in names]
        if own and all(len(parameter) in outputs for parameter in own):
            layers.append([names[id(parameter)] for parameter in own])
    if not layers:
        raise TaskError("no layer has as many rows as there are classes: set objective.options.in_mean=false")
    present = set(classes.tolist())
    starts, ends = sorted(present - {c + 1 for c in present}), sorted({c + 1 for c in present} - present)
    return dict.fromkeys(layers[-1], tuple(zip(starts, ends, strict=True)))


def _locally(
    network: Network, step: Step, data: Samples, local: LocalSGD, generator: torch.Generator, objective: Objective
) -> Trained:
    """The figures of local training; TaskError if it diverged."""
    passes, loss = network.passes, network.loss
    found = train_locally(
        network.forward, step, data, local, generator, objective=objective, passes=passes, own_loss=loss
    )
    if not math.isfinite(found.loss):
        raise TaskError(f"the training loss is {found.loss}: the update was left out of the average")
    return found


def ended(rule: LocalRule, client: LocalClient) -> tuple[RuleUpdate, dict[str, Tensor]]:
    """Ends the local rule; returns what it sends with the model, and its state for the client."""
    with torch.no_grad():
        rule.end(client)
    state = {f"{STATE}{name}": tensor for name, tensor in client.state.items()}
    return RuleUpdate(client.sent, client.sent_slices, client.sent_weights, client.factors), state


def received(worker: Worker, network: Network, weights: Weights) -> dict[str, Tensor]:
    """The network's tensors as received, on the worker's device; read-only."""
    return {name: tensor.to(worker.device) for name, tensor in extract(weights, network.slices).items()}


def local_client(
    worker: Worker,
    assignment: Assignment,
    network: Network,
    weights: Weights,
    samples: int,
    local: LocalSGD,
    parameters: Mapping[str, Tensor],
) -> LocalClient:
    """A client as its local rule sees it, with `parameters` at the received values."""
    kept = assignment.state or {}
    own = {name.removeprefix(STATE): t.to(worker.device) for name, t in kept.items() if name.startswith(STATE)}
    return LocalClient(
        client_id=client_of(assignment),
        round=assignment.round,
        samples=samples,
        steps=len(batch_sizes(samples, local)),
        local=local,
        parameters=parameters,
        slices=network.slices,
        weights=weights,
        state=own,
    )


def update_of(
    trained: TrainedNetwork, num_samples: int, weighting: ComponentSpec = FEDAVG, share: float = 1.0
) -> Update:
    """The update of a trained network: all of its tensors, and those that the local rule sends."""
    figures = trained.figures
    work = Work(num_samples, figures.seen_samples, trained.network.seen(figures), share)
    weights, unheld = weights_of(weighting_rule(weighting), work)
    update = Update(
        trained.tensors, trained.network.slices, weights, unheld, trained.rule_update.factors, rows=trained.rows
    )
    return with_more(update, trained.rule_update.tensors, trained.rule_update.slices, trained.rule_update.weights)


def with_more(
    update: Update,
    tensors: Weights,
    slices: Mapping[str, Slice] | None = None,
    weights: Mapping[str, float | None] | None = None,
) -> Update:
    """The update with further tensors; by default whole ones, with the largest weight of the update's tensors."""
    if not tensors:
        return update
    most, given = max(update.weights.values()), weights or {}
    places = {name: Slice(name) for name in tensors} if slices is None else slices
    weight_of = {name: most if (weight := given.get(name)) is None else weight for name in tensors}
    return replace(
        update,
        tensors={**update.tensors, **tensors},
        slices={**update.slices, **places},
        weights={**update.weights, **weight_of},
    )


def trained_outcome(trained: TrainedNetwork, num_samples: int, update: Update) -> ClientResult:
    """The result of a round that trains the shared model: the client receives and sends the same tensors."""
    size_bytes, figures = bytes_of(update.tensors), trained.figures
    return ClientResult(
        update=update,
        samples=num_samples,
        steps=figures.steps,
        macs=trained.macs,
        bytes_down=size_bytes,
        bytes_up=size_bytes,
        loss=figures.loss,
        metric=figures.accuracy,
        loss_norm=figures.loss_norm,
        parameters=trained.num_parameters,
        architecture=trained.network.architecture,
        subspace=trained.network.subspace,
        state=trained.state or None,
    )


@dataclass(frozen=True)
class Train:
    """Trains a network on the client's data and sends all of its tensors: the client of FedAvg.

    Attributes:
        weighting: the weighting rule of the client's tensors (`averaging.weighting`).
        share: the client's share, a factor of these weights set by the server.
        use_validation: whether to train on the validation data as well.
        scored: whether to score the trained network on the client's validation data (unless `use_validation`).
        processors: what happens to the update before it is sent.
    """

    network: Countable
    local: LocalSGD
    weighting: ComponentSpec = FEDAVG
    share: float = 1.0
    use_validation: bool = False
    scored: bool = False
    processors: Processors = ()

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits of the client's samples that it trains on."""
        return ("train", "validation") if self.use_validation else ("train",)

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """Trains the network; the update holds all of its tensors."""
        network = self.network.on(worker, assignment)
        data = client_samples(worker, assignment, use_validation=self.use_validation)
        trained = train_network(worker, assignment, network, weights, data, self.local)
        return self.finished(worker, assignment, trained, len(data[1]), weights)

    def finished(
        self, worker: Worker, assignment: Assignment, trained: TrainedNetwork, samples: int, weights: Weights
    ) -> ClientResult:
        """The result of a network that has been trained and is loaded in the worker's module."""
        result = self.outcome(trained, samples)
        if self.processors:
            result = self._processed(client_of(assignment), result, trained, received(worker, trained.network, weights))
        if self.scored and not self.use_validation:
            result = replace(result, measurements=validation_scores(worker, assignment, trained.network))
        return result

    def _processed(
        self, client_id: int, result: ClientResult, trained: TrainedNetwork, before: Weights
    ) -> ClientResult:
        """The result with its update as it is sent; TaskError if it does not fit the form in which it is sent."""
        assert result.update is not None, "it has trained"
        traffic = Traffic(result.bytes_down, result.bytes_up, trained.num_parameters)
        try:
            message = sent(self.processors, Message(client_id, result.update, before, trained.parameters, traffic))
        except OverflowError as error:
            raise TaskError(str(error)) from error
        traffic = message.traffic
        return replace(result, update=message.update, bytes_down=traffic.down_bytes, bytes_up=traffic.up_bytes)

    def outcome(self, trained: TrainedNetwork, samples: int) -> ClientResult:
        """The result of a trained network, before its update is processed."""
        return trained_outcome(trained, samples, update_of(trained, samples, self.weighting, self.share))

    def account(self, worker: Worker, assignment: Assignment) -> ClientResult:
        """The costs of `run`, counted without training."""
        held = sum(worker.data.size(client_of(assignment), split) for split in self.splits)
        batches = batch_sizes(held, self.local)
        cost, rule = self.network.account(worker, assignment, batches), local_rule(self.local.rule)
        samples = sum(batches) // self.local.epochs
        sent_bytes = int(cost.size_bytes) + len(rule.shared) * FLOAT_BYTES * cost.parameters
        traffic = expected_traffic(self.processors, Traffic(sent_bytes, sent_bytes, cost.parameters))
        return ClientResult(
            samples=samples,
            steps=len(batches),
            macs=cost.macs + rule.extra_passes * cost.macs * samples / max(1, sum(batches)),
            bytes_down=traffic.down_bytes,
            bytes_up=traffic.up_bytes,
            parameters=cost.parameters,
            architecture=cost.architecture,
            subspace=cost.subspace,
        )


def common_subnet(tasks: Sequence[Task]) -> Subnet | None:
    """The subnet that all tasks train in the same way but for the clients' shares; None if they differ in more.

    None as well for a local rule with passes of its own, which need a module for each client.
    """
    first = tasks[0] if tasks else None
    if not isinstance(first, Train) or not isinstance(first.network, Subnet):
        return None
    if local_rule(first.local.rule).extra_passes:
        return None
    return first.network if all(first is task or _alike(first, task) for task in tasks) else None


def _alike(first: Train, other: Task) -> bool:
    return isinstance(other, Train) and replace(first, share=other.share) == other


def validation_scores(
    worker: Worker, assignment: Assignment, network: Network, model: str = GLOBAL
) -> tuple[Measurement, ...]:
    """Loss and metrics of the loaded network on the client's validation data; empty if it has none."""
    data = worker.client_data(client_of(assignment), "validation")
    if len(data[1]) == 0:
        return ()
    score = score_loaded(worker, assignment, network, data)
    return measurements_of(model, network.name, "validation", score)
