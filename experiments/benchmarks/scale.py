"""How the platform's own work grows: with registered clients, cohorts, rounds, the supernet's size, and actors.

    python -m fedloom.experiments.benchmarks.scale [--parts registered cohorts rounds supernets actors]
        [--repeats 3] [--folder FOLDER] [--small]

Clients do nothing (`noop`): what is measured is the real loop, executor, recorder, tables and checkpoints. Every case
runs in a separate process, one at a time, and figures are medians over repeats. Prints a table per part, the constants
of `scale_model` if the parts that they come from are there, and one JSON object with all figures on the last line. Only
ratios within one call are meaningful. Results and checkpoints are written to FOLDER, by default the system's temporary
one; with a folder in memory (/dev/shm) the time is the platform's alone, without that of waiting for the disk.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from typing import Any

from fedloom.experiments.benchmarks.scale_case import ScaleCase
from fedloom.experiments.benchmarks.scale_model import server_of
from fedloom.experiments.benchmarks.scale_parts import LARGE, SMALL, Figures, rows_of


def main() -> None:
    """Measures the parts and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=[*LARGE], default=[*LARGE])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", help="where results, checkpoints and prepared data are written")
    parser.add_argument("--small", action="store_true", help="a few small cases per part, to see that all of it works")
    args = parser.parse_args()
    figures: dict[str, list[dict[str, float]]] = {}
    for part in args.parts:
        cases = (SMALL if args.small else LARGE)[part]
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            figures[part] = rows_of(part, cases, measured(cases, args.repeats, folder))
        print_table(part, figures[part])
    server = server_of(figures)
    if server is not None:
        print(f"\n{server}")
    print(json.dumps({**figures, **({} if server is None else {"server": asdict(server)})}))


def measured(cases: list[ScaleCase], repeats: int, folder: str) -> list[list[Figures]]:
    """The figures of every case in every repeat; in a repeat all cases follow each other."""
    return [[run_in_process(case, folder) for case in cases] for _ in range(repeats)]


def run_in_process(case: ScaleCase, folder: str) -> Figures:
    """Runs a case in a separate process."""
    command = [sys.executable, "-m", "fedloom.experiments.benchmarks.scale_case", json.dumps(asdict(case)), folder]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{case} failed with exit code {done.returncode}")
    figures: Figures = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


def print_table(part: str, rows: list[dict[str, float]]) -> None:
    """The rows of a part, with as many digits as their size needs."""
    print(f"\n{part}")
    widths = {name: max(len(name), 9) + 2 for name in rows[0]}
    print("".join(f"{name:>{width}}" for name, width in widths.items()))
    for row in rows:
        print("".join(f"{_short(row[name]):>{width}}" for name, width in widths.items()), flush=True)


def _short(value: Any) -> str:
    if isinstance(value, str) or value is None:
        return value or "-"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


if __name__ == "__main__":
    main()
