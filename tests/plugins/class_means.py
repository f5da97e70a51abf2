"""Nearest class means: clients send the means of their classes, and no network is trained.

in one round   a client sends, of each of its classes j, the mean m_ij of its samples and their number n_ij
the server     averages them: m_j = sum_i n_ij m_ij / sum_i n_ij
in the end     a test sample is of the class with the nearest m_j
"""

from dataclasses import dataclass, field

import torch

from fedloom.platform.averaging.average import Update
from fedloom.platform.clients.assignments import Assignment, ClientResult, Measurement
from fedloom.platform.clients.scoring import GLOBAL, own_test_data
from fedloom.platform.clients.trainer import client_samples
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.algorithm import to_all
from fedloom.platform.federation.method import Method, Stage
from fedloom.platform.federation.world import World
from fedloom.platform.methods import silos
from fedloom.platform.spaces.slices import Slice, Weights, bytes_of


@dataclass
class ClassMeansConfig:
    """The keys `method.*`."""

    name: str = "class_means"
    train: silos.SiloTrainingConfig = field(default_factory=lambda: silos.SiloTrainingConfig(rounds=1))


@dataclass(frozen=True)
class SendMeans:
    """A client's message: values for some of the shared tensors, each with a weight of its own."""

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """A tensor and a number of samples for every class that the client has; it needs nothing from the server."""
        x, y = client_samples(worker, assignment)
        of_class = {f"mean/{label}": x[y == label].flatten(1) for label in y.unique().tolist()}
        means = {name: rows.mean(dim=0) for name, rows in of_class.items()}
        counts = {name: float(len(rows)) for name, rows in of_class.items()}
        message = Update(means, {name: Slice(name) for name in means}, counts)
        return ClientResult(update=message, samples=len(y), bytes_up=bytes_of(means))


@dataclass(frozen=True)
class ScoreMeans:
    """Scores the averaged means on a client's own test data."""

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """The accuracy of the nearest mean; a class whose mean is still zero, as nobody has it, is not predicted."""
        x, y = own_test_data(worker, assignment)
        means = torch.stack([weights[f"mean/{label}"] for label in range(len(weights))]).to(worker.device)
        distances = torch.cdist(x.flatten(1), means).masked_fill(~means.any(dim=1), torch.inf)
        accuracy = (distances.argmin(dim=1) == y).double().mean().item()
        score = Measurement(GLOBAL, "class means", "test", "accuracy", accuracy, len(y))
        return ClientResult(samples=len(y), metric=accuracy, measurements=(score,))


def stages(config: ClassMeansConfig, world: World) -> list[Stage]:
    """The round, and the evaluation on every client."""
    inputs = torch.Size(world.space.input_shape).numel()
    unknown = {f"mean/{label}": torch.zeros(inputs) for label in range(world.config.space.num_classes)}
    training = silos.SiloTraining(
        *(world, config.train, silos.checked_silos(world, config.train)),
        name=config.name,
        initial=lambda _state: unknown,
        tasks=to_all(lambda _round: SendMeans()),
        test=lambda _state: ScoreMeans(),
    )
    return training.and_evaluation()


METHOD = Method(ClassMeansConfig, stages, kind="silos", lacks=("candidates", "models"))
