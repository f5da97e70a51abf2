"""Quality and cost of models per run and per setting, and the outcome of each run in one row."""

from typing import Any

import numpy as np
import pandas as pd

from fedloom.experiments.analysis.clients import client_metrics
from fedloom.experiments.analysis.rounds import communication, communication_by_kind, is_own
from fedloom.experiments.analysis.settings import by_seed, estimate, seeds_of, settings_of
from fedloom.experiments.analysis.silos import GLOBAL, PERSONAL, per_silo
from fedloom.experiments.analysis.subnets import SEARCHED, architecture_costs
from fedloom.experiments.analysis.tables import (
    ALL_TIERS,
    METRIC,
    RUN_KEY,
    SEARCH,
    SILOS,
    SUBNETS,
    Tables,
    by_stage,
    for_all,
    natural,
    real_rounds,
    requires,
    runs_of_kind,
    shown_models,
    where,
    with_training,
)

MEASURES = (METRIC, "loss", "macs", "parameters", "total_bytes", "simulated_s", "wall_s")
"""The measures of a model in `summary` and `compare`; `per_model` describes them."""

MODEL_KEY = ["model", "tier", "subnet"]
_QUALITIES, _COSTS = [METRIC, "loss"], ["macs", "parameters"]


def per_model(tables: Tables) -> pd.DataFrame:
    """One row per (run, model, tier) of the final evaluation, and per subnet of an elastic supernet's family.

    Columns: experiment, run_id, seeds (all of them as JSON), model, tier ("all" for models of silos), subnet (empty
    except for members of a family), architecture, accuracy (a share) and loss on the whole test data (the mean over
    silos for cross-silo runs), macs (forward, per sample), parameters; and the totals of the method in that run, equal
    for all its models: total_bytes (received and sent by all clients), simulated_s and wall_s, which include the
    training of a supernet that another run shared with it. A run that was not evaluated has one row with only these
    totals.
    """
    requires(tables, "rounds", "evaluations", "candidates", "models")
    tables = with_training(tables)
    parts = [_of_server(tables), _of_silos(tables)]
    columns = [*RUN_KEY, *MODEL_KEY, "architecture", *_QUALITIES, *_COSTS]
    rows = pd.concat([p[columns].astype(object) for p in parts if len(p)] or parts, ignore_index=True)
    runs = pd.DataFrame([(p.experiment, p.run_id) for p in tables.paths], columns=RUN_KEY, dtype=object)
    runs["seeds"] = [seeds_of(tables, run_id) for run_id in runs["run_id"]]
    frame = runs.merge(rows, on=RUN_KEY, how="left").merge(_run_costs(tables), on=RUN_KEY, how="left")
    numbers = dict.fromkeys(MEASURES, "float64")
    whole = frame[[*RUN_KEY, "seeds", *MODEL_KEY, "architecture", *MEASURES]]
    return whole.assign(**{m: pd.to_numeric(whole[m]) for m in MEASURES}).astype(numbers)


def _of_server(tables: Tables) -> pd.DataFrame:
    rows = where(tables.evaluations, split="test", metric=_QUALITIES)
    rows = rows[rows["client_id"].isna() & ~rows["run_id"].isin(runs_of_kind(tables, SILOS))]
    family = rows["run_id"].isin(runs_of_kind(tables, SUBNETS)) & (rows["model"] != SEARCHED)
    names = {name: rows[name].astype(object).fillna("") for name in ("model", "tier", "architecture")}
    rows = rows.assign(**names, subnet=names["architecture"].where(family, ""))
    key = [*RUN_KEY, *MODEL_KEY]
    # The last evaluation of a model counts.
    values = rows.drop_duplicates([*key, "metric"], keep="last").astype(dict.fromkeys([*key, "metric"], object))
    wide = values.pivot(index=key, columns="metric", values="value").reindex(columns=_QUALITIES)
    heads = rows.drop_duplicates(key, keep="last")[[*key, "architecture"]].astype(object)
    frame = heads.merge(wide.reset_index().rename_axis(columns=None), on=key, how="left")
    return frame.merge(architecture_costs(tables), on=["run_id", "architecture"], how="left")


def _of_silos(tables: Tables) -> pd.DataFrame:
    measured = per_silo(tables)
    key = [*RUN_KEY, "model"]
    of_model = measured.groupby(key, sort=False)[[*_QUALITIES, *_COSTS]].mean().reset_index()
    shared = measured[measured["model"] == PERSONAL].groupby(RUN_KEY, sort=False)["global_accuracy"].mean().dropna()
    beside = shared.rename(METRIC).reset_index().assign(model=GLOBAL)
    frame = pd.concat([of_model, beside], ignore_index=True) if len(beside) else of_model
    return frame.assign(tier=ALL_TIERS, subnet="", architecture=None)


def _run_costs(tables: Tables) -> pd.DataFrame:
    kinds = communication_by_kind(communication(tables))
    rows = kinds[kinds["kind"] == "method"]
    sums = rows.assign(total_bytes=rows["bytes_down"] + rows["bytes_up"]).rename(columns={"macs": "total_macs"})
    columns = [*RUN_KEY, "total_bytes", "total_macs", "simulated_s", "wall_s"]
    return sums[columns].astype(dict.fromkeys(RUN_KEY, object))


def summary(tables: Tables) -> pd.DataFrame:
    """One row per (setting, model, tier), and per subnet of a family: means with 95 % intervals over seeds.

    A setting is a group of runs whose configurations differ only in seeds. Columns: setting (its name), experiment,
    model, tier, subnet, architecture (null if seeds found different ones), runs, seeds (distinct ones: runs that repeat
    a seed count once, with their mean); and for each of `MEASURES` (see `per_model`) NAME_n (seeds with a value),
    NAME_mean, NAME_half_width (by Student's t; null below three seeds) and NAME_values (a list, by seed). A setting
    without an evaluated run has one row with its costs.
    """
    frame = per_model(tables)
    summaries = []
    for setting in settings_of(tables):
        rows = frame[frame["run_id"].isin(setting.run_ids)]
        for key, group in by_model(rows):
            summaries.append({"setting": setting.name, "experiment": setting.experiment, **key, **_over_seeds(group)})
    counts = ["runs", "seeds", *(f"{m}_n" for m in MEASURES)]
    values = [f"{m}_{what}" for m in MEASURES for what in ("n", "mean", "half_width", "values")]
    columns = ["setting", "experiment", *MODEL_KEY, "architecture", "runs", "seeds", *values]
    numbers = [name for name in values if not name.endswith("_values")]
    kinds = {**dict.fromkeys(numbers, "float64"), **dict.fromkeys(counts, "int64")}
    return pd.DataFrame(summaries, columns=columns).astype(kinds)


def by_model(rows: pd.DataFrame) -> list[tuple[dict[str, str | None], pd.DataFrame]]:
    """The rows of `per_model` by (model, tier, subnet) in display order; one group of all rows if none has a model.

    The subnets of a family are in the order of their evaluation.
    """
    evaluated = rows[rows["model"].notna()]
    if evaluated.empty:
        return [(dict.fromkeys(MODEL_KEY), rows)] if len(rows) else []
    models = shown_models([str(model) for model in evaluated["model"]])
    groups = [(tuple(map(str, key)), group) for key, group in evaluated.groupby(MODEL_KEY, sort=False)]
    groups.sort(key=lambda item: (models.index(item[0][0]), natural(item[0][1])))
    return [(dict(zip(MODEL_KEY, key, strict=True)), group) for key, group in groups]


def _over_seeds(rows: pd.DataFrame) -> dict[str, Any]:
    seeds = by_seed(rows, MEASURES)
    architectures = set(rows["architecture"].dropna()) - {""}
    values: dict[str, Any] = {
        "architecture": architectures.pop() if len(architectures) == 1 else None,
        "runs": rows["run_id"].nunique(),
        "seeds": len(seeds),
    }
    for measure in MEASURES:
        known = estimate(seeds[measure])
        values[f"{measure}_n"] = known.runs if known else 0
        values[f"{measure}_mean"] = known.mean if known else None
        values[f"{measure}_half_width"] = known.half_width if known else None
        values[f"{measure}_values"] = list(known.values) if known else []
    return values


OUTCOMES = (
    METRIC, "least_accuracy", "validation_accuracy", "client_accuracy", "worst_client", "total_bytes", "total_macs",
    "simulated_s", "wall_s", "epsilon", "macs", "parameters",
)  # fmt: skip
"""The measures of a run in `outcomes` and in `compare(each="run")`; `outcomes` describes them."""

FINAL = "final"
"""The value of `model` in all rows of `outcomes`."""

_LAST_STEPS = ("fine_tuned", PERSONAL, SEARCHED)
_BESIDE = ("supernet_init", "rand_init")


def final_model(frame: pd.DataFrame) -> str:
    """The name of the final model among these rows; empty if no model was evaluated.

    It is the result of a method's last step (fine-tuning, a silo's own model, a search), else the first model in
    display order that is neither an untrained slice of a supernet nor a baseline.
    """
    models = shown_models([str(m) for m in frame["model"].dropna()])
    last = [m for m in _LAST_STEPS if m in models]
    return next(iter([*last, *(m for m in models if m not in _BESIDE), *models]), "")


def of_final_model(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of each run's own final model (see `final_model`): methods call theirs by different names."""
    final = {run_id: final_model(of_run) for run_id, of_run in frame.groupby("run_id")}
    return frame[frame["model"] == frame["run_id"].map(final)]


def outcomes(tables: Tables) -> pd.DataFrame:
    """One row per run: the quality of its final models (see `final_model`), and what the run cost.

    Columns: experiment, run_id, seeds (all of them as JSON), model ("final"), tier ("all"), subnet (empty), final_model
    (its name), models (their number: one per tier, target or member of a family; 1 where all clients share one or each
    silo has its own);
    accuracy (a share, on the whole test data, the mean over the models; over silos for models of silos), least_accuracy
    (of the worst model; null for silos), validation_accuracy (the mean over the models), client_accuracy and
    worst_client (mean and minimum over clients, each on its own test data with the model of its tier or the one for
    all); the totals of the method's own stages: total_bytes (received and sent by all clients), total_macs (forward
    passes), simulated_s, wall_s; epsilon (null without noise, or if a later stage trains without it); macs (forward,
    per sample) and parameters, means over the models. Values that were not measured are null; a run that was not
    evaluated has only its costs, which include those of a shared supernet, as in `per_model`.
    """
    tables = with_training(tables)
    rows = per_model(tables)
    chosen = [_of_run(run, key) for key, run in rows.groupby(RUN_KEY, sort=False)]
    frame = pd.DataFrame(chosen, columns=[*RUN_KEY, "seeds", *MODEL_KEY, *_WHICH, *_FROM_MODELS])
    for more in (_validation(tables), _of_clients(tables)):
        named = more.rename(columns={"model": "final_model"})
        frame = frame.merge(named, on=[*RUN_KEY, "final_model"], how="left")
    for more in (_epsilon(tables), _run_costs(tables)[[*RUN_KEY, "total_macs"]]):
        frame = frame.merge(more, on=RUN_KEY, how="left")
    whole = frame[[*RUN_KEY, "seeds", *MODEL_KEY, *_WHICH, *OUTCOMES]]
    return whole.astype({**dict.fromkeys(OUTCOMES, "float64"), "models": "int64"})


_WHICH = ("final_model", "models")
_FROM_MODELS = (METRIC, "least_accuracy", "total_bytes", "simulated_s", "wall_s", "macs", "parameters")


def _of_run(rows: pd.DataFrame, key: tuple[Any, ...]) -> dict[str, Any]:
    model = final_model(rows)
    final = rows[rows["model"] == model] if model else rows.iloc[:1]
    of_silos = model in (PERSONAL, GLOBAL)  # one row, the mean over the silos
    # All runs get the same model name, since comparisons are between rows of one model, as in `per_model`.
    return {
        **dict(zip(RUN_KEY, key, strict=True)),
        **dict(zip(MODEL_KEY, (FINAL, ALL_TIERS, "") if model else (None,) * 3, strict=True)),
        **{name: final[name].iloc[0] for name in ("seeds", "total_bytes", "simulated_s", "wall_s")},
        **{name: final[name].mean() for name in (METRIC, "macs", "parameters")},
        "least_accuracy": None if of_silos else final[METRIC].min(),
        "final_model": model or None,
        "models": len(final) if model else 0,
    }


def _validation(tables: Tables) -> pd.DataFrame:
    """The last validation accuracy of every model and tier in the final evaluation, averaged per (run, model)."""
    rows = where(for_all(tables, tables.evaluations), stage="evaluation", split="validation", metric=METRIC)
    rows = rows[rows["client_id"].isna()]
    of_model = [*RUN_KEY, "model"]
    key = [*of_model, "tier", "architecture"]
    last = rows.astype(dict.fromkeys(key, object)).drop_duplicates(key, keep="last")
    return last.groupby(of_model, sort=False)["value"].mean().rename("validation_accuracy").reset_index()


def client_values(tables: Tables, metric: str = METRIC) -> pd.DataFrame:
    """One row per (run, model, client), for clients with test data: experiment, run_id, model, client_id, value."""
    key = [*RUN_KEY, "model", "client_id"]
    rows = client_metrics(tables, metric)
    # `client_metrics` appends the architecture to the model's name for members of a family.
    family = rows["run_id"].isin(runs_of_kind(tables, SUBNETS))
    plain = rows["model"].where(~family, rows["model"].astype(str).str.split(" ").str[0])
    silos = per_silo(tables)
    both = [
        rows[rows["counts"]].assign(model=plain)[[*key, "value"]],
        silos[[*key, metric]].rename(columns={metric: "value"}),
    ]
    return pd.concat([part.astype({**dict.fromkeys(key, object), "value": "float64"}) for part in both])


def _of_clients(tables: Tables) -> pd.DataFrame:
    """Mean and minimum over the clients of the accuracy on their own test data, per (run, model)."""
    of_model = client_values(tables).groupby([*RUN_KEY, "model"], sort=False)["value"].agg(["mean", "min"])
    return of_model.reset_index().rename(columns={"mean": "client_accuracy", "min": "worst_client"})


def _epsilon(tables: Tables) -> pd.DataFrame:
    """The epsilon of the method's training, null if a stage has none; it never falls: the maximum is the last value.

    Stages in which the server works alone do not count.
    """
    rounds = by_stage(real_rounds(tables.rounds))
    of_clients = rounds.groupby(["run_id", "stage"])["clients_planned"].transform("max") > 0
    rounds = rounds[is_own(rounds) & (rounds["kind"] != SEARCH) & of_clients.fillna(False).astype(bool)]
    by_kind = rounds.groupby([*RUN_KEY, "kind"], sort=False, observed=True)["epsilon"].max().astype(np.float64)
    of_run = by_kind.groupby(RUN_KEY, sort=False)
    spent = of_run.max().where(of_run.count() == of_run.size()).reset_index()
    return spent.astype(dict.fromkeys(RUN_KEY, object))
