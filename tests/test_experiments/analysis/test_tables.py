"""What is read of a folder of results: runs, tables and columns."""

from typing import Any

import pyarrow.parquet as pq
import pytest

from fedloom.experiments import analysis
from fedloom.experiments.analysis.tables import CLIENT_COLUMNS
from fedloom.platform.results.tables import read_runs


def test_load_reads_what_is_asked_for(runs: Any) -> None:
    runs.write("r1", 0.5, 1)
    runs.write("r2", 0.5, 1, experiment="other")
    assert [p.run_id for p in analysis.load(runs.root).paths] == ["r1", "r2"]
    assert [p.run_id for p in analysis.load(str(runs.root), experiment="other").paths] == ["r2"]
    assert [p.run_id for p in analysis.load(runs.root, "r1").paths] == ["r1"]
    with pytest.raises(ValueError, match=r"no runs of experiment 'otter'.*demo, other"):
        analysis.load(runs.root, experiment="otter")
    with pytest.raises(ValueError, match="no table 'round': the tables are runs, rounds"):
        analysis.load(runs.root, tables=["round"])


def test_a_table_that_was_not_read_is_never_taken_for_an_empty_one(runs: Any) -> None:
    runs.write("r1", 0.5, 1)
    tables = analysis.load(runs.root, tables=["rounds"])
    assert analysis.communication(tables)["bytes_down"].tolist() == [30, 10**6]
    for function, table in (
        (analysis.summary, "evaluations"),
        (analysis.failures, "clients"),
        (analysis.fairness, "evaluations"),
        (analysis.hypervolume, "candidates"),
    ):
        with pytest.raises(ValueError, match=f"needs the table '{table}', which was not read"):
            function(tables)


def test_an_unknown_column_is_refused_with_the_nearest(runs: Any) -> None:
    runs.write("r1", 0.5, 1)
    with pytest.raises(ValueError, match="table 'clients' has no column 'client'; the nearest is 'client_id'"):
        read_runs(analysis.load(runs.root).paths, "clients", ["client"])


def test_columns_that_an_older_file_lacks_are_null(runs: Any) -> None:
    writer = runs.begin("r1", 1)
    writer.add("clients", stage="rand_init/tier1", round=0, client_id=3, status="ok", macs=5, device="cpu")
    writer.close()
    (file,) = (runs.root / "clients").rglob("*.parquet")
    pq.write_table(pq.read_table(file, partitioning=None).drop_columns(["macs", "error"]), file)
    clients = analysis.load(runs.root).clients
    assert list(clients.columns) == ["experiment", "run_id", *CLIENT_COLUMNS]
    assert clients["client_id"].tolist() == [3]
    assert clients[["macs", "error"]].isna().all(axis=None)
