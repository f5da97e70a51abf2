"""Terminal output of runs, reports and table descriptions: lines and tables, or one JSON object."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Self

from rich.console import RenderableType

from fedloom.experiments.terminal import complain, console, where, write_json
from fedloom.experiments.terminal.live import LiveArea, area_below, is_live
from fedloom.experiments.terminal.notebook import NotebookArea
from fedloom.experiments.terminal.rounds import Progress
from fedloom.platform.plugins import nearest
from fedloom.platform.results.copies import fetch
from fedloom.platform.results.tables import COLUMNS, PARTITION, ROWS, unit_of
from fedloom.platform.runs.logs import round_line

if TYPE_CHECKING:
    from fedloom.experiments.report.pages import ReportFiles

    # A report needs no torch, which these import.
    from fedloom.platform.federation.loop import RoundProgress
    from fedloom.platform.results.paths import Names
    from fedloom.platform.runs.run import RunEnd


class RunView:
    """Shows a run: on a terminal as a view of fixed height below the printed lines, elsewhere as a line per round.

    Used in a `with` block, which always restores the terminal, even after errors.
    """

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json
        self.console = console(quiet=as_json)
        self.run_id = ""
        self._progress: Progress | None = None
        self._area: LiveArea | NotebookArea | None = None
        if not as_json and is_live(self.console):
            self.console = console(folds=False)
            self._progress = Progress()
            self._area = area_below(self.console, self._progress.lines)
            self._area.start()

    def doing(self, what: str) -> None:
        """Says on a terminal what is being started; files and pipes get only results."""
        if self._progress is not None and self._area is not None:
            self._progress.doing(what)
            self._area.refresh()  # at once: importing torch leaves little time to other threads
        elif sys.stdout.isatty():
            self.console.print(what)

    def stages(self, names: Sequence[str]) -> None:
        """Sets the names of the run's stages, which are shown as bars on a terminal."""
        if self._progress is not None:
            self._progress.stages(names)

    def started(self, run_id: str, supernet_of: str) -> None:
        """Prints the run's id and, if it has one, the run whose supernet it reuses."""
        self.run_id = run_id
        self.console.print(f"run {run_id}")
        if self._progress is not None:
            self._progress.doing("the first round")
        if supernet_of:
            self.console.print(f"reuses the supernet of run {supernet_of}: its configuration is the same up to there")

    def round(self, progress: "RoundProgress") -> None:
        """Shows loss, metric, bytes, and the time left."""
        if self._progress is None:
            self.console.print(round_line(progress))
            return
        self._progress.round(progress)
        if progress.stopped:
            self.console.print(f"{progress.stage} ends after round {progress.round + 1}: {progress.stopped}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close("ended")

    def _close(self, how: str) -> None:
        """Leaves the view's last lines on the terminal, which say how the run ended."""
        if self._area is not None and self._progress is not None:
            self._progress.ended(how)
            self._area.transient = not self._progress.has_begun
            self._area.stop()
            self._area = None

    def waiting(self, message: str) -> None:
        """Prints why the run does not start yet."""
        self.console.print(message)

    def finished(self, run_id: str, results: str | Path, renamed: "Names | None" = None) -> None:
        """Prints that the run was already done, and its new names if any, or the JSON object of its end."""
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
            from fedloom.experiments.report.runs import summary_table  # not needed until a run ends

            table = summary_table(_brought(results, end.run_id), end.run_id)  # the view goes on while it is read
            self._close(end.kind)
            if self._progress is not None:
                self.console.print()
            self.console.print(table, soft_wrap=True)
            report = f"fedloom report {end.run_id}{where(results)}"
            if self._progress is None:
                self.console.print(f"finished: {end.run_id}; plots and page: {report}")
            else:
                self.console.print("plots and page:")
                self.console.print(f"  {report}", soft_wrap=True)  # unwrapped, so that it can be copied
        else:
            self._close(end.kind)
            complain(how_it_ended(end, results))


def how_it_ended(end: "RunEnd", results: str | Path) -> str:
    """The line about a run that is not done, with the command that continues it."""
    if end.kind == "refused":
        return end.message
    if end.kind == "detached":
        return f"run {end.run_id} goes on; {end.message}"
    from fedloom.platform.federation.loop import DIVERGED  # a report needs no torch

    goes_on = end.run_id and not end.message.startswith(DIVERGED)
    again = f"; continue with: fedloom resume {end.run_id}{where(results)}" if goes_on else ""
    ended = "stopped" if end.kind == "infrastructure" else end.kind
    return f"run {ended}{f': {end.message}' if end.message else ''}{again}"


def _brought(results: str | Path, run_id: str) -> Path:
    return fetch(results, [run_id], tensors=False)


def _write_end(run_id: str, kind: str, message: str, summary: Mapping[str, Any]) -> None:
    write_json({"run_id": run_id, "status": kind, "message": message, **summary})


def _summary(results: Path, run_id: str) -> dict[str, Any]:
    from fedloom.experiments.report.runs import report_json  # not needed until a run ends

    return report_json(results, [run_id])


def show_report(files: "ReportFiles", table: RenderableType, figures: dict[str, Any], as_json: bool) -> None:
    """Prints the report's table and the paths of its files, or one JSON object."""
    if as_json:
        paths = {"html": str(files.html), "markdown": str(files.markdown), "plots": [str(p) for p in files.plots]}
        paths |= {"latex": str(files.latex)}
        write_json({**figures, **paths})
        return
    screen = console()
    screen.print(table)
    for sentence in files.missing:
        screen.print(f"missing: {sentence}")
    for file in (files.html, files.markdown, files.latex, *files.plots):
        screen.print(str(file))


KINDS = {"int": "int", "float": "float", "str": "text", "bool": "bool", "time": "time (UTC)"}
NARROWEST = 30
"""Minimum characters per line of a column's meaning, however narrow the terminal is."""


def described_tables(names: Sequence[str]) -> list[dict[str, Any]]:
    """Each named table (all, if none is named) with what a row is and its columns; ValueError for an unknown table."""
    for name in names:
        if name not in COLUMNS:
            known = ", ".join(COLUMNS)
            raise ValueError(f"there is no table {name!r}{nearest(name, [*COLUMNS])}; there are {known}")
    tables = []
    for table in [table for table in COLUMNS if table in names or not names]:
        columns = [
            {"column": name, "type": KINDS[column.kind], "unit": unit_of(name), "meaning": column.meaning}
            for name, column in {**PARTITION, **COLUMNS[table]}.items()
        ]
        tables.append({"table": table, "about": ROWS[table], "columns": columns})
    return tables


def show_tables(tables: Sequence[dict[str, Any]], *, as_json: bool) -> None:
    """Prints a line per column, or one JSON object."""
    if as_json:
        write_json({"tables": list(tables)})
        return
    screen = console()
    for table in tables:
        screen.print(f"{table['table']}: {table['about']}", style="bold")
        heads = ("column", "type", "unit")
        widths = [max(len(head), *(len(row[head]) for row in table["columns"])) for head in heads]
        for row in table["columns"]:
            start = "  " + "  ".join(row[head].ljust(width) for head, width in zip(heads, widths, strict=True))
            first, *rest = wrap(row["meaning"], max(NARROWEST, screen.width - len(start) - 2))
            for line in (f"{start}  {first}", *(f"{' ' * len(start)}  {line}" for line in rest)):
                screen.print(line)
        screen.print()
