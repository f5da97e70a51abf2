"""Runs whose tables are written by hand, to be analysed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedloom.platform.results.writer import RunWriter


class Runs:
    """Writes runs into a folder of results."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def begin(self, run_id: str, seed: int, experiment: str = "demo", name: str = "fedavg", **train: Any) -> RunWriter:
        """A run that has trained for one round, with this seed and these keys of `method.train`."""
        writer = RunWriter.create(self.root, experiment, run_id)
        seeds = {"partition": 1, "training": seed}
        config = {"experiment": experiment, "seed": seed, "seeds": {}, "method": {"name": name, "train": train}}
        writer.update_run(config=json.dumps(config), seeds=json.dumps(seeds), status="done")
        work = {"bytes_down": 30, "bytes_up": 12, "macs": 7, "simulated_s": 0.5, "wall_s": 2.0 + seed}
        writer.add("rounds", stage="rand_init/tier1", round=0, clients_planned=2, loss=1.0, **work)
        writer.add("rounds", stage="evaluation", round=0, clients_planned=2, **(work | {"bytes_down": 10**6}))
        return writer

    def evaluate(
        self, writer: RunWriter, accuracy: float, model: str = "rand_init", tier: str = "tier1", **more: Any
    ) -> None:
        """The final accuracy of a model."""
        place = {"stage": "evaluation", "round": 0, "model": model, "tier": tier, "architecture": "0-1"}
        for metric, value in (("accuracy", accuracy), ("loss", 1 - accuracy)):
            row = {"split": "test", "metric": metric, "value": value, "samples": 10}
            writer.add("evaluations", **(place | row | more))

    def write(self, run_id: str, accuracy: float, seed: int, experiment: str = "demo", **train: Any) -> None:
        """A whole run with one model."""
        writer = self.begin(run_id, seed, experiment, **train)
        self.evaluate(writer, accuracy)
        kept = {"tier": "tier1", "architecture": "0-1", "macs": 50, "parameters": 100, "file": "f", "hash": "h"}
        writer.add("models", stage="evaluation", round=0, **kept)
        writer.close()

    def write_pairs(self) -> None:
        """OPA and FedAvg with three seeds each; the differences are 0.1, 0.2 and 0.05."""
        for seed, (opa, fedavg) in enumerate(((0.5, 0.4), (0.7, 0.5), (0.6, 0.55)), 1):
            self.write(f"a{seed}", fedavg, seed, weighting="fedavg", lr=0.1)
            self.write(f"b{seed}", opa, seed, weighting="opa", lr=0.1)


@pytest.fixture(scope="session")
def runs_in() -> Callable[[Path], Runs]:
    """Writes runs into a folder of results: for runs that several tests look at."""
    return Runs


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    """Writes runs into this test's folder of results."""
    return Runs(tmp_path)
