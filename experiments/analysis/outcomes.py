"""What a run ends with, in one row, so that methods with different models can be compared."""

from typing import Any

import numpy as np
import pandas as pd

from fedloom.experiments.analysis.frames import (
    METRIC,
    client_metrics,
    communication,
    communication_by_kind,
    is_own,
    shown_models,
)
from fedloom.experiments.analysis.kinds import ALL_TIERS, elastic_run_ids, for_all
from fedloom.experiments.analysis.silos import GLOBAL, PERSONAL, per_silo
from fedloom.experiments.analysis.stages import SEARCH, by_stage, real_rounds
from fedloom.experiments.analysis.subnets import SEARCHED
from fedloom.experiments.analysis.summary import MODEL_KEY, per_model
from fedloom.experiments.analysis.tables import RUN_KEY, Tables

OUTCOMES = (
    METRIC, "least_accuracy", "validation_accuracy", "client_accuracy", "worst_client", "total_bytes", "total_macs",
    "simulated_s", "wall_s", "epsilon", "macs", "parameters",
)  # fmt: skip
"""The measures of a run in `outcomes` and in `compare(each="run")`; `outcomes` describes them."""

FINAL = "final"
"""The model of all rows of `outcomes`."""
_LAST_STEPS = ("fine_tuned", PERSONAL, SEARCHED)
_BESIDE = ("supernet_init", "rand_init")


def final_model(frame: pd.DataFrame) -> str:
    """The model that represents what these rows end with; empty if no model was evaluated.

    It is what a method's last step gives (fine-tuning, a silo's own model, a search), else the first in display order
    that is neither cut from a supernet untrained nor a baseline.
    """
    models = shown_models([str(m) for m in frame["model"].dropna()])
    last = [m for m in _LAST_STEPS if m in models]
    return next(iter([*last, *(m for m in models if m not in _BESIDE), *models]), "")


def outcomes(tables: Tables) -> pd.DataFrame:
    """One row per run: its final models (see `final_model`), and all that they cost.

    Columns: experiment, run_id, seeds (all of them as JSON), model ("final"), tier ("all"), subnet (empty), final_model
    (its name), models (their number: one per tier, target or member of a family; 1 where all clients share one or each
    silo has its own);
    accuracy (a share, on the whole test data, the mean over the models; over silos for models of silos), least_accuracy
    (of the worst model; null for silos), validation_accuracy (the mean over the models), client_accuracy and
    worst_client (each client's own test data, with the model of its tier, or the one for all: mean and minimum); the
    totals of the method's own stages: total_bytes (received and sent by all clients), total_macs (forward passes),
    simulated_s, wall_s; epsilon (null without noise, or if a later stage trains without it); macs (forward, per sample)
    and parameters, means over the models. Values that were not measured are null; a run that was not evaluated has its
    costs alone. Of runs that took their supernet from another run the costs are whole after `with_training`.
    """
    rows = per_model(tables)
    chosen = [_of_run(run, key) for key, run in rows.groupby(RUN_KEY, sort=False)]
    frame = pd.DataFrame(chosen, columns=[*RUN_KEY, "seeds", *MODEL_KEY, *_WHICH, *_FROM_MODELS])
    for more in (_validation(tables), _of_clients(tables)):
        named = more.rename(columns={"model": "final_model"})
        frame = frame.merge(named, on=[*RUN_KEY, "final_model"], how="left")
    for more in (_epsilon(tables), _total_macs(tables)):
        frame = frame.merge(more, on=RUN_KEY, how="left")
    whole = frame[[*RUN_KEY, "seeds", *MODEL_KEY, *_WHICH, *OUTCOMES]]
    return whole.astype({**dict.fromkeys(OUTCOMES, "float64"), "models": "int64"})


_WHICH = ("final_model", "models")
_FROM_MODELS = (METRIC, "least_accuracy", "total_bytes", "simulated_s", "wall_s", "macs", "parameters")


def _of_run(rows: pd.DataFrame, key: tuple[Any, ...]) -> dict[str, Any]:
    model = final_model(rows)
    own = rows[rows["model"] == model] if model else rows.iloc[:1]
    # Whatever its name: rows of one model are compared, as are those of `per_model`.
    place = dict(zip(MODEL_KEY, (FINAL, ALL_TIERS, "") if model else (None,) * 3, strict=True))
    costs = {name: own[name].iloc[0] for name in ("seeds", "total_bytes", "simulated_s", "wall_s")}
    means = {name: own[name].mean() for name in (METRIC, "macs", "parameters")}
    found = {**dict(zip(RUN_KEY, key, strict=True)), **place, **costs, **means}
    named = {"final_model": model or None, "models": len(own) if model else 0}
    of_silos = model in (PERSONAL, GLOBAL)  # one row, the mean over the silos
    return {**found, **named, "least_accuracy": None if of_silos else own[METRIC].min()}


def _validation(tables: Tables) -> pd.DataFrame:
    """The last validation accuracy of every model and tier in the final evaluation, averaged per (run, model)."""
    rows = for_all(tables, tables.evaluations)
    chosen = (rows["stage"] == "evaluation") & (rows["split"] == "validation") & (rows["metric"] == METRIC)
    rows = rows[chosen.fillna(False).astype(bool) & rows["client_id"].isna()]
    place = [*RUN_KEY, "model"]
    key = [*place, "tier", "architecture"]
    last = rows.astype(dict.fromkeys(key, object)).drop_duplicates(key, keep="last")
    return last.groupby(place, sort=False)["value"].mean().rename("validation_accuracy").reset_index()


def client_values(tables: Tables, metric: str = METRIC) -> pd.DataFrame:
    """One row per (run, model, client) with test data of its own: experiment, run_id, model, client_id, value."""
    key = [*RUN_KEY, "model", "client_id"]
    rows = client_metrics(tables, metric)
    # Members of a family are told apart by their architecture, which stands behind the name.
    family = rows["run_id"].isin(elastic_run_ids(tables))
    plain = rows["model"].where(~family, rows["model"].astype(str).str.split(" ").str[0])
    silos = per_silo(tables)
    both = [
        rows[rows["counts"]].assign(model=plain)[[*key, "value"]],
        silos[[*key, metric]].rename(columns={metric: "value"}),
    ]
    return pd.concat([part.astype({**dict.fromkeys(key, object), "value": "float64"}) for part in both])


def _of_clients(tables: Tables) -> pd.DataFrame:
    """Mean and minimum over the clients of the accuracy on their own test data, per (run, model)."""
    found = client_values(tables).groupby([*RUN_KEY, "model"], sort=False)["value"].agg(["mean", "min"]).reset_index()
    return found.rename(columns={"mean": "client_accuracy", "min": "worst_client"})


def _epsilon(tables: Tables) -> pd.DataFrame:
    """Of the method's own training: null if one of its stages has none. It never falls: the largest is the last."""
    rounds = by_stage(real_rounds(tables.rounds))
    rounds = rounds[is_own(rounds) & (rounds["kind"] != SEARCH)]
    by_kind = rounds.groupby([*RUN_KEY, "kind"], sort=False, observed=True)["epsilon"].max().astype(np.float64)
    of_run = by_kind.groupby(RUN_KEY, sort=False)
    spent = of_run.max().where(of_run.count() == of_run.size()).reset_index()
    return spent.astype(dict.fromkeys(RUN_KEY, object))


def _total_macs(tables: Tables) -> pd.DataFrame:
    kinds = communication_by_kind(communication(tables))
    rows = kinds.loc[kinds["kind"] == "method", [*RUN_KEY, "macs"]]
    return rows.rename(columns={"macs": "total_macs"}).astype(dict.fromkeys(RUN_KEY, object))
