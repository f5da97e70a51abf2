"""The one place that drives Ray Tune: a Tuner over planned trials, each in a placement group of its own."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import ray
from ray import tune
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler

from fedloom.experiments.ablation.needs import Bundles
from fedloom.experiments.ablation.searcher import Pending, PlanSearcher
from fedloom.experiments.ablation.store import STOPPED, End
from fedloom.experiments.ablation.trial import END, MESSAGE, STAGE_ROUND, TRIAL, Job, TrialActor

MOST_ROUNDS = 1_000_000_000
NODE_SHARE = 0.001
"""Of a node's own resource: binds a trial's server to the node whose disk the results are on."""


class Told(Protocol):
    """Who is told of the trials."""

    def started(self, index: int) -> None:
        """A trial began."""
        ...

    def round(self, index: int, figures: Mapping[str, Any]) -> None:
        """News of a trial."""
        ...

    def ended(self, index: int, end: End) -> None:
        """A trial ended."""
        ...


def tune_trials(
    jobs: Sequence[tuple[int, Job]],
    bundles: Mapping[int, Bundles],
    supernets: Mapping[int, str | None],
    *,
    is_stored: Callable[[str], bool],
    scheduler: Mapping[str, Any],
    attempts: int,
    concurrent: int | None,
    storage: Path,
    name: str,
    told: Told,
) -> None:
    """Runs the jobs, by trial index, to their ends; returns early after Ctrl-C, with every trial stopped.

    `bundles` are what each trial's placement group holds beside its server. `storage` is a folder for what Tune
    itself writes. A trial whose process dies is begun again, `attempts` times in all.
    """
    for logger in ("ray.tune", "ray.train"):  # what went wrong is told by trial, in our words
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    pinned = _own_node() if len(_alive()) > 1 else {}
    groups = {index: _group(job, pinned, bundles[index]) for index, job in jobs}
    trainable = tune.with_resources(
        tune.with_parameters(TrialActor, jobs=dict(jobs)), lambda config: groups[config[TRIAL]]
    )
    order = [Pending(index, supernets[index]) for index, _ in jobs]
    tuner = tune.Tuner(
        trainable,
        tune_config=tune.TuneConfig(
            search_alg=PlanSearcher(order, is_stored),
            scheduler=_scheduler(scheduler),
            num_samples=len(jobs),
            max_concurrent_trials=concurrent,
        ),
        run_config=tune.RunConfig(
            name=name,
            storage_path=str(storage),
            callbacks=[_Callback(told)],
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=0, checkpoint_at_end=False),
            failure_config=tune.FailureConfig(max_failures=attempts - 1),
            verbose=0,
        ),
    )
    tuner.fit()


def _group(job: Job, pinned: Mapping[str, float], bundles: Bundles) -> tune.PlacementGroupFactory:
    """The trial's placement group, first the server's bundle; a serial run's server does its clients' work itself."""
    if job.config["executor"]["kind"] == "serial":
        return tune.PlacementGroupFactory([{**pinned, **bundles[0]}], strategy="PACK")
    return tune.PlacementGroupFactory([dict(pinned), *bundles], strategy="PACK")


def _alive() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def _own_node() -> dict[str, float]:
    address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return {f"node:{address}": NODE_SHARE}


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
    """Tells of trials by their index in the plan."""

    def __init__(self, told: Told) -> None:
        self._told = told

    def __getstate__(self) -> dict[str, Any]:
        # Tune writes its callbacks down to restore them; a terminal cannot be, and a resumed ablation has a new one.
        return {}

    def on_trial_start(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        """A trial's placement group is there and its process begins."""
        self._told.started(trial.config[TRIAL])

    def on_trial_result(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, result: dict[str, Any], **info: Any
    ) -> None:
        """A round."""
        if "stage" in result:
            self._told.round(trial.config[TRIAL], result)

    def on_trial_complete(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        """The run came to an end, or the scheduler stopped it."""
        last = trial.last_result or {}
        end = End(last[END], last.get(MESSAGE, "")) if END in last else End(STOPPED, "stopped early by the scheduler")
        self._told.ended(trial.config[TRIAL], end)

    def on_trial_error(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        """The trial's process died for the last time."""
        self._told.ended(trial.config[TRIAL], End("died", _cause(trial)))


def _cause(trial: TuneTrial) -> str:
    """What ended the trial's process, in one line."""
    path = trial.error_file
    text = Path(path).read_text() if path and Path(path).exists() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:400] if lines else "its process ended"
