"""Runs one variant of the GPU benchmark and prints its figures as JSON.

gpu_variant CASE plain|actors|stacked NUMBER cuda|cpu small|full [KEY=VALUE ...]
"""

import json
import logging
import multiprocessing
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedloom.actors.address import stay_on_loopback
from fedloom.experiments.benchmarks import steps

MANY_CLIENTS = 24
"""Clients of a round of the full benchmark: two for each of twelve actors."""

SEARCH = ["method.search.population=4", "method.search.offspring=2", "method.search.budget=6"]
TIERED = [f"method.{stage}.{key}" for stage in ("finetune", "rand_init") for key in ("rounds=1", "clients_per_round=2")]
LAST = ["tiers.count=1", "executor.kind=ray", "executor.failures.policy=tolerate", "executor.failures.max_share=1"]
CASES = {
    "fedoras": [*steps.CASES["fedoras"], *SEARCH, *TIERED],
    "superfednas": [
        *steps.CASES["superfednas"],
        *("method.search.samples=12", "method.search.population=6", "method.search.generations=2"),
        *("method.search.min_tau=-1", "method.family=[smallest,largest]"),
    ],
    "spider": [*steps.CASES["spider"], "method.gains.epochs=0"],
    "fedavg": steps.CASES["fedavg"],
}
"""Whole runs, with as little as possible after their first stage."""
SMALL = {"fedavg": ["space.stem_channels=8", "space.stage_layers=[1,2,2]", "space.stage_strides=[2,2,2]"]}
"""What makes the networks of small cases small, where they are not."""
STACKED = ("fedavg",)
"""Cases whose clients all train the same whole network."""
STACK = 8
COHORTS = ("fedoras", "superfednas", "fedavg")
"""Cases that choose clients for a round; silos all take part."""


def overrides_of(case: str, kind: str, number: int, device: str, small: bool) -> list[str]:
    """The configuration of a variant."""
    clients, samples, rounds = (4, 60, 3) if small else (MANY_CLIENTS, 500, 6)
    given = [
        *CASES[case],
        *(SMALL.get(case, ()) if small else ()),
        *LAST,
        f"data.num_clients={clients}",
        f"data.train_samples={clients * samples}",
    ]
    given += ["data.test_samples=100", "data.alpha=1000", f"method.train.rounds={rounds}"]
    given += [f"method.train.clients_per_round={clients}"] if case in COHORTS else []
    given += ["method.search.start=1", "method.search.every=1"] if case == "spider" else []
    given += [f"executor.stack_clients={STACK}"] if kind == "stacked" else ["executor.stack_clients=off"]
    given += ["ray.address=local", f"ray.num_cpus={number}", "ray.object_store_memory_bytes=1000000000"]
    if device == "cuda":
        return [*given, "ray.num_gpus=1", f"tiers.num_gpus=[{1 / number!r}]"]
    return [*given, f"executor.actors={number}"]


def main() -> None:
    """Runs the variant that the arguments name."""
    case, kind, number, device, size, *more = sys.argv[1:]
    stay_on_loopback("local")
    logging.disable(logging.WARNING)
    overrides = [*overrides_of(case, kind, int(number), device, size == "small"), *more]
    measure = plain if kind == "plain" else platform
    print(json.dumps(measure(overrides, int(number), device)))


# -- whole runs -------------------------------------------------------------------------------------------------------


def platform(overrides: list[str], actors: int, device: str) -> dict[str, Any]:
    """Measures a run of the platform; the server's loop runs in this process."""
    from fedloom.actors.client import memory_of
    from fedloom.actors.cluster import connected
    from fedloom.actors.server import make_pool
    from fedloom.experiments.runs.configuration import compose_config
    from fedloom.platform.results.tables import read_table
    from fedloom.platform.runs.run import Watcher, start_run

    ends: list[tuple[str, float]] = []
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as results:
        config = replace(compose_config(overrides), results=results)
        with connected(config.ray):
            watcher = Watcher(lambda *_: None, lambda progress: ends.append((progress.stage, time.time())))
            start_run(config, make_pool, watcher)
        run_s = time.perf_counter() - begun
        rows = read_table(Path(results), "clients")
    times = [at for stage, at in ends if stage == ends[0][0]]
    counted = rows[(rows["stage"] == ends[0][0]) & (rows["round"] > 0) & (rows["status"] == "ok")]
    return {
        "steps_per_s": float(counted["steps"].sum()) / (times[-1] - times[0]),
        "run_s": run_s,
        "peak_bytes": int(rows["peak_memory_bytes"].max()),
        "share_bytes": memory_of("cuda:0" if device == "cuda" else "cpu", 1 / actors) or None,
        "failed": int((rows["status"] == "failed").sum()),
        "devices": sorted({str(name) for name in rows["device"]}),
        "between": (times[0], times[-1]),
    }


# -- plain loops ------------------------------------------------------------------------------------------------------


def plain(overrides: list[str], processes: int, device: str) -> dict[str, Any]:
    """Measures so many processes that train the clients of the first round at the same time."""
    from fedloom.experiments.runs.configuration import compose_config
    from fedloom.platform.federation.world import build_world

    build_world(compose_config(overrides))  # prepares the data, which the processes then find
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(processes), context.Queue()
    arguments = (overrides, processes, "cuda:0" if device == "cuda" else "cpu", barrier, answers)
    started = [context.Process(target=train_part, args=(part, *arguments)) for part in range(processes)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    if any(process.exitcode for process in started):
        raise SystemExit("a plain process failed")
    found = [answers.get() for _ in started]
    begun, ended = min(a["begun"] for a in found), max(a["ended"] for a in found)
    return {
        "steps_per_s": sum(a["steps"] for a in found) / (ended - begun),
        "peak_bytes": max(a["peak_bytes"] for a in found),
        "between": (begun, ended),
    }


def train_part(part: int, overrides: list[str], processes: int, device: str, barrier: Any, answers: Any) -> None:
    """A process: trains every so manieth client of a round, twice, after one to warm up."""
    import torch

    from fedloom.actors.client import memory_of
    from fedloom.experiments.runs.configuration import compose_config
    from fedloom.platform.clients.device import peak_memory_bytes, reset_peak_memory
    from fedloom.platform.clients.worker import Worker
    from fedloom.platform.federation.algorithm import RunState
    from fedloom.platform.federation.world import build_world
    from fedloom.platform.methods.registry import build_stages

    torch.set_num_threads(1)
    try:
        world = build_world(compose_config(overrides))
        stage = build_stages(world)[0]
        state = stage.begin(RunState())
        plan = stage.plan(state)
        spec = replace(world.spec, device=device, device_bytes=memory_of(device, 1 / processes))
        worker, clients = Worker(spec), [a for a in plan.assignments if a.client_id is not None]
        weights = worker.uploaded(state.groups[plan.group].tensors)
        own = clients[part::processes] or clients[:1]
        train_plainly(worker, own[0], weights)
        reset_peak_memory(worker.device)
    except BaseException:
        barrier.abort()  # or the others would wait for it
        raise
    barrier.wait()
    begun = time.time()
    steps_made = sum(train_plainly(worker, client, weights) for _ in range(2) for client in own)
    peak_bytes = peak_memory_bytes(worker.device)
    answers.put({"steps": steps_made, "begun": begun, "ended": time.time(), "peak_bytes": peak_bytes})


def train_plainly(worker: Any, assignment: Any, weights: Any) -> int:
    """Trains a client's networks with torch's own SGD and cross entropy; returns the number of the platform's steps."""
    import torch
    from torch.nn import functional as F

    from fedloom.platform.clients.networks import MixedNetwork
    from fedloom.platform.clients.trainer import Train
    from fedloom.platform.data.augment import augmentation

    task = assignment.task
    local, augment, generator = task.local, augmentation(task.local.augment), torch.Generator().manual_seed(1)
    x, y = worker.client_data(assignment.client_id, "train")
    # A silo of SPIDER trains two networks, and counts the steps of both.
    networks = [task.network] if isinstance(task, Train) else [MixedNetwork(), MixedNetwork()]
    made = 0
    for described in networks:
        network = described.on(worker, assignment)
        worker.load(network.module, weights, network.slices)
        network.module.train()
        optimiser = torch.optim.SGD(
            network.module.parameters(), lr=local.lr, momentum=local.momentum, weight_decay=local.weight_decay
        )
        for _ in range(local.epochs):
            for index in torch.split(torch.randperm(len(y), generator=generator).to(x.device), local.batch_size):
                x_B = x[index] if augment is None else augment(x[index], generator)
                optimiser.zero_grad()
                F.cross_entropy(network.forward(x_B), y[index]).backward()  # type: ignore[no-untyped-call]
                optimiser.step()
                made += 1
    if x.is_cuda:
        torch.cuda.synchronize()
    return made


if __name__ == "__main__":
    main()
