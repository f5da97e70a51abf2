"""The loop: rounds, rows, the clients' own states and the virtual clock."""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pandas as pd
import pytest
import torch

from fedloom.platform.averaging.average import Update
from fedloom.platform.clients.assignments import (
    Assignment,
    ClientResult,
    Evaluation,
    Measurement,
    evaluations_of,
)
from fedloom.platform.clients.execution import Executor, SerialExecutor
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.algorithm import Plan, PostRoundEvaluation, RoundResult, RoundUpdate, RunState
from fedloom.platform.federation.config import CheckpointConfig, ExecutorConfig
from fedloom.platform.federation.loop import InterruptedRunError, Loop, RoundProgress, round_row
from fedloom.platform.federation.method import Stage
from fedloom.platform.federation.recorder import Recorder, restored_state
from fedloom.platform.results.checkpoint import load_checkpoint
from fedloom.platform.results.paths import RunPaths
from fedloom.platform.results.status import StatusFile
from fedloom.platform.results.writer import RunWriter
from fedloom.platform.spaces.slices import Slice, Weights
from fedloom.tiers.devices import DeviceProfile

PHONE = DeviceProfile("phone", macs_per_s=1.0, down_bytes_per_s=1.0, up_bytes_per_s=1.0)


def fake_worker() -> Worker:
    worker = SimpleNamespace(
        device=torch.device("cpu"), spec=SimpleNamespace(threads=1), node="here", uploaded=dict, expect=list
    )
    return cast(Worker, worker)


@dataclass(frozen=True)
class Add:
    """Adds one to the weights, and measures a loss."""

    measured: float = 0.5

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        client = assignment.client_id or 0
        return ClientResult(
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
class Counting(Stage):
    """A stage of some rounds, in which the given clients take part."""

    tasks: dict[int | None, Any] = field(default_factory=lambda: {0: Add(), 1: Add(), 2: Add(), 3: Add()})
    rounds: int = 3
    name: str = "train"
    changes: dict[int | None, dict[str, Any]] = field(default_factory=dict)
    begun: list[int] = field(default_factory=list)

    def begin(self, state: RunState) -> RunState:
        self.begun.append(state.stage)
        return state if "model" in state.groups else state.with_group("model", {"w": torch.zeros(2)})

    def rounds_left(self, state: RunState) -> int:
        return self.rounds - state.round

    def plan(self, state: RunState) -> Plan:
        assignments = [
            Assignment(self.name, state.round, c, "server" if c is None else "tier1", task, PHONE)
            for c, task in self.tasks.items()
        ]
        assignments = [replace(a, **self.changes.get(a.client_id, {})) for a in assignments]
        return Plan(assignments, "model", {"lr": 0.5, "beta": 0.25})

    def merge(self, state: RunState, plan: Plan, result: RoundResult, /) -> RoundUpdate:
        weights = result.sums.finish(state.weights("model")).weights
        return RoundUpdate(state.with_group("model", weights), evaluations=evaluations_of(result.client_results))

    def end(self, state: RunState) -> RoundUpdate:
        return RoundUpdate(state.with_data(f"{self.name} ended", True))


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
        return restored_state(checkpoint.data, checkpoint.groups)


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
    assert state.groups["model"].version == 3


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


def test_a_round_that_starts_later_lasts_as_long_as_the_wait_and_its_slowest_client(setting: Setting) -> None:
    class Waiting(Counting):
        def plan(self, state: RunState) -> Plan:
            return replace(super().plan(state), starts_s=state.simulated_s + 25.0)

    assert setting.loop(Waiting(rounds=2), deadline_s=1000.0).run(RunState()).simulated_s == 2 * 155.0
    assert setting.table("rounds")["simulated_s"].tolist() == [155.0, 155.0]


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
    state = RunState(round=5).with_group("model", {"w": torch.zeros(2)})
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
    reports = [
        ClientResult(client_id=0, tier="tier1", samples=0, loss=3.0),
        ClientResult(client_id=1, tier="tier1", status="failed", samples=5, loss=1.0),
    ]
    row = round_row("train", 0, reports, Plan([], "model"), 1.0, 2.0)
    assert row["loss"] is None
    assert (row["clients_planned"], row["clients_ok"], row["clients_failed"]) == (2, 1, 1)


@dataclass(frozen=True)
class Count:
    """Counts its client's rounds in the client's own state."""

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        before = assignment.state["rounds"] if assignment.state is not None else torch.tensor(0)
        return ClientResult(state={"rounds": before + 1})


class Alternating(Counting):
    """In odd rounds only client 0 takes part."""

    def plan(self, state: RunState) -> Plan:
        plan = super().plan(state)
        return replace(plan, assignments=[a for a in plan.assignments if a.client_id == 0 or state.round % 2 == 0])


def rounds_of(state: RunState, client_id: int) -> int:
    """What the client has counted."""
    kept = state.client_state(client_id)
    assert kept is not None
    return int(kept["rounds"])


def test_clients_keep_their_state_between_rounds_and_in_the_checkpoint(setting: Setting) -> None:
    stage = Alternating({0: Count(), 1: Count()}, rounds=4)
    rounds = iter([False, False, True])
    with pytest.raises(InterruptedRunError):
        setting.loop(stage, should_stop=lambda: next(rounds)).run(RunState())
    saved = setting.saved()
    assert [rounds_of(saved, client_id) for client_id in (0, 1)] == [3, 2]
    assert saved.client_state(2) is None
    state = setting.loop(stage).run(saved)
    assert [rounds_of(state, client_id) for client_id in (0, 1)] == [4, 2]


def test_a_stage_may_hand_a_client_a_state_of_its_own(setting: Setting) -> None:
    stage = Counting({0: Count(), 1: Count()}, changes={1: {"state": {"rounds": torch.tensor(10)}}})
    state = setting.loop(stage).run(RunState())
    assert [rounds_of(state, client_id) for client_id in (0, 1)] == [3, 11]


# -- what is measured of a round's new state --------------------------------------------------------------------------


@dataclass(frozen=True)
class Look:
    """Measures the first of the weights."""

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        return ClientResult(measurements=(Measurement("m", "0-1", "validation", "w", weights["w"][0].item(), 1),))


class Reviewed(Counting):
    """Has the server look at the weights before each round, and after the last."""

    def plan(self, state: RunState) -> Plan:
        plan = super().plan(state)
        return replace(plan, assignments=[*plan.assignments, self._look(state)])

    def _look(self, state: RunState) -> Assignment:
        return Assignment(self.name, state.round, None, "server", Look())

    def merge(self, state: RunState, plan: Plan, result: RoundResult, /) -> RoundUpdate:
        merged = super().merge(state, plan, result)
        if state.round < self.rounds - 1:
            return merged

        def after_it(result: RoundResult) -> list[Evaluation]:
            return evaluations_of(result.client_results, round_=self.rounds)

        return replace(merged, evaluation=PostRoundEvaluation(Plan([self._look(state)], "model"), after_it))


def test_an_evaluation_measures_the_state_after_its_round(setting: Setting) -> None:
    state = setting.loop(Reviewed({0: Add()}, rounds=2)).run(RunState())
    assert state.weights("model")["w"].tolist() == [2.0, 2.0]
    found = setting.table("evaluations")
    seen = found[found["metric"] == "w"]
    assert list(zip(seen["round"], seen["value"], strict=True)) == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert setting.table("rounds")["round"].tolist() == [0, 1], "it is no round of its own"
