"""Terminal output of runs and reports: a line per round, tables at the end, or one JSON object."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType

from fedloom.experiments.report.pages.files import ReportFiles
from fedloom.experiments.report.pages.runs import summary_table
from fedloom.experiments.report.pages.values import report_json
from fedloom.experiments.terminal.output import as_bytes, as_time, console, where, write_json
from fedloom.platform.results.remote import fetch

if TYPE_CHECKING:
    # A report needs no torch, which these import.
    from fedloom.platform.federation.loop import RoundProgress
    from fedloom.platform.runs.ending import RunEnd


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

    def round(self, progress: "RoundProgress") -> None:
        """Prints one line: loss, metric, bytes, and time left in the stage."""
        self.console.print(round_line(progress))

    def end(self, end: "RunEnd", results: str | Path) -> None:
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


def _brought(results: str | Path, end: "RunEnd") -> Path:
    return fetch(results, [end.run_id], tensors=False)


def round_line(p: "RoundProgress") -> str:
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
