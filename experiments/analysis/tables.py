"""Loads the result tables of runs into memory."""

import json
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from fedloom.platform.results.copies import fetch
from fedloom.platform.results.paths import RunPaths, find_runs, list_runs, start_of
from fedloom.platform.results.tables import TABLES, read_runs

ALL_TABLES = tuple(TABLES)
RUN_KEY = ["experiment", "run_id"]
"""The columns that identify the run of a row."""

CLIENT_COLUMNS = (
    "stage", "round", "client_id", "tier", "architecture", "subspace", "macs", "bytes_down", "bytes_up", "loss",
    "metric", "simulated_s", "peak_memory_bytes", "status", "error"
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
        place = (run_id, column)
        if place not in self._parsed:
            text = self._recorded.get(run_id, {}).get(column)
            self._parsed[place] = json.loads(text) if isinstance(text, str) else None
        return self._parsed[place]


def load(
    results: str | Path,
    run_ids: Sequence[str] | None = None,
    *,
    experiment: str | None = None,
    tables: Iterable[str] = ALL_TABLES,
) -> Tables:
    """Loads the tables of these runs (ids, their beginnings, names, tags), or of all; only of `experiment` if given.

    Results at a URL (s3://bucket/path) are downloaded first, as far as they have changed. Only the named `tables` and
    the table `runs` are read, and of `clients` only `CLIENT_COLUMNS`. Raises ValueError for an unknown run, experiment
    or table, if there are no runs, and for a damaged file.
    """
    return load_paths(_find(fetch(results, _ids(run_ids), tensors=False), run_ids, experiment), tables)


def load_paths(paths: Sequence[RunPaths], tables: Iterable[str] = ALL_TABLES) -> Tables:
    """Loads the tables of the runs at these paths, which may be empty; `tables` and errors are those of `load`."""
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


def _ids(run_ids: Sequence[str] | None) -> Sequence[str] | None:
    return [run_ids] if isinstance(run_ids, str) else run_ids


def _find(results: Path, run_ids: Sequence[str] | None, experiment: str | None) -> tuple[RunPaths, ...]:
    if run_ids is None:
        paths = tuple(_all_runs(results))
    else:
        paths = tuple(dict.fromkeys(path for given in _ids(run_ids) or () for path in find_runs(results, given)))
    if experiment is None:
        return paths
    own = tuple(p for p in paths if p.experiment == experiment)
    if not own:
        known = ", ".join(sorted({p.experiment for p in paths}))
        raise ValueError(f"there are no runs of experiment {experiment!r} under {results}: there are runs of {known}")
    return own


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

    def of(frame: pd.DataFrame) -> pd.DataFrame:
        return frame[frame["run_id"].isin(list(run_ids))].reset_index(drop=True)

    frames = {name: of(getattr(tables, name)) for name in TABLES}
    return Tables(paths=paths, read=tables.read, **frames)


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
