"""What is struck: a run, an ablation, a search, an export or a report; how each goes on, and what it must end with."""

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from chaos.victims import RAY, SERIAL, TINY, TINY_ELASTIC, Ended, called, frames, same
from fedloom.experiments.store.ablations import ablation_ids, find_ablation
from fedloom.platform.results.files import content_hash
from fedloom.platform.results.paths import list_runs

AXES = "axes:\n  lr: {key: method.train.lr, values: [0.1, 0.05]}\nseeds: [1]\n"
OUT = "out"
UNDISTURBED = "undisturbed"
"""The folder in which a command was not disturbed."""
SHARED = "serial"
"""The folder of the serial runs that several attacks begin with and are compared with."""

Frames = dict[str, pd.DataFrame]
Outcome = Callable[[Path, Sequence[Ended]], Any]
"""What a command has left in its folder and said, without times; None if it is not done."""


@dataclass(frozen=True)
class Subject:
    """A command that is struck.

    Attributes:
        first: the command in an attempt's folder.
        again: the command that goes on after `first` was struck.
        outcome: what must be the same as that of an undisturbed command.
        alike: compares two outcomes.
        start: prepares an attempt's folder.
    """

    name: str
    first: Callable[[Path], list[str]]
    again: Callable[[Path], list[str]]
    outcome: Outcome
    alike: Callable[[Any, Any], bool] = field(default=lambda one, other: bool(one == other))
    start: Callable[[Path], None] = field(default=lambda folder: folder.mkdir(parents=True, exist_ok=True))


@dataclass(frozen=True)
class Expected:
    """What an undisturbed command ended with, and how long it took."""

    outcome: Any
    seconds: float


def undisturbed(subject: Subject, folder: Path) -> Expected:
    """What the subject ends with; the command is called once per folder."""
    place, kept = folder / UNDISTURBED, folder / f"{UNDISTURBED}.json"
    if not kept.exists():
        shutil.rmtree(place, ignore_errors=True)
        subject.start(place)
        begun = time.monotonic()
        end = called(subject.first(place), place, "first")
        if end.code:
            raise RuntimeError(f"the undisturbed {subject.name} ended with {end.code}: {end.err[-300:]}")
        kept.write_text(json.dumps({"seconds": time.monotonic() - begun}))
    end = Ended(0, *((place / f"first.{kind}").read_text() for kind in ("out", "err")))
    return Expected(subject.outcome(place, [end]), json.loads(kept.read_text())["seconds"])


def subjects(folder: Path) -> dict[str, Subject]:
    """All of them; `folder` keeps the trained run that is searched, exported and reported on."""
    executor = SERIAL if os.environ.get("CHAOS_EXECUTOR") == "serial" else RAY
    trained = Trained(folder / "trained")
    found = [
        run_on(executor),
        Subject("ablate", _ablate, _ablate_again, _trials, _same, _with_axes),
        trained.subject("search", ["--macs", "103000", "--macs", "230000", "--json"], said),
        trained.subject("export", ["--tier", "tier1", "--out", OUT], _models),
        trained.subject("report", ["--out", OUT], _files),
    ]
    return {subject.name: subject for subject in found}


# -- a run -------------------------------------------------------------------------------------------------------------


def run_on(executor: Sequence[str], tiny: Sequence[str] = TINY) -> Subject:
    """A tiny run with these keys of the executor; its outcome is its tables."""
    return Subject("run", lambda f: _run(f, executor, tiny), lambda f: _run_again(f, executor), _rows, _same)


def _run(folder: Path, executor: Sequence[str], tiny: Sequence[str] = TINY) -> list[str]:
    return ["run", *tiny, *executor, f"results={folder / 'results'}"]


def _run_again(folder: Path, executor: Sequence[str]) -> list[str]:
    """Resumes the run; one that never began is started again."""
    begun = sorted(path.name for path in (folder / "results" / "artifacts").glob("*"))
    return ["resume", begun[0], "--results", str(folder / "results"), *executor] if begun else _run(folder, executor)


def _rows(folder: Path, _: Sequence[Ended]) -> Frames | None:
    runs = list_runs(folder / "results")
    return frames(folder / "results", runs[0].run_id) if len(runs) == 1 else None


def _same(one: Frames | None, other: Frames | None) -> bool:
    return one is not None and other is not None and same(one, other)


# -- an ablation -------------------------------------------------------------------------------------------------------


def _with_axes(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "axes.yaml").write_text(AXES)


def _ablate(folder: Path) -> list[str]:
    cluster = [value for value in RAY if value.startswith("ray.")]
    return ["ablate", f"ablation={folder / 'axes.yaml'}", *TINY, *SERIAL, *cluster, f"results={folder / 'results'}"]


def _ablate_again(folder: Path) -> list[str]:
    planned = ablation_ids(folder / "results")
    results = ["--results", str(folder / "results")]
    return ["ablate", "--resume", planned[0], *results] if planned else _ablate(folder)


def _trials(folder: Path, _: Sequence[Ended]) -> Frames | None:
    """The tables of all trials, one after the other."""
    if len(ablation_ids(folder / "results")) != 1:
        return None
    trials = find_ablation(folder / "results", "").trials
    parts = [frames(folder / "results", trial.run_id) for trial in trials]
    joined = {table: pd.concat([part[table] for part in parts], ignore_index=True) for table in parts[0]}
    return {table: frame.drop(columns="supernet_run_id", errors="ignore") for table, frame in joined.items()}


# -- what is done with a trained run -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """A run that has ended, made when it is first needed, and copied for every attempt."""

    folder: Path

    def subject(self, name: str, arguments: Sequence[str], outcome: Outcome) -> Subject:
        """A command that reads the run; it is called again from the beginning, and the run must be as it was."""

        def command(folder: Path) -> list[str]:
            (run,) = list_runs(folder / "results")
            own = [str(folder / OUT) if value == OUT else value for value in arguments]
            return [name, run.run_id, *own, "--results", str(folder / "results")]

        def checked(folder: Path, ends: Sequence[Ended]) -> Any:
            (run,) = list_runs(folder / "results")
            whole = called(["verify", run.run_id, "--results", str(folder / "results")], folder, "verify")
            return outcome(folder, ends) if whole.code == 0 else None

        return Subject(name, command, command, checked, start=self._copy)

    def _copy(self, folder: Path) -> None:
        if not (self.folder / "results").exists():
            part = self.folder / "part"
            shutil.rmtree(part, ignore_errors=True)
            end = called(["run", *TINY_ELASTIC, *SERIAL, f"results={part}"], self.folder, "trained")
            if end.code:
                raise RuntimeError(f"the run to be searched ended with {end.code}: {end.err[-300:]}")
            part.rename(self.folder / "results")
        shutil.copytree(self.folder / "results", folder / "results")


def said(_: Path, ends: Sequence[Ended]) -> Any:
    """What a search has found."""
    found = json.loads(ends[-1].out)
    return [found["found"], found["not_found"]]


def _models(folder: Path, _: Sequence[Ended]) -> Any:
    """The exported files and those of them that are the same each time."""
    files = _files(folder, _)
    fixed = {name: digest for name, digest in files.items() if name.endswith((".safetensors", ".pt2"))}
    return sorted(files), fixed


def _files(folder: Path, _: Sequence[Ended]) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): content_hash(path.read_bytes())
        for path in sorted((folder / OUT).rglob("*"))
        if path.is_file()
    }
