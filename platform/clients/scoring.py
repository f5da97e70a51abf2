"""What is measured of networks: loss and metrics on the server's or a client's own data, and latency."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedloom.platform.clients.assignments import (
    Assignment,
    Measurement,
    Outcome,
    client_of,
    places_of,
)
from fedloom.platform.clients.networks import Network, Subnet
from fedloom.platform.clients.training import Samples, Score, estimate_statistics, evaluate
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.slices import Architecture, Weights, architecture_id, bytes_of
from fedloom.tiers.clock import EVALUATION_FACTOR

if TYPE_CHECKING:
    from fedloom.platform.clients.worker import Worker

PERSONAL, GLOBAL = "personal", "global"
"""How the tables call a client's own model and the shared one."""

CALIBRATION_SAMPLES = 512
"""Unlabelled validation samples from which a subnet's running statistics are estimated before it is scored."""

LARGEST_EXPONENT = 700.0
"""e to this is still a number: a diverged model has a perplexity, too."""


def score_loaded(worker: Worker, assignment: Assignment, network: Network, data: Samples) -> Score:
    """Loss and metrics of the network as it is in the worker's module."""
    worker.set_mode(network.module, training=False)
    # The operator `noise` draws whenever it is called.
    generator = torch_stream(worker.spec.training_seed, "score", *places_of(assignment))
    with worker.randomness(network.module, generator):
        return evaluate(network.forward, data, worker.objective)


def score_network(worker: Worker, assignment: Assignment, network: Network, weights: Weights, data: Samples) -> Score:
    """Loss and metrics of the network with these weights."""
    worker.load(network.module, weights, network.slices)
    return score_loaded(worker, assignment, network, data)


def measurements_of(model: str, name: str, split: str | None, score: Score) -> tuple[Measurement, ...]:
    """Loss and metrics of a score; `name` is the architecture as it stands in the tables."""
    values = {"loss": score.loss, "accuracy": score.metric, **score.more}
    if score.per_position:
        values["perplexity"] = math.exp(min(score.loss, LARGEST_EXPONENT))
    return tuple(Measurement(model, name, split, metric, value, score.samples) for metric, value in values.items())


def calibration_samples(worker: Worker) -> Tensor:
    """Evenly spaced samples of the server's validation data, without labels; kept, as every subnet needs them."""
    if worker.calibration is None:
        x, _ = worker.central_data("validation")
        if len(x) == 0:
            raise ValueError(
                "running statistics need validation data to be estimated from: raise data.validation_share"
            )
        places = torch.linspace(0, len(x) - 1, min(CALIBRATION_SAMPLES, len(x))).round().long()
        worker.calibration = x[places.to(x.device)]
    return worker.calibration


def loaded_subnet(worker: Worker, subnet: Subnet, weights: Weights) -> nn.Module:
    """The module of a subnet in evaluation mode, with its tensors copied from the shared weights."""
    network = subnet.on(worker)
    worker.load(network.module, weights, network.slices)
    worker.set_mode(network.module, training=False)
    return network.module


def scored_subnet(worker: Worker, subnet: Subnet, weights: Weights) -> nn.Module:
    """As `loaded_subnet`, ready to be scored.

    Cut from a supernet, batch norms get statistics of their own; a model trained alone has its own already.
    """
    module = loaded_subnet(worker, subnet, weights)
    if not subnet.stand_alone and worker.space.keeps_statistics:
        estimate_statistics(module, calibration_samples(worker))
    return module


def subnet_scorer(
    worker: Worker, weights: Weights, version: str
) -> Callable[[Architecture], Callable[[Tensor], Tensor]]:
    """From an architecture to its forward pass: through the one supernet module where subnets are whole parts of it."""
    if not worker.space.slices_tensors:
        module = worker.load_whole(weights, version)
        worker.set_mode(module, training=False)
        return lambda architecture: lambda x: module(x, architecture)
    return lambda architecture: scored_subnet(worker, Subnet(architecture), weights)


@dataclass(frozen=True)
class ScoreSubnets:
    """Scores subnets of the shared supernet on validation data: all of the server's, or one client's.

    `sent_bytes` is what a client received for it (the union of the candidates, in federated search).
    """

    architectures: tuple[Architecture, ...]
    version: str
    split: str = "validation"
    share: float = 1.0
    sent_bytes: int = 0

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> Outcome:
        """Scores every architecture; one measurement of each metric."""
        forward_of = subnet_scorer(worker, weights, self.version)
        if assignment.client_id is None:
            data = worker.central_data(self.split, self.share)
        else:
            data = worker.client_data(assignment.client_id, self.split)
        measurements: list[Measurement] = []
        for architecture in self.architectures:
            score = evaluate(forward_of(architecture), data, worker.objective)
            measurements += measurements_of("supernet", architecture_id(architecture), self.split, score)
        macs = sum(worker.spec.macs_table.cost(a) for a in self.architectures) * len(data[1])
        return Outcome(
            samples=len(data[1]),
            macs=macs,
            bytes_down=self.sent_bytes,
            # Each client answers with a loss and a metric per candidate.
            bytes_up=8 * len(measurements) if self.sent_bytes else 0,
            measurements=tuple(measurements),
            clock_factor=EVALUATION_FACTOR,
        )


@dataclass(frozen=True)
class ScoreSubnet:
    """Scores one subnet on the server's data or on a client's own share of a split."""

    subnet: Subnet
    model: str
    split: str

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> Outcome:
        """Scores the subnet; one measurement of each metric."""
        module, architecture = scored_subnet(worker, self.subnet, weights), self.subnet.architecture
        client_id = assignment.client_id
        data = worker.central_data(self.split) if client_id is None else worker.client_data(client_id, self.split)
        score = evaluate(module, data, worker.objective)
        return Outcome(
            samples=score.samples,
            macs=worker.spec.macs_table.cost(architecture) * score.samples,
            bytes_down=0 if client_id is None else bytes_of(worker.tensors_of(module)),
            loss=_none_if_nan(score.loss),
            metric=_none_if_nan(score.metric),
            architecture=architecture_id(architecture),
            measurements=measurements_of(self.model, architecture_id(architecture), self.split, score),
            clock_factor=EVALUATION_FACTOR,
        )


def _none_if_nan(value: float) -> float | None:
    return None if math.isnan(value) else value


def own_test_data(worker: Worker, assignment: Assignment) -> Samples:
    """The client's own test samples."""
    return worker.client_data(client_of(assignment), "test")
