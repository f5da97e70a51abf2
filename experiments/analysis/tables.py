"""Loads the result tables of runs, and derives the kinds of the runs' methods and of their stages."""

import json
import re
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from fedloom.platform.results.copies import fetch
from fedloom.platform.results.paths import RunPaths, find_runs, list_runs, runs_called, start_of
from fedloom.platform.results.store import is_remote
from fedloom.platform.results.tables import TABLES, read_runs

ALL_TABLES = tuple(TABLES)
WITHOUT_CLIENTS = tuple(name for name in ALL_TABLES if name != "clients")
"""All tables except the longest, which models' scores and costs do not need."""

RUN_KEY = ["experiment", "run_id"]
"""The columns that identify the run of a row."""

CLIENT_COLUMNS = (
    "stage", "round", "client_id", "tier", "architecture", "subspace", "steps", "macs", "bytes_down", "bytes_up",
    "loss", "metric", "simulated_s", "peak_memory_bytes", "status", "error",
    "staleness", "ended_s"
)  # fmt: skip
"""The columns read from the table `clients`, by far the longest table; read others with `pandas.read_parquet`."""


@dataclass(frozen=True)
class Tables:
    """The result tables of some runs, in the order in which the runs were requested.

    `read` names the tables that were read; the others are empty.
    """

    paths: tuple[RunPaths, ...]
    runs: pd.DataFrame
    rounds: pd.DataFrame
    clients: pd.DataFrame
    candidates: pd.DataFrame
    evaluations: pd.DataFrame
    models: pd.DataFrame
    read: frozenset[str] = frozenset(ALL_TABLES)

    @cached_property
    def _recorded(self) -> dict[str, dict[Hashable, Any]]:
        """The rows of `runs` by run, cached because frames request configurations often."""
        return {str(row["run_id"]): row for row in self.runs.to_dict("records")}

    @cached_property
    def _parsed(self) -> dict[tuple[str, str], Any]:
        return {}

    def recorded(self, run_id: str, column: str) -> Any:
        """The JSON value that the run recorded in a column of `runs`; None if it ended before recording it."""
        run_and_column = (run_id, column)
        if run_and_column not in self._parsed:
            text = self._recorded.get(run_id, {}).get(column)
            self._parsed[run_and_column] = json.loads(text) if isinstance(text, str) else None
        return self._parsed[run_and_column]


def load(
    results: str | Path,
    run_ids: Sequence[str] | None = None,
    *,
    experiment: str | None = None,
    tables: Iterable[str] = ALL_TABLES,
) -> Tables:
    """Loads the tables of runs by id, id prefix, name or tag, or of all runs; only of `experiment` if given.

    Results at a URL (s3://bucket/path) are downloaded first, as far as they have changed. Only the named `tables` and
    the table `runs` are read, and of `clients` only `CLIENT_COLUMNS`. Raises ValueError for an unknown run, experiment
    or table, if there are no runs, and for a damaged file.
    """
    return load_paths(paths_of(results, run_ids, experiment), tables)


def paths_of(
    results: str | Path, run_ids: Sequence[str] | None = None, experiment: str | None = None
) -> list[RunPaths]:
    """The paths of the runs that `load` would load, with the same errors."""
    ids = [run_ids] if isinstance(run_ids, str) else run_ids
    root = fetch(results, ids, tensors=False)
    if ids is None:
        paths = _all_runs(root)
    else:
        paths = list(dict.fromkeys(path for name in ids for path in find_runs(root, name)))
        fetch_trained(results, paths)
    if experiment is not None:
        known = ", ".join(sorted({p.experiment for p in paths}))
        paths = [p for p in paths if p.experiment == experiment]
        if not paths:
            raise ValueError(f"there are no runs of experiment {experiment!r} under {root}: there are runs of {known}")
    return paths


def fetch_trained(results: str | Path, paths: Sequence[RunPaths]) -> None:
    """Downloads the runs that trained the supernets from which these runs, of results at a URL, started."""
    if is_remote(results) and (trained := sorted({*_trained_by(read_runs(paths, "runs")).values()})):
        fetch(results, trained, tensors=False)


def _trained_by(runs: pd.DataFrame) -> dict[str, str]:
    """By run that started from another run's supernet: the id of the run that trained it."""
    reused = runs[runs["supernet_run_id"].notna()]
    pairs = zip(reused["run_id"].astype(str), reused["supernet_run_id"].astype(str), strict=True)
    return {run: source for run, source in pairs if run != source}


def load_paths(paths: Sequence[RunPaths], tables: Iterable[str] = ALL_TABLES) -> Tables:
    """Loads the tables of the runs at these paths, of which there may be none; `tables` and errors are as in `load`."""
    names = {"runs", *([tables] if isinstance(tables, str) else tables)}
    # An unrequested table is read for no run, which gives an empty frame with its columns.
    frames = {name: read_table_of(paths if name in names else (), name) for name in TABLES}
    for name in names - set(TABLES):
        read_table_of((), name)  # raises an error that lists the known tables
    return Tables(paths=tuple(paths), read=frozenset(names), **frames)


def read_table_of(paths: Sequence[RunPaths], table: str) -> pd.DataFrame:
    """One table of these runs, with the columns that the frames use."""
    return read_runs(paths, table, CLIENT_COLUMNS if table == "clients" else None)


def latest_run(results: str | Path) -> str:
    """The id of the run that was started last; ValueError if there is none."""
    return max(_all_runs(Path(results)), key=lambda run: (start_of(run.run_id, run.config), run.run_id)).run_id


def _all_runs(results: Path) -> list[RunPaths]:
    runs = list_runs(results)
    if not runs:
        raise ValueError(f"there are no runs under {results}: start one with fedloom run, or name another folder")
    return runs


def only(tables: Tables, run_ids: Sequence[str]) -> Tables:
    """The tables of some of the runs."""
    paths = tuple(p for p in tables.paths if p.run_id in set(run_ids))
    if paths == tables.paths:
        return tables
    frames = {name: where(getattr(tables, name), run_id=run_ids).reset_index(drop=True) for name in TABLES}
    return Tables(paths=paths, read=tables.read, **frames)


def where(frame: pd.DataFrame, **values: str | Collection[str]) -> pd.DataFrame:
    """The rows whose columns have these values, or one of several values; a null matches nothing."""
    for column, value in values.items():
        frame = frame[frame[column].isin([value] if isinstance(value, str) else list(value))]
    return frame


def requires(tables: Tables, *names: str) -> None:
    """Raises ValueError if a table was not read, since numbers computed from it would be silently wrong."""
    missing = [name for name in names if name not in tables.read]
    if missing:
        raise ValueError(f"this needs the table {missing[0]!r}, which was not read: name it in load(..., tables=...)")


def name_of(tables: Tables, run_id: str) -> str | None:
    """The name that the run was given; None if it has none."""
    names = tables.runs.loc[tables.runs["run_id"] == run_id, "name"].dropna()
    return str(names.iloc[0]) if len(names) else None


def configuration(tables: Tables, run_id: str) -> dict[str, Any]:
    """The configuration that the run stored; empty if it ended before storing it."""
    config: dict[str, Any] = tables.recorded(run_id, "config") or {}
    return config


TRAINING = "supernet"
"""The kind of the stage that trains a supernet; several runs may share the supernet."""

ALONE = "alone"
"""The kind of the stages that train a subnet without a supernet, and the name of the resulting model."""

SEARCH, EVALUATION, GAINS = "search", "evaluation", "gains"

MEASUREMENTS = (EVALUATION, GAINS)
"""Kinds of stages that measure trained models and do not count as communication of the method itself."""


def by_stage(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with the columns `kind` and `stage_tier`: stage "search/tier2" has kind "search" and tier "tier2"."""
    # Parses each of the few stages once, since there may be millions of rows.
    parts = {stage: stage.partition("/") for stage in frame["stage"].dropna().unique()}
    kinds = frame["stage"].map({stage: part[0] for stage, part in parts.items()}).astype(object)
    tiers = frame["stage"].map({stage: part[2] for stage, part in parts.items()}).astype(object)
    return frame.assign(kind=kinds, stage_tier=tiers)


def real_rounds(rounds: pd.DataFrame) -> pd.DataFrame:
    """The rows of `rounds` without those in which a training stage only scored its final weights.

    Such a row follows the stage's last training round, and has no planned clients and no learning rate: a round for
    which no client was selected has one. Stages in which the server works alone have no such row.
    """
    stages = rounds.groupby(["run_id", "stage"])
    trains = ~by_stage(rounds)["kind"].isin([SEARCH, *MEASUREMENTS]) & (stages["clients_planned"].transform("max") > 0)
    last = rounds["round"] == stages["round"].transform("max")
    only_scored = trains & last & (rounds["clients_planned"] == 0) & rounds["lr"].isna()
    return rounds[~only_scored.fillna(False).astype(bool)]


def rounds_by_stage(rounds: pd.DataFrame) -> dict[tuple[str, str], int]:
    """Number of finished rounds by (run, stage), in the order of the rows."""
    last = real_rounds(rounds).groupby(["run_id", "stage"], sort=False, as_index=False)["round"].max()
    return {(str(row.run_id), str(row.stage)): int(row.round) + 1 for row in last.itertuples()}


TIERS, SUBNETS, SILOS, SHARED = "tiers", "subnets", "silos", "shared"
"""What a run produces: a model per tier, subnets for targets, a model per silo, or one model for all clients."""

ALL_TIERS = "all"
"""The tier in rows that concern all tiers."""


def traits_of(tables: Tables, run_id: str) -> Mapping[str, Any]:
    """The traits of the run's method; empty if the run stored no configuration."""
    recorded: Mapping[str, Any] | None = tables.recorded(run_id, "traits")
    if recorded is not None:
        return recorded
    return _of_older_runs(str(configuration(tables, run_id).get("method", {}).get("name", "")))


@cache
def _of_older_runs(method: str) -> Mapping[str, Any]:
    """A method's current traits, for older runs that recorded none; such runs assigned a shared model to a tier."""
    from fedloom.platform.methods.registry import METHODS

    if method not in METHODS:
        return {}
    traits = METHODS[method].traits(METHODS[method].config())
    return {**traits, "kind": TIERS if traits["kind"] == SHARED else traits["kind"]}


def kind_of(tables: Tables, run_id: str) -> str:
    """TIERS, SUBNETS, SILOS or SHARED; TIERS for a run that stored no configuration."""
    return str(traits_of(tables, run_id).get("kind", TIERS))


def runs_of_kind(tables: Tables, kind: str) -> list[str]:
    """The runs whose method has this kind."""
    return [p.run_id for p in tables.paths if kind_of(tables, p.run_id) == kind]


def for_all(tables: Tables, frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with tier "all" in the rows of models that all clients share; rows of single clients stay unchanged."""
    shared = frame["run_id"].isin(runs_of_kind(tables, SHARED))
    if not shared.any():
        return frame
    if "client_id" in frame.columns:
        shared &= frame["client_id"].isna()
    return frame.assign(tier=frame["tier"].astype(object).where(~shared, ALL_TIERS))


def with_silo_clients(tables: Tables) -> Tables:
    """Adds the table `clients` of the cross-silo runs, which have few rows; other runs' rows are not read."""
    paths = [p for p in tables.paths if kind_of(tables, p.run_id) == SILOS]
    return replace(tables, clients=read_table_of(paths, "clients")) if paths else tables


def is_dry(tables: Tables, run_id: str) -> bool:
    """Whether the run was a dry run, which counts the clients' work without training."""
    return bool(configuration(tables, run_id).get("dry_run", False))


Bounds = dict[tuple[str, str], float]
"""By (run, tier): the largest cost that the tier affords, in the unit of `tiers.cost`."""


def upper_bounds(tables: Tables) -> Bounds:
    """The bounds of all runs that recorded them."""
    bounds: Bounds = {}
    for row in tables.runs.itertuples():
        recorded = json.loads(row.tiers) if isinstance(row.tiers, str) else []
        bounds |= {(str(row.run_id), tier["tier"]): float(tier["upper"]) for tier in recorded}
    return bounds


def with_training(tables: Tables) -> Tables:
    """Adds the rows of the supernet's training to the tables of runs that started from a trained supernet.

    The rows of `rounds` and `evaluations` of the run that trained it (`supernet_run_id`) are copied under the id of the
    run that reused it, so that curves start where the training started and costs are those of a run that shares no
    supernet. If the run that trained the supernet was deleted, no rows are added (see `untrained`).
    """
    sources = untrained(tables)
    if not sources:
        return tables
    by_id = {p.run_id: [p] for p in tables.paths}
    root = tables.paths[0].root
    trained = [p for r in dict.fromkeys(sources.values()) for p in (by_id.get(r) or runs_called(root, r))[-1:]]

    def joined(name: str, frame: pd.DataFrame) -> pd.DataFrame:
        if name not in tables.read:
            return frame
        rows = by_stage(read_table_of(trained, name))
        rows = rows[rows["kind"] == TRAINING].drop(columns=["kind", "stage_tier"])
        rows_of = {str(run_id): group for run_id, group in rows.groupby("run_id", sort=False)}
        copies = [
            rows_of[source].assign(run_id=run, experiment=by_id[run][0].experiment)
            for run, source in sources.items()
            if source in rows_of
        ]
        return pd.concat([*copies, frame], ignore_index=True) if copies else frame

    return replace(
        tables, rounds=joined("rounds", tables.rounds), evaluations=joined("evaluations", tables.evaluations)
    )


def untrained(tables: Tables) -> dict[str, str]:
    """By run without rows of its supernet's training: the id of the run that trained it, which is not here."""
    trained = set(tables.rounds.loc[tables.rounds["stage"].astype(object) == TRAINING, "run_id"])
    return {run: source for run, source in _trained_by(tables.runs).items() if run not in trained}


METRIC = "accuracy"

MODELS = ("supernet_init", "fine_tuned", "rand_init")
"""Models in display order: slices of the supernet, the slices after fine-tuning, and models from fresh weights."""


def natural(name: str) -> tuple[Any, ...]:
    """A sort key that puts tier10 after tier2."""
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name) if part)


def shown_models(names: Sequence[str]) -> list[str]:
    """Distinct names in display order: first the known models, then the others by name."""
    return sorted(set(names), key=lambda n: (MODELS.index(n) if n in MODELS else len(MODELS), n))
