"""The evaluated subnets of SuperFedNAS runs: cost and quality of each, over the seeds of a setting."""

import json
from collections.abc import Iterable
from dataclasses import dataclass

import pandas as pd

from fedloom.experiments.analysis.intervals import Estimate
from fedloom.experiments.analysis.kinds import elastic_run_ids
from fedloom.experiments.analysis.labels import Labels
from fedloom.experiments.analysis.seeds import SEEDS, estimate_by_seed
from fedloom.experiments.analysis.settings import Setting, settings_of
from fedloom.experiments.analysis.stages import ALONE
from fedloom.experiments.analysis.tables import Tables, configuration

SUPERNET, SEARCHED = "supernet", "searched"
SAMPLES, FRONT = "samples", "front"
"""Values of `tier` in the table `candidates` that are not targets: training samples of predictors, NSGA-II's front."""
COSTS = ("macs", "parameters")
QUALITIES = ("accuracy", "perplexity", "loss")
MEASURED = (*COSTS, *(f"{split}_{quality}" for split in ("validation", "test") for quality in QUALITIES))


@dataclass(frozen=True)
class Subnet:
    """One subnet, or the winners of one target, over the seeds of a setting.

    `target` is empty except for winners of a search; `architecture` is None if the runs found different ones.
    `values` holds an estimate, or None, for macs, parameters, and SPLIT_accuracy, SPLIT_perplexity and SPLIT_loss with
    the splits validation and test.
    """

    model: str
    target: str
    architecture: str | None
    label: str
    values: dict[str, Estimate | None]


@dataclass(frozen=True)
class Predictor:
    """A predictor on held-out subnets over the seeds of a setting; `measure` is accuracy, loss or latency_s."""

    measure: str
    kendall_tau: Estimate | None
    mean_absolute_error: Estimate | None
    held_out: Estimate | None


@dataclass(frozen=True)
class SubnetSummary:
    """The subnets of one setting, in the order of their evaluation, and its predictors."""

    setting: Setting
    subnets: tuple[Subnet, ...]
    predictors: tuple[Predictor, ...]


def subnets(tables: Tables, labels: Labels) -> pd.DataFrame:
    """One row per (run, model, target, architecture) of a SuperFedNAS run's final evaluation.

    Columns: experiment, run_id, model (supernet: a subnet of the family; searched: a target's winner; alone: trained
    without a supernet), target, architecture, label, macs, parameters, and per split accuracy, perplexity (text data)
    and loss on all of the server's data. Unknown values are null.
    """
    rows = _evaluated(tables)
    names = rows["metric"].where(rows["split"].isna(), rows["split"].astype(object) + "_" + rows["metric"])
    target = rows["tier"].astype(object).where(rows["model"] == SEARCHED, "")
    rows = rows.assign(name=names, target=target)
    key = ["experiment", "run_id", "model", "target", "architecture"]
    table = rows.pivot_table(index=key, columns="name", values="value", aggfunc="last", sort=False)
    values = table.reindex(columns=list(MEASURED)).astype("float64").reset_index().rename_axis(columns=None)
    # Pivoting sorts the rows by key; this restores the order of the evaluation.
    wide = (
        rows[key].drop_duplicates().astype(object).merge(values.astype(dict.fromkeys(key, object)), on=key, how="left")
    )
    label = [labels.of(str(r), str(a)) for r, a in zip(wide["run_id"], wide["architecture"], strict=True)]
    return _with_known_costs(wide.assign(label=pd.Series(label, wide.index, dtype=object)), tables)


def _evaluated(tables: Tables) -> pd.DataFrame:
    rows = tables.evaluations
    chosen = (rows["stage"] == "evaluation") & rows["client_id"].isna()
    chosen &= rows["run_id"].isin(elastic_run_ids(tables)) & rows["model"].isin([SUPERNET, SEARCHED, ALONE])
    return rows[chosen.fillna(False).astype(bool)]


def _with_known_costs(frame: pd.DataFrame, tables: Tables) -> pd.DataFrame:
    """Fills costs that the evaluation did not record from the kept models and the scored candidates."""
    both = pd.concat([f[["architecture", "run_id", *COSTS]].astype(object) for f in (tables.models, tables.candidates)])
    known = {(r.run_id, r.architecture): r for r in both.itertuples()}
    for cost in COSTS:
        found = [
            getattr(known.get((r, a)), cost, None) for r, a in zip(frame["run_id"], frame["architecture"], strict=True)
        ]
        frame[cost] = frame[cost].fillna(pd.Series(found, frame.index, dtype="float64"))
    return frame


def subnet_summaries(tables: Tables, labels: Labels) -> list[SubnetSummary]:
    """One summary per setting, with means and intervals over its seeds; settings without subnets are left out."""
    frame = subnets(tables, labels)
    found = []
    for setting in settings_of(tables):
        rows = setting.rows(frame)
        if len(rows):
            predictors = _predictors(setting.rows(tables.evaluations))
            found.append(SubnetSummary(setting, tuple(_subnets(rows)), tuple(predictors)))
    return found


def _subnets(rows: pd.DataFrame) -> Iterable[Subnet]:
    # Winners are grouped by target, because seeds may find different ones; members of the family by architecture.
    place = rows["target"].where(rows["model"] == SEARCHED, rows["architecture"])
    for (model, _), group in rows.groupby([rows["model"], place], sort=False):
        names = list(dict.fromkeys(group["architecture"]))
        same = len(names) == 1
        label = str(group["label"].iloc[0]) if same else "differs"
        values = {name: estimate_by_seed(group[name], group[SEEDS]) for name in MEASURED}
        yield Subnet(str(model), str(group["target"].iloc[0]), str(names[0]) if same else None, label, values)


def _predictors(evaluations: pd.DataFrame) -> Iterable[Predictor]:
    rows = evaluations[(evaluations["model"] == "predictor").fillna(False).astype(bool)]
    groups = rows.groupby("metric", sort=False)
    values = {str(name): estimate_by_seed(group["value"], group[SEEDS]) for name, group in groups}
    for measure in ("accuracy", "loss", "latency_s"):
        if f"predictor_kendall_tau_{measure}" in values:
            figures = (values.get(f"predictor_{name}_{measure}") for name in ("kendall_tau", "mae", "held_out"))
            yield Predictor(measure, *figures)


def scored(tables: Tables) -> pd.DataFrame:
    """One row per subnet that the search of a SuperFedNAS run scored on validation data.

    Columns: experiment, run_id, tier (samples, front, or the target), architecture, macs, metric, on_front, is_winner.
    """
    rows = tables.candidates[tables.candidates["run_id"].isin(elastic_run_ids(tables))]
    rows = rows[rows["feasible"].fillna(False).astype(bool) & rows["metric"].notna() & rows["macs"].notna()]
    evaluated = tables.evaluations[(tables.evaluations["model"] == SEARCHED).fillna(False).astype(bool)]
    winners = {(r.run_id, r.tier, r.architecture) for r in evaluated.itertuples()}
    names = zip(rows["run_id"], rows["tier"], rows["architecture"], strict=True)
    front = rows["on_front"].fillna(False).astype(bool)
    won = pd.Series([name in winners for name in names], rows.index, dtype=bool)
    columns = ["experiment", "run_id", "tier", "architecture", "macs", "metric"]
    return rows[columns].astype({"macs": "float64"}).assign(on_front=front, is_winner=won)


def targets_of(tables: Tables, run_id: str) -> list[str]:
    """The targets of the run's configuration, as named in the tables; its tiers if it names no targets."""
    config = configuration(tables, run_id)
    search = config["method"].get("search", {})
    unfitted = search.get("predictor") in ("none", "fitness")  # they measure no samples
    if config["method"].get("separately") or (search.get("samples", 0) == 0 and not unfitted):
        return []
    named = [f"{m}={float(v):.10g}" for m in ("macs", "latency_s") for v in search.get(m, [])]
    if named:
        return named
    recorded = tables.runs.loc[tables.runs["run_id"] == run_id, "tiers"].dropna()
    return [str(tier["tier"]) for text in recorded for tier in json.loads(text)]
