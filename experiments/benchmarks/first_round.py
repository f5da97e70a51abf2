"""Compares the time of the first round of every family of methods between two revisions of fedloom.

    python -m fedloom.experiments.benchmarks.first_round OLD_PYTHON NEW_PYTHON [--repeats 7]

Each argument is the Python of an environment in which a revision is installed. The revisions alternate; every run is a
separate process with the serial executor. Prints the median seconds of the first round and of the whole command, their
ratios new / old, and one JSON object on the last line. Only ratios within one call are meaningful. The first round is
not the last one, after which models are scored as well.
"""

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median

from fedloom.platform.results.tables import read_table

SERIAL = ["executor.kind=serial", "tiers.paths=2000"]
CASES = {
    "fedavg": ["method=fedavg", "data.dataset=digits", "method.train.rounds=2"],
    "fedoras": [
        "experiment=fedoras_digits",
        "method.train.rounds=2",
        "method.search.population=4",
        "method.search.offspring=2",
        "method.search.budget=6",
        "method.finetune.rounds=0",
        "method.rand_init.rounds=0",
    ],
    "superfednas": ["experiment=superfednas_digits", "method.train.rounds=2", "method.search.samples=0"],
    "spider": ["experiment=spider_digits", "method.train.rounds=2"],
}


def main() -> None:
    """Times the cases and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    figures = {}
    for case, overrides in CASES.items():
        seconds: dict[str, list[tuple[float, float]]] = {"old": [], "new": []}
        for _ in range(args.repeats + 1):
            for name in seconds:
                seconds[name].append(timed(getattr(args, name), [*overrides, *SERIAL]))
        # The first repeat is dropped, since it reads all files from disk.
        rounds, commands = ({n: median(s[i] for s in all_s[1:]) for n, all_s in seconds.items()} for i in (0, 1))
        figures[case] = {
            "round_s": rounds,
            "command_s": commands,
            "round": rounds["new"] / rounds["old"],
            "command": commands["new"] / commands["old"],
        }
        print(
            f"{case:12} first round {rounds['old']:.3f} s -> {rounds['new']:.3f} s ({figures[case]['round']:.3f}), "
            f"command {commands['old']:.2f} s -> {commands['new']:.2f} s ({figures[case]['command']:.3f})"
        )
    print(json.dumps(figures))


def timed(python: str, overrides: list[str]) -> tuple[float, float]:
    """Seconds of the first round, from the table `rounds`, and of the whole command."""
    with tempfile.TemporaryDirectory() as folder:
        command = [python, "-m", "fedloom.experiments.cli", "run", *overrides, f"results={folder}"]
        begun = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        command_s = time.perf_counter() - begun
        return float(read_table(Path(folder), "rounds")["wall_s"].iloc[0]), command_s


if __name__ == "__main__":
    main()
