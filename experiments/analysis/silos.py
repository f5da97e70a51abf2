"""Tidy frames of cross-silo runs, whose methods give every silo its own model."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd

from fedloom.experiments.analysis.frames import METRIC
from fedloom.experiments.analysis.kinds import silo_run_ids
from fedloom.experiments.analysis.stages import EVALUATION, MEASUREMENTS
from fedloom.experiments.analysis.tables import RUN_KEY, Tables, configuration, only

PERSONAL, GLOBAL = "personal", "global"
"""The models that are measured for a silo: its own, and the one that all silos share."""

EDGES_KEPT = 2
"""Number of incoming edges that a node keeps if edges are pruned, as in DARTS."""

PER_SILO = ("accuracy", "loss", "global_accuracy", "parameters", "macs", "neighbour_share")


def silos(tables: Tables) -> Tables:
    """The tables of the runs of cross-silo methods."""
    return only(tables, silo_run_ids(tables))


def training(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of `rounds`, `clients` or `evaluations` that belong to training."""
    return frame[~frame["stage"].isin(MEASUREMENTS)]


def took_part(clients: pd.DataFrame) -> "pd.Series[bool]":
    """Which rows of `clients` count: the update and state of a client that fails, drops out or is late are ignored."""
    return clients["status"].fillna("ok") == "ok"


def per_silo(tables: Tables) -> pd.DataFrame:
    """One row per (run, silo) that the final evaluation measured; values that were not measured are null.

    Columns: experiment, run_id, client_id, model (personal, or global if the silo has no personal model), architecture,
    samples (of the silo's test data), accuracy and loss on them, global_accuracy (of the shared model, if the silo also
    has a personal one), parameters, macs (forward, per sample), neighbour_share (kNN-Per only). A silo without test
    samples has no accuracy.
    """
    rows = silos(tables).evaluations
    rows = rows[(rows["stage"] == EVALUATION) & rows["client_id"].notna()]
    rows = rows[rows["model"].isin([PERSONAL, GLOBAL]) & (rows["split"].isna() | (rows["split"] == "test"))]
    found = [_silo(key, group) for key, group in rows.groupby([*RUN_KEY, "client_id"], sort=False)]
    columns = [*RUN_KEY, "client_id", "model", "architecture", "samples", *PER_SILO]
    frame = pd.DataFrame(found, columns=columns).astype(dict.fromkeys(PER_SILO, "float64"))
    return in_order(frame.astype({"samples": "Int64", "client_id": "Int64"}), tables)


WATCHED = "accuracy_while_training"
"""Silos' test accuracies during training, measured only for reports (`method.train.test_every`)."""


def best_round(run: Tables) -> tuple[float, int] | None:
    """The highest mean test accuracy of the silos over the rounds in which it was measured, and the first such round.

    Test data choose it, so that it is too high; it is what papers report (SPIDER, App. B.1). None if not measured.
    """
    rows = silos(run).evaluations
    rows = rows[(rows["metric"] == WATCHED) & (rows["samples"].fillna(0) > 0) & rows["value"].notna()]
    personal = rows[rows["model"] == PERSONAL]
    means = (personal if len(personal) else rows).groupby("round")["value"].agg(["mean", "size"])
    means = means.loc[means["size"] == means["size"].max(), "mean"].astype("float64")
    return None if means.empty else (float(means.max()), int(means.idxmax()))


def _silo(key: tuple[Any, ...], rows: pd.DataFrame) -> dict[str, Any]:
    model = PERSONAL if (rows["model"] == PERSONAL).any() else GLOBAL
    own = rows[rows["model"] == model]
    tested = own[own["split"] == "test"]
    samples = tested["samples"].max() if len(tested) else None
    values = {str(name): float(value) for name, value in zip(own["metric"], own["value"], strict=True)}
    if not pd.isna(samples) and samples == 0:
        values = {name: v for name, v in values.items() if name not in (METRIC, "loss")}
    shared = rows[(rows["model"] == GLOBAL) & (rows["metric"] == METRIC) & (rows["samples"].fillna(0) > 0)]
    before = shared["value"].iloc[-1] if model == PERSONAL and len(shared) else None
    names = own["architecture"].dropna()
    place = dict(zip([*RUN_KEY, "client_id"], key, strict=True))
    return {
        **place,
        "model": model,
        "architecture": str(names.iloc[-1]) if len(names) else None,
        "samples": samples,
        **{name: values.get(name) for name in PER_SILO},
        "global_accuracy": before,
    }


def in_order(frame: pd.DataFrame, tables: Tables) -> pd.DataFrame:
    """Sorted by run in the order of `tables`, then by silo."""
    place = {p.run_id: i for i, p in enumerate(tables.paths)}
    return (
        frame.assign(_run=frame["run_id"].map(place))
        .sort_values(["_run", "client_id"], kind="stable", ignore_index=True)
        .drop(columns="_run")
    )


def is_decided(subspace: str, *, prune_edges: bool = False) -> bool:
    """Whether the search of this subspace is complete ("0,1/0//1": commas separate options, slashes edges).

    It is complete if no edge of the two cells has more than one option and, with `prune_edges`, no node has more than
    `EDGES_KEPT` incoming edges.
    """
    return "," not in subspace and not (prune_edges and _is_crowded(subspace.split("/")))


def _is_crowded(pieces: Sequence[str]) -> bool:
    half = len(pieces) // 2
    for cell in (pieces[:half], pieces[half:]):
        first, node = 0, 2  # nodes 0 and 1 are the cell's inputs, and every later node has an edge from both
        while first < half:
            if sum(map(bool, cell[first : first + node])) > EDGES_KEPT:
                return True
            first, node = first + node, node + 1
    return False


def decided_ones(texts: "pd.Series[Any]", config: Mapping[str, Any]) -> "pd.Series[bool]":
    """Which of these subspaces of a run with this configuration are completely searched."""
    prune_edges = bool(config["method"]["search"].get("prune_edges", False))
    return texts.map(partial(is_decided, prune_edges=prune_edges)).astype(bool)


def latest_architectures(tables: Tables) -> pd.DataFrame:
    """One row per (run, silo) with its architecture as text: the evaluated one, or else the latest of its training.

    Columns: experiment, run_id, client_id, architecture, accuracy (null before the evaluation).
    """
    own = silos(tables)
    columns = [*RUN_KEY, "client_id", "architecture", "accuracy"]
    measured = per_silo(own)[columns].dropna(subset="architecture")
    rows = training(own.clients)
    rows = rows[took_part(rows)]
    text = rows["subspace"].astype(object).where(rows["subspace"].notna(), rows["architecture"].astype(object))
    trained = rows.assign(architecture=text, accuracy=float("nan"))[columns].dropna(subset="architecture")
    trained = trained.drop_duplicates([*RUN_KEY, "client_id"], keep="last")
    parts = [p.astype({"architecture": object}) for p in (measured, trained) if len(p)] or [measured]
    both = pd.concat(parts, ignore_index=True)
    return in_order(both.drop_duplicates([*RUN_KEY, "client_id"], keep="first"), tables)


def undecided_silos(tables: Tables, run_id: str) -> list[int]:
    """The silos of a run with a search whose search is not complete."""
    rows = latest_architectures(only(tables, [run_id]))
    decided = decided_ones(rows["architecture"], configuration(tables, run_id))
    return [int(c) for c in rows.loc[~decided, "client_id"]]


def in_short(architecture: str) -> str:
    """Short text of DARTS cells: an option per edge, "." for a pruned edge, {01} for an undecided edge.

    The normal cell comes first.
    """
    pieces = architecture.split("/")
    marks = [p or "." if "," not in p else "{" + p.replace(",", "") + "}" for p in pieces]
    half = len(marks) // 2
    return " ".join(("".join(marks[:half]), "".join(marks[half:])))
