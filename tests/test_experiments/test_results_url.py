"""The commands on results at a URL, on a machine that has never seen them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fedloom.experiments import analysis
from fedloom.experiments.cli import main
from fedloom.experiments.runs.configuration import stored_config
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.results.copies import fetch
from fedloom.platform.results.paths import find_run, list_runs
from fedloom.platform.results.store import local_root
from fedloom.platform.runs.resuming import leave_finished
from fedloom.platform.runs.run import make_serial, start_run


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.usefixtures("undrawn")
def test_commands_read_results_at_a_url(
    tmp_path: Path,
    tiny_config: Callable[..., RunConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = f"file://{tmp_path}/bucket/results"
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "a"))
    run_id = start_run(tiny_config(results=url), make_serial)
    there = {p: p.stat().st_mtime_ns for p in (tmp_path / "bucket").rglob("*")}

    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "b"))
    status = json.loads(said(capsys, "status", "--results", url, "--json"))
    assert [(run["run_id"], run["state"]) for run in status["runs"]] == [(run_id, "done")]
    files = json.loads(said(capsys, "report", run_id[:15], "--results", url, "--json"))
    assert Path(files["html"]).is_file()
    assert local_root(url) in Path(files["html"]).parents
    assert list((tmp_path / "b").rglob("*.safetensors")) == [], "tables need no tensors"
    assert analysis.load(url, run_id).runs["status"].tolist() == ["done"]

    exported = json.loads(said(capsys, "export", run_id, "--tier", "tier1", "--results", url, "--json"))
    assert Path(exported["paths"]["safetensors"]).is_file()
    found, config = stored_config(url, run_id[:15])
    assert (found, config.results) == (run_id, url)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "bucket").rglob("*")} == there, "reading changes nothing"


def test_runs_are_found_by_name_and_tag_at_a_url(
    tmp_path: Path, tiny_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/bucket/results"
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "a"))
    named = start_run(tiny_config(results=url, name="first try", tags=["old"]), make_serial)
    other = start_run(tiny_config(results=url, tags=["new"]), make_serial)
    trained = start_run(tiny_config(results=url, tags=["shared"], reuse_supernet=True), make_serial)
    reusing = start_run(tiny_config(results=url, tags=["reuse"], reuse_supernet=True), make_serial)
    for machine, word, expected in (("b", "first try", named), ("c", "new", other), ("d", other[:-2], other)):
        monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / machine))
        root = fetch(url, [word])
        assert [run.run_id for run in list_runs(root)] == [expected], "only what is meant is fetched"
        assert find_run(root, word).run_id == expected
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "e"))
    with pytest.raises(ValueError, match="no run 'nobody'"):
        stored_config(url, "nobody")
    costs = {run: analysis.outcomes(analysis.load(url, run)).iloc[0] for run in (reusing, trained)}
    assert costs[reusing]["total_bytes"] == costs[trained]["total_bytes"], "with the training of the shared supernet"
    here = [run.run_id for run in list_runs(fetch(url, [reusing]))]
    assert sorted(here) == sorted([trained, reusing])


def test_resuming_names_the_url_again(
    tmp_path: Path,
    tiny_config: Callable[..., RunConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = f"file://{tmp_path}/bucket/results"
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "a"))
    run_id = start_run(tiny_config(results=url), make_serial)
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "b"))
    out = said(capsys, "resume", run_id, "executor.kind=serial", "--results", url)
    assert f"fedloom report {run_id} --results {url}" in out


def test_names_given_on_another_machine_reach_the_one_that_ran_the_run(
    tmp_path: Path, tiny_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(results=f"file://{tmp_path}/bucket/results", name="first", dry_run=True)
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "a"))
    run_id = start_run(config, make_serial)
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "b"))
    fetch(config.results)
    leave_finished(replace(config, name="second"), run_id)
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "a"))
    assert stored_config(config.results, "second")[1].name == "second"


def test_a_url_that_leads_nowhere_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["status", "--results", "ftp://host/results"])
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("fedloom: results=ftp://host/results cannot be used")
