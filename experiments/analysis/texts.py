"""What texts are measured by beside accuracy: perplexity, per tier and over clients (FedorAS, Tab. 6, 7).

A perplexity is the exponential of the mean loss over all targets of a test set, or of one client's. Means over clients
are means of the clients' perplexities, which are larger than the exponential of their mean loss.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import pandas as pd

from fedloom.experiments.analysis.frames import fairness, shown_models
from fedloom.experiments.analysis.kinds import for_all
from fedloom.experiments.analysis.tables import RUN_KEY, Tables

PERPLEXITY = "perplexity"
LARGEST_EXPONENT = 700.0
"""As in scoring, so that the perplexity of a diverged model stays finite."""


def perplexity_of(loss: float) -> float:
    """The perplexity of a mean cross entropy."""
    return math.exp(min(loss, LARGEST_EXPONENT))


def text_run_ids(tables: Tables) -> frozenset[str]:
    """The runs whose models were measured by perplexity."""
    return frozenset(tables.evaluations.loc[tables.evaluations["metric"] == PERPLEXITY, "run_id"].astype(str))


def with_perplexity(per_tier: pd.DataFrame, tables: Tables) -> pd.DataFrame:
    """`frames.per_tier` with further columns, if any run was measured by perplexity.

    They are search_perplexity (of the tier's architecture in the search, validation data), perplexity_MODEL (whole test
    set), perplexity_gain (rand_init minus fine_tuned: how much lower it is), and clients_MODEL_mean, _std and _worst
    (the highest, over the tier's clients on their own test data), which a row of tier "all" has of all clients.
    """
    measured = for_all(tables, tables.evaluations)
    rows = measured[(measured["metric"] == PERPLEXITY) & (measured["split"] == "test") & measured["client_id"].isna()]
    if rows.empty:
        return per_tier
    models = shown_models(list(rows["model"]))
    wide = rows.pivot_table(index=["run_id", "tier"], columns="model", values="value", aggfunc="last")[models]
    wide = wide.astype("float64").add_prefix(f"{PERPLEXITY}_").reset_index().rename_axis(columns=None)
    found = per_tier.merge(wide.astype({"run_id": object, "tier": object}), on=["run_id", "tier"], how="left")
    if {"fine_tuned", "rand_init"} <= set(models):
        found["perplexity_gain"] = found["perplexity_rand_init"] - found["perplexity_fine_tuned"]
    found = found.merge(_searched(tables), on=["run_id", "tier", "architecture"], how="left")
    return found.merge(_over_clients(tables, set(per_tier["run_id"])), on=[*RUN_KEY, "tier"], how="outer", sort=False)


def _searched(tables: Tables) -> pd.DataFrame:
    rows = tables.candidates.dropna(subset=["loss"]).drop_duplicates(["run_id", "tier", "architecture"], keep="last")
    places = rows[["run_id", "tier", "architecture"]].astype(object)
    return places.assign(search_perplexity=rows["loss"].map(perplexity_of).astype("float64"))


def _over_clients(tables: Tables, runs: Collection[str]) -> pd.DataFrame:
    frame = fairness(tables, PERPLEXITY)
    frame = frame[frame["run_id"].isin(runs)]
    key = [*RUN_KEY, "tier"]
    pieces = [
        frame.pivot(index=key, columns="model", values=what).add_prefix("clients_").add_suffix(f"_{what}")
        for what in ("mean", "std", "worst")
    ]
    wide = pd.concat(pieces, axis=1).rename_axis(columns=None).reset_index()
    return wide.astype(dict.fromkeys(key, object))
