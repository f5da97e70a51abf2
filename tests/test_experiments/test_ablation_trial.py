"""One trial without Tune: what it tells, how it ends, and what it does when it is begun again."""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from fedloom.experiments.ablation import trial as module
from fedloom.experiments.ablation.trial import END, MESSAGE, STAGE_ROUND, TRIAL, Job, RunThread, TrialActor
from fedloom.experiments.runs.configuration import compose_config
from fedloom.experiments.store.ablations import new_ablation_id
from fedloom.experiments.store.trials import UNSENT
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.results.copies import MirrorError
from fedloom.platform.results.files import check_name
from fedloom.platform.results.lock import owned
from fedloom.platform.results.manifest import manifest_path
from fedloom.platform.results.paths import LONGEST_RUN_ID, RunPaths
from fedloom.platform.results.status import says_done
from fedloom.platform.results.tables import read_table
from fedloom.platform.results.writer import RunWriter
from fedloom.platform.runs.run import RunIdentity
from fedloom.platform.runs.source_code import PluginSources

RUN = "20260101-000000-tiny-abcdef-0000"
TINY = [
    "experiment=fedoras_digits",
    "executor.kind=serial",
    "space.stem_channels=8",
    "data.num_clients=8",
    "data.train_samples=320",
    "data.test_samples=80",
    "tiers.count=1",
    "tiers.paths=100",
    "method.train.rounds=3",
    "method.train.epochs=1",
    "method.train.clients_per_round=2",
    "method.search.population=4",
    "method.search.offspring=2",
    "method.search.budget=4",
    "method.finetune.rounds=0",
    "method.finetune.clients_per_round=2",
    "method.rand_init.rounds=0",
    "method.rand_init.clients_per_round=2",
]

Make = Callable[..., Job]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A tiny trial's job; overrides may follow."""

    def job(*overrides: str, stage: str | None = None, replay: bool = False, results: str = "") -> Job:
        config: RunConfig = compose_config([*TINY, f"results={results or tmp_path}", *overrides])
        identity = RunIdentity(RUN, "20260101-000000-tiny-abcdef", 0, {"lr": 0.1})
        return Job(0, asdict(config), identity, stage, replay)

    return job


def told(job: Job) -> list[Mapping[str, Any]]:
    """All news of a trial from its beginning to its end."""
    running = RunThread(job)
    running.start()
    news: list[Mapping[str, Any]] = []
    while not (news and news[-1].get("done")):
        following = running.news()
        if following and following != (news[-1] if news else None):
            news.append(following)
    return news


def test_a_trial_tells_of_its_rounds_and_its_end(make: Make, tmp_path: Path) -> None:
    news = told(make(stage="supernet"))
    assert [n[STAGE_ROUND] for n in news[:3]] == [1, 2, 3]
    assert all(STAGE_ROUND not in n for n in news[3:-1])
    assert (news[-1][END], news[-1][MESSAGE]) == ("done", "")
    (row,) = read_table(tmp_path, "runs").to_dict("records")
    assert (row["run_id"], row["ablation"], row["trial"], row["setting"]) == (
        RUN,
        "20260101-000000-tiny-abcdef",
        0,
        '{"lr": 0.1}',
    )


def test_its_end_comes_with_its_last_round_however_slowly_its_news_are_taken(make: Make) -> None:
    running = RunThread(make())
    running.start()
    running.join()
    news: list[Mapping[str, Any]] = []
    while not (news and news[-1].get("done")):
        news.append(running.news())
    assert {"done": True, END: "done", MESSAGE: "", **news[-2]} == news[-1]


def test_one_that_is_done_is_not_run_again_and_may_tell_a_scheduler_of_its_rounds(make: Make, tmp_path: Path) -> None:
    told(make())
    before = read_table(tmp_path, "runs")
    assert [n.get(END) for n in told(make())] == ["done"]
    replayed = told(make(stage="supernet", replay=True))
    assert [n[STAGE_ROUND] for n in replayed if STAGE_ROUND in n][:3] == [1, 2, 3]
    assert read_table(tmp_path, "runs").equals(before)


def test_failures_are_ends_and_not_errors(make: Make) -> None:
    end = told(make("method.train.lr=1e12"))[-1]
    assert end[END] == "failed"
    assert "supernet, round" in end[MESSAGE]
    end = told(make("data.num_clients=100000"))[-1]
    assert end[END] == "refused"


def test_a_trial_without_costs_that_has_begun_is_refused_and_stays(make: Make, tmp_path: Path) -> None:
    told(make())
    paths = RunPaths(tmp_path, "fedoras_digits", RUN)
    paths.status.unlink()
    (paths.artifacts / "costs.json").unlink()
    manifest_path(paths).unlink()
    for _ in range(2):  # with its checkpoint, then with its rows only
        before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
        end = told(make())[-1]
        assert end[END] == "refused"
        assert end[MESSAGE].startswith(f"{paths.artifacts / 'costs.json'} is missing, which run {RUN} had: restore it")
        assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
        shutil.rmtree(paths.checkpoint, ignore_errors=True)


def test_a_trial_that_was_killed_during_its_first_writes_begins_again(make: Make, tmp_path: Path) -> None:
    paths = RunWriter.create(tmp_path, "fedoras_digits", RUN).paths
    with owned(paths.artifacts, f"run {RUN}", tmp_path, tmp_path):
        end = told(make())[-1]
        assert (end[END], paths.artifacts.exists()) == ("refused", True)
        assert "is at work in process" in end[MESSAGE]
    assert told(make())[-1][END] == "done"


def test_a_trial_that_was_killed_while_its_code_was_copied_begins_again(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, results = tmp_path / "code", str(tmp_path / "results")
    code.mkdir()
    (code / "brighter.py").write_text("def brighter(x, generator):\n    return x + 0.1\n")
    monkeypatch.syspath_prepend(code)

    def killed(*_: object) -> None:
        raise SystemExit

    job = make("method.train.augment=brighter:brighter", "method.train.rounds=1", results=results)
    with monkeypatch.context() as patch:
        patch.setattr(PluginSources, "copy_to", killed)
        told(job)
    assert (tmp_path / "results" / "artifacts" / RUN / "config.json").exists(), "as after a kill, nothing is removed"
    assert told(job)[-1][END] == "done"


@pytest.mark.parametrize("was", ["damaged", "killed before it said done"])
def test_a_trial_that_is_done_says_so_whatever_its_status_said(make: Make, tmp_path: Path, was: str) -> None:
    told(make())
    status = RunPaths(tmp_path, "fedoras_digits", RUN).status
    of_ended_process = {**json.loads(status.read_text()), "state": "running", "started": 0.0}
    status.write_text("{" if was == "damaged" else json.dumps(of_ended_process))
    assert told(make())[-1][END] == "done"
    assert says_done(status), "or its ablation would never be done"


def test_results_that_could_not_be_sent_are_sent_when_the_trial_is_begun_again(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "cache"))
    there = tmp_path / "there"
    job = make(results=f"file://{there}")

    def unreachable(*_: object) -> None:
        raise MirrorError("the bucket is gone")

    with monkeypatch.context() as away:
        away.setattr("fedloom.platform.results.copies.Mirror.turn", unreachable)  # `close` ends its thread, and says so
        assert told(job)[-1][END] == UNSENT
    with monkeypatch.context() as away:
        away.setattr("fedloom.platform.runs.resuming.mirror_run", unreachable)
        assert told(job)[-1][END] == UNSENT
    assert told(job)[-1][END] == "done"
    assert read_table(there, "runs")["status"].tolist() == ["done"]


def test_relative_paths_start_where_the_ablation_was_started_and_not_where_ray_was(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, online in (("ray", range(8)), ("project", range(2))):
        rows = [f"{client},{0 if client in online else 9},86400" for client in range(8)]
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "on.csv").write_text("\n".join(["device_id,on_s,off_s", *rows]))
    monkeypatch.chdir(tmp_path / "ray")
    actor = TrialActor.__new__(TrialActor)
    job = make("devices.availability_table=on.csv", "method.train.rounds=1", "method.train.clients_per_round=8")
    actor.setup({TRIAL: 0}, {0: job}, str(tmp_path / "project"))
    actor._run.join()
    clients = read_table(tmp_path, "clients", run_id=RUN).query("stage == 'supernet' and round == 0")
    assert sorted(clients["client_id"]) == [0, 1]


def test_what_is_no_end_of_a_run_is_raised_to_tune(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(module, "run_to_end", broken)
    with pytest.raises(OSError, match="disk full"):
        told(make())


def test_ids_are_new_and_short_enough_to_begin_run_ids(tmp_path: Path) -> None:
    ids = {new_ablation_id(tmp_path, "distribution_averaging") for _ in range(20)}
    assert len(ids) == 20
    for ablation_id in ids:
        assert re.fullmatch(r"\d{8}-\d{6}-distribution_averaging-[0-9a-f]{6}", ablation_id)
    longest = f"{new_ablation_id(tmp_path, 'n' * 100)}-99999"
    assert check_name("run id", longest, LONGEST_RUN_ID) == longest
    assert not list(tmp_path.iterdir())
