"""Runs of methods that give every silo a model of its own: from the result tables to tidy frames."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd

from fedloom.experiments.analysis.frames import METRIC
from fedloom.experiments.analysis.intervals import Estimate
from fedloom.experiments.analysis.kinds import is_silo, silo_run_ids
from fedloom.experiments.analysis.seeds import estimate_by_seed
from fedloom.experiments.analysis.settings import Setting, settings_of
from fedloom.experiments.analysis.tables import Tables, configuration, only

PERSONAL, GLOBAL = "personal", "global"
"""The models that silos are measured with: their own, and the one that they share."""

GAINS, EVALUATION = "gains", "evaluation"
"""Stages that measure; all others train."""

SILO = "silo-"
"""Models of the stage `gains`: "silo-3" is the architecture of silo 3, fine-tuned on another's data."""

EDGES_KEPT = 2
"""Incoming edges of a node that are left where edges are pruned, as in DARTS."""

PER_SILO = ("accuracy", "loss", "global_accuracy", "parameters", "macs", "neighbour_share")
MEASURED = (
    "accuracy",
    "std",
    "worst",
    "global_accuracy",
    "gain",
    "parameters",
    "macs",
    "peak_memory_bytes",
    "bytes_per_round",
    "wall_s",
    "architectures",
)
_KEY = ["experiment", "run_id"]


@dataclass(frozen=True)
class SiloSummary:
    """One setting over its seeds.

    `values` holds an estimate, or None, for: accuracy, std and worst (of the silos' own test accuracies);
    global_accuracy (the shared model's mean, where silos have one of their own beside it); gain (mean
    personalisation gain); parameters and macs (of the silos' models, means); peak_memory_bytes (the greatest of any
    silo in training); bytes_per_round (both ways, per silo); wall_s (of all training rounds); architectures (how many
    different ones the silos have).
    """

    setting: Setting
    method: str
    model: str
    values: dict[str, Estimate | None]


def silos(tables: Tables) -> Tables:
    """The tables of the runs of cross-silo methods."""
    return only(tables, silo_run_ids(tables))


def silo_settings(tables: Tables) -> list[Setting]:
    """The settings of cross-silo methods, named among all that are there."""
    return [s for s in settings_of(tables) if is_silo(s.config)]


def training(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of `rounds`, `clients` or `evaluations` that belong to training."""
    return frame[~frame["stage"].isin([GAINS, EVALUATION])]


def was_heard(clients: pd.DataFrame) -> "pd.Series[bool]":
    """Which rows of `clients` counted: who fails, drops out or is late leaves neither an update nor a state."""
    return clients["status"].fillna("ok") == "ok"


def per_silo(tables: Tables) -> pd.DataFrame:
    """One row per (run, silo) that the final evaluation measured; what was not measured is null.

    Columns: experiment, run_id, client_id, model (personal, or global where there is none), architecture, samples (of
    the silo's test data), accuracy and loss on them, global_accuracy (of the shared model, beside a personal one),
    parameters, macs (forward, per sample), neighbour_share (kNN-Per's). A silo without test samples has no accuracy.
    """
    rows = silos(tables).evaluations
    rows = rows[(rows["stage"] == EVALUATION) & rows["client_id"].notna()]
    rows = rows[rows["model"].isin([PERSONAL, GLOBAL]) & (rows["split"].isna() | (rows["split"] == "test"))]
    found = [_silo(key, group) for key, group in rows.groupby([*_KEY, "client_id"], sort=False)]
    columns = [*_KEY, "client_id", "model", "architecture", "samples", *PER_SILO]
    frame = pd.DataFrame(found, columns=columns).astype(dict.fromkeys(PER_SILO, "float64"))
    return _in_order(frame.astype({"samples": "Int64", "client_id": "Int64"}), tables)


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
    place = dict(zip([*_KEY, "client_id"], key, strict=True))
    return {
        **place,
        "model": model,
        "architecture": str(names.iloc[-1]) if len(names) else None,
        "samples": samples,
        **{name: values.get(name) for name in PER_SILO},
        "global_accuracy": before,
    }


def _in_order(frame: pd.DataFrame, tables: Tables) -> pd.DataFrame:
    """By run as asked, then by silo."""
    place = {p.run_id: i for i, p in enumerate(tables.paths)}
    return (
        frame.assign(_run=frame["run_id"].map(place))
        .sort_values(["_run", "client_id"], kind="stable", ignore_index=True)
        .drop(columns="_run")
    )


def silo_summaries(tables: Tables) -> list[SiloSummary]:
    """Per setting what its silos reached and what that cost, over its seeds; a setting without any is left out."""
    own = silos(tables)
    measured, values = per_silo(own), {p.run_id: _run_values(only(own, [p.run_id])) for p in own.paths}
    found = []
    for setting in silo_settings(tables):
        runs = [values[run_id] for run_id in setting.run_ids]
        estimates = {name: estimate_by_seed([run[name] for run in runs], setting.seeds) for name in MEASURED}
        models = measured.loc[measured["run_id"].isin(setting.run_ids), "model"]
        if any(estimates.values()):
            model = str(models.iloc[0]) if len(models) else PERSONAL
            found.append(SiloSummary(setting, str(setting.config["method"]["name"]), model, estimates))
    return found


def _run_values(run: Tables) -> dict[str, float | None]:
    """The numbers of one run by the names of `MEASURED`; every silo with test data weighs the same."""
    rows, gains = per_silo(run), personalisation_gains(p_matrix(run))
    rounds = training(run.rounds)
    sent, tasks = rounds["bytes_down"].sum() + rounds["bytes_up"].sum(), rounds["clients_planned"].sum()
    architectures = int(rows["architecture"].nunique())
    values: dict[str, Any] = {
        "accuracy": rows["accuracy"].mean(),
        "std": rows["accuracy"].std(ddof=0),
        "worst": rows["accuracy"].min(),
        "global_accuracy": rows["global_accuracy"].mean(),
        "gain": gains["gain"].mean(),
        "parameters": rows["parameters"].mean(),
        "macs": rows["macs"].mean(),
        "peak_memory_bytes": training(run.clients)["peak_memory_bytes"].max(),
        "bytes_per_round": sent / tasks if tasks else None,
        "wall_s": rounds["wall_s"].sum(min_count=1),
        "architectures": architectures or None,
    }
    return {name: None if value is None or pd.isna(value) else float(value) for name, value in values.items()}


# -- personalisation gains ---------------------------------------------------------------------------------------------


def p_matrix(tables: Tables) -> pd.DataFrame:
    """p_ij, one row per (run, client_id i, silo j): the accuracy on i's test data of j's architecture.

    j's architecture was fine-tuned on i's data. Columns: experiment, run_id, client_id, silo, accuracy. Only what was
    measured. Source: SPIDER, Sec. 5.2.2, Fig. 3.
    """
    rows = silos(tables).evaluations
    chosen = (rows["stage"] == GAINS) & (rows["split"] == "test") & (rows["metric"] == METRIC)
    chosen &= rows["client_id"].notna() & rows["model"].str.fullmatch(rf"{SILO}\d+")
    rows = rows[chosen.fillna(False).astype(bool)]
    rows = rows[(rows["samples"].isna() | (rows["samples"] > 0)) & rows["value"].notna()]
    number = rows["model"].astype(object).str.removeprefix(SILO).astype("Int64")
    frame = rows.assign(silo=number, accuracy=rows["value"].astype("float64"))[
        [*_KEY, "client_id", "silo", "accuracy"]
    ].drop_duplicates([*_KEY, "client_id", "silo"], keep="last")
    return _in_order(frame.sort_values(["client_id", "silo"], kind="stable"), tables)


def personalisation_gains(matrix: pd.DataFrame) -> pd.DataFrame:
    """Per (run, client i): own (p_ii), others (mean p_ij over j != i), best_other, compared (how many j), gain (g_i).

    g_i is the mean over j != i of p_ii - p_ij, null where p_ii or every p_ij is missing. Source: SPIDER, Eq. 6.
    """
    found = []
    for key, rows in matrix.groupby([*_KEY, "client_id"], sort=False):
        is_own = rows["silo"] == rows["client_id"]
        own, others = rows.loc[is_own, "accuracy"].mean(), rows.loc[~is_own, "accuracy"]
        found.append((*key, own, others.mean(), others.max(), len(others), own - others.mean()))
    columns = [*_KEY, "client_id", "own", "others", "best_other", "compared", "gain"]
    numbers = dict.fromkeys(["own", "others", "best_other", "gain"], "float64")
    return pd.DataFrame(found, columns=columns).astype({**numbers, "client_id": "Int64", "compared": "int64"})


def as_square(matrix: pd.DataFrame) -> pd.DataFrame:
    """One run's `p_matrix` with a row per client i and a column per architecture j, each of all silos; else NaN."""
    names = sorted({*matrix["client_id"], *matrix["silo"]})
    square = matrix.pivot(index="client_id", columns="silo", values="accuracy")
    return square.reindex(index=names, columns=names).astype("float64")


# -- curves and phases -------------------------------------------------------------------------------------------------


def curves(tables: Tables) -> pd.DataFrame:
    """What the silos' own models reach while they train, over finished rounds of all training stages together.

    Columns: experiment, run_id, series (train: loss and accuracy on a silo's training data; validation: on its
    validation data), rounds_done, mean_loss, mean, std (of the accuracy over silos, divided by their number), silos.
    """
    own = silos(tables)
    before = _rounds_before(own.rounds)
    parts = [_train_rows(own), _validation_rows(own)]
    rows = pd.concat([p.astype({"loss": "float64", "metric": "float64"}) for p in parts], ignore_index=True)
    offset = [before.get(place, 0) for place in zip(rows["run_id"], rows["stage"], strict=True)]
    rows["rounds_done"] = rows["round"].astype("int64") + pd.Series(offset, rows.index, dtype="int64") + 1
    grouped = rows.groupby([*_KEY, "series", "rounds_done"], sort=False)
    frame = grouped.agg(
        mean_loss=("loss", "mean"),
        mean=("metric", "mean"),
        std=("metric", lambda v: v.std(ddof=0)),
        silos=("client_id", "nunique"),
    ).reset_index()
    return frame.sort_values(["run_id", "series", "rounds_done"], kind="stable", ignore_index=True)


def _rounds_before(rounds: pd.DataFrame) -> dict[tuple[str, str], int]:
    """Per (run, stage) the rounds of the training stages before it: each stage counts its rounds from 0."""
    counts = training(rounds).groupby(["run_id", "stage"], sort=False)["round"].max() + 1
    found: dict[tuple[str, str], int] = {}
    sums: dict[str, int] = {}
    for place, count in zip(counts.index, counts, strict=True):
        run_id, stage = map(str, place)
        found[run_id, stage] = sums.get(run_id, 0)
        sums[run_id] = found[run_id, stage] + int(count)
    return found


_CURVE = [*_KEY, "stage", "round", "client_id", "series", "loss", "metric"]


def _train_rows(tables: Tables) -> pd.DataFrame:
    rows = training(tables.clients)
    return rows[was_heard(rows) & rows["loss"].notna()].assign(series="train")[_CURVE]


def _validation_rows(tables: Tables) -> pd.DataFrame:
    rows = training(tables.evaluations)
    rows = rows[(rows["split"] == "validation") & rows["client_id"].notna() & rows["model"].isin([PERSONAL, GLOBAL])]
    with_own = set(rows.loc[rows["model"] == PERSONAL, "run_id"])
    rows = rows[(rows["model"] == PERSONAL) | ~rows["run_id"].isin(with_own)]
    index = [*_KEY, "stage", "round", "client_id"]
    table = rows.pivot_table(index=index, columns="metric", values="value", aggfunc="last", sort=False)
    wide = table.reindex(columns=["loss", METRIC]).reset_index().rename_axis(columns=None)
    return wide.rename(columns={METRIC: "metric"}).assign(series="validation")[_CURVE]


@dataclass(frozen=True)
class Phases:
    """When a run's silos searched, in finished rounds: pre-training until `search_start`, then the search.

    The first silo had decided every edge after `first_decided` rounds and the last after `last_decided`, None while
    one has not: decisions are made before a round's training. `rounds` are all finished ones. Source: SPIDER, Sec. 4.3
    and Fig. 6.
    """

    run_id: str
    search_start: int
    first_decided: int | None
    last_decided: int | None
    rounds: int


def is_decided(subspace: str, *, prune_edges: bool = False) -> bool:
    """Whether nothing is left to be searched in the text ("0,1/0//1": options by commas, edges by slashes).

    No edge of the two cells has a choice left and, if edges are pruned, no node has more than two incoming edges.
    """
    return "," not in subspace and not (prune_edges and _is_crowded(subspace.split("/")))


def _is_crowded(pieces: Sequence[str]) -> bool:
    half = len(pieces) // 2
    for cell in (pieces[:half], pieces[half:]):
        first, node = 0, 2  # nodes 0 and 1 are the inputs, which every node has an edge from
        while first < half:
            if sum(map(bool, cell[first : first + node])) > EDGES_KEPT:
                return True
            first, node = first + node, node + 1
    return False


def _decided(texts: "pd.Series[Any]", config: Mapping[str, Any]) -> "pd.Series[bool]":
    prune_edges = bool(config["method"]["search"].get("prune_edges", False))
    return texts.map(partial(is_decided, prune_edges=prune_edges)).astype(bool)


def phases(tables: Tables) -> list[Phases]:
    """The phases of every run that searches per silo; a run that has none, or no finished round, is left out."""
    own = silos(tables)
    found = (_phases(only(own, [p.run_id]), configuration(own, p.run_id)) for p in own.paths)
    return [p for p in found if p is not None]


def _phases(run: Tables, config: Mapping[str, Any]) -> Phases | None:
    search = config["method"].get("search")
    rows = training(run.clients)
    rows = rows[was_heard(rows) & rows["subspace"].notna()]
    if not search or rows.empty:
        return None
    decided = _decided(rows["subspace"], config)
    if decided.all():
        return None
    before = _rounds_before(run.rounds)
    places = zip(rows["run_id"], rows["stage"], rows["round"], strict=True)
    begun = [before.get((str(run_id), str(stage)), 0) + int(round_) for run_id, stage, round_ in places]
    finished = max(begun) + 1
    # What a round's row shows was decided before that round: after as many finished ones as its number says.
    rows = rows.assign(begun=begun, decided=decided)
    first = rows[rows["decided"]].groupby("client_id")["begun"].min()
    whole = len(first) == rows["client_id"].nunique()
    ends = (int(first.min()) if len(first) else None, int(first.max()) if whole else None)
    by_gradient = search.get("kind") == "milenas"
    if by_gradient and "rounds" in search:
        ends = (int(search["rounds"]),) * 2 if finished >= int(search["rounds"]) else (None, None)
    start = 0 if by_gradient else int(search.get("start", 0))
    return Phases(str(rows["run_id"].iloc[0]), start, *ends, finished)


# -- architectures -----------------------------------------------------------------------------------------------------


def latest_architectures(tables: Tables) -> pd.DataFrame:
    """Per (run, silo) the architecture of its model as text: the evaluated one, or the latest of its training.

    Columns: experiment, run_id, client_id, architecture, accuracy (null before the evaluation).
    """
    own = silos(tables)
    columns = [*_KEY, "client_id", "architecture", "accuracy"]
    measured = per_silo(own)[columns].dropna(subset="architecture")
    rows = training(own.clients)
    rows = rows[was_heard(rows)]
    text = rows["subspace"].astype(object).where(rows["subspace"].notna(), rows["architecture"].astype(object))
    trained = rows.assign(architecture=text, accuracy=float("nan"))[columns].dropna(subset="architecture")
    trained = trained.drop_duplicates([*_KEY, "client_id"], keep="last")
    parts = [p.astype({"architecture": object}) for p in (measured, trained) if len(p)] or [measured]
    both = pd.concat(parts, ignore_index=True)
    return _in_order(both.drop_duplicates([*_KEY, "client_id"], keep="first"), tables)


def undecided_silos(tables: Tables, run_id: str) -> list[int]:
    """The silos of a run that searches whose model has something left to be searched."""
    rows = latest_architectures(only(tables, [run_id]))
    decided = _decided(rows["architecture"], configuration(tables, run_id))
    return [int(c) for c in rows.loc[~decided, "client_id"]]


def in_short(architecture: str) -> str:
    """The text of DARTS cells in little room: an option per edge, "." for a pruned one, {01} for undecided ones.

    The normal cell comes first.
    """
    pieces = architecture.split("/")
    marks = [p or "." if "," not in p else "{" + p.replace(",", "") + "}" for p in pieces]
    half = len(marks) // 2
    return " ".join(("".join(marks[:half]), "".join(marks[half:])))
