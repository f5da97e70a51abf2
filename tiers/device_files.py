"""Reads and writes tables of devices, and reads tables of when they are online and of training measured on them.

The files are Parquet or CSV and may be damaged: a file's size, its columns and a Parquet file's footer are checked
before the rows are read, so that no number in a damaged file decides how much memory or time that takes.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from fedloom.tiers.availability import INTERVAL_COLUMNS, Intervals
from fedloom.tiers.calibration import MEASURED_COLUMNS, MeasuredTraining
from fedloom.tiers.devices import COLUMNS, DeviceTable

T = TypeVar("T")

MOST_BYTES = 1 << 30
MOST_ROWS = 10_000_000
"""One device per client: no more clients than this are simulated."""
MOST_INTERVALS = 100_000_000
_THRIFT_BYTES, _THRIFT_ITEMS = 1 << 20, 1 << 16
"""Size limits of the strings and lists in a Parquet footer."""


def read_device_table(path: str | Path) -> DeviceTable:
    """Reads a device table from a .parquet or .csv file with exactly the columns `COLUMNS`, in any order.

    Raises ValueError with one line that names the file (and the column) if the file is missing, damaged or too large,
    or holds other columns or invalid values.
    """
    return _read(Path(path), _Kind("a device table", COLUMNS, MOST_ROWS), DeviceTable)


def read_intervals(path: str | Path) -> Intervals:
    """Reads the intervals in which devices are online, from a file with exactly the columns `INTERVAL_COLUMNS`.

    Raises ValueError as `read_device_table` does.
    """
    return _read(Path(path), _Kind("an availability table", INTERVAL_COLUMNS, MOST_INTERVALS), Intervals)


def read_measured_training(path: str | Path) -> MeasuredTraining:
    """Reads measured trainings, from a file with exactly the columns `MEASURED_COLUMNS`; raises as the others do."""
    return _read(Path(path), _Kind("a table of measured training", MEASURED_COLUMNS, MOST_ROWS), MeasuredTraining)


def write_device_table(path: str | Path, table: DeviceTable) -> None:
    """Writes a .parquet or .csv file from which `read_device_table` restores the table exactly.

    The write is atomic: a temporary file in the same folder is written, flushed to disk and renamed. The pages of a
    Parquet file have checksums.
    """
    file = Path(path)
    _check_suffix(file, "a device table")
    arrow = pa.table({name: getattr(table, name) for name in COLUMNS})
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as stream:
            if file.suffix == ".parquet":
                pyarrow.parquet.write_table(arrow, stream, write_page_checksum=True)
            else:
                pyarrow.csv.write_csv(arrow, stream)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


class _WrongTableError(ValueError):
    """The file can be read but does not hold the expected table."""


@dataclass(frozen=True)
class _Kind:
    """A kind of table: its name in messages, its columns, and its largest number of rows."""

    called: str
    columns: Sequence[str]
    most_rows: int


def _read(file: Path, kind: _Kind, make: Callable[..., T]) -> T:
    _check_suffix(file, kind.called)
    if not file.is_file():
        raise ValueError(f"{file}: there is no such file")
    size_bytes = file.stat().st_size
    if size_bytes > MOST_BYTES:
        raise ValueError(f"{file}: has {size_bytes} bytes; {kind.called} has at most {MOST_BYTES}")
    try:
        # Given a path instead of an open file, pyarrow reads a data set and infers columns from folder names.
        with file.open("rb") as stream:
            if file.suffix == ".parquet":
                table = _read_parquet(stream, kind)
            else:
                # With threads, pyarrow has crashed the process on an error in the file.
                table = pyarrow.csv.read_csv(stream, pyarrow.csv.ReadOptions(use_threads=False))
                _check_columns(table.schema, kind)
                _check_rows(table.num_rows, kind)
    except _WrongTableError as error:
        raise ValueError(f"{file}: {error}") from error
    except (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        raise ValueError(f"{file}: cannot be read as {kind.called} ({_one_line(error)})") from error
    try:
        for name in kind.columns:
            if table.column(name).null_count:
                raise ValueError(f"column {name} has {table.column(name).null_count} empty values")
        return make(**{name: table.column(name).to_numpy() for name in kind.columns})
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _check_suffix(file: Path, called: str) -> None:
    if file.suffix not in (".parquet", ".csv"):
        raise ValueError(f"{file}: {called} is a .parquet or a .csv file, or `generated`")


def _read_parquet(stream: BinaryIO, kind: _Kind) -> Any:
    limits = {"thrift_string_size_limit": _THRIFT_BYTES, "thrift_container_size_limit": _THRIFT_ITEMS}
    with pyarrow.parquet.ParquetFile(stream, page_checksum_verification=True, **limits) as file:
        _check_columns(file.schema_arrow, kind)
        _check_rows(file.metadata.num_rows, kind)
        # The footer's metadata of columns is left to the reader of the pages: asking pyarrow for a damaged one crashes
        # the process. The footer's numbers of rows decide how much is read.
        rows = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
        if sum(rows) != file.metadata.num_rows or any(number < 0 for number in rows):
            raise ValueError("its footer's numbers of rows contradict each other")
        table = file.read(use_threads=False)
        if table.num_rows != file.metadata.num_rows:
            raise _WrongTableError(f"has {table.num_rows} rows, its footer counts {file.metadata.num_rows}")
        return table


def _check_columns(schema: pa.Schema, kind: _Kind) -> None:
    names: Sequence[str] = schema.names
    missing = [name for name in kind.columns if name not in names]
    other = [name for name in names if name not in kind.columns]
    twice = [name for name in kind.columns if names.count(name) > 1]
    for which, what in ((missing, "is missing"), (other, "is unknown"), (twice, "is there twice")):
        if which:
            some = ", ".join(which if which is not other else [f"{name!r:.40}" for name in which[:3]])
            raise _WrongTableError(f"column {some} {what}; {kind.called} has {', '.join(kind.columns)}")
    for field in schema:
        if not (pa.types.is_integer(field.type) or pa.types.is_floating(field.type)):
            raise _WrongTableError(f"column {field.name} must hold numbers, not {field.type}")


def _check_rows(rows: int, kind: _Kind) -> None:
    if not 0 <= rows <= kind.most_rows:
        raise _WrongTableError(f"has {rows} rows; {kind.called} has at most {kind.most_rows}")


def _one_line(error: BaseException, most: int = 200) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= most else f"{text[:most]} ..."
