"""Frames of cross-silo runs: accuracy per silo, curves and phases of the search, and personalisation gains."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd

from fedloom.experiments.analysis.settings import Estimate, Setting, estimate_by_seed, settings_of
from fedloom.experiments.analysis.tables import (
    EVALUATION,
    GAINS,
    MEASUREMENTS,
    METRIC,
    RUN_KEY,
    SILOS,
    Tables,
    configuration,
    is_dry,
    only,
    real_rounds,
    rounds_by_stage,
    runs_of_kind,
    where,
)
from fedloom.platform.plugins import called

PERSONAL, GLOBAL = "personal", "global"
"""The models that are measured for a silo: its own, and the one that all silos share."""

EDGES_KEPT = 2
"""Number of incoming edges that a node keeps if edges are pruned, as in DARTS."""

PER_SILO = ("accuracy", "loss", "global_accuracy", "parameters", "macs", "neighbour_share")


def silos(tables: Tables) -> Tables:
    """The tables of the runs of cross-silo methods."""
    return only(tables, runs_of_kind(tables, SILOS))


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
    rows = where(silos(tables).evaluations, stage=EVALUATION, model=[PERSONAL, GLOBAL])
    rows = rows[rows["client_id"].notna() & (rows["split"].isna() | (rows["split"] == "test"))]
    of_silos = [_silo(key, group) for key, group in rows.groupby([*RUN_KEY, "client_id"], sort=False)]
    columns = [*RUN_KEY, "client_id", "model", "architecture", "samples", *PER_SILO]
    frame = pd.DataFrame(of_silos, columns=columns).astype(dict.fromkeys(PER_SILO, "float64"))
    return in_order(frame.astype({"samples": "Int64", "client_id": "Int64"}), tables)


WATCHED = "accuracy_while_training"
"""Silos' test accuracies during training, measured only for reports (`method.train.test_every`)."""


def best_round(run: Tables) -> tuple[float, int] | None:
    """The highest mean test accuracy of the silos over the rounds in which it was measured, and the first such round.

    Rounds are counted from 1. It is chosen on test data and therefore too high, but papers report it (SPIDER, App.
    B.1). None if not measured.
    """
    rows = where(silos(run).evaluations, metric=WATCHED)
    rows = rows[(rows["samples"].fillna(0) > 0) & rows["value"].notna()]
    personal = rows[rows["model"] == PERSONAL]
    means = (personal if len(personal) else rows).groupby("round")["value"].agg(["mean", "size"])
    means = means.loc[means["size"] == means["size"].max(), "mean"].astype("float64")
    return None if means.empty else (float(means.max()), int(means.idxmax()) + 1)


def _silo(key: tuple[Any, ...], rows: pd.DataFrame) -> dict[str, Any]:
    model = PERSONAL if (rows["model"] == PERSONAL).any() else GLOBAL
    of_model = rows[rows["model"] == model]
    tested = of_model[of_model["split"] == "test"]
    samples = tested["samples"].max() if len(tested) else None
    values = {str(name): float(value) for name, value in zip(of_model["metric"], of_model["value"], strict=True)}
    if not pd.isna(samples) and samples == 0:
        values = {name: v for name, v in values.items() if name not in (METRIC, "loss")}
    shared = rows[(rows["model"] == GLOBAL) & (rows["metric"] == METRIC) & (rows["samples"].fillna(0) > 0)]
    before = shared["value"].iloc[-1] if model == PERSONAL and len(shared) else None
    names = of_model["architecture"].dropna()
    return {
        **dict(zip([*RUN_KEY, "client_id"], key, strict=True)),
        "model": model,
        "architecture": str(names.iloc[-1]) if len(names) else None,
        "samples": samples,
        **{name: values.get(name) for name in PER_SILO},
        "global_accuracy": before,
    }


def in_order(frame: pd.DataFrame, tables: Tables) -> pd.DataFrame:
    """Sorted by run in the order of `tables`, then by silo."""
    positions = {p.run_id: i for i, p in enumerate(tables.paths)}
    return (
        frame.assign(_run=frame["run_id"].map(positions))
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
    of_silos = silos(tables)
    columns = [*RUN_KEY, "client_id", "architecture", "accuracy"]
    measured = per_silo(of_silos)[columns].dropna(subset="architecture")
    rows = training(of_silos.clients)
    rows = rows[took_part(rows)]
    text = rows["subspace"].astype(object).where(rows["subspace"].notna(), rows["architecture"].astype(object))
    trained = rows.assign(architecture=text, accuracy=float("nan"))[columns].dropna(subset="architecture")
    trained = trained.drop_duplicates([*RUN_KEY, "client_id"], keep="last")
    parts = [p.astype({"architecture": object}) for p in (measured, trained) if len(p)] or [measured]
    both = pd.concat(parts, ignore_index=True)
    return in_order(both.drop_duplicates([*RUN_KEY, "client_id"], keep="first"), tables)


def undecided_silos(tables: Tables, run_id: str) -> list[int]:
    """The silos with an incomplete search, in a run whose method has a search."""
    rows = latest_architectures(only(tables, [run_id]))
    decided = decided_ones(rows["architecture"], configuration(tables, run_id))
    return [int(c) for c in rows.loc[~decided, "client_id"]]


def curves(tables: Tables) -> pd.DataFrame:
    """Loss and accuracy of the silos' own models over the finished rounds of all training stages.

    Columns: experiment, run_id, series (train: on a silo's training data; validation: on its validation data),
    rounds_done, mean_loss, mean, std (of the accuracy over silos, with divisor n), silos.
    """
    of_silos = silos(tables)
    before, rounds = _rounds_before(of_silos.rounds), rounds_by_stage(training(of_silos.rounds))
    train = training(of_silos.clients)
    train = train[took_part(train) & train["loss"].notna()].assign(series="train")[_CURVE]
    parts = [train, _validation_rows(of_silos)]
    rows = pd.concat([p.astype({"loss": "float64", "metric": "float64"}) for p in parts], ignore_index=True)
    numbers = zip(rows["run_id"], rows["stage"], rows["round"], strict=True)
    # A silo is scored after the round's training; a score after the last round has the next round number.
    done = [
        min(int(n) + 1, rounds.get((run, stage), int(n) + 1)) + before.get((run, stage), 0) for run, stage, n in numbers
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
    before: dict[tuple[str, str], int] = {}
    sums: dict[str, int] = {}
    for (run_id, stage), count in rounds_by_stage(training(rounds)).items():
        before[run_id, stage] = sums.get(run_id, 0)
        sums[run_id] = before[run_id, stage] + count
    return before


_CURVE = [*RUN_KEY, "stage", "round", "client_id", "series", "loss", "metric"]


def _validation_rows(tables: Tables) -> pd.DataFrame:
    rows = where(training(tables.evaluations), split="validation", model=[PERSONAL, GLOBAL])
    rows = rows[rows["client_id"].notna()]
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
    runs = [only(tables, [p.run_id]) for p in silos(tables).paths]
    of_runs = (_phases(run, configuration(run, run.paths[0].run_id)) for run in runs)
    return [p for p in of_runs if p is not None]


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
    numbers = zip(rows["run_id"], rows["stage"], rows["round"], strict=True)
    begun = [before.get((str(run_id), str(stage)), 0) + int(round_) for run_id, stage, round_ in numbers]
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


SILO = "silo-"
"""Prefix of models in the stage `gains`: "silo-3" is the architecture of silo 3, fine-tuned on another silo's data."""

BEST = "best_test_accuracy"
"""The metric of the paper's p_ij, where it was measured: the highest test accuracy over all epochs."""


def p_matrix(tables: Tables) -> pd.DataFrame:
    """p_ij, one row per (run, client_id i, silo j): the accuracy of j's architecture on i's test data.

    j's architecture was fine-tuned on i's data. Columns: experiment, run_id, client_id, silo, accuracy (`BEST` where it
    was measured). Pairs that were not measured have no row. Source: SPIDER, Sec. 5.2.2, Fig. 3.
    """
    rows = where(silos(tables).evaluations, stage=GAINS, split="test", metric=[METRIC, BEST])
    rows = rows[rows["client_id"].notna() & rows["model"].str.fullmatch(rf"{SILO}\d+")]
    rows = rows[(rows["samples"].isna() | (rows["samples"] > 0)) & rows["value"].notna()]
    rows = rows.assign(best=(rows["metric"] == BEST).astype(bool)).sort_values("best", kind="stable")
    number = rows["model"].astype(object).str.removeprefix(SILO).astype("Int64")
    frame = rows.assign(silo=number, accuracy=rows["value"].astype("float64"))[
        [*RUN_KEY, "client_id", "silo", "accuracy"]
    ].drop_duplicates([*RUN_KEY, "client_id", "silo"], keep="last")
    return in_order(frame.sort_values(["client_id", "silo"], kind="stable"), tables)


def best_on_test(tables: Tables) -> bool:
    """Whether some p_ij are the best of all epochs on test data."""
    return len(where(silos(tables).evaluations, stage=GAINS, metric=BEST)) > 0


def personalisation_gains(matrix: pd.DataFrame) -> pd.DataFrame:
    """The personalisation gain of every (run, client i).

    Columns: experiment, run_id, client_id, own (p_ii), others (mean p_ij over j != i), best_other, compared (number of
    j), gain (g_i). g_i is the mean over j != i of p_ii - p_ij; it is null if p_ii or every p_ij is missing. Source:
    SPIDER, Eq. 6.
    """
    gains = []
    for key, rows in matrix.groupby([*RUN_KEY, "client_id"], sort=False):
        is_own = rows["silo"] == rows["client_id"]
        of_own, others = rows.loc[is_own, "accuracy"].mean(), rows.loc[~is_own, "accuracy"]
        gains.append((*key, of_own, others.mean(), others.max(), len(others), of_own - others.mean()))
    columns = [*RUN_KEY, "client_id", "own", "others", "best_other", "compared", "gain"]
    numbers = dict.fromkeys(["own", "others", "best_other", "gain"], "float64")
    return pd.DataFrame(gains, columns=columns).astype({**numbers, "client_id": "Int64", "compared": "int64"})


def as_square(matrix: pd.DataFrame) -> pd.DataFrame:
    """The `p_matrix` of one run with a row per client i and a column per architecture j; missing pairs are NaN."""
    names = sorted({*matrix["client_id"], *matrix["silo"]})
    square = matrix.pivot(index="client_id", columns="silo", values="accuracy")
    return square.reindex(index=names, columns=names).astype("float64")


@dataclass(frozen=True)
class SiloSummary:
    """Estimates of one setting over its seeds.

    `values` holds an estimate, or None, for: accuracy, std and worst (of the silos' own test accuracies);
    best_accuracy and best_round (see `best_round`); global_accuracy (mean of the shared model, if silos also have their
    own model); gain (mean personalisation gain);
    parameters and macs (means over the silos' models); peak_memory_bytes (maximum over silos in training);
    bytes_per_round (received and sent, per silo); wall_s (of all training rounds); architectures (number of distinct
    architectures of the silos). A dry run has neither memory nor wall time.
    """

    setting: Setting
    method: str
    model: str
    values: dict[str, Estimate | None]


def silo_settings(tables: Tables) -> list[Setting]:
    """The settings of cross-silo methods, with names that are unique among all settings."""
    return [s for s in settings_of(tables) if s.kind == SILOS]


def silo_summaries(tables: Tables) -> list[SiloSummary]:
    """One summary per setting of a cross-silo method; settings without any value are left out."""
    of_silos = silos(tables)
    measured, values = per_silo(of_silos), {p.run_id: _run_values(only(of_silos, [p.run_id])) for p in of_silos.paths}
    summaries = []
    for setting in silo_settings(tables):
        runs = [values[run_id] for run_id in setting.run_ids]
        estimates = {name: estimate_by_seed([run[name] for run in runs], setting.seeds) for name in runs[0]}
        models = measured.loc[measured["run_id"].isin(setting.run_ids), "model"]
        if any(estimates.values()):
            model = str(models.iloc[0]) if len(models) else PERSONAL
            method = called(str(setting.config.get("method", {}).get("name", "")))
            summaries.append(SiloSummary(setting, method, model, estimates))
    return summaries


def _run_values(run: Tables) -> dict[str, float | None]:
    """The values of one run by the names in `SiloSummary`; every silo with test data has the same weight."""
    rows, gains = per_silo(run), personalisation_gains(p_matrix(run))
    best, rounds = best_round(run), real_rounds(training(run.rounds))
    sent, tasks = rounds["bytes_down"].sum() + rounds["bytes_up"].sum(), rounds["clients_planned"].sum()
    architectures = int(rows["architecture"].nunique())
    values: dict[str, Any] = {
        "accuracy": rows["accuracy"].mean(),
        "std": rows["accuracy"].std(ddof=0),
        "worst": rows["accuracy"].min(),
        "best_accuracy": None if best is None else best[0],
        "best_round": None if best is None else best[1],
        "global_accuracy": rows["global_accuracy"].mean(),
        "gain": gains["gain"].mean(),
        "parameters": rows["parameters"].mean(),
        "macs": rows["macs"].mean(),
        "peak_memory_bytes": training(run.clients)["peak_memory_bytes"].max(),
        "bytes_per_round": sent / tasks if tasks else None,
        "wall_s": rounds["wall_s"].sum(min_count=1),
        "architectures": architectures or None,
    }
    if is_dry(run, run.paths[0].run_id):  # these are of the counting, not of a training
        values |= {"peak_memory_bytes": None, "wall_s": None}
    return {name: None if value is None or pd.isna(value) else float(value) for name, value in values.items()}
