"""Results of an earlier revision are read as they are: `run_of_8117277.tar.xz` is a whole folder that 8117277 wrote."""

import json
import tarfile
from pathlib import Path

import pandas as pd
import pytest

from fedloom.experiments.cli import main
from fedloom.platform.results.paths import list_runs
from fedloom.platform.results.tables import TABLES

OLD = Path(__file__).parent / "run_of_8117277.tar.xz"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """The results folder, unpacked."""
    with tarfile.open(OLD) as archive:
        archive.extractall(tmp_path / "results", filter="data")
    return tmp_path / "results"


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ending:
        main(list(arguments))
    assert ending.value.code == 0
    return capsys.readouterr().out


def test_every_table_is_read_by_pandas(old: Path) -> None:
    tables = {table: pd.read_parquet(old / table) for table in TABLES}
    assert tables["runs"][["status", "name"]].values.tolist() == [["done", "kept"]]
    assert len(tables["clients"]) == tables["rounds"]["clients_planned"].sum() == 36
    assert set(tables["evaluations"]["metric"]) >= {"accuracy", "loss"}


def test_it_is_listed_verified_and_reported(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run,) = list_runs(old)
    (listed,) = json.loads(said(capsys, "status", "--results", str(old), "--json"))["runs"]
    assert (listed["run_id"], listed["state"], listed["name"]) == (run.run_id, "done", "kept")
    assert "whole" in said(capsys, "verify", "kept", "--results", str(old))
    said(capsys, "report", "kept", "--results", str(old), "--out", str(old.parent / "report"))
    assert "fedoras_digits" in (old.parent / "report" / "report.html").read_text()


def test_its_models_are_exported(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "export", "kept", "--tier", "tier2", "--results", str(old), "--out", str(old.parent / "exported"))
    names = {path.suffix for path in (old.parent / "exported").iterdir()}
    assert names >= {".json", ".pt2"}


def test_it_is_done_and_has_nothing_to_resume(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "done" in said(capsys, "resume", "kept", "--results", str(old))
