"""Updates that are no numbers are failed rows, and what becomes of the run is the policy's to say."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
import pytest

from fedloom.platform.results.paths import find_run
from fedloom.platform.results.tables import read_table

Call = Callable[..., int]


def test_a_nan_update_is_a_failed_row_and_the_policy_stops_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], call: Call, quick: Sequence[str]
) -> None:
    results = tmp_path / "results"
    assert call("run", "--json", *quick, "method.train.lr=1e30", f"results={results}") == 3
    summary = json.loads(capfd.readouterr().out)
    assert summary["status"] == "failed"
    assert "the training diverged in supernet, round 1: loss or weights of 4 of 4 clients" in summary["message"]
    rows = read_table(results, "clients", run_id=summary["run_id"])
    failed = rows[rows["status"] == "failed"]
    assert len(rows) == 4
    assert len(failed) >= 1
    assert failed["error"].str.contains("left out of the average").all()
    assert read_table(results, "runs")["status"].tolist() == ["failed"]
    assert not (find_run(results, summary["run_id"]).checkpoint / "state.json").exists()


def test_where_the_policy_tolerates_all_nan_updates_the_run_fails_as_it_trained_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], call: Call, quick: Sequence[str]
) -> None:
    results = tmp_path / "results"
    tolerate = ["executor.failures.policy=tolerate", "executor.failures.max_share=1"]
    assert call("run", "--json", *quick, "method.train.lr=1e30", *tolerate, f"results={results}") == 3
    summary = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert "no update arrived in any of the 2 rounds of supernet, so that it trained nothing" in summary["message"]
    run_id = summary["run_id"]
    rows = read_table(results, "clients", run_id=run_id)
    assert (rows[rows["stage"] == "supernet"]["status"] == "failed").all()
    rounds = read_table(results, "rounds", run_id=run_id)
    supernet = rounds[rounds["stage"] == "supernet"]
    assert supernet["clients_failed"].tolist() == [4, 4]
    assert pd.isna(supernet["loss"]).all()
