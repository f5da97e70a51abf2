"""Scoring of networks: loss and metrics on the server's or a client's data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedloom.platform.averaging.average import Update
from fedloom.platform.clients.assignments import Assignment, ClientResult, Measurement, client_of
from fedloom.platform.clients.evaluation import (
    BatchNorm,
    Predictions,
    Score,
    details_of,
    estimate_statistics,
    evaluate,
    evaluate_all,
)
from fedloom.platform.clients.networks import ESTIMATED, Network, Subnet, in_task
from fedloom.platform.clients.training import Samples
from fedloom.platform.data.trees import Tree, rows_of
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.slices import Architecture, Slice, Weights, architecture_id, bytes_of
from fedloom.tiers.devices import EVALUATION_FACTOR

if TYPE_CHECKING:
    from fedloom.platform.clients.worker import Worker
    from fedloom.platform.data.dataset import StoredSamples

PERSONAL = "personal"
"""The name of a client's own model in the tables."""
GLOBAL = "global"
"""The name of the shared model in the tables."""

CALIBRATION_SAMPLES = 512
"""Number of unlabelled samples for estimating a subnet's running statistics before it is scored."""

LARGEST_EXPONENT = 700.0
"""Bound of the exponent of e, so that a diverged model's perplexity stays finite."""


def _randomness_of(worker: Worker, assignment: Assignment) -> torch.Generator:
    """What a score draws from: the operator `noise` draws random numbers in evaluation mode, too."""
    of_client = () if assignment.client_id is None else (assignment.client_id,)
    return torch_stream(worker.spec.training_seed, "score", assignment.stage, assignment.round, *of_client)


def score_loaded(worker: Worker, assignment: Assignment, network: Network, data: Samples) -> Score:
    """Loss and metrics of a network that is loaded in the worker's module."""
    worker.set_mode(network.module, training=False)
    with worker.randomness(network.module, _randomness_of(worker, assignment)):
        return evaluate(network.forward, in_task(worker, data, network), worker.objective)


def score_network(worker: Worker, assignment: Assignment, network: Network, weights: Weights, data: Samples) -> Score:
    """Loss and metrics of a network with these weights."""
    worker.load(network.module, weights, network.slices)
    return score_loaded(worker, assignment, network, data)


def measurements_of(model: str, name: str, split: str | None, score: Score) -> tuple[Measurement, ...]:
    """The measurements of a score; `name` is the architecture's id in the tables."""
    values = {"loss": score.loss, "accuracy": score.metric, **score.more}
    if score.per_position:
        values["perplexity"] = math.exp(min(score.loss, LARGEST_EXPONENT))
    return tuple(Measurement(model, name, split, metric, value, score.samples) for metric, value in values.items())


def calibration_samples(worker: Worker) -> Tree:
    """Evenly spaced inputs of the server's validation data, cached because every subnet needs them."""
    if worker.calibration is None:
        samples = worker.central_data("validation")
        if len(samples) == 0:
            raise ValueError(
                "running statistics need validation data to be estimated from: raise data.validation_share"
            )
        worker.calibration = _spread(samples)
    return worker.calibration


def _spread(samples: StoredSamples) -> Tree:
    """Evenly spaced inputs of the samples, at most `CALIBRATION_SAMPLES`."""
    places = torch.linspace(0, len(samples) - 1, min(CALIBRATION_SAMPLES, len(samples))).round().long()
    return samples.tensors(places.numpy())[0]


def loaded_subnet(worker: Worker, subnet: Subnet, weights: Weights) -> nn.Module:
    """A subnet's module in evaluation mode, with its tensors copied from the shared weights."""
    network = subnet.on(worker)
    worker.load(network.module, weights, network.slices)
    worker.set_mode(network.module, training=False)
    return network.module


def scored_subnet(worker: Worker, subnet: Subnet, weights: Weights, version: str | None = None) -> nn.Module:
    """Like `loaded_subnet`, with running statistics that fit the subnet.

    The batch norms of a slice of the supernet get re-estimated statistics; a stand-alone model has its own already. For
    weights with a `version` they are estimated only once per subnet, and reused for all data that it is scored on.
    """
    module = loaded_subnet(worker, subnet, weights)
    if not subnet.stand_alone and subnet.statistics == ESTIMATED and worker.space.keeps_statistics:
        known = {} if version is None else worker.statistics_of(version)
        if subnet.architecture not in known:
            estimate_statistics(module, calibration_samples(worker))
            known[subnet.architecture] = {name: buffer.clone() for name, buffer in module.named_buffers()}
        else:
            module.load_state_dict(known[subnet.architecture], strict=False)
    return module


Buffers = list[tuple[Tensor, Tensor]]
"""Buffers of a module, and their values."""


@contextmanager
def _estimated_for(
    worker: Worker, module: nn.Module, paths: Sequence[Architecture], unlabelled: Tree
) -> Iterator[list[Buffers]]:
    """The statistics estimated for each path of the supernet module, whose own statistics are restored afterwards."""
    norms = {f"{n}.running_mean": part for n, part in module.named_modules() if isinstance(part, BatchNorm)}
    before = [(buffer, buffer.clone()) for norm in norms.values() for buffer in norm.buffers()]

    def of(path: Architecture) -> Buffers:
        of_path = [norms[name] for name in worker.space.slices(path) if name in norms]
        estimate_statistics(module, unlabelled, forward=lambda x_B: module(x_B, path), norms=of_path)
        return [(buffer, buffer.clone()) for norm in of_path for buffer in norm.buffers()]

    try:
        yield [of(path) for path in paths]
    finally:
        _put(before)


def _put(values: Buffers) -> None:
    for buffer, value in values:
        buffer.copy_(value)


def score_subnets(
    worker: Worker,
    architectures: Sequence[Architecture],
    weights: Weights,
    version: str,
    data: StoredSamples,
    generator: torch.Generator,
    unlabelled: Tree | None = None,
) -> list[Score]:
    """The scores of subnets of the shared supernet, in the given order; what they draw is the generator's seed's.

    If subnets hold whole tensors, the supernet module computes the scores, with statistics that are estimated per path
    from the `unlabelled` samples, if given; otherwise each subnet's own module does. All must be for the same task.
    """
    data = worker.in_task(data, architectures[0]) if architectures else data
    if worker.space.slices_tensors:
        scores = []
        for architecture in architectures:
            subnet = Subnet(architecture)
            with worker.randomness(subnet.on(worker).module, generator):
                scores.append(evaluate(scored_subnet(worker, subnet, weights, version), data, worker.objective))
        return scores
    module = worker.load_whole(weights, version)
    worker.set_mode(module, training=False)
    beginnings = getattr(module, "beginnings", None)
    # Sorted, so that most paths begin with the same layers as the path before, whose outputs `beginnings` keeps.
    order = sorted(range(len(architectures)), key=lambda i: architecture_id(architectures[i]))
    paths = [architectures[i] for i in order]
    averaged = nullcontext[list[Buffers]]([[] for _ in paths])
    estimated = averaged if unlabelled is None else _estimated_for(worker, module, paths, unlabelled)
    with worker.randomness(module, generator), estimated as statistics:

        def outputs_of(x_B: Tensor) -> Iterator[Tensor]:
            known = () if beginnings is None else (beginnings(),)
            x_B = worker.kernels.laid_out(x_B)
            for path, of_path in zip(paths, statistics, strict=True):
                _put(of_path)
                yield module(x_B, path, *known)

        scores = evaluate_all(outputs_of, len(paths), data, worker.objective)
    return [score for _, score in sorted(zip(order, scores, strict=True), key=lambda pair: pair[0])]


@dataclass(frozen=True)
class ScoreSubnets:
    """Scores subnets of the shared supernet on a split of the server's or of one client's data.

    `sent_bytes` is the size of the download (in federated search, of the union of the candidates). `statistics` are as
    in `Subnet`; on a client they are estimated from its own training data.
    """

    architectures: tuple[Architecture, ...]
    version: str
    split: str = "validation"
    share: float = 1.0
    sent_bytes: int = 0
    statistics: str = ESTIMATED

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """Scores every architecture, with one measurement per metric."""
        data = worker.scored_data(assignment.client_id, self.split, self.share)
        measurements: list[Measurement] = []
        unlabelled = self._unlabelled(worker, assignment.client_id)
        generator = _randomness_of(worker, assignment)
        scores = score_subnets(worker, self.architectures, weights, self.version, data, generator, unlabelled)
        for architecture, score in zip(self.architectures, scores, strict=True):
            measurements += measurements_of("supernet", architecture_id(architecture), self.split, score)
        passes = len(data) + (0 if unlabelled is None else rows_of(unlabelled))
        costs = self._costs(worker, len(data), passes, 2 * len(self.architectures))
        return replace(costs, measurements=tuple(measurements))

    def account(self, worker: Worker, assignment: Assignment) -> ClientResult:
        """The costs of scoring a loss and a metric on a client, counted without scoring."""
        client_id = client_of(assignment)
        samples, held = (worker.data.size(client_id, split) for split in (self.split, "train"))
        passes = samples + (min(held, CALIBRATION_SAMPLES) if held > 1 and self._is_estimated(worker) else 0)
        return self._costs(worker, samples, passes, 2 * len(self.architectures))

    def _is_estimated(self, worker: Worker) -> bool:
        """Whether statistics are estimated for the supernet module's paths; subnets of sliced tensors get their own."""
        space = worker.space
        return self.statistics == ESTIMATED and space.keeps_statistics and not space.slices_tensors

    def _unlabelled(self, worker: Worker, client_id: int | None) -> Tree | None:
        """The inputs from which paths' statistics are estimated, if they are; a single sample has no variance."""
        if not self._is_estimated(worker):
            return None
        if client_id is None:
            return calibration_samples(worker)
        samples = worker.data.stored(client_id, "train")
        return _spread(samples) if len(samples) > 1 else None

    def _costs(self, worker: Worker, samples: int, passes: int, values: int) -> ClientResult:
        return ClientResult(
            samples=samples,
            macs=sum(worker.spec.macs_table.cost(a) for a in self.architectures) * passes,
            bytes_down=self.sent_bytes,
            # Each client sends a loss and a metric per candidate, 8 bytes each.
            bytes_up=8 * values if self.sent_bytes else 0,
            clock_factor=EVALUATION_FACTOR,
        )


def statistics_of(module: nn.Module) -> dict[str, Tensor]:
    """A module's running statistics by name."""
    return {name: buffer for name, buffer in module.named_buffers() if buffer.is_floating_point()}


def statistics_update(module: nn.Module, weight: float) -> Update:
    """A module's running statistics as an update, all of one weight."""
    buffers = statistics_of(module)
    return Update(buffers, {name: Slice(name) for name in buffers}, dict.fromkeys(buffers, weight))


@dataclass(frozen=True)
class EstimateStatistics:
    """The server's estimate of a slice's running statistics, as an update of the slice."""

    subnet: Subnet

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """Estimates them from the same samples as a search does."""
        del assignment
        module = scored_subnet(worker, self.subnet, weights)
        samples = len(calibration_samples(worker))
        return ClientResult(
            update=statistics_update(module, 1.0),
            samples=samples,
            macs=worker.spec.macs_table.cost(self.subnet.architecture) * samples,
            clock_factor=EVALUATION_FACTOR,
        )


@dataclass(frozen=True)
class ScoreSubnet:
    """Scores one subnet on the server's data or on a client's part of a split.

    `details` asks for a classifier's confusion matrix, or for a paragraph that a language model writes.
    """

    subnet: Subnet
    model: str
    split: str
    details: bool = False

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """Scores the subnet, with one measurement per metric."""
        architecture, client_id = self.subnet.architecture, assignment.client_id
        data = worker.in_task(worker.scored_data(client_id, self.split), architecture)
        name = architecture_id(architecture)
        with worker.randomness(self.subnet.on(worker).module, _randomness_of(worker, assignment)):
            module = scored_subnet(worker, self.subnet, weights)
            forward = Predictions(module, len(worker.class_names(architecture))) if self.details else module
            score = evaluate(forward, data, worker.objective)
            measurements = measurements_of(self.model, name, self.split, score)
            if isinstance(forward, Predictions):
                measurements += tuple(details_of(worker, forward, data, self.model, architecture))
        return ClientResult(
            samples=score.samples,
            macs=worker.spec.macs_table.cost(architecture) * score.samples,
            bytes_down=0 if client_id is None else bytes_of(worker.tensors_of(module)),
            loss=None if math.isnan(score.loss) else score.loss,
            metric=None if math.isnan(score.metric) else score.metric,
            architecture=name,
            measurements=measurements,
            clock_factor=EVALUATION_FACTOR,
        )


def own_test_data(worker: Worker, assignment: Assignment) -> Samples:
    """The client's own test samples."""
    return worker.client_data(client_of(assignment), "test")


def validation_scores(
    worker: Worker, assignment: Assignment, network: Network, model: str = GLOBAL
) -> tuple[Measurement, ...]:
    """Loss and metrics of the loaded network on the client's validation data; empty if it has none."""
    data = worker.client_data(client_of(assignment), "validation")
    if rows_of(data[1]) == 0:
        return ()
    score = score_loaded(worker, assignment, network, data)
    return measurements_of(model, network.name, "validation", score)
