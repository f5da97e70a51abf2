"""The states of an ablation's trials, from the files of their runs and from the ends that the driver recorded."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fedloom.experiments.store.ablations import Ablation, Trial, check_no_link
from fedloom.platform.results.files import read_json, typed, write_atomically
from fedloom.platform.results.paths import RunPaths
from fedloom.platform.results.status import Status, read_status
from fedloom.platform.results.tables import is_done

ENDS = "ends.json"
STATUS = "status.json"

WAITING = "waiting"
STOPPED = "stopped"
UNSENT = "unsent"
FINAL = ("done", STOPPED)
"""States of trials that never run again."""
FAILED = ("failed", "refused", "died", UNSENT)
"""States of trials that --retry-failed runs again; --resume runs only those in `BY_INFRASTRUCTURE` again."""
BY_INFRASTRUCTURE = ("died", UNSENT)


@dataclass(frozen=True)
class TrialState:
    """The state of a trial.

    `state` is waiting, running, stalled, dead (its process is gone), interrupted, failed (clients failed), refused (its
    configuration cannot run), died (its process died and no attempt is left), unsent (done, but its files were not
    uploaded to the URL of the results), stopped (early, by the scheduler), done, or unknown (its status is damaged).
    """

    trial: Trial
    state: str
    message: str = ""
    status: Status | None = None


def counted(states: Sequence[TrialState]) -> str:
    """The number of trials in each state, as text."""
    return ", ".join(f"{number} {state}" for state, number in Counter(s.state for s in states).items())


@dataclass(frozen=True)
class End:
    """How a trial ended, for ends that its run's files do not show: stopped early, refused, died, or unsent."""

    kind: str
    message: str = ""


def driver_status(folder: Path) -> Status | None:
    """The last status that an ablation's driver wrote; None if it was killed before the first.

    Raises ValueError like `check_no_link` and `read_status`.
    """
    check_no_link(folder)
    return read_status(folder / STATUS) if (folder / STATUS).exists() else None


def read_ends(root: Path, ablation: Ablation) -> dict[int, End]:
    """The recorded ends of trials, by index; ValueError for a damaged file."""
    try:
        values = read_json(ablation.folder(root) / ENDS)
        return {int(index): typed(End, end) for index, end in values.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{ablation.folder(root) / ENDS} is damaged: move it away; states are then read from the runs only"
        ) from error


def write_ends(root: Path, ablation: Ablation, ends: Mapping[int, End]) -> None:
    """Replaces the recorded ends of trials."""
    content = {str(index): asdict(end) for index, end in sorted(ends.items())}
    write_atomically(ablation.folder(root) / ENDS, json.dumps(content).encode())


def trial_states(root: Path, ablation: Ablation) -> list[TrialState]:
    """The current state of every trial, in the plan's order; writes no files."""
    states: list[TrialState] = []
    ends = read_ends(root, ablation)
    for trial in ablation.trials:
        paths = RunPaths(root, trial.experiment, trial.run_id)
        end = ends.get(trial.index)
        try:
            status = read_status(paths.status) if paths.status.exists() else None
            if status is not None and status.state == "done" and not is_done(paths):
                status = replace(status, state="interrupted")
        except ValueError as error:
            states.append(TrialState(trial, end.kind if end else "unknown", end.message if end else str(error)))
            continue
        done = status is not None and status.state == "done" and (end is None or end.kind != UNSENT)
        if status is not None and (done or end is None):
            states.append(TrialState(trial, status.state, status.message, status))
        elif end is not None:
            states.append(TrialState(trial, end.kind, end.message, status))
        else:
            states.append(TrialState(trial, WAITING))
    return states
