"""Whole runs: continued from any point as if nothing had happened, and how they end."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from fedloom.experiments.show import RunView
from fedloom.platform.clients.execution import Executor, SerialExecutor
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation import recorder as recorder_module
from fedloom.platform.federation.config import (
    BudgetConfig,
    CheckpointConfig,
    DevicesConfig,
    ExecutorConfig,
    RunConfig,
    TiersConfig,
)
from fedloom.platform.federation.loop import AT_ONCE, InterruptedRunError, Loop, RoundProgress, RunFailedError
from fedloom.platform.federation.training_config import TrainingConfig
from fedloom.platform.federation.world import World, build_world
from fedloom.platform.methods.fedavg import FedAvgConfig
from fedloom.platform.results.checkpoint import load_checkpoint
from fedloom.platform.results.paths import RunPaths, list_runs
from fedloom.platform.results.status import read_status
from fedloom.platform.results.tables import TABLES, TIME_COLUMNS, read_table
from fedloom.platform.runs import run as run_module
from fedloom.platform.runs.logs import round_line
from fedloom.platform.runs.resuming import leave_finished
from fedloom.platform.runs.run import NOT_BEGUN, Resume, RunEnd, Watcher, make_serial, resume_run, run_to_end, start_run
from fedloom.platform.runs.run_files import other_machine


def read(paths: RunPaths, table: str) -> pd.DataFrame:
    folder = paths.table(table)
    frame = pd.read_parquet(folder) if folder.is_dir() else pd.DataFrame()
    return frame.astype(object).where(frame.notna(), None)


# -- a whole run, killed anywhere and resumed -------------------------------------------------------------------------


def restless(make: Callable[..., RunConfig]) -> RunConfig:
    """All that a run's state can hold: federated search, dynamic budgets, devices that are lost, offline or late."""
    config = make(
        tiers=TiersConfig(count=2, paths=2000, budget=BudgetConfig("trace")),
        devices=DevicesConfig(
            macs_per_s=[1e7],
            availability=0.9,
            dropout=0.1,
            availability_table="generated",
            availability_period_s=1.0,
            availability_share=0.8,
            jitter=0.05,
            server_bytes_per_s=4e6,
            deadline_s=0.14,
        ),
        executor=ExecutorConfig(kind="serial", chunk_size=2),
    )
    config.method.search = replace(config.method.search, scoring="federated", budget=6)
    config.method.rand_init.rounds = 0  # the same stage as fine-tuning
    config.method.evaluation.clients_per_tier = 1
    return config


@pytest.fixture
def fedavg_config(tiny_config: Callable[..., RunConfig]) -> Callable[..., RunConfig]:
    """Makes configurations of FedAvg, in which all clients train alone in each of three rounds."""
    train = TrainingConfig(rounds=3, clients_per_round=8, batch_size=16)
    executor = ExecutorConfig(kind="serial", stack_clients="off")
    return partial(tiny_config, method=FedAvgConfig(architecture="0-1-2", train=train), executor=executor)


def contents(root: Path) -> dict[str, list[dict[str, Any]]]:
    """Every row of the only run under `root` without the columns that depend on when and where it ran."""
    (paths,) = list_runs(root)
    frames = {table: read(paths, table).drop(columns=list(TIME_COLUMNS[table]), errors="ignore") for table in TABLES}
    return {table: frame.to_dict("records") for table, frame in frames.items()}


def final_groups(root: Path) -> dict[str, dict[str, torch.Tensor]]:
    (paths,) = list_runs(root)
    return {name: dict(group.tensors) for name, group in load_checkpoint(paths.checkpoint).groups.items()}


def test_a_run_resumed_from_any_point_ends_in_the_same_bits(
    tiny_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = restless(tiny_config)
    root = Path(config.results)
    world = build_world(config)
    # The world is the same for all of them; to measure the space's costs anew takes longer than the rounds.
    monkeypatch.setattr(run_module, "build_world", lambda config, *_: replace(world, config=config))
    snapshots: list[Path] = []

    def snapshot() -> None:
        """What a kill -9 at this moment would leave behind."""
        copy = tmp_path / f"killed-{len(snapshots):03}"
        # The status file alone may be changing: it is the loop's, not the recorder's.
        shutil.copytree(root, copy, ignore=shutil.ignore_patterns("status.json", ".status.json.tmp"))
        snapshots.append(copy)

    save, count = recorder_module.save_checkpoint, [0]

    def killed_before_saving(*arguments: Any) -> Any:
        # The rows are committed, the checkpoint still is the former one: they must be cut on resume.
        count[0] += 1
        if count[0] % 4 == 2:
            snapshot()
        return save(*arguments)

    monkeypatch.setattr(recorder_module, "save_checkpoint", killed_before_saving)
    run_id = start_run(config, make_serial, Watcher(round=lambda _: snapshot()))
    monkeypatch.setattr(recorder_module, "save_checkpoint", save)
    expected, groups = contents(root), final_groups(root)
    statuses = {row["status"] for row in expected["clients"]}
    assert statuses == {"ok", "dropped", "timed_out"}, "the configuration shall try everything"
    assert len(expected["rounds"]) >= 12
    assert len(snapshots) > len(expected["rounds"])
    for copy in snapshots:
        resume_run(replace(config, results=str(copy)), run_id, make_serial)
        assert contents(copy) == expected, copy.name
        resumed = final_groups(copy)
        assert resumed.keys() == groups.keys()
        for name, tensors in groups.items():
            assert all(torch.equal(resumed[name][n], t) for n, t in tensors.items()), (copy.name, name)
        shutil.rmtree(copy)


def test_the_same_configuration_gives_the_same_bits_whatever_the_checkpoints(
    tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    first = restless(tiny_config)
    second = replace(first, results=str(tmp_path / "other"), checkpoint=CheckpointConfig(every=3))
    for config in (first, second):
        start_run(config, make_serial)
    one, two = (contents(Path(c.results)) for c in (first, second))
    for table in TABLES:
        if table != "runs":
            assert one[table] == two[table]


def test_a_finished_run_is_not_run_again(fedavg_config: Callable[..., RunConfig]) -> None:
    config = fedavg_config()
    run_id = start_run(config, make_serial)
    before = contents(Path(config.results))
    (paths,) = list_runs(Path(config.results))
    ended = read_status(paths.status)
    assert (ended.state, ended.stage, ended.round_shown) == ("done", "evaluation", ended.rounds_total)
    rounds: list[RoundProgress] = []
    resume_run(config, run_id, make_serial, Watcher(round=rounds.append))
    assert rounds == []
    assert contents(Path(config.results)) == before
    again = read_status(paths.status)
    assert (again.taken, again.written > ended.written) == (ended.taken + 1, True)
    assert replace(again, heartbeat=ended.heartbeat, taken=ended.taken, written=ended.written) == ended


# -- how a run ends ---------------------------------------------------------------------------------------------------


def test_the_status_file_tells_how_it_ended(fedavg_config: Callable[..., RunConfig]) -> None:
    config = fedavg_config()
    ids: list[str] = []
    asked = iter([False, True])
    with pytest.raises(InterruptedRunError):
        start_run(
            config, make_serial, Watcher(started=lambda run_id, _: ids.append(run_id), should_stop=lambda: next(asked))
        )
    (paths,) = list_runs(Path(config.results))
    assert paths.run_id == ids[0]
    assert read_status(paths.status).state == "interrupted"
    assert read(paths, "runs")["status"].tolist() == ["interrupted"]
    resume_run(config, ids[0], make_serial)
    assert read_status(paths.status).state == "done"
    (run,) = read(paths, "runs").to_dict("records")
    assert (run["status"], run["error"], run["method"], run["space"]) == ("done", None, "fedavg", "cnn_digits")
    assert run["ended"] >= run["started"]


def test_a_run_that_a_signal_interrupts_says_what_is_lost(tiny_config: Callable[..., RunConfig]) -> None:
    config = tiny_config()

    def press_ctrl_c(_: RoundProgress) -> None:
        raise KeyboardInterrupt

    end = run_to_end(config, make_serial, Watcher(round=press_ctrl_c))
    assert (end.kind, end.message) == ("interrupted", AT_ONCE)
    (paths,) = list_runs(Path(config.results))
    assert read_status(paths.status).message == AT_ONCE


def test_a_run_that_is_interrupted_before_it_has_an_id_has_not_begun(
    tiny_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def press_ctrl_c(*_: object) -> None:
        raise KeyboardInterrupt

    config = tiny_config()
    monkeypatch.setattr("fedloom.platform.runs.run.build_world", press_ctrl_c)
    assert run_to_end(config, make_serial, Watcher()) == RunEnd("", "interrupted", NOT_BEGUN)
    assert list_runs(Path(config.results)) == []


def test_a_value_error_of_a_run_at_work_is_its_failure_not_the_configurations(
    fedavg_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("a row is too wide")

    config = fedavg_config()
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "run", broken)
        end = run_to_end(config, make_serial, Watcher())
    assert (end.kind, end.message) == ("failed", "a row is too wide")
    assert read_table(Path(config.results), "runs", run_id=end.run_id)["status"].tolist() == ["failed"]
    assert run_to_end(config, make_serial, Watcher(), Resume(end.run_id)).kind == "done"


def test_the_consoles_lines_are_in_the_runs_log(fedavg_config: Callable[..., RunConfig]) -> None:
    config = fedavg_config()
    asked = iter([False, True])
    told: list[RoundProgress] = []
    run_to_end(config, make_serial, Watcher(round=told.append, should_stop=lambda: next(asked)))
    (paths,) = list_runs(Path(config.results))
    resume_run(config, paths.run_id, make_serial, Watcher(round=told.append))
    lines = [line.partition(",")[2][4:] for line in (paths.logs / "console.log").read_text().splitlines()]
    rounds = [round_line(progress) for progress in told]
    begun = f"run {paths.run_id}"
    assert lines == [begun, *rounds[:2], "interrupted: stopped after round 2 of fedavg", begun, *rounds[2:], "done"]


def test_a_failed_run_says_why_and_can_be_resumed(
    fedavg_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = fedavg_config()
    clean = replace(config, results=str(Path(config.results).with_name("clean")))
    start_run(clean, make_serial)
    client_data = Worker.client_data

    def broken(self: Worker, client_id: int, split: str) -> Any:
        if client_id == 3:
            raise OSError("bad sector")
        return client_data(self, client_id, split)

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "client_data", broken)
        with pytest.raises(RunFailedError, match=r"client 3 \(tier\d\) failed: OSError: bad sector"):
            start_run(config, make_serial)
    (paths,) = list_runs(Path(config.results))
    assert read_status(paths.status).state == "failed"
    (run,) = read(paths, "runs").to_dict("records")
    assert run["status"] == "failed"
    assert "bad sector" in run["error"]
    failed = read(paths, "clients")
    assert failed[failed["status"] == "failed"]["client_id"].tolist() == [3]
    monkeypatch.setattr("fedloom.platform.runs.run_files.processor", lambda: "another, AVX2")
    resume_run(config, paths.run_id, make_serial)
    left, right = contents(Path(config.results)), contents(Path(clean.results))
    for table in TABLES:
        if table != "runs":
            assert left[table] == right[table]
    elsewhere = [record.getMessage() for record in caplog.records if "began with" in record.getMessage()]
    began = f"run {paths.run_id} began with processor {run['processor']}, here another, AVX2: "
    assert elsewhere == [f"{began}its last bits may be others than without a stop"]


def test_versions_that_are_not_by_package_are_one_line(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path, "x", "r")
    of_torch = {"versions": '{"torch": "0.1"}'}
    assert [line.startswith("torch 0.1, here ") for line in other_machine(paths, of_torch)] == [True]
    with pytest.raises(ValueError, match=r"^the run's row in .*runs.* names no versions by package: restore it$"):
        other_machine(paths, {"versions": '["torch"]'})


def test_of_a_diverged_run_it_is_said_what_to_do_which_is_not_to_resume(
    fedavg_config: Callable[..., RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    config = fedavg_config()
    config.method.train.lr = 1e30
    end = run_to_end(config, make_serial, Watcher())
    RunView().end(end, config.results)
    line = capsys.readouterr().err
    assert line.startswith("fedloom: run failed: the training diverged in fedavg, round 1: loss or weights of 8 of 8")
    assert "start a new run with a lower learning rate" in line
    assert "fedloom resume" not in line
    RunView().end(replace(end, message="bad sector"), config.results)
    assert f"bad sector; continue with: fedloom resume {end.run_id}" in capsys.readouterr().err


def test_a_name_of_another_run_is_refused_before_anything_is_written(tiny_config: Callable[..., RunConfig]) -> None:
    config = replace(tiny_config(), name="baseline", dry_run=True)
    first = run_to_end(config, make_serial, Watcher())
    again = run_to_end(config, make_serial, Watcher())
    advice = "only runs of its setting with other seeds may share it: choose another, or tags=[baseline]"
    assert again == RunEnd("", "refused", f"name=baseline is that of run {first.run_id}; {advice}")
    assert len(list_runs(Path(config.results))) == 1
    second = run_to_end(replace(config, seed=2), make_serial, Watcher())
    assert second.kind == "done", "reports call the setting so"
    other = replace(config, data=replace(config.data, alpha=0.1))
    assert run_to_end(other, make_serial, Watcher()).kind == "refused"
    unnamed = run_to_end(replace(other, name=None), make_serial, Watcher())
    with pytest.raises(ValueError, match=f"name=baseline is that of run ({first.run_id}|{second.run_id})"):
        leave_finished(other, unnamed.run_id)
    assert leave_finished(config, first.run_id) is None, "its own name"


def test_a_dry_run_leaves_its_name_to_the_run_that_it_was_made_for(fedavg_config: Callable[..., RunConfig]) -> None:
    config = replace(fedavg_config(), name="baseline")
    assert run_to_end(replace(config, dry_run=True), make_serial, Watcher()).kind == "done"
    run = run_to_end(config, make_serial, Watcher())
    assert run.kind == "done"
    again = run_to_end(config, make_serial, Watcher())
    assert (again.kind, f"is that of run {run.run_id}" in again.message) == ("refused", True)


def test_the_executor_is_closed_however_the_run_ends(
    fedavg_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    class Closing(SerialExecutor):
        def close(self) -> None:
            closed.append("closed")

    def make(world: World) -> Executor:
        return Closing(Worker(world.spec))

    start_run(fedavg_config(), make)
    with pytest.raises(InterruptedRunError):
        start_run(fedavg_config(), make, Watcher(should_stop=lambda: True))
    assert closed == ["closed", "closed"]
