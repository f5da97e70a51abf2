"""Terminal output of an ablation: a live table with one line per trial, or one line per start and end of a trial."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from fedloom.experiments.store.ablations import Ablation, Trial
from fedloom.experiments.store.trials import WAITING, End, TrialState
from fedloom.experiments.terminal import console
from fedloom.platform.runs.logs import as_time

MOST_LINES = 40
"""Maximum number of trials in the live table; running trials come first."""

TELL_S = 60.0
RUNNING = "running"
_ORDER = {RUNNING: 0, WAITING: 2}


class Line:
    """The displayed state of one trial."""

    def __init__(self, state: TrialState) -> None:
        self.trial: Trial = state.trial
        self.state = state.state
        self.figures: Mapping[str, Any] = {}
        self.message = state.message
        self.began_s: float | None = None
        self.took_s: float | None = None
        self.told_s = time.monotonic()

    def cells(self) -> list[str]:
        """Index, setting, state, stage and round, figures, and time."""
        seconds = self.took_s
        if seconds is None and self.began_s is not None:
            seconds = time.monotonic() - self.began_s
        took = as_time(seconds) if seconds else ""
        shown, at, reached = self.figures, "", ""
        if shown:
            at = f"{shown['stage']} {shown['round'] + 1}/{shown['rounds_total']}"
            if shown["stage"] != "evaluation":  # whose values are of the model evaluated last
                reached = " ".join(f"{name} {shown[name]:.4f}" for name in ("loss", "metric") if name in shown)
        return [str(self.trial.index), self.trial.label(), self.state, at, reached, took]

    def text(self) -> str:
        """All cells and the message in one line."""
        *parts, took = (part for part in self.cells())
        message = f"  {self.message}" if self.message and self.state != "done" else ""
        return "  ".join(p for p in [f"trial {parts[0]:>4}", *parts[1:], took] if p) + message


class TerminalView:
    """Shows an ablation in the terminal; implements `running.AblationView`."""

    def __init__(self, quiet: bool = False) -> None:
        self.console: Console = console(quiet)
        self._lines: list[Line] = []
        self._live: Live | None = None
        self._title = ""

    def planned(self, ablation: Ablation, states: Sequence[TrialState], at_once: int, to_run: int) -> None:
        self.close()  # a search plans again
        self._lines = [Line(state) for state in states]
        self._title = f"ablation {ablation.ablation_id}"
        self.console.print(f"{self._title}: {len(states)} trials, {to_run} to run, up to {at_once} at once")
        if ablation.title:
            self.console.print(ablation.title)
        if self.console.is_terminal:
            self._live = Live(get_renderable=self._table, console=self.console, refresh_per_second=2)
            self._live.start()

    def started(self, index: int) -> None:
        line = self._lines[index]
        line.state, line.began_s = RUNNING, time.monotonic()
        self._print(line)

    def round(self, index: int, figures: Mapping[str, Any]) -> None:
        """Updates the trial's line; outside a terminal, prints it at most once every `TELL_S`."""
        line = self._lines[index]
        line.figures = figures
        if time.monotonic() - line.told_s >= TELL_S:
            self._print(line)

    def ended(self, index: int, end: End) -> None:
        line = self._lines[index]
        line.state, line.message = end.kind, end.message
        line.took_s = None if line.began_s is None else time.monotonic() - line.began_s
        self._print(line)

    def waiting(self, message: str) -> None:
        self.console.print(message)

    def close(self) -> None:
        """Stops the live table; must also be called after an error."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print(self, line: Line) -> None:
        line.told_s = time.monotonic()
        if self._live is None:
            self.console.print(line.text())

    def _table(self) -> RenderableType:
        table = Table("trial", "setting", "state", "at", "reached", "time", box=None)
        shown = sorted(self._lines, key=lambda line: _ORDER.get(line.state, 1))[:MOST_LINES]
        for line in sorted(shown, key=lambda line: line.trial.index):
            table.add_row(*line.cells())
        hidden = len(self._lines) - len(shown)
        return Group(table, f"and {hidden} more") if hidden else table
