"""A long run of many clients that drop out and are late: every planned row is there, and memory stays flat.

    PYTHONPATH=tests python -m chaos.load            10 000 registered clients, 200 rounds

Prints the rows that are missing, how the training rounds' clients ended, and how the driver's memory grew from a tenth
of the training to its end, and then in the evaluation, which is a round of all clients. Of a run that was continued by
several calls it is the most that memory grew in a call with so many rounds that it had settled.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from chaos.attack import command_line, is_over
from fedloom.experiments.runs.configuration import compose_config
from fedloom.platform.data.arrays import Arrays
from fedloom.platform.data.config import DataConfig
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.loop import InterruptedRunError, RoundProgress
from fedloom.platform.results.files import write_atomically
from fedloom.platform.results.paths import list_runs
from fedloom.platform.results.tables import read_table
from fedloom.platform.runs.run import Watcher, make_serial, resume_run, start_run

SETTLED = 0.1
"""The share of the rounds after which memory is taken for settled."""
TRAINING = "fedavg"
FATES = {"ok", "dropped", "timed_out"}
"""What becomes of the training rounds' clients."""
MOST_GROWN = 1.05


def main() -> None:
    """Makes the run, or goes on with it, and prints its figures."""
    parser = command_line(__doc__)
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--cohort", type=int, default=20)
    args = parser.parse_args()
    folder = args.folder / f"load-{args.clients}-{args.rounds}-{args.cohort}"
    config = compose_config(overrides(args.clients, args.rounds, args.cohort, str(folder / "results")))
    memory = gone_on(config, args)
    grown = most_grown(folder / "memory.json", growth(memory, args.rounds))
    figures = {"attack": "load", **rows_of(Path(config.results), args.rounds), **grown}
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.exit(0 if is_right(figures, args.rounds) else 1)


def gone_on(config: RunConfig, args: argparse.Namespace) -> dict[str, list[int]]:
    """Goes on with the run until it ends or the time is over; the memory after every round, by stage."""
    memory: dict[str, list[int]] = {}

    def watch(progress: RoundProgress) -> None:
        memory.setdefault(progress.stage, []).append(resident_bytes())

    watcher = Watcher(round=watch, should_stop=is_over(args))
    begun = list_runs(Path(config.results))
    with suppress(InterruptedRunError):
        if begun:
            resume_run(config, begun[0].run_id, make_serial, watcher)
        else:
            start_run(config, make_serial, watcher)
    return memory


def growth(memory: Mapping[str, list[int]], rounds: int) -> dict[str, float]:
    """How memory grew in this call, without what its rounds were too few to tell."""
    training, evaluation = memory.get(TRAINING, []), memory.get("evaluation", [])
    settled = int(SETTLED * rounds)
    found = {}
    if len(training) > settled:
        found["memory_grown"] = round(training[-1] / training[settled], 4)
    if training and evaluation:
        found["by the evaluation"] = round(evaluation[-1] / training[-1], 4)
    return found


def most_grown(path: Path, found: Mapping[str, float]) -> dict[str, float]:
    """The greatest growth of this call and those before it, which the file keeps."""
    known: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
    most = known | {name: max(value, known.get(name, value)) for name, value in found.items()}
    write_atomically(path, json.dumps(most).encode(), durable=False)
    return most


def rows_of(results: Path, rounds_in_all: int) -> dict[str, Any]:
    """The rows that there are, and those that are missing in the rounds that were made."""
    rounds, clients = (read_table(results, table) for table in ("rounds", "clients"))
    planned, trained = int(rounds["clients_planned"].sum()), rounds.loc[rounds["stage"] == TRAINING, "round"]
    is_done = (rounds["stage"] != TRAINING).any()
    status = clients.loc[clients["stage"] == TRAINING, "status"].value_counts().to_dict()
    return {
        "rounds": len(rounds),
        "planned": planned,
        "missing": planned - len(clients),
        "missing_rounds": (rounds_in_all if is_done else int(trained.max()) + 1) - len(trained),
        "status": {str(name): int(count) for name, count in status.items()},
    }


def is_right(figures: Mapping[str, Any], rounds: int) -> bool:
    """Whether no row is missing, memory is flat, and clients ended in all ways, if there were rounds enough for it."""
    fates = set(figures["status"])
    whole = figures["missing"] == figures["missing_rounds"] == 0
    flat = figures.get("memory_grown", 1.0) < MOST_GROWN
    return whole and flat and (fates == FATES or (fates < FATES and figures["rounds"] < rounds))


def overrides(clients: int, rounds: int, cohort: int, results: str) -> list[str]:
    """Many clients of few samples, of which a tenth drops out and the slow ones miss the deadline."""
    return [
        "experiment=fedavg_digits",
        "data.dataset=chaos.load:many",
        f"data.options.clients={clients}",
        "data.partition=natural",
        f"data.num_clients={clients}",
        f"method.train.rounds={rounds}",
        f"method.train.clients_per_round={cohort}",
        "method.train.epochs=1",
        "method.train.evaluate_every=50",
        "devices.dropout=0.1",
        "tiers.device_table=generated",
        "devices.deadline_s=1.3",
        "tiers.paths=500",
        f"results={results}",
    ]


def many(_config: DataConfig, *, clients: int = 10_000, samples: int = 8) -> Arrays:
    """Images (n, 8, 8) of noise with labels, a few samples per client, and a test sample for each."""
    rng = np.random.default_rng(0)
    parts = []
    for each in (samples, 1):
        client = np.repeat(np.arange(clients), each)
        images = rng.integers(0, 17, (len(client), 8, 8), dtype=np.uint8)
        parts.append((images, rng.integers(0, 10, len(client)), np.char.mod("%05d", client)))
    return Arrays(train=parts[0], test=parts[1], class_names=[str(n) for n in range(10)], scale=16)


def resident_bytes() -> int:
    """The memory that this process has now."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
