"""The platform's overhead: the same FedAvg round in plain processes, with the serial executor, and with Ray actors.

    python -m fedloom.experiments.benchmarks.overhead [--cases cnn logistic tiny memory] [--repeats 3]

Prints tables, and one JSON object with all figures on the last line. Every variant runs in a separate process, the
variants alternate, and only ratios of medians within one call are meaningful. The time of a round is the time between
two finished rounds: it includes planning, communication, training, averaging, table rows and checkpoint. The memory
ratio leaves out the pages of the data set, which the kernel may drop: plain clients have neighbouring samples, whereas
a partition by labels spreads the samples of fedloom's clients over the file, so that more of it is read.

`memory` is the pool's memory after round 5 and after round 50; `scale` measures how a round grows with registered
clients and cohorts.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from statistics import median
from typing import Any

from fedloom.actors.address import stay_on_loopback
from fedloom.actors.cluster import connected
from fedloom.actors.server import make_pool
from fedloom.experiments.benchmarks.cases import CASES, WARM_UP_ROUNDS, Case, run_config
from fedloom.experiments.benchmarks.processes import MemoryWatch, descendants, is_rays_own, pss_bytes
from fedloom.platform.runs.run import Watcher, make_serial, start_run

# -- one variant, in this process -------------------------------------------------------------------------------------


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
    """The figures of serial, ray_1, ray_2, ray_2_bfloat16 or ray_2_memory, measured in this process."""
    stay_on_loopback("local")
    logging.disable(logging.WARNING)
    case = CASES[case_name]
    actors = int(variant.split("_")[1]) if variant.startswith("ray") else 0
    precision = "bfloat16" if "bfloat16" in variant else "float32"
    return platform_figures(case, actors, precision, memory="memory" in variant)


# -- all variants -----------------------------------------------------------------------------------------------------


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
    part = ["cases", case] if variant == "plain" else ["overhead", "--one", case, variant]
    command = [sys.executable, "-m", f"fedloom.experiments.benchmarks.{part[0]}", *part[1:]]
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
