"""The client of FedAvg, which trains a network on its data and sends the update, and the functions it is made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from fedloom.platform.averaging.average import Update
from fedloom.platform.averaging.processors import Message, Payload, Processors, Traffic, expected_traffic, sent
from fedloom.platform.averaging.weighting import FEDAVG, Work, weighting_rule, weights_of
from fedloom.platform.clients.assignments import Assignment, ClientResult, ClientState, TaskError, client_of, places_of
from fedloom.platform.clients.local_rules import STATE, LocalClient, begun, gradients_at, local_client, local_rule
from fedloom.platform.clients.networks import in_task, rows_of_classes
from fedloom.platform.clients.scoring import validation_scores
from fedloom.platform.clients.training import LocalSGD, Optimizer, Samples, Step, Trained, batch_sizes, train_locally
from fedloom.platform.data.trees import joined, rows_of
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.slices import FLOAT_BYTES, Slice, Weights, bytes_of, extract, first_not_finite

if TYPE_CHECKING:
    from fedloom.platform.clients.networks import Countable, Network
    from fedloom.platform.clients.worker import Worker
    from fedloom.platform.plugins import ComponentSpec

ValidationUse = Literal["unused", "trained", "scored"]
"""What a client does with its validation data: nothing, train on them as well, or score the trained network on them."""


@dataclass(frozen=True)
class Train:
    """Trains a network on the client's data and sends all of its tensors: the client of FedAvg.

    `weighting` is the rule of the tensors' weights (`averaging.weighting`); `processors` are applied to the update
    before it is sent.
    """

    network: Countable
    local: LocalSGD
    weighting: ComponentSpec = FEDAVG
    validation: ValidationUse = "unused"
    processors: Processors = ()

    @property
    def use_validation(self) -> bool:
        """Whether it trains on the validation data as well."""
        return self.validation == "trained"

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits of the client's samples that it trains on."""
        return ("train", "validation") if self.use_validation else ("train",)

    @property
    def share(self) -> float:
        """A factor of the update's weights, which a server rule may set."""
        return 1.0

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """Trains the network; the update holds all of its tensors."""
        network = self.network.on(worker, assignment)
        data = client_samples(worker, assignment, use_validation=self.use_validation, processors=self.processors)
        trained = train_network(worker, assignment, network, weights, data, self.local)
        return self.finished(worker, assignment, trained, rows_of(data[1]), weights)

    def finished(
        self, worker: Worker, assignment: Assignment, trained: TrainedNetwork, samples: int, weights: Weights
    ) -> ClientResult:
        """The result of a network that has been trained and is loaded in the worker's module.

        Raises TaskError if a value of the update is too large for the form in which it is sent.
        """
        # Scored first: processors change the module's tensors in place.
        scores = validation_scores(worker, assignment, trained.network) if self.validation == "scored" else None
        result = self.outcome(trained, samples)
        if self.processors:
            assert result.update is not None, "it has trained"
            # What is sent may be a part of what was received, such as fewer ranks.
            slices = {name: result.update.slices.get(name, piece) for name, piece in trained.network.slices.items()}
            before = received(worker, replace(trained.network, slices=slices), weights)
            parameters = tuple(name for name in trained.parameters if name in result.update.tensors)
            scalars = sum(result.update.tensors[name].numel() for name in parameters)
            down = Payload(result.bytes_down, trained.num_parameters, len(trained.parameters))
            message = Message(
                client_of(assignment),
                result.update,
                before,
                parameters,
                Traffic(down, Payload(result.bytes_up, scalars, len(parameters))),
                worker.spec.training_seed,
                assignment.stage,
                assignment.round,
            )
            try:
                message = sent(self.processors, message, trained.client.kept_by)
            except OverflowError as error:
                raise TaskError(str(error)) from error
            down_bytes, up_bytes = (payload.size_bytes for payload in message.traffic)
            # Processors may have begun to keep state, beside that of the local rule and of the method.
            state = {**trained.state, **(result.state or {})} or None
            result = replace(result, update=message.update, bytes_down=down_bytes, bytes_up=up_bytes, state=state)
        return result if scores is None else replace(result, measurements=scores)

    def outcome(self, trained: TrainedNetwork, samples: int) -> ClientResult:
        """The result of a trained network, before its update is processed."""
        result = trained_outcome(trained, samples, update_of(trained, samples, self.weighting, self.share))
        received = len(local_rule(self.local.rule).shared) * FLOAT_BYTES * trained.num_parameters
        if received:  # of tensors that no step reached, the rule sends nothing
            result = replace(result, bytes_down=result.bytes_down - bytes_of(trained.client.sent) + received)
        return result

    def account(self, worker: Worker, assignment: Assignment) -> ClientResult:
        """The costs of `run`, counted without training."""
        held = sum(worker.data.size(client_of(assignment), split) for split in self.splits)
        batches = batch_sizes(held, self.local)
        cost, rule = self.network.account(worker, assignment, batches), local_rule(self.local.rule)
        samples = sum(batches) // self.local.epochs
        sent_bytes = int(cost.size_bytes) + len(rule.shared) * FLOAT_BYTES * cost.parameters
        payload = Payload(sent_bytes, cost.parameters, 0)
        if self.processors:
            trained = worker.space.parameter_names
            pieces = self.network.held(worker.space).items()
            tensors = sum(name in trained or piece.source in trained for name, piece in pieces)
            payload = payload._replace(tensors=tensors)
        down, up = expected_traffic(self.processors, Traffic(payload, payload))
        return ClientResult(
            samples=samples,
            steps=len(batches),
            macs=cost.macs + rule.extra_passes * cost.macs * samples / max(1, sum(batches)),
            bytes_down=down.size_bytes,
            bytes_up=up.size_bytes,
            parameters=cost.parameters,
            architecture=cost.architecture,
            subspace=cost.subspace,
        )


def client_samples(
    worker: Worker, assignment: Assignment, *, use_validation: bool = False, processors: Processors = ()
) -> Samples:
    """The client's training data, with its validation data if `use_validation`; `processors` may change the labels."""
    client_id = client_of(assignment)
    x, y = worker.client_data(client_id, "train")
    for each in processors:
        y = each.on_labels(client_id, y, worker.data.dataset.num_classes)
    if not use_validation:
        return x, y
    more_x, more_y = worker.client_data(client_id, "validation")
    return joined([x, more_x]), joined([y, more_y])


def train_network(
    worker: Worker,
    assignment: Assignment,
    network: Network,
    weights: Weights,
    data: Samples,
    local: LocalSGD,
    step_of: Callable[[Optimizer], Step] = lambda optimizer: optimizer,
) -> TrainedNetwork:
    """Trains a network locally from `weights`; all networks that an assignment trains see the same batches.

    `step_of` wraps the optimiser of the network's parameters, for example to continue with the momentum of an earlier
    round (`Optimizer.resume`) or to update further variables as well. Raises TaskError if the training diverged.
    """
    forward = network.forward
    if network.compilable:  # before it is loaded, because compiling makes a trial step
        forward = worker.training_forward(network.module, data[0], local.batch_size)
    tensors = worker.load(network.module, weights, network.slices)
    data = in_task(worker, data, network)
    parameters = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
    rule = local_rule(local.rule)
    samples = rows_of(data[1])
    client = local_client(worker, assignment, network, weights, samples, local, parameters)
    if rule.extra_passes:
        client.gradients = partial(gradients_at, worker, assignment, network, weights, data, local)
    optimizer = Optimizer(local, parameters, begun(rule, client), client, client.steps)

    worker.set_mode(network.module, training=True)
    generator = torch_stream(worker.spec.training_seed, "batches", *places_of(assignment))
    objective = worker.objective.for_client(data[1])
    with worker.randomness(network.module, generator):
        figures = train_locally(
            forward,
            step_of(optimizer),
            data,
            local,
            generator,
            objective=objective,
            passes=network.passes,
            own_loss=network.loss,
        )
    if math.isnan(figures.accuracy):
        raise TaskError("none of the client's targets counts in the loss, as of a text that is too short")
    if not math.isfinite(figures.loss):
        raise TaskError(f"the training loss is {figures.loss}: the update was left out of the average")
    with torch.no_grad():
        rule.end(client)
    classes, rows = objective.counted_classes, {}
    if classes is not None:
        outputs = [len(task.names) for task in worker.spec.label_sets] or [worker.spec.space.num_classes]
        rows = rows_of_classes(network.module, tensors, outputs, classes)
    rule_macs = rule.extra_passes * network.macs * samples
    return TrainedNetwork(network, tensors, optimizer.momentum, figures, tuple(parameters), client, rule_macs, rows)


@dataclass(frozen=True)
class TrainedNetwork:
    """A network after local training.

    Attributes:
        tensors: the worker's module's tensors by name, valid until another network is loaded into the module.
        momentum: SGD's momentum buffers by parameter, where there is one.
        parameters: the names of the trained tensors, in the network's order.
        client: the client as its local rule left it, with what the rule sends and keeps.
        rule_macs: forward MACs of the local rule's own passes.
        rows: by tensor name, the ranges of the rows that count, for tensors of which not all do.
    """

    network: Network
    tensors: Mapping[str, Tensor]
    momentum: Mapping[str, Tensor]
    figures: Trained
    parameters: tuple[str, ...]
    client: LocalClient
    rule_macs: float = 0.0
    rows: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)

    @property
    def state(self) -> ClientState:
        """The client's state of the local rule, of the optimiser and of processors."""
        return {f"{STATE}{name}": tensor for name, tensor in self.client.state.items()}

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
        slices, weights = self.network.slices, self.client.weights
        broken = first_not_finite(self.tensors, lambda name: slices[name].of(weights[slices[name].source]))
        if broken is not None:
            raise TaskError(f"the trained network is not finite (first in {broken})")
        return self

    def copied(self) -> TrainedNetwork:
        """A copy with tensors of its own, needed when the module is re-used for another network.

        Raises TaskError for tensors that are not finite, so that the client's state stays unchanged.
        """
        self.checked()
        return replace(self, tensors={name: tensor.detach().clone() for name, tensor in self.tensors.items()})


def received(worker: Worker, network: Network, weights: Weights) -> dict[str, Tensor]:
    """The network's tensors as received, on the worker's device; read-only."""
    return {name: tensor.to(worker.device) for name, tensor in extract(weights, network.slices).items()}


def update_of(
    trained: TrainedNetwork, num_samples: int, weighting: ComponentSpec = FEDAVG, share: float = 1.0
) -> Update:
    """The update of a trained network: all of its tensors, or what the local rule sends instead, and what it adds."""
    figures, client = trained.figures, trained.client
    work = Work(num_samples, figures.seen_samples, trained.network.seen(figures), share)
    weights, unheld = weights_of(weighting_rule(weighting), work)
    tensors = {**trained.tensors, **client.instead}
    update = Update(tensors, trained.network.slices, weights, unheld, client.factors, rows=trained.rows)
    return with_more(update, client.sent, client.sent_slices, client.sent_weights)


def with_more(
    update: Update,
    tensors: Weights,
    slices: Mapping[str, Slice] | None = None,
    weights: Mapping[str, float | None] | None = None,
) -> Update:
    """The update with further tensors; by default whole ones, with the largest weight of the update's tensors."""
    if not tensors:
        return update
    largest, weights = max(update.weights.values()), weights or {}
    return replace(
        update,
        tensors={**update.tensors, **tensors},
        slices={**update.slices, **(slices or {name: Slice(name) for name in tensors})},
        weights={
            **update.weights,
            **{name: largest if (weight := weights.get(name)) is None else weight for name in tensors},
        },
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
