"""Personalisation gains: how well each silo's architecture fits the data of each silo (SPIDER, Sec. 5.2.2)."""

import pandas as pd

from fedloom.experiments.analysis.frames import METRIC
from fedloom.experiments.analysis.silos import in_order, silos
from fedloom.experiments.analysis.stages import GAINS
from fedloom.experiments.analysis.tables import RUN_KEY, Tables

SILO = "silo-"
"""Prefix of models in the stage `gains`: "silo-3" is the architecture of silo 3, fine-tuned on another silo's data."""

BEST = "best_test_accuracy"
"""The paper's p_ij, where it was measured: the highest test accuracy of all epochs."""


def p_matrix(tables: Tables) -> pd.DataFrame:
    """p_ij, one row per (run, client_id i, silo j): the accuracy of j's architecture on i's test data.

    j's architecture was fine-tuned on i's data. Columns: experiment, run_id, client_id, silo, accuracy. Pairs that were
    not measured have no row; with `BEST`, it is the accuracy. Source: SPIDER, Sec. 5.2.2, Fig. 3.
    """
    rows = silos(tables).evaluations
    chosen = (rows["stage"] == GAINS) & (rows["split"] == "test") & rows["metric"].isin([METRIC, BEST])
    chosen &= rows["client_id"].notna() & rows["model"].str.fullmatch(rf"{SILO}\d+")
    rows = rows[chosen.fillna(False).astype(bool)]
    rows = rows[(rows["samples"].isna() | (rows["samples"] > 0)) & rows["value"].notna()]
    rows = rows.assign(best=(rows["metric"] == BEST).astype(bool)).sort_values("best", kind="stable")
    number = rows["model"].astype(object).str.removeprefix(SILO).astype("Int64")
    frame = rows.assign(silo=number, accuracy=rows["value"].astype("float64"))[
        [*RUN_KEY, "client_id", "silo", "accuracy"]
    ].drop_duplicates([*RUN_KEY, "client_id", "silo"], keep="last")
    return in_order(frame.sort_values(["client_id", "silo"], kind="stable"), tables)


def best_on_test(tables: Tables) -> bool:
    """Whether some p_ij are the best of all epochs on test data."""
    rows = silos(tables).evaluations
    return bool(((rows["stage"] == GAINS) & (rows["metric"] == BEST)).fillna(False).any())


def personalisation_gains(matrix: pd.DataFrame) -> pd.DataFrame:
    """The personalisation gain of every (run, client i).

    Columns: experiment, run_id, client_id, own (p_ii), others (mean p_ij over j != i), best_other, compared (number of
    j), gain (g_i). g_i is the mean over j != i of p_ii - p_ij; it is null if p_ii or every p_ij is missing. Source:
    SPIDER, Eq. 6.
    """
    found = []
    for key, rows in matrix.groupby([*RUN_KEY, "client_id"], sort=False):
        is_own = rows["silo"] == rows["client_id"]
        own, others = rows.loc[is_own, "accuracy"].mean(), rows.loc[~is_own, "accuracy"]
        found.append((*key, own, others.mean(), others.max(), len(others), own - others.mean()))
    columns = [*RUN_KEY, "client_id", "own", "others", "best_other", "compared", "gain"]
    numbers = dict.fromkeys(["own", "others", "best_other", "gain"], "float64")
    return pd.DataFrame(found, columns=columns).astype({**numbers, "client_id": "Int64", "compared": "int64"})


def as_square(matrix: pd.DataFrame) -> pd.DataFrame:
    """The `p_matrix` of one run with a row per client i and a column per architecture j; missing pairs are NaN."""
    names = sorted({*matrix["client_id"], *matrix["silo"]})
    square = matrix.pivot(index="client_id", columns="silo", values="accuracy")
    return square.reindex(index=names, columns=names).astype("float64")
