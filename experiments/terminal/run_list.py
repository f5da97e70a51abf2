"""The list of runs in the terminal: ids are whole, so that they can be copied, and found in a file."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from fedloom.platform.results.paths import Names
from fedloom.platform.results.status import Status

LEAST_MESSAGE = 24
"""Characters of a message that fit beside a run; with less room the message stands below it."""
BELOW = "    "


@dataclass(frozen=True)
class ListedRun:
    """A run with its names and its status, or why that cannot be read."""

    run_id: str
    names: Names
    status: Status | ValueError

    @property
    def message(self) -> str:
        """What the status says, or why it cannot be read, on one line."""
        said = str(self.status) if isinstance(self.status, ValueError) else self.status.message
        return " ".join(said.split())

    def as_dict(self) -> dict[str, Any]:
        """All that is known, by name."""
        known = {"run_id": self.run_id, **asdict(self.names)}
        if isinstance(self.status, ValueError):
            nothing = dict.fromkeys(field.name for field in fields(Status))
            return {**known, **nothing, "state": "unknown", "message": str(self.status)}
        return {**known, **asdict(self.status)}


def place_of(status: Status) -> str:
    """The round that a run has reached in its stage, counted from 1 as people do; empty before the first stage."""
    if not status.stage:
        return ""
    return f"{status.round_shown}/{status.rounds_total}"


def run_lines(runs: Sequence[ListedRun], width: int | None, *, whole: bool) -> list[str]:
    """A line of heads and a line per run, as wide as they have to be: only messages are cut to the terminal's width.

    Without a width (a pipe, a file) nothing is cut, and every run is one line; neither is a message if it is `whole`.
    """
    rows = [("run", "name", "tags", "state", "stage", "round"), *map(_cells, runs)]
    kept = [column for column in zip(*rows, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in kept]
    heads, *starts = (
        "  ".join(cell.ljust(length) for cell, length in zip(row, widths, strict=True))
        for row in zip(*kept, strict=True)
    )
    lines = [f"{heads}  message" if any(run.message for run in runs) else heads]
    for run, start in zip(runs, starts, strict=True):
        lines += _with_message(start, run.message, width, whole=whole)
    return [line.rstrip() for line in lines]


def _cells(run: ListedRun) -> tuple[str, ...]:
    status, called = run.status, (run.names.name or "", " ".join(run.names.tags))
    if isinstance(status, ValueError):
        return run.run_id, *called, "unknown", "", ""
    return run.run_id, *called, status.state, status.stage, place_of(status)


def _with_message(start: str, message: str, width: int | None, *, whole: bool) -> list[str]:
    room = len(message) if width is None else width - len(start) - 2
    if not message or len(message) <= room:
        return [f"{start}  {message}"]
    if not whole and room >= LEAST_MESSAGE:
        return [f"{start}  {shortened(message, room)}"]
    if width is None or whole:
        return [start, f"{BELOW}{message}"]
    return [start, f"{BELOW}{shortened(message, width - len(BELOW))}"]


def shortened(text: str, length: int) -> str:
    """The text, cut to this length with an ellipsis."""
    return text if len(text) <= length else f"{text[: length - 1]}…"
