"""What final evaluations tell beside numbers: confusion matrices, figures per class, and written paragraphs."""

from __future__ import annotations

import json

import pandas as pd

from fedloom.experiments.analysis.kinds import for_all
from fedloom.experiments.analysis.subnets import SEARCHED
from fedloom.experiments.analysis.tables import RUN_KEY, Tables, requires
from fedloom.platform.results.columns import CONFUSION, PARAGRAPH

MODEL = [*RUN_KEY, "model", "tier", "architecture"]


def confusions(tables: Tables) -> pd.DataFrame:
    """How often models of the final evaluation took a class for another, on the whole test set of at most 35 classes.

    Columns: experiment, run_id, model, tier, architecture, class_name, prediction, count, share (of the class's
    samples). Pairs that do not occur have no row.
    """
    rows = _of(tables, CONFUSION)
    pairs = [json.loads(text) for text in rows["detail"]]
    names = {"class_name": [pair[0] for pair in pairs], "prediction": [pair[1] for pair in pairs]}
    found = rows[MODEL].assign(**names, count=rows["value"].astype("int64"))
    return found.assign(share=found["count"] / rows["samples"].astype("float64")).reset_index(drop=True)


def per_class(tables: Tables) -> pd.DataFrame:
    """Figures of every class of the test set per model, for data sets of at most 35 classes.

    Columns: experiment, run_id, model, tier, architecture, class_name, samples, recall (the class's accuracy),
    precision (null for a class that was never predicted) and f1 (their harmonic mean; 0 if nothing of it was found).
    """
    pairs = confusions(tables)
    key = [*MODEL, "class_name"]
    of_class = pairs.groupby(key, sort=False, dropna=False)["count"].sum().rename("samples")
    right = pairs[pairs["class_name"] == pairs["prediction"]].groupby(key, sort=False, dropna=False)["count"].sum()
    predicted = pairs.groupby([*MODEL, "prediction"], sort=False, dropna=False)["count"].sum()
    predicted.index = predicted.index.set_names(key)
    found = of_class.to_frame().join(right.rename("right")).join(predicted.rename("predicted"))
    right_of = found["right"].fillna(0)
    both = found["samples"] + found["predicted"].fillna(0)
    measured = found.assign(
        recall=right_of / found["samples"], precision=right_of / found["predicted"], f1=2 * right_of / both
    )
    return measured.drop(columns=["right", "predicted"]).reset_index()


def paragraphs(tables: Tables) -> pd.DataFrame:
    """What language models wrote in the final evaluation, each after the same beginning of a test text.

    Columns: experiment, run_id, model, tier, architecture, given, written, loss (the written tokens' mean, in nats).
    """
    rows = _of(tables, PARAGRAPH)
    texts = [json.loads(text) for text in rows["detail"]]
    columns = {"given": [text[0] for text in texts], "written": [text[1] for text in texts]}
    return rows[MODEL].assign(**columns, loss=rows["value"].astype("float64")).reset_index(drop=True)


def of_final_models(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the models that a method ends with: fine-tuned ones, those of a search, else all.

    Where a run has several of a tier, as of a family of subnets, each has its architecture as the tier.
    """
    models = set(rows["model"])
    last = next((model for model in ("fine_tuned", SEARCHED) if model in models), None)
    rows = rows if last is None else rows[rows["model"] == last]
    alike = rows.groupby(["run_id", "model", "tier"])["architecture"].transform("nunique")
    return rows.assign(tier=rows["tier"].where(alike == 1, rows["architecture"]))


def _of(tables: Tables, metric: str) -> pd.DataFrame:
    requires(tables, "evaluations")
    rows = for_all(tables, tables.evaluations)
    rows = rows[(rows["metric"] == metric) & rows["detail"].notna()]
    return rows.assign(**{name: rows[name].astype(object) for name in MODEL})
