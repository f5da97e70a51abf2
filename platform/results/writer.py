"""The writer of a run's tables: rows are added, committed to a journal, and flushed to Parquet."""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

from fedloom.platform.results.fence import Fence, newest, number_of
from fedloom.platform.results.files import check_writable, sync_folder
from fedloom.platform.results.journal import Journal, JournalledRows, journal_files, read_journals
from fedloom.platform.results.manifest import Manifest
from fedloom.platform.results.parts import TableParts
from fedloom.platform.results.paths import STATE_FILE, RunPaths, is_used, remove_run, run_paths
from fedloom.platform.results.tables import TABLES, Row, check_row, row_json

Position = Mapping[str, int]
"""The number of rows per table at a checkpoint."""

ROW_TABLES = tuple(table for table in TABLES if table != "runs")

# A flush rewrites the last file of a table. Waiting `_FLUSH_PAUSE` times its duration bounds its share of the run to
# 5 %; waiting at most `_MOST_INTERVALS` intervals keeps readers up to date.
_FLUSH_PAUSE = 20
_MOST_INTERVALS = 12


class RunWriter:
    """The only writer of one run's tables.

    `add` buffers a row; `commit` makes all added rows survive a crash; `flush` moves them to the Parquet files that
    readers see. Only rows that are not yet in Parquet are kept in memory.
    """

    def __init__(self, paths: RunPaths, manifest: Manifest, flush_interval_s: float, rows_per_file: int) -> None:
        """Only called by `create` and `resume`."""
        self.paths, self.manifest = paths, manifest
        self._flush_interval_s = flush_interval_s
        self._rows_per_file = rows_per_file
        self._parts = {
            table: TableParts(paths.table(table), TABLES[table], rows_per_file, manifest) for table in TABLES
        }
        self._journal = Journal(paths.artifacts, paths.run_id, manifest.fence)
        self._added: dict[str, list[Row]] = {table: [] for table in ROW_TABLES}
        self._committed: dict[str, list[Row]] = {table: [] for table in ROW_TABLES}
        self._run: Row = next(iter(self._parts["runs"].read_last().to_pylist()), {})
        self._next_flush_s = time.monotonic() + flush_interval_s

    @classmethod
    def create(
        cls, root: Path, experiment: str, run_id: str, flush_interval_s: float = 5.0, rows_per_file: int = 250_000
    ) -> Self:
        """Starts a new run; ValueError, before anything is written, if the id is used or the folder not writable."""
        paths = run_paths(root, experiment, run_id)
        check_writable(paths.root)
        _reserve(paths)
        try:
            return cls(paths, Manifest(paths), flush_interval_s, rows_per_file)
        except OSError:  # a full disk
            remove_run(paths)
            raise

    @classmethod
    def resume(
        cls,
        root: Path,
        experiment: str,
        run_id: str,
        position: Position,
        flush_interval_s: float = 5.0,
        rows_per_file: int = 250_000,
        fence: Fence | None = None,
        restored: Callable[[], None] = lambda: None,
    ) -> Self:
        """Continues a run with exactly the first `position[table]` rows of each table.

        Later rows are cut; rows that are not in Parquet are read from the journal. What the run's former writer still
        writes is not read, once `restored` has saved the state under the number of `fence`; it is called when all rows
        are in Parquet. Raises ValueError, before anything is changed, if a row is missing.
        """
        paths = run_paths(root, experiment, run_id)
        if not paths.artifacts.is_dir():
            raise ValueError(f"there is no run {run_id!r} of experiment {experiment!r} under {root} to resume")
        check_writable(paths.artifacts)
        writer = cls(paths, Manifest.of_run(paths, fence), flush_interval_s, rows_per_file)
        owner = number_of(newest(paths.checkpoint / STATE_FILE).name)
        writer._restore(position, read_journals(paths.artifacts, run_id, owner))
        restored()
        # Journals are deleted last, so that after a crash before this line the restoration can be repeated.
        for path in journal_files(paths.artifacts):
            writer.fence.remove(path)
        sync_folder(paths.artifacts)
        return writer

    @property
    def fence(self) -> Fence:
        """How this run's files are written."""
        return self.manifest.fence

    @property
    def position(self) -> dict[str, int]:
        """Number of committed rows per table."""
        return {table: self._parts[table].rows + len(self._committed[table]) for table in ROW_TABLES}

    @property
    def run_row(self) -> Row:
        """The run's row in table `runs`, without `experiment` and `run_id`."""
        return dict(self._run)

    def add(self, table: str, /, **row: object) -> None:
        """Buffers a row for the next commit; ValueError if it does not fit the table's columns (see `check_row`)."""
        if table == "runs":
            raise ValueError("table 'runs' has one row per run: use update_run")
        self._added[table].append(check_row(table, row))

    def commit(self) -> dict[str, int]:
        """Writes all added rows to the journal and returns the number of rows per table, for the checkpoint.

        After an OSError (such as a full disk) the rows stay buffered for the next commit.
        """
        before = self.position
        added = [
            (table, index, row_json(row))
            for table, rows in self._added.items()
            for index, row in enumerate(rows, before[table])
        ]
        if added:
            self._journal.append(added)
        for table, rows in self._added.items():
            self._committed[table] += rows
            rows.clear()
        self.flush_if_due()
        return self.position

    def flush_if_due(self) -> None:
        """Flushes if the flush interval has passed, or if the buffered rows fill a file."""
        waiting = max(len(rows) for rows in self._committed.values())
        if time.monotonic() >= self._next_flush_s or waiting >= self._rows_per_file:
            self.flush()

    def flush(self) -> None:
        """Moves all committed rows to the Parquet files; safe with concurrent readers."""
        started_s = time.monotonic()
        for table, rows in self._committed.items():
            self._flush_table(table, rows)
        self._journal.rotate()
        now_s = time.monotonic()
        pause_s = min(_FLUSH_PAUSE * (now_s - started_s), _MOST_INTERVALS * self._flush_interval_s)
        self._next_flush_s = now_s + max(self._flush_interval_s, pause_s)

    def update_run(self, **fields: object) -> None:
        """Sets fields of the run's row in table `runs` at once and durably; other fields do not change."""
        checked = check_row("runs", fields)
        # A field set to None becomes null again.
        self._run = {**self._run, **dict.fromkeys(fields), **checked}  # type: ignore[dict-item]
        self._parts["runs"].replace([self._run])

    def close(self) -> None:
        """Commits and flushes all rows; no journal is left."""
        self.commit()
        self.flush()

    def _flush_table(self, table: str, rows: list[Row]) -> None:
        before = self._parts[table].rows
        try:
            self._parts[table].append(rows)
        finally:
            # After an error, rows that are already in a file must not be written again.
            del rows[: self._parts[table].rows - before]

    def _restore(self, position: Position, journalled: JournalledRows) -> None:
        if self._parts["runs"].files > 1:
            raise ValueError(
                f"{self.paths.table('runs')} holds {self._parts['runs'].files} files, of which fedloom wrote the "
                "first: delete the others, or restore the results folder from a copy"
            )
        for table in position:
            if table not in ROW_TABLES:
                raise ValueError(f"the checkpoint counts rows of table {table!r}, which is not one of {ROW_TABLES}")
        missing = {table: self._missing(table, position.get(table, 0), journalled) for table in ROW_TABLES}
        for table, rows in missing.items():
            self._parts[table].cut(position.get(table, 0))
            self._parts[table].append(rows)
        for parts in self._parts.values():
            parts.claim()

    def _missing(self, table: str, num_rows: int, journalled: JournalledRows) -> list[Row]:
        """The rows up to the position that are not in Parquet, from the journal."""
        rows = journalled.get(table, {})
        stored = self._parts[table].rows
        for index in range(stored, num_rows):
            if index not in rows:
                raise ValueError(
                    f"run {self.paths.run_id!r} lacks row {index} of table {table!r}, which its checkpoint counts: "
                    "restore the results folder from a copy, or start a new run"
                )
        return [check_row(table, rows[index]) for index in range(stored, num_rows)]


def _reserve(paths: RunPaths) -> None:
    if is_used(paths.root, paths.run_id):
        raise ValueError(_used(paths))
    paths.artifacts.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.mkdir(paths.artifacts)  # fails if another process takes the id at this moment
    except FileExistsError as error:
        raise ValueError(_used(paths)) from error
    sync_folder(paths.artifacts.parent)


def _used(paths: RunPaths) -> str:
    return f"run {paths.run_id!r} exists under {paths.root}: resume it, or give another run id"
