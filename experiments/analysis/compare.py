"""Compares runs by a configuration key, by experiment or by name, and tests each value against a baseline."""

import difflib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from fedloom.experiments.analysis.outcomes import (
    FINAL,
    MEASURES,
    MODEL_KEY,
    OUTCOMES,
    by_model,
    client_values,
    of_final_model,
    outcomes,
    per_model,
)
from fedloom.experiments.analysis.settings import (
    CONFIDENCE,
    FEWEST,
    NOT_SET,
    alike,
    by_seed,
    differing,
    essential,
    estimate,
    flat,
    names_apart,
    seeds_of,
)
from fedloom.experiments.analysis.tables import ALL_TIERS, METRIC, Tables, configuration, name_of

EXPERIMENT, NAME, SEED = "experiment", "name", "seed"

WHOLE = (EXPERIMENT, NAME)
"""Values of `by` that stand for whole configurations instead of one key."""

SEEDS = "seeds"
_ROUNDING = 1e-12
_KEYS_SHOWN = 8
_EACH: Mapping[str, tuple[Sequence[str], Callable[[Tables], pd.DataFrame]]] = {
    "model": (MEASURES, per_model),
    "run": (OUTCOMES, outcomes),
}


@dataclass(frozen=True)
class Difference:
    """The mean of a value minus that of the baseline, with its 95 % interval; None where it is undefined."""

    test: str
    compared: int
    difference: float
    low: float | None = None
    high: float | None = None
    p_value: float | None = None


@dataclass(frozen=True)
class Run:
    """A run in a comparison.

    Attributes:
        value: its value of the compared key.
        rest: the configuration without seeds, equal for all runs that it is compared with.
        beside: the other keys, with values, in which it may differ from those runs.
    """

    run_id: str
    value: str
    rest: Mapping[str, Any]
    beside: Mapping[str, Any]


def compare(
    tables: Tables,
    by: str,
    metric: str = METRIC,
    *,
    each: str = "model",
    over: str = SEEDS,
    baseline: Any = None,
    pair: str | None = SEED,
    ignore: Iterable[str] = (),
) -> pd.DataFrame:
    """One row per value of `by` (a configuration key, "experiment" or "name"), model and tier: the metric over seeds.

    A run is compared with runs that differ from it only in `by`, in seeds and in the keys of `ignore` (or below them);
    when experiments or names are compared, they may differ in anything. If there are several such groups, `within`
    names them.
    Columns: within, model, tier, subnet, value, n (seeds), mean and half_width (95 %, Student's t; null below three
    seeds), values (a list, by seed), baseline; and for the comparison with the baseline: differs_in (all keys
    besides `by`), test ("paired t" for equal seeds, "Welch t" for different seeds, "none" if either side has fewer
    than three or an infinite value, or if something that is not under test differs: an ignored key, or the runs of
    one name), over (the units of the test, in words), compared (number of pairs, or of values of both sides),
    difference (of the means), difference_low and difference_high (95 %), p_value (two-sided, not corrected for the
    number of rows; null if the values do not vary).

    `each="run"` compares the outcomes of runs (see `outcomes`), so that methods with different models can be compared.

    `over="clients"` and `over="samples"` compare pairs of runs with equal seeds, one row per seed (see `paired`): with
    Wilcoxon's signed-rank test over the clients' own test data, or with McNemar's test over the test set (this runs
    the kept models again). These tests are about the compared models and do not generalise to other seeds.

    `metric` is one of `MEASURES`, or with `each="run"` of `OUTCOMES`; `baseline` is a value of `by`, by default that of
    the oldest run. `pair` is "seed" (pairs of runs with all seeds equal), the key of one seed such as
    "seeds.partition", or None for no pairs. Raises ValueError for unknown names (with the nearest known ones), and if
    there is nothing to compare.
    """
    measures, measured = measured_by(each)
    if metric not in measures:
        raise ValueError(f"there is no metric {metric!r}: {_nearest(metric, measures)}")
    if over not in (SEEDS, *UNITS):
        raise ValueError(f"over={over!r}: there are {', '.join((SEEDS, *UNITS))}")
    configs = {p.run_id: configuration(tables, p.run_id) for p in tables.paths}
    runs = _runs(tables, configs, by, tuple(ignore))
    first = _baseline(runs, by, baseline)
    groups = _groups(runs)
    if all(len({run.value for run in group}) == 1 for _, group in groups):
        raise ValueError(
            f"runs that differ in {by} also differ in {_some(differing([run.rest for run in runs]))}: name those that "
            "belong to it in ignore=, or compare by='experiment'"
        )
    frame = (measured(tables) if over == SEEDS else unit_values(tables, metric, over, each)).dropna(subset=[metric])
    if frame.empty:
        raise ValueError(f"no run has a value of {metric} yet: wait for the final evaluation, or compare total_bytes")
    pairs = {run_id: _pair_of(seeds_of(tables, run_id), configs[run_id], pair, by) for run_id in frame["run_id"]}
    frame["pair"] = frame["run_id"].map(pairs)
    compared_rows = []
    for within, group in groups:
        rows = frame.merge(pd.DataFrame([(r.run_id, r.value) for r in group], columns=["run_id", "value"]), on="run_id")
        beside = {run.run_id: run.beside for run in group}
        compared_rows += [
            {"within": within, **model, **row}
            for model, of_model in by_model(rows)
            for row in (
                _values(of_model, metric, first, beside, by in WHOLE)
                if over == SEEDS
                else _over_units(of_model, metric, first, beside, by in WHOLE, over)
            )
        ]
    if over != SEEDS and not any(row["value"] != first for row in compared_rows):
        raise ValueError(f"over={over!r}: no run with another {by} than {first} has the same seeds as one of {first}'s")
    columns = ["within", *MODEL_KEY, "value", "n", "mean", "half_width", "values", "baseline"]
    columns += ["differs_in", "test", "over", "compared"]
    numbers = ["difference", "difference_low", "difference_high", "p_value"]
    kinds = {**dict.fromkeys(["mean", "half_width", *numbers], "float64"), "n": "int64", "compared": "Int64"}
    return pd.DataFrame(compared_rows, columns=[*columns, *numbers]).astype(kinds)


def measured_by(each: str) -> tuple[Sequence[str], Callable[[Tables], pd.DataFrame]]:
    """The measures for `each` ("model" or "run"), and the function that returns the frame with them."""
    if each not in _EACH:
        raise ValueError(f"each={each!r}: there are {', '.join(_EACH)}")
    return _EACH[each]


def _nearest(name: str, known: Iterable[str]) -> str:
    names = list(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    # Users often remember only the last part of a key.
    close += [n for n in names if n.split(".")[-1] == name.split(".")[-1] and n not in close]
    return f"the nearest are {', '.join(close[:3])}" if close else f"there are {', '.join(names[:_KEYS_SHOWN])}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _runs(tables: Tables, configs: Mapping[str, Mapping[str, Any]], by: str, ignore: Sequence[str]) -> list[Run]:
    keys = {run_id: dict(flat(config)) for run_id, config in configs.items()}
    known = {key for values in keys.values() for key in values}
    if by not in (*known, *WHOLE):
        raise ValueError(f"no run has the configuration key {by!r}: {_nearest(by, sorted(known))}")
    runs = []
    for paths in tables.paths:
        values = keys[paths.run_id]
        named = {EXPERIMENT: paths.experiment, NAME: name_of(tables, paths.run_id)}
        value = named[by] if by in WHOLE else _text(values[by]) if by in values else NOT_SET
        every, rest = (essential(configs[paths.run_id], (by, EXPERIMENT, *free)) for free in ((), ignore))
        if value is not None:
            runs.append(Run(paths.run_id, value, rest, {k: v for k, v in every.items() if k not in rest}))
    if not runs:
        raise ValueError("no run has a name: start runs with name=..., or compare by='experiment'")
    return _one_setting_each(runs, by) if by in WHOLE else runs


def _one_setting_each(runs: list[Run], by: str) -> list[Run]:
    """The runs with `rest` moved to `beside`; ValueError if runs of one experiment or name differ beyond seeds."""
    rests = {run.value: run.rest for run in runs}
    for run in runs:
        keys = differing([run.rest, rests[run.value]])
        if keys:
            raise ValueError(
                f"the runs of {by} {run.value!r} differ in {_some(keys)}: load only some of them, compare by a "
                "key in which they differ, or name it in ignore="
            )
    return [Run(run.run_id, run.value, {}, {**run.rest, **run.beside}) for run in runs]


def _some(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - _KEYS_SHOWN} more" if len(keys) > _KEYS_SHOWN else ""
    return ", ".join(keys[:_KEYS_SHOWN]) + more


def _baseline(runs: Sequence[Run], by: str, wanted: Any) -> str:
    values = list(dict.fromkeys(run.value for run in sorted(runs, key=lambda r: r.run_id)))
    if len(values) == 1:
        keys = differing([run.rest for run in runs])
        others = f"; they differ in {_some(keys)}" if keys else ""
        raise ValueError(f"all runs have {by}={values[0]}, so there is nothing to compare{others}")
    if wanted is None:
        return values[0]
    if _text(wanted) not in values:
        raise ValueError(f"no run has {by}={_text(wanted)} as the baseline: there are {', '.join(values)}")
    return _text(wanted)


def _groups(runs: Sequence[Run]) -> list[tuple[str, list[Run]]]:
    by_id = {run.run_id: run for run in runs}
    groups = [[by_id[run_id] for run_id in group] for group in alike({run.run_id: run.rest for run in runs})]
    names = names_apart([group[0].rest for group in groups], [group[0].run_id for group in groups])
    return list(zip(names, groups, strict=True))


def _pair_of(seeds: str, config: Mapping[str, Any], pair: str | None, by: str) -> str | None:
    """The text that identifies a run's pair: equal for partners under different values of `by`; None for no pairs."""
    every = json.loads(seeds)
    if pair is None:
        return None
    if pair == SEED:
        return json.dumps({name: value for name, value in every.items() if by not in (name, f"seeds.{name}")})
    known = {**dict(flat(config)), **{f"seeds.{name}": value for name, value in every.items()}}
    if pair not in known:
        raise ValueError(f"runs cannot be paired by {pair!r}: {_nearest(pair, [SEED, *sorted(known)])}")
    return _text(known[pair])


def _beside(
    rows: pd.DataFrame, baseline: pd.DataFrame, beside: Mapping[str, Mapping[str, Any]], is_whole: bool
) -> tuple[str, bool]:
    """The other keys in which the runs of the two values differ, and whether all differences are under test.

    Whole configurations are themselves under test, provided that the runs of each side have the same one.
    """
    sides = [[beside[run_id] for run_id in side["run_id"].unique()] for side in (rows, baseline)]
    both = [*sides[0], *sides[1]]
    keys = differing(both)
    shared = [key for key in keys if all(key in values for values in both)]
    others = len(keys) - len(shared)
    more = [f"{others} key{'s' if others > 1 else ''} that some do not have"] if others else []
    is_under_test = not any(differing(side) for side in sides) if is_whole else not keys
    return ", ".join([*shared, *more]), is_under_test


def _over_units(
    rows: pd.DataFrame,
    metric: str,
    baseline: str,
    beside: Mapping[str, Mapping[str, Any]],
    is_whole: bool,
    over: str,
) -> Iterator[dict[str, Any]]:
    """One row, over clients or samples, per value and seed that the baseline also has; the baseline's come first."""
    first = rows[rows["value"] == baseline]
    names = sorted(rows["value"].unique(), key=lambda name: name != baseline)
    for name in names:
        pairs = sorted(set(rows.loc[rows["value"] == name, "pair"].dropna()) & set(first["pair"].dropna()))
        for pair in pairs:
            seed = "one seed" if len(pairs) == 1 else f"one seed, {pair}"
            of_value, other = (side[side["pair"] == pair] for side in (rows[rows["value"] == name], first))
            row = {
                "value": name,
                "n": of_value["unit"].nunique(),
                "mean": of_value.groupby("unit")[metric].mean().mean(),
            }
            row |= {"values": [], "baseline": baseline, "over": seed}
            if name != baseline:
                tested, text = paired(of_value, other, metric, over)
                row["differs_in"], is_under_test = _beside(of_value, other, beside, is_whole)
                row |= _told(tested if is_under_test else Difference("none", tested.compared, tested.difference))
                row["over"] = f"paired over {tested.compared} {text}, {seed}"
            yield row


def _told(tested: Difference) -> dict[str, Any]:
    return {
        "test": tested.test,
        "compared": tested.compared,
        "difference": tested.difference,
        "difference_low": tested.low,
        "difference_high": tested.high,
        "p_value": tested.p_value,
    }


def _values(
    rows: pd.DataFrame, metric: str, baseline: str, beside: Mapping[str, Mapping[str, Any]], is_whole: bool
) -> list[dict[str, Any]]:
    """One row per value; the baseline's comes first."""
    groups = {str(value): group for value, group in rows.groupby("value", sort=False)}
    names = sorted(groups, key=lambda name: name != baseline)
    rows_of_values = []
    for name in names:
        known = estimate(by_seed(groups[name], [metric])[metric])
        assert known is not None, "rows without the metric were dropped"
        row = {"value": name, "n": known.runs, "mean": known.mean, "half_width": known.half_width}
        row |= {"values": list(known.values), "baseline": baseline}
        if name != baseline and baseline in groups:
            row["differs_in"], is_under_test = _beside(groups[name], groups[baseline], beside, is_whole)
            pairs = _paired(groups[name], groups[baseline], metric)
            sides = pairs or tuple(by_seed(groups[side], [metric])[metric].to_numpy() for side in (name, baseline))
            tested = difference(*sides, paired=pairs is not None)
            counts = list(dict.fromkeys(str(len(side)) for side in sides))
            row |= _told(tested if is_under_test else Difference("none", tested.compared, tested.difference))
            seeds = f"{' and '.join(counts)} seed{'' if counts == ['1'] else 's'}"
            row["over"] = f"{'paired over ' if pairs else ''}{seeds}"
        elif name != baseline:
            row["test"] = "none"
        rows_of_values.append(row)
    return rows_of_values


def _paired(rows: pd.DataFrame, baseline: pd.DataFrame, metric: str) -> tuple[np.ndarray, np.ndarray] | None:
    """The values of both sides in the order of their pairs; None unless every value has exactly one partner."""
    both = []
    for side in (rows, baseline):
        values = side.groupby(["seeds", "pair"])[metric].mean().reset_index()  # groupby drops rows without a pair
        if values.empty or values["pair"].duplicated().any():
            return None
        both.append(values.set_index("pair")[metric].sort_index())
    if list(both[0].index) != list(both[1].index):
        return None
    return both[0].to_numpy(), both[1].to_numpy()


def difference(values: np.ndarray, baseline: np.ndarray, *, paired: bool) -> Difference:
    """Student's t test for pairs, or Welch's t test, with its 95 % interval; none if a value is infinite.

    Source: scipy.stats.
    """
    from scipy import stats  # imported here, because it loads slowly and reports do not need it

    name, compared = ("paired t", len(values)) if paired else ("Welch t", len(values) + len(baseline))
    with np.errstate(invalid="ignore"):
        mean = float(np.mean(values) - np.mean(baseline))
    if not np.isfinite(mean):  # a loss of a diverged run
        return Difference("none", compared, mean)
    rounding = _ROUNDING * max(float(np.abs(side).max()) for side in (values, baseline))
    if abs(mean) < rounding:
        mean = 0.0
    if min(len(values), len(baseline)) < FEWEST:
        return Difference("none", compared, mean)
    varying = [values - baseline] if paired else [values, baseline]
    # Rounding errors of equal differences would look like a tiny variance and give a tiny p value.
    if all(float(np.ptp(side)) <= rounding for side in varying):
        return Difference(name, compared, mean, mean, mean)
    result = stats.ttest_rel(values, baseline) if paired else stats.ttest_ind(values, baseline, equal_var=False)
    interval = result.confidence_interval(CONFIDENCE)
    return Difference(name, compared, mean, float(interval.low), float(interval.high), float(result.pvalue))


CLIENTS, SAMPLES = "clients", "samples"

UNITS = (CLIENTS, SAMPLES)
"""The units, besides seeds, over which two runs of one seed can be compared."""

_COLUMNS = ["run_id", "model", "tier", "subnet", "unit", "units"]


def unit_values(tables: Tables, metric: str, over: str, each: str) -> pd.DataFrame:
    """One row per (run, model, tier) and client or test sample.

    Columns: run_id, model, tier, subnet, unit (client_id, or the sample's position), units (a hash of the clients' data
    or of the test set's labels, equal if the units are the same), and the metric. `each="run"` keeps only the final
    models, named "final". Over clients, each client is measured with its own tier's model, and the tier is "all". Over
    samples, accuracy is 1 or 0, computed with the models that the runs kept.
    Raises ValueError for metrics other than accuracy and (over clients) loss, and for samples that have no class label
    each.
    """
    if metric not in ((METRIC, "loss") if over == CLIENTS else (METRIC,)):
        raise ValueError(f"over={over!r} compares accuracy{' or loss' if over == CLIENTS else ''}, not {metric}")
    rows = _of_clients(tables, metric) if over == CLIENTS else _of_samples(tables)
    if each == "run":
        rows = of_final_model(rows)
        if len(rows.drop_duplicates(["run_id", "tier", "subnet"])) > rows["run_id"].nunique():
            raise ValueError("runs with several models have no single model to test over samples: use each='model'")
        rows = rows.assign(model=FINAL, tier=ALL_TIERS)
    return rows


def _of_clients(tables: Tables, metric: str) -> pd.DataFrame:
    rows = client_values(tables, metric).rename(columns={"client_id": "unit", "value": metric})
    hashes = tables.runs.set_index("run_id")["partition_hash"].to_dict()
    return rows.assign(tier=ALL_TIERS, subnet="", units=rows["run_id"].map(hashes))[[*_COLUMNS, metric]]


def _of_samples(tables: Tables) -> pd.DataFrame:
    from fedloom.experiments.export.export import correct_by_sample  # imports torch

    parts = []
    for paths in tables.paths:
        for (model, tier, subnet), (correct, labels) in correct_by_sample(paths).items():
            rows = pd.DataFrame({"unit": np.arange(len(correct)), METRIC: correct.astype(float)})
            parts.append(rows.assign(run_id=paths.run_id, model=model, tier=tier, subnet=subnet, units=labels))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=[*_COLUMNS, METRIC])


def paired(rows: pd.DataFrame, baseline: pd.DataFrame, metric: str, over: str) -> tuple[Difference, str]:
    """The paired test of two models over the clients or samples that both have, and the name of these units.

    Clients: Wilcoxon's signed-rank test. Samples: McNemar's exact test. The interval of the mean difference is
    Student's, over clients or samples. Source: scipy.stats.
    """
    from scipy import stats  # imported here, because it loads slowly and reports do not need it

    if set(rows["units"]) != set(baseline["units"]):
        raise ValueError(
            f"runs are compared over {over} that they share, but their data differ: {_whose(rows, baseline)}"
        )
    sides = [side.groupby("unit")[metric].mean() for side in (rows, baseline)]
    both = pd.concat(sides, axis=1, join="inner").to_numpy()
    # Equal values that were computed in different orders differ by rounding errors.
    differences = np.round(both[:, 0] - both[:, 1], 12)
    known = estimate(differences)
    if known is None:
        raise ValueError(f"the runs have no {over} in common: {_whose(rows, baseline)}")
    half, p_value = known.half_width, None
    if over == CLIENTS and differences.any():
        p_value = float(stats.wilcoxon(differences).pvalue)
    elif differences.any():
        better = int((differences > 0).sum())
        p_value = float(stats.binomtest(better, int((differences != 0).sum())).pvalue)
    low, high = (None, None) if half is None else (known.mean - half, known.mean + half)
    test, text = ("Wilcoxon", "clients") if over == CLIENTS else ("McNemar", "test samples")
    return Difference(test, known.runs, known.mean, low, high, p_value), text


def _whose(*sides: pd.DataFrame) -> str:
    return " and ".join(dict.fromkeys(str(run_id) for side in sides for run_id in side["run_id"].unique()))
