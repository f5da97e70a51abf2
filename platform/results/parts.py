"""The Parquet files of one table of one run, appended to and cut atomically for concurrent readers."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from fedloom.platform.results.fence import Fence, current, plain
from fedloom.platform.results.files import opened, sync_file, temporary_path
from fedloom.platform.results.manifest import Manifest, Replacing, Seal, seal_of

SCHEMA_VERSION_KEY = b"fedloom_schema_version"

MOST_ROWS = 10_000_000
"""Rows of the largest file that is read, of which fedloom writes at most 250 000."""

_ArrowErrors = (pa.lib.ArrowException, OSError)


def read_part(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of one file; ValueError naming the file if it is damaged or was not written by fedloom.

    With `columns`, only those of them that the file has are read.
    """
    # One open handle for footer and rows, because the file may be replaced in between.
    with _parquet(path) as file:
        return file.read(None if columns is None else [c for c in columns if c in file.schema_arrow.names])


def count_rows(path: Path) -> int:
    """The number of rows according to the file's footer; raises ValueError like `read_part`."""
    with _parquet(path) as file:
        return int(file.metadata.num_rows)


@contextmanager
def _parquet(path: Path) -> Iterator[pq.ParquetFile]:
    """A file of rows that fedloom wrote; a small one that claims to hold very many rows is not read."""
    try:
        with os.fdopen(opened(path), "rb") as source, pq.ParquetFile(source) as file:
            if file.metadata.num_rows > MOST_ROWS:
                raise ValueError(f"{path} has {file.metadata.num_rows} rows, of which at most {MOST_ROWS} are read")
            _version(path, file.schema_arrow)
            yield file
    except _ArrowErrors as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ValueError:
    reason = str(error).partition("\n")[0]
    return ValueError(f"{path} is not a readable Parquet file ({reason}): move it away or restore it from a copy")


def _version(path: Path, schema: pa.Schema) -> int:
    version = (schema.metadata or {}).get(SCHEMA_VERSION_KEY, b"")
    if not re.fullmatch(rb"[0-9]{1,9}", version):
        raise ValueError(f"{path} was not written by fedloom (no schema version in it): move it out of the results")
    return int(version)


def conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table with exactly the columns of `schema`, cast to its types; missing columns become nulls."""
    columns = []
    for field in schema:
        if field.name not in table.column_names:
            columns.append(pa.nulls(table.num_rows, field.type))
        else:
            column = table.column(field.name)
            columns.append(column if column.type == field.type else column.cast(field.type))
    return pa.table(columns, schema=schema)


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


def stored_parts(folder: Path) -> list[Path]:
    """The files of one table of one run, in the order of their rows."""
    return current(folder.glob("part-*.parquet"))


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
            with _parquet(self._path(index)) as file:
                stored = _version(self._path(index), file.schema_arrow)
            if stored > int(self._schema.metadata[SCHEMA_VERSION_KEY]):
                raise ValueError(f"{self._path(index)} was written by a newer version: resume with that version")
