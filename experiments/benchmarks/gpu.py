"""Clients on one GPU: steps per second, utilisation and memory, by the number of actors that share it, and in stacks.

    python -m fedloom.experiments.benchmarks.gpu [--cases fedavg] [--kinds plain] [--actors 1 4 8] [--small]
            [-- KEY=VALUE]

Every variant runs in a separate process, the most informative ones first. A case ends after `--limit` seconds: a
variant that is still running is stopped, those not begun are named, and all measured figures are printed.

`loop` trains the clients of a round with torch's own optimiser and nothing around it; `N processes` are N such loops at
once. `N actors` are whole runs of the platform with N client actors, each with its share of the GPU; `stacked` trains
several clients of the same network as one batch. Steps per second are those of the method's first stage, from the end
of its first round to the end of its last; `util` is the mean utilisation that nvidia-smi reports meanwhile; `run s` is
the time of a whole small run with all of its stages, including Ray's start. `peak MB` is the largest memory of a
client's work in any actor (on a CPU that of the process), `share` the memory that one actor may take.

`-- KEY=VALUE` is configuration for all cases, such as executor.precision=tf32. Prints a table for every case, followed
by a line with a JSON object, so that nothing is lost if a later case fails. Only ratios within one call are meaningful.
Without a GPU it ends with exit code 2; `--device cpu` runs the same on CPUs, to check that it works.
"""

import argparse
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from fedloom.actors.address import stay_on_loopback
from fedloom.actors.cluster import connected
from fedloom.actors.server import make_pool
from fedloom.experiments.benchmarks import steps
from fedloom.experiments.runs.configuration import compose_config
from fedloom.platform.clients.device import memory_of, peak_memory_bytes, reset_peak_memory
from fedloom.platform.clients.networks import MixedNetwork
from fedloom.platform.clients.trainer import Train
from fedloom.platform.clients.worker import Worker
from fedloom.platform.data.augment import augmentation
from fedloom.platform.federation.algorithm import RunState
from fedloom.platform.federation.world import build_world
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.results.tables import read_table
from fedloom.platform.runs.run import Watcher, start_run

BASE = "loop"
KINDS = ("plain", "actors", "stacked")
LIMIT_S = 480.0
EVERY_MS = 200
MANY_CLIENTS = 24
"""Clients of a round of the full benchmark: two for each of twelve actors."""

SEARCH = ["method.search.population=4", "method.search.offspring=2", "method.search.budget=6"]
TIERED = [f"method.{stage}.{key}" for stage in ("finetune", "rand_init") for key in ("rounds=1", "clients_per_round=2")]
LAST = ["tiers.count=1", "executor.kind=ray", "executor.failures.policy=tolerate", "executor.failures.max_share=1"]
CASES = {
    "fedavg": steps.CASES["fedavg"],
    "fedoras": [*steps.CASES["fedoras"], *SEARCH, *TIERED],
    "superfednas": [
        *steps.CASES["superfednas"],
        *("method.search.samples=12", "method.search.population=6", "method.search.generations=2"),
        *("method.search.min_tau=-1", "method.family=[smallest,largest]"),
    ],
    "spider": [*steps.CASES["spider"], "method.gains.epochs=0"],
}
"""Whole runs, with as little as possible after their first stage."""
SMALL = {"fedavg": ["space.stem_channels=8", "space.stage_layers=[1,2,2]", "space.stage_strides=[2,2,2]"]}
"""Overrides that shrink the networks of small cases, where these are not small already."""
STACKED = ("fedavg",)
"""Cases whose clients all train the same whole network."""
STACK = 8
COHORTS = ("fedoras", "superfednas", "fedavg")
"""Cases that select a cohort for each round; the silos of other cases all take part."""


def overrides_of(case: str, kind: str, number: int, device: str, small: bool) -> list[str]:
    """The configuration of a variant."""
    clients, samples, rounds = (4, 60, 3) if small else (MANY_CLIENTS, 500, 6)
    overrides = [
        *CASES[case],
        *(SMALL.get(case, ()) if small else ()),
        *LAST,
        f"data.num_clients={clients}",
        f"data.train_samples={clients * samples}",
    ]
    overrides += ["data.test_samples=100", "data.alpha=1000", f"method.train.rounds={rounds}"]
    overrides += [f"method.train.clients_per_round={clients}"] if case in COHORTS else []
    overrides += ["method.search.start=1", "method.search.every=1"] if case == "spider" else []
    overrides += [f"executor.stack_clients={STACK}"] if kind == "stacked" else ["executor.stack_clients=off"]
    overrides += ["ray.address=local", f"ray.num_cpus={number}", "ray.object_store_memory_bytes=1000000000"]
    if device == "cuda":
        return [*overrides, "ray.num_gpus=1", f"tiers.num_gpus=[{1 / number!r}]"]
    return [*overrides, f"executor.actors={number}"]


# -- whole runs -------------------------------------------------------------------------------------------------------


def platform(overrides: list[str], actors: int, device: str) -> dict[str, Any]:
    """Measures a run of the platform; the server's loop runs in this process."""
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
    """Measures processes that share the clients of the first round and train them at the same time."""
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
    figures = [answers.get() for _ in started]
    begun, ended = min(a["begun"] for a in figures), max(a["ended"] for a in figures)
    return {
        "steps_per_s": sum(a["steps"] for a in figures) / (ended - begun),
        "peak_bytes": max(a["peak_bytes"] for a in figures),
        "between": (begun, ended),
    }


def train_part(part: int, overrides: list[str], processes: int, device: str, barrier: Any, answers: Any) -> None:
    """The work of one of k processes: trains every k-th client of a round, twice, after one client to warm up."""
    torch.set_num_threads(1)
    try:
        world = build_world(compose_config(overrides))
        stage = build_stages(world)[0]
        state = stage.begin(RunState())
        plan = stage.plan(state)
        spec = replace(world.spec, device=device, device_bytes=memory_of(device, 1 / processes))
        worker, clients = Worker(spec), [a for a in plan.assignments if a.client_id is not None]
        weights = worker.uploaded(state.groups[plan.group].tensors)
        assignments = clients[part::processes] or clients[:1]
        train_plainly(worker, assignments[0], weights)
        reset_peak_memory(worker.device)
    except BaseException:
        barrier.abort()  # or the others would wait for it
        raise
    barrier.wait()
    begun = time.time()
    steps_made = sum(train_plainly(worker, client, weights) for _ in range(2) for client in assignments)
    peak_bytes = peak_memory_bytes(worker.device)
    answers.put({"steps": steps_made, "begun": begun, "ended": time.time(), "peak_bytes": peak_bytes})


def train_plainly(worker: Any, assignment: Any, weights: Any) -> int:
    """Trains a client's networks with torch's own SGD and cross entropy; returns the number of the platform's steps."""
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


# -- what nvidia-smi says ---------------------------------------------------------------------------------------------


class Utilisation:
    """Samples the GPU that torch calls 0, by nvidia-smi; there are no samples for other devices or without it."""

    def __init__(self, device: str) -> None:
        self._samples: list[tuple[float, float, float]] = []
        self._process: subprocess.Popen[str] | None = None
        self._wanted = device == "cuda"

    def __enter__(self) -> "Utilisation":
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
        query = ["--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits", f"--id={first}"]
        if self._wanted:
            try:
                self._process = subprocess.Popen(
                    ["nvidia-smi", *query, f"--loop-ms={EVERY_MS}"], stdout=subprocess.PIPE, text=True
                )
            except OSError:
                return self
            threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None, "it is piped"
        for line in process.stdout:
            if (sample := sample_of(line)) is not None:
                self._samples.append((time.time(), *sample))

    def between(self, begun: float, ended: float) -> dict[str, float | None]:
        """Mean utilisation in percent and the largest memory in use, between two times of `time.time`."""
        return summed_up([(used, memory) for at, used, memory in self._samples if begun <= at <= ended])


def sample_of(line: str) -> tuple[float, float] | None:
    """Utilisation in percent and memory in bytes from nvidia-smi's line, such as `37, 1024` (MiB); None for others."""
    try:
        used, memory_mib = (float(part) for part in line.split(","))
    except ValueError:  # [N/A], or a message
        return None
    return used, memory_mib * 2**20


def summed_up(samples: list[tuple[float, float]]) -> dict[str, float | None]:
    """The mean of the utilisations and the maximum of the memories; None if there are none."""
    if not samples:
        return {"utilisation": None, "device_bytes": None}
    return {
        "utilisation": sum(used for used, _ in samples) / len(samples),
        "device_bytes": max(memory for _, memory in samples),
    }


# -- all variants -----------------------------------------------------------------------------------------------------


def main() -> None:
    """Measures the cases and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS), help="plain needs no Ray")
    parser.add_argument("--actors", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="SECONDS", help="of a case, 480 if not given")
    parser.add_argument("--small", action="store_true", help="few clients with few samples")
    parser.add_argument("--one", nargs=3, metavar=("CASE", "KIND", "NUMBER"), help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="after --: configuration for all cases")
    args = parser.parse_args()
    if args.one:
        case, kind, number = args.one
        stay_on_loopback("local")
        logging.disable(logging.WARNING)
        overrides = [*overrides_of(case, kind, int(number), args.device, args.small), *args.overrides]
        measure = plain if kind == "plain" else platform
        print(json.dumps(measure(overrides, int(number), args.device)))
        return
    if args.device == "cuda" and not torch.cuda.is_available():
        print("torch sees no GPU on this machine: run it where there is one, or with --device cpu", file=sys.stderr)
        raise SystemExit(2)
    if not 1 <= min(args.actors) <= max(args.actors) <= MANY_CLIENTS:
        parser.error(f"--actors: give numbers from 1 to {MANY_CLIENTS}, the clients of a round")
    name = torch.cuda.get_device_name(0) if args.device == "cuda" else "cpu"
    about = {"device": name, "torch": torch.__version__, "small": args.small, "overrides": args.overrides}
    for case in args.cases:
        print(json.dumps({"case": case, **about, "variants": measured(case, args)}), flush=True)


def measured(case: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measures the variants of a case until its time is over, and prints their rows."""
    until = time.monotonic() + args.limit
    print(
        f"\n{case:<12} {'steps/s':>9} {'ratio':>6} {'util %':>7} {'run s':>7} {'peak MB':>8} {'share':>8} {'failed':>6}"
    )
    figures: dict[str, Any] = {}
    for name, variant in variants_of(case, args.actors, args.kinds).items():
        figures[name] = row = in_process(case, variant, args, until - time.monotonic())
        base = figures[BASE].get("steps_per_s")
        if base and row.get("steps_per_s"):
            row["ratio"] = row["steps_per_s"] / base
        cells = (
            (row.get("steps_per_s"), 9, 1),
            (row.get("ratio"), 6, 2),
            (row.get("utilisation"), 7, 0),
            (row.get("run_s"), 7, 1),
            (_mb(row.get("peak_bytes")), 8, 0),
            (_mb(row.get("share_bytes")), 8, 0),
            (row.get("failed"), 6, 0),
        )
        print(f"{name:<12} " + " ".join(_cell(*cell) for cell in cells), row.get("error", ""), flush=True)
    return figures


def variants_of(case: str, actors: list[int], kinds: Sequence[str] = KINDS) -> dict[str, list[str]]:
    """The variants of a case by name, as a kind and a number; the first is the base of all ratios."""
    variants = {
        "actors": {f"{k} actors" if k > 1 else "1 actor": ["actors", str(k)] for k in actors},
        "stacked": {f"{k} x stacked": ["stacked", str(k)] for k in actors[:2]} if case in STACKED else {},
        "plain": {f"{k} processes": ["plain", str(k)] for k in sorted(actors) if k > 1},
    }
    chosen = [named for kind, of_kind in variants.items() if kind in kinds for named in of_kind.items()]
    return {BASE: ["plain", "1"], **dict(chosen)}


def in_process(case: str, variant: list[str], args: argparse.Namespace, left_s: float) -> dict[str, Any]:
    """Runs a variant in a separate process; if it fails, or no time is left, the row says why."""
    if left_s <= 0:
        return {"error": f"not begun: the case has taken its {args.limit:g} s"}
    command = [sys.executable, "-m", "fedloom.experiments.benchmarks.gpu", "--one", case, *variant]
    command += ["--device", args.device, *(["--small"] if args.small else []), "--", *args.overrides]
    with Utilisation(args.device) as watched, group_of_processes(command) as process:
        try:
            out, err = process.communicate(timeout=left_s)
        except subprocess.TimeoutExpired:
            return {"error": f"ended: the case has taken its {args.limit:g} s"}
    lines = out.strip().splitlines()
    if process.returncode or not lines:
        last = (err.strip().splitlines() or ["it says nothing"])[-1]
        return {"error": f"exit code {process.returncode}: {last[:200]}"}
    figures: dict[str, Any] = json.loads(lines[-1])
    between = figures.pop("between")
    return {**figures, **watched.between(*between)}


@contextmanager
def group_of_processes(command: list[str]) -> Iterator["subprocess.Popen[str]"]:
    """Starts a process, which is killed with all of its children if it is still running when the block ends."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def _mb(size_bytes: float | None) -> float | None:
    return size_bytes / 1e6 if size_bytes else None


def _cell(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.{digits}f}"


if __name__ == "__main__":
    main()
