"""Terminal output of an ablation: a view of fixed height with a line per trial, or a line when one starts or ends."""

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Self

from rich.console import Console
from rich.text import Text

from fedloom.experiments.store.ablations import Ablation, Trial
from fedloom.experiments.store.trials import FAILED, FINAL, WAITING, End, TrialState
from fedloom.experiments.terminal import console
from fedloom.experiments.terminal.live import LiveArea, area_below, is_live, spinner
from fedloom.experiments.terminal.notebook import NotebookArea
from fedloom.experiments.terminal.rounds import WIDEST, cut
from fedloom.platform.runs.logs import as_time

MOST_LINES = 40
"""Maximum number of trials in the view; running trials come first."""

TELL_S = 60.0
RUNNING = "running"
_ORDER = {RUNNING: 0, WAITING: 2}


class Line:
    """The displayed state of one trial."""

    def __init__(self, state: TrialState) -> None:
        self.trial: Trial = state.trial
        self.state = state.state
        self.figures: Mapping[str, Any] = {}
        self.reached: Mapping[str, Any] = {}
        self.message = state.message
        self.began_s: float | None = None
        self.took_s: float | None = None
        self.ended_s = 0.0
        self.told_s = time.monotonic()

    def cell(self, name: str) -> str:
        """The text of a column: trial, setting, state, at (stage and round), loss, metric or time."""
        shown = self.figures
        if name == "trial":
            return str(self.trial.index)
        if name == "setting":
            return self.trial.label()
        if name == "state":
            return self.state
        if name == "at":
            return f"{shown['stage']} {shown['round'] + 1}/{shown['rounds_total']}" if shown else ""
        if name == "time":
            seconds = self.took_s
            if seconds is None and self.began_s is not None:
                seconds = time.monotonic() - self.began_s
            return as_time(seconds) if seconds else ""
        return f"{self.reached[name]:.4f}" if name in self.reached else ""

    def round(self, figures: Mapping[str, Any]) -> None:
        """Records a finished round; loss and metric of an evaluation are only the last model's and are not kept."""
        self.figures = figures
        if figures["stage"] != "evaluation":
            self.reached = figures

    def text(self) -> str:
        """All cells and the message in one line."""
        parts = [self.cell(name) for name in ("setting", "state", "at")]
        known = [name for name in ("loss", "metric") if name in self.figures and self.figures is self.reached]
        reached = " ".join(f"{name} {self.cell(name)}" for name in known)
        message = f"  {self.message}" if self.message and self.state != "done" else ""
        cells = [f"trial {self.trial.index:>4}", *parts, reached, self.cell("time")]
        return "  ".join(cell for cell in cells if cell) + message


FIGURES = (("state", 8), ("at", 20), ("loss", 7), ("metric", 7), ("time", 8))
"""Columns of the view beside a trial's number and setting, and their widths."""
NARROW = ("state", "metric", "time")
"""Columns of the view on a terminal that is less than `NARROW_WIDTH` characters wide."""
NARROW_WIDTH = 72


def _urgency(line: Line) -> tuple[int, float]:
    """Sort key: running trials first, then those that ended, the latest first, then those that wait."""
    return _ORDER.get(line.state, 1), -line.ended_s


class TerminalView:
    """Shows an ablation in the terminal; implements `running.AblationView`.

    Used in a `with` block, which always restores the terminal, even after errors.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.console: Console = console(quiet)
        self._lines: list[Line] = []
        self._lock = threading.Lock()
        self._began_s = time.monotonic()
        self._doing = ""
        self._area: LiveArea | NotebookArea | None = None
        if not quiet and is_live(self.console):
            self.console = console(folds=False)
            self._area = area_below(self.console, self.lines)
            self._area.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def doing(self, what: str) -> None:
        """Sets what is being started, which the view shows until the trials are planned."""
        self._doing = what

    def planned(self, ablation: Ablation, states: Sequence[TrialState], at_once: int, to_run: int) -> None:
        self.console.print(
            f"ablation {ablation.ablation_id}: {len(states)} trials, {to_run} to run, up to {at_once} at once"
        )
        if ablation.title:
            self.console.print(ablation.title)
        with self._lock:
            self._lines = [Line(state) for state in states]

    def started(self, index: int) -> None:
        with self._lock:
            line = self._lines[index]
            line.state, line.began_s = RUNNING, time.monotonic()
        self._print(line)

    def round(self, index: int, figures: Mapping[str, Any]) -> None:
        """Updates the trial's line; outside a terminal, prints it at most once every `TELL_S`."""
        line = self._lines[index]
        line.round(figures)
        if time.monotonic() - line.told_s >= TELL_S:
            self._print(line)

    def ended(self, index: int, end: End) -> None:
        with self._lock:
            line = self._lines[index]
            line.state, line.message = end.kind, end.message
            line.ended_s = time.monotonic()
            line.took_s = None if line.began_s is None else line.ended_s - line.began_s
        self._print(line)
        if self._area is not None and end.kind in FAILED:
            self.console.print(f"trial {line.trial.index} ({line.trial.label()}) {end.kind}: {end.message}")

    def waiting(self, message: str) -> None:
        self.console.print(message)

    def close(self) -> None:
        """Leaves the view's last lines on the terminal; may be called twice."""
        if self._area is not None:
            self._area.transient = not self._lines
            self._area.stop()
            self._area = None

    def _print(self, line: Line) -> None:
        line.told_s = time.monotonic()
        if self._area is None:
            self.console.print(line.text())

    def lines(self, width: int, height: int) -> list[Text]:
        """A bar of ended trials and a line per trial; if not all fit, running ones first, then the latest to end."""
        width = min(width, WIDEST)
        with self._lock:
            time_text = as_time(time.monotonic() - self._began_s)
            if not self._lines:
                return [Text.assemble((spinner(), "cyan"), f" {self._doing}  {time_text}")]
            counts = Counter(line.state for line in self._lines)
            ended = sum(counts[state] for state in (*FINAL, *FAILED))
            said = ", ".join(f"{count} {state}" for state, count in counts.items())
            bar = min(30, width // 3)
            filled = bar * ended // len(self._lines)
            head = Text.assemble(("━" * filled, "green"), ("─" * (bar - filled), "bright_black"))
            head.append(f" {ended}/{len(self._lines)} ended in {time_text}: {said}")
            columns = [c for c in FIGURES if width >= NARROW_WIDTH or c[0] in NARROW]
            number = max(len("trial"), len(str(len(self._lines))))
            setting = max(0, width - number - 1 - sum(size + 1 for _, size in columns))
            sizes = [(name, size) for name, size in (("trial", number), ("setting", setting), *columns)]
            names = Text(" ".join(_cell(name, name, size) for name, size in sizes), style="dim")
            most = min(MOST_LINES, max(1, height - 3))
            rows = sorted(sorted(self._lines, key=_urgency)[:most], key=lambda line: line.trial.index)
            lines = [Text(" ".join(_cell(name, line.cell(name), size) for name, size in sizes)) for line in rows]
            hidden = len(self._lines) - len(rows)
            return [head, names, *lines, *([Text(f"and {hidden} more", style="dim")] if hidden else [])]


def _cell(name: str, text: str, size: int) -> str:
    """The text in `size` characters, figures aligned to the right and all else to the left."""
    text = cut(text, size) if size else ""
    return text.rjust(size) if name in ("loss", "metric", "time") else text.ljust(size)
