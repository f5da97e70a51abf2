"""Tidy frames of an ablation: estimates over seeds per setting and axis, and paired differences to a reference."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedloom.experiments.analysis.compare import Difference, difference, measured_by
from fedloom.experiments.analysis.outcomes import MODEL_KEY, by_model
from fedloom.experiments.analysis.settings import SEEDS, by_seed, estimate
from fedloom.experiments.analysis.tables import ALL_TABLES, METRIC, Tables, fetch_trained, load_paths, with_training
from fedloom.experiments.store.ablations import Ablation, Trial, axis_value, find_ablation
from fedloom.platform.results.copies import fetch
from fedloom.platform.results.paths import RunPaths

_OWN = ("trial", "seed")


def load_ablation(
    results: str | Path, ablation_id: str, *, tables: Iterable[str] = ALL_TABLES
) -> tuple[Ablation, Tables]:
    """Loads the plan of an ablation, and the tables of its trials that have started.

    `ablation_id` is its id or an unambiguous prefix. Runs that started from the supernet of another run include the
    rows of its training (see `with_training`). Raises ValueError under the conditions of `find_ablation` and `load`.
    """
    root = fetch(results, [ablation_id], tensors=False, ablations=True)
    ablation = find_ablation(root, ablation_id)
    planned = [RunPaths(root, t.experiment, t.run_id) for t in ablation.trials]
    paths = [p for p in planned if p.table("runs").exists()]
    fetch_trained(results, paths)
    return ablation, with_training(load_paths(paths, tables))


def ablation_frame(tables: Tables, ablation: Ablation, *, each: str = "model") -> pd.DataFrame:
    """The rows of `per_model` for the trials that have started, with columns for trial, seed and every axis.

    Rows are in the plan's order. With `each="run"` they are those of `outcomes` instead, one per trial.
    The column of an axis is an ordered categorical of the axis' values; lists and nulls are JSON text. A trial that has
    not been evaluated has one row with null qualities; a trial that has not started has none. Raises ValueError if an
    axis has the name of another column.
    """
    frame = measured_by(each)[1](tables)
    taken = sorted({*frame.columns, *_OWN} & set(ablation.axes))
    if taken:
        raise ValueError(f"the axis {taken[0]!r} has the name of a column of the frame: rename it")
    trials = {trial.run_id: trial for trial in ablation.trials}
    frame = frame[frame["run_id"].isin(list(trials))]
    trial_columns = _places([trials[str(run_id)] for run_id in frame["run_id"]], ablation)
    whole = pd.concat([trial_columns.set_index(frame.index), frame], axis=1)
    return whole.sort_values("trial", kind="stable", ignore_index=True)


def _places(trials: Sequence[Trial], ablation: Ablation) -> pd.DataFrame:
    columns: dict[str, Any] = {"trial": [t.index for t in trials], "seed": [t.seed for t in trials]}
    for axis in ablation.axes:
        values = [axis_value(t.setting[axis]) for t in trials]
        columns[axis] = pd.Categorical(values, categories=values_of(ablation, axis), ordered=True)
    return pd.DataFrame(columns).astype({"trial": "int64", "seed": "int64"})


def values_of(ablation: Ablation, axis: str) -> list[Any]:
    """The values of an axis in order, converted by `axis_value`."""
    return [axis_value(value) for value in ablation.axes[axis]]


def is_grid(ablation: Ablation) -> bool:
    """Whether every combination of the axes' values was planned, unlike in a random search."""
    settings = {json.dumps([axis_value(t.setting[axis]) for axis in ablation.axes]) for t in ablation.trials}
    return len(settings) == math.prod(len(values) for values in ablation.axes.values())


def references(ablation: Ablation) -> dict[str, Any]:
    """The reference value of each axis: the experiment's own value if it is on the axis, else the axis' first value.

    A search may not have drawn the experiment's own value.
    """
    on_axes = {axis: values_of(ablation, axis) for axis in ablation.axes}
    own = {axis: axis_value(value) for axis, value in ablation.reference.items()}
    return {axis: own[axis] if own.get(axis) in values else values[0] for axis, values in on_axes.items()}


def held(ablation: Ablation, *axes: str) -> dict[str, Any]:
    """The fixed values of all axes other than `axes`: their references; empty for a random search."""
    if not is_grid(ablation):
        return {}
    return {axis: value for axis, value in references(ablation).items() if axis not in axes}


def holding(frame: pd.DataFrame, values: Mapping[str, Any]) -> pd.DataFrame:
    """The rows in which the axes have these values."""
    for axis, value in values.items():
        frame = frame[frame[axis] == value]
    return frame


def over_seeds(frame: pd.DataFrame, measure: str, by: Sequence[str]) -> pd.DataFrame:
    """One row per combination of the columns `by`: n (seeds), mean, half_width, values (a list, by seed).

    half_width is half the 95 % interval (Student's t), null below three seeds. The rows of one seed count once, as
    their mean. Combinations without any value of the measure are left out.
    """
    estimates = []
    for key, group in frame.dropna(subset=[measure]).groupby(list(by), sort=True, observed=True):
        known = estimate(by_seed(group, [measure])[measure])
        assert known is not None, "rows without the measure were dropped"
        estimates.append((*key, known.runs, known.mean, known.half_width, list(known.values)))
    numbers = {"n": "int64", "mean": "float64", "half_width": "float64"}
    rows = pd.DataFrame(estimates, columns=[*by, *numbers, "values"]).astype(numbers)
    return rows.astype({name: frame[name].dtype for name in by if isinstance(frame[name].dtype, pd.CategoricalDtype)})


def by_setting(frame: pd.DataFrame, measure: str, axes: Sequence[str]) -> pd.DataFrame:
    """One row per setting of these axes and (model, tier, subnet): the columns of `over_seeds` for a measure.

    `frame` comes from `ablation_frame`; `measure` is one of `MEASURES`. Rows are in the order of the axes' values, then
    in the display order of models, tiers and subnets. A seed counts once, with its mean over the axes not in `axes`.
    Raises ValueError for an unknown measure.
    """
    check_measure(frame, measure)
    order = {tuple(model.values()): i for i, (model, _) in enumerate(by_model(frame))}
    rows = over_seeds(frame, measure, [*axes, *MODEL_KEY])
    shown = [order[key] for key in rows[MODEL_KEY].itertuples(index=False, name=None)]
    return rows.assign(shown=shown).sort_values([*axes, "shown"], ignore_index=True).drop(columns="shown")


def marginal(frame: pd.DataFrame, ablation: Ablation, axis: str, measure: str = METRIC) -> pd.DataFrame:
    """`by_setting` along one axis, with the other axes at their references (see `held`).

    Raises ValueError for an unknown axis or measure.
    """
    _check_axis(ablation, axis)
    return by_setting(holding(frame, held(ablation, axis)), measure, [axis])


def differences(
    frame: pd.DataFrame, ablation: Ablation, axis: str, by: Sequence[str], measure: str = METRIC
) -> pd.DataFrame:
    """Differences of a measure between each value of an axis and its reference, per combination of the axes `by`.

    One row per combination and value other than the reference, with the columns of `over_seeds`. Both runs of a pair
    have the same seed, so the interval is that of the paired t test. A run's models, tiers and subnets are averaged.
    """
    key = [*by, SEEDS]
    means = frame.groupby([axis, *key], observed=True)[measure].mean().reset_index()
    is_reference = means[axis] == references(ablation)[axis]
    pairs = means[~is_reference].merge(means[is_reference].drop(columns=axis), on=key, suffixes=("", "_of_reference"))
    pairs[measure] -= pairs[f"{measure}_of_reference"]
    return over_seeds(pairs, measure, [axis, *by])


def check_measure(frame: pd.DataFrame, measure: str) -> None:
    """Raises ValueError for a measure that is no column of the frame."""
    if measure not in frame.columns:
        raise ValueError(f"there is no measure {measure!r} in the frame; its columns are {', '.join(frame.columns)}")


def _check_axis(ablation: Ablation, axis: str) -> None:
    if axis not in ablation.axes:
        raise ValueError(f"{ablation.ablation_id} has no axis {axis!r}; its axes are {', '.join(ablation.axes)}")


def against_reference(frame: pd.DataFrame, ablation: Ablation, axis: str, measure: str = METRIC) -> pd.DataFrame:
    """Paired differences between each value of an axis and its reference, per (model, tier, subnet).

    Two runs form a pair if they have the same seed and differ only in this axis. A seed counts once, as the mean of its
    pairs, since these share data and initialisation. Columns: axis, value, reference, model, tier, subnet, n (pairs),
    seeds, mean (of the seeds' differences), values (a list, by seed), test ("paired t" over seeds, or "none" below
    three seeds and where a seed lacks pairs that others have), low and high (95 %), p_value (two-sided, not corrected
    for the number of rows). A random search has no such pairs and therefore no rows.
    """
    _check_axis(ablation, axis)
    check_measure(frame, measure)
    reference = references(ablation)[axis]
    others = [name for name in ablation.axes if name != axis]
    known = frame.dropna(subset=[measure, "model"])
    comparisons = [
        {"axis": axis, "value": value, "reference": reference, **model, **tested}
        for value in (values_of(ablation, axis) if is_grid(ablation) else ())
        if value != reference
        for model, rows in by_model(known)
        if (tested := _tested(rows, axis, (value, reference), others, measure))
    ]
    numbers = dict.fromkeys(["mean", "low", "high", "p_value"], "float64")
    columns = [
        "axis",
        "value",
        "reference",
        *MODEL_KEY,
        "n",
        "seeds",
        "mean",
        "values",
        "low",
        "high",
        "test",
        "p_value",
    ]
    return pd.DataFrame(comparisons, columns=columns).astype({**numbers, "n": "int64", "seeds": "int64"})


def _tested(
    rows: pd.DataFrame, axis: str, values: tuple[Any, Any], others: Sequence[str], measure: str
) -> dict[str, Any]:
    """The paired test of two values of an axis; empty if there are no pairs."""
    key = ["seed", *others]
    sides = [rows[rows[axis] == value].groupby(key, observed=True)[measure].mean() for value in values]
    both = pd.concat(sides, axis=1, join="inner", keys=["value", "reference"])
    if both.empty:
        return {}
    of_seed = both.groupby("seed")
    seeds = of_seed.mean()
    paired = difference(np.asarray(seeds["value"]), np.asarray(seeds["reference"]), paired=True)
    if len({frozenset(group.droplevel("seed").index) if others else None for _, group in of_seed}) > 1:
        # Seeds with different pairs would also differ in the other axes.
        paired = Difference("none", paired.compared, paired.difference)
    return {
        "n": len(both),
        "seeds": len(seeds),
        "mean": paired.difference,
        "values": (seeds["value"] - seeds["reference"]).tolist(),
        "test": paired.test,
        "low": paired.low,
        "high": paired.high,
        "p_value": paired.p_value,
    }
