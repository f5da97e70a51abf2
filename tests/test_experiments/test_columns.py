"""`fedloom tables`: every column of every table is documented, and nothing else is."""

import json

import pytest

from fedloom.experiments.cli import main
from fedloom.experiments.show import described_tables
from fedloom.platform.results.tables import COLUMNS, PARTITION, ROWS, TABLES, unit_of


def test_every_column_has_a_meaning() -> None:
    assert list(ROWS) == list(COLUMNS) == list(TABLES)
    for table, columns in COLUMNS.items():
        assert list(columns) == TABLES[table].names
        assert all(len(column.meaning) > 5 for column in columns.values())
        assert not set(PARTITION) & set(columns)


def test_units_are_those_of_the_names() -> None:
    columns = ("bytes_up", "peak_memory_bytes", "wall_s", "macs", "loss", "steps", "started")
    assert [unit_of(name) for name in columns] == ["bytes", "bytes", "s", "MACs", "", "", ""]


def test_rounds_are_said_to_count_from_0() -> None:
    for table in ("rounds", "clients"):
        assert "counted from 0" in COLUMNS[table]["round"].meaning


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ending:
        main(["tables", *arguments])
    assert ending.value.code == 0
    return capsys.readouterr().out


def test_a_table_is_printed_with_a_line_per_column(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "candidates")
    heads, *lines = text.splitlines()
    assert heads == "candidates: one row per model that a search has scored"
    firsts = [line.split()[:2] for line in lines if line.startswith("  ") and not line.startswith("   ")]
    assert firsts[:3] == [["experiment", "text"], ["run_id", "text"], ["stage", "text"]]
    assert [name for name, _ in firsts] == ["experiment", "run_id", *TABLES["candidates"].names]
    assert ["winner", "bool"] in firsts
    assert "rounds: one row" not in text


def test_as_json_and_without_a_table_all_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    tables = json.loads(printed(capsys, "--json"))["tables"]
    assert [table["table"] for table in tables] == list(TABLES)
    columns = {c["column"]: c for c in tables[1]["columns"]}
    assert columns["bytes_down"]["unit"] == "bytes"
    assert columns["wall_s"] == {"column": "wall_s", "type": "float", "unit": "s", "meaning": "real time here"}


def test_an_unknown_table_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"there is no table 'client'; did you mean 'clients'\?; there are runs, rounds"
    ):
        described_tables(["client"])
