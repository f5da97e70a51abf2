"""Folders of many runs: little memory, few files, and the example that reads any of them."""

import subprocess
import sys
from pathlib import Path

import pytest

from fedloom.experiments import analysis
from fedloom.experiments.benchmarks.analysis import files_of, measure, write_results

EXAMPLE = Path(__file__).resolve().parents[3] / "experiments" / "examples" / "analysis.py"
WEIGHTING = "method.train.weighting"


def test_a_generated_folder_is_summarised_in_little_memory_from_few_files(tmp_path: Path) -> None:
    write_results(tmp_path, runs=12, rounds=20, clients=10, candidates=3, rows_per_file=50)
    tables = analysis.load(tmp_path)
    assert len(tables.clients) == 12 * 20 * 10
    # A million rows then need 0.5 GB, and 2 GB are allowed for a process that holds them.
    assert tables.clients.memory_usage(deep=True).sum() / len(tables.clients) < 500
    assert 1 < files_of(tmp_path)["most_files_per_table_and_run"] <= 20
    summary = analysis.summary(tables)
    assert (summary["seeds"] == 3).all()
    assert len(summary) == summary["setting"].nunique() * 12 == 4 * 12
    opa = analysis.compare(tables, WEIGHTING, baseline="fedavg").query("value == 'opa'")
    assert (opa["test"] == "paired t").all()
    assert opa["difference"].mean() == pytest.approx(0.02, abs=0.005)
    assert measure(tmp_path)["client_rows"] == len(tables.clients)


def test_a_few_runs_are_read_without_looking_at_the_others(tmp_path: Path) -> None:
    write_results(tmp_path, runs=2, rounds=1, clients=2, candidates=2)
    (file,) = (tmp_path / "clients" / "experiment=generated" / "run_id=g0001").glob("*.parquet")
    file.write_bytes(b"damaged")
    assert len(analysis.load(tmp_path, ["g0000"]).clients) == 2
    with pytest.raises(ValueError, match=r"run_id=g0001.*not a readable Parquet file"):
        analysis.load(tmp_path)


def test_the_example_runs_on_any_results_folder(tmp_path: Path) -> None:
    write_results(tmp_path / "results", runs=12, rounds=2, clients=3, candidates=3)
    done = subprocess.run([sys.executable, str(EXAMPLE)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "paired t" in done.stdout
    assert "\\begin{tabular}" in done.stdout
