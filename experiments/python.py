"""fedloom from Python: starts runs and reads what they recorded, with the checks and the bits of the command line."""

import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch

from fedloom.actors.address import before_ray
from fedloom.experiments import analysis
from fedloom.experiments.analysis.tables import paths_of
from fedloom.experiments.runs.configuration import compose_config, tell_of_attack
from fedloom.experiments.runs.overrides import GROUPS, last_values, override_text
from fedloom.experiments.show import RunView, how_it_ended
from fedloom.experiments.terminal import CONFIGURATION, EXPLAINED, INTERRUPTED, OK, explained, of_run_end, tell_at_once
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.loop import RoundProgress, RunFailedError
from fedloom.platform.plugins import blaming_own
from fedloom.platform.results.copies import fetch
from fedloom.platform.results.files import read_json
from fedloom.platform.results.paths import RunPaths, find_run
from fedloom.platform.results.status import Status, read_status
from fedloom.platform.results.tables import read_runs
from fedloom.platform.words import naming, shown

if TYPE_CHECKING:
    from fedloom.experiments.report.pages import ReportFiles

__all__ = ["Run", "RunFailedError", "StartedRun", "compare", "load", "run", "start"]


MOST_LINES = 1000
"""Lines of a started run's output that are remembered."""
END_S = 5.0
"""Seconds for the last lines of a process that has ended."""


def run(
    experiment: str | None = None,
    /,
    *,
    quiet: bool = False,
    on_round: Callable[[RoundProgress], None] | None = None,
    **changes: Any,
) -> "Run":
    """Runs a preset to its end with changed configuration values, as `fedloom run` does, and returns the run.

    Values are those of the command line: `data={"alpha": 0.1}`, or by dotted keys `**{"data.alpha": 0.1}`. Prints a
    line per round unless it is `quiet`; `on_round` is called after every round is stored;
    what it raises interrupts the run and is raised here.

    Raises, with the line that the command prints: ValueError where the command exits with 2, before anything is
    written; RunFailedError if the run fails or cannot go on; KeyboardInterrupt if it is interrupted.
    """
    if not quiet:
        tell_at_once("preparing the run")
    _, config = _composed(experiment, changes)
    before_ray(config.ray.address)
    from fedloom.experiments.runs.launch import launch  # imports Ray

    view, threads = _View(quiet, on_round), torch.get_num_threads()
    try:
        with _in_one_line(config.results):
            end = launch(config, view)
    finally:
        torch.set_num_threads(threads)  # a serial run sets that of this process
    if view.error is not None:
        raise view.error
    if end.kind in ("interrupted", "detached"):
        raise KeyboardInterrupt(how_it_ended(end, config.results))
    if end.kind != "done":
        raise _error(of_run_end(end.kind), how_it_ended(end, config.results))
    if not quiet:
        view.end(end, config.results)
    return Run(end.run_id, config.results)


def start(experiment: str | None = None, /, **changes: Any) -> "StartedRun":
    """Starts a run in a process of its own, where it goes on also after this one, and returns as soon as it has begun.

    Values are those of `run`. Raises ValueError or RunFailedError for a run that does not begin.
    """
    overrides, config = _composed(experiment, changes)
    process = subprocess.Popen(
        [sys.executable, "-m", "fedloom.experiments", "run", *overrides],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None, "it is a pipe"
    lines: deque[str] = deque(maxlen=MOST_LINES)
    try:
        for line in process.stdout:
            lines.append(line)
            if line.startswith("run "):
                break
        else:
            raise _error(process.wait(), _complaint(lines))
    except KeyboardInterrupt:
        process.terminate()
        raise
    # What the process prints is read until its end, so that it never waits for a reader.
    reader = threading.Thread(target=lines.extend, args=[process.stdout], daemon=True)
    reader.start()
    return StartedRun(line.split()[1], config.results, process, lines, reader)


def _composed(experiment: str | None, changes: Mapping[str, Any]) -> tuple[list[str], RunConfig]:
    preset = [] if experiment is None else [f"experiment={experiment}"]
    with _in_one_line():
        overrides = last_values([*preset, *overrides_of(changes)])
        config = compose_config(overrides)
        tell_of_attack(config, overrides)
        return overrides, config


def _complaint(lines: Iterable[str]) -> str:
    """The last line that the command wrote about itself."""
    complaints = [line.removeprefix("fedloom: ").strip() for line in lines if line.startswith("fedloom: ")]
    return complaints[-1] if complaints else "the run's process has ended without a word: it was killed"


class _View(RunView):
    def __init__(self, quiet: bool, on_round: Callable[[RoundProgress], None] | None) -> None:
        super().__init__(as_json=quiet)
        self._on_round = on_round
        self.error: Exception | None = None

    def round(self, progress: RoundProgress) -> None:
        super().round(progress)
        if self._on_round is None:
            return
        try:
            self._on_round(progress)
        except Exception as error:  # the caller's code may fail in any way; `run` raises it again
            self.error = error
            raise KeyboardInterrupt from error


@contextmanager
def _in_one_line(results: str = ".") -> Iterator[None]:
    """Errors for which the command prints one line are raised with this line."""
    try:
        with blaming_own(), naming(results):
            yield
    except EXPLAINED as error:
        explanation = explained(error)
        if explanation is None:
            raise
        raise _error(*explanation) from error


def _error(exit_code: int, line: str) -> Exception:
    return ValueError(line) if exit_code == CONFIGURATION else RunFailedError(line)


def overrides_of(changes: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Nested or dotted configuration values as `key=value`; ValueError for a value that no configuration holds."""
    texts: list[str] = []
    for name, value in changes.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            texts += overrides_of(value, f"{key}.")
        elif key in GROUPS and isinstance(value, str):
            texts.append(f"{key}={value}")
        else:
            texts.append(f"{key}={_text(key, value)}")
    return texts


def _text(key: str, value: Any) -> str:
    try:
        return override_text(_plain(value))
    except TypeError as error:
        raise ValueError(
            f"{key}={shown(value, repr)}: give a number, text, True, False or None, or a list or dictionary of these; "
            "code of your own is given by its import path, module:name"
        ) from error


def _plain(value: Any) -> Any:
    """The value without the types of numpy and pathlib."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Run:
    """A run, and what it has recorded so far: everything is read from its files when it is asked for."""

    id: str
    results: str

    @property
    def status(self) -> str:
        """How the run stands: running, stalled, dead, done, failed or interrupted."""
        return read_status(self._paths().status).state

    @property
    def config(self) -> dict[str, Any]:
        """The whole configuration, as nested dictionaries."""
        config: dict[str, Any] = read_json(self._paths().config)
        return config

    @property
    def rounds(self) -> pd.DataFrame:
        """One row per round."""
        return self._table("rounds")

    @property
    def clients(self) -> pd.DataFrame:
        """One row per planned client and round."""
        return self._table("clients")

    @property
    def evaluations(self) -> pd.DataFrame:
        """One row per measured value: model, tier, architecture, split, metric."""
        return self._table("evaluations")

    def model(
        self,
        tier: str | None = None,
        *,
        model: str | None = None,
        architecture: str | None = None,
        target: str | None = None,
    ) -> torch.nn.Module:
        """The model of a tier, or the run's only one, with its weights and in evaluation mode, on the CPU.

        The choices are those of `fedloom export`. Raises ValueError that lists the run's models if it has no such one.
        """
        from fedloom.experiments.export.export import module_of
        from fedloom.experiments.export.selection import Wanted

        return module_of(self._paths(tensors=True), Wanted(tier, target, architecture, model))

    def report(self, out: str | Path | None = None) -> "ReportFiles":
        """Writes the run's report as `fedloom report` does; a notebook shows the page."""
        from fedloom.experiments.report.runs import write_report

        return write_report(self._paths().root, [self.id], None if out is None else Path(out))

    def _table(self, name: str) -> pd.DataFrame:
        return read_runs([self._paths()], name)

    def _paths(self, *, tensors: bool = False) -> RunPaths:
        return find_run(fetch(self.results, [self.id], tensors=tensors), self.id)


@dataclass(frozen=True)
class StartedRun(Run):
    """A run in a process of its own."""

    _process: "subprocess.Popen[str]" = field(repr=False, compare=False)
    _lines: deque[str] = field(repr=False, compare=False)
    _reader: threading.Thread = field(repr=False, compare=False)

    @property
    def progress(self) -> Status:
        """The stage and round in which the run is, and how it stands."""
        return read_status(self._paths().status)

    def wait(self, timeout_s: float | None = None) -> Run:
        """The run when it has ended; RunFailedError as in `run`, TimeoutError if it goes on after `timeout_s`."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"run {self.id} goes on after {timeout_s:g} s") from error
        self._reader.join(END_S)
        if code not in (OK, INTERRUPTED):
            raise _error(code, _complaint([*self._lines]))
        return Run(self.id, self.results)

    def stop(self) -> Run:
        """Interrupts the run, as Ctrl-C does the command, and waits for its end; `fedloom resume` continues it."""
        self._process.terminate()
        return self.wait()


def load(results: str | Path = "results", runs: Sequence[str] | None = None) -> list[Run]:
    """The runs in a folder or at a URL, the earliest first: all, or those with these ids, names or tags.

    Runs of one second are in no order. Raises ValueError for an unknown run, and if there are none.
    """
    return [Run(paths.run_id, str(results)) for paths in paths_of(results, runs)]


def compare(
    by: str, results: str | Path = "results", runs: Sequence[str] | None = None, **options: Any
) -> pd.DataFrame:
    """Compares runs over the values of a configuration key; columns and options are those of `analysis.compare`."""
    return analysis.compare(analysis.load(results, runs), by, **options)
