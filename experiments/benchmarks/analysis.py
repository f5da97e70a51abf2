"""Time and memory to load and summarise a large results folder.

    python -m fedloom.experiments.benchmarks.analysis [--runs 200] [--rounds 500] [--clients 10] [--folder FOLDER]

Generates the folder (unless FOLDER holds runs), then loads and summarises it three times, each in a separate process,
and prints a table and one JSON object with all figures on the last line. Times exclude the start of Python and pandas;
`cpu_s` is the process's CPU time, which other work on the machine hardly affects.
"""

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fedloom.experiments import analysis
from fedloom.experiments.benchmarks.generated import write_results
from fedloom.experiments.benchmarks.processes import printed
from fedloom.platform.results.paths import list_runs
from fedloom.platform.results.tables import TABLES

REPEATS = 3


def main() -> None:
    """Generates the folder and measures; with --measure, in the child processes, measures once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure)))
        return
    with tempfile.TemporaryDirectory() as folder:
        root = args.folder or Path(folder)
        if not list_runs(root):
            write_results(root, args.runs, args.rounds, args.clients)
        print(json.dumps(figures_of(root)))


def figures_of(root: Path) -> dict[str, Any]:
    """The figures of a folder: the times of the fastest of `REPEATS` processes, and the largest memory of any."""
    found = [_in_process(root) for _ in range(REPEATS)]
    best = min(found, key=lambda figures: float(figures["load_s"]) + float(figures["summary_s"]))
    figures = {**best, "peak_bytes": max(f["peak_bytes"] for f in found), **files_of(root)}
    print(f"{'runs':>6} {'client rows':>12} {'load s':>7} {'summary s':>10} {'CPU s':>6} {'peak MB':>8} {'files':>6}")
    print(
        f"{figures['runs']:>6} {figures['client_rows']:>12} {figures['load_s']:>7.2f} {figures['summary_s']:>10.2f} "
        f"{figures['cpu_s']:>6.2f} {figures['peak_bytes'] / 1e6:>8.0f} {figures['most_files_per_table_and_run']:>6}"
    )
    return figures


def files_of(root: Path) -> dict[str, int]:
    """The number of files of all tables, and the maximum per table and run."""
    counts = [len(list(run.table(table).glob("*.parquet"))) for run in list_runs(root) for table in TABLES]
    return {"files": sum(counts), "most_files_per_table_and_run": max(counts)}


def measure(root: Path) -> dict[str, float]:
    """Loads all tables and summarises them, in this process."""
    marks = [(time.perf_counter(), time.process_time())]
    tables = analysis.load(root)
    marks.append((time.perf_counter(), time.process_time()))
    rows = len(analysis.summary(tables))
    marks.append((time.perf_counter(), time.process_time()))
    (start, cpu), (loaded, _), (end, cpu_end) = marks
    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "runs": len(tables.paths),
        "client_rows": len(tables.clients),
        "summary_rows": rows,
        "load_s": loaded - start,
        "summary_s": end - loaded,
        "cpu_s": cpu_end - cpu,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
    }


def _in_process(root: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "fedloom.experiments.benchmarks.analysis", "--measure", os.fspath(root)]
    figures: dict[str, Any] = printed(command)
    return figures


if __name__ == "__main__":
    main()
