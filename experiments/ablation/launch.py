"""Runs the trials of an ablation with Ray Tune, each in its own placement group and as many at once as fit."""

import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from fedloom.actors.address import resolve_address
from fedloom.actors.cluster import connected, own_resources
from fedloom.experiments.ablation.checks import Checked, Cluster, checked_trials
from fedloom.experiments.ablation.plan import next_batch
from fedloom.experiments.ablation.running import (
    AblationView,
    ResultsLocation,
    RunningAblation,
    TrialEvents,
    check_idle,
    end_search,
    kind_of,
    wait_for_earlier_processes,
)
from fedloom.experiments.runs.configuration import config_from_dict
from fedloom.experiments.store.ablations import Ablation, write_ablation
from fedloom.experiments.store.trials import FAILED, FINAL, TrialState, trial_states
from fedloom.experiments.terminal import while_read
from fedloom.platform.federation.config import GENERATED
from fedloom.platform.results.copies import check_results, fetch
from fedloom.platform.runs.run import Resume, RunIdentity
from fedloom.platform.runs.supernets import stored_supernet

QUIET = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # fedloom's tables hold the same values
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_GLOBAL_CHECKPOINT_S": "86400",  # the plan and the runs' files replace Tune's own state
    "TUNE_WARN_THRESHOLD_S": "30",
    "TUNE_FORCE_TRIAL_CLEANUP_S": "20",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}
"""Environment variables that stop Tune from writing its own files and output; read when it is imported or started."""


@dataclass(frozen=True)
class AblationEnd:
    """How an ablation ended.

    `kind` is done (every trial is done or was stopped early), failed, infrastructure or interrupted.
    """

    ablation_id: str
    kind: str
    states: tuple[TrialState, ...]


def start_ablation(
    ablation: Ablation, results: str | Path, view: AblationView, only: Collection[int] | None = None
) -> AblationEnd:
    """Runs a new ablation to its end, or `only` the trials of these indices; `results` is a folder or a URL.

    Raises ValueError, before any file is written, for a trial that cannot run or does not fit the cluster.
    """
    location = ResultsLocation(str(results), check_results(str(results)))
    indices = [trial.index for trial in ablation.trials if only is None or trial.index in only]
    with _checked(ablation, location, indices) as checked:
        write_ablation(location.root, ablation)
        with RunningAblation(ablation, location, indices) as running:
            _tune(ablation, location, checked, TrialEvents(view, running))
    return _searched(ablation, location, view, Resume(""))


def _searched(ablation: Ablation, location: ResultsLocation, view: AblationView, how: Resume) -> AblationEnd:
    """Runs the further batches of a Bayesian search, until it has all of its points or is interrupted."""
    end = _end(ablation, location.root)
    with ExitStack() as cluster:
        is_connected = False
        while end.kind in ("done", "failed"):
            longer = next_batch(location.root, ablation)
            if longer is None:
                end_search(ablation, location, take_over=how.take_over)
                break
            if not is_connected:
                cluster.enter_context(connected(config_from_dict(ablation.trials[0].config).ray))
                is_connected = True
            indices = range(len(ablation.trials), len(longer.trials))
            ablation = longer
            write_ablation(location.root, ablation, replaces=True)
            end = _again(ablation, location, view, indices, how, is_connected=True)
    return end


def resume_ablation(
    ablation: Ablation,
    results: str | Path,
    view: AblationView,
    only: Collection[int] | None = None,
    *,
    changed_plugins: bool = False,
    take_over: bool = False,
) -> AblationEnd:
    """Continues an ablation with the trials that have not ended or whose process died, `only` those of these indices.

    Trials that are done, were stopped early, were refused or failed stay as they are. `changed_plugins` and
    `take_over` are those of `resume_run`.
    """
    location = _fetched(ablation, results)
    ended = (*FINAL, "failed", "refused")
    states = trial_states(location.root, ablation)
    indices = [s.trial.index for s in states if s.state not in ended and (only is None or s.trial.index in only)]
    how = Resume("", changed_plugins, take_over)
    _again(ablation, location, view, indices, how)
    return _searched(ablation, location, view, how)


def retry_failed(
    ablation: Ablation,
    results: str | Path,
    view: AblationView,
    only: Collection[int] | None = None,
    *,
    changed_plugins: bool = False,
    take_over: bool = False,
) -> AblationEnd:
    """Repeats the failed trials, `only` those of these indices, each from its last checkpoint.

    The keywords are those of `resume_run`. Raises ValueError if no trial has failed.
    """
    location = _fetched(ablation, results)
    states = trial_states(location.root, ablation)
    indices = [s.trial.index for s in states if s.state in FAILED and (only is None or s.trial.index in only)]
    if not indices:
        raise ValueError(f"no trial of {ablation.ablation_id} has failed: --resume runs those that were not yet run")
    how = Resume("", changed_plugins, take_over)
    end = _again(ablation, location, view, indices, how)
    return _searched(ablation, location, view, how) if end.kind in ("done", "failed") else end


def _fetched(ablation: Ablation, results: str | Path) -> ResultsLocation:
    location = ResultsLocation(str(results), fetch(results, [ablation.ablation_id], tensors=False, ablations=True))
    check_idle(ablation, location.root)
    return location


def _again(
    ablation: Ablation,
    location: ResultsLocation,
    view: AblationView,
    indices: Sequence[int],
    how: Resume,
    *,
    is_connected: bool = False,
) -> AblationEnd:
    if not indices:  # no trial is left; writes the status in case the driver was killed before it did
        with RunningAblation(ablation, location, indices, take_over=how.take_over):
            return _end(ablation, location.root)
    with _checked(ablation, location, indices, is_connected=is_connected) as checked:
        check_idle(ablation, location.root)  # again: another driver may have started while Ray was starting
        with RunningAblation(ablation, location, indices, take_over=how.take_over) as running:
            wait_for_earlier_processes(location.root, [ablation.trials[i] for i in indices])
            _tune(ablation, location, checked, TrialEvents(view, running), how)
    return _end(ablation, location.root)


@contextmanager
def _checked(
    ablation: Ablation, location: ResultsLocation, indices: Sequence[int], *, is_connected: bool = False
) -> Iterator[list[Checked]]:
    """Checks the trials of these indices and, unless `is_connected`, connects to the cluster within the block."""
    chosen = [ablation.trials[i] for i in indices]
    ray_config = config_from_dict(ablation.trials[0].config).ray
    starts_ray = is_own(ablation)
    limits: Any = {"scheduler": ablation.scheduler, "concurrent": ablation.concurrent, "beside": ablation.trials}
    if resolve_address(ray_config.address).startswith("ray://"):
        raise ValueError(
            f"ray.address={ray_config.address}: an ablation's driver runs on the cluster itself; use fedloom submit"
        )
    if ray_config.detached:
        raise ValueError("ray.detached=true is for fedloom run: an ablation goes on by itself with fedloom submit")
    if starts_ray:  # the resources are known before Ray is started, which takes seconds
        cluster = Cluster((own_resources(ray_config),))
        checked = checked_trials(chosen, location.root, cluster, **limits)
    with nullcontext() if is_connected else connected(ray_config):
        if not starts_ray:
            nodes = ray.nodes()  # type: ignore[no-untyped-call]
            cluster = Cluster(tuple(node["Resources"] for node in nodes if node["Alive"]))
            checked = checked_trials(chosen, location.root, cluster, **limits)
        yield checked


def is_own(ablation: Ablation) -> bool:
    """Whether this ablation starts its own Ray cluster on this machine."""
    return resolve_address(str(ablation.trials[0].config["ray"]["address"])) == "local"


def _tune(
    ablation: Ablation,
    location: ResultsLocation,
    checked: Sequence[Checked],
    events: TrialEvents,
    how: Resume | None = None,
) -> None:
    """Runs the checked trials until they end or until Ctrl-C."""
    os.environ.update({name: os.environ.get(name, value) for name, value in QUIET.items()})
    # These import Tune, which reads the environment.
    from fedloom.experiments.ablation.trial import Job
    from fedloom.experiments.ablation.tuning import Work, tune_trials

    states = trial_states(location.root, ablation)
    at_once = max(1, min(len(checked), *(c.at_once for c in checked), ablation.concurrent or len(checked)))
    while_read(events.view.planned, ablation, states, at_once, len(checked))
    stage = checked[0].compared_stage
    work = []
    for c in checked:
        identity = RunIdentity(c.trial.run_id, ablation.ablation_id, c.trial.index, {**c.trial.setting})
        config = {**_absolute(c.trial.config), "results": location.of_trials}
        resume = replace(how or Resume(""), run_id=c.trial.run_id)
        job = Job(c.trial.index, config, identity, c.compared_stage, resume=resume)
        work.append(Work(job, c.bundles, c.supernet))
    if stage is not None:  # a new scheduler first receives the rounds of trials that have ended
        ended = [s.trial for s in states if s.trial.index not in events.ablation.indices and s.status is not None]
        configs = [{**trial.config, "results": location.of_trials} for trial in ended]
        replays = [
            Job(trial.index, config, RunIdentity(trial.run_id), stage, replay=True)
            for trial, config in zip(ended, configs, strict=True)
        ]
        work = [*(Work(job, REPLAY) for job in replays), *work]
    storage = Path(tempfile.mkdtemp(prefix="fedloom-tune-"))
    try:
        tune_trials(
            work,
            pin=not is_own(ablation),
            is_stored=lambda key: stored_supernet(location.root, key) is not None,
            scheduler=ablation.scheduler,
            attempts=ablation.attempts,
            concurrent=ablation.concurrent,
            storage=storage,
            name=ablation.ablation_id,
            events=events,
        )
    finally:
        shutil.rmtree(storage, ignore_errors=True)


REPLAY = ({"CPU": 0.01},)
"""Resources of a job that only replays the rounds in the tables of a run."""


def _absolute(config: Any) -> dict[str, Any]:
    """The configuration with absolute paths, for processes with other working directories, such as client actors."""
    changed = dict(config)
    for group, key in (("tiers", "device_table"), ("data", "root"), ("data", "cache")):
        path = config[group].get(key)
        if path and path != GENERATED:
            changed[group] = {**changed[group], key: str(Path(path).expanduser().absolute())}
    return changed


def _end(ablation: Ablation, root: Path) -> AblationEnd:
    states = tuple(trial_states(root, ablation))
    return AblationEnd(ablation.ablation_id, kind_of(states), states)
