"""Runs with a name and tags: found by them everywhere, changed on resume, and without bearing on what is computed."""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
import pytest

from fedloom.actors.address import LOOPBACK_SWITCH
from fedloom.experiments import analysis
from fedloom.experiments.analysis.settings import settings_of
from fedloom.experiments.cli import main
from fedloom.experiments.runs.configuration import compose_config, stored_config
from fedloom.platform.results.paths import NAMES, Names, find_run, find_runs, list_runs, named_runs, read_names
from fedloom.platform.results.tables import read_table

QUICK = [
    "method=fedavg", "data.dataset=digits", "executor.kind=serial", "tiers.paths=100", "space.stem_channels=4",
    "data.num_clients=4", "data.train_samples=160", "tiers.count=1", "method.train.rounds=1", "method.train.epochs=1",
    "method.train.clients_per_round=2", "method.train.evaluate_every=0", "method.evaluate=false",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOOPBACK_SWITCH, "0")
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ending:
        main(arguments)
    assert isinstance(ending.value.code, int)
    return ending.value.code


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, own_cache: Path) -> Path:
    """Three runs: baseline and mine, both of the paper, and one without a name."""
    folder = tmp_path_factory.mktemp("named") / "results"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LOOPBACK_SWITCH, "0")
        patch.delenv("FEDLOOM_DATA", raising=False)
        ids = iter(range(3))  # in order also of runs that take less than a second
        name = "20260101-00000{}-custom-abcdef".format
        patch.setattr("fedloom.platform.runs.run.new_run_id", lambda _root, _experiment: name(next(ids)))
        for words in (["name=baseline", "tags=[paper,old]"], ["name=mine", "tags=[paper]", "method.train.lr=0.2"], []):
            assert call("run", "--quiet", *QUICK, *words, f"results={folder}") == 0
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def test_names_are_in_the_table_runs_and_beside_the_run(results: Path) -> None:
    runs = read_table(results, "runs").sort_values("started")
    assert [name if isinstance(name, str) else None for name in runs["name"]] == ["baseline", "mine", None]
    assert [json.loads(tags) if isinstance(tags, str) else [] for tags in runs["tags"]] == [
        ["paper", "old"], ["paper"], []
    ]  # fmt: skip
    assert sorted(named_runs(results).values(), key=str) == [
        Names("baseline", ("paper", "old")), Names("mine", ("paper",))
    ]  # fmt: skip


def test_a_run_is_found_by_its_name_and_by_a_tag_that_only_it_has(results: Path) -> None:
    baseline, mine, _ = (run.run_id for run in list_runs(results))
    assert find_run(results, "baseline").run_id == find_run(results, "old").run_id == baseline
    assert find_run(results, "mine").run_id == find_run(results, mine).run_id == mine
    assert [run.run_id for run in find_runs(results, "paper")] == [baseline, mine]
    assert stored_config(results, "mine")[0] == mine
    with pytest.raises(ValueError, match=f"tag 'paper' is that of {baseline}, {mine}: give the id of one of them"):
        find_run(results, "paper")
    with pytest.raises(ValueError, match="no run 'pap' under"):
        find_runs(results, "pap")


def test_a_name_of_two_runs_is_refused_with_their_ids(results: Path, tmp_path: Path) -> None:
    for run_id in ("a", "b"):
        (tmp_path / "rounds" / "experiment=x" / f"run_id={run_id}").mkdir(parents=True)
        (tmp_path / "artifacts" / run_id).mkdir(parents=True)
        (tmp_path / "artifacts" / run_id / NAMES).write_text('{"name": "twin", "tags": []}')
    with pytest.raises(ValueError, match="'twin' is the name of a, b: give the id of one of them"):
        find_run(tmp_path, "twin")
    (tmp_path / "artifacts" / "b" / NAMES).write_text("damaged")
    assert find_run(tmp_path, "twin").run_id == "a"


@pytest.mark.usefixtures("undrawn")
def test_status_and_reports_show_names_and_take_tags(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = ["--results", str(results)]
    assert call("status", *place) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "name", "tags", "state", "stage", "round"]
    assert [line.split()[1:4] for line in lines[1:3]] == [["baseline", "paper", "old"], ["mine", "paper", "done"]]
    assert call("status", "paper", "--json", *place) == 0
    found = json.loads(capsys.readouterr().out)["runs"]
    assert [(run["name"], run["tags"]) for run in found] == [("baseline", ["paper", "old"]), ("mine", ["paper"])]
    assert call("report", "baseline", *place, "--out", str(results.parent / "one")) == 0
    page = (results.parent / "one" / "report.html").read_text()
    assert "<dt>name</dt><dd>baseline</dd>" in page
    assert "<dt>tags</dt><dd>paper, old</dd>" in page


def test_settings_are_called_by_the_name_of_their_runs(results: Path) -> None:
    tables = analysis.load(results, ["paper"])
    assert [s.name for s in settings_of(tables)] == ["custom, baseline", "custom, mine"]
    assert [dict(s.differences) for s in settings_of(tables)] == [{"method.train.lr": 0.1}, {"method.train.lr": 0.2}]


def test_names_have_no_bearing_on_results(results: Path) -> None:
    baseline, _, plain = (run.run_id for run in list_runs(results))
    tables = analysis.load(results, [baseline, plain])
    assert len(settings_of(tables)) == 1
    losses = [read_table(results, "rounds", run_id=run_id)["loss"].tolist() for run_id in (baseline, plain)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("word", "refusal"),
    [
        ("name=a/b", "name 'a/b' cannot be a file name here"),
        ("name=2026", "name '2026' cannot be a file name here"),
        ("name=20261122-1130", "name '20261122-1130' is like the beginning of a run's id: begin it with a letter"),
        ("tags=[20261122-113000-best]", "tag '20261122-113000-best' is like the beginning of a run's id"),
        ("tags=[two words]", "tag 'two words' cannot be a file name here"),
        ("name=''", "name=: must be a text of at least one character, or null"),
        ("tags=['']", "tags[0]=: must be a text of at least one character"),
    ],
)
def test_a_name_that_cannot_be_told_from_an_id_or_a_path_is_refused(word: str, refusal: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(refusal)}"):
        compose_config([word])
    assert compose_config(["name=20261122-best", "tags=[2026-best]"]).name == "20261122-best"


def test_resuming_a_run_that_is_done_says_what_it_is_called_now(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("resume", "mine", "name=other", "tags=[a,b]", "--results", str(results)) == 0
    assert "now has the name other and the tags a, b\n" in capsys.readouterr().out
    assert call("resume", "other", "name=mine", "tags=[paper]", "--results", str(results)) == 0
    assert "now has the name mine and the tags paper\n" in capsys.readouterr().out


def test_resuming_a_run_that_is_done_says_so_and_changes_nothing(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(results)
    assert call("resume", "mine", "--results", str(results)) == 0
    assert f"{find_run(results, 'mine').run_id} is done: nothing is left to do" in capsys.readouterr().out
    assert call("resume", "mine", "--json", "--results", str(results)) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "done"
    assert contents(results) == before


def test_an_id_wins_over_a_name_and_a_name_over_what_begins_ids(tmp_path: Path) -> None:
    for run_id in ("first", "second"):
        (tmp_path / "rounds" / "experiment=x" / f"run_id={run_id}").mkdir(parents=True)
        (tmp_path / "artifacts" / run_id).mkdir(parents=True)
    (tmp_path / "artifacts" / "second" / NAMES).write_text('{"name": "fir", "tags": ["first", "fi"]}')
    words = {"first": "first", "firs": "first", "fir": "second", "fi": "second"}
    assert {word: find_run(tmp_path, word).run_id for word in words} == words


def test_a_run_may_be_renamed_on_resume(results: Path, renamed: Callable[[Sequence[str]], Path]) -> None:
    folder = renamed(["name=final", "tags=[]"])
    paths = find_run(folder, "final")
    assert read_names(paths.artifacts) == Names("final")
    assert stored_config(folder, "final")[1].names == Names("final")
    row = read_table(folder, "runs", run_id=paths.run_id).iloc[0]
    assert (row["name"], row["status"], row["method"]) == ("final", "done", "fedavg")
    assert pd.isna(row["tags"])
    assert call("verify", "final", "--results", str(folder)) == 0, "the manifest holds the new row"


@pytest.mark.parametrize("content", ['{"name": "best", "tags": ["paper", "old"]}', "damaged", None])
def test_names_that_were_changed_by_hand_are_noticed(
    content: str | None, results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = find_run(results, "baseline").run_id
    copy = Path(shutil.copytree(results, tmp_path / "copy"))
    path = copy / "artifacts" / run / NAMES
    path.unlink() if content is None else path.write_text(content)
    assert call("verify", run, "--results", str(copy)) == 2
    said = capsys.readouterr().out
    assert "says name=best tags=[paper,old]" in said or "says name=null tags=[]" in said
    assert "the run's row name=baseline tags=[paper,old]" in said
    assert call("resume", run, "name=baseline", "tags=[paper,old]", "--results", str(copy)) == 0
    assert call("verify", run, "--results", str(copy)) == 0


def test_a_renaming_that_was_interrupted_half_way_can_be_undone(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    copy = Path(shutil.copytree(results, tmp_path / "copy"))
    with monkeypatch.context() as patched:
        patched.setattr("fedloom.platform.runs.resuming.write_names", interrupted)
        assert call("resume", "baseline", "name=final", "--results", str(copy)) != 0
    assert call("verify", "baseline", "--results", str(copy)) == 2
    assert call("resume", "baseline", "--results", str(copy)) == 0
    assert call("verify", "baseline", "--results", str(copy)) == 0
    assert read_table(copy, "runs", run_id=find_run(copy, "baseline").run_id)["name"].tolist() == ["baseline"]


@pytest.fixture
def renamed(results: Path, tmp_path: Path) -> Callable[[Sequence[str]], Path]:
    """Resumes `baseline` in a copy of the results with other names."""

    def rename(words: Sequence[str]) -> Path:
        copy = Path(shutil.copytree(results, tmp_path / "copy"))
        assert call("resume", "baseline", *words, "--results", str(copy)) == 0
        return copy

    return rename
