"""An ablation on disk: what was planned is read again, and how its trials stand."""

import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from fedloom.experiments.ablation import in_process, launch, running
from fedloom.experiments.ablation.command import run_command
from fedloom.experiments.ablation.tuning import _Callback
from fedloom.experiments.ablation.view import TerminalView
from fedloom.experiments.runs import launch as launch_runs
from fedloom.experiments.store.ablations import (
    PLAN,
    VERSION,
    Ablation,
    Trial,
    ablation_ids,
    find_ablation,
    meant_ablation,
    read_ablation,
    short,
    write_ablation,
)
from fedloom.experiments.store.trials import FINAL, End, driver_status, read_ends, trial_states, write_ends
from fedloom.experiments.terminal import INFRASTRUCTURE
from fedloom.platform.results import lock
from fedloom.platform.results.files import from_hashed_json, hashed_json
from fedloom.platform.results.lock import FILE, owned
from fedloom.platform.results.manifest import Manifest
from fedloom.platform.results.paths import RunPaths
from fedloom.platform.results.status import StatusFile, read_status
from fedloom.platform.results.store import local_root
from fedloom.platform.results.tables import TABLES
from fedloom.platform.results.writer import TableParts

ID = "20260101-000000-mine-abcdef"


def make_ablation(trials: int = 2, ablation_id: str = ID) -> Ablation:
    config = {"experiment": "tiny", "results": "results", "data": {"alpha": 0.5, "root": None}, "tiers": [1, 2]}
    return Ablation(
        ablation_id=ablation_id,
        name="mine",
        title="What does it do?",
        experiment="tiny",
        axes={"lr": (0.1, None, "é x"), "bounds": ([1.0, 2.0], {"a": 1})},
        reference={"lr": 0.1},
        seeds=(1, 2),
        figures=("metric_by_axis",),
        scheduler={"kind": "none", "stage": None},
        overrides=("experiment=tiny", "data.alpha=0.5"),
        attempts=2,
        concurrent=None,
        created="2026-01-01T00:00:00+00:00",
        trials=tuple(
            Trial(i, f"{ablation_id}-{i:04d}", 1 + i % 2, {"lr": 0.1, "bounds": [1.0, 2.0]}, ("lr=0.1",), config)
            for i in range(trials)
        ),
    )


# -- the plan ----------------------------------------------------------------------------------------------------------


def test_a_plan_is_written_whole_and_read_equal(tmp_path: Path) -> None:
    ablation = make_ablation()
    write_ablation(tmp_path, ablation)
    assert ablation.folder(tmp_path) == tmp_path / "ablations" / ID
    assert [f.name for f in ablation.folder(tmp_path).iterdir()] == ["ablation.json"]
    assert read_ablation(ablation.folder(tmp_path)) == ablation
    assert ablation_ids(tmp_path) == [ID]
    with pytest.raises(FileExistsError):
        write_ablation(tmp_path, replace(ablation, title="another"))
    assert read_ablation(ablation.folder(tmp_path)).title == ablation.title


def test_trials_are_stored_as_what_differs_from_the_first(tmp_path: Path) -> None:
    first = {"seed": 1, "data": {"alpha": 1.0, "root": None}, "method": {"name": "a", "train": {"lr": 0.1, "more": 2}}}
    others: list[dict[str, Any]] = [
        {**first, "seed": 2},
        {**first, "seed": True},
        {**first, "data": {"alpha": 1, "root": None}},  # another type
        {**first, "data": {"alpha": math.nan, "root": [1, {"a": True}]}},
        {**first, "method": {"name": "b", "steps": 3}},
        {"data": first["data"], "seed": 1},
        first,
    ]
    ablation = make_ablation(8)
    trials = [replace(t, config=config) for t, config in zip(ablation.trials, [first, *others], strict=True)]
    write_ablation(tmp_path, replace(ablation, trials=tuple(trials)))
    found = read_ablation(ablation.folder(tmp_path)).trials
    assert [json.dumps(t.config) for t in found] == [json.dumps(t.config) for t in trials], "to the order of the keys"
    stored = json.loads((ablation.folder(tmp_path) / PLAN).read_text())
    differences = [t["differences"] for t in stored["trials"]]
    assert differences[:4] == [[], [[["seed"], 2]], [[["seed"], True]], [[["data", "alpha"], 1]]]
    assert differences[7] == []


def test_a_plan_of_the_second_version_had_no_hash(tmp_path: Path) -> None:
    ablation = make_ablation()
    write_ablation(tmp_path, ablation)
    path = ablation.folder(tmp_path) / PLAN
    path.write_text(json.dumps({**from_hashed_json(path.read_bytes(), path), "version": 2}))
    assert read_ablation(path.parent) == ablation


def test_a_plan_of_the_first_version_is_read(tmp_path: Path) -> None:
    ablation = make_ablation()
    text = json.dumps({"version": 1, **asdict(ablation)}, indent=1)
    folder = tmp_path / ID
    folder.mkdir()
    (folder / PLAN).write_text(text)
    assert read_ablation(folder) == ablation


@pytest.mark.parametrize("link", ["ablations", f"ablations/{ID}", f"ablations/{ID}/.owner"])
def test_an_ablation_with_a_link_is_not_read(link: str, tmp_path: Path) -> None:
    elsewhere, results = tmp_path / "elsewhere", tmp_path / "results"
    ablation = make_ablation()
    write_ablation(elsewhere, ablation)
    (results / link).parent.mkdir(parents=True)
    if link.endswith(".owner"):
        write_ablation(results, ablation)
    (results / link).symlink_to(elsewhere / link)
    with pytest.raises(ValueError, match="nothing in results is followed"):
        read_ablation(ablation.folder(results))
    with pytest.raises(ValueError, match="nothing in results is followed"):
        meant_ablation(results, ID)
    with pytest.raises(ValueError, match="nothing in results is followed"):
        driver_status(ablation.folder(results))


def test_no_ablation_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "ablations").symlink_to("elsewhere")
    with pytest.raises(ValueError, match="nothing in results is followed"):
        write_ablation(tmp_path, make_ablation())
    assert not [*(tmp_path / "elsewhere").iterdir()]


def test_a_results_folder_may_be_moved(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    ablation = make_ablation()
    write_ablation(here, ablation)
    write_status(here, ablation.trials[0], "done")
    states = trial_states(here, ablation)
    text = (ablation.folder(here) / "ablation.json").read_text()
    assert str(tmp_path) not in text, "no absolute path is stored"
    shutil.move(here, there)
    moved = find_ablation(there, ID)
    assert moved == ablation
    assert trial_states(there, moved) == states


def damage(path: Path, text: str | None) -> None:
    if text is None:
        path.unlink()
    else:
        path.write_text(text)


def changed(path: Path, **values: Any) -> str:
    return hashed_json({**from_hashed_json(path.read_bytes(), path), **values}).decode()


@pytest.mark.parametrize("case", ["gone", "no JSON", "key gone", "trials", "axes", "unknown"])
def test_a_damaged_plan_is_named(tmp_path: Path, case: str) -> None:
    ablation = make_ablation()
    write_ablation(tmp_path, ablation)
    path = ablation.folder(tmp_path) / "ablation.json"
    kept = from_hashed_json(path.read_bytes(), path)
    del kept["seeds"]
    content = {
        "gone": None,
        "no JSON": "hello",
        "key gone": hashed_json(kept).decode(),
        "trials": changed(path, trials=[{"index": 0}]),
        "axes": changed(path, axes=[1]),
        "unknown": changed(path, more=1),
    }[case]
    damage(path, content)
    with pytest.raises(
        ValueError, match=f"{re.escape(str(path))} is not (the plan of an ablation|readable JSON .*): restore it"
    ):
        read_ablation(path.parent)


@pytest.mark.parametrize("case", ["cut", "value", "hash", "no hash", "list"])
def test_a_plan_that_was_changed_is_refused(tmp_path: Path, case: str) -> None:
    ablation = make_ablation()
    write_ablation(tmp_path, ablation)
    path = ablation.folder(tmp_path) / "ablation.json"
    text = path.read_text()
    content = {
        "cut": text[:-30],
        "value": text.replace('"lr": 0.1', '"lr": 0.9'),
        "hash": text.replace('{"sha256": "', '{"sha256": "0', 1),
        "no hash": json.dumps(from_hashed_json(text.encode(), path)),
        "list": "[]",
    }[case]
    assert content != text
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))} (is damaged|has lost its hash).*: restore it from"):
        read_ablation(path.parent)


def test_a_plan_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ablation.json"
    path.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ValueError, match="is not readable JSON"):
        read_ablation(tmp_path)


@pytest.mark.parametrize("change", [{"ablation_id": "../x"}, {"trials": "run_id"}], ids=str)
def test_a_plan_names_no_files_of_others(tmp_path: Path, change: dict[str, str]) -> None:
    ablation = make_ablation()
    trials = tuple(replace(trial, run_id=f"../{trial.run_id}") for trial in ablation.trials)
    write_ablation(tmp_path, ablation)
    path = ablation.folder(tmp_path) / PLAN
    stored = {"trials": [{**asdict(trial)} for trial in trials]} if "trials" in change else change
    path.write_text(changed(path, **stored))
    with pytest.raises(ValueError, match="is not the plan of an ablation"):
        read_ablation(path.parent)


def test_a_plan_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    ablation = make_ablation()
    write_ablation(tmp_path, ablation)
    path = ablation.folder(tmp_path) / "ablation.json"
    path.write_text(changed(path, version=VERSION + 1, more=1))
    with pytest.raises(ValueError, match="was written by a newer version of fedloom: read it with that version"):
        read_ablation(path.parent)


def test_an_ablation_is_found_by_the_beginning_of_its_id(tmp_path: Path) -> None:
    ids = ["20260101-000000-alpha-aaaaaa", "20260101-000000-alpha-aaaaaab", "20260102-000000-mine-cccccc"]
    for ablation_id in ids:
        write_ablation(tmp_path, make_ablation(ablation_id=ablation_id))
    assert ablation_ids(tmp_path) == ids
    assert ablation_ids(tmp_path, "20260101") == ids[:2]
    assert find_ablation(tmp_path, "20260102").ablation_id == ids[2]
    assert find_ablation(tmp_path, ids[0]).ablation_id == ids[0], "the whole id, although another begins with it"
    with pytest.raises(ValueError, match=f"ablation '20260101' could be any of {ids[0]}, {ids[1]}: give more of its"):
        find_ablation(tmp_path, "20260101")
    with pytest.raises(ValueError, match=rf"no ablation '2099' under .*; known ablations: {', '.join(ids)}$"):
        find_ablation(tmp_path, "2099")
    with pytest.raises(ValueError, match="known ablations: none"):
        find_ablation(tmp_path / "nowhere", "2099")
    assert meant_ablation(tmp_path, "2099") is None
    assert not ablation_ids(tmp_path / "nowhere")


def test_what_may_be_an_ablation_or_a_run_is_refused_with_both(tmp_path: Path) -> None:
    ablation_id, run_id = "20260101-000000-alpha-aaaaaa", "20260101-000001-tiny-bbbbbb"
    write_ablation(tmp_path, make_ablation(ablation_id=ablation_id))
    for name in (f"{ablation_id}-0000", run_id):
        (tmp_path / "rounds" / "experiment=tiny" / f"run_id={name}").mkdir(parents=True)
    for word in (ablation_id, "20260101-000000", ablation_id[:-1]):
        found = meant_ablation(tmp_path, word)
        assert found is not None, "its trials begin with its id, but they are no other meaning"
        assert found.ablation_id == ablation_id
    for word in (f"{ablation_id}-0000", f"{ablation_id}-", run_id, "20260101-000001", "2099"):
        assert meant_ablation(tmp_path, word) is None
    with pytest.raises(ValueError, match=f"'2026' could be any of ablation {ablation_id}, run {run_id}: give more of"):
        meant_ablation(tmp_path, "2026")
    (tmp_path / "artifacts" / run_id).mkdir(parents=True)
    (tmp_path / "artifacts" / run_id / "names.json").write_text('{"name": "best", "tags": ["paper"]}')
    assert meant_ablation(tmp_path, "best") is None
    write_ablation(tmp_path, make_ablation(ablation_id="paper-fedavg-small-cccccccc"))
    assert meant_ablation(tmp_path, "paper") is None, "the run with this tag, although an ablation's id begins with it"
    assert meant_ablation(tmp_path, "paper-") is not None


# -- how trials stand --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ended_pid() -> int:
    """Of a process that is gone."""
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


def write_status(root: Path, trial: Trial, state: str, row: str | None = None, **changes: Any) -> None:
    """What a trial leaves behind; `row` is what its row says, if not the same."""
    paths = RunPaths(root, trial.experiment, trial.run_id)
    path = paths.status
    TableParts(paths.table("runs"), TABLES["runs"], 1, Manifest(paths)).replace([{"status": row or state}])
    path.parent.mkdir(parents=True, exist_ok=True)
    status = {
        "state": state,
        "pid": os.getpid(),
        "host": platform.node(),
        "stage": "supernet",
        "round": 3,
        "rounds_total": 9,
        "heartbeat": time.time(),
        "message": "why" if state != "running" else "",
    }
    path.write_text(json.dumps({**status, **changes}))


def test_every_state_of_a_trial(tmp_path: Path, ended_pid: int) -> None:
    ablation = make_ablation(10)
    write_ablation(tmp_path, ablation)
    trials = ablation.trials
    write_status(tmp_path, trials[1], "running")
    write_status(tmp_path, trials[2], "running", pid=ended_pid)
    write_status(tmp_path, trials[3], "running", heartbeat=time.time() - 3600)
    write_status(tmp_path, trials[4], "failed")
    write_status(tmp_path, trials[5], "interrupted")
    write_status(tmp_path, trials[6], "done", message="")
    write_status(tmp_path, trials[7], "interrupted")
    write_status(tmp_path, trials[9], "done", row="running", message="")
    ends = {7: End("stopped", "early"), 8: End("refused", "no such file")}
    write_ends(tmp_path, ablation, ends)
    states = trial_states(tmp_path, ablation)
    assert [s.trial for s in states] == list(trials)
    assert [(s.state, s.message) for s in states] == [
        ("waiting", ""),
        ("running", ""),
        ("dead", ""),
        ("stalled", ""),
        ("failed", "why"),
        ("interrupted", "why"),
        ("done", ""),
        ("stopped", "early"),
        ("refused", "no such file"),
        ("interrupted", ""),  # what is done, the tables say
    ]
    assert [s.status is None for s in states] == [True, *[False] * 7, True, False]
    assert states[1].status is not None
    assert (states[1].status.stage, states[1].status.round) == ("supernet", 3)
    assert read_ends(tmp_path, ablation) == ends


def test_a_run_that_is_done_wins_over_an_older_end(tmp_path: Path) -> None:
    ablation = make_ablation(2)
    write_ablation(tmp_path, ablation)
    write_ends(tmp_path, ablation, {0: End("died", "its process ended"), 1: End("died", "its process ended")})
    for trial, state in zip(ablation.trials, ("done", "failed"), strict=True):
        write_status(tmp_path, trial, state)
    assert [s.state for s in trial_states(tmp_path, ablation)] == ["done", "died"]
    assert FINAL == ("done", "stopped")


def test_looking_at_the_trials_writes_nothing(tmp_path: Path) -> None:
    assert [s.state for s in trial_states(tmp_path, make_ablation(3))] == ["waiting"] * 3
    assert not list(tmp_path.iterdir())
    assert read_ends(tmp_path, make_ablation()) == {}


@pytest.mark.parametrize(
    ("last", "kind", "said"),
    [("done", "done", "2 done, 1 stopped"), ("failed", "failed", "1 done, 1 stopped, 1 failed")],
)
def test_to_resume_what_has_nothing_left_takes_no_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str, kind: str, said: str, ended_pid: int
) -> None:
    """Its driver may have been killed after the last trial."""
    monkeypatch.setattr(launch, "connected", lambda _: pytest.fail("Ray was started"))
    ablation = make_ablation(3)
    write_ablation(tmp_path, ablation)
    write_status(tmp_path, ablation.trials[0], "done")
    write_ends(tmp_path, ablation, {1: End("stopped", "early")})
    write_status(tmp_path, ablation.trials[2], last)
    StatusFile(ablation.folder(tmp_path) / "status.json").write("running")
    with (
        owned(ablation.folder(tmp_path), "ablation", tmp_path, tmp_path),
        pytest.raises(ValueError, match=f"is at work in process {os.getpid()} on "),
    ):
        launch.resume_ablation(ablation, tmp_path, TerminalView(quiet=True))
    status = ablation.folder(tmp_path) / "status.json"
    status.write_text(json.dumps({**json.loads(status.read_text()), "pid": ended_pid}))
    end = launch.resume_ablation(ablation, tmp_path, TerminalView(quiet=True))
    assert (end.kind, [s.state for s in end.states]) == (kind, ["done", "stopped", last])
    status = read_status(ablation.folder(tmp_path) / "status.json")
    assert (status.state, status.message) == (kind, said)


@pytest.mark.parametrize(
    ("begin", "only", "chosen"),
    [
        (launch.start_ablation, None, [0, 1, 2, 3]),
        (launch.start_ablation, [1, 3], [1, 3]),
        (launch.resume_ablation, None, [1, 3]),
        (launch.resume_ablation, [0, 2, 3], [3]),
        (launch.retry_failed, None, [0, 2]),
        (launch.retry_failed, [2, 3], [2]),
    ],
)
def test_only_chosen_trials_are_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: Any, only: list[int] | None, chosen: list[int]
) -> None:
    class Checked(Exception):  # noqa: N818
        pass

    def checked(_ablation: object, _location: object, indices: list[int], **_: object) -> None:
        raise Checked(indices)

    ablation = make_ablation(4)
    if begin is not launch.start_ablation:
        write_ablation(tmp_path, ablation)
        write_status(tmp_path, ablation.trials[0], "failed")
        write_status(tmp_path, ablation.trials[2], "failed")
    monkeypatch.setattr(launch, "_checked", checked)
    with pytest.raises(Checked) as caught:
        begin(ablation, tmp_path, TerminalView(quiet=True), only)
    assert caught.value.args == (chosen,)


@pytest.mark.parametrize(("owner", "state"), [(True, "running"), (False, "interrupted")])
def test_a_run_is_not_marked_as_interrupted_while_it_is_at_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: bool, state: str
) -> None:
    monkeypatch.setattr(launch_runs, "KILLED_S", 0.0)
    trial = make_ablation().trials[0]
    write_status(tmp_path, trial, "running")
    paths = RunPaths(tmp_path, trial.experiment, trial.run_id)
    with owned(paths.artifacts, "run", tmp_path, tmp_path) if owner else nullcontext():
        launch_runs.mark_interrupted(str(tmp_path), paths, "killed")
    assert json.loads(paths.status.read_text())["state"] == state


def test_an_old_copy_of_a_run_that_is_done_elsewhere_is_not_sent_as_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended_pid: int
) -> None:
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "cache"))
    url, bucket = f"file://{tmp_path}/bucket", tmp_path / "bucket"
    trial = make_ablation().trials[0]
    for root, state, written in ((local_root(url), "running", 5), (bucket, "done", 9)):
        write_status(root, trial, state, pid=ended_pid, taken=1, written=written)
    paths = RunPaths(local_root(url), trial.experiment, trial.run_id)
    launch_runs.mark_interrupted(url, paths, "killed")
    for root in (local_root(url), bucket):
        assert json.loads(RunPaths(root, trial.experiment, trial.run_id).status.read_text())["state"] == "done"


class Endless:
    """A trial of ten seconds, unless it is stopped; another driver takes the ablation over meanwhile."""

    bucket = Path()
    stopped = 0

    def __init__(self, _job: object) -> None:
        self._asked = 0

    def start(self) -> None:
        lease = {"token": "t", "host": "far", "place": "elsewhere", "pid": 7, "started": 1}
        (self.bucket / "ablations" / ID / FILE).write_text(json.dumps(lease))

    def news(self) -> dict[str, Any]:
        time.sleep(0.02)
        self._asked += 1
        return {"done": True, "end": "done", "message": ""} if self._asked == 500 else {}

    def stop(self) -> None:
        Endless.stopped += 1


def test_a_driver_whose_ablation_is_taken_over_at_a_url_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(running, "SEND_S", 0.02)
    monkeypatch.setattr(lock, "SETTLE_S", 0.0)
    monkeypatch.setattr(in_process, "checked_trials", lambda *_, **__: [])
    monkeypatch.setattr(in_process, "RunThread", Endless)
    monkeypatch.setattr(Endless, "bucket", tmp_path / "bucket")
    monkeypatch.setattr(Endless, "stopped", 0)
    url = f"file://{tmp_path}/bucket"
    location, ablation = running.ResultsLocation(url, local_root(url)), make_ablation(2)
    trials = [replace(trial, config={**trial.config, "executor": {}}) for trial in ablation.trials]
    lost = f"ablation {ID} was taken over at .* by process 7 on far"
    with pytest.raises(lock.OwnershipLostError, match=lost):
        in_process.run_in_process(replace(ablation, trials=tuple(trials)), location, TerminalView(True), is_new=True)
    assert Endless.stopped == 1, "the second trial does not begin"


def test_an_ablation_that_is_taken_over_stops_tune_and_is_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Lost:
        def __call__(self) -> None:
            raise lock.OwnershipLostError("it was taken over")

        ask = __call__

    ablation = make_ablation()
    write_ablation(tmp_path, ablation)

    def taken_over(*_: object, **__: object) -> None:
        with running.RunningAblation(ablation, running.ResultsLocation(str(tmp_path), tmp_path), ()) as driver:
            monkeypatch.setattr(driver, "_ownership", Lost())
            with pytest.raises(lock.OwnershipLostError):
                _Callback(running.TrialEvents(TerminalView(True), driver)).on_step_end(1, [])

    monkeypatch.setattr("fedloom.experiments.ablation.command.start_ablation", taken_over)
    arguments = Namespace(plan=False, resume=None, retry_failed=None, results=tmp_path, json=True)
    assert run_command(ablation, arguments) == INFRASTRUCTURE
    assert capsys.readouterr().err.endswith("it was taken over\n")


def test_a_trial_whose_status_is_damaged_is_unknown_and_left_to_do(tmp_path: Path) -> None:
    ablation = make_ablation(3)
    for trial in ablation.trials:
        write_status(tmp_path, trial, "done")
    RunPaths(tmp_path, "tiny", ablation.trials[1].run_id).status.write_text("")
    states = trial_states(tmp_path, ablation)
    assert [s.state for s in states] == ["done", "unknown", "done"]
    assert "is not a status file" in states[1].message


def test_settings_as_people_read_them() -> None:
    assert [short(v) for v in ("a b", 0.5, None, True, [1.0, 2], {"a": 1})] == [
        *("a b", "0.5", "null", "true", "[1.0,2]", '{"a":1}')
    ]
    assert make_ablation().trials[1].label() == "lr=0.1 bounds=[1.0,2.0] seed=2"
