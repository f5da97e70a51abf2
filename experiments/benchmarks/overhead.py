"""The platform's overhead: the same FedAvg round in plain processes, with the serial executor, and with Ray actors.

    python -m fedloom.experiments.benchmarks.overhead [--case cnn|logistic|tiny|registered|cohort|memory|all]
        [--repeats 3]

Prints tables, and one JSON object with all figures on the last line. Every variant runs in a separate process, the
variants alternate, and only ratios of medians within one call are meaningful. The time of a round is the time between
two finished rounds: it includes planning, communication, training, averaging, table rows and checkpoint. The ratio of
memory leaves out the pages of the data set, which are the kernel's to drop: plain clients have neighbouring samples,
fedloom's are spread over the file as a partition by labels spreads them, and so touch more of it.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from statistics import median
from typing import Any

from fedloom.experiments.benchmarks.cases import CASES
from fedloom.experiments.benchmarks.processes import MemoryWatch

VARIANTS = ("plain", "serial", "ray_1", "ray_2")
COMPARED = {"cnn": (*VARIANTS, "ray_2_bfloat16"), "logistic": VARIANTS, "tiny": VARIANTS}


def main() -> None:
    """Runs the cases and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="all", choices=[*COMPARED, "registered", "cohort", "memory", "all"])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    for case in COMPARED:
        if args.case in (case, "all"):
            figures[case] = compare(case, args.repeats)
    if args.case in ("registered", "all"):
        figures["registered"] = registered(args.repeats)
    if args.case in ("cohort", "all"):
        figures["cohort"] = cohorts(args.repeats)
    if args.case in ("memory", "all"):
        figures["memory"] = flat_memory()
    print(json.dumps(figures))


def compare(case: str, repeats: int) -> dict[str, Any]:
    """Measures all variants of a case, alternating between them."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in COMPARED[case]}
    for _ in range(repeats):
        for name in COMPARED[case]:
            runs[name].append(run_in_process(case, name))
    rounds_s = {name: median(s for run in of for s in run["rounds_s"]) for name, of in runs.items()}
    watched = {name: run_in_process(case, name, watch=True) for name in COMPARED[case]}
    peak, data = ({name: found[part] for name, found in watched.items()} for part in ("peak_bytes", "data_bytes"))
    plain_bytes = peak["plain"] - data["plain"]
    print(f"\n{case}: {CASES[case]}")
    heads = f"{'s/round':>9} {'ratio':>6} {'start s':>8} {'peak MB':>8} {'data MB':>8} {'ratio':>6} {'Ray MB':>7}"
    print(f"{'variant':<14} {heads}")
    table = {}
    for name, seconds in rounds_s.items():
        row = {
            "round_s": seconds,
            "ratio": seconds / rounds_s["plain"],
            "start_s": median(run["start_s"] for run in runs[name]),
            "peak_bytes": peak[name],
            "data_bytes": data[name],
            "memory_ratio": (peak[name] - data[name]) / plain_bytes,
            "ray_bytes": watched[name]["ray_bytes"],
        }
        table[name] = row
        print(
            f"{name:<14} {seconds:>9.4f} {row['ratio']:>6.2f} {row['start_s']:>8.1f} {row['peak_bytes'] / 1e6:>8.0f} "
            f"{row['data_bytes'] / 1e6:>8.0f} {row['memory_ratio']:>6.2f} {row['ray_bytes'] / 1e6:>7.0f}"
        )
    return table


def registered(repeats: int) -> dict[str, float]:
    """Measures the same round with 100 and with 100 000 registered clients."""
    few, many = serial_rounds_s(("registered_100", "registered_100000"), repeats)
    print(
        f"\nregistered clients: 100 {few * 1e3:.2f} ms/round, 100 000 {many * 1e3:.2f} ms/round, ratio {many / few:.3f}"
    )
    return {"round_s_100": few, "round_s_100000": many, "ratio": many / few}


def cohorts(repeats: int) -> dict[str, float]:
    """Measures the time per client of a round of 200 and of a round of 2000 tiny clients."""
    names = ("cohort_200", "cohort_2000")
    seconds = serial_rounds_s(names, repeats)
    few, many = (each_s / CASES[name].cohort for name, each_s in zip(names, seconds, strict=True))
    print(f"\ncohorts: of 200 {few * 1e6:.0f} us/client, of 2000 {many * 1e6:.0f} us/client, ratio {many / few:.3f}")
    return {"client_s_200": few, "client_s_2000": many, "ratio": many / few}


def serial_rounds_s(cases: Sequence[str], repeats: int) -> list[float]:
    """The median seconds of the cases' rounds on the serial executor, alternating between them."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name in cases:
            seconds[name] += run_in_process(name, "serial")["rounds_s"]
    return [median(each) for each in seconds.values()]


def flat_memory() -> dict[str, float]:
    """Measures the pool's memory after round 5 and after round 50."""
    result = run_in_process("long", "ray_2_memory")
    ratio = result["bytes_50"] / result["bytes_5"]
    early, late = (result[name] / 1e6 for name in ("bytes_5", "bytes_50"))
    print(f"\npool: {early:.0f} MB after round 5, {late:.0f} MB after round 50, ratio {ratio:.3f}")
    return {**result, "ratio": ratio}


def run_in_process(case: str, variant: str, watch: bool = False) -> dict[str, Any]:
    """Runs a variant in a separate process; with `watch` also measures its memory, which slows it down."""
    command = [sys.executable, "-m", "fedloom.experiments.benchmarks.variant", case, variant]
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
