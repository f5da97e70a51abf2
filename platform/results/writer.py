"""The writer of a run's tables: rows are added, committed to a journal, and flushed to Parquet.

A journal's first line names its run, and every line carries a hash of all lines up to it: lines that were exchanged,
taken out, repeated or put in another order are noticed.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Self
from zlib import crc32

import pyarrow as pa
import pyarrow.parquet as pq

from fedloom.platform.results.fence import Fence, newest, number_of, plain
from fedloom.platform.results.files import (
    ADVICE,
    MOST_BYTES,
    check_writable,
    content_hash,
    from_json,
    read_file,
    sync_file,
    sync_folder,
    temporary_path,
)
from fedloom.platform.results.manifest import Manifest, Replacing, Seal, seal_of
from fedloom.platform.results.paths import STATE_FILE, RunPaths, is_used, remove_run, run_paths
from fedloom.platform.results.tables import (
    SCHEMA_VERSION_KEY,
    TABLES,
    Row,
    check_row,
    conform,
    count_rows,
    opened_part,
    read_part,
    row_json,
    schema_version,
    stored_parts,
)
from fedloom.platform.words import shown


@contextmanager
def _unlisted(_path: Path, _new: Seal) -> Iterator[None]:
    yield


def write_part(path: Path, table: pa.Table, replacing: Replacing = _unlisted, fence: Fence | None = None) -> None:
    """Writes the file atomically: to a temporary file that is synced, checked and renamed."""
    temporary = temporary_path(path)
    pq.write_table(table, temporary, compression="zstd")
    sync_file(temporary)
    if count_rows(temporary) != table.num_rows:
        raise OSError(f"{temporary} does not hold the {table.num_rows} rows that were written to it")
    with replacing(path, seal_of(temporary)):
        (fence or Fence()).publish(temporary, path)


def _part_name(index: int) -> str:
    return f"part-{index:05d}.parquet"


class TableParts:
    """The files part-00000.parquet, part-00001.parquet, ... with the rows of one table of one run in order.

    Only the last file is rewritten. The first always exists, initially without rows, so that readers find the columns
    of a table before its first row. No rows are kept in memory.
    """

    def __init__(self, folder: Path, schema: pa.Schema, rows_per_file: int, manifest: Manifest | None = None) -> None:
        """`manifest` lists the files."""
        self._folder, self._manifest = folder, manifest
        self._replacing = _unlisted if manifest is None else manifest.replacing
        self._fence = Fence() if manifest is None else manifest.fence
        self._schema = schema
        self._rows_per_file = rows_per_file
        folder.mkdir(parents=True, exist_ok=True)
        self._fence.remove_temporaries(folder)
        self._paths = self._existing()
        self._counts = [count_rows(path) for path in self._paths]
        if self._counts:
            self._check_version()
        else:
            self._counts = [0]
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
            if self._counts[-1] >= self._rows_per_file:
                self._counts.append(0)
            batch = rows[: self._rows_per_file - self._counts[-1]]
            self._extend_last(pa.Table.from_pylist(batch, schema=self._schema))
            rows = rows[len(batch) :]

    def replace(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Replaces all rows of a table that consists of one file."""
        assert len(self._counts) == 1
        self._write(0, pa.Table.from_pylist(rows, schema=self._schema))

    def read_last(self) -> pa.Table:
        """The rows of the last file, with the columns of the current schema."""
        return conform(read_part(self._path(len(self._counts) - 1)), self._schema)

    def cut(self, num_rows: int) -> None:
        """Drops all rows from index `num_rows` on, starting at the end, so that an interruption leaves no gap."""
        while self.rows > num_rows:
            last = len(self._counts) - 1
            before = sum(self._counts[:-1])
            if before >= num_rows and last > 0:
                with nullcontext() if self._manifest is None else self._manifest.deleting(self._path(last)):
                    self._fence.remove(self._path(last))
                self._counts.pop()
                del self._paths[last:]
            else:
                self._write(last, self.read_last().slice(0, num_rows - before))

    def claim(self) -> None:
        """Renames the last file to the owner's number, if it is an earlier owner's, who could still replace it."""
        last = len(self._counts) - 1
        path, claimed = self._path(last), self._fence.named(self._path(last))
        if path != claimed:
            with self._replacing(claimed, seal_of(path)):
                self._fence.publish(path, claimed)
            self._paths[last] = claimed

    def _extend_last(self, new: pa.Table) -> None:
        if self._counts[-1]:
            new = pa.concat_tables([self.read_last(), new])
        self._write(len(self._counts) - 1, new)

    def _write(self, index: int, table: pa.Table) -> None:
        if index < len(self._paths):
            self.claim()  # first, so that no reader finds its rows in two files
        write_part(self._path(index), table, self._replacing, self._fence)
        self._paths[index:] = [self._path(index)]
        self._counts[index] = table.num_rows

    def _path(self, index: int) -> Path:
        return self._paths[index] if index < len(self._paths) else self._fence.named(self._folder / _part_name(index))

    def _existing(self) -> list[Path]:
        found = stored_parts(self._folder)
        names = [plain(path.name) for path in found]
        expected = [_part_name(index) for index in range(len(found))]
        if names != expected:
            missing = self._folder / next(name for name in expected if name not in names)
            raise ValueError(f"{missing} is missing: restore it from a copy, or start a new run")
        return found

    def _check_version(self) -> None:
        for index in range(len(self._counts)):
            with opened_part(self._path(index)) as file:
                stored = schema_version(self._path(index), file.schema_arrow)
            if stored > int(self._schema.metadata[SCHEMA_VERSION_KEY]):
                raise ValueError(f"{self._path(index)} was written by a newer version: resume with that version")


JournalledRows = dict[str, dict[int, dict[str, Any]]]
"""For each table, its rows by their running index."""

HEAD = "journal"
"""Stands in a file's first line where the others have a table."""
_LINK_LENGTH = 16


class Journal:
    """Appends lines to the run's current journal file; the first commit after a rotation starts a new one."""

    def __init__(self, folder: Path, run_id: str, fence: Fence | None = None) -> None:
        self._folder, self._run_id, self._fence = folder, run_id, fence or Fence()
        self._number = 0
        self._descriptor: int | None = None
        self._length_bytes, self._link = 0, ""

    def append(self, rows: Iterable[tuple[str, int, str]]) -> None:
        """Appends rows, each with its table, its index and its JSON; waits until they are on disk.

        After an OSError none of them is stored.
        """
        descriptor = self._open()
        entries = [(HEAD, self._number, json.dumps({"run_id": self._run_id}))] if not self._length_bytes else []
        link, lines = self._link, []
        for table, index, text in (*entries, *rows):
            line = f'"{table}",{index},{text}'.encode()
            link = _link(link, line)
            lines.append(_line(line, link))
        content = b"".join(lines)
        try:
            _write_all(descriptor, content)
            os.fsync(descriptor)
        except OSError:
            # After a full disk the file may end in the middle of a line.
            os.ftruncate(descriptor, self._length_bytes)
            raise
        self._length_bytes += len(content)
        self._link = link

    def rotate(self) -> None:
        """Deletes the current file; to be called when all its rows are stored elsewhere."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)
            self._fence.remove(self._path())

    def _open(self) -> int:
        if self._descriptor is None:
            self._number += 1
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC
            self._descriptor = os.open(self._path(), flags, 0o644)
            self._length_bytes, self._link = 0, ""
            sync_folder(self._folder)
        return self._descriptor

    def _path(self) -> Path:
        return self._fence.named(self._folder / _name(self._number))


def _name(number: int) -> str:
    return f"journal-{number:06d}.jsonl"


def _write_all(descriptor: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _line(content: bytes, link: str) -> bytes:
    """A line's content with its link, and the checksum of both, by which a line that was cut short is told."""
    linked = b'%s,"%s"' % (content, link.encode())
    return b"[%s,%d]\n" % (linked, crc32(linked))


def _link(before: str, content: bytes) -> str:
    """What tells a line from every other with the same content: a hash of all lines up to it."""
    return content_hash(before.encode() + content)[:_LINK_LENGTH]


def journal_files(folder: Path) -> list[Path]:
    """The journal files of a run, oldest first."""
    return sorted(folder.glob("journal-*.jsonl"))


def read_journals(folder: Path, run_id: str, owner: int = 0) -> JournalledRows:
    """All rows in the journal files of the run's owner with this number, that of its checkpoint.

    Reading a file stops at its first incomplete or damaged line, left by a killed writer: nothing from there on was
    committed. The caller checks by the indices that all needed rows exist. Raises ValueError for a journal of another
    run, and for whole lines that are not in the order in which they were written.
    """
    rows: JournalledRows = {}
    for path in journal_files(folder):
        if number_of(path.name) != owner:  # replaced before it could save a checkpoint, or after another one has
            continue
        for table, index, row in _rows(path, run_id):
            rows.setdefault(table, {})[index] = row
    return rows


def _rows(path: Path, run_id: str) -> Iterator[tuple[str, int, dict[str, Any]]]:
    link: str | None = None
    for number, line in enumerate(read_file(path, MOST_BYTES).split(b"\n")[:-1], 1):
        try:
            *values, checksum = from_json(line, path)
            content = line[1 : line.rindex(b",")]
        except (ValueError, TypeError):
            return
        if crc32(content) != checksum or len(values) not in (3, 4):
            return
        table, index, row, *links = values
        if not (isinstance(table, str) and type(index) is int and isinstance(row, dict)):
            raise ValueError(f"{path}: line {number} is no row: {ADVICE}")
        if links:
            if number == 1:
                _check_head(path, run_id, table, index, row)
                link = ""
            if link is not None:
                link = _link(link, content[: content.rindex(b',"')])
        if link != (links[0] if links else None):
            raise ValueError(f"{path}: line {number} does not follow the line before it: {ADVICE}")
        if table != HEAD:  # earlier versions wrote neither a head nor links
            yield table, index, row


def _check_head(path: Path, run_id: str, table: str, number: int, head: Mapping[str, Any]) -> None:
    if table != HEAD or type(number) is not int or not isinstance(head, dict):
        raise ValueError(f"{path} lacks its first line: {ADVICE}")
    named = head.get("run_id")
    if (named, _name(number)) != (run_id, plain(path.name)):
        raise ValueError(f"{path} is {shown(_name(number))} of run {shown(named)}: {ADVICE}")


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
