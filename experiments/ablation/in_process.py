"""Runs the trials of an ablation one after another in this process, without Ray: `executor.kind=serial`, dry runs."""

from collections.abc import Collection
from dataclasses import replace

import torch

from fedloom.experiments.ablation.checks import Cluster, checked_trials
from fedloom.experiments.ablation.plan import next_batch
from fedloom.experiments.ablation.running import (
    AblationView,
    ResultsLocation,
    RunningAblation,
    TrialEvents,
    end_search,
    wait_for_earlier_processes,
)
from fedloom.experiments.ablation.trial import END, MESSAGE, Job, RunThread
from fedloom.experiments.store.ablations import Ablation, write_ablation
from fedloom.experiments.store.trials import FINAL, End, trial_states
from fedloom.platform.runs.run import RunIdentity

UNLIMITED = 1e6


def is_serial(ablation: Ablation) -> bool:
    """Whether no trial of an ablation needs Ray."""
    return all(t.config["executor"]["kind"] == "serial" or t.config["dry_run"] for t in ablation.trials)


def run_in_process(
    ablation: Ablation,
    location: ResultsLocation,
    view: AblationView,
    only: Collection[int] | None = None,
    *,
    is_new: bool,
) -> None:
    """Runs or resumes the trials that are not done, in the order of the plan; `only` those of these indices, if given.

    A Bayesian search goes on until it has all of its points.
    Raises ValueError for a trial that cannot run, before any file of a new ablation is written, and OwnershipLostError
    if another driver takes over.
    """
    begin = 0
    while True:
        chosen = range(begin, len(ablation.trials)) if only is None else only
        _run_trials(ablation, location, view, chosen, is_new=is_new)
        longer = next_batch(location.root, ablation)
        if longer is None:
            end_search(ablation, location)
            return
        write_ablation(location.root, longer, replaces=True)
        ablation, begin, is_new = longer, len(ablation.trials), False


def _run_trials(
    ablation: Ablation, location: ResultsLocation, view: AblationView, chosen: Collection[int], *, is_new: bool
) -> None:
    states = trial_states(location.root, ablation)
    indices = [s.trial.index for s in states if s.trial.index in chosen and s.state not in FINAL]
    left = [ablation.trials[index] for index in indices]
    # No resources are reserved: one trial at a time has the whole machine.
    machine = Cluster(({"CPU": UNLIMITED, "GPU": UNLIMITED if torch.cuda.is_available() else 0.0},))
    # A dry run has no actors, whatever its executor.
    serial = [replace(t, config={**t.config, "executor": {**t.config["executor"], "kind": "serial"}}) for t in left]
    checked_trials(serial, location.root, machine, beside=ablation.trials)
    if is_new:
        write_ablation(location.root, ablation)
    with RunningAblation(ablation, location, indices) as running:
        wait_for_earlier_processes(location.root, left)
        events = TrialEvents(view, running)
        view.planned(ablation, trial_states(location.root, ablation), 1, len(left))
        for trial in left:
            identity = RunIdentity(trial.run_id, ablation.ablation_id, trial.index, {**trial.setting})
            run = RunThread(Job(trial.index, {**trial.config, "results": location.results}, identity))
            events.started(trial.index)
            run.start()
            try:
                before: object = None
                news = run.news()
                while not news.get("done"):
                    running.check_owned()
                    if news and news != before:
                        events.round(trial.index, news)
                    before, news = news, run.news()
                events.ended(trial.index, End(str(news[END]), str(news[MESSAGE])))
            finally:
                run.stop()
