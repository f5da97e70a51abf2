"""The platform's overhead: the same FedAvg round in plain processes, with the serial executor, and with Ray actors.

    python -m fedloom.experiments.benchmarks.overhead [--cases cnn logistic tiny memory] [--repeats 3]

Prints tables, and one JSON object with all figures on the last line. Every variant runs in a separate process, the
variants alternate, and only ratios of medians within one call are meaningful. The time of a round is the time between
two finished rounds: it includes planning, communication, training, averaging, table rows and checkpoint. The ratio of
memory leaves out the pages of the data set, which are the kernel's to drop: plain clients have neighbouring samples,
fedloom's are spread over the file as a partition by labels spreads them, and so touch more of it.

`memory` is the pool's memory after round 5 and after round 50; how a round grows with registered clients and cohorts is
the subject of `scale`.
"""

import argparse
import json
import logging
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.actors.address import stay_on_loopback
from fedloom.actors.cluster import connected
from fedloom.actors.server import make_pool
from fedloom.experiments.benchmarks.processes import MemoryWatch, descendants, is_rays_own, pss_bytes
from fedloom.platform.data.config import DataConfig
from fedloom.platform.data.dataset import Dataset
from fedloom.platform.data.prepare import prepare_dataset
from fedloom.platform.federation.config import ExecutorConfig, RayConfig, RunConfig, TiersConfig
from fedloom.platform.federation.training_config import TrainingConfig
from fedloom.platform.methods.fedavg import FedAvgConfig
from fedloom.platform.runs.run import Watcher, make_serial, start_run
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
        space=SpaceConfig(name=f"fedloom.experiments.benchmarks.overhead:{case.network}"),
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


# -- two plain processes that share the clients, without the platform -------------------------------------------------


NETWORKS = {"cnn": TwoConvCnn, "logistic": Logistic, "tiny": TinyCnn}


def identity(x: torch.Tensor) -> torch.Tensor:
    """The only operator of the benchmark networks."""
    return x


def serve(pipe: Connection, case: Case, images: str, labels: str, mean: list[float], std: list[float]) -> None:
    """A worker process: receives weights and clients, trains the clients, sends the weighted sum of their weights."""
    torch.set_num_threads(1)
    x_all, y_all = (np.load(file, mmap_mode="r", allow_pickle=False) for file in (images, labels))
    model = NETWORKS[case.network](10)
    shift, scale = (torch.tensor(v).view(1, -1, 1, 1) for v in (mean, std))
    names = list(model.state_dict())
    pipe.send("ready")
    while (message := pipe.recv()) is not None:
        weights, clients = message
        total = [torch.zeros_like(torch.from_numpy(w)) for w in weights]
        for client in clients:
            rows = slice(client * case.samples, (client + 1) * case.samples)
            x = torch.from_numpy(x_all[rows].astype(np.float32)).div_(255).sub_(shift).div_(scale)
            y = torch.from_numpy(np.array(y_all[rows]))
            model.load_state_dict({n: torch.from_numpy(w) for n, w in zip(names, weights, strict=True)})
            optimizer = torch.optim.SGD(model.parameters(), lr=case.lr)
            for index in torch.split(torch.randperm(len(y)), case.batch_size):
                optimizer.zero_grad()
                F.cross_entropy(model(x[index], [identity]), y[index]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            for t, tensor in zip(total, model.state_dict().values(), strict=True):
                t.add_(tensor, alpha=case.samples)
        pipe.send([t.numpy() for t in total])


def plain_rounds(case: Case, dataset: str, mean: Sequence[float], std: Sequence[float]) -> list[float]:
    """Runs the case with two worker processes; returns the seconds of each round."""
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
    return seconds


# -- one variant, in this process -------------------------------------------------------------------------------------


def plain_figures(case: Case) -> dict[str, Any]:
    """Measures the case with two plain processes."""
    dataset = Dataset.open(prepare_dataset(run_config(case, 0, "").data))
    return {"rounds_s": plain_rounds(case, str(dataset.path), dataset.mean, dataset.std)[WARM_UP_ROUNDS:]}


def platform_figures(case: Case, actors: int, precision: str, *, memory: bool) -> dict[str, Any]:
    """Measures the case with the platform's own loop, tables and checkpoints; the loop runs in this process."""
    ends_s: list[float] = []
    bytes_after: dict[int, int] = {}

    def round_ended(progress: Any) -> None:
        ends_s.append(time.perf_counter())
        if memory and progress.round in (5, 50):
            ours = [pid for pid in descendants(os.getpid()) if not is_rays_own(pid)]
            bytes_after[progress.round] = sum(pss_bytes(pid) for pid in ours)

    watcher = Watcher(round=round_ended)
    with tempfile.TemporaryDirectory() as results:
        config = run_config(case, actors, results, precision)
        if actors:
            with connected(config.ray):
                start_run(config, make_pool, watcher)
        else:
            start_run(config, make_serial, watcher)
        assert os.listdir(results), "the run wrote its tables"
    if memory:
        return {"bytes_5": bytes_after[5], "bytes_50": bytes_after[50]}
    return {"rounds_s": [end - begun for begun, end in pairwise(ends_s)][WARM_UP_ROUNDS - 1 :]}


def variant_figures(case_name: str, variant: str) -> dict[str, Any]:
    """The figures of plain, serial, ray_1, ray_2, ray_2_bfloat16 or ray_2_memory, measured in this process."""
    stay_on_loopback("local")
    logging.disable(logging.WARNING)
    case = CASES[case_name]
    if variant == "plain":
        return plain_figures(case)
    actors = int(variant.split("_")[1]) if variant.startswith("ray") else 0
    precision = "bfloat16" if "bfloat16" in variant else "float32"
    return platform_figures(case, actors, precision, memory="memory" in variant)


# -- all variants -----------------------------------------------------------------------------------------------------


WARM_UP_ROUNDS = 2
VARIANTS = ("plain", "serial", "ray_1", "ray_2")
COMPARED = {"cnn": (*VARIANTS, "ray_2_bfloat16"), "logistic": VARIANTS, "tiny": VARIANTS}


def main() -> None:
    """Runs the cases and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=[*COMPARED, "memory"], choices=[*COMPARED, "memory"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(variant_figures(*args.one)))
        return
    print(json.dumps({case: flat_memory() if case == "memory" else compare(case, args.repeats) for case in args.cases}))


def compare(case: str, repeats: int) -> dict[str, Any]:
    """Measures all variants of a case, alternating between them."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in COMPARED[case]}
    for _ in range(repeats):
        for name in COMPARED[case]:
            runs[name].append(run_in_process(case, name))
    rounds_s = {name: median(s for run in of for s in run["rounds_s"]) for name, of in runs.items()}
    watched = {name: run_in_process(case, name, watch=True) for name in COMPARED[case]}
    peak, data = ({name: figures[part] for name, figures in watched.items()} for part in ("peak_bytes", "data_bytes"))
    plain_bytes = peak["plain"] - data["plain"]
    print(f"\n{case}: {CASES[case]}")
    heads = f"{'s/round':>9} {'ratio':>6} {'peak MB':>8} {'data MB':>8} {'ratio':>6} {'Ray MB':>7}"
    print(f"{'variant':<14} {heads}")
    table = {}
    for name, seconds in rounds_s.items():
        row = {
            "round_s": seconds,
            "ratio": seconds / rounds_s["plain"],
            "peak_bytes": peak[name],
            "data_bytes": data[name],
            "memory_ratio": (peak[name] - data[name]) / plain_bytes,
            "ray_bytes": watched[name]["ray_bytes"],
        }
        table[name] = row
        print(
            f"{name:<14} {seconds:>9.4f} {row['ratio']:>6.2f} {row['peak_bytes'] / 1e6:>8.0f} "
            f"{row['data_bytes'] / 1e6:>8.0f} {row['memory_ratio']:>6.2f} {row['ray_bytes'] / 1e6:>7.0f}"
        )
    return table


def flat_memory() -> dict[str, float]:
    """Measures the pool's memory after round 5 and after round 50."""
    result = run_in_process("long", "ray_2_memory")
    ratio = result["bytes_50"] / result["bytes_5"]
    early, late = (result[name] / 1e6 for name in ("bytes_5", "bytes_50"))
    print(f"\npool: {early:.0f} MB after round 5, {late:.0f} MB after round 50, ratio {ratio:.3f}")
    return {**result, "ratio": ratio}


def run_in_process(case: str, variant: str, watch: bool = False) -> dict[str, Any]:
    """Runs a variant in a separate process; with `watch` also measures its memory, which slows it down."""
    command = [sys.executable, "-m", "fedloom.experiments.benchmarks.overhead", "--one", case, variant]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    if not watch:
        out, _ = process.communicate()
        memory = {}
    else:
        with MemoryWatch(process.pid) as watched:
            out, _ = process.communicate()
        memory = {n: getattr(watched, n) for n in ("peak_bytes", "data_bytes", "ray_bytes")}
    if process.returncode:
        raise SystemExit(f"{case} {variant} failed with exit code {process.returncode}")
    figures: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return {**figures, **memory}


if __name__ == "__main__":
    main()
