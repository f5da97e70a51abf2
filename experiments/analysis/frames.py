"""Tidy frames from the result tables: per tier, fairness, communication, candidates, failures."""

import re
from collections.abc import Sequence
from typing import Any

import pandas as pd

from fedloom.experiments.analysis.kinds import ALL_TIERS, SHARED, TIERS, elastic_run_ids, for_all, kind_of, silo_run_ids
from fedloom.experiments.analysis.stages import (
    MEASUREMENTS,
    TRAINING,
    by_stage,
    real_rounds,
)
from fedloom.experiments.analysis.tables import RUN_KEY, Tables, configuration, requires

METRIC = "accuracy"
LOWER_IS_BETTER = ("loss", "perplexity")
MODELS = ("supernet_init", "fine_tuned", "rand_init")
"""Models in display order: slices of the supernet, the slices after fine-tuning, and models from fresh weights."""


def natural(name: str) -> tuple[Any, ...]:
    """A sort key that puts tier10 after tier2."""
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name) if part)


def shown_models(names: Sequence[str]) -> list[str]:
    """Distinct names in display order: first the known models, then the others by name."""
    return sorted(set(names), key=lambda n: (MODELS.index(n) if n in MODELS else len(MODELS), n))


def tiers_of(tables: Tables, run_id: str) -> list[str]:
    """The tiers of a run in order: those in its tables and, if it searches, those of its configuration.

    Empty for SuperFedNAS, whose subnets do not belong to tiers, and for cross-silo methods; "all" if the run trains one
    model for all clients.
    """
    config, kind = configuration(tables, run_id), kind_of(tables, run_id)
    if kind != TIERS:
        return [ALL_TIERS] if kind == SHARED else []
    stages = tables.rounds.loc[tables.rounds["run_id"] == run_id, "stage"].unique()
    found = {str(stage).partition("/")[2] for stage in stages} - {""}
    for frame in (tables.candidates, tables.models):
        found |= {str(t) for t in frame.loc[frame["run_id"] == run_id, "tier"].dropna()}
    if "search" in config.get("method", {}):
        given = config["tiers"]["upper_bounds"]
        count = config["tiers"]["count"] if given is None else len(given)
        found |= {f"tier{i}" for i in range(1, count + 1)}
    return sorted(found, key=natural)


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
    """The candidate with the best metric or loss, then fewest MACs, by the rule of the search itself."""
    candidates = tables.candidates
    feasible = candidates[candidates["feasible"].fillna(False).astype(bool)]
    metrics = {run: _ranked_by(tables, str(run)) for run in feasible["run_id"].unique()}
    by_loss = feasible["run_id"].map(metrics).eq("loss")
    merits = feasible["metric"].astype("float64").where(~by_loss, -feasible["loss"].astype("float64"))
    ordered = feasible.assign(merit=merits).sort_values(["merit", "macs"], ascending=[False, True], kind="stable")
    return ordered.drop_duplicates(["run_id", "tier"])[["run_id", "tier", "architecture"]]


def _ranked_by(tables: Tables, run_id: str) -> str:
    """What the run's search ranks models by; runs from before that could be chosen rank by accuracy."""
    return str(configuration(tables, run_id).get("method", {}).get("search", {}).get("metric", METRIC))


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
            place = (paths.run_id, tier)
            architecture = chosen.get(place)
            cost = costs.get((*place, architecture), (None, None, None))
            rows.append((paths.experiment, *place, bounds.get(place), architecture, *cost))
    columns = [*RUN_KEY, "tier", "upper_bound", "architecture", "macs", "parameters", "search_metric"]
    frame = pd.DataFrame(rows, columns=columns).astype(
        {"upper_bound": "Float64", "macs": "Int64", "parameters": "Int64", "search_metric": "float64"}
    )
    frame = frame.merge(_central_test(for_all(tables, tables.evaluations)), on=["run_id", "tier"], how="left")
    frame["gain"] = frame["test_fine_tuned"] - frame["test_rand_init"]
    return frame.merge(_kendall_tau(tables.evaluations), on=["run_id", "tier"], how="left")


def _costs(tables: Tables) -> dict[tuple[str, str, Any], tuple[Any, Any, Any]]:
    """MACs, parameters and the search's metric per (run, tier, architecture)."""
    columns = ["run_id", "tier", "architecture", "macs", "parameters", "metric"]
    kept = for_all(tables, tables.models).reindex(columns=columns)
    both = pd.concat([kept.astype(object), tables.candidates[columns].astype(object)], ignore_index=True)
    # Rows of candidates come last and replace those of models, because they also have the metric.
    return {(r[0], r[1], r[2]): (r[3], r[4], r[5]) for r in both.itertuples(index=False)}


def _central_test(evaluations: pd.DataFrame) -> pd.DataFrame:
    rows = _measured(evaluations, "test", METRIC)
    rows = rows[rows["client_id"].isna()]
    names = shown_models([*MODELS, *rows["model"].dropna()])
    table = rows.pivot_table(index=["run_id", "tier"], columns="model", values="value", aggfunc="last")
    wide = table.reindex(columns=names).astype("float64").add_prefix("test_").reset_index()
    return wide.rename_axis(columns=None).astype({"run_id": object, "tier": object})


def _kendall_tau(evaluations: pd.DataFrame) -> pd.DataFrame:
    rows = evaluations[evaluations["metric"] == "kendall_tau_federated"]
    mean = rows.groupby(["run_id", "tier"], sort=False)["value"].mean().rename("kendall_tau").reset_index()
    return mean.astype({"run_id": object, "tier": object})


def _measured(evaluations: pd.DataFrame, split: str, metric: str) -> pd.DataFrame:
    chosen = (evaluations["split"] == split) & (evaluations["metric"] == metric)
    return evaluations[chosen.fillna(False)]


def client_metrics(tables: Tables, metric: str = METRIC) -> pd.DataFrame:
    """One row per (run, model, tier, client) that was measured on its own test share: value, samples, and `counts`.

    `counts` is False for a client without test samples, which has no metric. Cross-silo runs are left out; they have
    their own frames.
    """
    requires(tables, "evaluations")
    rows = _measured(tables.evaluations, "test", metric)
    rows = rows[rows["client_id"].notna() & ~rows["run_id"].isin(silo_run_ids(tables))]
    counts = (rows["samples"].fillna(0) > 0).astype(bool) & rows["value"].notna()
    # A family has several subnets for the clients of one tier.
    several = rows["run_id"].isin(elastic_run_ids(tables)) & (rows["model"] != "searched")
    model = rows["model"].astype(object)
    rows = rows.assign(model=model.where(~several, model + " " + rows["architecture"].astype(object)))
    return rows[[*RUN_KEY, "model", "tier", "client_id", "value", "samples"]].assign(counts=counts)


def fairness(tables: Tables, metric: str = METRIC) -> pd.DataFrame:
    """Distribution of the metric over clients per (run, model, tier), and with tier "all" per (run, model).

    Columns: experiment, run_id, model, tier, clients (that count), excluded (no test samples), mean, std (over the
    clients, with divisor n), worst (the lowest; of loss and perplexity the highest). Every client has the same weight.
    Source: FedorAS, Tab. 7.
    """
    rows = client_metrics(tables, metric)
    whole = pd.concat([rows, rows.assign(tier=ALL_TIERS)], ignore_index=True)
    out = []
    for key, group in whole.groupby([*RUN_KEY, "model", "tier"], sort=False):
        values = group.loc[group["counts"], "value"]
        spread = (values.mean(), values.std(ddof=0), values.max() if metric in LOWER_IS_BETTER else values.min())
        out.append((*key, len(values), int((~group["counts"]).sum()), *spread))
    columns = [*RUN_KEY, "model", "tier", "clients", "excluded", "mean", "std", "worst"]
    return _sorted(pd.DataFrame(out, columns=columns), tables)


def _sorted(frame: pd.DataFrame, tables: Tables) -> pd.DataFrame:
    """Sorted by run in the order of `tables`, then model, then tier with "all" last."""
    runs = {p.run_id: i for i, p in enumerate(tables.paths)}
    models = shown_models(list(frame["model"]))

    def key(i: int) -> tuple[Any, ...]:
        run_id, model, tier = frame.loc[i, "run_id"], frame.loc[i, "model"], str(frame.loc[i, "tier"])
        return (runs[str(run_id)], models.index(str(model)), tier == ALL_TIERS, natural(tier))

    return frame.loc[sorted(frame.index, key=key)].reset_index(drop=True)


def communication(tables: Tables) -> pd.DataFrame:
    """Communication and compute per (run, stage), in the stages' order.

    Columns: experiment, run_id, stage, kind, tier, rounds, clients (tasks), bytes_down, bytes_up, macs, simulated_s,
    wall_s. Bytes are the totals that all clients received and sent; MACs are those of forward passes. Source: FedorAS,
    Tab. 17 and 18.
    """
    requires(tables, "rounds")
    rounds = by_stage(real_rounds(tables.rounds)).rename(columns={"stage_tier": "tier"})
    grouped = rounds.groupby([*RUN_KEY, "stage", "kind", "tier"], sort=False)
    sums = {name: (name, "sum") for name in ("bytes_down", "bytes_up", "macs", "simulated_s", "wall_s")}
    return grouped.agg(rounds=("round", "count"), clients=("clients_planned", "sum"), **sums).reset_index()


def communication_by_kind(frame: pd.DataFrame) -> pd.DataFrame:
    """`communication` summed over tiers, with a row of kind "method" per run: the total of the method itself.

    The total excludes the rand-init baseline of a supernet, the final evaluation and personalisation gains.
    """
    values = ["rounds", "clients", "bytes_down", "bytes_up", "macs", "simulated_s", "wall_s"]
    kinds = frame.groupby([*RUN_KEY, "kind"], sort=False)[values].sum().reset_index()
    own = kinds[is_own(kinds)]
    total = own.groupby(RUN_KEY, sort=False)[values].sum().reset_index().assign(kind="method")
    return pd.concat([kinds, total[kinds.columns]], ignore_index=True)


def is_own(frame: pd.DataFrame) -> "pd.Series[bool]":
    """Which rows belong to the method itself; rand_init belongs to it if the run has no supernet stage."""
    with_supernet = set(frame.loc[frame["kind"] == TRAINING, "run_id"])
    baseline = (frame["kind"] == "rand_init") & frame["run_id"].isin(with_supernet)
    return ~(baseline | frame["kind"].isin(MEASUREMENTS))


def pareto(tables: Tables) -> pd.DataFrame:
    """One row per scored candidate of every tier's search.

    Columns: experiment, run_id, tier, generation, architecture, macs (forward, per sample), parameters, loss and metric
    (accuracy as a share, validation data), on_front (as recorded by the search), is_winner.
    """
    requires(tables, "candidates")
    chosen = architectures(tables)
    rows = tables.candidates[tables.candidates["feasible"].fillna(False).astype(bool)]
    names = zip(rows["run_id"], rows["tier"], rows["architecture"], strict=True)
    winner = [chosen.get((run, tier)) == architecture for run, tier, architecture in names]
    columns = [*RUN_KEY, "tier", "generation", "architecture", "macs", "parameters", "loss", "metric"]
    front = rows["on_front"].fillna(False).astype(bool)
    return rows[columns].assign(on_front=front, is_winner=pd.Series(winner, rows.index, dtype=bool))


def failures(tables: Tables) -> pd.DataFrame:
    """Client rows whose status is not ok, counted by kind of stage, status and cause, with one example each.

    Columns: experiment, run_id, kind, status, cause, count, example (of the error), and the example's stage, round and
    client_id. Numbers in the cause are replaced by "#", so that 200 missed deadlines are one row.
    """
    requires(tables, "clients")
    rows = by_stage(tables.clients[tables.clients["status"] != "ok"])
    causes = rows["error"].astype(object).fillna("")
    rows = rows.assign(error=causes, cause=causes.str.replace(r"\d+(\.\d+)?(e[+-]?\d+)?", "#", regex=True))
    grouped = rows.groupby([*RUN_KEY, "kind", "status", "cause"], sort=False)
    first = {"stage": ("stage", "first"), "round": ("round", "first"), "client_id": ("client_id", "first")}
    counted = grouped.agg(count=("status", "size"), example=("error", "first"), **first)
    return counted.reset_index().sort_values("count", ascending=False, kind="stable", ignore_index=True)
