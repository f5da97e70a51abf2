"""How the trials of an ablation stand: what their runs say, and what their runs cannot say."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fedloom.experiments.store.ablations import Ablation, Trial
from fedloom.platform.results.files import write_atomically
from fedloom.platform.results.paths import RunPaths
from fedloom.platform.results.status import Status, read_status

ENDS = "ends.json"
STATUS = "status.json"

WAITING = "waiting"
STOPPED = "stopped"
UNSENT = "unsent"
FINAL = ("done", STOPPED)
"""States of trials that are not to be run again."""
FAILED = ("failed", "refused", "died", UNSENT)
"""States that --retry-failed is for; of these --resume runs only those again whose process died."""
BY_INFRASTRUCTURE = ("died", UNSENT)


@dataclass(frozen=True)
class TrialState:
    """How a trial stands.

    `state` is waiting, running, stalled, dead (its process is gone), interrupted, failed (its clients did), refused (it
    cannot run as it is), died (its process did, for the last time), unsent (done, but its files did not reach the URL
    of the results), stopped (early, by the scheduler) or done.
    """

    trial: Trial
    state: str
    message: str = ""
    status: Status | None = None


def counted(states: Sequence[TrialState]) -> str:
    """How many trials are in which state, in a few words."""
    return ", ".join(f"{number} {state}" for state, number in Counter(s.state for s in states).items())


@dataclass(frozen=True)
class End:
    """How a trial ended where its run does not say: stopped early, refused, died, or unsent."""

    kind: str
    message: str = ""


def read_ends(root: Path, ablation: Ablation) -> dict[int, End]:
    """The trials' ends that their runs do not tell, by index."""
    try:
        values = json.loads((ablation.folder(root) / ENDS).read_bytes())
        return {int(index): End(**end) for index, end in values.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{ablation.folder(root) / ENDS} is damaged: move it away; the runs tell the rest") from error


def write_ends(root: Path, ablation: Ablation, ends: Mapping[int, End]) -> None:
    """Replaces what is known of the trials' ends."""
    content = {str(index): asdict(end) for index, end in sorted(ends.items())}
    write_atomically(ablation.folder(root) / ENDS, json.dumps(content).encode())


def trial_states(root: Path, ablation: Ablation) -> list[TrialState]:
    """How every trial stands now, in the plan's order; writes nothing."""
    return list(_states(root, ablation))


def _states(root: Path, ablation: Ablation) -> Iterator[TrialState]:
    ends = read_ends(root, ablation)
    for trial in ablation.trials:
        path = RunPaths(root, trial.experiment, trial.run_id).status
        end = ends.get(trial.index)
        status = read_status(path) if path.exists() else None
        done = status is not None and status.state == "done" and (end is None or end.kind != UNSENT)
        if status is not None and (done or end is None):
            yield TrialState(trial, status.state, status.message, status)
        elif end is not None:
            yield TrialState(trial, end.kind, end.message, status)
        else:
            yield TrialState(trial, WAITING)
