"""Compares the values of one configuration key, or experiments, over seeds and tests them against a baseline."""

import difflib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from fedloom.experiments.analysis.frames import METRIC
from fedloom.experiments.analysis.intervals import CONFIDENCE, FEWEST, estimate
from fedloom.experiments.analysis.outcomes import OUTCOMES, outcomes
from fedloom.experiments.analysis.seeds import by_seed
from fedloom.experiments.analysis.settings import NOT_SET, alike, differing, essential, flat, names_apart
from fedloom.experiments.analysis.summary import MEASURES, MODEL_KEY, by_model, per_model
from fedloom.experiments.analysis.tables import Tables, configuration

EXPERIMENT, SEED = "experiment", "seed"
_ROUNDING = 1e-12
_KEYS_SHOWN = 8
_EACH: Mapping[str, tuple[Sequence[str], Callable[[Tables], pd.DataFrame]]] = {
    "model": (MEASURES, per_model),
    "run": (OUTCOMES, outcomes),
}


@dataclass(frozen=True)
class Run:
    """A run in a comparison: its value of the key, and the rest of its configuration without seeds."""

    run_id: str
    value: str
    rest: Mapping[str, Any]


@dataclass(frozen=True)
class Difference:
    """The mean of a value minus that of the baseline, with its 95 % interval; None where it is undefined."""

    test: str
    compared: int
    difference: float
    low: float | None = None
    high: float | None = None
    p_value: float | None = None


def compare(
    tables: Tables,
    by: str,
    metric: str = METRIC,
    *,
    each: str = "model",
    baseline: Any = None,
    pair: str | None = SEED,
    ignore: Iterable[str] = (),
) -> pd.DataFrame:
    """One row per value of `by` (a configuration key, or "experiment"), model and tier: the metric over seeds.

    A run is compared with runs that differ from it only in `by`, in seeds and in the keys of `ignore` (or below them).
    If there are several such groups, `within` names them. Columns: within, model, tier, subnet, value, n (seeds), mean
    and half_width (95 %, Student's t; null for one seed), baseline; and for the comparison with the baseline: test
    ("paired t" for equal seeds, "Welch t" for different seeds, "none" if one of the two has a single seed), compared
    (number of pairs, or of values of both), difference (of the means), difference_low and difference_high (95 %),
    p_value (two-sided, not corrected for the number of rows; null if the values do not vary).

    `each="run"` compares what runs end with (see `outcomes`), so that methods whose models differ can be compared.

    `metric` is one of `MEASURES`, or with `each="run"` of `OUTCOMES`; `baseline` is a value of `by`, by default that of
    the oldest run. `pair` is "seed" (pairs of runs with all seeds equal), the key of one seed such as
    "seeds.partition", or None for no pairs. Raises ValueError for unknown names (with the nearest known ones), and if
    there is nothing to compare.
    """
    measures, measured = measured_by(each)
    if metric not in measures:
        raise ValueError(f"there is no metric {metric!r}: {_nearest(metric, measures)}")
    configs = {p.run_id: configuration(tables, p.run_id) for p in tables.paths}
    experiments = {p.run_id: p.experiment for p in tables.paths}
    runs = _runs(experiments, configs, by, tuple(ignore))
    first = _baseline(runs, by, baseline)
    _check_comparable(runs, by)
    frame = measured(tables).dropna(subset=[metric])
    if frame.empty:
        raise ValueError(f"no run has a value of {metric} yet: wait for the final evaluation, or compare total_bytes")
    frame["pair"] = [_pair_of(s, configs[r], pair, by) for r, s in zip(frame["run_id"], frame["seeds"], strict=True)]
    found = []
    for within, group in _groups(runs):
        rows = frame.merge(pd.DataFrame([(r.run_id, r.value) for r in group], columns=["run_id", "value"]), on="run_id")
        found += [
            {"within": within, **place, **row}
            for place, of_model in by_model(rows)
            for row in _values(of_model, metric, first)
        ]
    columns = ["within", *MODEL_KEY, "value", "n", "mean", "half_width", "baseline", "test", "compared"]
    numbers = ["difference", "difference_low", "difference_high", "p_value"]
    kinds = {**dict.fromkeys(["mean", "half_width", *numbers], "float64"), "n": "int64", "compared": "Int64"}
    return pd.DataFrame(found, columns=[*columns, *numbers]).astype(kinds)


def measured_by(each: str) -> tuple[Sequence[str], Callable[[Tables], pd.DataFrame]]:
    """The measures of `each` (model, run), and the frame that has them."""
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


def _runs(
    experiments: Mapping[str, str], configs: Mapping[str, Mapping[str, Any]], by: str, ignore: Sequence[str]
) -> list[Run]:
    keys = {run_id: dict(flat(config)) for run_id, config in configs.items()}
    known = {key for values in keys.values() for key in values}
    if by != EXPERIMENT and by not in known:
        raise ValueError(f"no run has the configuration key {by!r}: {_nearest(by, sorted(known))}")
    free = (by, EXPERIMENT, *ignore)
    runs = []
    for run_id, values in keys.items():
        value = experiments[run_id] if by == EXPERIMENT else _text(values[by]) if by in values else NOT_SET
        runs.append(Run(run_id, value, essential(configs[run_id], free)))
    return _one_setting_each(runs) if by == EXPERIMENT else runs


def _one_setting_each(runs: list[Run]) -> list[Run]:
    """The runs without their configurations; ValueError if the runs of one experiment differ in more than seeds."""
    rests = {run.value: run.rest for run in runs}
    for run in runs:
        keys = differing([run.rest, rests[run.value]])
        if keys:
            raise ValueError(
                f"the runs of experiment {run.value!r} differ in {_some(keys)}: load some of them, compare by it, "
                "or name it in ignore="
            )
    return [Run(run.run_id, run.value, {}) for run in runs]


def _some(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - _KEYS_SHOWN} more" if len(keys) > _KEYS_SHOWN else ""
    return ", ".join(keys[:_KEYS_SHOWN]) + more


def _baseline(runs: Sequence[Run], by: str, given: Any) -> str:
    values = list(dict.fromkeys(run.value for run in sorted(runs, key=lambda r: r.run_id)))
    if len(values) == 1:
        keys = differing([run.rest for run in runs])
        others = f"; they differ in {_some(keys)}" if keys else ""
        raise ValueError(f"all runs have {by}={values[0]}, so there is nothing to compare{others}")
    if given is None:
        return values[0]
    if _text(given) not in values:
        raise ValueError(f"no run has {by}={_text(given)} as the baseline: there are {', '.join(values)}")
    return _text(given)


def _check_comparable(runs: Sequence[Run], by: str) -> None:
    if all(len({run.value for run in group}) == 1 for _, group in _groups(runs)):
        keys = differing([run.rest for run in runs])
        raise ValueError(
            f"runs that differ in {by} differ in other keys, too: {_some(keys)}; name in ignore= those that belong to "
            "it, or compare by='experiment'"
        )


def _groups(runs: Sequence[Run]) -> list[tuple[str, list[Run]]]:
    by_id = {run.run_id: run for run in runs}
    groups = [[by_id[run_id] for run_id in group] for group in alike({run.run_id: run.rest for run in runs})]
    names = names_apart([group[0].rest for group in groups], [group[0].run_id for group in groups])
    return list(zip(names, groups, strict=True))


def _pair_of(seeds: str, config: Mapping[str, Any], pair: str | None, by: str) -> str | None:
    """The text that a run shares with its partner under another value of `by`."""
    every = json.loads(seeds)
    if pair is None:
        return None
    if pair == SEED:
        return json.dumps({name: value for name, value in every.items() if by not in (name, f"seeds.{name}")})
    known = {**dict(flat(config)), **{f"seeds.{name}": value for name, value in every.items()}}
    if pair not in known:
        raise ValueError(f"runs cannot be paired by {pair!r}: {_nearest(pair, [SEED, *sorted(known)])}")
    return _text(known[pair])


def _values(rows: pd.DataFrame, metric: str, baseline: str) -> list[dict[str, Any]]:
    """One row per value; the baseline's comes first."""
    groups = {str(value): group for value, group in rows.groupby("value", sort=False)}
    names = sorted(groups, key=lambda name: name != baseline)
    found = []
    for name in names:
        known = estimate(by_seed(groups[name], [metric])[metric])
        assert known is not None, "rows without the metric were dropped"
        row = {"value": name, "n": known.runs, "mean": known.mean, "half_width": known.half_width, "baseline": baseline}
        if name != baseline:
            row |= _against(groups[name], groups.get(baseline), metric)
        found.append(row)
    return found


def _against(rows: pd.DataFrame, baseline: pd.DataFrame | None, metric: str) -> dict[str, Any]:
    if baseline is None:
        return {"test": "none"}
    paired = _paired(rows, baseline, metric)
    found = difference(*paired, paired=True) if paired else difference(*(
        by_seed(r, [metric])[metric].to_numpy() for r in (rows, baseline)
    ), paired=False)  # fmt: skip
    values = {"test": found.test, "compared": found.compared, "difference": found.difference, "p_value": found.p_value}
    return {**values, "difference_low": found.low, "difference_high": found.high}


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
    """Student's t test for pairs, or Welch's t test, and the test's interval. Source: scipy.stats."""
    from scipy import stats  # imported here, because it loads slowly and reports do not need it

    name, compared = ("paired t", len(values)) if paired else ("Welch t", len(values) + len(baseline))
    mean = float(np.mean(values) - np.mean(baseline))
    if min(len(values), len(baseline)) < FEWEST:
        return Difference("none", compared, mean)
    varying = [values - baseline] if paired else [values, baseline]
    # Rounding errors of equal differences would look like a tiny variance and give a tiny p value.
    scale = max(float(np.abs(side).max()) for side in (values, baseline))
    if all(float(np.ptp(side)) <= _ROUNDING * scale for side in varying):
        return Difference(name, compared, mean, mean, mean)
    result = stats.ttest_rel(values, baseline) if paired else stats.ttest_ind(values, baseline, equal_var=False)
    interval = result.confidence_interval(CONFIDENCE)
    return Difference(name, compared, mean, float(interval.low), float(interval.high), float(result.pvalue))
