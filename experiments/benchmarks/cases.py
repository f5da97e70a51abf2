"""The cases of the overhead benchmark and their networks: FedAvg on random data of CIFAR-10's shape, and on digits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedloom.platform.data.config import DataConfig
from fedloom.platform.federation.config import ExecutorConfig, RayConfig, RunConfig, TiersConfig
from fedloom.platform.federation.training_config import TrainingConfig
from fedloom.platform.methods.fedavg import FedAvgConfig
from fedloom.platform.spaces.operator_choice import Candidate, OperatorChoiceSpace
from fedloom.platform.spaces.space_config import SpaceConfig


@dataclass(frozen=True)
class Case:
    """A federation: `samples` images for each of `clients`, of which `cohort` train in a round."""

    network: str
    clients: int
    cohort: int
    samples: int
    rounds: int
    chunk_size: int
    batch_size: int = 32
    lr: float = 0.01
    dataset: str = "synthetic"


CASES = {
    "cnn": Case("cnn", clients=100, cohort=10, samples=500, rounds=8, chunk_size=1),
    "logistic": Case("logistic", clients=1000, cohort=100, samples=50, rounds=60, chunk_size=50),
    "tiny": Case("tiny", clients=40, cohort=40, samples=35, rounds=60, chunk_size=20, batch_size=8, dataset="digits"),
    "registered_100": Case("logistic", clients=100, cohort=10, samples=1, rounds=100, chunk_size=5),
    "registered_100000": Case("logistic", clients=100_000, cohort=10, samples=1, rounds=100, chunk_size=5),
    "cohort_200": Case("logistic", clients=2000, cohort=200, samples=8, rounds=12, chunk_size=50, batch_size=8),
    "cohort_2000": Case("logistic", clients=2000, cohort=2000, samples=8, rounds=6, chunk_size=50, batch_size=8),
    "long": Case("logistic", clients=100, cohort=10, samples=50, rounds=51, chunk_size=5),
}


def run_config(case: Case, actors: int, results: str, precision: str = "float32") -> RunConfig:
    """The case as a run configuration; 0 actors means the serial executor."""
    train = TrainingConfig(
        rounds=case.rounds,
        clients_per_round=case.cohort,
        epochs=1,
        batch_size=case.batch_size,
        lr=case.lr,
        momentum=0.0,
    )
    return RunConfig(
        experiment="overhead",
        results=results,
        data=DataConfig(
            dataset=case.dataset,
            train_samples=case.clients * case.samples,
            test_samples=100,
            num_clients=case.clients,
            alpha=1000.0,
            validation_share=0.0,
        ),
        space=SpaceConfig(name=f"fedloom.experiments.benchmarks.cases:{case.network}"),
        tiers=TiersConfig(count=1, paths=10),
        method=FedAvgConfig(train=train, evaluate=False),
        executor=ExecutorConfig(
            kind="ray" if actors else "serial",
            actors=actors or None,
            chunk_size=case.chunk_size,
            threads=1,
            precision=precision,  # type: ignore[arg-type]
        ),
        ray=RayConfig(address="local", num_cpus=max(1, actors), object_store_memory_bytes=300_000_000),
    )


Layers = Sequence[Callable[[Tensor], Tensor]]


class TwoConvCnn(nn.Module):
    """The CNN of many papers on federated learning: two 5x5 convolutions (32, 64) with pooling, two linear layers."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 32, 5)
        self.conv2 = nn.Conv2d(32, 64, 5)
        self.hidden = nn.Linear(64 * 25, 512)
        self.classifier = nn.Linear(512, num_classes)

    def forward(self, x: Tensor, layers: Layers) -> Tensor:
        x = torch.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = torch.max_pool2d(torch.relu(self.conv2(layers[0](x))), 2)
        y: Tensor = self.classifier(torch.relu(self.hidden(x.flatten(1))))
        return y


class Logistic(nn.Module):
    """Logistic regression on 3072 inputs."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.classifier = nn.Linear(3072, num_classes)

    def forward(self, x: Tensor, layers: Layers) -> Tensor:
        y: Tensor = self.classifier(layers[0](x.flatten(1)))
        return y


class TinyCnn(nn.Module):
    """Two 3x3 convolutions (8, 16) with pooling and a linear layer, for 8x8 digits."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.classifier = nn.Linear(16 * 4, num_classes)

    def forward(self, x: Tensor, layers: Layers) -> Tensor:
        x = torch.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = torch.max_pool2d(torch.relu(self.conv2(layers[0](x))), 2)
        y: Tensor = self.classifier(x.flatten(1))
        return y


def _space(name: str, build: Callable[[], nn.Module], shape: tuple[int, ...] = (3, 32, 32)) -> OperatorChoiceSpace:
    only = [[Candidate("identity", nn.Identity)]]
    return OperatorChoiceSpace(name=name, input_shape=shape, layers=only, build_fixed=build)


def cnn(config: SpaceConfig) -> OperatorChoiceSpace:
    """The two-convolution CNN as a space."""
    return _space("benchmark_cnn", lambda: TwoConvCnn(config.num_classes))


def logistic(config: SpaceConfig) -> OperatorChoiceSpace:
    """Logistic regression as a space."""
    return _space("benchmark_logistic", lambda: Logistic(config.num_classes))


def tiny(config: SpaceConfig) -> OperatorChoiceSpace:
    """The tiny CNN as a space."""
    return _space("benchmark_tiny", lambda: TinyCnn(config.num_classes), (1, 8, 8))
