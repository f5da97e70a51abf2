"""A long run of many clients that drop out and are late: every planned row is there, and memory stays flat.

    python -m fedloom.experiments.chaos.load            10 000 registered clients, 200 rounds

Prints the rows that are missing, how the training rounds' clients ended, and how the driver's memory grew from a tenth
of the training to its end, and then in the evaluation, which is a round of all clients.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

from fedloom.experiments.runs.configuration import compose_config
from fedloom.platform.data.arrays import Arrays
from fedloom.platform.data.config import DataConfig
from fedloom.platform.federation.loop import RoundProgress
from fedloom.platform.results.tables import read_table
from fedloom.platform.runs.run import Watcher, start_run
from fedloom.platform.runs.serial import make_serial

SETTLED = 0.1
"""The share of the rounds after which memory is taken for settled."""
TRAINING = "fedavg"
FATES = {"ok", "dropped", "timed_out"}
"""What becomes of the training rounds' clients."""


def main() -> None:
    """Makes the run and prints its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--cohort", type=int, default=20)
    args = parser.parse_args()
    memory: dict[str, list[int]] = {}

    def watch(progress: RoundProgress) -> None:
        memory.setdefault(progress.stage, []).append(resident_bytes())

    with tempfile.TemporaryDirectory() as folder:
        config = compose_config(overrides(args.clients, args.rounds, args.cohort, folder))
        start_run(config, make_serial, Watcher(round=watch))
        rounds, clients = (read_table(Path(folder), table) for table in ("rounds", "clients"))
    planned = int(rounds["clients_planned"].sum())
    training, evaluation = memory[TRAINING], memory["evaluation"]
    grown = training[-1] / training[int(SETTLED * len(training))]
    status = clients.loc[clients["stage"] == TRAINING, "status"].value_counts().to_dict()
    figures = {
        "attack": "load",
        "rounds": len(rounds),
        "planned": planned,
        "missing": planned - len(clients),
        "missing_rounds": args.rounds - len(training),
        "status": {str(name): int(count) for name, count in status.items()},
        "memory_grown": round(grown, 4),
        "by the evaluation": round(evaluation[-1] / training[-1], 4),
    }
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.exit(0 if figures["missing"] == figures["missing_rounds"] == 0 and grown < 1.05 and set(status) == FATES else 1)


def overrides(clients: int, rounds: int, cohort: int, results: str) -> list[str]:
    """Many clients of few samples, of which a tenth drops out and the slow ones miss the deadline."""
    return [
        "experiment=fedavg_digits",
        "data.dataset=fedloom.experiments.chaos.load:many",
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
