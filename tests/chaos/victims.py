"""Runs of a few seconds that are attacked, and the comparison with an undisturbed one."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from fedloom.platform.results.tables import TABLES, TIME_COLUMNS, read_table

TINY = (
    "experiment=fedoras_digits",
    "method.train.rounds=6",
    "method.train.clients_per_round=4",
    "method.train.epochs=1",
    "method.search.population=4",
    "method.search.offspring=2",
    "method.search.budget=8",
    "method.finetune.rounds=2",
    "method.rand_init.rounds=2",
    "tiers.paths=500",
    "tiers.count=2",
    "method.finetune.clients_per_round=4",
    "method.rand_init.clients_per_round=4",
)
TINY_ELASTIC = (
    "experiment=superfednas_digits",
    "space.stage_widths=[16,24]",
    "space.stage_strides=[2,2]",
    "space.depths=[1,1]",
    "space.expansions=[0.5,1.0,1.5]",
    "tiers.count=2",
    "tiers.paths=500",
    "method.train.rounds=4",
    "method.train.epochs=1",
    "method.train.clients_per_round=6",
    "method.family=[smallest,largest]",
    "method.search.samples=20",
    "method.search.min_tau=-1",
    "method.search.population=10",
    "method.search.generations=3",
)
RAY = ("executor.kind=ray", "executor.actors=1", "ray.address=local", "ray.num_cpus=2")
SERIAL = ("executor.kind=serial",)
_ROUND = re.compile(r"^(\S+)\s+(\d+)/(\d+) ", re.MULTILINE)


@dataclass(frozen=True)
class Ended:
    """A command that has ended, with what it printed."""

    code: int
    out: str
    err: str

    @property
    def rounds(self) -> int:
        """How many rounds were told as finished."""
        return len(_ROUND.findall(self.out))

    @property
    def has_traceback(self) -> bool:
        """Whether a user would see a traceback, or the stack of a crash."""
        return any(word in self.out + self.err for word in ("Traceback (most", "*** SIG", "Fatal Python"))


FEDLOOM = "fedloom.experiments.cli"


def start(command: Sequence[str], folder: Path, name: str, module: str = FEDLOOM) -> subprocess.Popen[bytes]:
    """Starts `fedloom COMMAND`, or another module, in a session of its own, with its output in files of the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name}.out", "wb") as out, open(folder / f"{name}.err", "wb") as err:
        return subprocess.Popen(
            [sys.executable, "-m", module, *command],
            stdout=out,
            stderr=err,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
        )


def ended(process: subprocess.Popen[bytes], folder: Path, name: str, most_s: float = 300.0) -> Ended:
    """Waits for a command; one that does not end is killed, with code 124."""
    try:
        code = process.wait(most_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        code = 124
    return Ended(code, *((folder / f"{name}.{kind}").read_text(errors="replace") for kind in ("out", "err")))


def called(command: Sequence[str], folder: Path, name: str, most_s: float = 300.0, module: str = FEDLOOM) -> Ended:
    """Runs `fedloom COMMAND`, or another module, to its end."""
    return ended(start(command, folder, name, module), folder, name, most_s)


def frames(root: Path, run_id: str) -> dict[str, pd.DataFrame]:
    """A run's tables without what depends on time, machine and the run's own id."""
    apart = {"experiment", "run_id", "config", "ablation", "trial", "setting"}
    found = {table: read_table(root, table, run_id=run_id) for table in TABLES}
    return {t: f.drop(columns=[c for c in f if c in TIME_COLUMNS[t] or c in apart]) for t, f in found.items()}


def same(one: dict[str, pd.DataFrame], other: dict[str, pd.DataFrame]) -> bool:
    """Whether two runs have the same rows."""
    return all(one[table].equals(other[table]) for table in TABLES)
