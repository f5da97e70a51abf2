"""Frames of tiers: models and their quality, candidates of the searches, hypervolumes of fronts, and perplexities.

A perplexity is the exponential of the mean loss over all targets of a test set, or of one client's. Means over clients
are means of the clients' perplexities, which are larger than the exponential of their mean loss.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import numpy as np
import pandas as pd

from fedloom.experiments.analysis.clients import fairness
from fedloom.experiments.analysis.tables import (
    ALL_TIERS,
    METRIC,
    MODELS,
    RUN_KEY,
    SHARED,
    TIERS,
    TRAINING,
    Tables,
    by_stage,
    configuration,
    for_all,
    kind_of,
    natural,
    requires,
    shown_models,
    where,
)


def tiers_of(tables: Tables, run_id: str) -> list[str]:
    """The tiers of a run in order: those in its tables and, if it searches, those of its configuration.

    Empty for SuperFedNAS, whose subnets do not belong to tiers, and for cross-silo methods; "all" if the run trains one
    model for all clients.
    """
    config, kind = configuration(tables, run_id), kind_of(tables, run_id)
    if kind != TIERS:
        return [ALL_TIERS] if kind == SHARED else []
    stages = tables.rounds.loc[tables.rounds["run_id"] == run_id, "stage"].unique()
    names = {str(stage).partition("/")[2] for stage in stages} - {""}
    for frame in (tables.candidates, tables.models):
        names |= {str(t) for t in frame.loc[frame["run_id"] == run_id, "tier"].dropna()}
    if "search" in config.get("method", {}):
        bounds = config["tiers"]["upper_bounds"]
        count = config["tiers"]["count"] if bounds is None else len(bounds)
        names |= {f"tier{i}" for i in range(1, count + 1)}
    return sorted(names, key=natural)


def architectures(tables: Tables) -> dict[tuple[str, str], str]:
    """By (run, tier): the architecture that was kept, is being trained, or is the best of the search so far."""
    trained = by_stage(tables.clients[["run_id", "stage", "architecture"]].drop_duplicates())
    measured = tables.evaluations[tables.evaluations["model"] != TRAINING]
    frames = [
        for_all(tables, tables.models)[["run_id", "tier", "architecture"]],
        for_all(tables, measured)[["run_id", "tier", "architecture"]],
        trained.loc[trained["stage_tier"] != "", ["run_id", "stage_tier", "architecture"]].set_axis(
            ["run_id", "tier", "architecture"], axis=1
        ),
        _search_winners(tables),
    ]
    rows = pd.concat([f.astype(object) for f in frames], ignore_index=True).dropna()
    first = rows.drop_duplicates(["run_id", "tier"])
    return {(str(r.run_id), str(r.tier)): str(r.architecture) for r in first.itertuples()}


def _search_winners(tables: Tables) -> pd.DataFrame:
    """The winner of each tier's search, by the search's own rule: the best metric or loss, then the fewest MACs."""
    feasible = tables.candidates[tables.candidates["feasible"].fillna(False)]
    searches = {run: configuration(tables, str(run)).get("method", {}) for run in feasible["run_id"].unique()}
    by_loss = feasible["run_id"].map({run: m.get("search", {}).get("metric") for run, m in searches.items()}).eq("loss")
    merits = feasible["metric"].astype("float64").where(~by_loss, -feasible["loss"].astype("float64"))
    ordered = feasible.assign(merit=merits).sort_values(["merit", "macs"], ascending=[False, True], kind="stable")
    return ordered.drop_duplicates(["run_id", "tier"])[["run_id", "tier", "architecture"]]


def per_tier(tables: Tables, upper_bounds: dict[tuple[str, str], float] | None = None) -> pd.DataFrame:
    """One row per (run, tier); values that are not known yet are null.

    Columns: experiment, run_id, tier, upper_bound (in the unit of `tiers.cost`), architecture, macs, parameters,
    search_metric (validation, with the supernet's weights), test_MODEL for every model (whole test set), gain
    (fine_tuned minus rand_init), kendall_tau (of federated and central scores, mean over generations).
    """
    requires(tables, "rounds", "evaluations", "candidates", "models")
    chosen, bounds = architectures(tables), upper_bounds or {}
    costs = _costs(tables)
    rows = []
    for paths in tables.paths:
        for tier in tiers_of(tables, paths.run_id):
            run_and_tier = (paths.run_id, tier)
            architecture = chosen.get(run_and_tier)
            cost = costs.get((*run_and_tier, architecture), (None, None, None))
            rows.append((paths.experiment, *run_and_tier, bounds.get(run_and_tier), architecture, *cost))
    columns = [*RUN_KEY, "tier", "upper_bound", "architecture", "macs", "parameters", "search_metric"]
    frame = pd.DataFrame(rows, columns=columns).astype(
        {"upper_bound": "Float64", "macs": "Int64", "parameters": "Int64", "search_metric": "float64"}
    )
    key = ["run_id", "tier"]
    tested = where(for_all(tables, tables.evaluations), split="test", metric=METRIC)
    names = shown_models([*MODELS, *tested.loc[tested["client_id"].isna(), "model"].dropna()])
    wide = _central(tested, names).add_prefix("test_").reset_index().astype(dict.fromkeys(key, object))
    frame = frame.merge(wide, on=key, how="left")
    frame["gain"] = frame["test_fine_tuned"] - frame["test_rand_init"]
    correlations = where(tables.evaluations, metric="kendall_tau_federated").groupby(key, sort=False)["value"].mean()
    tau = correlations.rename("kendall_tau").reset_index().astype(dict.fromkeys(key, object))
    return frame.merge(tau, on=key, how="left")


def _costs(tables: Tables) -> dict[tuple[str, str, Any], tuple[Any, Any, Any]]:
    """MACs, parameters and the search's metric per (run, tier, architecture)."""
    columns = ["run_id", "tier", "architecture", "macs", "parameters", "metric"]
    models = for_all(tables, tables.models).reindex(columns=columns)
    both = pd.concat([models.astype(object), tables.candidates[columns].astype(object)], ignore_index=True)
    # Rows of candidates come last and replace those of models, because they also have the metric.
    return {(r[0], r[1], r[2]): (r[3], r[4], r[5]) for r in both.itertuples(index=False)}


def _central(rows: pd.DataFrame, models: list[str]) -> pd.DataFrame:
    """The last value that the server measured: a row per (run_id, tier), a column per model."""
    rows = rows[rows["client_id"].isna()]
    table = rows.pivot_table(index=["run_id", "tier"], columns="model", values="value", aggfunc="last")
    return table.reindex(columns=models).astype("float64").rename_axis(columns=None)


def pareto(tables: Tables) -> pd.DataFrame:
    """One row per scored candidate of every tier's search.

    Columns: experiment, run_id, tier, generation, architecture, macs (forward, per sample), parameters, loss and metric
    (accuracy as a share, validation data), on_front (as recorded by the search), is_winner.
    """
    requires(tables, "candidates")
    chosen = architectures(tables)
    rows = tables.candidates[tables.candidates["feasible"].fillna(False)]
    names = zip(rows["run_id"], rows["tier"], rows["architecture"], strict=True)
    winner = [chosen.get((run, tier)) == architecture for run, tier, architecture in names]
    columns = [*RUN_KEY, "tier", "generation", "architecture", "macs", "parameters", "loss", "metric"]
    front = rows["on_front"].fillna(False).astype(bool)
    return rows[columns].assign(on_front=front, is_winner=pd.Series(winner, rows.index, dtype=bool))


MARGIN = 0.1
"""Default distance of the reference point from the worst values of the fronts, as a share of their range."""


Point = tuple[float, float]
"""MACs and metric."""


def hypervolume(tables: Tables, reference: Point | None = None) -> pd.DataFrame:
    """One row per (run, tier): the share of a box in the plane of MACs and metric that the run's candidates dominate.

    All runs of a tier share one box: from the ideal point (fewest MACs and best metric of any run's front) to the
    `reference` (MACs, metric), by default a tenth of the range beyond the worst values of the fronts. Columns:
    experiment, run_id, tier, points (on the run's front), hypervolume (0 to 1), ideal_macs, ideal_metric,
    reference_macs, reference_metric. Only rows with the same box are comparable. Candidates are the feasible ones of
    the table `candidates`, scored on validation data; the cost is always MACs, independent of the cost measure of the
    tiers. Raises ValueError for a reference that is not worse than the ideal. Source: Zitzler and Thiele, 1998.
    """
    rows = pareto(tables)
    rows = rows[rows["macs"].notna() & np.isfinite(rows["metric"].astype("float64"))]
    shares: list[tuple[Hashable, ...]] = []
    for tier, of_tier in rows.groupby("tier", sort=False):
        fronts = {key: front_of(run) for key, run in of_tier.groupby(["experiment", "run_id"], sort=False)}
        ideal, worst = _box(np.concatenate(list(fronts.values())), reference, str(tier))
        shares += [(*key, tier, len(f), _share(f, ideal, worst), *ideal, *worst) for key, f in fronts.items()]
    points = ["ideal_macs", "ideal_metric", "reference_macs", "reference_metric"]
    return pd.DataFrame(shares, columns=["experiment", "run_id", "tier", "points", "hypervolume", *points])


def front_of(candidates: pd.DataFrame, cost: str = "macs") -> np.ndarray:
    """The non-dominated points (cost, metric), shape (n, 2), sorted by cost."""
    ordered = candidates[[cost, "metric"]].astype("float64").sort_values([cost, "metric"], ascending=[True, False])
    best_before = ordered["metric"].cummax().shift(fill_value=-np.inf)
    return ordered[ordered["metric"] > best_before].to_numpy()


def _box(points: np.ndarray, reference: Point | None, tier: str) -> tuple[Point, Point]:
    """The box that normalises hypervolumes, from the ideal point to the reference point."""
    (least, lowest), (most, best) = points.min(axis=0), points.max(axis=0)
    if reference is None:
        # A front of one point, or without a range, still needs a box with an area.
        wide, high = (most - least) or abs(least) or 1.0, (best - lowest) or abs(best) or 1.0
        reference = (most + MARGIN * wide, lowest - MARGIN * high)
    if reference[0] <= least or reference[1] >= best:
        raise ValueError(
            f"the reference {tuple(map(float, reference))} of (MACs, metric) must be worse than the best of {tier}, "
            f"({least:g}, {best:g}): give more MACs and a lower metric"
        )
    return (float(least), float(best)), (float(reference[0]), float(reference[1]))


def _share(front: np.ndarray, ideal: Point, reference: Point) -> float:
    from pymoo.indicators.hv import HV  # imported here, because it loads slowly and reports do not need it

    # In both dimensions 0 is the ideal and 1 the reference; a point beyond the reference adds no volume.
    scaled = (front - np.array(ideal)) / (np.array(reference) - np.array(ideal))
    inside = scaled[(scaled < 1).all(axis=1)]
    return float(HV(ref_point=np.ones(2))(inside)) if len(inside) else 0.0


PERPLEXITY = "perplexity"

LARGEST_EXPONENT = 700.0
"""Cap of the loss, as in scoring, so that the perplexity of a diverged model stays finite."""


def perplexity_of(loss: float) -> float:
    """The perplexity of a mean cross entropy."""
    return math.exp(min(loss, LARGEST_EXPONENT))


def text_run_ids(tables: Tables) -> frozenset[str]:
    """The runs whose models were measured by perplexity."""
    return frozenset(tables.evaluations.loc[tables.evaluations["metric"] == PERPLEXITY, "run_id"].astype(str))


def with_perplexity(per_tier: pd.DataFrame, tables: Tables) -> pd.DataFrame:
    """Adds perplexity columns to the frame of `per_tier`, if any run was measured by perplexity.

    They are search_perplexity (of the tier's architecture in the search, validation data), perplexity_MODEL (whole test
    set), perplexity_gain (rand_init minus fine_tuned, the reduction), and clients_MODEL_mean, _std and _worst (the
    highest) over the tier's clients on their own test data; a row of tier "all" has those over all clients.
    """
    rows = where(for_all(tables, tables.evaluations), split="test", metric=PERPLEXITY)
    models = shown_models(list(rows.loc[rows["client_id"].isna(), "model"]))
    if not models:
        return per_tier
    wide = _central(rows, models).add_prefix(f"{PERPLEXITY}_").reset_index()
    frame = per_tier.merge(wide.astype({"run_id": object, "tier": object}), on=["run_id", "tier"], how="left")
    if {"fine_tuned", "rand_init"} <= set(models):
        frame["perplexity_gain"] = frame["perplexity_rand_init"] - frame["perplexity_fine_tuned"]
    frame = frame.merge(_searched(tables), on=["run_id", "tier", "architecture"], how="left")
    of_clients = fairness(tables, PERPLEXITY)
    of_clients = fairness_by_tier(of_clients[of_clients["run_id"].isin(per_tier["run_id"])], "clients_")
    return frame.merge(of_clients, on=[*RUN_KEY, "tier"], how="outer", sort=False)


def _searched(tables: Tables) -> pd.DataFrame:
    key = ["run_id", "tier", "architecture"]
    rows = tables.candidates.dropna(subset=["loss"]).drop_duplicates(key, keep="last")
    return rows[key].astype(object).assign(search_perplexity=rows["loss"].map(perplexity_of).astype("float64"))


FAIRNESS = ("mean", "std", "worst")


def fairness_by_tier(fairness: pd.DataFrame, prefix: str = "") -> pd.DataFrame:
    """`clients.fairness` with one row per (run, tier): MODEL_mean, MODEL_std and MODEL_worst, each after `prefix`."""
    key = [*RUN_KEY, "tier"]
    pieces = [
        fairness.pivot(index=key, columns="model", values=what).add_prefix(prefix).add_suffix(f"_{what}")
        for what in FAIRNESS
    ]
    wide = pd.concat(pieces, axis=1).rename_axis(columns=None).reset_index()
    return wide.astype(dict.fromkeys(key, object))
