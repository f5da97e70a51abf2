"""Statistics over seeds: runs that repeat a seed count as one sample, the mean of their values."""

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from fedloom.experiments.analysis.intervals import Estimate, estimate, is_absent
from fedloom.experiments.analysis.tables import Tables, configuration

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
