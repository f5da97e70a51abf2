"""The writer of a run's tables: rows are added, committed to a journal, and flushed to Parquet."""

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from fedloom.platform.results.files import (
    ADVICE,
    MOST_BYTES,
    check_writable,
    content_hash,
    from_json,
    publish,
    read_file,
    remove_temporaries,
    sync,
    temporary_path,
    typed,
    within,
    without_number,
)
from fedloom.platform.results.manifest import Manifest, digest_of
from fedloom.platform.results.paths import RunPaths, is_used, remove_run, run_paths
from fedloom.platform.results.tables import (
    SCHEMA_VERSION,
    TABLES,
    Row,
    check_row,
    conform,
    count_rows,
    opened_part,
    read_part,
    schema_version,
    stored_parts,
)
from fedloom.platform.words import said


class TableParts:
    """The files part-00000.parquet, part-00001.parquet, ... with the rows of one table of one run in order.

    Only the last file is rewritten. The first always exists, initially without rows, so that readers find the columns
    of a table before its first row. No rows are kept in memory. The manifest lists the files.
    """

    def __init__(self, folder: Path, schema: pa.Schema, rows_per_file: int, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest
        self._schema = schema
        self._rows_per_file = rows_per_file
        folder.mkdir(parents=True, exist_ok=True)
        remove_temporaries(folder)
        self._paths = stored_parts(folder)
        names = [without_number(path.name) for path in self._paths]
        for index in range(len(names)):
            if _part_name(index) not in names:
                raise ValueError(f"{folder / _part_name(index)} is missing: {ADVICE}")
        self._counts = [count_rows(path) for path in self._paths]
        for path in self._paths:
            with opened_part(path) as file:
                if schema_version(path, file.schema_arrow) > SCHEMA_VERSION:
                    raise ValueError(f"{path} was written by a newer version: resume with that version")
        if not self._paths:
            self._write(0, schema.empty_table())

    @property
    def rows(self) -> int:
        """Number of rows in all files."""
        return sum(self._counts)

    @property
    def files(self) -> int:
        """Number of files."""
        return len(self._counts)

    def append(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Appends rows: fills the last file, then starts new ones."""
        while rows:
            last, room = len(self._counts) - 1, self._rows_per_file - self._counts[-1]
            if room <= 0:
                last, room = last + 1, self._rows_per_file
            batch = pa.Table.from_pylist(rows[:room], schema=self._schema)
            if room < self._rows_per_file:
                batch = pa.concat_tables([self.read_last(), batch])
            self._write(last, batch)
            rows = rows[room:]

    def replace(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Replaces all rows of a table that consists of one file."""
        assert len(self._counts) == 1
        self._write(0, pa.Table.from_pylist(rows, schema=self._schema))

    def read_last(self) -> pa.Table:
        """The rows of the last file, with the columns of the current schema."""
        return conform(read_part(self._paths[-1]), self._schema)

    def cut(self, num_rows: int) -> None:
        """Drops all rows from index `num_rows` on, starting at the end, so that an interruption leaves no gap."""
        while self.rows > num_rows:
            last, before = len(self._counts) - 1, sum(self._counts[:-1])
            if before >= num_rows and last > 0:
                with self._manifest.deleting(self._paths[last]):
                    self._paths[last].unlink(missing_ok=True)
                del self._counts[last:], self._paths[last:]
            else:
                self._write(last, self.read_last().slice(0, num_rows - before))

    def _write(self, index: int, table: pa.Table) -> None:
        """Replaces a file atomically: a temporary file is written, synced, checked and renamed."""
        path = self._paths[index] if index < len(self._paths) else self._folder / _part_name(index)
        temporary = temporary_path(path)
        pq.write_table(table, temporary, compression="zstd")
        sync(temporary)
        if count_rows(temporary) != table.num_rows:
            raise OSError(f"{temporary} does not hold the {table.num_rows} rows that were written to it")
        with self._manifest.replacing(path, digest_of(temporary)):
            publish(temporary, path)
        self._paths[index:], self._counts[index:] = [path], [table.num_rows]


def _part_name(index: int) -> str:
    return f"part-{index:05d}.parquet"


@dataclass(frozen=True, slots=True)
class JournalEnd:
    """How far a journal had been written when a checkpoint was saved."""

    file: str
    size_bytes: int
    sha256: str


class Journal:
    """Committed rows that are not yet in Parquet, as lines `[table, index, row]` in a file that is only appended to.

    The first commit after a rotation starts a new file. Every checkpoint holds the length and the hash of the file at
    that moment: a file that was cut, changed or exchanged since is noticed, and rows appended later are not read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._name = folder, ""
        self._descriptor: int | None = None
        self._length_bytes, self._hash = 0, sha256()

    def append(self, rows: Iterable[tuple[str, int, str]]) -> None:
        """Appends rows, each with its table, its index and its JSON; waits until they are on disk.

        After an OSError none of them is stored.
        """
        if self._descriptor is None:
            self._name = f"journal-{uuid4().hex[:12]}.jsonl"  # never the name of a file that a checkpoint may refer to
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_EXCL
            self._descriptor = os.open(self._folder / self._name, flags, 0o644)
            self._length_bytes, self._hash = 0, sha256()
            sync(self._folder)
        content = "".join(f'["{table}",{index},{text}]\n' for table, index, text in rows).encode()
        rest = memoryview(content)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            os.fsync(self._descriptor)
        except OSError:
            # After a full disk the file may end in the middle of a line.
            os.ftruncate(self._descriptor, self._length_bytes)
            raise
        self._length_bytes += len(content)
        self._hash.update(content)

    @property
    def end(self) -> JournalEnd | None:
        """How far the current file has been written; None if there is none."""
        if self._descriptor is None:
            return None
        return JournalEnd(self._name, self._length_bytes, self._hash.hexdigest())

    def rotate(self) -> None:
        """Deletes the current file; to be called when all its rows are stored elsewhere."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)
            (self._folder / self._name).unlink(missing_ok=True)


_row_json = json.JSONEncoder(check_circular=False).encode
"""The row as one line of JSON; NaN and infinities are allowed, times are not."""

Position = Mapping[str, Any]
"""Rows per table at a checkpoint, and as `journal` how far the journal of rows not yet in Parquet was written."""


def journal_files(folder: Path) -> list[Path]:
    """The journal files of a run."""
    return sorted(folder.glob("journal-*.jsonl"))


def journalled_rows(folder: Path, position: Position) -> dict[str, dict[int, dict[str, Any]]]:
    """The rows, by table and index, of the journal that a checkpoint with this position refers to.

    Raises ValueError for a journal that was changed since. A missing journal has no rows: it was deleted once all of
    them were in Parquet; otherwise the caller notices which rows are missing.
    """
    paths, end = journal_files(folder), None
    if "journal" in position:  # otherwise an earlier revision wrote the checkpoint
        try:
            end = None if position["journal"] is None else typed(JournalEnd, position["journal"])
        except (TypeError, KeyError) as error:
            raise ValueError(f"the checkpoint does not say where the journal ends ({said(error)}): {ADVICE}") from error
        paths = [] if end is None else [within(folder, end.file)]
    rows: dict[str, dict[int, dict[str, Any]]] = {}
    for path in paths:
        try:
            content = read_file(path, MOST_BYTES)
        except FileNotFoundError:
            continue
        if end is not None:
            content = content[: end.size_bytes]
            if content_hash(content) != end.sha256:
                raise ValueError(f"{path} is damaged (it is not the journal that the checkpoint refers to): {ADVICE}")
        for line in content.splitlines():
            try:
                table, index, row, *_ = from_json(line, path)
                rows.setdefault(table, {})[index] = dict(row)
            except (ValueError, TypeError):  # cut short; checkpoints of earlier revisions hold no hash
                break
    return rows


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
        self._journal = Journal(paths.artifacts)
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
        refusal = ValueError(f"run {run_id!r} exists under {paths.root}: resume it, or give another run id")
        if is_used(paths.root, run_id):
            raise refusal
        paths.artifacts.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.mkdir(paths.artifacts)  # fails if another process takes the id at this moment
        except FileExistsError as error:
            raise refusal from error
        sync(paths.artifacts.parent)
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
    ) -> Self:
        """Continues a run with exactly the first `position[table]` rows of each table.

        Later rows are cut; rows that are not in Parquet are read from the journal. Raises ValueError, before anything
        is changed, if a row is missing.
        """
        paths = run_paths(root, experiment, run_id)
        if not paths.artifacts.is_dir():
            raise ValueError(f"there is no run {run_id!r} of experiment {experiment!r} under {root} to resume")
        check_writable(paths.artifacts)
        writer = cls(paths, Manifest.of_run(paths), flush_interval_s, rows_per_file)
        writer._restore(position)
        # Journals are deleted last, so that after a crash before this line the restoration can be repeated.
        for path in journal_files(paths.artifacts):
            path.unlink(missing_ok=True)
        sync(paths.artifacts)
        return writer

    @property
    def position(self) -> dict[str, Any]:
        """The committed rows, for the checkpoint (see `Position`)."""
        counts = {table: self._parts[table].rows + len(self._committed[table]) for table in ROW_TABLES}
        end = self._journal.end
        return {**counts, "journal": None if end is None else asdict(end)}

    @property
    def run_row(self) -> Row:
        """The run's row in table `runs`, without `experiment` and `run_id`."""
        return dict(self._run)

    def add(self, table: str, /, **row: object) -> None:
        """Buffers a row for the next commit; ValueError if it does not fit the table's columns (see `check_row`)."""
        if table == "runs":
            raise ValueError("table 'runs' has one row per run: use update_run")
        self._added[table].append(check_row(table, row))

    def commit(self) -> dict[str, Any]:
        """Writes all added rows to the journal and returns the position, for the checkpoint.

        Flushes if the flush interval has passed, or if the buffered rows fill a file. After an OSError (such as a full
        disk) the rows stay buffered for the next commit.
        """
        before = self.position
        added = [
            (table, index, _row_json(row))
            for table, rows in self._added.items()
            for index, row in enumerate(rows, before[table])
        ]
        if added:
            self._journal.append(added)
        for table, rows in self._added.items():
            self._committed[table] += rows
            rows.clear()
        waiting = max(len(rows) for rows in self._committed.values())
        if time.monotonic() >= self._next_flush_s or waiting >= self._rows_per_file:
            self.flush()
        return self.position

    def flush(self) -> None:
        """Moves all committed rows to the Parquet files; safe with concurrent readers."""
        started_s = time.monotonic()
        for table, rows in self._committed.items():
            before = self._parts[table].rows
            try:
                self._parts[table].append(rows)
            finally:
                # After an error, rows that are already in a file must not be written again.
                del rows[: self._parts[table].rows - before]
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

    def _restore(self, position: Position) -> None:
        if self._parts["runs"].files > 1:
            raise ValueError(
                f"{self.paths.table('runs')} holds {self._parts['runs'].files} files, of which fedloom wrote the "
                "first: delete the others, or restore the results folder from a copy"
            )
        for table in position:
            if table not in (*ROW_TABLES, "journal"):
                raise ValueError(f"the checkpoint counts rows of table {table!r}, which is not one of {ROW_TABLES}")
        lacking = {table: range(self._parts[table].rows, position.get(table, 0)) for table in ROW_TABLES}
        journalled = journalled_rows(self.paths.artifacts, position) if any(lacking.values()) else {}
        for table, indices in lacking.items():
            for index in indices:
                if index not in journalled.get(table, {}):
                    raise ValueError(
                        f"run {self.paths.run_id!r} lacks row {index} of table {table!r}, which its checkpoint counts: "
                        "restore the results folder from a copy, or start a new run"
                    )
        rows = {table: [check_row(table, journalled[table][index]) for index in lacking[table]] for table in ROW_TABLES}
        for table in ROW_TABLES:
            self._parts[table].cut(position.get(table, 0))
            self._parts[table].append(rows[table])
