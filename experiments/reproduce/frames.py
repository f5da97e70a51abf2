"""The frames from which quantities are read, and how the rows of a run are reduced to one number."""

import math
from collections.abc import Callable, Mapping

import pandas as pd

from fedloom.experiments.analysis.clients import fairness
from fedloom.experiments.analysis.outcomes import per_model
from fedloom.experiments.analysis.rounds import communication, communication_by_kind, convergence
from fedloom.experiments.analysis.silos import latest_architectures, p_matrix, per_silo, personalisation_gains
from fedloom.experiments.analysis.subnets import SEARCHED, labels_of, subnets
from fedloom.experiments.analysis.tables import RUN_KEY, Tables, by_stage, requires
from fedloom.experiments.analysis.targets import first_reached
from fedloom.experiments.analysis.tiers import PERPLEXITY, pareto, per_tier, perplexity_of

SMALLEST, LARGEST = "smallest", "largest"


def subnets_by_size(tables: Tables) -> pd.DataFrame:
    """The final evaluation of SuperFedNAS runs: one row per (run, model, target, architecture).

    Columns: those of `subnets.subnets` (model is supernet for subnets of the family, searched or alone; macs,
    parameters, test_accuracy, test_loss, validation_accuracy, ...), size (smallest, largest, or the subnet's label,
    such as d=0,1,0,1 e=0.14; empty for searched ones), and rank: 1 for the fewest MACs among those of a model in its
    run.
    """
    requires(tables, "evaluations", "candidates", "models")
    labels = labels_of(tables)
    frame = subnets(tables, labels)
    ends = {
        (run_id, "-".join(map(str, subnet))): name
        for run_id, space in labels.spaces.items()
        for subnet, name in ((space.smallest, SMALLEST), (space.largest, LARGEST))
    }
    rows = zip(frame["run_id"], frame["model"], frame["architecture"], frame["label"], strict=True)
    size = ["" if model == SEARCHED else ends.get((run, arch), label) for run, model, arch, label in rows]
    rank = frame.groupby(["run_id", "model"])["macs"].rank(method="first")
    return frame.assign(size=pd.Series(size, frame.index, dtype=object), rank=rank.astype("Int64"))


def gains(tables: Tables) -> pd.DataFrame:
    """Personalisation gains, one row per (run, client_id).

    Columns: own (p_ii), others (mean p_ij), best_other, compared, gain (g_i). Source: SPIDER, Eq. 6, Fig. 3.
    """
    requires(tables, "evaluations")
    return personalisation_gains(p_matrix(tables))


def cells(tables: Tables) -> pd.DataFrame:
    """How much the searched cells of a run's silos differ, one row per run.

    Columns: silos, distinct (different architectures), distinct_normal and distinct_reduction (different cells).
    Source: SPIDER, Fig. 2.
    """
    requires(tables, "clients", "evaluations")
    rows_by_run = []
    for key, rows in latest_architectures(tables).groupby(RUN_KEY, sort=False):
        parts = [text.split("/") for text in map(str, rows["architecture"])]
        halves = [(tuple(p[: len(p) // 2]), tuple(p[len(p) // 2 :])) for p in parts]
        different = (len({*halves}), len({normal for normal, _ in halves}), len({reduction for _, reduction in halves}))
        rows_by_run.append((*key, len(halves), *different))
    columns = [*RUN_KEY, "silos", "distinct", "distinct_normal", "distinct_reduction"]
    return pd.DataFrame(rows_by_run, columns=columns)


def targets(tables: Tables) -> pd.DataFrame:
    """The cost of reaching a target accuracy on validation data: one row per (run, training stage, target).

    Columns: those of `targets.first_reached`, and target (.5 to .9).
    """
    levels = (0.5, 0.6, 0.7, 0.8, 0.9)
    return pd.concat([first_reached(tables, level).assign(target=level) for level in levels], ignore_index=True)


FRAMES: Mapping[str, Callable[[Tables], pd.DataFrame]] = {
    "models": per_model,
    "tiers": per_tier,
    "fairness": fairness,
    "fairness_in_perplexity": lambda tables: fairness(tables, PERPLEXITY),
    "silos": per_silo,
    "subnets": subnets_by_size,
    "gains": gains,
    "cells": cells,
    "communication": communication,
    "communication_by_kind": lambda tables: communication_by_kind(communication(tables)),
    "candidates": pareto,
    "convergence": convergence,
    "targets": targets,
    "rounds": lambda tables: by_stage(tables.rounds),
    "clients": lambda tables: by_stage(tables.clients),
    "evaluations": lambda tables: by_stage(tables.evaluations),
}
"""The frames from which a quantity may be read; the docstrings of the functions list the columns."""
OF_VALIDATION = ("candidates", "rounds", "clients", "communication", "communication_by_kind", "convergence", "targets")
"""Frames without a value on test data."""


def _only_one(values: "pd.Series[float]") -> float:
    if len(values) > 1:
        raise ValueError(f"{len(values)} rows of one run and place: choose one by where, or give reduce")
    return float(values.iloc[0])


REDUCTIONS: Mapping[str, Callable[["pd.Series[float]"], float]] = {
    "one": _only_one,
    "mean": lambda values: math.fsum(values) / len(values),
    "std": lambda values: float(values.std(ddof=0)),
    "min": lambda values: float(values.min()),
    "max": lambda values: float(values.max()),
    "sum": math.fsum,
    "first": lambda values: float(values.iloc[0]),
    "last": lambda values: float(values.iloc[-1]),
    "count": lambda values: float(len(values)),
}
"""How the rows of one run and place are reduced to one number; `one` raises ValueError for several rows."""

CONVERSIONS: Mapping[str, Callable[[float], float]] = {
    "none": lambda value: value,
    "perplexity": perplexity_of,
    "error": lambda accuracy: 1.0 - accuracy,
}
"""Conversions of a number that was read from a table."""
