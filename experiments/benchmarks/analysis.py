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

import numpy as np

from fedloom.experiments import analysis
from fedloom.experiments.benchmarks.processes import printed
from fedloom.platform.results.paths import list_runs
from fedloom.platform.results.tables import TABLES
from fedloom.platform.results.writer import RunWriter

REPEATS = 3

# -- a results folder of random numbers, written by the platform's own writer -----------------------------------------

EXPERIMENT = "generated"
TIERS = ("tier1", "tier2", "tier3", "tier4")
MODELS = {"supernet_init": 0.0, "fine_tuned": 0.1, "rand_init": -0.1}
"""Models, and how much their accuracy exceeds the supernet's."""
WEIGHTINGS = {"opa": 0.02, "fedavg": 0.0}
"""Values of `method.train.weighting`, between which the runs alternate, and their effect on accuracy."""
LEARNING_RATES = (0.01, 0.1)


def write_results(
    root: Path, runs: int, rounds: int, clients: int, *, candidates: int = 30, rows_per_file: int = 250_000
) -> list[str]:
    """Writes `runs` runs of `rounds` rounds with `clients` clients each; returns their ids.

    Four consecutive runs share a seed: two weightings with two learning rates.
    """
    ids = [f"g{i:04d}" for i in range(runs)]
    for i, run_id in enumerate(ids):
        weighting, lr = list(WEIGHTINGS)[i % 2], LEARNING_RATES[i // 2 % 2]
        writer = RunWriter.create(root, EXPERIMENT, run_id, flush_interval_s=60.0, rows_per_file=rows_per_file)
        _write(writer, seed=i // 4, weighting=weighting, lr=lr, rounds=rounds, clients=clients, candidates=candidates)
    return ids


def _write(
    writer: RunWriter, *, seed: int, weighting: str, lr: float, rounds: int, clients: int, candidates: int
) -> None:
    rng = np.random.default_rng([seed, list(WEIGHTINGS).index(weighting), LEARNING_RATES.index(lr)])
    seeds = dict.fromkeys(("partition", "initialisation", "selection", "training", "search"), seed)
    method = {"name": "fedoras", "train": {"weighting": weighting, "lr": lr, "rounds": rounds}, "search": {}}
    tiers = {"count": len(TIERS), "upper_bounds": None, "cost": "macs"}
    config = {"experiment": EXPERIMENT, "seed": seed, "dry_run": False, "method": method, "tiers": tiers}
    writer.update_run(method="fedoras", config=json.dumps(config), seeds=json.dumps(seeds), status="done")
    for round_ in range(rounds):
        _add_round(writer, round_, clients, rng)
        writer.commit()
    for tier in TIERS:
        _add_search(writer, tier, candidates, rng)
        _add_evaluation(writer, tier, WEIGHTINGS[weighting], clients, rng)
    writer.close()


def _add_round(writer: RunWriter, round_: int, clients: int, rng: np.random.Generator) -> None:
    where = {"stage": "supernet", "round": round_}
    loss, metric = 2.0 / (1 + round_) + 0.1 * rng.random(), rng.random()
    work = {"bytes_down": 4000 * clients, "bytes_up": 4000 * clients, "macs": 10**6 * clients, "wall_s": 0.1 * clients}
    counts = {"clients_planned": clients, "clients_ok": clients, "clients_failed": 0, "simulated_s": 2.0}
    writer.add("rounds", **where, **work, **counts, loss=loss, metric=metric)
    for client_id, (loss, metric, wall_s) in enumerate(rng.random((clients, 3)).tolist()):
        sent = {"bytes_down": 4000, "bytes_up": 4000, "macs": 10**6, "parameters": 1000, "samples": 100, "steps": 10}
        times = {"wall_s": wall_s, "overhead_s": 0.01, "simulated_s": 2.0 * wall_s, "peak_memory_bytes": 10**8}
        words = {"status": "ok", "device": "cpu", "tier": TIERS[client_id % len(TIERS)], "subspace": "0,1/2,3"}
        chosen = {"selection_reason": "uniform", "selection_probability": 0.1, "threads": 1, "attempts": 1}
        row = {**where, **sent, **times, **words, **chosen}
        writer.add("clients", client_id=client_id, loss=loss, metric=metric, **row)


def _add_search(writer: RunWriter, tier: str, candidates: int, rng: np.random.Generator) -> None:
    for i, quality in enumerate(rng.random(candidates).tolist()):
        macs = 10_000 * (i + 1)
        where = {"stage": f"search/{tier}", "round": 0, "tier": tier, "generation": i // 10, "feasible": True}
        costs = {"macs": macs, "parameters": 2 * macs, "architecture": f"{i}-0", "metric": 0.4 + 0.2 * quality}
        writer.add("candidates", **where, **costs, loss=1.0, on_front=False)


def _add_evaluation(writer: RunWriter, tier: str, bonus: float, clients: int, rng: np.random.Generator) -> None:
    for round_, (model, above) in enumerate(MODELS.items()):
        where = {"stage": "evaluation", "round": round_, "model": model, "tier": tier, "architecture": "0-0"}
        accuracy = 0.7 + above + bonus + 0.01 * rng.standard_normal()
        for metric, value in (("accuracy", accuracy), ("loss", 1.0 - accuracy)):
            writer.add("evaluations", **where, split="test", metric=metric, value=value, samples=1000)
            for client_id in range(clients):
                client_value = value + 0.05 * rng.standard_normal()
                row = {**where, "client_id": client_id, "split": "test", "metric": metric}
                writer.add("evaluations", **row, value=client_value, samples=10)
        model_row = {"stage": "evaluation", "round": round_, "tier": tier, "architecture": "0-0"}
        writer.add("models", **model_row, macs=10_000, parameters=20_000, file=f"{model}-{tier}", hash="0")


# -- its figures ------------------------------------------------------------------------------------------------------


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
    processes = [_in_process(root) for _ in range(REPEATS)]
    best = min(processes, key=lambda figures: float(figures["load_s"]) + float(figures["summary_s"]))
    figures = {**best, "peak_bytes": max(f["peak_bytes"] for f in processes), **files_of(root)}
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
