"""The baseline of the overhead benchmark: two plain processes that share the clients, without the platform."""

import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import numpy as np
import torch
from torch.nn import functional as F

from fedloom.experiments.benchmarks.cases import Case, Logistic, TinyCnn, TwoConvCnn

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
