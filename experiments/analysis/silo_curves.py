"""Training of the silos' own models: curves over rounds, and the phases of their search."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from fedloom.experiments.analysis.frames import METRIC
from fedloom.experiments.analysis.silos import GLOBAL, PERSONAL, decided_ones, silos, took_part, training
from fedloom.experiments.analysis.stages import rounds_by_stage
from fedloom.experiments.analysis.tables import RUN_KEY, Tables, configuration, only


def curves(tables: Tables) -> pd.DataFrame:
    """Loss and accuracy of the silos' own models over the finished rounds of all training stages.

    Columns: experiment, run_id, series (train: on a silo's training data; validation: on its validation data),
    rounds_done, mean_loss, mean, std (of the accuracy over silos, with divisor n), silos.
    """
    own = silos(tables)
    before, rounds = _rounds_before(own.rounds), rounds_by_stage(training(own.rounds))
    parts = [_train_rows(own), _validation_rows(own)]
    rows = pd.concat([p.astype({"loss": "float64", "metric": "float64"}) for p in parts], ignore_index=True)
    places = list(zip(rows["run_id"], rows["stage"], rows["round"], strict=True))
    # A silo is scored after the round's training; a score after the last round has the next round number.
    done = [
        min(int(n) + 1, rounds.get((run, stage), int(n) + 1)) + before.get((run, stage), 0) for run, stage, n in places
    ]
    rows = rows.assign(rounds_done=pd.Series(done, rows.index, dtype="int64")).sort_values("round", kind="stable")
    rows = rows.drop_duplicates(["run_id", "series", "client_id", "rounds_done"], keep="last")
    grouped = rows.groupby([*RUN_KEY, "series", "rounds_done"], sort=False)
    frame = grouped.agg(
        mean_loss=("loss", "mean"),
        mean=("metric", "mean"),
        std=("metric", lambda v: v.std(ddof=0)),
        silos=("client_id", "nunique"),
    ).reset_index()
    return frame.sort_values(["run_id", "series", "rounds_done"], kind="stable", ignore_index=True)


def _rounds_before(rounds: pd.DataFrame) -> dict[tuple[str, str], int]:
    """By (run, stage): the number of rounds of earlier training stages, since each stage counts from 0."""
    found: dict[tuple[str, str], int] = {}
    sums: dict[str, int] = {}
    for (run_id, stage), count in rounds_by_stage(training(rounds)).items():
        found[run_id, stage] = sums.get(run_id, 0)
        sums[run_id] = found[run_id, stage] + count
    return found


_CURVE = [*RUN_KEY, "stage", "round", "client_id", "series", "loss", "metric"]


def _train_rows(tables: Tables) -> pd.DataFrame:
    rows = training(tables.clients)
    return rows[took_part(rows) & rows["loss"].notna()].assign(series="train")[_CURVE]


def _validation_rows(tables: Tables) -> pd.DataFrame:
    rows = training(tables.evaluations)
    rows = rows[(rows["split"] == "validation") & rows["client_id"].notna() & rows["model"].isin([PERSONAL, GLOBAL])]
    with_own = set(rows.loc[rows["model"] == PERSONAL, "run_id"])
    rows = rows[(rows["model"] == PERSONAL) | ~rows["run_id"].isin(with_own)]
    index = [*RUN_KEY, "stage", "round", "client_id"]
    table = rows.pivot_table(index=index, columns="metric", values="value", aggfunc="last", sort=False)
    wide = table.reindex(columns=["loss", METRIC]).reset_index().rename_axis(columns=None)
    return wide.rename(columns={METRIC: "metric"}).assign(series="validation")[_CURVE]


@dataclass(frozen=True)
class Phases:
    """The phases of a run's silos, in finished rounds: pre-training until `search_start`, then the search.

    The first silo had decided every edge after `first_decided` rounds and the last silo after `last_decided` rounds;
    the latter is None while a silo is undecided, and both while all are. Decisions are made before the training of a
    round. `rounds` is the number of finished rounds. Source: SPIDER, Sec. 4.3 and Fig. 6.
    """

    run_id: str
    search_start: int
    first_decided: int | None
    last_decided: int | None
    rounds: int


def phases(tables: Tables) -> list[Phases]:
    """The phases of every run that searches per silo; runs without a search or a finished round are left out."""
    own = silos(tables)
    found = (_phases(only(own, [p.run_id]), configuration(own, p.run_id)) for p in own.paths)
    return [p for p in found if p is not None]


def _phases(run: Tables, config: Mapping[str, Any]) -> Phases | None:
    search = config["method"].get("search")
    rows = training(run.clients)
    rows = rows[took_part(rows) & rows["subspace"].notna()]
    if not search or rows.empty:
        return None
    decided = decided_ones(rows["subspace"], config)
    if decided.all():
        return None
    before = _rounds_before(run.rounds)
    places = zip(rows["run_id"], rows["stage"], rows["round"], strict=True)
    begun = [before.get((str(run_id), str(stage)), 0) + int(round_) for run_id, stage, round_ in places]
    finished = max(begun) + 1
    # The decisions in a row of round n were made before that round, which is after n finished rounds.
    rows = rows.assign(begun=begun, decided=decided)
    first = rows[rows["decided"]].groupby("client_id")["begun"].min()
    whole = len(first) == rows["client_id"].nunique()
    ends = (int(first.min()) if len(first) else None, int(first.max()) if whole else None)
    by_gradient = search.get("kind") == "milenas"
    if by_gradient and "rounds" in search:
        ends = (int(search["rounds"]),) * 2 if finished >= int(search["rounds"]) else (None, None)
    start = 0 if by_gradient else int(search.get("start", 0))
    return Phases(str(rows["run_id"].iloc[0]), start, *ends, finished)
