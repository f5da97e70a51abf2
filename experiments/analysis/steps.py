"""Validation accuracy over the steps of a run, where a step is the training of one client or one scored candidate."""

import pandas as pd

from fedloom.experiments.analysis.frames import METRIC
from fedloom.experiments.analysis.stages import SEARCH, TRAINING, by_stage
from fedloom.experiments.analysis.tables import Tables, requires


def steps(tables: Tables) -> pd.DataFrame:
    """One row per validated path of the supernet in training, and per scored candidate of the search.

    Columns: run_id, phase ("supernet" or "search"), step, accuracy (a share, validation data). The step of the supernet
    after r rounds is the number of clients planned in these rounds; candidates follow in the order of their scoring.
    Source: FedorAS, Fig. 5 and 10.
    """
    requires(tables, "rounds", "evaluations", "candidates")
    parts = [_training(tables), _search(tables)]
    columns = ["run_id", "phase", "step", "accuracy"]
    return pd.concat([p[columns] for p in parts if len(p)] or parts, ignore_index=True)


def training_steps(tables: Tables) -> dict[str, int]:
    """Number of client trainings planned for the supernet, by run."""
    rounds = by_stage(tables.rounds)
    sums = rounds[rounds["kind"] == TRAINING].groupby("run_id")["clients_planned"].sum()
    return {str(run): int(total) for run, total in sums.items()}


def _training(tables: Tables) -> pd.DataFrame:
    rounds = by_stage(tables.rounds)
    rounds = rounds[rounds["kind"] == TRAINING].sort_values(["run_id", "round"])
    before = rounds.groupby("run_id")["clients_planned"].cumsum()
    after = {(r, n + 1): int(s) for r, n, s in zip(rounds["run_id"], rounds["round"], before, strict=True)}
    rows = by_stage(tables.evaluations)
    chosen = (rows["kind"] == TRAINING) & (rows["split"] == "validation") & (rows["metric"] == METRIC)
    rows = rows[chosen.fillna(False).astype(bool) & rows["client_id"].isna()]
    step = [after.get((run, done), 0) for run, done in zip(rows["run_id"], rows["round"], strict=True)]
    return pd.DataFrame(
        {"run_id": rows["run_id"].astype(object), "phase": TRAINING, "step": step, "accuracy": rows["value"]}
    )


def _search(tables: Tables) -> pd.DataFrame:
    rows = tables.candidates[tables.candidates["metric"].notna()]
    # All searches start at the end of the longest training, so that runs without training rows align with the others.
    begin = max(training_steps(tables).values(), default=0)
    step = begin + 1 + rows.groupby("run_id").cumcount()
    return pd.DataFrame(
        {"run_id": rows["run_id"].astype(object), "phase": SEARCH, "step": step, "accuracy": rows["metric"]}
    )
