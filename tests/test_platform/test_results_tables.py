"""The declared tables: what a row may hold, and reading files of several versions back."""

import math
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedloom.platform.results.tables import SCHEMA_VERSION, TABLES, TIME_COLUMNS, check_row, read_table
from fedloom.platform.results.writer import RunWriter

KEY = b"fedloom_schema_version"


def test_every_table_is_declared_with_its_version() -> None:
    assert list(TABLES) == ["runs", "rounds", "clients", "candidates", "evaluations", "models"]
    for table, schema in TABLES.items():
        assert schema.metadata == {KEY: str(SCHEMA_VERSION).encode()}
        assert set(TIME_COLUMNS[table]) <= set(schema.names)
        assert not {"experiment", "run_id"} & set(schema.names)
        if table != "runs":
            assert schema.names[:2] == ["stage", "round"]
    assert TABLES["clients"].field("client_id").type == pa.int64()
    assert TABLES["runs"].field("started").type == pa.timestamp("us", tz="UTC")
    assert TABLES["candidates"].field("on_front").type == pa.bool_()


def test_a_row_becomes_plain_values_without_nulls() -> None:
    row = check_row(
        "clients",
        {"stage": "train", "round": np.int64(3), "loss": np.float32(0.5), "metric": 1, "error": None, "macs": 12.0},
    )
    assert row == {"stage": "train", "round": 3, "loss": 0.5, "metric": 1.0, "macs": 12}
    assert [type(value) for value in row.values()] == [str, int, float, float, int]
    assert check_row("candidates", {"feasible": np.bool_(True)}) == {"feasible": True}
    when = datetime(2026, 1, 2, tzinfo=UTC)
    assert check_row("runs", {"started": when}) == {"started": when}


def test_text_that_parquet_cannot_hold_is_replaced() -> None:
    assert check_row("clients", {"error": "bad \udcff ä"}) == {"error": "bad ? ä"}


@pytest.mark.parametrize(
    ("table", "row", "message"),
    [
        ("clients", {"los": 1.0}, "no column 'los'; the nearest is 'loss'"),
        ("rounds", {"byte_up": None}, "no column 'byte_up'; the nearest is 'bytes_up'"),
        ("client", {"loss": 1.0}, "no table 'client': the tables are runs, rounds"),
        ("clients", {"loss": "0.5"}, r"column 'loss' of table 'clients' got '0.5' \(str\): give a number"),
        ("clients", {"round": 1.5}, r"'round' .* got 1.5 \(float\): give a whole number that fits 64 bits"),
        ("clients", {"round": math.nan}, "whole number"),
        ("clients", {"round": math.inf}, "whole number"),
        ("clients", {"round": 2**63}, "whole number"),
        ("clients", {"round": True}, "whole number"),
        ("clients", {"loss": True}, "give a number"),
        ("clients", {"stage": 1}, "give text"),
        ("candidates", {"feasible": 1}, "give True or False"),
        ("runs", {"started": datetime(2026, 1, 2)}, "datetime with a time zone"),
        ("runs", {"started": 1.0}, "datetime with a time zone"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(table: str, row: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        check_row(table, row)
    assert "\n" not in str(caught.value)


def run_with_rounds(root: Path, run_id: str, losses: list[float | None], experiment: str = "demo") -> None:
    writer = RunWriter.create(root, experiment, run_id)
    for number, loss in enumerate(losses):
        writer.add("rounds", stage="train", round=number, loss=loss)
    writer.close()


def test_tables_are_read_with_types_that_nulls_do_not_change(tmp_path: Path) -> None:
    run_with_rounds(tmp_path, "r1", [0.5, None])
    run_with_rounds(tmp_path, "r2", [0.25], experiment="other")
    frame = read_table(tmp_path, "rounds")
    assert list(frame.columns) == ["experiment", "run_id", *TABLES["rounds"].names]
    assert frame["run_id"].tolist() == ["r1", "r1", "r2"]
    assert frame["experiment"].tolist() == ["demo", "demo", "other"]
    assert frame["round"].tolist() == [0, 1, 0]
    assert frame["loss"].isna().tolist() == [False, True, False]
    assert str(frame["bytes_up"].dtype) == "Int64"
    assert frame["bytes_up"].isna().all()
    assert len(read_table(tmp_path, "rounds", experiment="demo")) == 2
    assert len(read_table(tmp_path, "rounds", run_id="r2")) == 1
    assert len(read_table(tmp_path, "rounds", experiment="demo", run_id="r2")) == 0


def test_a_table_without_rows_has_its_columns(tmp_path: Path) -> None:
    run_with_rounds(tmp_path, "r1", [])
    for root in (tmp_path, tmp_path / "nothing"):
        frame = read_table(root, "models")
        assert list(frame.columns) == ["experiment", "run_id", *TABLES["models"].names]
        assert len(frame) == 0
    assert list(pd.read_parquet(tmp_path / "models").columns) == [*TABLES["models"].names, "experiment", "run_id"]


def foreign_version(root: Path, run_id: str, table: pa.Table, version: int) -> Path:
    folder = root / "rounds" / "experiment=demo" / f"run_id={run_id}"
    folder.mkdir(parents=True)
    pq.write_table(table.replace_schema_metadata({KEY: str(version)}), folder / "part-00000.parquet")
    return folder / "part-00000.parquet"


def test_files_of_several_schema_versions_are_read_together(tmp_path: Path) -> None:
    run_with_rounds(tmp_path, "r1", [0.5])
    foreign_version(tmp_path, "r0", pa.table({"round": pa.array([7], pa.int32()), "stage": ["train"]}), 0)
    newer = {"round": [8], "loss": [0.25], "co2_g": [1.5], "later": pa.array([4], pa.int64())}
    foreign_version(tmp_path, "r2", pa.table(newer), 2)
    frame = read_table(tmp_path, "rounds").set_index("run_id")
    assert frame["round"].to_dict() == {"r0": 7, "r1": 0, "r2": 8}
    assert frame.dtypes["loss"] == np.float64
    assert str(frame.dtypes["bytes_down"]) == "Int64"
    assert frame["stage"].isna().to_dict() == {"r0": False, "r1": False, "r2": True}
    assert frame["co2_g"].to_dict()["r2"] == 1.5
    assert str(frame.dtypes["later"]) == "Int64"
    assert frame["later"].isna().to_dict() == {"r0": True, "r1": True, "r2": False}


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    run_with_rounds(tmp_path, "r1", [0.5, 0.25])
    (part,) = tmp_path.glob("rounds/*/*/*.parquet")
    whole = part.read_bytes()

    def refused(message: str) -> None:
        with pytest.raises(ValueError, match=message) as caught:
            read_table(tmp_path, "rounds")
        assert "\n" not in str(caught.value)
        assert ".parquet" in str(caught.value)

    for damaged in (whole[:100], b"", b"no parquet at all", b"\0" * len(whole), whole[:-200] + b"\1" * 200):
        part.write_bytes(damaged)
        refused(f"{part} is not a readable Parquet file")
    pq.write_table(pa.table({"round": [1]}), part)
    refused("was not written by fedloom")
    part.write_bytes(whole)
    (tmp_path / "rounds" / "mine.parquet").write_bytes(whole)
    refused("does not belong to a run")
    with pytest.raises(ValueError, match="there is no table 'round'"):
        read_table(tmp_path, "round")
