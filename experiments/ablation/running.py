"""The files that the driver of a running ablation writes: a status with a heartbeat, and how trials ended."""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fedloom.experiments.runs.launch import mark_interrupted
from fedloom.experiments.store.ablations import FOLDER, Ablation, Trial
from fedloom.experiments.store.trials import (
    BY_INFRASTRUCTURE,
    FAILED,
    FINAL,
    STATUS,
    STOPPED,
    End,
    TrialState,
    counted,
    read_ends,
    trial_states,
    write_ends,
)
from fedloom.experiments.terminal import while_read
from fedloom.platform.results.copies import mirror_folder
from fedloom.platform.results.lock import OwnedError, OwnershipLostError, check_unowned, owned
from fedloom.platform.results.paths import RunPaths
from fedloom.platform.results.status import Heartbeat, StatusFile
from fedloom.platform.results.store import is_remote
from fedloom.platform.runs.resuming import check_run_unowned

logger = logging.getLogger(__name__)

SEND_S = 15.0
"""Seconds between two uploads of the ablation's heartbeat to the URL of the results."""

EARLIER_PROCESSES_S = 30.0
"""Seconds within which the trials' processes of a killed driver must end."""

INTERRUPTED = "interrupted; the round in progress is lost"


class AblationView(Protocol):
    """Shows the progress of an ablation; called by the driver."""

    def planned(self, ablation: Ablation, states: Sequence[TrialState], at_once: int, to_run: int) -> None:
        """`to_run` of the trials will run, at most `at_once` at the same time."""
        ...

    def started(self, index: int) -> None:
        """A trial started."""
        ...

    def round(self, index: int, figures: Mapping[str, Any]) -> None:
        """A trial finished a round; `figures` holds its stage, round, metric and loss."""
        ...

    def ended(self, index: int, end: End) -> None:
        """A trial ended."""
        ...

    def waiting(self, message: str) -> None:
        """No trial runs; `message` says why."""
        ...


@dataclass(frozen=True)
class ResultsLocation:
    """Location of the results: the folder or URL as given, and the folder on this machine."""

    results: str
    root: Path

    @property
    def of_trials(self) -> str:
        """The URL or absolute folder for the trials' processes, whose working directory differs."""
        return self.results if is_remote(self.results) else str(self.root.absolute())


def kind_of(states: Sequence[TrialState]) -> str:
    """The state of an ablation whose trials have these states: done, interrupted, infrastructure or failed."""
    left = {s.state for s in states if s.state not in FINAL}
    if not left:
        return "done"
    if left - set(FAILED):
        return "interrupted"
    return "infrastructure" if left & set(BY_INFRASTRUCTURE) else "failed"


def check_idle(ablation: Ablation, root: Path) -> None:
    """Raises ValueError if another driver runs the ablation."""
    check_unowned(ablation.folder(root), f"ablation {ablation.ablation_id}")


def wait_for_earlier_processes(root: Path, trials: Sequence[Trial]) -> None:
    """Waits for the trials' processes of an earlier driver, which end shortly after it.

    Raises OwnedError, a ValueError that names the owner, if one on this machine still runs after
    `EARLIER_PROCESSES_S`; the trials themselves check for processes on other machines.
    """
    end_s = time.monotonic() + EARLIER_PROCESSES_S
    for trial in trials:
        paths = RunPaths(root, trial.experiment, trial.run_id)
        while True:
            try:
                check_run_unowned(paths)
                break
            except OwnedError:
                if time.monotonic() > end_s:
                    raise
            time.sleep(0.5)


class RunningAblation:
    """Context of an ablation that runs: claims the ablation, writes its status, and records how trials end.

    Its end raises OwnershipLostError if another driver has taken over the ablation at the URL of the results.

    Args:
        indices: the trials to run; their earlier ends are discarded.
        take_over: whether to replace a lease at the URL of the results, whoever holds it.
        is_last: whether a Bayesian search suggests no more points than these. Until then its status says interrupted
            between two batches, so that a search that ends there does not look as if it were done.
    """

    def __init__(
        self,
        ablation: Ablation,
        location: ResultsLocation,
        indices: Sequence[int],
        *,
        take_over: bool = False,
        is_last: bool = False,
    ) -> None:
        self._is_over = is_last or ablation.points_left <= 0
        self._take_over = take_over
        self.ablation, self.location, self.root = ablation, location, location.root
        self.indices = frozenset(indices)
        self._ends: dict[int, End] = {}
        self._done = 0
        self._over = threading.Event()
        self._sender = threading.Thread(target=self._send_beats, name="ablation-mirror", daemon=True)

    def __enter__(self) -> "RunningAblation":
        with ExitStack() as contexts:
            what = f"ablation {self.ablation.ablation_id}"
            folder, results = self.ablation.folder(self.root), self.location.results
            self._ownership = contexts.enter_context(owned(folder, what, results, self.root, take_over=self._take_over))
            self._status = StatusFile(self.ablation.folder(self.root) / STATUS)
            self._ends = {i: e for i, e in read_ends(self.root, self.ablation).items() if i not in self.indices}
            states = trial_states(self.root, self.ablation)
            self._done = sum(s.state in FINAL for s in states)
            total = len(states)
            self._status.write("running", stage=self.ablation.name, round=self._done, rounds_total=total, message="")
            write_ends(self.root, self.ablation, self._ends)
            self._heartbeat = Heartbeat(self._status)
            self._sender.start()
            self._contexts = contexts.pop_all()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        with self._contexts:
            self._heartbeat.stop()
            self._over.set()
            self._sender.join()
            self._write_end()
        if error is None:
            self.check_owned()

    def check_owned(self) -> None:
        """Raises OwnershipLostError once another driver is known to have taken over; makes no request."""
        self._ownership()

    def _write_end(self) -> None:
        # The trials' processes have ended, so that no other process writes these files.
        for state in trial_states(self.root, self.ablation):
            if state.trial.index in self.indices:
                self._mark(state.trial, "stopped early" if state.state == STOPPED else INTERRUPTED)
        states = trial_states(self.root, self.ablation)
        kind = kind_of(states)
        written: Any = "failed" if kind == "infrastructure" else kind if self._is_over else "interrupted"
        self._status.write(written, round=sum(s.state in FINAL for s in states), message=counted(states))
        self._send()

    def _mark(self, trial: Trial, message: str) -> None:
        try:
            self.check_owned()
            mark_interrupted(self.location.results, RunPaths(self.root, trial.experiment, trial.run_id), message)
        except (OSError, ValueError, OwnershipLostError) as error:
            logger.warning("run %s was not sent: %s", trial.run_id, error)

    def ended(self, index: int, end: End) -> None:
        """Records the end of a trial if the files of its run do not show it."""
        self._done += end.kind in FINAL
        if end.kind not in ("done", "failed", "interrupted"):
            self._ends[index] = end
            write_ends(self.root, self.ablation, self._ends)
        self._status.write("running", round=self._done)

    def _send_beats(self) -> None:
        if is_remote(self.location.results):
            while not self._over.wait(SEND_S):
                self._send()

    def _send(self) -> None:
        try:
            self._ownership.ask()
            mirror_folder(self.location.results, f"{FOLDER}/{self.ablation.ablation_id}")
        except (OSError, ValueError, OwnershipLostError) as error:
            logger.warning("the ablation's status and the ends of its trials were not sent: %s", error)


def end_search(ablation: Ablation, location: ResultsLocation, *, take_over: bool = False) -> None:
    """Writes the status of a Bayesian search that has points left and suggests none."""
    if ablation.points_left > 0:
        with RunningAblation(ablation, location, (), take_over=take_over, is_last=True):
            pass


class TrialEvents:
    """Receives Tune's events of trials by index, records them, and shows them while the output is open.

    No method raises: Tune would treat the error as a failure of the trial and start the trial a second time.
    """

    def __init__(self, view: AblationView, ablation: RunningAblation) -> None:
        self.view, self.ablation = view, ablation

    def started(self, index: int) -> None:
        """A trial started."""
        if index in self.ablation.indices:
            while_read(self.view.started, index)

    def round(self, index: int, figures: Mapping[str, Any]) -> None:
        """A trial finished a round."""
        if index in self.ablation.indices:
            while_read(self.view.round, index, figures)

    def ended(self, index: int, end: End) -> None:
        """A trial ended."""
        if index not in self.ablation.indices:
            return
        try:
            self.ablation.ended(index, end)
        except (OSError, ValueError) as error:
            logger.warning("the end of trial %d (%s) could not be recorded: %s", index, end.kind, error)
        while_read(self.view.ended, index, end)

    def waiting(self, message: str) -> None:
        """No trial runs; `message` says why."""
        while_read(self.view.waiting, message)
