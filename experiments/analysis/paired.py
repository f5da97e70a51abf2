"""Paired tests of runs of one seed: over clients, and over the samples of the test set."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from fedloom.experiments.analysis.frames import METRIC
from fedloom.experiments.analysis.intervals import estimate
from fedloom.experiments.analysis.kinds import ALL_TIERS
from fedloom.experiments.analysis.outcomes import FINAL, client_values, final_model
from fedloom.experiments.analysis.tables import Tables

CLIENTS, SAMPLES = "clients", "samples"
UNITS = (CLIENTS, SAMPLES)
"""What two runs of one seed are compared over, besides seeds."""
_COLUMNS = ["run_id", "model", "tier", "subnet", "unit", "units"]


@dataclass(frozen=True)
class Difference:
    """The mean of a value minus that of the baseline, with its 95 % interval; None where it is undefined."""

    test: str
    compared: int
    difference: float
    low: float | None = None
    high: float | None = None
    p_value: float | None = None


def unit_values(tables: Tables, metric: str, over: str, each: str) -> pd.DataFrame:
    """One row per (run, model, tier) and client or test sample.

    Columns: run_id, model, tier, subnet, unit (client_id, or the sample's place), units (equal where the units are the
    same: a hash of the clients' data, or of the test set's labels), and the metric; `each="run"` has the final models
    alone, called "final". Over clients every client has its own tier's model, and the tier is "all". Over samples
    accuracy is 1 or 0, from the models that the runs kept.
    Raises ValueError for other metrics than accuracy and loss, and for models whose samples have several labels.
    """
    if metric not in ((METRIC, "loss") if over == CLIENTS else (METRIC,)):
        raise ValueError(f"over={over!r} compares accuracy{' or loss' if over == CLIENTS else ''}, not {metric}")
    rows = _of_clients(tables, metric) if over == CLIENTS else _of_samples(tables)
    if each == "run":
        final = {run_id: final_model(of_run) for run_id, of_run in rows.groupby("run_id")}
        rows = rows[rows["model"] == rows["run_id"].map(final)]
        if rows.groupby("run_id")["tier"].nunique().max() > 1:
            raise ValueError("runs with a model per tier have no single one to test over samples: use each='model'")
        rows = rows.assign(model=FINAL, tier=ALL_TIERS)
    return rows


def _of_clients(tables: Tables, metric: str) -> pd.DataFrame:
    rows = client_values(tables, metric).rename(columns={"client_id": "unit", "value": metric})
    hashes = tables.runs.set_index("run_id")["partition_hash"].to_dict()
    return rows.assign(tier=ALL_TIERS, subnet="", units=rows["run_id"].map(hashes))[[*_COLUMNS, metric]]


def _of_samples(tables: Tables) -> pd.DataFrame:
    from fedloom.experiments.export.export import correct_by_sample  # imports torch

    found = []
    for paths in tables.paths:
        for (model, tier, subnet), (correct, labels) in correct_by_sample(paths).items():
            place = {"run_id": paths.run_id, "model": model, "tier": tier, "subnet": subnet, "units": labels}
            found.append(pd.DataFrame({"unit": np.arange(len(correct)), METRIC: correct.astype(float)}).assign(**place))
    return pd.concat(found, ignore_index=True) if found else pd.DataFrame(columns=[*_COLUMNS, METRIC])


def paired(rows: pd.DataFrame, baseline: pd.DataFrame, metric: str, over: str) -> tuple[Difference, str]:
    """The test of two models over the clients or samples that both have, and the name of these.

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
    # Equal values that were computed in other orders differ by rounding errors.
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
