"""Terminal output of runs, reports and states: a line per round, tables at the end, or one JSON object."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Column, Table

from fedloom.experiments.report.pages.files import ReportFiles
from fedloom.experiments.report.pages.runs import summary_table
from fedloom.experiments.report.pages.values import report_json
from fedloom.experiments.store.ablations import Ablation, find_ablation, is_ablation, list_ablations
from fedloom.experiments.store.trials import STATUS as ABLATION_STATUS
from fedloom.experiments.store.trials import counted, trial_states
from fedloom.experiments.terminal.output import as_bytes, as_time, console, where, write_json
from fedloom.platform.federation.loop import RoundProgress
from fedloom.platform.results.paths import find_run, list_runs
from fedloom.platform.results.remote import fetch
from fedloom.platform.results.status import read_status
from fedloom.platform.runs.ending import RunEnd

LONGEST_MESSAGE = 70


class RunView:
    """Shows the rounds of a run as they finish."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.console = console(quiet)
        self.run_id = ""

    def started(self, run_id: str, supernet_of: str) -> None:
        """Prints the run's id and, if it has one, the run whose supernet it reuses."""
        self.run_id = run_id
        self.console.print(f"run {run_id}")
        if supernet_of:
            self.console.print(f"begins with the supernet of run {supernet_of}: the same configuration up to there")

    def round(self, progress: RoundProgress) -> None:
        """Prints one line: loss, metric, bytes, and time left in the stage."""
        self.console.print(round_line(progress))

    def end(self, end: RunEnd, results: str | Path) -> None:
        """Prints how the run ended, with its table, or one JSON object."""
        if self.quiet:
            summary = _summary(_brought(results, end), end.run_id) if end.kind == "done" else {}
            write_json({"run_id": end.run_id, "status": end.kind, "message": end.message, **summary})
        elif end.kind == "done":
            _print_summary(self.console, _brought(results, end), end.run_id)
            self.console.print(f"finished: {end.run_id}; plots and page: fedloom report {end.run_id}{where(results)}")
        elif end.kind == "refused":
            sys.stderr.write(f"fedloom: {end.message}\n")
        else:
            again = f"; continue with: fedloom resume {end.run_id}{where(results)}" if end.run_id else ""
            sys.stderr.write(f"fedloom: run {end.kind}: {end.message}{again}\n")


def _brought(results: str | Path, end: RunEnd) -> Path:
    return fetch(results, [end.run_id], tensors=False)


def round_line(p: RoundProgress) -> str:
    """The line of a finished round."""
    left_s = (p.rounds_total - p.round - 1) * p.wall_s
    parts = [f"{p.stage:<18} {p.round + 1:>4}/{p.rounds_total}"]
    if p.clients_planned:
        parts.append(f"clients {p.clients_ok}/{p.clients_planned}")
    if p.loss is not None:
        parts.append(f"loss {p.loss:.4f}")
    if p.metric is not None:
        parts.append(f"{p.metric_of} accuracy {p.metric:.4f}")
    if p.validated is not None:
        parts.append(f"validation {p.validated.accuracy:.4f} after {p.validated.rounds}")
    if p.bytes_down:
        parts.append(f"down {as_bytes(p.bytes_down)} up {as_bytes(p.bytes_up)}")
    parts.append(f"{p.wall_s:.2f} s")
    if left_s > 0:
        parts.append(f"left {as_time(left_s)}")
    return "  ".join(parts)


def _summary(results: Path, run_id: str) -> dict[str, Any]:
    return report_json(results, [run_id])


def _print_summary(console: Console, results: Path, run_id: str) -> None:
    console.print(summary_table(results, run_id))


def show_report(files: ReportFiles, table: RenderableType, figures: dict[str, Any], as_json: bool) -> None:
    """Prints the report's table and the paths of its files, or one JSON object."""
    if as_json:
        places = {"html": str(files.html), "markdown": str(files.markdown), "plots": [str(p) for p in files.plots]}
        places |= {"latex": str(files.latex)} if files.latex else {}
        write_json({**figures, **places})
        return
    screen = console()
    screen.print(table)
    for sentence in files.missing:
        screen.print(f"missing: {sentence}")
    for file in (files.html, files.markdown, *([files.latex] if files.latex else []), *files.plots):
        screen.print(str(file))


def show_status(results: Path, given: list[str], as_json: bool) -> None:
    """Prints one line per ablation and per run outside ablations, or one line per trial of the given ablations."""
    ablations = [find_ablation(results, g) for g in given if is_ablation(results, g)]
    runs = [find_run(results, g) for g in given if not is_ablation(results, g)]
    if not given:
        ablations = list_ablations(results)
        trials = {trial.run_id for ablation in ablations for trial in ablation.trials}
        runs = [paths for paths in list_runs(results) if paths.run_id not in trials]
    found = {paths.run_id: read_status(paths.status) for paths in runs}
    if as_json:
        values = [_ablation_as_dict(results, ablation) for ablation in ablations]
        write_json(
            {"runs": [{"run_id": run_id, **asdict(status)} for run_id, status in found.items()], "ablations": values}
        )
        return
    screen = console()
    for ablation in ablations:
        screen.print(_ablation_table(results, ablation) if given else _ablation_line(results, ablation))
    if not found and not ablations:
        screen.print(f"no runs under {results}")
    elif found:
        # An id is there to be copied: what is too wide for the terminal folds in the message.
        table = Table(Column("run", no_wrap=True), "state", "stage", "round", "message", box=None)
        for run_id, status in found.items():
            table.add_row(run_id, status.state, status.stage, f"{status.round}/{status.rounds_total}", status.message)
        screen.print(table)


def _ablation_state(results: Path, ablation: Ablation) -> str:
    path = ablation.folder(results) / ABLATION_STATUS
    return read_status(path).state if path.exists() else "interrupted"


def _ablation_line(results: Path, ablation: Ablation) -> str:
    said = counted(trial_states(results, ablation))
    return f"ablation {ablation.ablation_id} {_ablation_state(results, ablation)}: {said}"


def _ablation_table(results: Path, ablation: Ablation) -> Group:
    table = Table("trial", "setting", "state", "stage", "round", "message", box=None)
    for s in trial_states(results, ablation):
        stage, at = (s.status.stage, f"{s.status.round}/{s.status.rounds_total}") if s.status else ("", "")
        message = s.message if len(s.message) <= LONGEST_MESSAGE else f"{s.message[:LONGEST_MESSAGE]}..."
        table.add_row(f"{s.trial.index:04}", s.trial.label(), s.state, stage, at, message)
    ids = f"a trial's run is {ablation.ablation_id}-TRIAL"
    return Group(_ablation_line(results, ablation), table, ids)


def _ablation_as_dict(results: Path, ablation: Ablation) -> dict[str, Any]:
    trials = [
        {
            **{name: getattr(s.trial, name) for name in ("index", "run_id", "seed")},
            "setting": dict(s.trial.setting),
            **({name: getattr(s.status, name) for name in ("stage", "round", "rounds_total")} if s.status else {}),
            "state": s.state,
            "message": s.message,
        }
        for s in trial_states(results, ablation)
    ]
    return {"ablation_id": ablation.ablation_id, "state": _ablation_state(results, ablation), "trials": trials}
