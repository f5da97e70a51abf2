"""The list of all runs and ablations, which follows their files: only what has changed is read again.

The status and the names of runs are small files that are read immediately. The values from their tables follow, newest
runs first, in a background thread that sleeps while nothing changes.
"""

import json
import math
import secrets
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute

from fedloom.experiments.analysis.outcomes import final_model
from fedloom.experiments.analysis.silos import PERSONAL
from fedloom.experiments.analysis.tables import METRIC
from fedloom.experiments.store.ablations import FOLDER, PLAN, ablation_ids
from fedloom.experiments.store.trials import STATUS, driver_status
from fedloom.platform.plugins import called
from fedloom.platform.results.files import Stamp, stamp_of
from fedloom.platform.results.paths import NAMES, NO_NAMES, RunPaths, list_runs, read_names
from fedloom.platform.results.status import Status, read_status
from fedloom.platform.results.tables import TABLES, conform, read_part, stored_parts
from fedloom.platform.words import said, shown

LONGEST = 200
"""Maximum number of characters of a name, a tag or a message in the list."""
MOST_TAGS = 20
RUN_COLUMNS = ("method", "dataset", "started", "ended", "ablation", "trial")
"""The columns of the table `runs` that the list shows."""
EVALUATION_COLUMNS = ("stage", "round", "model", "client_id", "split", "metric", "value")

SETTLED_NS = 2_000_000_000
"""The age of a folder's modification time, in ns, from which it is certain to cover all changes."""

UNREADABLE = (
    ValueError, OSError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, pa.ArrowException
)  # fmt: skip
"""The exceptions that damaged or foreign files raise; the page shows them in place of the run."""

Stamps = tuple[Stamp | None, ...]


def read_columns(paths: RunPaths, table: str, columns: tuple[str, ...]) -> pa.Table:
    """These columns of a run's table, null where a file lacks them; ValueError naming a damaged file."""
    schema = pa.schema([TABLES[table].field(name) for name in columns])
    parts = [conform(read_part(part, list(columns)), schema) for part in stored_parts(paths.table(table))]
    return pa.concat_tables([schema.empty_table(), *parts])


def stamps_of(paths: RunPaths, *tables: str) -> Stamps:
    """The stamps of the files of a run's tables, which differ if any of the files has changed."""
    return tuple(stamp_of(part) for table in tables for part in stored_parts(paths.table(table)))


def plain(value: Any) -> Any:
    """The value for browsers' JSON: null for numbers that are not finite, times in seconds since 1970."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value.timestamp() if isinstance(value, datetime) else value


@dataclass(frozen=True)
class Seen:
    """A run as it was last read; `values` is what the list shows, `version` the index's version when that last changed.

    `watched` are the files that every refresh checks, and `files` their stamps when they were last read.
    """

    paths: RunPaths
    watched: tuple[Path, Path]
    files: Stamps = ()
    tables: Stamps | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    version: int = 0


class Index:
    """All runs and ablations under a results folder. `refresh` and `changes` may be called from any thread."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.epoch = secrets.token_hex(4)
        """Distinguishes the versions of this index from those of another process."""
        self.parts_read = 0
        """The number of times that a run's tables were read for the list."""
        self._lock = threading.Lock()
        self._version = 0
        self._runs: dict[str, Seen] = {}
        self._gone: dict[str, int] = {}
        self._folders: dict[Path, int] | None = None
        self._listed_ns = 0
        self._ablations: dict[str, tuple[Stamps, dict[str, Any]]] = {}
        self._waiting: dict[str, None] = {}
        self._wake = threading.Event()
        self._is_closed = False
        self._reader: threading.Thread | None = None

    def paths_of(self, run_id: str) -> RunPaths:
        """The paths of a listed run; ValueError for any other id."""
        with self._lock:
            if run_id not in self._runs:
                raise ValueError(f"no run {shown(run_id)} under {self.root}")
            return self._runs[run_id].paths

    def refresh(self) -> None:
        """Checks the folders, and reads again what has changed in them."""
        with self._lock:
            self._find_runs()
            for run_id, seen in self._runs.items():
                try:
                    self._look_at(run_id, seen)
                except OSError as error:  # such as a folder without read permission
                    self._update(run_id, seen, _unknown(seen.paths, said(error)))
            self._look_at_ablations()
        if self._waiting:
            self._wake.set()

    def changes(self, since: str) -> dict[str, Any]:
        """What changed since the answer with version `since`; all runs if this index did not give that version."""
        epoch, _, number = since.partition(".")
        known = int(number) if epoch == self.epoch and number.isdecimal() and len(number) < 16 else None
        with self._lock:
            runs = [dict(seen.values) for seen in self._runs.values() if known is None or seen.version > known]
            return {
                "version": f"{self.epoch}.{self._version}",
                "whole": known is None,
                "results": str(self.root),
                "runs": runs,
                "gone": [] if known is None else [name for name, at in self._gone.items() if at > known],
                "ablations": [values for _, values in self._ablations.values()],
                "total": len(self._runs),
                "waiting": len(self._waiting),
            }

    def values(self, run_id: str) -> dict[str, Any]:
        """What the list shows of a run."""
        with self._lock:
            return dict(self._runs[run_id].values)

    # -- folders and small files, at every refresh ---------------------------------------------------------------------

    def _find_runs(self) -> None:
        """Lists the runs again if the folder of an experiment has gained or lost an entry."""
        folders: dict[Path, int] = {}
        for path in self.root.glob("*/experiment=*"):
            with suppress(OSError):
                if path.is_dir():
                    folders[path] = path.stat().st_mtime_ns
        # Of two runs added within one tick of the file system's clock, only the first may have been listed.
        is_settled = max(folders.values(), default=0) < self._listed_ns - SETTLED_NS
        if folders == self._folders and is_settled:
            return
        self._listed_ns = time.time_ns()
        # The stamps from before the listing: a run that is added meanwhile changes them again.
        self._folders = folders
        listed = {paths.run_id: paths for paths in list_runs(self.root)}
        for run_id in [*self._runs]:
            if run_id not in listed:
                self._version += 1
                del self._runs[run_id]
                self._gone[run_id] = self._version
                self._waiting.pop(run_id, None)
        for run_id, paths in listed.items():
            if run_id not in self._runs:
                self._runs[run_id] = Seen(paths, (paths.status, paths.artifacts / NAMES))
                self._gone.pop(run_id, None)

    def _look_at(self, run_id: str, seen: Seen) -> None:
        files = (stamp_of(seen.watched[0]), stamp_of(seen.watched[1]))
        # A run whose file says that it is running may have died or stalled since.
        if files == seen.files and seen.values.get("state") not in ("running", "stalled"):
            return
        values = {**seen.values, **_small_files(seen.paths, has_names=files[1] is not None)}
        if files != seen.files:
            self._waiting[run_id] = None
        self._update(run_id, replace(seen, files=files), values)

    def _update(self, run_id: str, seen: Seen, values: dict[str, Any]) -> None:
        if values != seen.values:
            self._version += 1
            seen = replace(seen, values=values, version=self._version)
        self._runs[run_id] = seen

    def _look_at_ablations(self) -> None:
        ablations: dict[str, tuple[Stamps, dict[str, Any]]] = {}
        for name in ablation_ids(self.root):
            folder = self.root / FOLDER / name
            try:
                stamps = (stamp_of(folder / PLAN), stamp_of(folder / STATUS))
            except OSError:
                continue
            before = self._ablations.get(name)
            is_running = before is not None and before[1]["state"] in ("running", "stalled")
            ablations[name] = before if before and before[0] == stamps and not is_running else (stamps, _driver(folder))
        self._ablations = ablations

    # -- tables, in a thread -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread that reads the tables of the runs that `refresh` finds changed."""
        self._reader = threading.Thread(target=self._read_tables, name="board-reader", daemon=True)
        self._reader.start()

    def close(self) -> None:
        """Ends the thread."""
        self._is_closed = True
        self._wake.set()
        if self._reader is not None:
            self._reader.join()

    def _read_tables(self) -> None:
        while not self._is_closed:
            self._wake.wait()
            self._wake.clear()
            while not self._is_closed and self.read_next():
                pass

    def read_next(self) -> bool:
        """Reads the tables of the newest waiting run; False if no run waits."""
        with self._lock:
            if not self._waiting:
                return False
            run_id = max(self._waiting)  # ids begin with the time
            del self._waiting[run_id]
            seen = self._runs[run_id]
        try:
            stamps = stamps_of(seen.paths, "runs", "evaluations")
        except OSError:
            return True  # the list says that it cannot be read
        if stamps == seen.tables:
            return True
        values = _of_tables(seen.paths)
        self.parts_read += 1
        with self._lock:
            if run_id in self._runs:
                latest = replace(self._runs[run_id], tables=stamps)
                self._update(run_id, latest, {**latest.values, **values})
        return True


def _small_files(paths: RunPaths, *, has_names: bool) -> dict[str, Any]:
    """The list's values from a run's status and names; the state is unknown if the status is damaged or missing."""
    names = read_names(paths.artifacts) if has_names else NO_NAMES
    known = {
        **_unknown(paths, ""),
        "name": None if names.name is None else shown(names.name, most=LONGEST),
        "tags": [shown(tag, most=LONGEST) for tag in names.tags[:MOST_TAGS]],
    }
    try:
        status = read_status(paths.status)
    except ValueError as error:
        return {**known, "message": said(error)}
    return {**known, **_of_status(status)}


def _unknown(paths: RunPaths, why: str) -> dict[str, Any]:
    """The list's values for a run whose files cannot be read."""
    known: dict[str, Any] = {"id": paths.run_id, "preset": paths.experiment, "name": None, "tags": []}
    return {**known, "state": "unknown", "stage": "", "round": 0, "rounds": 0, "message": why, "beat": None}


def _of_status(status: Status) -> dict[str, Any]:
    return {
        "state": status.state,
        "stage": shown(status.stage, most=LONGEST),
        "round": status.round_shown if status.stage else 0,
        "rounds": status.rounds_total,
        "message": shown(status.message, most=LONGEST),
        # In steps of ten seconds: otherwise the list would change with every heartbeat.
        "beat": plain(status.heartbeat // 10 * 10),
    }


def _driver(folder: Path) -> dict[str, Any]:
    """An ablation's progress as its driver recorded it; the trials' own files are not read."""
    known = {"id": folder.name, "state": "interrupted", "ended": 0, "planned": 0, "message": "no trial was begun"}
    try:
        status = driver_status(folder)
    except ValueError as error:
        return {**known, "state": "unknown", "message": said(error)}
    if status is None:
        return known
    numbers = {"ended": status.round, "planned": status.rounds_total}
    return {**known, **numbers, "state": status.state, "message": shown(status.message, most=LONGEST)}


def _of_tables(paths: RunPaths) -> dict[str, Any]:
    """The list's values from a run's tables; `problem` says why one of them cannot be read."""
    values: dict[str, Any] = {**dict.fromkeys(RUN_COLUMNS), "accuracy": None, "validation": None, "problem": None}
    try:
        for row in read_columns(paths, "runs", RUN_COLUMNS).to_pylist()[:1]:
            values |= {name: plain(value) for name, value in row.items()}
            values |= {n: called(shown(values[n], most=LONGEST)) for n in ("method", "dataset") if values[n]}
        values |= _accuracies(read_columns(paths, "evaluations", EVALUATION_COLUMNS))
    except UNREADABLE as error:
        values["problem"] = said(error)
    return values


def _accuracies(evaluations: pa.Table) -> dict[str, Any]:
    """The final models' accuracy on test data as in `outcomes`, and the latest on the server's validation data."""
    rows = evaluations.filter(pa.compute.equal(evaluations["metric"], METRIC)).to_pandas()
    of_server = rows[rows["client_id"].isna()]
    validated = of_server[(of_server["split"] == "validation") & (of_server["stage"] != "evaluation")]
    final = rows[(rows["stage"] == "evaluation") & (rows["split"] == "test")]
    model = final_model(final)
    of_model = final[final["model"] == model]
    if model != PERSONAL and of_model["client_id"].isna().any():
        of_model = of_model[of_model["client_id"].isna()]
    last = validated[["stage", "round"]].tail(1).merge(validated)  # of a round that scored several subnets, the mean
    values = {"accuracy": of_model["value"].mean(), "validation": last["value"].mean() if len(last) else None}
    return {name: plain(None if value is None else float(value)) for name, value in values.items()}


def to_json(values: Any) -> bytes:
    """The values as JSON that every browser reads."""
    return json.dumps(values, allow_nan=False, separators=(",", ":")).encode()
