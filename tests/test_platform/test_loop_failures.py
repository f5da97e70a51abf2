"""The loop: what failed clients mean, and what is in the checkpoint when a run stops or breaks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pandas as pd
import pytest
import torch

from fedloom.platform.averaging.average import Update
from fedloom.platform.clients.assignments import Assignment, ClientResult, Task
from fedloom.platform.clients.device import DeviceLostError
from fedloom.platform.clients.execution import (
    Chunk,
    ChunkResult,
    Executor,
    SerialExecutor,
    SharedWeights,
    nothing_done,
)
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation import recorder as recorder_module
from fedloom.platform.federation.algorithm import Plan, PostRoundEvaluation, RoundResult, RoundUpdate, RunState
from fedloom.platform.federation.config import CheckpointConfig, ExecutorConfig, FailuresConfig
from fedloom.platform.federation.loop import InterruptedRunError, Loop, RunFailedError
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
    """Adds one to the weights; fails in the rounds given, the first `failures` times it is tried."""

    fails_in: tuple[int, ...] = ()
    failures: list[int] = field(default_factory=lambda: [1_000_000])

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        if assignment.round in self.fails_in and self.failures[0] > 0:
            self.failures[0] -= 1
            raise OSError("the battery is empty")
        return ClientResult(
            update=Update({"w": weights["w"] + 1}, {"w": Slice("w")}, {"w": 1.0}), samples=10, macs=100.0
        )


@dataclass
class Counting(Stage):
    """A stage of some rounds, in which the given clients take part."""

    tasks: dict[int | None, Any] = field(default_factory=lambda: four())
    rounds: int = 3
    name: str = "train"
    changes: dict[int | None, dict[str, Any]] = field(default_factory=dict)
    evaluation: Task | None = None

    def begin(self, state: RunState) -> RunState:
        return state.with_group("model", {"w": torch.zeros(2)})

    def rounds_left(self, state: RunState) -> int:
        return self.rounds - state.round

    def plan(self, state: RunState) -> Plan:
        assignments = [
            Assignment(self.name, state.round, c, "server" if c is None else "tier1", task, PHONE)
            for c, task in self.tasks.items()
        ]
        return Plan([replace(a, **self.changes.get(a.client_id, {})) for a in assignments], "model")

    def merge(self, state: RunState, plan: Plan, result: RoundResult, /) -> RoundUpdate:
        merged = RoundUpdate(state.with_group("model", result.sums.finish(state.weights("model")).weights))
        if self.evaluation is None:
            return merged
        plan = Plan([Assignment(self.name, state.round, None, "server", self.evaluation)], "model")
        return replace(merged, evaluation=PostRoundEvaluation(plan, lambda _result: ()))


class Setting:
    """A loop over fake stages in a results folder."""

    def __init__(self, root: Path) -> None:
        self.writer = RunWriter.create(root, "tiny", "run-1")
        self.paths = self.writer.paths

    def loop(self, *stages: Any, executor: Executor | None = None, **changes: Any) -> Loop:
        values: dict[str, Any] = {
            "execution": ExecutorConfig(kind="serial"),
            "checkpoint": CheckpointConfig(),
            "deadline_s": None,
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
    assert message.startswith("train, round 2: client 2 (tier1) failed: OSError: the battery is empty")
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
    state = setting.loop(stage, **failing("retry", attempts=3)).run(RunState())
    assert state.weights("model")["w"].tolist() == [3.0, 3.0]
    clients = setting.table("clients")
    assert set(clients["status"]) == {"ok"}
    assert clients[clients["attempts"] > 1][["round", "client_id", "attempts"]].to_numpy().tolist() == [[1, 2, 3]]


def test_policy_retry_gives_up_in_the_end(setting: Setting) -> None:
    stage = Counting(four(c2=Add(fails_in=(1,))))
    with pytest.raises(RunFailedError, match=r"client 2 \(tier1\) failed"):
        setting.loop(stage, **failing("retry", max_share=1.0)).run(RunState())
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
    stage = Counting({**four(c1=Add(fails_in=(1,)), c2=Add(fails_in=(1,))), None: Add()})  # the server is no client
    with pytest.raises(RunFailedError, match=r"client 1 .*2 of 4 clients failed; policy tolerate, at most 25%"):
        setting.loop(stage, **failing("tolerate")).run(RunState())
    assert setting.table("clients")["status"].tolist().count("failed") == 2


def test_the_servers_own_work_must_not_fail(setting: Setting) -> None:
    stage = Counting({0: Add(), None: Add(fails_in=(0,))})
    with pytest.raises(RunFailedError, match="round 1: the server's own work failed: OSError: the battery is empty"):
        setting.loop(stage, **failing("tolerate", max_share=1.0)).run(RunState())


def test_an_evaluation_that_fails_takes_its_round_along(setting: Setting) -> None:
    stage = Counting(evaluation=Add(fails_in=(1,)))
    with pytest.raises(RunFailedError, match="round 2: the server's own work failed: OSError: the battery is empty"):
        setting.loop(stage, checkpoint=CheckpointConfig(every=100), **failing("tolerate", max_share=1.0)).run(
            RunState()
        )
    saved = setting.saved()
    assert (saved.round, saved.weights("model")["w"].tolist()) == (1, [1.0, 1.0])
    assert setting.table("rounds")["round"].tolist() == [0]


def test_simulated_losses_are_not_failures(setting: Setting) -> None:
    changes: dict[int | None, dict[str, Any]] = {1: {"dropped": "gone"}, 2: {"deadline_s": 1.0}}
    setting.loop(Counting(rounds=1, changes=changes), **failing("stop")).run(RunState())
    assert setting.table("clients")["status"].tolist().count("ok") == 2
    assert {"dropped", "timed_out"} < {*setting.table("clients")["status"]}


class Alone:
    """An executor that trains all clients but the first of each round alone, though a stack was planned."""

    def run(self, chunks: Sequence[Chunk], weights: SharedWeights) -> Iterator[ChunkResult]:
        for place, result in enumerate(SerialExecutor(fake_worker()).run(chunks, weights)):
            yield replace(
                result,
                client_results=[replace(r, fallback="no vmap" if place else None) for r in result.client_results],
            )

    def close(self) -> None:
        """Nothing to release."""


def test_who_is_trained_alone_and_not_in_a_stack_is_warned_of_once(
    setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    setting.loop(Counting(rounds=2), executor=Alone()).run(RunState())
    (text,) = caplog.messages
    assert text.startswith("train, round 1: 3 of 4 clients were not stacked or not compiled as planned")
    assert "the first is client 1: no vmap (all are in the column fallback of clients" in text
    assert setting.table("clients")["fallback"].tolist() == [None, "no vmap", "no vmap", "no vmap"] * 2


class BrokenDevice(Alone):
    """An executor in the only process that there is, whose GPU fails."""

    def run(self, chunks: Sequence[Chunk], weights: SharedWeights) -> Iterator[ChunkResult]:
        yield from ()
        raise DeviceLostError("AcceleratorError: CUDA error: unspecified launch failure")


def test_a_process_that_loses_its_device_ends_the_run_in_one_line(setting: Setting) -> None:
    with pytest.raises(RunFailedError, match=r"the device of this process fails \(Acc.*: CUDA .*\): resume the run"):
        setting.loop(Counting(), executor=BrokenDevice()).run(RunState())


class Hanging:
    """An executor whose second client never answered in real time."""

    def run(self, chunks: Sequence[Chunk], weights: SharedWeights) -> Iterator[ChunkResult]:
        for chunk, result in zip(chunks, SerialExecutor(fake_worker()).run(chunks, weights), strict=True):
            if chunk.assignments[0].client_id == 1:
                result = ChunkResult(
                    client_results=[nothing_done("timed_out", "no answer within 3 s", client_id=1, tier="tier1")]
                )
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

    def merge(self, state: RunState, plan: Plan, result: RoundResult, /) -> RoundUpdate:
        if state.round == 1:
            raise ValueError("no such value")
        return super().merge(state, plan, result)


def test_a_value_that_a_stage_cannot_work_with_is_a_failure_not_a_refusal(setting: Setting) -> None:
    with pytest.raises(RunFailedError, match=r"^train, round 2: no such value \(line \d+ of test_loop_failures.py\)$"):
        setting.loop(Refusing()).run(RunState())


# -- stopping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 2, 100])
def test_a_stopped_run_has_every_finished_round_in_its_checkpoint(setting: Setting, every: int) -> None:
    rounds = iter([False, False, True])
    with pytest.raises(InterruptedRunError, match="stopped after round 3 of train"):
        setting.loop(
            Counting(rounds=5), checkpoint=CheckpointConfig(every=every), should_stop=lambda: next(rounds)
        ).run(RunState())
    saved = setting.saved()
    assert saved.round == 3
    assert saved.weights("model")["w"].tolist() == [3.0, 3.0]


@dataclass(frozen=True)
class Interrupted(Add):
    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
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

    def spy(folder: Path, groups: Any, data: dict[str, Any], *others: Any) -> Any:
        written.append((data["stage"], data["round"]))
        return save(folder, groups, data, *others)

    monkeypatch.setattr(recorder_module, "save_checkpoint", spy)
    setting.loop(Counting(rounds=5), checkpoint=CheckpointConfig(every=2)).run(RunState())
    assert written == [(0, 2), (0, 4), (1, 0)]


def test_a_number_as_a_key_of_the_state_s_values_is_refused_before_a_resume_reads_it_as_a_text(
    setting: Setting,
) -> None:
    @dataclass
    class Numbered(Counting):
        def merge(self, state: RunState, plan: Plan, result: RoundResult, /) -> RoundUpdate:
            merged = super().merge(state, plan, result)
            return replace(merged, state=merged.state.with_data("counts", {3: 1}))

    with pytest.raises(ValueError, match=r"^state.data\['counts'\] has the key 3: give a text, such as '3'$"):
        setting.loop(Numbered()).run(RunState())
