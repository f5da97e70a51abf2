"""The section of importances: how much each axis of an ablation matters for its outcomes."""

import pandas as pd

from fedloom.experiments.analysis.ablation import ablation_frame
from fedloom.experiments.analysis.importances import NOISE, importances
from fedloom.experiments.analysis.tables import METRIC, Tables
from fedloom.experiments.report.content import Block
from fedloom.experiments.report.wording import ABSENT, percent
from fedloom.experiments.store.ablations import Ablation

MEASURED = {METRIC: "accuracy", "total_bytes": "bytes", "simulated_s": "simulated time"}
TEXTS = {
    "variance": (
        "The share of the variance between the trials, in %, that is due to an axis by itself (one name) or to the "
        "interaction of two axes (two names), corrected for the noise of the seeds; each column sums to 100. Only "
        "seeds with a value of every setting count."
    ),
    "one seed": (
        "The share of the variance between the trials, in %, that is due to an axis by itself (one name) or to the "
        "interaction of two axes (two names). Only one seed has a value of every setting, so the noise of seeds is not "
        "known and in these shares, above all in those of interactions."
    ),
    "forest": (
        "The share of the variance between the trials, in %, that is due to an axis with all its interactions, "
        "estimated by how much a random forest's error on held-out settings grows when the axis is shuffled. Random "
        "searches and grids with missing trials have no exact shares."
    ),
}


def importances_block(ablation: Ablation, tables: Tables) -> Block:
    """One row per axis and pair of axes, the most important for accuracy first, and a column per outcome that varies.

    An ablation with a single axis has no rows, since that axis explains all differences.
    """
    frame = ablation_frame(tables, ablation, each="run").dropna(subset=[METRIC])  # costs of others are incomplete
    columns, methods = {}, []
    for measure, head in MEASURED.items() if len(ablation.axes) > 1 else ():
        rows = importances(frame, ablation, measure)
        if len(rows):
            columns[head] = rows.set_index(["axes", "order"])["importance"]
            methods += [*rows["method"].unique()]
    shares = pd.DataFrame(columns)
    if columns:
        order = shares.index.get_level_values("order")
        by = pd.DataFrame({"seeds": order == NOISE, "order": order, "share": -shares.iloc[:, 0].to_numpy()})
        shares = shares.iloc[by.sort_values(["seeds", "order", "share"], kind="stable").index]
    cells = [
        (str(axes), *(ABSENT if pd.isna(share) else percent(share) for share in row))
        for (axes, _), row in zip(shares.index, shares.itertuples(index=False), strict=True)
    ]
    return Block("Importances", tuple(TEXTS[m] for m in dict.fromkeys(methods)), ("axes", *columns), tuple(cells), 1)
