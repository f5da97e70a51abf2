"""What a client keeps between rounds goes in and comes out, whichever actor it meets, and survives a resumed run."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray
import torch

from fedloom.actors.placement import ActorGroup
from fedloom.actors.pool import ActorPool
from fedloom.actors.wire import accept_shared_memory
from fedloom.experiments.runs.configuration import compose_config
from fedloom.platform.clients.assignments import Assignment, ClientResult
from fedloom.platform.clients.execution import Executor, SerialExecutor
from fedloom.platform.clients.worker import Worker, WorkerSpec
from fedloom.platform.federation.building import build_world
from fedloom.platform.federation.config import CheckpointConfig, ExecutorConfig
from fedloom.platform.federation.loop import InterruptedRunError, Loop
from fedloom.platform.federation.recorder import Recorder, restored_state
from fedloom.platform.federation.stage import Plan, RoundResult, RoundUpdate
from fedloom.platform.federation.state import RunState
from fedloom.platform.results.checkpoint import load_checkpoint
from fedloom.platform.results.status import StatusFile
from fedloom.platform.results.writer import RunWriter
from fedloom.platform.spaces.slices import Weights

ROUNDS, CLIENTS = 4, 3


@dataclass(frozen=True)
class Count:
    """Counts how often its client was asked, in the client's own state."""

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        before = torch.zeros((), dtype=torch.int64) if assignment.state is None else assignment.state["asked"]
        asked = before + 1
        return ClientResult(samples=1, metric=float(asked), state={"asked": asked})


class Counting:
    """A stage in which every client counts in every round."""

    name = "counting"

    def begin(self, state: RunState) -> RunState:
        return state.with_bag("nothing", {"zero": torch.zeros(1)})

    def rounds_left(self, state: RunState) -> int:
        return ROUNDS - state.round

    def plan(self, state: RunState) -> Plan:
        clients = [(i + state.round) % CLIENTS for i in range(CLIENTS)]  # another order, another actor
        tasks = [Assignment(self.name, state.round, c, "tier1", Count()) for c in clients]
        return Plan(tasks, "nothing")

    def merge(self, state: RunState, _plan: Plan, result: RoundResult) -> RoundUpdate:
        asked = [report.metric for report in result.client_results]
        assert asked == [state.round + 1] * CLIENTS, asked
        return RoundUpdate(state)

    def end(self, state: RunState) -> RoundUpdate:
        return RoundUpdate(state)


@pytest.fixture(scope="module")
def spec() -> WorkerSpec:
    return build_world(compose_config(["experiment=fedoras_digits", "space.stem_channels=4", "tiers.paths=500"])).spec


@pytest.fixture(params=["serial", "actors"])
def executor(request: pytest.FixtureRequest, spec: WorkerSpec, ray_cluster: None) -> Iterator[Executor]:
    if request.param == "serial":
        yield SerialExecutor(Worker(spec))
        return
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    accept_shared_memory()
    pool = ActorPool(spec, [ActorGroup("clients", 2, 1.0, 0.0)])
    yield pool
    pool.close()


def run(executor: Executor, writer: RunWriter, state: RunState, stop_after: int) -> RunState:
    rounds: list[object] = []
    loop = Loop(
        [Counting()],
        executor,
        Recorder(writer),
        StatusFile(writer.paths.status),
        execution=ExecutorConfig(),
        checkpoint=CheckpointConfig(),
        deadline_s=None,
        should_stop=lambda: rounds.append(1) or len(rounds) == stop_after,  # type: ignore[func-returns-value]
    )
    return loop.run(state)


@pytest.mark.ray
def test_a_client_counts_on_over_actors_and_a_resumed_run(executor: Executor, tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path, "counting", "run1")
    with pytest.raises(InterruptedRunError):
        run(executor, writer, RunState(), stop_after=2)
    checkpoint = load_checkpoint(writer.paths.checkpoint)
    state = restored_state(checkpoint.data, checkpoint.bags)
    assert state.round == 2
    end = run(executor, writer, state, stop_after=0)
    for client in range(CLIENTS):
        kept = end.client_state(client)
        assert kept is not None
        assert kept["asked"].item() == ROUNDS
