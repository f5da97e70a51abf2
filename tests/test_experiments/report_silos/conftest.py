"""Runs of three silos whose tables are written by hand, to be reported."""

import copy
import json
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar

import pytest
from rich.console import Console

from fedloom.experiments.analysis.silos import silo_summaries
from fedloom.experiments.analysis.tables import load
from fedloom.experiments.report.cells import darts_space_of
from fedloom.experiments.report.runs import summary_table
from fedloom.platform.results.writer import RunWriter
from fedloom.platform.spaces.darts import DartsSpace

CONFIG: dict[str, Any] = {
    "experiment": "spider_tiny",
    "seed": 1,
    "dry_run": False,
    "data": {"dataset": "digits", "num_clients": 3},
    "executor": {"kind": "serial"},
    "tiers": {"count": 1, "upper_bounds": None, "cost": "macs"},
    "space": {"name": "darts_s2_small", "channels": 4},
    "method": {
        "name": "spider",
        "search": {"kind": "perturbation", "start": 1, "every": 1},
        "train": {"rounds": 4, "lr": 0.1},
    },
}


class SiloWriter(RunWriter):
    """Writes the rows of three silos."""

    def add_training(
        self, subspaces: Sequence[Sequence[str]], *, stage: str = "spider", validated: bool = True
    ) -> None:
        """Rounds of three silos; `subspaces` per round and silo, a loss of 2 / (round + 1) plus the silo's number."""
        for i, of_silos in enumerate(subspaces):
            work = {"clients_planned": 3, "bytes_down": 30, "bytes_up": 60, "macs": 9, "simulated_s": 1.0}
            self.add("rounds", stage=stage, round=i, wall_s=1.5, loss=1.0, metric=0.5, **work)
            for silo, subspace in enumerate(of_silos):
                measured = {"loss": 2.0 / (i + 1) + silo, "metric": 0.5, "peak_memory_bytes": 1000 * (silo + 1) + i}
                place = {"stage": stage, "round": i, "client_id": silo}
                self.add("clients", **place, subspace=subspace, status="ok", parameters=70, **measured)
                if validated:
                    row = {**place, "model": "personal", "split": "validation", "samples": 5}
                    self.add("evaluations", **row, metric="accuracy", value=0.1 * i + 0.1 * silo)
                    self.add("evaluations", **row, metric="loss", value=1.0)

    def add_model(
        self, model: str, accuracies: Sequence[float], architectures: Sequence[str], samples: int = 10
    ) -> None:
        """The final evaluation of a model on every silo: parameters are 100, 200, ..., MACs ten times that."""
        for silo, (accuracy, architecture) in enumerate(zip(accuracies, architectures, strict=True)):
            place = {"stage": "evaluation", "round": 0, "model": model, "tier": "tier1", "client_id": silo}
            for metric, value in (("accuracy", accuracy), ("loss", 1 - accuracy)):
                row = {"split": "test", "metric": metric, "value": value, "samples": samples}
                self.add("evaluations", **place, architecture=architecture, **row)
            for metric, cost in (("parameters", 100 * (silo + 1)), ("macs", 1000 * (silo + 1))):
                self.add("evaluations", **place, architecture=architecture, metric=metric, value=cost)

    def add_gains(self, matrix: Mapping[tuple[int, int], float]) -> None:
        """p_ij by (i, j)."""
        self.add("rounds", stage="gains", round=0, wall_s=100.0, clients_planned=3, bytes_down=999, bytes_up=999)
        for (i, j), accuracy in matrix.items():
            self.add("clients", stage="gains", round=0, client_id=i, status="ok", loss=77.0, peak_memory_bytes=10**9)
            row = {"stage": "gains", "round": 0, "client_id": i, "split": "test", "samples": 10}
            self.add("evaluations", **row, model=f"silo-{j}", metric="accuracy", value=accuracy)
            self.add("evaluations", **row, model=f"silo-{j}", metric="loss", value=9.0)


class SiloRuns:
    """Writes runs into a folder of results, and reads what is said of them."""

    UNDECIDED = "/".join(["0,1"] * 10)
    HALF = "/".join(["0"] * 5 + ["0,1"] * 5)
    DECIDED = "0/1/1/0//1/1/0/0/1"
    OTHER = DECIDED[::-1]
    SUBSPACES = (UNDECIDED, HALF, DECIDED, DECIDED)
    """After each round of a tiny run."""
    MATRIX: ClassVar[Mapping[tuple[int, int], float]] = {
        (0, 0): 0.9, (0, 1): 0.7, (0, 2): 0.8,
        (1, 0): 0.5, (1, 1): 0.8, (1, 2): 0.6,
        (2, 0): 0.6, (2, 1): 0.7, (2, 2): 0.6,
    }  # fmt: skip
    """p_ij by (i, j)."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def begin(self, run_id: str, experiment: str = "spider_tiny", status: str = "done", **changes: Any) -> SiloWriter:
        """Writes how a run is configured, and leaves its rows to the caller; `changes` are those of `config`."""
        writer = SiloWriter.create(self.root, experiment, run_id)
        settings = config(**changes)
        tiers = json.dumps([{"tier": "tier1", "upper": 100.0, "clients": 3}])
        writer.update_run(config=json.dumps(settings), status=status, method=settings["method"]["name"], tiers=tiers)
        return writer

    def spider(self, run_id: str, better: float = 0.0, *, gains: bool = True, **changes: Any) -> None:
        """A whole run of SPIDER, its personal models by so much more accurate."""
        writer = self.begin(run_id, **changes)
        writer.add_training([(s,) * 3 for s in self.SUBSPACES])
        personal = [0.5 + better, 0.7 + better, 0.9 + better]
        writer.add_model("personal", personal, [self.DECIDED, self.OTHER, self.DECIDED])
        writer.add_model("global", [0.4, 0.5, 0.6], [self.UNDECIDED] * 3)
        if gains:
            writer.add_gains(self.MATRIX)
        writer.close()

    def fixed(self, run_id: str, method: str = "knn_per", model: str = "personal") -> None:
        """A method with a network of one architecture and no search."""
        changes = {"method": {"name": method, "train": {"rounds": 2}}, "space__name": "resnet18"}
        writer = self.begin(run_id, method, **changes)
        writer.add_training([("0",) * 3] * 2, stage="fedavg", validated=False)
        writer.add_model(model, [0.3, 0.4, 0.5], ["0"] * 3)
        if method == "knn_per":
            row = {"stage": "evaluation", "round": 0, "model": model, "client_id": 1}
            writer.add("evaluations", **row, metric="neighbour_share", value=0.4)
        writer.close()

    def values(self, *run_ids: str) -> dict[str, Any]:
        """The means of the one setting that these runs have."""
        (summary,) = silo_summaries(load(self.root, list(run_ids)))
        return {name: None if v is None else v.mean for name, v in summary.values.items()}

    def summary(self, run_ids: Sequence[str] | str) -> str:
        """What is shown of these runs in a terminal."""
        console = Console(width=150, file=StringIO(), record=True)
        console.print(summary_table(self.root, run_ids))
        return console.export_text()


def config(**changes: Any) -> dict[str, Any]:
    """CONFIG with values changed by dotted keys, their dots written as two underscores."""
    changed = copy.deepcopy(CONFIG)
    for key, value in changes.items():
        *path, last = key.split("__")
        place = changed
        for part in path:
            place = place[part]
        place[last] = value
    return changed


@pytest.fixture
def silos(tmp_path: Path) -> SiloRuns:
    """Writes runs into this test's folder of results."""
    return SiloRuns(tmp_path)


@pytest.fixture(scope="session")
def darts_space() -> DartsSpace:
    """The space of these runs."""
    space = darts_space_of(CONFIG)
    assert space is not None
    return space
