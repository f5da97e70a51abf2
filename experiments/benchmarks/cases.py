"""The cases of the overhead benchmark and their baseline: two plain processes that share the clients.

    python -m fedloom.experiments.benchmarks.cases CASE

FedAvg on random data of CIFAR-10's shape, on digits, and the case of `pfl_cell`. Prints the seconds of the rounds as
JSON. It imports as little as it can, since the memory of these processes is compared with that of the platform's.
"""

import json
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.platform.data.config import DataConfig
from fedloom.platform.federation.config import ExecutorConfig, RayConfig, RunConfig, TiersConfig
from fedloom.platform.federation.training_config import TrainingConfig
from fedloom.platform.methods.fedavg import FedAvgConfig
from fedloom.platform.spaces.initialisation import fill_uniform
from fedloom.platform.spaces.operator_choice import Candidate, OperatorChoiceSpace
from fedloom.platform.spaces.space_config import SpaceConfig

WARM_UP_ROUNDS = 2


@dataclass(frozen=True)
class Case:
    """A federation: `samples` images for each of `clients`, of which `cohort` train in a round.

    With `channels_last` the plain processes store images and kernels with the channels last; fedloom decides itself.
    """

    network: str
    clients: int
    cohort: int
    samples: int
    rounds: int
    chunk_size: int
    batch_size: int = 32
    lr: float = 0.01
    dataset: str = "synthetic"
    channels_last: bool = False


CASES = {
    "cnn": Case("cnn", clients=100, cohort=10, samples=500, rounds=8, chunk_size=1),
    "logistic": Case("logistic", clients=1000, cohort=100, samples=50, rounds=60, chunk_size=50),
    "tiny": Case("tiny", clients=40, cohort=40, samples=35, rounds=60, chunk_size=20, batch_size=8, dataset="digits"),
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


class _Glorot(nn.Module):
    """A layer with weights initialised as in Glorot and Bengio (2010), and biases as in torch."""

    weight: Tensor

    def reset_parameters(self) -> None:
        super().reset_parameters()  # type: ignore[misc]  # of the layer that this is mixed into
        nn.init.xavier_uniform_(self.weight)

    def initialise_own(self, tensors_by_name: Mapping[str, Tensor], generator: torch.Generator) -> None:
        """The same initialisation, drawn from a generator."""
        weight = tensors_by_name["weight"]
        fill_uniform(tensors_by_name, math.prod(weight.shape[1:]), generator)
        nn.init.xavier_uniform_(weight, generator=generator)


class GlorotConvolution(_Glorot, nn.Conv2d):
    """A convolution."""


class GlorotLinear(_Glorot, nn.Linear):
    """A linear layer."""


class PflCnn(nn.Module):
    """`simple_cnn` of pfl-research's benchmarks: two 3x3 convolutions (32, 64), pooling, two linear layers, dropout."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv1 = GlorotConvolution(3, 32, 3)
        self.conv2 = GlorotConvolution(32, 64, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.hidden = GlorotLinear(64 * 14 * 14, 128)
        self.classifier = GlorotLinear(128, num_classes)

    def forward(self, x: Tensor, layers: Layers) -> Tensor:
        x = torch.max_pool2d(torch.relu(self.conv2(layers[0](torch.relu(self.conv1(x))))), 2)
        x = torch.relu(self.hidden(self.dropout1(x).flatten(1)))
        y: Tensor = self.classifier(self.dropout2(x))
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


def pfl(config: SpaceConfig) -> OperatorChoiceSpace:
    """The CNN of pfl-research's benchmarks as a space."""
    return _space("benchmark_pfl", lambda: PflCnn(config.num_classes))


# -- two plain processes that share the clients, without the platform -------------------------------------------------


NETWORKS = {"cnn": TwoConvCnn, "logistic": Logistic, "tiny": TinyCnn, "pfl": PflCnn}


def identity(x: torch.Tensor) -> torch.Tensor:
    """The only operator of the benchmark networks."""
    return x


def normalised(x_NCHW: npt.NDArray[Any], mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Images of bytes (N, C, H, W) as normalised floats."""
    shift, scale = (torch.tensor(v).view(1, -1, 1, 1) for v in (mean, std))
    return torch.from_numpy(x_NCHW.astype(np.float32)).div_(255).sub_(shift).div_(scale)


def train_client(model: nn.Module, case: Case, x_NCHW: Tensor, y_N: Tensor) -> None:
    """Trains a client for one epoch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=case.lr)
    for index in torch.split(torch.randperm(len(y_N)), case.batch_size):
        optimizer.zero_grad()
        F.cross_entropy(model(x_NCHW[index], [identity]), y_N[index]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def memory_format(case: Case) -> torch.memory_format:
    """How a plain process stores images and kernels."""
    return torch.channels_last if case.channels_last else torch.contiguous_format


def serve(pipe: Connection, case: Case, images: str, labels: str, mean: list[float], std: list[float]) -> None:
    """A worker process: receives weights and clients, trains the clients, sends the weighted sum of their weights."""
    torch.set_num_threads(1)
    x_all, y_all = (np.load(file, mmap_mode="r", allow_pickle=False) for file in (images, labels))
    model = NETWORKS[case.network](10).to(memory_format=memory_format(case))
    names = list(model.state_dict())
    pipe.send("ready")
    while (message := pipe.recv()) is not None:
        weights, clients = message
        total = [torch.zeros_like(torch.from_numpy(w)) for w in weights]
        for client in clients:
            rows = slice(client * case.samples, (client + 1) * case.samples)
            x = normalised(x_all[rows], mean, std).contiguous(memory_format=memory_format(case))
            y = torch.from_numpy(np.array(y_all[rows]))
            model.load_state_dict({n: torch.from_numpy(w) for n, w in zip(names, weights, strict=True)})
            train_client(model, case, x, y)
            for t, tensor in zip(total, model.state_dict().values(), strict=True):
                t.add_(tensor, alpha=case.samples)
        pipe.send([t.numpy() for t in total])


def plain_rounds(
    case: Case, dataset: str, mean: Sequence[float], std: Sequence[float]
) -> tuple[list[float], list[npt.NDArray[Any]]]:
    """Runs the case with two worker processes; returns the seconds of each round, and the weights."""
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    pipes = []
    arguments = (case, f"{dataset}/train_x.npy", f"{dataset}/train_y.npy", list(mean), list(std))
    for _ in range(2):
        here, there = context.Pipe()
        context.Process(target=serve, args=(there, *arguments), daemon=True).start()
        pipes.append(here)
    for pipe in pipes:
        pipe.recv()
    weights = [t.numpy() for t in NETWORKS[case.network](10).state_dict().values()]
    rng = np.random.default_rng(0)
    seconds = []
    for _ in range(case.rounds):
        started = time.perf_counter()
        cohort = rng.choice(case.clients, case.cohort, replace=False).tolist()
        for part, pipe in enumerate(pipes):
            pipe.send((weights, cohort[part::2]))
        answers = [pipe.recv() for pipe in pipes]
        weights = [(a + b) / (case.cohort * case.samples) for a, b in zip(*answers, strict=True)]
        seconds.append(time.perf_counter() - started)
    for pipe in pipes:
        pipe.send(None)
    return seconds, weights


def main() -> None:
    """Measures a case with two plain processes."""
    from fedloom.platform.data.dataset import Dataset
    from fedloom.platform.data.prepare import prepare_dataset

    case = CASES[sys.argv[1]]
    dataset = Dataset.open(prepare_dataset(run_config(case, 0, "").data))
    rounds_s, _ = plain_rounds(case, str(dataset.path), dataset.mean, dataset.std)
    print(json.dumps({"rounds_s": rounds_s[WARM_UP_ROUNDS:]}))


if __name__ == "__main__":
    main()
