"""`fedloom status`: the state of runs and ablations, and processes that dead runs left behind on this machine."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table

from fedloom.actors.watcher import clean, left_over, records_folder
from fedloom.experiments.store.ablations import FOLDER, PLAN, Ablation, ablation_ids, meant_ablation
from fedloom.experiments.store.trials import counted, driver_status, trial_states
from fedloom.experiments.terminal import console, write_json
from fedloom.platform.results.paths import Names, RunPaths, find_runs, list_runs, read_names, start_of
from fedloom.platform.results.status import Status, read_status

LEAST_MESSAGE = 24
"""Minimum characters of room for a message beside its run; with less, the message goes below the run."""

BELOW = "    "


@dataclass(frozen=True)
class ListedRun:
    """A run with its names and its status, or the error with which the status cannot be read."""

    run_id: str
    names: Names
    status: Status | ValueError

    @property
    def message(self) -> str:
        """What the status says, or why it cannot be read, on one line."""
        if isinstance(self.status, ValueError):
            return " ".join(str(self.status).split())
        at = self.status.cluster if self.status.state in ("running", "stalled") else ""
        said = " ".join(self.status.message.split())
        where = f"on Ray at {at}: fedloom attach watches it" if at else ""
        return "; ".join(part for part in (said, where) if part)

    def as_dict(self) -> dict[str, Any]:
        """The run's id, names and status in one flat mapping; state `unknown` if the status cannot be read."""
        known = {"run_id": self.run_id, **asdict(self.names)}
        if isinstance(self.status, ValueError):
            nothing = dict.fromkeys(field.name for field in fields(Status))
            return {**known, **nothing, "state": "unknown", "message": str(self.status)}
        return {**known, **asdict(self.status)}


def round_of(status: Status) -> str:
    """The round that a run has reached in its stage, counted from 1 as people do; empty before the first stage."""
    return f"{status.round_shown}/{status.rounds_total}" if status.stage else ""


def run_lines(runs: Sequence[ListedRun], width: int | None, *, whole: bool) -> list[str]:
    """A header line and a line per run, as wide as necessary: only messages are cut to the terminal's width.

    Without a width (a pipe, a file) nothing is cut, and every run takes one line; with `whole`, no message is cut.
    """
    rows = [("run", "name", "tags", "state", "stage", "round")]
    for run in runs:
        names, status = (run.names.name or "", " ".join(run.names.tags)), run.status
        state = (status.state, status.stage, round_of(status)) if isinstance(status, Status) else ("unknown", "", "")
        rows.append((run.run_id, *names, *state))
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    heads, *starts = (
        "  ".join(cell.ljust(length) for cell, length in zip(row, widths, strict=True))
        for row in zip(*columns, strict=True)
    )
    lines = [f"{heads}  message" if any(run.message for run in runs) else heads]
    for run, start in zip(runs, starts, strict=True):
        lines += _with_message(start, run.message, width, whole=whole)
    return [line.rstrip() for line in lines]


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


MOST = 50
"""The number of the newest runs, and of the newest ablations, that are shown if none is named."""

LONGEST_MESSAGE = 70


def show_status(results: Path, words: Sequence[str], *, as_json: bool, everything: bool = False) -> None:
    """Prints one line per run that the words name, and one per trial of every ablation that they name.

    A word is an id, its beginning, a run's name or a tag. Without words, prints one line per ablation and one per run
    outside ablations: the newest `MOST` of each, or all with `everything`. Reads only the status files and the names
    of what it shows. Raises ValueError for a word that names nothing.
    """
    if words:
        _show_named(results, words, as_json)
    else:
        _show_newest(results, slice(None if everything else -MOST, None), as_json)


def _show_named(results: Path, words: Sequence[str], as_json: bool) -> None:
    by_word = {word: meant_ablation(results, word) for word in words}
    ablations = [ablation for ablation in by_word.values() if ablation is not None]
    paths = [paths for word, ablation in by_word.items() if ablation is None for paths in find_runs(results, word)]
    if len(words) == 1 and len(paths) == 1:
        read_status(paths[0].status)  # an unreadable status is an error if only one run is named
    runs = [_listed(each) for each in dict.fromkeys(paths)]
    if as_json:
        values = [_ablation_as_dict(results, ablation) for ablation in ablations]
        write_json({"runs": [run.as_dict() for run in runs], "ablations": values})
        return
    screen = console()
    for ablation in ablations:
        screen.print(_ablation_table(results, ablation))
    _print_runs(screen, runs, whole=True)


def _show_newest(results: Path, newest: slice, as_json: bool) -> None:
    ids = ablation_ids(results)
    ablations = sorted(ids, key=lambda name: start_of(name, results / FOLDER / name / PLAN))
    known = set(ablations)
    # A trial's id is its ablation's id followed by the trial's number.
    outside = [paths for paths in list_runs(results) if paths.run_id.rpartition("-")[0] not in known]
    states = {name: _driver_status(results, name) for name in ablations[newest]}
    runs = [_listed(paths) for paths in outside[newest]]
    earlier = {"runs": len(outside) - len(runs), "ablations": len(ablations) - len(states)}
    if as_json:
        values = [_progress_as_dict(*each) for each in states.items()]
        write_json({"runs": [run.as_dict() for run in runs], "ablations": values, "earlier": earlier})
        return
    screen = console()
    for name, status in states.items():
        screen.print(_progress_line(name, status))
    _print_runs(screen, runs, whole=False)
    if not runs and not states:
        screen.print(f"no runs under {results}")
    if any(earlier.values()):
        numbers = " and ".join(f"{number} earlier {kind}" for kind, number in earlier.items() if number)
        screen.print(f"and {numbers}: fedloom status --all shows them")


def _listed(paths: RunPaths) -> ListedRun:
    """The run with its names and status; a run whose status cannot be read is listed as unknown."""
    try:
        status: Status | ValueError = read_status(paths.status)
    except ValueError as error:
        status = error
    return ListedRun(paths.run_id, read_names(paths.artifacts), status)


def _print_runs(screen: Console, runs: Sequence[ListedRun], *, whole: bool) -> None:
    for line in run_lines(runs, screen.width if screen.is_terminal else None, whole=whole) if runs else ():
        screen.print(line)


# -- ablations ---------------------------------------------------------------------------------------------------------


DriverStatus = Status | ValueError | None
"""The last status that an ablation's driver wrote, or why it cannot be read; None if it was killed before the first."""


def _driver_status(results: Path, ablation_id: str) -> DriverStatus:
    try:
        return driver_status(results / FOLDER / ablation_id)
    except ValueError as error:
        return error


def _state_of(status: DriverStatus) -> str:
    if isinstance(status, ValueError):
        return "unknown"
    return "interrupted" if status is None else status.state


def _progress_line(ablation_id: str, status: DriverStatus) -> str:
    """The progress of an ablation as its driver recorded it; the trials, which may be many, are not read."""
    if status is None:
        return f"ablation {ablation_id} {_state_of(status)}: no trial was begun"
    if isinstance(status, ValueError):
        return f"ablation {ablation_id} {_state_of(status)}: {status}"
    said = status.message or f"{status.round} of {status.rounds_total} trials ended"
    return f"ablation {ablation_id} {status.state}: {said}"


def _progress_as_dict(ablation_id: str, status: DriverStatus) -> dict[str, Any]:
    if isinstance(status, Status):
        ended, total, message = status.round, status.rounds_total, status.message
    else:
        ended, total, message = 0, None, "" if status is None else str(status)
    state = _state_of(status)
    return {"ablation_id": ablation_id, "state": state, "ended": ended, "planned": total, "message": message}


def _ablation_table(results: Path, ablation: Ablation) -> Group:
    states = trial_states(results, ablation)
    table = Table("trial", "setting", "state", "stage", "round", "message", box=None)
    for s in states:
        stage, at = (s.status.stage, round_of(s.status)) if s.status else ("", "")
        table.add_row(f"{s.trial.index:04}", s.trial.label(), s.state, stage, at, shortened(s.message, LONGEST_MESSAGE))
    state = _state_of(_driver_status(results, ablation.ablation_id))
    line = f"ablation {ablation.ablation_id} {state}: {counted(states)}"
    return Group(line, table, f"a trial's run id is {ablation.ablation_id}-TRIAL")


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
    state = _state_of(_driver_status(results, ablation.ablation_id))
    return {"ablation_id": ablation.ablation_id, "state": state, "trials": trials}


def clean_leftovers(*, as_json: bool) -> None:
    """Ends the processes that dead drivers of this machine left behind, and says which."""
    records = left_over(records_folder())
    ended = clean(records)
    if as_json:
        write_json({"drivers": [r.driver.pid for r in records], "ended": sorted(p.pid for p in ended)})
    elif not ended:
        sys.stdout.write("no processes of dead runs are left on this machine\n")
    else:
        numbers = ", ".join(str(p.pid) for p in sorted(ended))
        drivers = ", ".join(str(r.driver.pid) for r in records)
        sys.stdout.write(f"ended {len(ended)} processes that dead runs (drivers {drivers}) left behind: {numbers}\n")


def hint_at_leftovers() -> None:
    """Says on standard error if dead runs left processes on this machine."""
    left = [process for record in left_over(records_folder()) for process in record.processes]
    if left:
        number = "1 process" if len(left) == 1 else f"{len(left)} processes"
        sys.stderr.write(f"fedloom: dead runs left {number} on this machine; fedloom status --clean ends them\n")
