"""Clients on one GPU: steps per second, utilisation and memory, by the number of actors that share it, and in stacks.

    python -m fedloom.experiments.benchmarks.gpu [--cases fedoras fedavg] [--actors 1 2 4 8 12] [--small] [-- KEY=VALUE]

Every variant runs in a separate process. `loop` trains the clients of a round with torch's own optimiser and nothing
around it, `N processes` are so many of these at once. `N actors` are whole runs of the platform with so many client
actors, each with its share of the GPU; `stacked` trains clients of one network as one batch. Steps per second count
from the end of the first round to that of the last one of the method's first stage; `util` is the mean of what
nvidia-smi says meanwhile; `run s` is a whole small run with all of its stages, Ray's start included. `peak MB` is the
largest memory of a client's work in any actor (on a CPU the process's), `share` what one may take.

`-- KEY=VALUE` is configuration for all cases, such as executor.precision=tf32. Prints a table and one JSON object on
the last line. Only ratios within one call are meaningful. Without a GPU it ends with exit code 2; `--device cpu` runs
the same on processors, which shows that it runs.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from typing import Any

import torch

from fedloom.experiments.benchmarks.gpu_variant import CASES, MANY_CLIENTS, STACKED

EVERY_MS = 200


class Utilisation:
    """Samples of the GPU that torch calls 0; none for other devices, or without nvidia-smi."""

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
    """Percent and bytes of a line of nvidia-smi, such as `37, 1024` (MiB); None for what is no sample."""
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


BASE = "loop"


def main() -> None:
    """Measures the cases and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--actors", nargs="+", type=int, default=[1, 2, 4, 8, 12])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--small", action="store_true", help="few clients with few samples")
    parser.add_argument("overrides", nargs="*", help="after --: configuration for all cases")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("torch sees no GPU on this machine: run it where there is one, or with --device cpu", file=sys.stderr)
        raise SystemExit(2)
    if not 1 <= min(args.actors) <= max(args.actors) <= MANY_CLIENTS:
        parser.error(f"--actors: give numbers from 1 to {MANY_CLIENTS}, the clients of a round")
    figures = {case: measured(case, args) for case in args.cases}
    name = torch.cuda.get_device_name(0) if args.device == "cuda" else "cpu"
    print(json.dumps({"device": name, "torch": torch.__version__, "small": args.small, "cases": figures}))


def measured(case: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measures all variants of a case and prints their rows."""
    print(
        f"\n{case:<12} {'steps/s':>9} {'ratio':>6} {'util %':>7} {'run s':>7} {'peak MB':>8} {'share':>8} {'failed':>6}"
    )
    figures: dict[str, Any] = {}
    for name, variant in variants_of(case, args.actors).items():
        figures[name] = row = in_process(case, variant, args)
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


def variants_of(case: str, actors: list[int]) -> dict[str, list[str]]:
    """The variants of a case by name, as arguments of `gpu_variant`; the first is the base of all ratios."""
    plain = {BASE if k == 1 else f"{k} processes": ["plain", str(k)] for k in sorted({1, *actors})}
    pools = {f"{k} actors" if k > 1 else "1 actor": ["actors", str(k)] for k in actors}
    stacks = {f"{k} x stacked": ["stacked", str(k)] for k in actors[:2]} if case in STACKED else {}
    return {**plain, **pools, **stacks}


def in_process(case: str, variant: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Runs a variant in a process of its own; one that fails is a row that says why."""
    command = [sys.executable, "-m", "fedloom.experiments.benchmarks.gpu_variant", case, *variant, args.device]
    command += ["small" if args.small else "full", *args.overrides]
    with Utilisation(args.device) as watched:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        return {"error": f"exit code {done.returncode}: {last[:200]}"}
    figures: dict[str, Any] = json.loads(lines[-1])
    between = figures.pop("between")
    return {**figures, **watched.between(*between)}


def _mb(size_bytes: float | None) -> float | None:
    return size_bytes / 1e6 if size_bytes else None


def _cell(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.{digits}f}"


if __name__ == "__main__":
    main()
