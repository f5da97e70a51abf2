"""Runs an ablation's trials with Ray Tune: in placement groups of their own, as many at once as the cluster holds."""

import logging
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ray

from fedloom.actors.address import resolve_address
from fedloom.actors.cluster import connected, usable_cpus
from fedloom.experiments.ablation.checks import Checked, checked_trials
from fedloom.experiments.ablation.needs import Cluster
from fedloom.experiments.ablation.store import (
    FINAL,
    FOLDER,
    STATUS,
    STOPPED,
    Ablation,
    End,
    Trial,
    TrialState,
    read_ends,
    trial_states,
    write_ablation,
    write_ends,
)
from fedloom.experiments.config import config_from_dict
from fedloom.platform.config import RayConfig
from fedloom.platform.results.paths import RunPaths
from fedloom.platform.results.remote import check_results, fetch, mirror_folder
from fedloom.platform.results.status import Heartbeat, StatusFile, read_status
from fedloom.platform.results.target import is_remote
from fedloom.platform.run import Label
from fedloom.platform.supernets import stored_supernet

logger = logging.getLogger(__name__)

QUIET = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # the tables hold what its files would
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_GLOBAL_CHECKPOINT_S": "86400",  # what Tune knows is in the plan and in the runs' own files
    "TUNE_WARN_THRESHOLD_S": "30",
    "TUNE_FORCE_TRIAL_CLEANUP_S": "20",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}
"""How Tune is kept from writing files and lines of its own; it reads these when it is imported or started."""


class AblationView(Protocol):
    """Where an ablation's progress is shown; called by the driver."""

    def planned(self, ablation: Ablation, states: Sequence[TrialState], at_once: int) -> None:
        """What is going to be run."""
        ...

    def started(self, index: int) -> None:
        """A trial began."""
        ...

    def round(self, index: int, figures: Mapping[str, Any]) -> None:
        """News of a trial: its stage, round, metric and loss."""
        ...

    def ended(self, index: int, end: End) -> None:
        """A trial ended."""
        ...


@dataclass(frozen=True)
class AblationEnd:
    """How an ablation ended: `kind` is done (every trial, or stopped early), failed or interrupted."""

    ablation_id: str
    kind: str
    states: tuple[TrialState, ...]


def start_ablation(ablation: Ablation, results: str | Path, view: AblationView) -> AblationEnd:
    """Runs a new ablation to its end; `results` is a folder or a URL.

    Raises ValueError, before anything is written, for a trial that cannot run or does not fit the cluster.
    """
    place = _Place(str(results), check_results(str(results)))
    return _run(ablation, place, view, [trial.index for trial in ablation.trials], new=True)


def resume_ablation(ablation: Ablation, results: str | Path, view: AblationView) -> AblationEnd:
    """Continues an ablation: trials that are done or were stopped early stay as they are, failed ones too."""
    root = fetch(results, tensors=False)
    check_idle(ablation, root)
    kept = (*FINAL, "failed", "refused")
    left = [s.trial.index for s in trial_states(root, ablation) if s.state not in kept]
    return _run(ablation, _Place(str(results), root), view, left)


def retry_failed(ablation: Ablation, results: str | Path, view: AblationView) -> AblationEnd:
    """Runs exactly those trials again that failed, each from its last checkpoint."""
    root = fetch(results, tensors=False)
    check_idle(ablation, root)
    again = [s.trial.index for s in trial_states(root, ablation) if s.state in ("failed", "refused", "died")]
    if not again:
        raise ValueError(f"no trial of {ablation.ablation_id} has failed: --resume runs those that were not yet run")
    return _run(ablation, _Place(str(results), root), view, again)


@dataclass(frozen=True)
class _Place:
    """Where results are: a folder or URL as it was given, and the folder on this machine."""

    results: str
    root: Path

    @property
    def of_trials(self) -> str:
        """What the trials' processes are told: theirs is another working directory."""
        return self.results if is_remote(self.results) else str(self.root.absolute())


def check_idle(ablation: Ablation, root: Path) -> None:
    """Raises ValueError while the ablation is at work elsewhere."""
    path = ablation.folder(root) / STATUS
    if not path.exists():
        return
    status = read_status(path)
    if status.state == "running":
        raise ValueError(
            f"ablation {ablation.ablation_id} is still running (process {status.pid} on {status.host}): stop it "
            "first, or wait a minute if that machine is gone"
        )


def _run(
    ablation: Ablation, place: _Place, view: AblationView, indices: Sequence[int], new: bool = False
) -> AblationEnd:
    root = place.root
    if not indices:  # all that could be run was run, perhaps just before the driver was killed
        with _AtWork(ablation, place):
            return _end(ablation, root)
    chosen = [ablation.trials[i] for i in indices]
    ray_config = _ray_config(ablation)
    own = resolve_address(ray_config.address) == "local"
    if own:  # known before Ray is started, which takes seconds
        checked = checked_trials(chosen, root, _own_cluster(ray_config))
    with connected(ray_config):
        if not own:
            checked = checked_trials(chosen, root, _present_cluster())
        if new:
            write_ablation(root, ablation)
        with _AtWork(ablation, place) as at_work:
            states = trial_states(root, ablation)
            at_work.forget(indices)
            view.planned(ablation, states, _at_once(checked))
            _tune(ablation, place, checked, _Told(view, at_work))
    return _end(ablation, root)


def _ray_config(ablation: Ablation) -> RayConfig:
    return config_from_dict(ablation.trials[0].config).ray


def _present_cluster() -> Cluster:
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return Cluster(tuple(node["Resources"] for node in nodes if node["Alive"]))


def _own_cluster(config: RayConfig) -> Cluster:
    cpus = config.num_cpus if config.num_cpus is not None else usable_cpus()
    return Cluster(({"CPU": float(cpus), "GPU": float(config.num_gpus)},))


def _at_once(checked: Sequence[Checked]) -> int:
    return max(1, min(len(checked), *(c.at_once for c in checked)))


class _AtWork:
    """The ablation's status file with its heartbeat, and the ends of its trials, for as long as it is run."""

    def __init__(self, ablation: Ablation, place: _Place) -> None:
        self.ablation, self.place, self.root = ablation, place, (root := place.root)
        self._status = StatusFile(ablation.folder(root) / STATUS)
        self._ends = read_ends(root, ablation)
        self._left = set[int]()

    def __enter__(self) -> "_AtWork":
        self._write("running")
        self._heartbeat = Heartbeat(self._status)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._heartbeat.stop()
        for state in trial_states(self.root, self.ablation):
            if state.state in ("running", "stalled", "dead") and state.trial.index in self._left:
                mark_interrupted(self.root, state.trial)
        left = [s for s in trial_states(self.root, self.ablation) if s.state not in FINAL]
        failed = any(s.state in ("failed", "refused", "died") for s in left)
        self._write("done" if not left else "failed" if failed and kind is None else "interrupted")

    def forget(self, indices: Sequence[int]) -> None:
        """These trials are to be run: how they ended before does not count any more."""
        self._left = set(indices)
        self._ends = {i: end for i, end in self._ends.items() if i not in self._left}
        write_ends(self.root, self.ablation, self._ends)

    def ended(self, index: int, end: End) -> None:
        """Remembers an end of which the trial's run says nothing."""
        if end.kind not in ("done", "failed", "interrupted"):
            self._ends[index] = end
            write_ends(self.root, self.ablation, self._ends)
        if end.kind == STOPPED:
            mark_interrupted(self.root, self.ablation.trials[index], "stopped early")
        self._write("running")

    def _write(self, state: Any) -> None:
        trials = trial_states(self.root, self.ablation)
        done = sum(s.state in FINAL for s in trials)
        self._status.write(state, stage=self.ablation.name, round=done, rounds_total=len(trials))
        try:
            mirror_folder(self.place.results, f"{FOLDER}/{self.ablation.ablation_id}")
        except OSError as error:
            logger.warning("what the ablation knows of its trials was not sent: %s", error)


def mark_interrupted(root: Path, trial: Trial, message: str = "interrupted; the round in progress is lost") -> None:
    """Writes down that a run was interrupted, where its process is gone and could not do so itself."""
    path = RunPaths(root, trial.experiment, trial.run_id).status
    if path.exists():
        last = read_status(path)
        if last.state in ("running", "stalled", "dead"):
            place = {"round": last.round, "rounds_total": last.rounds_total}
            StatusFile(path).write("interrupted", stage=last.stage, message=message, **place)


class _Told:
    """Tune's callbacks in our words: by trial index instead of Tune's own ids."""

    def __init__(self, view: AblationView, at_work: _AtWork) -> None:
        self.view, self.at_work = view, at_work

    def started(self, index: int) -> None:
        """A trial began."""
        self.view.started(index)

    def round(self, index: int, figures: Mapping[str, Any]) -> None:
        """News of a trial."""
        self.view.round(index, figures)

    def ended(self, index: int, end: End) -> None:
        """A trial ended."""
        self.at_work.ended(index, end)
        self.view.ended(index, end)


def _tune(ablation: Ablation, place: _Place, checked: Sequence[Checked], told: _Told) -> None:
    """All trials to their ends, or until Ctrl-C."""
    os.environ.update({name: os.environ.get(name, value) for name, value in QUIET.items()})
    from fedloom.experiments.ablation.tuning import tune_trials  # it imports Tune, which reads the environment

    storage = Path(tempfile.mkdtemp(prefix="fedloom-tune-"))
    asha = ablation.scheduler["kind"] == "asha"
    try:
        tune_trials(
            [_job(ablation, place, c, asha) for c in checked],
            {c.trial.index: c.bundles for c in checked},
            {c.trial.index: c.supernet for c in checked},
            is_stored=lambda key: stored_supernet(place.root, key) is not None,
            scheduler=ablation.scheduler,
            attempts=ablation.attempts,
            concurrent=ablation.concurrent,
            storage=storage,
            name=ablation.ablation_id,
            told=told,
        )
    finally:
        shutil.rmtree(storage, ignore_errors=True)


def _job(ablation: Ablation, place: _Place, checked: Checked, asha: bool) -> Any:
    from fedloom.experiments.ablation.trial import Job

    trial = checked.trial
    label = Label(trial.run_id, ablation.ablation_id, trial.index, {**trial.setting})
    config = {**trial.config, "results": place.of_trials}
    return trial.index, Job(config, label, (ablation.scheduler["stage"] or "") if asha else None)


def _end(ablation: Ablation, root: Path) -> AblationEnd:
    states = tuple(trial_states(root, ablation))
    found = {s.state for s in states}
    if found <= set(FINAL):
        kind = "done"
    elif found & {"waiting", "interrupted", "running", "stalled", "dead"}:
        kind = "interrupted"
    else:
        kind = "failed"
    return AblationEnd(ablation.ablation_id, kind, states)
