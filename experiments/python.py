"""fedloom from Python: starts runs and reads their records, with the command line's checks and identical results."""

import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch

from fedloom.actors.address import before_ray
from fedloom.experiments import analysis
from fedloom.experiments.ablation.config import (
    NOT_AXES,
    PREFIX,
    AblationConfig,
    check_ablation,
    definition_of,
    load_ablation_config,
)
from fedloom.experiments.ablation.plan import plan_of
from fedloom.experiments.analysis.tables import METRIC, WITHOUT_CLIENTS, paths_of
from fedloom.experiments.passed import Names, called, check_current, is_plain, names_in
from fedloom.experiments.runs.configuration import compose_config, tell_of_attack
from fedloom.experiments.runs.overrides import GROUPS, last_values, override_text
from fedloom.experiments.show import RunView, how_it_ended
from fedloom.experiments.store.ablations import FOLDER as ABLATIONS, FRAME_COLUMNS
from fedloom.experiments.terminal import CONFIGURATION, EXPLAINED, INTERRUPTED, OK, explained, of_run_end
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.loop import RoundProgress, RunFailedError
from fedloom.platform.plugins import blaming_own
from fedloom.platform.results.copies import fetch
from fedloom.platform.results.files import read_json
from fedloom.platform.results.paths import RunPaths, find_run
from fedloom.platform.results.status import read_status
from fedloom.platform.results.store import local_root
from fedloom.platform.results.tables import read_runs
from fedloom.platform.runs.run_files import sources_of
from fedloom.platform.runs.source_code import plugin_sources
from fedloom.platform.words import naming, shown

if TYPE_CHECKING:
    from fedloom.experiments.report.pages import ReportFiles
    from fedloom.experiments.store.ablations import Ablation as Plan

__all__ = ["Ablation", "Progress", "Run", "RunFailedError", "StartedRun", "ablate", "compare", "load", "run", "start"]


MOST_LINES = 1000
"""Output lines of a started run that are kept."""
RANGES = frozenset({"uniform", "log_uniform", "integers"})
"""The kinds of ranges that an axis of a search may have instead of values."""
END_S = 5.0
"""Seconds to wait for the last output lines of a process that has ended."""


def run(
    experiment: str | None = None,
    /,
    *,
    quiet: bool = False,
    on_round: Callable[[RoundProgress], None] | None = None,
    **changes: Any,
) -> "Run":
    """Runs a preset to its end with changed configuration values, as `fedloom run` does, and returns the run.

    `changes` are the values of the command line: `data={"alpha": 0.1}`, or by dotted keys `**{"data.alpha": 0.1}`.
    Prints a line per round unless `quiet`. `on_round` is called after every round is stored; an exception from it
    interrupts the run and is raised here.

    Raises, with the line that the command prints: ValueError where the command exits with 2, before anything is
    written; RunFailedError if the run fails or cannot go on; KeyboardInterrupt if it is interrupted.
    """
    if on_round is not None and not callable(on_round):
        raise ValueError(f"on_round={shown(on_round, repr)}: give a function of one argument, the round's progress")
    with _View(quiet, on_round) as view:
        view.doing("preparing the run")
        threads = torch.get_num_threads()
        with _composed(experiment, changes) as (_, config):
            before_ray(config.ray.address)
            from fedloom.experiments.runs.launch import launch  # imports Ray

            try:
                with _in_one_line(config.results):
                    end = launch(config, view)
            finally:
                torch.set_num_threads(threads)  # a serial run changes this process's number
            if end.kind == "refused":
                raise ValueError(how_it_ended(end, config.results))
        if view.error is not None:
            raise view.error
        if end.kind in ("interrupted", "detached"):
            raise KeyboardInterrupt(how_it_ended(end, config.results))
        if end.kind != "done":
            raise _error(of_run_end(end.kind), how_it_ended(end, config.results))
        if not quiet:
            view.end(end, config.results)
    return Run(end.run_id, config.results)


def ablate(
    experiment: str | None = None,
    /,
    over: Mapping[str, Any] | None = None,
    *,
    seeds: Sequence[int] | None = None,
    ablation: str | Path | Mapping[str, Any] | None = None,
    quiet: bool = False,
    **changes: Any,
) -> "Ablation":
    """Runs a preset over values and seeds, as `fedloom ablate` does, and returns the ablation.

    `over` maps each varied key to its values, `{"data.alpha": [0.1, 1.0]}`, an axis to named settings of several keys,
    `{"rule": {"none": {}, "prox": {"method.train.local_rule": "fedprox"}}}`, or for a random search a key to a range,
    `{"method.train.lr": {"log_uniform": [0.01, 1]}}` with `ablation={"search": {"kind": "random"}}`. Instead of `over`,
    `ablation` may name a preset or a YAML file; as a dictionary it has further keys `ablation.*`, such as `figures`.
    `changes` are those of `run`, for all trials. Without actors (`executor={"kind": "serial"}`), trials run one after
    the other in this process, otherwise as many at once as fit.

    Raises ValueError, RunFailedError and KeyboardInterrupt as `run` does; the latter two say how to continue.
    """
    for key in ("seed", "name"):
        if key in changes:
            raise ValueError(f"{key}={changes[key]}: {NOT_AXES[key]}")
    preset = [] if experiment is None else [f"experiment={experiment}"]
    threads = torch.get_num_threads()
    with ExitStack() as stack:
        with _in_one_line():
            names = stack.enter_context(names_in(changes))
            common = [*preset, *overrides_of(names.values)]
            name, definition, named = _definition(names, over, seeds, ablation)
            plan = plan_of(name, definition, common, named=named)
            check_current(plugin_sources([trial.config for trial in plan.trials]))
        before_ray(plan.trials[0].config["ray"]["address"])
        from fedloom.experiments.ablation.command import complaints, run_here  # imports Ray

        results = str(plan.trials[0].config["results"])
        try:
            with _in_one_line(results):
                end = run_here(plan, results, quiet=quiet)
        except ValueError:
            if (local_root(results) / ABLATIONS / plan.ablation_id).exists():  # a search has run some of its trials
                names.keep()
            raise
        finally:
            torch.set_num_threads(threads)
    if end.kind != "done":
        *lines, last = complaints(end, results)
        line = "; ".join([*lines[:1], last])
        raise KeyboardInterrupt(line) if end.kind == "interrupted" else RunFailedError(line)
    return Ablation(plan.ablation_id, results)


def _definition(
    names: Names,
    over: Mapping[str, Any] | None,
    seeds: Sequence[int] | None,
    ablation: str | Path | Mapping[str, Any] | None,
) -> tuple[str, AblationConfig, str]:
    """The name and definition of an ablation, and the text by which error messages refer to it."""
    if seeds is not None and (isinstance(seeds, str) or not isinstance(seeds, Iterable)):
        raise ValueError(f"seeds={shown(seeds, repr)}: give a list, such as [1, 2, 3]")
    if isinstance(ablation, str | Path):
        if over:
            raise ValueError(f"give either over= or ablation={ablation}, which has axes of its own")
        varied = [] if seeds is None else [f"{PREFIX}seeds={list(seeds)}"]
        return *load_ablation_config(str(ablation), varied), f"ablation={ablation}"
    if not over and not (ablation or {}).get("axes"):
        raise ValueError('give what is varied: over={"data.alpha": [0.1, 1.0]}, or ablation="alpha"')
    axes = dict(_axis(names, key, values) for key, values in (over or {}).items())
    if len(axes) < len(over or {}):
        raise ValueError(f"over={[*(over or {})]}: two of these keys have the same ending: vary named settings")
    axes |= (ablation or {}).get("axes", {})
    values = {**(ablation or {}), "axes": axes, **({} if seeds is None else {"seeds": list(seeds)})}
    definition = definition_of(values)
    check_ablation(definition)
    return re.sub(r"[^A-Za-z0-9_.+-]", "_", "-".join(definition.axes))[:40], definition, f"over={[*(over or {})]}"


def _axis(names: Names, key: str, values: Any) -> tuple[str, dict[str, Any]]:
    """The name of an axis, and its definition."""
    last = key.rpartition(".")[2]
    name = key.replace(".", "_") if last in FRAME_COLUMNS else last
    if isinstance(values, Mapping) and values.keys() <= RANGES:
        return name, {"key": key, **values}
    if isinstance(values, Mapping) and all(isinstance(changes, Mapping) for changes in values.values()):
        return name, {"settings": {label: names.of("", c) if c else {} for label, c in values.items()}}
    if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
        raise ValueError(f"over={{{key!r}: {values!r}}}: give a list of values, or a dictionary of named settings")
    values = _plain([*values])
    if is_plain(values):
        return name, {"key": key, "values": values}
    labels = [str(v) if is_plain(v) else called(v) for v in values]
    unique = [f"{label}-{i}" if labels.count(label) > 1 else label for i, label in enumerate(labels, 1)]
    return name, {"settings": {label: names.of(key, v) for label, v in zip(unique, values, strict=True)}}


def start(experiment: str | None = None, /, **changes: Any) -> "StartedRun":
    """Starts a run in a separate process that may outlive this one, and returns as soon as the run has begun.

    `changes` are those of `run`. Raises ValueError or RunFailedError for a run that does not begin.
    """
    lines: deque[str] = deque(maxlen=MOST_LINES)
    with _composed(experiment, changes) as (overrides, config):
        process = subprocess.Popen(
            [sys.executable, "-m", "fedloom.experiments", "run", *overrides],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            # The process imports the user's own code from the same folders as this one.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(folder for folder in sys.path if folder)},
        )
        assert process.stdout is not None, "it is a pipe"
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
    # Reads the process's output until its end, so that the process never waits for a reader.
    reader = threading.Thread(target=lines.extend, args=[process.stdout], daemon=True)
    reader.start()
    return StartedRun(line.split()[1], config.results, process, lines, reader, time.monotonic())


@contextmanager
def _composed(experiment: str | None, changes: Mapping[str, Any]) -> Iterator[tuple[list[str], RunConfig]]:
    """The overrides and the configuration; if the block raises ValueError, the files written for them are removed."""
    if experiment is None and not changes:
        raise ValueError('give a preset, such as fl.run("fedavg_digits"), or values of a configuration')
    preset = [] if experiment is None else [f"experiment={experiment}"]
    if changes.get("experiment") == RunConfig.experiment:  # of a run that had no preset
        changes = {key: value for key, value in changes.items() if key != "experiment"}
    with ExitStack() as stack:
        with _in_one_line():
            names = stack.enter_context(names_in(changes))
            overrides = last_values([*preset, *overrides_of(names.values)])
            config = compose_config(overrides)
            check_current(sources_of(config))
            tell_of_attack(config, overrides)
        yield overrides, config


def _complaint(lines: Iterable[str]) -> str:
    """The last message that the command printed about itself (`fedloom: ...`); a fixed text if there is none."""
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
    """Raises errors that the command explains in one line again, with this line as their message."""
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
    """Nested or dotted configuration values as overrides `key=value`."""
    texts: list[str] = []
    for name, value in changes.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            texts += overrides_of(value, f"{key}.")
        elif key in GROUPS and isinstance(value, str):
            texts.append(f"{key}={value}")
        else:
            texts.append(f"{key}={override_text(_plain(value))}")
    return texts


def _plain(value: Any) -> Any:
    """The value with plain Python types in place of those of numpy and pathlib."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Run:
    """A run and its records so far; every property is read from the run's files at each access."""

    id: str
    results: str

    @property
    def status(self) -> str:
        """The state of the run: running, stalled, dead, done, failed or interrupted."""
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

        The arguments choose as in `fedloom export`. Raises ValueError, which lists the run's models, if none matches.
        """
        from fedloom.experiments.export.export import module_of
        from fedloom.experiments.export.selection import Wanted

        try:
            return module_of(self._paths(tensors=True), Wanted(tier, target, architecture, model))
        except ValueError as error:  # its message names the command's options
            raise ValueError(re.sub(r"--(tier|target|architecture|model)\b", r"\1", str(error))) from error

    def report(self, out: str | Path | None = None) -> "ReportFiles":
        """Writes the run's report as `fedloom report` does; a notebook shows the page."""
        from fedloom.experiments.report.runs import write_report

        return write_report(self._paths().root, [self.id], None if out is None else Path(out))

    def _table(self, name: str) -> pd.DataFrame:
        return read_runs([self._paths()], name)

    def _paths(self, *, tensors: bool = False) -> RunPaths:
        return find_run(fetch(self.results, [self.id], tensors=tensors), self.id)


@dataclass(frozen=True)
class Ablation:
    """An ablation and its trials' records so far; `fedloom report` and `fedloom ablate --resume` take its id."""

    id: str
    results: str

    @property
    def runs(self) -> list[Run]:
        """The trials that have begun, in the order of the plan."""
        _, tables = self._loaded()
        return [Run(paths.run_id, self.results) for paths in tables.paths]

    @property
    def table(self) -> pd.DataFrame:
        """One row per trial and final model: a column for each axis, the seed, and what was measured."""
        plan, tables = self._loaded()
        return analysis.ablation_frame(tables, plan)

    def compare(self, *axes: str, measure: str = METRIC) -> pd.DataFrame:
        """One row per setting of these axes (all, if none is named) and model: the mean of a measure over the seeds.

        Columns are those of `analysis.by_setting`, measures those of `analysis.MEASURES`.
        """
        plan, tables = self._loaded()
        unknown = [axis for axis in axes if axis not in plan.axes]
        if unknown:
            raise ValueError(f"{self.id} has no axis {unknown[0]!r}; its axes are {', '.join(plan.axes)}")
        return analysis.by_setting(analysis.ablation_frame(tables, plan), measure, axes or [*plan.axes])

    def report(self, out: str | Path | None = None) -> "ReportFiles":
        """Writes the ablation's report as `fedloom report` does; a notebook shows the page."""
        from fedloom.experiments.report.ablation import write_ablation_report

        plan, _ = self._loaded()
        root = local_root(self.results)
        return write_ablation_report(root, plan.ablation_id, None if out is None else Path(out))

    def _loaded(self) -> "tuple[Plan, analysis.Tables]":
        return analysis.load_ablation(self.results, self.id, tables=WITHOUT_CLIENTS)


@dataclass(frozen=True)
class Progress:
    """The progress of a run.

    `state` and `message` are those of the status; `round` and `rounds_total` are those of the current stage.
    `fraction` is the elapsed share of the whole run's time or, while that time is unknown and `left_s` is None, the
    finished share of the stage's rounds.
    """

    state: str
    message: str
    stage: str
    round: int
    rounds_total: int
    fraction: float
    left_s: float | None


@dataclass(frozen=True)
class StartedRun(Run):
    """A run in a separate process."""

    _process: "subprocess.Popen[str]" = field(repr=False, compare=False)
    _lines: deque[str] = field(repr=False, compare=False)
    _reader: threading.Thread = field(repr=False, compare=False)
    _began_s: float = field(repr=False, compare=False)

    @property
    def progress(self) -> Progress:
        """The run's current progress."""
        status = read_status(self._paths().status)
        left_s = 0.0 if status.state == "done" else status.left_s if status.left_s >= 0 else None
        over_s = time.monotonic() - self._began_s
        by_rounds = status.round / max(1, status.rounds_total)
        return Progress(
            *(status.state, status.message, status.stage, status.round, status.rounds_total),
            fraction=by_rounds if left_s is None else over_s / (over_s + left_s),
            left_s=left_s,
        )

    def wait(self, timeout_s: float | None = None) -> Run:
        """Waits for the run's end; RunFailedError as in `run`, TimeoutError if it still runs after `timeout_s`."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"run {self.id} is still running after {timeout_s:g} s") from error
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

    Runs of the same second are in no particular order. Raises ValueError for an unknown run, and if there are none.
    """
    return [Run(paths.run_id, str(results)) for paths in paths_of(results, runs)]


def compare(
    by: str, results: str | Path = "results", runs: Sequence[str] | None = None, **options: Any
) -> pd.DataFrame:
    """Compares runs over the values of a configuration key; columns and options are those of `analysis.compare`."""
    return analysis.compare(analysis.load(results, runs), by, **options)
