"""A published yardstick: seconds per round of pfl-research's CIFAR-10 case, in fedloom and in other frameworks.

    python -m fedloom.experiments.benchmarks.pfl_cell [--rounds 20] [--repeats 3] [--variants plain fedloom] [--small]

The case is `image_classification` of apple/pfl-research with configs/baseline.yaml (revision c9d1f32), with which
Granqvist et al. (2024, Tab. 1) compare frameworks: CIFAR-10, split uniformly over 1000 clients with 50 images each, of
whom 50 train in a round; one epoch in batches of 10, SGD at 0.1 without momentum; the server takes the plain mean of
the clients (its SGD at 1.0); a CNN of 1.6 M parameters with dropout.

`plain` is two processes with nothing around torch. `fedloom` is two Ray actors, with rows and a checkpoint every round.
`pfl` is pfl-research with two workers under torchrun (gloo), `flower` Flower's simulation with two clients at a time;
both are measured if they can be imported (`pip install pfl`, `pip install flwr[simulation]`), and were tried with pfl
0.6.0 and flwr 1.42.0. All use two processes of one thread each, the same network, images and kernels with the channels
last, the same clients and batch sizes. They differ in the order of the data: pfl-research, as in its own benchmark,
takes a client's images in the order in which they are stored, whereas the others shuffle them. None evaluates anything
in a round that counts; pfl-research's own benchmark evaluates the test set every ten rounds.

Every variant runs in a separate process, the variants alternate, and only ratios of medians within one call are
meaningful. The first round is left out. The accuracy is that of the last round's weights on the test set. Prints a
table, and one JSON object on the last line.
"""

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.experiments.benchmarks.cases import (
    NETWORKS,
    Case,
    identity,
    memory_format,
    normalised,
    plain_rounds,
    run_config,
    train_client,
)
from fedloom.experiments.benchmarks.processes import printed
from fedloom.platform.data.dataset import Dataset
from fedloom.platform.data.prepare import prepare_dataset
from fedloom.platform.federation.config import RunConfig

CASE = Case(
    network="pfl",
    clients=1000,
    cohort=50,
    samples=50,
    rounds=20,
    chunk_size=25,
    batch_size=10,
    lr=0.1,
    dataset="cifar10",
    channels_last=True,
)
SMALL = replace(CASE, clients=20, cohort=4, samples=20, chunk_size=1, dataset="synthetic")
PROCESSES = 2

Figures = dict[str, Any]
"""`rounds_s`, the seconds of every round but the first, and `accuracy`."""


def config_of(case: Case, results: str) -> RunConfig:
    """The case as a run on two actors that evaluates only the last weights, on the whole test set."""
    config = run_config(case, PROCESSES, results)
    data = replace(config.data, partition="iid", test_samples=None if case.dataset == "cifar10" else 100)
    method = replace(config.method, evaluate=True)
    method.evaluation.clients_per_tier = 0
    return replace(config, data=data, method=method)


@cache
def prepared(case: Case) -> Dataset:
    """The data that all variants read."""
    return Dataset.open(prepare_dataset(config_of(case, "").data))


def samples(dataset: Dataset, case: Case, part: str, rows: slice) -> tuple[Tensor, Tensor]:
    """Normalised images and their labels."""
    x, y = (np.load(dataset.path / f"{part}_{name}.npy", mmap_mode="r", allow_pickle=False)[rows] for name in "xy")
    x_NCHW = normalised(x, dataset.mean, dataset.std).contiguous(memory_format=memory_format(case))
    return x_NCHW, torch.from_numpy(np.array(y))


@cache
def network(case: Case) -> nn.Module:
    """The network of a process."""
    torch.set_num_threads(1)
    model: nn.Module = NETWORKS[case.network](10).to(memory_format=memory_format(case))
    return model


@torch.no_grad()
def accuracy(case: Case, weights: Mapping[str, Tensor]) -> float:
    """The share of the test set that these weights classify correctly."""
    model = network(case).eval()
    model.load_state_dict(weights)
    x, y = samples(prepared(case), case, "test", slice(None))
    hits = [
        model(x_B, [identity]).argmax(1) == y_B
        for x_B, y_B in zip(torch.split(x, 500), torch.split(y, 500), strict=True)
    ]
    return float(torch.cat(hits).float().mean())


def from_ends(ends_s: list[float]) -> list[float]:
    """The seconds of all rounds but the first."""
    return [end - begun for begun, end in pairwise(ends_s)]


# -- the variants, each in a process of its own -----------------------------------------------------------------------


def plain(case: Case) -> Figures:
    """Two processes that share the clients."""
    dataset = prepared(case)
    rounds_s, arrays = plain_rounds(case, str(dataset.path), dataset.mean, dataset.std)
    weights = zip(network(case).state_dict(), map(torch.from_numpy, arrays), strict=True)
    return {"rounds_s": rounds_s[1:], "accuracy": accuracy(case, dict(weights))}


def fedloom(case: Case) -> Figures:
    """A run on two actors; the server's loop is in this process."""
    from fedloom.actors.address import stay_on_loopback
    from fedloom.actors.cluster import connected
    from fedloom.actors.server import make_pool
    from fedloom.platform.methods.fedavg import MODEL
    from fedloom.platform.results.tables import read_table
    from fedloom.platform.runs.run import Watcher, start_run

    ends_s: list[float] = []
    stay_on_loopback("local")
    logging.disable(logging.WARNING)
    watcher = Watcher(round=lambda at: ends_s.append(time.perf_counter()) if at.stage == MODEL else None)
    with tempfile.TemporaryDirectory() as results:
        config = config_of(case, results)
        with connected(config.ray):
            start_run(config, make_pool, watcher)
        rows = read_table(Path(results), "evaluations")
    (share,) = rows[(rows["split"] == "test") & (rows["metric"] == "accuracy")]["value"]
    return {"rounds_s": from_ends(ends_s), "accuracy": float(share)}


def pfl(case: Case) -> Figures:
    """pfl-research, in each of torchrun's processes; the normalised images are in memory, as in its benchmark."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByUser
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network(case)

        def loss(self, x_B: Tensor, y_B: Tensor) -> Tensor:
            return F.cross_entropy(self.inner(x_B, [identity]), y_B)

        @torch.no_grad()
        def metrics(self, x_B: Tensor, y_B: Tensor) -> dict[str, Any]:
            return {"loss": Weighted(float(self.loss(x_B, y_B)) * len(y_B), len(y_B))}

    class Clock(TrainingProcessCallback):  # type: ignore[misc]  # of a framework without types
        def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Any]:
            ends_s.append(time.perf_counter())
            return False, Metrics()

    np.random.seed(0)  # noqa: NPY002  # its workers draw the same cohorts from the global generator
    torch.manual_seed(0)
    ends_s: list[float] = []
    x, y = samples(prepared(case), case, "train", slice(case.clients * case.samples))
    of_clients = dict(enumerate(zip(torch.split(x, case.samples), torch.split(y, case.samples), strict=True)))
    data = FederatedDataset.from_slices(of_clients, get_user_sampler("random", range(case.clients)))
    module = Network()
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), 1.0))
    FederatedAveraging().run(
        # In its first round, which is not counted, it scores the clients before and after training.
        algorithm_params=NNAlgorithmParams(case.rounds, case.rounds, case.cohort, 0),
        backend=SimulatedBackend(data, data, [WeightByUser()]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_learning_rate=case.lr, local_num_epochs=1, local_batch_size=case.batch_size
        ),
        callbacks=[Clock()],
    )
    return {"rounds_s": from_ends(ends_s), "accuracy": accuracy(case, module.inner.state_dict())}


def flower_client(case: Case, weights: Mapping[str, Tensor], client_id: int) -> dict[str, Tensor]:
    """The weights of a Flower client after its epoch."""
    model = network(case).train()
    model.load_state_dict(weights)
    train_client(
        *(model, case),
        *samples(prepared(case), case, "train", slice(client_id * case.samples, (client_id + 1) * case.samples)),
    )
    return model.state_dict()


def flower(case: Case) -> Figures:
    """Flower's simulation, with one CPU for a client."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client, server, ends_s = ClientApp(), ServerApp(), list[float]()
    last: dict[str, Tensor] = {}

    @client.train()  # type: ignore[untyped-decorator]
    def _(message: Any, context: Any) -> Any:
        weights = message.content["arrays"].to_torch_state_dict()
        trained = flower_client(case, weights, context.node_config["partition-id"])
        metrics = MetricRecord({"num-examples": case.samples})
        return Message(RecordDict({"arrays": ArrayRecord(trained), "metrics": metrics}), reply_to=message)

    @server.main()  # type: ignore[untyped-decorator]
    def _(grid: Any, _context: Any) -> None:
        share = case.cohort / case.clients
        strategy = FedAvg(fraction_train=share, fraction_evaluate=0.0, min_available_nodes=case.clients)
        first = ArrayRecord(network(case).state_dict())
        result = strategy.start(grid, first, num_rounds=case.rounds, evaluate_fn=ended)
        last.update(result.arrays.to_torch_state_dict())

    def ended(round_: int, _arrays: Any) -> None:
        if round_:
            ends_s.append(time.perf_counter())

    prepared(case)
    resources = {"num_cpus": 1, "num_gpus": 0.0}
    backend = {"client_resources": resources, "init_args": {"num_cpus": PROCESSES, "include_dashboard": False}}
    run_simulation(server, client, case.clients, backend_config=backend)
    return {"rounds_s": from_ends(ends_s), "accuracy": accuracy(case, last)}


VARIANTS: Mapping[str, Callable[[Case], Figures]] = {"plain": plain, "fedloom": fedloom, "pfl": pfl, "flower": flower}
OTHERS = {"pfl": "pfl", "flower": "flwr"}
"""The frameworks that need not be installed, and the modules that show whether they are."""


# -- all of them ------------------------------------------------------------------------------------------------------


def main() -> None:
    """Measures the variants and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=CASE.rounds, help="rounds of every variant, at least 2")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="a few clients with random data, to see that it runs")
    parser.add_argument("--one", choices=list(VARIANTS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rounds < 2 or args.repeats < 1:
        parser.error("give --rounds of at least 2, because the first one is left out, and --repeats of at least 1")
    case = replace(SMALL if args.small else CASE, rounds=args.rounds)
    if args.one:
        figures = VARIANTS[args.one](case)
        if os.environ.get("RANK", "0") == "0":  # of torchrun's processes
            print(json.dumps(figures), flush=True)
        return
    missing = [name for name in args.variants if name in OTHERS and find_spec(OTHERS[name]) is None]
    for name in missing:
        print(f"{name} is not measured: the module {OTHERS[name]} is not installed", file=sys.stderr)
    names = [name for name in args.variants if name not in missing]
    print(json.dumps({"case": asdict(case), "repeats": args.repeats, "variants": compared(names, args)}))


def compared(names: list[str], args: argparse.Namespace) -> dict[str, Figures]:
    """Measures the variants, alternating between them, and prints their medians; the first one is the base."""
    os.environ["OMP_NUM_THREADS"] = "1"
    runs: dict[str, list[Figures]] = {name: [] for name in names}
    for _ in range(args.repeats):
        for name in names:
            runs[name].append(printed(command(name, args)))
    print(f"\n{'variant':<10} {'s/round':>8} {'ratio':>6} {'accuracy':>8}")
    table: dict[str, Figures] = {}
    for name, of_name in runs.items():
        round_s = median(seconds for run in of_name for seconds in run["rounds_s"])
        base_s = table[names[0]]["round_s"] if table else round_s
        shares = [run["accuracy"] for run in of_name]
        table[name] = {"round_s": round_s, "ratio": round_s / base_s, "accuracy": shares}
        print(f"{name:<10} {round_s:>8.3f} {round_s / base_s:>6.2f} {median(shares):>8.3f}")
    return table


def command(name: str, args: argparse.Namespace) -> list[str]:
    """The command of a variant's process; pfl-research's are started by torchrun."""
    options = ["--one", name, "--rounds", str(args.rounds), *(["--small"] if args.small else [])]
    if name == "pfl":
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]
        return [sys.executable, *torchrun, "-m", "fedloom.experiments.benchmarks.pfl_cell", *options]
    # Imported under its own name instead of as __main__, so that Flower's processes find its functions.
    return [sys.executable, "-c", "from fedloom.experiments.benchmarks.pfl_cell import main; main()", *options]


if __name__ == "__main__":
    main()
