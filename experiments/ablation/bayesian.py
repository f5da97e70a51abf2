"""Bayesian search over the axes of an ablation: the next points, by Optuna's sampler through Ray Tune's searcher.

Points come in batches. A batch depends only on the seed and on the number and the results of the points before it, so
that a resumed search suggests the same points as one that was not stopped.
"""

import importlib.util
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from fedloom.experiments.ablation.config import AxisConfig
from fedloom.experiments.store.ablations import Ablation
from fedloom.experiments.store.trials import STOPPED, trial_states
from fedloom.platform.seeding import stream

OBJECTIVE = "validation_accuracy"
"""The column of `analysis.outcomes` that is maximised: never test data."""
MOST_REPEATS = 50
"""Maximum suggestions per new point; one that repeats an earlier point is not run again."""


def check_optuna() -> None:
    """Raises ValueError if Optuna is not installed."""
    if importlib.util.find_spec("optuna") is None:
        raise ValueError('ablation.search.kind=bayesian needs Optuna: pip install "fedloom[optuna]"')


@dataclass(frozen=True)
class Known:
    """A point that was tried: the value or the setting's name by axis, and its objective.

    The objective is None if the point failed, or `was_stopped` early by a scheduler.
    """

    setting: Mapping[str, Any]
    objective: float | None
    was_stopped: bool = False


def suggested(axes: Mapping[str, AxisConfig], seed: int, known: Sequence[Known], count: int) -> list[dict[str, Any]]:
    """At most `count` new points, each a value or a setting's name by axis; fewer if the axes are exhausted."""
    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")  # read when Tune is imported
    import optuna
    from ray.tune.search.optuna import OptunaSearch

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    rng = stream(seed, "ablation", "bayesian", len(known))
    sampler = optuna.samplers.TPESampler(seed=int(rng.integers(2**31)), constant_liar=True)
    space = {name: _distribution(axis) for name, axis in axes.items()}
    searcher = OptunaSearch(space=space, metric=OBJECTIVE, mode="max", sampler=sampler)
    reached: dict[str, float | None] = {}
    for tried in known:
        parameters = {name: _coded(axes[name], value) for name, value in tried.setting.items()}
        failed = tried.objective is None and not tried.was_stopped
        value = cast(float, tried.objective)  # None if it failed or was stopped, which Ray's annotation omits
        searcher.add_evaluated_point(parameters, value, error=failed, pruned=tried.was_stopped)
        reached[json.dumps(parameters)] = tried.objective
    new: list[dict[str, Any]] = []
    for number in range(MOST_REPEATS * count):
        suggestion = searcher.suggest(str(number)) or {}
        point = {name: _value(axis, suggestion[name]) for name, axis in axes.items()}
        text = json.dumps({name: _coded(axes[name], value) for name, value in point.items()})
        if text in reached:
            if (objective := reached[text]) is not None:  # None for a point of this batch, which has not run
                searcher.on_trial_complete(str(number), {OBJECTIVE: objective})
            continue
        reached[text] = None
        new.append(point)
        if len(new) == count:
            break
    return new


def _distribution(axis: AxisConfig) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if axis.integers:
        low, high = axis.integers
        return IntDistribution(low, high)
    if limits := axis.uniform or axis.log_uniform:
        return FloatDistribution(limits[0], limits[1], log=axis.log_uniform is not None)
    return CategoricalDistribution([json.dumps(value) for value in axis.settings or axis.values])


def _coded(axis: AxisConfig, value: Any) -> Any:
    """The value as Optuna represents it: choices become JSON text."""
    return json.dumps(value) if axis.values or axis.settings else value


def _value(axis: AxisConfig, suggestion: Any) -> Any:
    """The value of a suggestion; real numbers are rounded to four significant digits, as in a random search."""
    if axis.values or axis.settings:
        return json.loads(suggestion)
    limits = axis.uniform or axis.log_uniform
    if limits is None:
        return int(suggestion)
    return float(min(max(float(f"{suggestion:.4g}"), limits[0]), limits[1]))


def known_points(root: Path, ablation: Ablation) -> list[Known]:
    """The points of an ablation in order, with the mean of their objective over seeds.

    Raises ValueError for a trial that is done and has no validation accuracy.
    """
    # Imported here: planning needs no tables.
    from fedloom.experiments.analysis.ablation import load_ablation
    from fedloom.experiments.analysis.outcomes import outcomes
    from fedloom.experiments.analysis.tables import ALL_TABLES

    _, tables = load_ablation(root, ablation.ablation_id, tables=[t for t in ALL_TABLES if t != "clients"])
    frame = outcomes(tables)
    of_run = dict(zip(frame["run_id"], frame[OBJECTIVE], strict=True))
    states = {state.trial.index: state.state for state in trial_states(root, ablation)}
    points: list[Known] = []
    for trials in _by_point(ablation):
        ends = {states[trial.index] for trial in trials}
        done = [trial for trial in trials if states[trial.index] == "done"]
        values = [float(of_run[trial.run_id]) for trial in done]
        lacking = next((trial for trial, value in zip(done, values, strict=True) if value != value), None)
        if lacking is not None:
            raise ValueError(
                f"run {lacking.run_id} has no validation accuracy, which a Bayesian search compares: its method does "
                "not score its final models on validation data; use ablation.search.kind=random"
            )
        objective = sum(values) / len(values) if ends == {"done"} else None
        points.append(Known(trials[0].setting, objective, STOPPED in ends))
    return points


def _by_point(ablation: Ablation) -> Iterator[Sequence[Any]]:
    """The trials of each point, which are consecutive, one per seed."""
    seeds = len(ablation.seeds)
    for begin in range(0, len(ablation.trials), seeds):
        yield ablation.trials[begin : begin + seeds]
