"""Means with 95 % confidence intervals, over seeds: runs that repeat a seed count as one sample, their mean."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from fedloom.experiments.analysis.tables import Tables, configuration

CONFIDENCE = 0.95

FEWEST = 3
"""Values from which there is an interval and a test: Student's quantile is 12.7 for two values, 4.3 for three."""


@dataclass(frozen=True)
class Estimate:
    """The mean of `runs` independent values and the interval mean ± half_width; null for fewer than `FEWEST` values.

    Runs that repeat a seed are not independent: they count as one value, their mean.
    """

    mean: float
    half_width: float | None
    runs: int
    values: tuple[float, ...]


def is_absent(value: Any) -> bool:
    """Whether a value is None, NaN or pandas' NA."""
    return bool(pd.isna(value))


def estimate(values: Iterable[Any]) -> Estimate | None:
    """Mean and 95 % interval by Student's t with n - 1 degrees of freedom; None if all values are absent."""
    known = tuple(float(v) for v in values if not is_absent(v))
    n = len(known)
    if n == 0:
        return None
    mean = math.fsum(known) / n  # independent of the order of the runs
    if n < FEWEST:
        return Estimate(mean, None, n, known)
    variance = math.fsum((v - mean) ** 2 for v in known) / (n - 1)
    from scipy.special import stdtrit  # half a second, which a few runs do not need

    quantile = float(stdtrit(n - 1, 0.5 + CONFIDENCE / 2))
    return Estimate(mean, quantile * math.sqrt(variance / n), n, known)


SEEDS = "seeds"
"""The column with all seeds of a row's run, as JSON text."""


def seeds_of(tables: Tables, run_id: str) -> str:
    """All seeds of a run as JSON text; the run's id if it did not record them."""
    config, recorded = configuration(tables, run_id), tables.recorded(run_id, "seeds")
    if recorded is not None:
        return json.dumps(recorded, sort_keys=True)
    if "seed" not in config:
        return json.dumps({"run_id": run_id})
    follow = {"seed": config["seed"], **{k: v for k, v in config.get("seeds", {}).items() if v is not None}}
    return json.dumps(follow, sort_keys=True)


def by_seed(rows: pd.DataFrame, measures: Sequence[str]) -> pd.DataFrame:
    """The means of the measures per distinct `seeds`."""
    return rows.groupby(SEEDS, sort=True)[list(measures)].mean()


def estimate_by_seed(values: Iterable[Any], seeds: Iterable[str]) -> Estimate | None:
    """Mean and interval over distinct seeds; `seeds` holds the seed of each value. None if all values are absent."""
    known: dict[str, list[float]] = {}
    for value, seed in zip(values, seeds, strict=True):
        if not is_absent(value):
            known.setdefault(seed, []).append(float(value))
    return estimate(math.fsum(repeats) / len(repeats) for repeats in known.values())


def spread(rows: pd.DataFrame, by: Sequence[str], value: str) -> pd.DataFrame:
    """Mean, min and max of a value over `seeds`, per combination of the columns `by`.

    Several rows of a run are averaged first, then the runs that repeat a seed.
    """
    per_run = rows.groupby([*by, SEEDS, "run_id"], observed=True)[value].mean()
    per_seed = per_run.groupby([*by, SEEDS], observed=True).mean()
    return per_seed.groupby(list(by), observed=True).agg(["mean", "min", "max"])
