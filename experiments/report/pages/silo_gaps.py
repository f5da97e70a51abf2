"""Sentences on the missing parts of a cross-silo run: scores, training, and pairs of the personalisation gains."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from fedloom.experiments.analysis.frames import METRIC
from fedloom.experiments.analysis.kinds import keeps_own_cells, keeps_own_models
from fedloom.experiments.analysis.silo_gains import p_matrix
from fedloom.experiments.analysis.silos import per_silo, took_part, training, undecided_silos
from fedloom.experiments.analysis.stages import EVALUATION, GAINS
from fedloom.experiments.analysis.tables import Tables, configuration, only


def missing_of_silos(tables: Tables, run_id: str, state: str) -> list[str]:
    """Missing parts of a cross-silo run: scores or training of silos, gains, or decisions of its search."""
    rows = tables.evaluations[tables.evaluations["run_id"] == run_id]
    rows = rows[(rows["stage"] == EVALUATION) & (rows["split"] == "test") & (rows["metric"] == METRIC)]
    yet = "" if state == "done" else " yet"
    none = f"nothing was measured on test data{yet}: no accuracy of silos"
    lines = gaps_of_scores(tables, run_id) if len(rows) else [none]
    if covered_silos(tables, run_id):
        if p_matrix(only(tables, [run_id])).empty:
            lines.append(f"personalisation gains were not measured{yet}")
        elif state != "running":
            lines += gaps_of_gains(tables, run_id)
    searches = configuration(tables, run_id)["method"].get("search")
    if state == "done" and searches and (left := undecided_silos(tables, run_id)):
        lines.append(f"the search ended with edges left to be searched in {silo_names(tables, run_id, left)}")
    return lines


MOST_PAIRS = 6


def num_silos(tables: Tables, run_id: str) -> int:
    """The configured number of silos of the run."""
    return int(configuration(tables, run_id)["data"]["num_clients"])


def silo_names(tables: Tables, run_id: str, silos: Sequence[int]) -> str:
    """The silos as part of a sentence."""
    if len(silos) == num_silos(tables, run_id):
        return "every silo"
    return f"silo{'' if len(silos) == 1 else 's'} {', '.join(map(str, silos))}"


def unscored_silos(tables: Tables, run_id: str) -> list[int]:
    """The silos without an accuracy in the final evaluation, except those without test samples."""
    rows = per_silo(only(tables, [run_id]))
    known = rows[rows["accuracy"].notna() | rows["samples"].eq(0)]
    return _others(known["client_id"], num_silos(tables, run_id))


def untrained_silos(tables: Tables, run_id: str) -> list[int]:
    """The silos for which no training round counted, because they failed, dropped out or were late every time."""
    rows = training(only(tables, [run_id]).clients)
    if rows.empty:
        return []
    return _others(rows.loc[took_part(rows), "client_id"], num_silos(tables, run_id))


def _others(known: "pd.Series[Any]", count: int) -> list[int]:
    there = {int(c) for c in known.dropna()}
    return [silo for silo in range(count) if silo not in there]


def unmeasured_pairs(tables: Tables, run_id: str) -> list[tuple[int, int]]:
    """The pairs (i, j) of covered silos whose p_ij was not measured, except silos i without test samples."""
    run, covered = only(tables, [run_id]), range(covered_silos(tables, run_id))
    matrix = p_matrix(run)
    measured = {(int(i), int(j)) for i, j in zip(matrix["client_id"], matrix["silo"], strict=True)}
    rows = run.evaluations
    tested = rows[rows["stage"].isin([GAINS, EVALUATION]) & (rows["split"] == "test") & (rows["metric"] == METRIC)]
    untested = {int(c) for c in tested.loc[tested["samples"].eq(0), "client_id"].dropna()}
    return [(i, j) for i in covered if i not in untested for j in covered if (i, j) not in measured]


def covered_silos(tables: Tables, run_id: str) -> int:
    """The number of silos, counted from the first, that the gains cover; 0 if gains are not configured."""
    gains = configuration(tables, run_id)["method"].get("gains", {})
    if not gains.get("epochs", 0):
        return 0
    given = gains.get("clients")
    return num_silos(tables, run_id) if given is None else int(given)


def gaps_of_scores(tables: Tables, run_id: str) -> list[str]:
    """Sentences on silos without a score, and on silos with a score that were never trained."""
    lines = []
    unscored = unscored_silos(tables, run_id)
    if unscored:
        which = silo_names(tables, run_id, unscored)
        lines.append(f"no accuracy on test data of {which}: mean, std and worst are over the others")
    if untrained := [silo for silo in untrained_silos(tables, run_id) if silo not in unscored]:
        which = silo_names(tables, run_id, untrained)
        scored = _scored(tables, run_id)
        lines.append(f"no training round of {which} counted (failed, dropped or late every time): {scored}")
    return lines


def _scored(tables: Tables, run_id: str) -> str:
    """Says which model the final evaluation scores for silos that were never trained."""
    if keeps_own_models(tables, run_id):
        return "what is scored as personal there is the shared model"
    if keeps_own_cells(tables, run_id):
        return "what is scored as personal there is the shared base with cells that were never trained"
    return "the shared model has learned nothing from the data there"


def gaps_of_gains(tables: Tables, run_id: str) -> list[str]:
    """A sentence on the pairs of silos whose p_ij is missing."""
    missing = unmeasured_pairs(tables, run_id)
    if not missing:
        return []
    named = ", ".join(f"({i}, {j})" for i, j in missing[:MOST_PAIRS]) + (", ..." if len(missing) > MOST_PAIRS else "")
    which = silo_names(tables, run_id, sorted({i for i, _ in missing}))
    share = f"{len(missing)} of {covered_silos(tables, run_id) ** 2}"
    return [f"personalisation gains of {which} are incomplete: {share} p_ij were not measured, (i, j) = {named}"]
