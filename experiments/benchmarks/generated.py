"""Generates results folders of any size with the platform's own writer, from random numbers without training."""

import json
from pathlib import Path

import numpy as np

from fedloom.platform.results.writer import RunWriter

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
    place = {"stage": "supernet", "round": round_}
    loss, metric = 2.0 / (1 + round_) + 0.1 * rng.random(), rng.random()
    work = {"bytes_down": 4000 * clients, "bytes_up": 4000 * clients, "macs": 10**6 * clients, "wall_s": 0.1 * clients}
    counts = {"clients_planned": clients, "clients_ok": clients, "clients_failed": 0, "simulated_s": 2.0}
    writer.add("rounds", **place, **work, **counts, loss=loss, metric=metric)
    for client_id, (loss, metric, wall_s) in enumerate(rng.random((clients, 3)).tolist()):
        sent = {"bytes_down": 4000, "bytes_up": 4000, "macs": 10**6, "parameters": 1000, "samples": 100, "steps": 10}
        times = {"wall_s": wall_s, "overhead_s": 0.01, "simulated_s": 2.0 * wall_s, "peak_memory_bytes": 10**8}
        words = {"status": "ok", "device": "cpu", "tier": TIERS[client_id % len(TIERS)], "subspace": "0,1/2,3"}
        chosen = {"selection_reason": "uniform", "selection_probability": 0.1, "threads": 1, "attempts": 1}
        row = {**place, **sent, **times, **words, **chosen}
        writer.add("clients", client_id=client_id, loss=loss, metric=metric, **row)


def _add_search(writer: RunWriter, tier: str, candidates: int, rng: np.random.Generator) -> None:
    for i, quality in enumerate(rng.random(candidates).tolist()):
        macs = 10_000 * (i + 1)
        place = {"stage": f"search/{tier}", "round": 0, "tier": tier, "generation": i // 10, "feasible": True}
        costs = {"macs": macs, "parameters": 2 * macs, "architecture": f"{i}-0", "metric": 0.4 + 0.2 * quality}
        writer.add("candidates", **place, **costs, loss=1.0, on_front=False)


def _add_evaluation(writer: RunWriter, tier: str, bonus: float, clients: int, rng: np.random.Generator) -> None:
    for round_, (model, above) in enumerate(MODELS.items()):
        place = {"stage": "evaluation", "round": round_, "model": model, "tier": tier, "architecture": "0-0"}
        accuracy = 0.7 + above + bonus + 0.01 * rng.standard_normal()
        for metric, value in (("accuracy", accuracy), ("loss", 1.0 - accuracy)):
            writer.add("evaluations", **place, split="test", metric=metric, value=value, samples=1000)
            for client_id in range(clients):
                own = value + 0.05 * rng.standard_normal()
                row = {**place, "client_id": client_id, "split": "test", "metric": metric}
                writer.add("evaluations", **row, value=own, samples=10)
        kept = {"stage": "evaluation", "round": round_, "tier": tier, "architecture": "0-0"}
        writer.add("models", **kept, macs=10_000, parameters=20_000, file=f"{model}-{tier}", hash="0")
