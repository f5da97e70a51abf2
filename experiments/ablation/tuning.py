"""Drives Ray Tune: one Tuner over the planned trials, in their order, each in its own placement group."""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import ray
from ray import tune
from ray.exceptions import RayError
from ray.tune.error import TuneError
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from fedloom.experiments.ablation.checks import Bundles
from fedloom.experiments.ablation.running import TrialEvents
from fedloom.experiments.ablation.trial import END, MESSAGE, STAGE_ROUND, TRIAL, Job, TrialActor
from fedloom.experiments.store.trials import STOPPED, End
from fedloom.platform.runs.source_code import named_modules

MOST_ROUNDS = 1_000_000_000
NODE_SHARE = 0.001
"""Share of the resource `node:ADDRESS` that binds a trial's server to the node whose disk holds the results."""


WAITING_S = 30.0
"""Seconds without a running trial after which the reason is reported."""


@dataclass(frozen=True)
class Work:
    """A trial for Tune: its job, the bundles of its client actors, and the key of the supernet that it shares."""

    job: Job
    bundles: Bundles
    supernet: str | None = None


def tune_trials(
    work: Sequence[Work],
    *,
    is_stored: Callable[[str], bool],
    pin: bool,
    scheduler: Mapping[str, Any],
    attempts: int,
    concurrent: int | None,
    storage: Path,
    name: str,
    events: TrialEvents,
) -> None:
    """Runs the trials until they end; after Ctrl-C it stops all trials and returns.

    With `pin` the trials' servers run on the driver's node. `storage` is a folder for Tune's own files. A trial whose
    process dies is started again, up to `attempts` starts in all.
    """
    for logger in ("ray.tune", "ray.train"):  # fedloom reports the failures of trials itself
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    pinned: dict[str, float] = {}
    if pin:
        pinned = {f"node:{ray.util.get_node_ip_address()}": NODE_SHARE}  # type: ignore[no-untyped-call]
    groups = {w.job.index: _group(w.job, pinned, w.bundles) for w in work}
    actor = tune.with_parameters(TrialActor, jobs={w.job.index: w.job for w in work}, folder=os.getcwd())
    trainable = tune.with_resources(actor, lambda config: groups[config[TRIAL]])
    order = [Pending(w.job.index, w.supernet, w.job.replay) for w in work]
    tuner = tune.Tuner(
        trainable,
        tune_config=tune.TuneConfig(
            search_alg=PlanSearcher(order, is_stored),
            scheduler=_scheduler(scheduler),
            num_samples=len(work),
            max_concurrent_trials=concurrent,
            # A process is not reused if its trial may still be in a round (stopped by a scheduler), or if it imported
            # the user's own code, which may change and may keep state of an earlier trial.
            reuse_actors=scheduler["kind"] == "none" and not any(named_modules(w.job.config) for w in work),
        ),
        run_config=tune.RunConfig(
            name=name,
            storage_path=str(storage),
            callbacks=[_Callback(events)],
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=0, checkpoint_at_end=False),
            failure_config=tune.FailureConfig(max_failures=attempts - 1),
            verbose=0,
        ),
    )
    try:
        tuner.fit()
    except TuneError as error:
        raise RayError(str(error)) from error


def _group(job: Job, pinned: Mapping[str, float], bundles: Bundles) -> tune.PlacementGroupFactory:
    """The trial's placement group: the server's bundle, then the clients'; a run without actors has one."""
    if job.config["executor"]["kind"] == "serial" or job.config["dry_run"] or job.replay:
        return tune.PlacementGroupFactory([{**pinned, **bundles[0]}], strategy="PACK")
    return tune.PlacementGroupFactory([dict(pinned), *bundles], strategy="PACK")


def _scheduler(config: Mapping[str, Any]) -> TrialScheduler:
    if config["kind"] == "none":
        return FIFOScheduler()  # type: ignore[no-untyped-call]
    return ASHAScheduler(
        time_attr=STAGE_ROUND,
        metric=config["metric"],
        mode="min" if config["metric"] == "loss" else "max",
        grace_period=config["grace_rounds"],
        reduction_factor=config["reduction_factor"],
        max_t=MOST_ROUNDS,
    )


class _Callback(tune.Callback):
    """Forwards Tune's events by the trials' indices in the plan."""

    def __init__(self, events: TrialEvents) -> None:
        self._events = events
        self._last_s = time.monotonic()

    def __getstate__(self) -> dict[str, Any]:
        # Tune pickles its callbacks; a terminal cannot be pickled, and a resumed ablation has a new one.
        return {}

    def on_trial_start(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        self._events.started(trial.config[TRIAL])

    def on_trial_result(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, result: dict[str, Any], **info: Any
    ) -> None:
        if "stage" in result:
            self._events.round(trial.config[TRIAL], result)

    def on_step_end(self, iteration: int, trials: list[TuneTrial], **info: Any) -> None:
        """Reports every `WAITING_S` that trials wait because the cluster is in use or has lost a node.

        Raises OwnershipLostError, upon which Tune stops all trials, if another driver has taken over.
        """
        self._events.ablation.check_owned()
        if any(trial.status == TuneTrial.RUNNING for trial in trials):
            self._last_s = time.monotonic()
        waiting = [trial.config[TRIAL] for trial in trials if trial.status == TuneTrial.PENDING]
        if waiting and time.monotonic() - self._last_s > WAITING_S:
            self._last_s = time.monotonic()
            free = ray.available_resources()  # type: ignore[no-untyped-call]
            self._events.waiting(
                f"trial {waiting[0]} waits for room: the cluster has {free.get('CPU', 0):g} CPUs and "
                f"{free.get('GPU', 0):g} GPUs free"
            )

    def on_trial_complete(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        """The run ended, or the scheduler stopped it."""
        last = trial.last_result or {}
        end = End(last[END], last.get(MESSAGE, "")) if END in last else End(STOPPED, "stopped early by the scheduler")
        self._events.ended(trial.config[TRIAL], end)

    def on_trial_error(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        """The trial's process died and no attempt is left."""
        self._events.ended(trial.config[TRIAL], End("died", _cause(trial)))


def _cause(trial: TuneTrial) -> str:
    """The error that ended the trial's process, in one line."""
    path = trial.error_file
    text = Path(path).read_text() if path and Path(path).exists() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:400] if lines else "its process ended"


# -- which trial is next -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pending:
    """A trial to run, and the key of the supernet that it trains or starts from (None: it shares none).

    A trial with `replay` only reports its finished rounds to a scheduler; all others wait for it.
    """

    index: int
    supernet: str | None = None
    replay: bool = False


class PlanSearcher(Searcher):
    """Suggests the planned trials, one after the other.

    Args:
        pending: the trials, in the order in which they should start.
        is_stored: whether a trained supernet with the given key is stored.
    """

    def __init__(self, pending: Sequence[Pending], is_stored: Callable[[str], bool]) -> None:
        super().__init__()
        self._pending = list(pending)
        self._is_stored = is_stored
        self._running: dict[str, Pending] = {}
        """By Tune's trial id."""

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        """The next trial that need not wait; None while all remaining trials must wait."""
        if not self._pending:
            return cast(dict[str, Any], Searcher.FINISHED)  # a string, which Tune's annotation omits
        for position, trial in enumerate(self._pending):
            if self._can_begin(trial):
                self._running[trial_id] = self._pending.pop(position)
                return {TRIAL: trial.index}
        return None

    def _can_begin(self, trial: Pending) -> bool:
        others = [*self._pending, *self._running.values()]
        if not trial.replay and any(other.replay for other in others):
            return False
        key = trial.supernet
        trained = any(other.supernet == key for other in self._running.values())
        return key is None or not trained or self._is_stored(key)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        # If the trial ended without a stored supernet, the next trial with its key trains one.
        self._running.pop(trial_id, None)

    def save(self, checkpoint_path: str) -> None:
        """Saves nothing: the plan and the files of the runs show which trials are left."""

    def restore(self, checkpoint_path: str) -> None:
        """Restores nothing, as `save` saves nothing."""
