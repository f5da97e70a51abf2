"""The time of a client's training step in every family of methods, by precision and memory format.

    python -m fedloom.experiments.benchmarks.steps [--cases fedoras spider] [--repeats 3] [--old PYTHON] [--profile]
    python -m fedloom.experiments.benchmarks.steps --cases fedavg --device cuda --variants "float32 auto" "stack 8"

Every variant trains clients of the preset's first stage in a separate process, on random data of CIFAR-10's shape, with
the bookkeeping of an executor; the variants alternate. Prints median milliseconds per step, with ratios to the first
variant (by default contiguous float32) or to the revision installed for the Python of `--old`, and one JSON object on
the last line. Only ratios within one call are meaningful. `stack 8` trains eight clients as one batch, for which all
must train the same whole network. `--profile` prints torch's most expensive operators instead.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from statistics import median
from typing import Any

DATA = ["data.dataset=synthetic", "executor.kind=serial", "tiers.paths=2000"]
CASES = {
    "fedoras": ["experiment=fedoras_cifar10_small", *DATA],
    "superfednas": ["experiment=superfednas_cifar10_small", *DATA],
    "spider": ["experiment=spider_cifar10_small", *DATA],
    "fedavg": [
        *("method=fedavg", "space.name=cnn_cifar", *DATA, "data.num_clients=24", "data.train_samples=4800"),
        "method.train.clients_per_round=24",
    ],
}
CLIENTS = 3
"""Clients, or stacks of them, per process, after one to warm up."""

BASE = "float32 contiguous"
VARIANTS = {
    BASE: ["executor.memory_format=contiguous"],
    "float32 auto": [],
    "float32 channels_last": ["executor.memory_format=channels_last"],
    "bfloat16 contiguous": ["executor.precision=bfloat16", "executor.memory_format=contiguous"],
    "bfloat16 auto": ["executor.precision=bfloat16"],
    "bfloat16 channels_last": ["executor.precision=bfloat16", "executor.memory_format=channels_last"],
    "tf32 contiguous": ["executor.precision=tf32", "executor.memory_format=contiguous"],
    "tf32 channels_last": ["executor.precision=tf32", "executor.memory_format=channels_last"],
    "float32 compiled": ["executor.compile=true", "executor.stack_clients=off"],
    "stack 8": ["executor.stack_clients=8"],
    "stack 24": ["executor.stack_clients=24"],
}
USUAL = list(VARIANTS)[:5]
"""The variants that differ on CPUs, for networks of every kind."""
OLD = "old"


def main() -> None:
    """Times or profiles the cases and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--variants", nargs="+", default=USUAL, choices=list(VARIANTS))
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--old", metavar="PYTHON", help="the Python of another revision, which is then the base")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measured(args.one, args.device, profile=args.profile)))
        return
    figures = {case: compared(case, args) for case in args.cases}
    print(json.dumps(figures))


def compared(case: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measures the variants of a case, alternating between them, and prints their ratios to the base."""
    variants = {name: (sys.executable, VARIANTS[name]) for name in args.variants}
    if args.old:
        variants = {OLD: (args.old, []), **variants}
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(1 if args.profile else args.repeats):
        for name, (python, overrides) in variants.items():
            command = [python, __file__, "--one", *CASES[case], *overrides, *(["--profile"] if args.profile else [])]
            command += [] if args.device == "cpu" else ["--device", args.device]  # other revisions may not know it
            out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            if args.profile:
                print(f"\n{case}, {name}\n{out}")
            times[name] += json.loads(out.strip().splitlines()[-1])
    medians = {name: median(of) for name, of in times.items()}
    base = medians[OLD if args.old else args.variants[0]]
    print(f"\n{case}: {'variant':<24} {'ms/step':>8} {'ratio':>6}")
    for name, ms in medians.items():
        print(f"{'':<{len(case)}}  {name:<24} {ms:>8.1f} {ms / base:>6.2f}", flush=True)
    return {"ms": medians, "ratio": {name: ms / base for name, ms in medians.items()}}


def measured(overrides: list[str], device: str, *, profile: bool) -> list[float]:
    """Milliseconds per step of each client, or of a client in each stack."""
    import torch

    from fedloom.experiments.runs.configuration import compose_config
    from fedloom.platform.clients.device import memory_of
    from fedloom.platform.clients.execution import Chunk, SharedWeights, run_chunk
    from fedloom.platform.clients.worker import Worker
    from fedloom.platform.federation.algorithm import RunState
    from fedloom.platform.federation.world import build_world
    from fedloom.platform.methods.registry import build_stages

    torch.set_num_threads(1)
    config = compose_config(overrides)
    stack = int(config.executor.stack_clients) if config.executor.stack_clients.isdigit() else 1
    world = build_world(config)
    stage = build_stages(world)[0]
    state = stage.begin(RunState())
    plan = stage.plan(state)
    spec = replace(world.spec, device=device, device_bytes=memory_of(device, 1.0))
    worker = Worker(spec)
    weights = SharedWeights(worker.uploaded(state.groups[plan.group].tensors), "v0")
    clients = [a for a in plan.assignments if a.client_id is not None]
    step_ms = []
    for number in range(CLIENTS + 1):
        at_work = tuple(clients[(number * stack + k) % len(clients)] for k in range(stack))
        chunk = Chunk(at_work[0].tier, at_work, stack=stack)
        if profile and number == CLIENTS:
            with torch.profiler.profile() as watch:
                run_chunk(worker, chunk, weights)
            by = "self_cpu_time_total" if device == "cpu" else "self_device_time_total"
            print(watch.key_averages().table(sort_by=by, row_limit=25, max_name_column_width=48))
            break
        results = run_chunk(worker, chunk, weights).client_results
        for result in results:
            if result.status != "ok" or result.fallback:
                raise SystemExit(result.traceback or result.error or result.fallback)
        step_ms.append(1e3 * sum(r.wall_s or 0.0 for r in results) / sum(r.steps for r in results))
    return step_ms[1:]


if __name__ == "__main__":
    main()
