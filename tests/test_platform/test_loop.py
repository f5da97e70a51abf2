"""The loop: rows, failure policies, checkpoints, and a run that continues from any point as if nothing had happened."""

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pandas as pd
import pytest
import torch

from fedloom.platform.averaging.average import Update
from fedloom.platform.clients.execution import (
    Assignment,
    Chunk,
    ChunkResult,
    Executor,
    Measurement,
    Outcome,
    Report,
    SerialExecutor,
    SharedWeights,
)
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation import recorder as recorder_module
from fedloom.platform.federation.config import (
    BudgetConfig,
    CheckpointConfig,
    DevicesConfig,
    ExecutorConfig,
    FailuresConfig,
    RunConfig,
    TiersConfig,
)
from fedloom.platform.federation.loop import InterruptedRunError, Loop, RoundProgress, RunFailedError, round_row
from fedloom.platform.federation.recorder import Recorder, restored_state
from fedloom.platform.federation.stage import Merged, Plan, RoundResult
from fedloom.platform.federation.state import RunState
from fedloom.platform.federation.world import World, build_world
from fedloom.platform.methods.rows import evaluation_rows
from fedloom.platform.results.checkpoint import load_checkpoint
from fedloom.platform.results.paths import RunPaths, list_runs
from fedloom.platform.results.status import StatusFile, read_status
from fedloom.platform.results.tables import TABLES, TIME_COLUMNS
from fedloom.platform.results.writer import RunWriter
from fedloom.platform.runs import run as run_module
from fedloom.platform.runs.run import Watcher, resume_run, start_run
from fedloom.platform.spaces.slices import Slice, Weights
from fedloom.tiers.devices import DeviceProfile

PHONE = DeviceProfile("phone", macs_per_s=1.0, down_bytes_per_s=1.0, up_bytes_per_s=1.0)


def fake_worker() -> Worker:
    return cast(Worker, SimpleNamespace(device=torch.device("cpu"), spec=SimpleNamespace(threads=1), node="here"))


@dataclass(frozen=True)
class Add:
    """Adds one to the weights; fails in the rounds given, the first `failures` times it is tried."""

    fails_in: tuple[int, ...] = ()
    failures: list[int] = field(default_factory=lambda: [1_000_000])
    measured: float = 0.5

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> Outcome:
        if assignment.round in self.fails_in and self.failures[0] > 0:
            self.failures[0] -= 1
            raise OSError("the battery is empty")
        client = assignment.client_id or 0
        return Outcome(
            update=Update({"w": weights["w"] + 1}, {"w": Slice("w")}, {"w": 1.0}),
            samples=10 * (client + 1),
            steps=client,
            macs=100.0,
            bytes_down=20,
            bytes_up=10,
            loss=float(client),
            metric=0.5,
            measurements=(Measurement("m", "0-1", "validation", "loss", self.measured, 7),),
            clock_factor=1.0,
        )


@dataclass
class Counting:
    """A stage of some rounds, in which the given clients take part."""

    tasks: dict[int | None, Any] = field(default_factory=lambda: {0: Add(), 1: Add(), 2: Add(), 3: Add()})
    rounds: int = 3
    name: str = "train"
    changes: dict[int | None, dict[str, Any]] = field(default_factory=dict)
    begun: list[int] = field(default_factory=list)

    def begin(self, state: RunState) -> RunState:
        self.begun.append(state.stage)
        return state if "model" in state.bags else state.with_bag("model", {"w": torch.zeros(2)})

    def rounds_left(self, state: RunState) -> int:
        return self.rounds - state.round

    def plan(self, state: RunState) -> Plan:
        assignments = [
            Assignment(self.name, state.round, c, "server" if c is None else "tier1", task, PHONE)
            for c, task in self.tasks.items()
        ]
        assignments = [replace(a, **self.changes.get(a.client_id, {})) for a in assignments]
        return Plan(assignments, "model", {"lr": 0.5, "beta": 0.25})

    def merge(self, state: RunState, plan: Plan, result: RoundResult, /) -> Merged:
        weights = result.sums.finish(state.weights("model")).weights
        return Merged(state.with_bag("model", weights), evaluation_rows(result.reports))

    def end(self, state: RunState) -> Merged:
        return Merged(state.with_data(f"{self.name} ended", True))


class Setting:
    """A loop over fake stages in a results folder."""

    def __init__(self, root: Path) -> None:
        self.writer = RunWriter.create(root, "tiny", "run-1")
        self.paths = self.writer.paths
        self.told: list[RoundProgress] = []

    def loop(self, *stages: Any, executor: Executor | None = None, **changes: Any) -> Loop:
        values: dict[str, Any] = {
            "execution": ExecutorConfig(kind="serial"),
            "checkpoint": CheckpointConfig(),
            "deadline_s": None,
            "watch": self.told.append,
        }
        status = StatusFile(self.paths.status)
        executor = executor or SerialExecutor(fake_worker())
        return Loop(stages, executor, Recorder(self.writer), status, **{**values, **changes})

    def table(self, name: str) -> pd.DataFrame:
        self.writer.close()
        return read(self.paths, name)

    def saved(self) -> RunState:
        checkpoint = load_checkpoint(self.paths.checkpoint)
        return restored_state(checkpoint.data, checkpoint.bags)


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(tmp_path)


def read(paths: RunPaths, table: str) -> pd.DataFrame:
    folder = paths.table(table)
    frame = pd.read_parquet(folder) if folder.is_dir() else pd.DataFrame()
    return frame.astype(object).where(frame.notna(), None)


# -- rounds and rows --------------------------------------------------------------------------------------------------


def test_stages_run_one_after_the_other(setting: Setting) -> None:
    stages = (Counting(rounds=2, name="first"), Counting(rounds=0, name="empty"), Counting(rounds=1, name="second"))
    state = setting.loop(*stages).run(RunState())
    assert (state.stage, state.round) == (3, 0)
    assert state.weights("model")["w"].tolist() == [3.0, 3.0]
    assert state.data == {"first ended": True, "empty ended": True, "second ended": True}
    rounds = setting.table("rounds")
    assert list(zip(rounds["stage"], rounds["round"], strict=True)) == [("first", 0), ("first", 1), ("second", 0)]
    assert [stage.begun for stage in stages] == [[0], [1], [2]]
    assert state.bags["model"].version == 3


def test_a_rounds_row_by_hand(setting: Setting) -> None:
    changes: dict[int | None, dict[str, Any]] = {1: {"dropped": "gone"}, 2: {"deadline_s": 129.0}}
    stage = Counting(rounds=1, changes=changes)
    state = setting.loop(stage, deadline_s=1000.0).run(RunState())
    (row,) = setting.table("rounds").to_dict("records")
    expected = {
        "clients_planned": 4,
        "clients_ok": 2,
        "clients_failed": 0,
        # clients 0 and 3, with 10 and 40 samples and the losses 0 and 3
        "loss": (0 * 10 + 3 * 40) / 50,
        "metric": 0.5,
        "bytes_down": 60,  # client 2 was too late, but had received
        "bytes_up": 20,
        "macs": 300,
        "simulated_s": 130.0,  # 20 down, 100 computing, 10 up
        "lr": 0.5,
        "beta": 0.25,
        "schedules": '{"beta": 0.25, "lr": 0.5}',
    }
    assert {name: row[name] for name in expected} == expected
    assert state.simulated_s == 130.0
    clients = setting.table("clients")
    assert clients["status"].tolist() == ["ok", "dropped", "timed_out", "ok"]


def test_a_stage_without_deadlines_is_waited_for(setting: Setting) -> None:
    state = setting.loop(Counting(rounds=1), deadline_s=100.0).run(RunState())
    (row,) = setting.table("rounds").to_dict("records")
    assert (row["clients_ok"], row["simulated_s"], state.simulated_s) == (4, 130.0, 130.0)


def test_the_virtual_clock_adds_up_over_rounds(setting: Setting) -> None:
    assert setting.loop(Counting(rounds=3)).run(RunState()).simulated_s == 3 * 130.0
    assert setting.saved().simulated_s == 3 * 130.0


def test_a_round_in_which_nobody_answers_changes_nothing(setting: Setting) -> None:
    gone = {c: {"dropped": "gone"} for c in range(4)}
    state = setting.loop(Counting(rounds=2, changes=cast(Any, gone))).run(RunState())
    assert state.weights("model")["w"].tolist() == [0.0, 0.0]
    rounds = setting.table("rounds")
    assert rounds["clients_ok"].tolist() == [0, 0]
    assert rounds["loss"].tolist() == [None, None]


def test_a_round_without_any_work_is_a_round(setting: Setting) -> None:
    setting.loop(Counting(tasks={}, rounds=1)).run(RunState())
    assert setting.table("rounds")["clients_planned"].tolist() == [0]


def test_undefined_values_become_nulls(setting: Setting) -> None:
    setting.loop(Counting(tasks={0: Add(measured=math.nan)}, rounds=1)).run(RunState())
    (row,) = setting.table("evaluations").to_dict("records")
    assert row["value"] is None
    assert (row["stage"], row["round"], row["samples"]) == ("train", 0, 7)


def test_a_stage_that_is_past_its_end_ends(setting: Setting) -> None:
    # A run of 5 rounds that is resumed with 3 of them wanted.
    state = RunState(round=5).with_bag("model", {"w": torch.zeros(2)})
    assert setting.loop(Counting(rounds=3)).run(state).stage == 1
    assert setting.told == []


def test_who_watches_is_told_after_the_round_is_safe(setting: Setting) -> None:
    seen: list[tuple[RoundProgress, int, int]] = []

    def watch(progress: RoundProgress) -> None:
        seen.append((progress, setting.saved().round, len(setting.table("rounds"))))

    setting.loop(Counting(rounds=2), watch=watch).run(RunState())
    assert [(p.round, p.rounds_total, saved, rows) for p, saved, rows in seen] == [(0, 2, 1, 1), (1, 2, 2, 2)]
    progress = seen[0][0]
    assert (progress.stage, progress.clients_ok, progress.clients_planned) == ("train", 4, 4)
    assert (progress.bytes_down, progress.bytes_up, progress.metric) == (80, 40, 0.5)


def test_the_mean_of_nothing_is_nothing() -> None:
    reports = [Report(0, "tier1", "ok", samples=0, loss=3.0), Report(1, "tier1", "failed", samples=5, loss=1.0)]
    row = round_row("train", 0, reports, Plan([], "model"), 1.0, 2.0)
    assert row["loss"] is None
    assert (row["clients_planned"], row["clients_ok"], row["clients_failed"]) == (2, 1, 1)


@dataclass(frozen=True)
class Count:
    """Counts its client's rounds in the client's own state."""

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> Outcome:
        before = assignment.state["rounds"] if assignment.state is not None else torch.tensor(0)
        return Outcome(state={"rounds": before + 1})


class Remembering(Counting):
    """Hands every client what it kept; in odd rounds only client 0 takes part."""

    def plan(self, state: RunState) -> Plan:
        plan = super().plan(state)
        taking_part = [a for a in plan.assignments if a.client_id == 0 or state.round % 2 == 0]
        return replace(plan, assignments=[replace(a, state=state.client_state(a.client_id or 0)) for a in taking_part])


def test_clients_keep_their_state_between_rounds_and_in_the_checkpoint(setting: Setting) -> None:
    tasks: dict[int | None, Any] = {0: Count(), 1: Count()}
    stage = Remembering(tasks, rounds=4)
    rounds = iter([False, False, True])
    with pytest.raises(InterruptedRunError):
        setting.loop(stage, should_stop=lambda: next(rounds)).run(RunState())
    saved = setting.saved()
    assert {c: cast(Any, saved.client_state(c))["rounds"].item() for c in (0, 1)} == {0: 3, 1: 2}
    assert saved.client_state(2) is None
    state = setting.loop(stage).run(saved)
    assert {c: cast(Any, state.client_state(c))["rounds"].item() for c in (0, 1)} == {0: 4, 1: 2}


# -- failures ---------------------------------------------------------------------------------------------------------


def failing(policy: str, max_share: float = 0.25, attempts: int = 2) -> dict[str, Any]:
    failures = FailuresConfig(policy=policy, max_share=max_share, attempts=attempts)
    return {"execution": ExecutorConfig(kind="serial", failures=failures)}


def four(**special: Any) -> dict[int | None, Any]:
    return {c: special.get(f"c{c}", Add()) for c in range(4)}


def test_policy_stop_ends_the_run_and_leaves_the_rows(setting: Setting) -> None:
    with pytest.raises(RunFailedError) as caught:
        setting.loop(Counting(four(c2=Add(fails_in=(1,)))), **failing("stop")).run(RunState())
    message = str(caught.value)
    assert message.startswith("train, round 1: client 2 (tier1) failed: OSError: the battery is empty")
    assert "\n" not in message
    clients = setting.table("clients")
    assert list(zip(clients["round"], clients["client_id"], clients["status"], strict=True)) == [
        (r, c, "failed" if (r, c) == (1, 2) else "ok") for r in (0, 1) for c in range(4)
    ]
    (traceback,) = clients[clients["status"] == "failed"]["traceback"]
    assert "in run" in traceback
    assert "OSError: the battery is empty" in traceback
    assert len(setting.table("rounds")) == 1
    assert setting.saved().round == 1


def test_policy_retry_repeats_the_client(setting: Setting) -> None:
    stage = Counting(four(c2=Add(fails_in=(1,), failures=[2])))
    state = setting.loop(stage, **failing("retry", attempts=3, max_share=0.0)).run(RunState())
    assert state.weights("model")["w"].tolist() == [3.0, 3.0]
    clients = setting.table("clients")
    assert set(clients["status"]) == {"ok"}
    assert clients[clients["attempts"] > 1][["round", "client_id", "attempts"]].to_numpy().tolist() == [[1, 2, 3]]


def test_policy_retry_gives_up_in_the_end(setting: Setting) -> None:
    stage = Counting(four(c2=Add(fails_in=(1,))))
    with pytest.raises(RunFailedError, match=r"client 2 \(tier1\) failed"):
        setting.loop(stage, **failing("retry", max_share=0.0)).run(RunState())
    clients = setting.table("clients")
    assert clients[clients["status"] == "failed"]["attempts"].tolist() == [2]


def test_only_retry_makes_more_than_one_attempt(setting: Setting) -> None:
    for policy in ("stop", "tolerate"):
        task = Add(fails_in=(0,), failures=[1])
        with pytest.raises(RunFailedError):
            setting.loop(Counting(four(c2=task)), **failing(policy, max_share=0.0)).run(RunState())
        assert task.failures == [0]


def test_policy_tolerate_goes_on_without_the_failed_client(setting: Setting) -> None:
    stage = Counting(four(c2=Add(fails_in=(1,))), rounds=3)
    state = setting.loop(stage, **failing("tolerate")).run(RunState())
    assert state.weights("model")["w"].tolist() == [3.0, 3.0]
    assert setting.saved().round == 0
    rounds = setting.table("rounds")
    assert rounds["clients_ok"].tolist() == [4, 3, 4]
    assert rounds["clients_failed"].tolist() == [0, 1, 0]
    assert len(setting.table("clients")) == 12


def test_policy_tolerate_has_a_limit(setting: Setting) -> None:
    stage = Counting(four(c1=Add(fails_in=(1,)), c2=Add(fails_in=(1,))))
    with pytest.raises(RunFailedError, match=r"client 1 .*2 of 4 failed; policy tolerate, at most 25%"):
        setting.loop(stage, **failing("tolerate")).run(RunState())
    assert setting.table("clients")["status"].tolist().count("failed") == 2


def test_the_servers_own_work_must_not_fail(setting: Setting) -> None:
    stage = Counting({0: Add(), None: Add(fails_in=(0,))})
    with pytest.raises(RunFailedError, match="round 0: the server's own work failed: OSError: the battery is empty"):
        setting.loop(stage, **failing("tolerate", max_share=1.0)).run(RunState())


def test_simulated_losses_are_not_failures(setting: Setting) -> None:
    changes: dict[int | None, dict[str, Any]] = {1: {"dropped": "gone"}, 2: {"deadline_s": 1.0}}
    setting.loop(Counting(rounds=1, changes=changes), **failing("stop")).run(RunState())


class Hanging:
    """An executor whose second client never answered in real time."""

    def run(self, chunks: Sequence[Chunk], weights: SharedWeights) -> Iterator[ChunkResult]:
        for chunk, result in zip(chunks, SerialExecutor(fake_worker()).run(chunks, weights), strict=True):
            if chunk.assignments[0].client_id == 1:
                result = ChunkResult(reports=[Report(1, "tier1", "timed_out", "no answer within 3 s")])
            yield result

    def close(self) -> None:
        """Nothing to release."""


def test_a_client_that_hangs_in_real_time_is_a_failure(setting: Setting) -> None:
    with pytest.raises(RunFailedError, match=r"client 1 \(tier1\) failed: no answer within 3 s"):
        setting.loop(Counting(rounds=1), executor=Hanging(), **failing("stop")).run(RunState())
    state = setting.loop(Counting(rounds=1), executor=Hanging(), **failing("tolerate")).run(RunState())
    assert state.weights("model")["w"].tolist() == [1.0, 1.0]
    assert setting.table("rounds")["clients_failed"].tolist() == [1]


@dataclass
class Refusing(Counting):
    """Its merge meets a value that it cannot work with."""

    def merge(self, state: RunState, plan: Plan, result: RoundResult, /) -> Merged:
        if state.round == 1:
            raise ValueError("no such value")
        return super().merge(state, plan, result)


def test_a_value_that_a_stage_cannot_work_with_is_a_failure_not_a_refusal(setting: Setting) -> None:
    with pytest.raises(RunFailedError, match=r"^train, round 1: no such value$"):
        setting.loop(Refusing()).run(RunState())


# -- stopping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 2, 100])
def test_a_stopped_run_has_every_finished_round_in_its_checkpoint(setting: Setting, every: int) -> None:
    rounds = iter([False, False, True])
    with pytest.raises(InterruptedRunError, match="stopped after round 2 of train"):
        setting.loop(
            Counting(rounds=5), checkpoint=CheckpointConfig(every=every), should_stop=lambda: next(rounds)
        ).run(RunState())
    saved = setting.saved()
    assert saved.round == 3
    assert saved.weights("model")["w"].tolist() == [3.0, 3.0]


@dataclass(frozen=True)
class Interrupted(Add):
    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> Outcome:
        if assignment.round == 2:
            raise KeyboardInterrupt
        return super().run(worker, assignment, weights)


@pytest.mark.parametrize(("task", "ending"), [(Add(fails_in=(2,)), RunFailedError), (Interrupted(), KeyboardInterrupt)])
def test_a_broken_round_does_not_take_the_finished_ones_along(
    setting: Setting, task: Add, ending: type[BaseException]
) -> None:
    every = CheckpointConfig(every=100)
    with pytest.raises(ending):
        setting.loop(Counting(four(c2=task)), checkpoint=every, **failing("stop")).run(RunState())
    saved = setting.saved()
    assert (saved.round, saved.weights("model")["w"].tolist()) == (2, [2.0, 2.0])
    # The rows that the checkpoint stands for are those of its rounds, not of the broken one.
    position = load_checkpoint(setting.paths.checkpoint).data["position"]
    resumed = RunWriter.resume(setting.paths.root, "tiny", "run-1", position)
    resumed.close()
    assert read(setting.paths, "clients")["round"].tolist() == [0] * 4 + [1] * 4


def test_checkpoints_are_written_every_so_many_rounds(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[int, int]] = []
    save = recorder_module.save_checkpoint

    def spy(folder: Path, bags: Any, data: dict[str, Any], previous: Any = None) -> Any:
        written.append((data["stage"], data["round"]))
        return save(folder, bags, data, previous)

    monkeypatch.setattr(recorder_module, "save_checkpoint", spy)
    setting.loop(Counting(rounds=5), checkpoint=CheckpointConfig(every=2)).run(RunState())
    assert written == [(0, 2), (0, 4), (1, 0)]


# -- a whole run, killed anywhere and resumed -------------------------------------------------------------------------


def serial(world: World) -> SerialExecutor:
    return SerialExecutor(Worker(world.spec))


def restless(make: Callable[..., RunConfig]) -> RunConfig:
    """All that a run's state can hold: federated search, dynamic budgets, devices that drop out or come too late."""
    config = make(
        tiers=TiersConfig(count=2, paths=2000, budget=BudgetConfig("trace")),
        devices=DevicesConfig(macs_per_s=[1e7], availability=0.9, dropout=0.1, deadline_s=0.12),
        executor=ExecutorConfig(kind="serial", chunk_size=2),
    )
    config.method.search = replace(config.method.search, scoring="federated", budget=6)
    config.method.rand_init.rounds = 0  # the same stage as fine-tuning
    config.method.evaluation.clients_per_tier = 1
    return config


def contents(root: Path) -> dict[str, list[dict[str, Any]]]:
    """Every row of the only run under `root` without the columns that depend on when and where it ran."""
    (paths,) = list_runs(root)
    frames = {table: read(paths, table).drop(columns=list(TIME_COLUMNS[table]), errors="ignore") for table in TABLES}
    return {table: frame.to_dict("records") for table, frame in frames.items()}


def final_bags(root: Path) -> dict[str, dict[str, torch.Tensor]]:
    (paths,) = list_runs(root)
    return {name: dict(bag.tensors) for name, bag in load_checkpoint(paths.checkpoint).bags.items()}


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
    run_id = start_run(config, serial, Watcher(round=lambda _: snapshot()))
    monkeypatch.setattr(recorder_module, "save_checkpoint", save)
    expected, bags = contents(root), final_bags(root)
    statuses = {row["status"] for row in expected["clients"]}
    assert statuses == {"ok", "dropped", "timed_out"}, "the configuration shall try everything"
    assert len(expected["rounds"]) >= 12
    assert len(snapshots) > len(expected["rounds"])
    for copy in snapshots:
        resume_run(replace(config, results=str(copy)), run_id, serial)
        assert contents(copy) == expected, copy.name
        resumed = final_bags(copy)
        assert resumed.keys() == bags.keys()
        for name, tensors in bags.items():
            assert all(torch.equal(resumed[name][n], t) for n, t in tensors.items()), (copy.name, name)
        shutil.rmtree(copy)


def test_the_same_configuration_gives_the_same_bits_whatever_the_checkpoints(
    tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    first = restless(tiny_config)
    second = replace(first, results=str(tmp_path / "other"), checkpoint=CheckpointConfig(every=3))
    for config in (first, second):
        start_run(config, serial)
    one, two = (contents(Path(c.results)) for c in (first, second))
    for table in TABLES:
        if table != "runs":
            assert one[table] == two[table]


def test_a_finished_run_is_not_run_again(tiny_config: Callable[..., RunConfig]) -> None:
    config = tiny_config()
    run_id = start_run(config, serial)
    before = contents(Path(config.results))
    rounds: list[RoundProgress] = []
    resume_run(config, run_id, serial, Watcher(round=rounds.append))
    assert rounds == []
    assert contents(Path(config.results)) == before


# -- how a run ends ---------------------------------------------------------------------------------------------------


def test_the_status_file_tells_how_it_ended(tiny_config: Callable[..., RunConfig]) -> None:
    config = tiny_config()
    ids: list[str] = []
    asked = iter([False, True])
    with pytest.raises(InterruptedRunError):
        start_run(config, serial, Watcher(started=ids.append, should_stop=lambda: next(asked)))
    (paths,) = list_runs(Path(config.results))
    assert paths.run_id == ids[0]
    assert read_status(paths.status).state == "interrupted"
    assert read(paths, "runs")["status"].tolist() == ["interrupted"]
    resume_run(config, ids[0], serial)
    assert read_status(paths.status).state == "done"
    (run,) = read(paths, "runs").to_dict("records")
    assert (run["status"], run["error"], run["method"], run["space"]) == ("done", None, "fedoras", "cnn_digits")
    assert run["ended"] >= run["started"]


def test_a_failed_run_says_why_and_can_be_resumed(
    tiny_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config()
    clean = replace(config, results=str(Path(config.results).with_name("clean")))
    start_run(clean, serial)
    client_data = Worker.client_data

    def broken(self: Worker, client_id: int, split: str) -> Any:
        if client_id == 3:
            raise OSError("bad sector")
        return client_data(self, client_id, split)

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "client_data", broken)
        with pytest.raises(RunFailedError, match=r"client 3 \(tier\d\) failed: OSError: bad sector"):
            start_run(config, serial)
    (paths,) = list_runs(Path(config.results))
    assert read_status(paths.status).state == "failed"
    (run,) = read(paths, "runs").to_dict("records")
    assert run["status"] == "failed"
    assert "bad sector" in run["error"]
    failed = read(paths, "clients")
    assert failed[failed["status"] == "failed"]["client_id"].tolist() == [3]
    resume_run(config, paths.run_id, serial)
    left, right = contents(Path(config.results)), contents(Path(clean.results))
    for table in TABLES:
        if table != "runs":
            assert left[table] == right[table]


def test_the_executor_is_closed_however_the_run_ends(
    tiny_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    class Closing(SerialExecutor):
        def close(self) -> None:
            closed.append("closed")

    def make(world: World) -> Executor:
        return Closing(Worker(world.spec))

    start_run(tiny_config(), make)
    with pytest.raises(InterruptedRunError):
        start_run(tiny_config(), make, Watcher(should_stop=lambda: True))
    assert closed == ["closed", "closed"]
