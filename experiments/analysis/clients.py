"""Frames of clients, and of final evaluations beyond accuracy: classes, confusions, and generated paragraphs."""

from __future__ import annotations

import json

import pandas as pd

from fedloom.experiments.analysis.subnets import SEARCHED
from fedloom.experiments.analysis.tables import (
    ALL_TIERS,
    METRIC,
    RUN_KEY,
    SILOS,
    SUBNETS,
    Tables,
    by_stage,
    for_all,
    natural,
    requires,
    runs_of_kind,
    shown_models,
    where,
)
from fedloom.platform.clients.assignments import CONFUSION, PARAGRAPH

LOWER_IS_BETTER = ("loss", "perplexity")


def client_metrics(tables: Tables, metric: str = METRIC) -> pd.DataFrame:
    """One row per (run, model, tier, client) measured on the client's own test data: value, samples, and `counts`.

    `counts` is False for a client without test samples, which has no metric: an accuracy and a loss of nothing, and no
    row of other metrics. Cross-silo runs are left out; they have their own frames.
    """
    requires(tables, "evaluations")
    rows = where(tables.evaluations, split="test", metric=metric)
    if metric != METRIC:
        scored = where(tables.evaluations, split="test", metric=METRIC)
        scored = scored[scored["run_id"].isin(rows["run_id"])]
        client = [*RUN_KEY, "model", "tier", "architecture", "client_id"]
        known = pd.MultiIndex.from_frame(rows[client].astype(object).fillna(""))
        lacks = ~pd.MultiIndex.from_frame(scored[client].astype(object).fillna("")).isin(known)
        rows = pd.concat([rows, scored[lacks].assign(metric=metric, value=float("nan"), samples=0)])
    rows = rows[rows["client_id"].notna() & ~rows["run_id"].isin(runs_of_kind(tables, SILOS))]
    counts = (rows["samples"].fillna(0) > 0).astype(bool) & rows["value"].notna()
    # A family has several subnets for the clients of one tier.
    several = rows["run_id"].isin(runs_of_kind(tables, SUBNETS)) & (rows["model"] != "searched")
    model = rows["model"].astype(object)
    rows = rows.assign(model=model.where(~several, model + " " + rows["architecture"].astype(object)))
    return rows[[*RUN_KEY, "model", "tier", "client_id", "value", "samples"]].assign(counts=counts)


def fairness(tables: Tables, metric: str = METRIC) -> pd.DataFrame:
    """Distribution of the metric over clients per (run, model, tier), and with tier "all" per (run, model).

    Columns: experiment, run_id, model, tier, clients (that count), excluded (no test samples), mean, std (over the
    clients, with divisor n), worst (the lowest; the highest for loss and perplexity). Every client has the same weight.
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
    runs, models = [p.run_id for p in tables.paths], shown_models([str(row[2]) for row in out])
    out.sort(key=lambda row: (runs.index(row[1]), models.index(row[2]), row[3] == ALL_TIERS, natural(row[3])))
    return pd.DataFrame(out, columns=columns)


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


MODEL = [*RUN_KEY, "model", "tier", "architecture"]


def confusions(tables: Tables) -> pd.DataFrame:
    """Confusion counts of the final evaluation's models on the whole test set, for data sets of at most 35 classes.

    Columns: experiment, run_id, model, tier, architecture, class_name, prediction, count, share (of the class's
    samples). Pairs that do not occur have no row.
    """
    rows = _of(tables, CONFUSION)
    pairs = [json.loads(text) for text in rows["detail"]]
    names = {"class_name": [pair[0] for pair in pairs], "prediction": [pair[1] for pair in pairs]}
    counted = rows[MODEL].assign(**names, count=rows["value"].astype("int64"))
    return counted.assign(share=counted["count"] / rows["samples"].astype("float64")).reset_index(drop=True)


def per_class(tables: Tables) -> pd.DataFrame:
    """Samples, recall, precision and F1 of every test class per model, for data sets of at most 35 classes.

    Columns: experiment, run_id, model, tier, architecture, class_name, samples, recall (the class's accuracy),
    precision (null for a class that was never predicted) and f1 (their harmonic mean; 0 without correct predictions).
    """
    pairs = confusions(tables)
    key = [*MODEL, "class_name"]
    of_class = pairs.groupby(key, sort=False, dropna=False)["count"].sum().rename("samples")
    right = pairs[pairs["class_name"] == pairs["prediction"]].groupby(key, sort=False, dropna=False)["count"].sum()
    predicted = pairs.groupby([*MODEL, "prediction"], sort=False, dropna=False)["count"].sum()
    predicted.index = predicted.index.set_names(key)
    counts = of_class.to_frame().join(right.rename("right")).join(predicted.rename("predicted"))
    right_of = counts["right"].fillna(0)
    both = counts["samples"] + counts["predicted"].fillna(0)
    measured = counts.assign(
        recall=right_of / counts["samples"], precision=right_of / counts["predicted"], f1=2 * right_of / both
    )
    return measured.drop(columns=["right", "predicted"]).reset_index()


def paragraphs(tables: Tables) -> pd.DataFrame:
    """Text generated by language models in the final evaluation, each from the same beginning of a test text.

    Columns: experiment, run_id, model, tier, architecture, given, written, loss (mean of the written tokens, in nats).
    """
    rows = _of(tables, PARAGRAPH)
    texts = [json.loads(text) for text in rows["detail"]]
    columns = {"given": [text[0] for text in texts], "written": [text[1] for text in texts]}
    return rows[MODEL].assign(**columns, loss=rows["value"].astype("float64")).reset_index(drop=True)


def of_final_models(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of a method's final models: the fine-tuned ones, else the winners of its search, else all.

    If a tier has several models, as in a family of subnets, `tier` holds the architecture of each instead.
    """
    models = set(rows["model"])
    last = next((model for model in ("fine_tuned", SEARCHED) if model in models), None)
    rows = rows if last is None else rows[rows["model"] == last]
    alike = rows.groupby(["run_id", "model", "tier"])["architecture"].transform("nunique")
    return rows.assign(tier=rows["tier"].where(alike == 1, rows["architecture"]))


def _of(tables: Tables, metric: str) -> pd.DataFrame:
    requires(tables, "evaluations")
    rows = where(for_all(tables, tables.evaluations), metric=metric).dropna(subset=["detail"])
    return rows.assign(**{name: rows[name].astype(object) for name in MODEL})
