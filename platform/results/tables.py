"""The tables of a run: versioned schemas, validation of rows, and reading."""

import difflib
import numbers
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fedloom.platform.clients.assignments import RESULT_COLUMNS
from fedloom.platform.results.files import is_name, opened, without_number
from fedloom.platform.results.paths import LONGEST_RUN_ID, RunPaths, runs_called

if TYPE_CHECKING:
    from dataclasses import Field

    import pandas as pd

SCHEMA_VERSION = 5
SCHEMA_VERSION_KEY = b"fedloom_schema_version"

MOST_ROWS = 10_000_000
"""The most rows of a file that is read; fedloom writes at most 250 000."""

Value = int | float | str | bool | datetime
Row = dict[str, Value]
"""One row: the columns that have a value, without `experiment` and `run_id`, which are part of the path."""


class Column(NamedTuple):
    """A column of a table: its kind, its meaning, and whether it depends on time and machine."""

    kind: Literal["int", "float", "str", "bool", "time"]
    meaning: str
    of_time: bool = False


_TYPES = {
    "int": pa.int64(),
    "float": pa.float64(),
    "str": pa.string(),
    "bool": pa.bool_(),
    "time": pa.timestamp("us", tz="UTC"),
}
_STAGE = "stage of the run, such as supernet, search/tier1, fine_tuned/tier1 or evaluation"
_ROUND = "round of the stage, counted from 0 (whatever people read counts from 1)"
_ARCHITECTURE = "architecture as its options, such as 3-1-8-0"


def _result_column(name: str, column: "Field[Any]") -> Column:
    """A column of `clients`; its kind is the first word of the field's annotation, but MACs are whole in rows."""
    kind: Any = "int" if name == "macs" else column.type.split()[0]
    return Column(kind, column.metadata["meaning"], column.metadata["of_time"])


ROWS: Mapping[str, str] = {
    "runs": "one row per run",
    "rounds": "one row per round of a stage",
    "clients": "one row per planned client and round, however it ended",
    "candidates": "one row per model that a search has scored",
    "evaluations": "one row per measured value",
    "models": "one row per model that was kept",
}
"""What a row of each table is."""

PARTITION: Mapping[str, Column] = {
    "experiment": Column("str", "the experiment's name, from the path of the file"),
    "run_id": Column("str", "the run's id, from the path of the file"),
}
"""The columns that every table has besides its own."""

COLUMNS: Mapping[str, Mapping[str, Column]] = {
    "runs": {
        "method": Column("str", "the method, by name or import path"),
        "space": Column("str", "the search space, by name or import path"),
        "dataset": Column("str", "the data set, by name or import path"),
        "seeds": Column("str", "JSON: the seed of each purpose"),
        "tiers": Column("str", "JSON: each tier's name, upper bound and number of clients"),
        "config": Column("str", "JSON: the whole configuration with which the run started"),
        "versions": Column("str", "JSON: versions of fedloom and of the packages that results depend on", of_time=True),
        "gpus": Column(
            "str",
            "JSON: the GPUs that clients were trained on, with driver, CUDA and cuDNN; null on CPUs",
            of_time=True,
        ),
        "processor": Column("str", "the processor of the server, and the instructions that torch uses", of_time=True),
        "commit": Column(
            "str", "the git commit of fedloom's source, -dirty if files differ; null if it is no checkout", of_time=True
        ),
        "source_hash": Column("str", "hash of fedloom's source and of your own code", of_time=True),
        "dataset_hash": Column("str", "hash of the prepared data set"),
        "partition_hash": Column("str", "hash of which client has which samples"),
        "constants_hash": Column("str", "hash of what a network neither trains nor sends; null if it has nothing such"),
        "inputs": Column("str", "JSON: SHA-256 of each file that the configuration names, by its path"),
        "status": Column(
            "str", "running, done, failed or interrupted, as last recorded (fedloom status also knows dead and stalled)"
        ),
        "started": Column("time", "when it was started", of_time=True),
        "ended": Column("time", "when it ended; null while it runs", of_time=True),
        "error": Column("str", "why it ended, unless it is done"),
        "ablation": Column("str", "the ablation's id; null outside of ablations"),
        "trial": Column("int", "the number of the trial in its ablation, from 0"),
        "setting": Column("str", "JSON: the value of each axis of the ablation in this trial"),
        "supernet": Column("str", "the key of the trained supernet that the run shares; null if none"),
        "supernet_run_id": Column("str", "the run that trained this supernet, whose rows of the training are"),
        "traits": Column("str", "JSON: what the method declares of its runs"),
        "name": Column("str", "the name that the run was given (name=...)"),
        "tags": Column("str", "JSON: the list of tags that the run was given (tags=[...])"),
        "label_variation": Column(
            "float", "mean total variation of a client's training labels from uniform ones; null for texts"
        ),
        "size_variation": Column(
            "float", "standard deviation of the clients' numbers of training samples, in units of their mean"
        ),
    },
    "rounds": {
        "stage": Column("str", _STAGE),
        "round": Column("int", _ROUND),
        "clients_planned": Column("int", "clients that were selected"),
        "clients_ok": Column("int", "clients whose work was used"),
        "clients_failed": Column(
            "int", "clients that failed; those that dropped out or were late are in neither number"
        ),
        "loss": Column(
            "float",
            "mean loss over the clients, weighted by samples; in training each client's network on its own samples",
        ),
        "metric": Column(
            "float", "mean accuracy over the clients, likewise: in training not the model's (see the column of clients)"
        ),
        "bytes_down": Column("int", "sum over the clients of what was sent to them"),
        "bytes_up": Column("int", "sum over the clients of what they sent"),
        "macs": Column("int", "sum over the clients of the forward passes of their work"),
        "wall_s": Column("float", "real time here", of_time=True),
        "simulated_s": Column(
            "float", "time on the simulated devices: of the slowest client, also a lost one, or the deadline"
        ),
        "beta": Column("float", "MaxNet's beta in this round"),
        "lr": Column("float", "learning rate of the clients in this round"),
        "schedules": Column("str", "JSON: the values of all schedules in this round"),
        "epsilon": Column(
            "float", "of differential privacy after this round, at the configured delta; null without noise"
        ),
        "stopped": Column("str", "why the scores ended the stage after this round (stop.*); null if they did not"),
    },
    "clients": {
        "stage": Column("str", _STAGE),
        "round": Column("int", _ROUND),
        **{name: _result_column(name, column) for name, column in RESULT_COLUMNS.items()},
    },
    "candidates": {
        "stage": Column("str", _STAGE),
        "round": Column("int", "round of the stage at whose end the search was over, counted from 0"),
        "tier": Column("str", "the tier or target that was searched for, or samples (of a predictor)"),
        "generation": Column("int", "generation of the search, counted from 0"),
        "architecture": Column("str", _ARCHITECTURE),
        "macs": Column("int", "MACs of a forward pass"),
        "parameters": Column("int", "number of parameters"),
        "loss": Column("float", "loss on validation data, with the supernet's weights"),
        "metric": Column("float", "accuracy on validation data, with the supernet's weights"),
        "feasible": Column("bool", "whether the model could be scored"),
        "on_front": Column(
            "bool", "whether no other candidate is as good at less cost or better at no more, in the end"
        ),
        "winner": Column("bool", "whether the search chose it for its tier or target"),
    },
    "evaluations": {
        "stage": Column("str", _STAGE),
        "round": Column(
            "int", "in training: rounds before it (a client scores its own model after the round); else as in rounds"
        ),
        "model": Column("str", "which model: supernet, supernet_init, fine_tuned, rand_init, ..."),
        "tier": Column("str", "whose model; of a model for all the client's tier, or server"),
        "architecture": Column("str", _ARCHITECTURE),
        "client_id": Column("int", "on whose data; null on the server's"),
        "split": Column("str", "validation or test; null for what is measured without data"),
        "metric": Column("str", "what was measured: accuracy, loss, macs, latency_s, ..."),
        "value": Column("float", "the measured value, in the unit of the metric; accuracies are shares of 1"),
        "samples": Column("int", "over how many samples"),
        "detail": Column(
            "str",
            "JSON: of what the value is, where a metric has several: of confusion [class, prediction], of paragraph "
            "[given, written]",
        ),
    },
    "models": {
        "stage": Column("str", _STAGE),
        "round": Column("int", "round of the stage in which it was kept, counted from 0"),
        "tier": Column("str", "the tier that it is for; empty if it is for all"),
        "architecture": Column("str", _ARCHITECTURE),
        "macs": Column("int", "MACs of a forward pass"),
        "parameters": Column("int", "number of parameters"),
        "file": Column("str", "its weights, below results/artifacts/RUN/"),
        "hash": Column("str", "SHA-256 of that file"),
    },
}
"""The columns of each table, by name. The unit is in the name (see `unit_of`)."""

TABLES: dict[str, pa.Schema] = {
    table: pa.schema(
        [pa.field(name, _TYPES[column.kind]) for name, column in columns.items()],
        metadata={SCHEMA_VERSION_KEY: str(SCHEMA_VERSION)},
    )
    for table, columns in COLUMNS.items()
}
TIME_COLUMNS: dict[str, frozenset[str]] = {
    table: frozenset(name for name, column in columns.items() if column.of_time) for table, columns in COLUMNS.items()
}
"""Per table, the columns that depend on time and machine; all others are determined by the configuration."""


def unit_of(column: str) -> str:
    """The unit of a column, which its name tells; empty for texts, shares and other numbers without one."""
    if column.endswith("_bytes") or column.startswith("bytes_"):
        return "bytes"
    if column.endswith("_s"):
        return "s"
    return "MACs" if column == "macs" else ""


_PYTHON_TYPES: dict[str, type] = {"int": int, "float": float, "str": str, "bool": bool, "time": datetime}
_KINDS: dict[str, dict[str, type]] = {
    table: {name: _PYTHON_TYPES[column.kind] for name, column in columns.items()} for table, columns in COLUMNS.items()
}
_ALLOWED = {
    int: "a whole number that fits 64 bits",
    float: "a number",
    str: "text",
    bool: "True or False",
    datetime: "a datetime with a time zone",
}


def check_row(table: str, row: Mapping[str, Any]) -> Row:
    """The row as plain Python values without nulls; missing columns become null.

    Raises ValueError for an undeclared table or column (naming the nearest) and for a value of another type.
    """
    _check_table(table)
    kinds = _KINDS[table]
    checked: Row = {}
    for name, value in row.items():
        kind = kinds.get(name)
        if kind is None:
            advice = ". Measures of your own go into table 'evaluations' as metric and value"
            raise ValueError(_undeclared(table, name, advice))
        # The common case without a function call, because this runs for every value of every client's row.
        exact = type(value) is kind
        if exact and (kind is float or (kind is str and value.isascii()) or (kind is int and _fits(value))):
            checked[name] = value
        elif value is not None:
            checked[name] = _plain(table, name, kind, value)
    return checked


def _plain(table: str, name: str, kind: type, value: Any) -> Value:
    # A value accepted here must not fail later, when a batch of rows is converted to Parquet.
    if kind is str and isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if kind is bool and isinstance(value, bool | np.bool_):
        return bool(value)
    if kind is datetime and isinstance(value, datetime) and value.tzinfo is not None:
        return value
    if kind is float and isinstance(value, numbers.Real) and not isinstance(value, bool):
        return float(value)
    # A count that was summed as float is accepted, a fractional one is not.
    if kind is int and _is_whole(value) and _fits(int(value)):
        return int(value)
    text = f"{value!r:.60} ({type(value).__name__})"
    raise ValueError(f"column {name!r} of table {table!r} got {text}: give {_ALLOWED[kind]} or None")


def _fits(value: int) -> bool:
    return -0x8000000000000000 <= value <= 0x7FFFFFFFFFFFFFFF


def _is_whole(value: Any) -> bool:
    if isinstance(value, numbers.Integral):
        return not isinstance(value, bool)
    return isinstance(value, numbers.Real) and float(value).is_integer()


def _undeclared(table: str, name: str, advice: str) -> str:
    (nearest,) = difflib.get_close_matches(name, _KINDS[table], n=1, cutoff=0.0)
    return f"table {table!r} has no column {name!r}; the nearest is {nearest!r}{advice}"


def read_table(root: Path, table: str, experiment: str | None = None, run_id: str | None = None) -> "pd.DataFrame":
    """All rows of a table, or those of one experiment or run, with the columns `experiment` and `run_id` first.

    Integer and boolean columns have pandas' nullable types, so that missing values do not turn counts into floats.
    Files of several schema versions can be mixed: columns that a file lacks are null. A table without rows gives an
    empty frame. Raises ValueError naming the file if one is damaged or was not written by fedloom.
    """
    _check_table(table)
    if run_id is not None:
        return read_runs([r for r in runs_called(root, run_id) if experiment in (None, r.experiment)], table)
    folder = Path(root) / table
    files = []
    for file in in_order(folder.rglob("*.parquet")):
        first, _, file_run_id = file.parent.relative_to(folder).as_posix().partition("/run_id=")
        file_experiment = first.removeprefix("experiment=")
        if file_experiment == first or not is_name(file_experiment) or not is_name(file_run_id, LONGEST_RUN_ID):
            raise ValueError(f"{file} does not belong to a run: move it out of {folder}")
        if experiment in (None, file_experiment):
            files.append((file, file_experiment, file_run_id))
    return _frame(table, files, None)


def read_runs(runs: Sequence[RunPaths], table: str, columns: Sequence[str] | None = None) -> "pd.DataFrame":
    """The rows of these runs, one run after the other, like `read_table`; with `columns`, only these are read.

    It only opens the runs' own folders, so the time does not depend on the number of other runs. Raises ValueError for
    an unknown table or column, and for a damaged file.
    """
    _check_table(table)
    for name in columns or ():
        if name not in _KINDS[table]:
            raise ValueError(_undeclared(table, name, ""))
    files = [
        (file, run.experiment, run.run_id) for run in runs for file in in_order(run.table(table).glob("*.parquet"))
    ]
    return _frame(table, files, columns)


def read_part(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of one file; ValueError naming the file if it is damaged or was not written by fedloom.

    With `columns`, only those of them that the file has are read.
    """
    # One open handle for footer and rows, because the file may be replaced in between.
    with opened_part(path) as file:
        return file.read(None if columns is None else [c for c in columns if c in file.schema_arrow.names])


def count_rows(path: Path) -> int:
    """The number of rows according to the file's footer; raises ValueError like `read_part`."""
    with opened_part(path) as file:
        return int(file.metadata.num_rows)


@contextmanager
def opened_part(path: Path) -> Iterator[pq.ParquetFile]:
    """Opens a file of rows that fedloom wrote; ValueError if it claims to hold more than `MOST_ROWS` rows."""
    try:
        with os.fdopen(opened(path), "rb") as source, pq.ParquetFile(source) as file:
            if file.metadata.num_rows > MOST_ROWS:
                raise ValueError(f"{path} has {file.metadata.num_rows} rows, of which at most {MOST_ROWS} are read")
            schema_version(path, file.schema_arrow)
            yield file
    except (pa.lib.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{path} is not a readable Parquet file ({reason}): move it away or restore it from a copy"
        ) from error


def schema_version(path: Path, schema: pa.Schema) -> int:
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


def in_order(files: Iterable[Path]) -> list[Path]:
    """The parts of tables in the order of their rows, without hidden files.

    Of two that an earlier revision wrote for different owners of a run, only the later owner's is kept.
    """
    parts = sorted((f for f in files if not f.name.startswith((".", "_"))), key=lambda f: (len(f.name), f.name))
    latest = {(file.parent, without_number(file.name)): file for file in parts}
    return [latest[key] for key in sorted(latest)]


def stored_parts(folder: Path) -> list[Path]:
    """The files of one table of one run, in the order of their rows."""
    return in_order(folder.glob("part-*.parquet"))


def is_done(paths: RunPaths) -> bool:
    """Whether a run is done, as its row in `runs` says; this is written after all other rows and the checkpoint."""
    return read_runs([paths], "runs", ["status"])["status"].tolist() == ["done"]


def _check_table(table: str) -> None:
    if table not in TABLES:
        raise ValueError(f"there is no table {table!r}: the tables are {', '.join(TABLES)}")


def _frame(table: str, files: Sequence[tuple[Path, str, str]], columns: Sequence[str] | None) -> "pd.DataFrame":
    import pandas as pd  # imported here because processes that only write do not need it

    declared = TABLES[table] if columns is None else pa.schema([TABLES[table].field(name) for name in columns])
    parts = [read_part(file, columns) for file, _, _ in files]
    fields: dict[str, pa.Field] = {}
    for field in (field for schema in (declared, *(part.schema for part in parts)) for field in schema):
        fields.setdefault(field.name, field)  # the declared type wins
    schema = pa.schema(list(fields.values()))
    pieces = [(schema.empty_table(), "", "")]
    pieces += [(conform(part, schema), e, r) for part, (_, e, r) in zip(parts, files, strict=True)]
    tables = []
    for piece, experiment, run_id in pieces:
        for name, value in (("run_id", run_id), ("experiment", experiment)):
            piece = piece.add_column(0, pa.field(name, pa.string()), pa.repeat(pa.scalar(value), piece.num_rows))
        tables.append(piece)
    frame: pd.DataFrame = pa.concat_tables(tables).to_pandas(
        types_mapper={pa.int64(): pd.Int64Dtype(), pa.bool_(): pd.BooleanDtype()}.get, ignore_metadata=True
    )
    return frame
