"""Terminal output of runs and reports: a line per round, tables at the end, or one JSON object."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType

from fedloom.experiments.terminal import complain, console, where, write_json
from fedloom.platform.results.copies import fetch
from fedloom.platform.runs.logs import round_line

if TYPE_CHECKING:
    from fedloom.experiments.report.pages import ReportFiles

    # A report needs no torch, which these import.
    from fedloom.platform.federation.loop import RoundProgress
    from fedloom.platform.results.paths import Names
    from fedloom.platform.runs.run import RunEnd


class RunView:
    """Shows the rounds of a run as they finish."""

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json
        self.console = console(quiet=as_json)
        self.run_id = ""

    def started(self, run_id: str, supernet_of: str) -> None:
        """Prints the run's id and, if it has one, the run whose supernet it reuses."""
        self.run_id = run_id
        self.console.print(f"run {run_id}")
        if supernet_of:
            self.console.print(f"begins with the supernet of run {supernet_of}: the same configuration up to there")

    def round(self, progress: "RoundProgress") -> None:
        """Prints one line: loss, metric, bytes, and the time left."""
        self.console.print(round_line(progress))

    def waiting(self, message: str) -> None:
        """Prints why the run does not start yet."""
        self.console.print(message)

    def finished(self, run_id: str, results: str | Path, renamed: "Names | None" = None) -> None:
        """Prints that a run was done already, and its new names if it got any, or the JSON object of its end."""
        if self.as_json:
            _write_end(run_id, "done", "it was done already", _summary(_brought(results, run_id), run_id))
        else:
            report = f"fedloom report {run_id}{where(results)}"
            if renamed is not None:
                self.console.print(f"run {run_id} now has {renamed}")
            self.console.print(f"run {run_id} is done: nothing is left to do; its tables: {report}")

    def end(self, end: "RunEnd", results: str | Path) -> None:
        """Prints how the run ended, with its table, or one JSON object."""
        if self.as_json:
            summary = _summary(_brought(results, end.run_id), end.run_id) if end.kind == "done" else {}
            _write_end(end.run_id, end.kind, end.message, summary)
        elif end.kind == "done":
            _print_summary(self.console, _brought(results, end.run_id), end.run_id)
            self.console.print(f"finished: {end.run_id}; plots and page: fedloom report {end.run_id}{where(results)}")
        elif end.kind == "refused":
            complain(end.message)
        else:
            from fedloom.platform.federation.loop import DIVERGED  # a report needs no torch

            goes_on = end.run_id and not end.message.startswith(DIVERGED)
            again = f"; continue with: fedloom resume {end.run_id}{where(results)}" if goes_on else ""
            ended = "stopped" if end.kind == "infrastructure" else end.kind
            complain(f"run {ended}{f': {end.message}' if end.message else ''}{again}")


def _brought(results: str | Path, run_id: str) -> Path:
    return fetch(results, [run_id], tensors=False)


def _write_end(run_id: str, kind: str, message: str, summary: Mapping[str, Any]) -> None:
    write_json({"run_id": run_id, "status": kind, "message": message, **summary})


def _summary(results: Path, run_id: str) -> dict[str, Any]:
    from fedloom.experiments.report.runs import report_json  # a run begins without what its end needs

    return report_json(results, [run_id])


def _print_summary(console: Console, results: Path, run_id: str) -> None:
    from fedloom.experiments.report.runs import summary_table  # a run begins without what its end needs

    console.print(summary_table(results, run_id))


def show_report(files: "ReportFiles", table: RenderableType, figures: dict[str, Any], as_json: bool) -> None:
    """Prints the report's table and the paths of its files, or one JSON object."""
    if as_json:
        places = {"html": str(files.html), "markdown": str(files.markdown), "plots": [str(p) for p in files.plots]}
        places |= {"latex": str(files.latex)}
        write_json({**figures, **places})
        return
    screen = console()
    screen.print(table)
    for sentence in files.missing:
        screen.print(f"missing: {sentence}")
    for file in (files.html, files.markdown, files.latex, *files.plots):
        screen.print(str(file))
