"""The pieces of work that clients (and the server, on its own data) do: train on paths, train a subnet, score."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor

from fedloom.platform.averaging.average import Update
from fedloom.platform.averaging.weighting import Work, weighting_rule
from fedloom.platform.clients.execution import Assignment, Measurement, Outcome, TaskError
from fedloom.platform.clients.paths import path_sampler
from fedloom.platform.clients.subnets import loaded_subnet, paths_scorer, scored_subnet, subnet_slices
from fedloom.platform.clients.subspace import Subspace, size_of
from fedloom.platform.clients.training import LocalSGD, Score, Trained, batch_sizes, evaluate, train_locally
from fedloom.platform.clients.worker import Worker
from fedloom.platform.seeding import stream, torch_stream
from fedloom.platform.spaces.base import Architecture, Slice, SliceMap, Weights, bytes_of
from fedloom.platform.spaces.elastic import ElasticSpace
from fedloom.platform.spaces.operator_choice import OperatorChoiceSpace
from fedloom.tiers.clock import EVALUATION_FACTOR
from fedloom.tiers.measure import latency_s_of

LARGEST_EXPONENT = 700.0
"""e to this is still a number: a diverged model has a perplexity, too."""


def architecture_id(architecture: Architecture) -> str:
    """The architecture as it stands in the result tables, such as 3-1-8-0."""
    return "-".join(str(choice) for choice in architecture)


def parse_architecture(text: str) -> Architecture:
    """The inverse of `architecture_id`."""
    return tuple(int(choice) for choice in text.split("-"))


def subspace_id(kept: Subspace) -> str:
    """A subspace as it stands in the result tables: the kept options of each layer, such as 0138/8/25."""
    return "/".join(",".join(str(option) for option in layer) for layer in kept)


def parse_subspace(text: str) -> Subspace:
    """The inverse of `subspace_id`."""
    return tuple(tuple(int(option) for option in layer.split(",") if option) for layer in text.split("/"))


def client_of(assignment: Assignment) -> int:
    """The client that an assignment is for."""
    assert assignment.client_id is not None, "training is a client's work"
    return assignment.client_id


def places_of(assignment: Assignment) -> tuple[str | int, ...]:
    """Stage, round and client: what every stream of a client's work is derived from."""
    return (assignment.stage, assignment.round, client_of(assignment))


def check_trained(trained: Trained) -> None:
    """Raises TaskError if the training diverged."""
    if not math.isfinite(trained.loss):
        raise TaskError(f"the training loss is {trained.loss}: the update was left out of the average")


def _trained_outcome(
    trained: Trained, tensors: Weights, slices: SliceMap, work: Work, rule: str, macs: float
) -> Outcome:
    check_trained(trained)
    # What travels down is what the slices cut out, and the same tensors come back.
    size_bytes = bytes_of(tensors)
    weights = {name: work.share * weight for name, weight in weighting_rule(rule)(work).items()}
    return Outcome(
        update=Update(tensors, slices, weights),
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
        rng = stream(worker.spec.training_seed, "paths", *places_of(assignment))
        through: Counter[tuple[int, int]] = Counter()
        macs = 0.0

        def forward(x_B: Tensor) -> Tensor:
            nonlocal macs
            path = sampler.sample(rng)
            through.update(dict.fromkeys(enumerate(path), len(x_B)))
            macs += worker.spec.macs_table.cost(path) * len(x_B)
            return cast(Tensor, module(x_B, path))

        x, y = worker.client_data(client_of(assignment), "train")
        worker.set_mode(module, training=True)
        generator = torch_stream(worker.spec.training_seed, "batches", *places_of(assignment))
        parameters = [t for t in tensors.values() if t.requires_grad]
        with worker.randomness(module, generator):
            trained = train_locally(forward, parameters, (x, y), self.local, generator)
        seen = {name: self._seen(space, name, through, trained.seen_samples) for name in tensors}
        work = Work(len(y), trained.seen_samples, seen, self.share)
        outcome = _trained_outcome(trained, tensors, slices, work, self.weighting, macs)
        return replace(outcome, subspace=subspace_id(self.kept))

    def account(self, worker: Worker, assignment: Assignment) -> Outcome:
        """The figures of `run` without training: the same paths are drawn for the same batches."""
        space = cast(OperatorChoiceSpace, worker.space)
        sampler = path_sampler(self.paths, worker.spec.cost_table, self.kept, self.budget)
        rng = stream(worker.spec.training_seed, "paths", *places_of(assignment))
        sizes = batch_sizes(worker.data.size(client_of(assignment), "train"), self.local)
        macs = sum(worker.spec.macs_table.cost(sampler.sample(rng)) * size for size in sizes)
        outcome = _accounted(sizes, size_of(space.bytes_table(), self.kept), macs, self.local)
        parameters = int(size_of(space.parameters_table(), self.kept))
        return replace(outcome, parameters=parameters, subspace=subspace_id(self.kept))

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
        x, y = worker.client_data(client_of(assignment), "train")
        worker.set_mode(module, training=True)
        generator = torch_stream(worker.spec.training_seed, "batches", *places_of(assignment))
        parameters = [t for t in tensors.values() if t.requires_grad]
        with worker.randomness(module, generator):
            trained = train_locally(module, parameters, (x, y), self.local, generator)
        work = Work(len(y), trained.seen_samples, dict.fromkeys(tensors, trained.seen_samples), self.share)
        macs = worker.spec.macs_table.cost(self.architecture) * trained.seen_samples
        outcome = _trained_outcome(trained, tensors, slices, work, self.weighting, macs)
        return replace(outcome, architecture=architecture_id(self.architecture))

    def account(self, worker: Worker, assignment: Assignment) -> Outcome:
        """The figures of `run` without training."""
        tables = {measure: worker.space.cost_table(measure) for measure in ("bytes", "parameters")}
        cost = {measure: table.cost(self.architecture) for measure, table in tables.items()}
        sizes = batch_sizes(worker.data.size(client_of(assignment), "train"), self.local)
        macs = worker.spec.macs_table.cost(self.architecture) * sum(sizes)
        outcome = _accounted(sizes, cost["bytes"], macs, self.local)
        return replace(outcome, parameters=int(cost["parameters"]), architecture=architecture_id(self.architecture))


@dataclass(frozen=True)
class TrainSupernet:
    """Trains a whole elastic supernet: `subnets_per_batch` random subnets' gradients per batch (progressive shrinking).

    With `widest` their blocks are as wide as they get, and only depths are drawn.
    """

    local: LocalSGD
    subnets_per_batch: int = 4
    widest: bool = False
    weighting: str = "fedavg"
    share: float = 1.0

    def _draws(self, worker: Worker, assignment: Assignment) -> Iterator[Architecture]:
        space = cast(ElasticSpace, worker.space)
        rng = stream(worker.spec.training_seed, "subnets", *places_of(assignment))
        while True:
            yield space.sample_depth(rng) if self.widest else space.sample(rng)

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> Outcome:
        """Trains on the client's data; the update holds every tensor of the supernet."""
        module = worker.supernet
        slices = {name: Slice(name) for name in worker.tensors_of(module)}
        tensors = worker.load(module, weights, slices)
        draws, macs = self._draws(worker, assignment), 0.0

        def forward(x_B: Tensor) -> Tensor:
            nonlocal macs
            architecture = next(draws)
            macs += worker.spec.macs_table.cost(architecture) * len(x_B)
            return cast(Tensor, module(x_B, architecture))

        x, y = worker.client_data(client_of(assignment), "train")
        worker.set_mode(module, training=True)
        generator = torch_stream(worker.spec.training_seed, "batches", *places_of(assignment))
        parameters = [t for t in tensors.values() if t.requires_grad]
        with worker.randomness(module, generator):
            trained = train_locally(forward, parameters, (x, y), self.local, generator, self.subnets_per_batch)
        work = Work(len(y), trained.seen_samples, dict.fromkeys(tensors, trained.seen_samples), self.share)
        return _trained_outcome(trained, tensors, slices, work, self.weighting, macs)

    def account(self, worker: Worker, assignment: Assignment) -> Outcome:
        """The figures of `run` without training: the same subnets are drawn for the same batches."""
        space = cast(ElasticSpace, worker.space)
        tables = {measure: space.cost_table(measure) for measure in ("bytes", "parameters")}
        cost = {measure: table.cost(space.largest) for measure, table in tables.items()}
        sizes = batch_sizes(worker.data.size(client_of(assignment), "train"), self.local)
        draws, macs = self._draws(worker, assignment), 0.0
        for size in sizes:
            for _ in range(self.subnets_per_batch):
                macs += worker.spec.macs_table.cost(next(draws)) * size
        return replace(_accounted(sizes, cost["bytes"], macs, self.local), parameters=int(cost["parameters"]))


def _accounted(sizes: Sequence[int], size_bytes: float, macs: float, local: LocalSGD) -> Outcome:
    seen = sum(sizes)
    return Outcome(
        samples=seen // local.epochs,
        steps=len(sizes),
        macs=macs,
        bytes_down=int(size_bytes),
        bytes_up=int(size_bytes),
    )


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
        forward_of = paths_scorer(worker, weights, self.version)
        if assignment.client_id is None:
            data = worker.central_data(self.split, self.share)
        else:
            data = worker.client_data(assignment.client_id, self.split)
        measurements: list[Measurement] = []
        for architecture in self.architectures:
            score = evaluate(forward_of(architecture), data)
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
    """Scores one subnet on the server's data or on a client's own share of a split; see `TrainSubnet`."""

    architecture: Architecture
    model: str
    split: str
    stand_alone: bool = False

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> Outcome:
        """Scores the subnet; one loss and one metric measurement."""
        module = scored_subnet(worker, self.architecture, weights, self.stand_alone)
        client_id = assignment.client_id
        data = worker.central_data(self.split) if client_id is None else worker.client_data(client_id, self.split)
        score = evaluate(module, data)
        return Outcome(
            samples=score.samples,
            macs=worker.spec.macs_table.cost(self.architecture) * score.samples,
            bytes_down=0 if client_id is None else bytes_of(worker.tensors_of(module)),
            loss=_none_if_nan(score.loss),
            metric=_none_if_nan(score.metric),
            architecture=architecture_id(self.architecture),
            measurements=measurements_of(self.model, architecture_id(self.architecture), self.split, score),
            clock_factor=EVALUATION_FACTOR,
        )


@dataclass(frozen=True)
class MeasureLatency:
    """Measures subnets on this host, one sample at a time: median seconds and their interquartile range."""

    architectures: tuple[Architecture, ...]
    repeats: int = 20

    def run(self, worker: Worker, _assignment: Assignment, weights: Weights) -> Outcome:
        """Two measurements per architecture."""
        x, _ = worker.central_data("validation")
        measurements: list[Measurement] = []
        for architecture in self.architectures:
            module = loaded_subnet(worker, architecture, weights, stand_alone=False)
            latency = latency_s_of(module, x[:1], repeats=self.repeats)
            figures = {"latency_s": latency.median_s, "latency_spread_s": latency.spread_s}
            name = architecture_id(architecture)
            measurements += [
                Measurement("supernet", name, "validation", k, v, latency.repeats) for k, v in figures.items()
            ]
        return Outcome(measurements=tuple(measurements), clock_factor=EVALUATION_FACTOR)


def _none_if_nan(value: float) -> float | None:
    return None if math.isnan(value) else value


def measurements_of(model: str, name: str, split: str | None, score: Score) -> tuple[Measurement, ...]:
    """Loss and metrics of a score; `name` is the architecture as it stands in the tables."""
    values = {"loss": score.loss, "accuracy": score.metric}
    if score.per_position:
        values["perplexity"] = math.exp(min(score.loss, LARGEST_EXPONENT))
    return tuple(Measurement(model, name, split, metric, value, score.samples) for metric, value in values.items())
