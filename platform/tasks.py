"""The pieces of work that clients (and the server, on its own data) do: train on paths, train a subnet, score."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor

from fedloom.platform.averaging import Update
from fedloom.platform.execution import Assignment, Measurement, Outcome, TaskError
from fedloom.platform.paths import path_sampler
from fedloom.platform.seeding import stream, torch_stream
from fedloom.platform.spaces.base import Architecture, Slice, SliceMap, Weights, bytes_of, extract
from fedloom.platform.spaces.operator_choice import OperatorChoiceSpace
from fedloom.platform.subspace import Subspace
from fedloom.platform.training import LocalSGD, Score, Trained, evaluate, train_locally
from fedloom.platform.weighting import Work, weighting_rule
from fedloom.platform.worker import Worker
from fedloom.tiers.clock import EVALUATION_FACTOR


def architecture_id(architecture: Architecture) -> str:
    """The architecture as it stands in the result tables, such as 3-1-8-0."""
    return "-".join(str(choice) for choice in architecture)


def parse_architecture(text: str) -> Architecture:
    """The inverse of `architecture_id`."""
    return tuple(int(choice) for choice in text.split("-"))


def subspace_id(kept: Subspace) -> str:
    """A subspace as it stands in the result tables: the kept options of each layer, such as 0138/8/25."""
    return "/".join(",".join(str(option) for option in layer) for layer in kept)


def subnet_slices(worker: Worker, architecture: Architecture, stand_alone: bool) -> SliceMap:
    """Where the subnet's tensors lie in the shared weights: in the supernet's, or under their own names."""
    if not stand_alone:
        return worker.space.slices(architecture)
    return {name: Slice(name) for name in worker.tensors_of(worker.subnet(architecture))}


def _client(assignment: Assignment) -> int:
    assert assignment.client_id is not None, "training is a client's work"
    return assignment.client_id


def _places(assignment: Assignment) -> tuple[str | int, ...]:
    return (assignment.stage, assignment.round, _client(assignment))


def _trained_outcome(
    trained: Trained, tensors: Weights, slices: SliceMap, work: Work, rule: str, macs: float
) -> Outcome:
    if not math.isfinite(trained.loss):
        raise TaskError(f"the training loss is {trained.loss}: the update was left out of the average")
    # What travels down is what the slices cut out, and the same tensors come back.
    size_bytes = bytes_of(tensors)
    return Outcome(
        update=Update(tensors, slices, weighting_rule(rule)(work)),
        samples=work.samples,
        steps=trained.steps,
        macs=macs,
        bytes_down=size_bytes,
        bytes_up=size_bytes,
        loss=trained.loss,
        metric=trained.accuracy,
        parameters=sum(t.numel() for t in tensors.values() if t.requires_grad),
    )


@dataclass(frozen=True)
class TrainPaths:
    """Stage 1 of FedorAS on a client: one random path per batch inside the received subspace and the tier's budget.

    Attributes:
        kept: the operators that were sent.
        budget: greatest cost of a path, in the run's cost measure.
        paths: the path sampler's name.
        weighting: the weighting rule's name.
    """

    kept: Subspace
    budget: float
    local: LocalSGD
    paths: str = "greedy"
    weighting: str = "opa"
    share: float = 1.0

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> Outcome:
        """Trains on the client's data; the update holds every tensor of the subspace."""
        space = cast(OperatorChoiceSpace, worker.space)
        slices = space.subspace_slices(self.kept)
        module = worker.supernet
        tensors = worker.load(module, weights, slices)
        sampler = path_sampler(self.paths, worker.spec.cost_table, self.kept, self.budget)
        rng = stream(worker.spec.training_seed, "paths", *_places(assignment))
        through: Counter[tuple[int, int]] = Counter()
        macs = 0.0

        def forward(x_B: Tensor) -> Tensor:
            nonlocal macs
            path = sampler.sample(rng)
            through.update(dict.fromkeys(enumerate(path), len(x_B)))
            macs += worker.spec.macs_table.cost(path) * len(x_B)
            return cast(Tensor, module(x_B, path))

        x, y = worker.client_data(_client(assignment), "train")
        worker.set_mode(module, training=True)
        generator = torch_stream(worker.spec.training_seed, "batches", *_places(assignment))
        parameters = [t for t in tensors.values() if t.requires_grad]
        trained = train_locally(forward, parameters, (x, y), self.local, generator)
        seen = {name: self._seen(space, name, through, trained.seen_samples) for name in tensors}
        work = Work(len(y), trained.seen_samples, seen, self.share)
        outcome = _trained_outcome(trained, tensors, slices, work, self.weighting, macs)
        return replace(outcome, subspace=subspace_id(self.kept))

    @staticmethod
    def _seen(space: OperatorChoiceSpace, name: str, through: Mapping[tuple[int, int], int], whole: int) -> int:
        owner = space.owner_of[name]
        return whole if owner is None else through.get(owner, 0)


@dataclass(frozen=True)
class TrainSubnet:
    """Trains one subnet.

    The shared weights are a supernet that its slices are cut from or, if `stand_alone`, its own tensors.
    """

    architecture: Architecture
    local: LocalSGD
    weighting: str = "fedavg"
    share: float = 1.0
    stand_alone: bool = False

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> Outcome:
        """Trains on the client's data; the update holds every tensor of the subnet."""
        slices = subnet_slices(worker, self.architecture, self.stand_alone)
        module = worker.subnet(self.architecture)
        tensors = worker.load(module, weights, slices)
        x, y = worker.client_data(_client(assignment), "train")
        worker.set_mode(module, training=True)
        generator = torch_stream(worker.spec.training_seed, "batches", *_places(assignment))
        parameters = [t for t in tensors.values() if t.requires_grad]
        trained = train_locally(module, parameters, (x, y), self.local, generator)
        work = Work(len(y), trained.seen_samples, dict.fromkeys(tensors, trained.seen_samples), self.share)
        macs = worker.spec.macs_table.cost(self.architecture) * trained.seen_samples
        outcome = _trained_outcome(trained, tensors, slices, work, self.weighting, macs)
        return replace(outcome, architecture=architecture_id(self.architecture))


@dataclass(frozen=True)
class ScorePaths:
    """Scores paths of the shared supernet on validation data: all of the server's, or one client's.

    `sent_bytes` is what a client received for it (the union of the candidates, in federated search).
    """

    architectures: tuple[Architecture, ...]
    version: str
    split: str = "validation"
    share: float = 1.0
    sent_bytes: int = 0

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> Outcome:
        """Scores every architecture; one loss and one metric measurement each."""
        module = worker.load_whole(weights, self.version)
        worker.set_mode(module, training=False)
        if assignment.client_id is None:
            data = worker.central_data(self.split, self.share)
        else:
            data = worker.client_data(assignment.client_id, self.split)
        measurements: list[Measurement] = []
        for architecture in self.architectures:
            score = evaluate(lambda x, a=architecture: module(x, a), data)  # type: ignore[misc]
            measurements += _measurements("supernet", architecture, self.split, score)
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
    """Scores one subnet on the server's data or on a client's own share of a split; see `TrainSubnet`."""

    architecture: Architecture
    model: str
    split: str
    stand_alone: bool = False

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> Outcome:
        """Scores the subnet; one loss and one metric measurement."""
        slices = subnet_slices(worker, self.architecture, self.stand_alone)
        module = worker.subnet(self.architecture)
        worker.load(module, weights, slices)
        worker.set_mode(module, training=False)
        client_id = assignment.client_id
        data = worker.central_data(self.split) if client_id is None else worker.client_data(client_id, self.split)
        score = evaluate(module, data)
        return Outcome(
            samples=score.samples,
            macs=worker.spec.macs_table.cost(self.architecture) * score.samples,
            bytes_down=0 if client_id is None else bytes_of(extract(weights, slices)),
            loss=_none_if_nan(score.loss),
            metric=_none_if_nan(score.metric),
            architecture=architecture_id(self.architecture),
            measurements=_measurements(self.model, self.architecture, self.split, score),
            clock_factor=EVALUATION_FACTOR,
        )


def _none_if_nan(value: float) -> float | None:
    return None if math.isnan(value) else value


def _measurements(model: str, architecture: Architecture, split: str, score: Score) -> tuple[Measurement, ...]:
    name = architecture_id(architecture)
    values = {"loss": score.loss, "accuracy": score.metric}
    return tuple(Measurement(model, name, split, metric, value, score.samples) for metric, value in values.items())
