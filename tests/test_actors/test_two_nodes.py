"""Two nodes of one CPU each, on one machine: the results are those of one process, whatever happens to a node."""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
import ray
import torch
from ray import cloudpickle
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from fedloom.actors.placement import ActorGroup, bundles_of, free_resources, nodes_to_fill
from fedloom.actors.pool import ActorPool
from fedloom.actors.server import make_pool
from fedloom.experiments.runs.launch import _where_results_are
from fedloom.platform.averaging.average import Update
from fedloom.platform.clients.assignments import Assignment, ClientResult, Task
from fedloom.platform.clients.execution import (
    Chunk,
    ChunkResult,
    SerialExecutor,
    SharedWeights,
    make_chunks,
)
from fedloom.platform.clients.worker import Worker, WorkerSpec
from fedloom.platform.federation.algorithm import RoundResult
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.loop import merge_chunks
from fedloom.platform.federation.world import World, build_world
from fedloom.platform.results.checkpoint import load_checkpoint
from fedloom.platform.results.paths import find_run
from fedloom.platform.results.tables import TABLES, TIME_COLUMNS, read_table
from fedloom.platform.runs.run import make_serial, start_run
from fedloom.platform.spaces.slices import Slice, Weights

pytestmark = pytest.mark.ray

# The workers cannot import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

Config = Callable[..., RunConfig]

OLD = {"w": torch.zeros(3)}
PLACES = {"w": Slice("w")}
NODE = {"num_cpus": 1, "object_store_memory": 100_000_000}
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Waits:
    """A client that says that it is at work, waits until it is let go, and then does another's task."""

    task: Task
    gate: str

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        Path(self.gate, f"at work {os.getpid()}").touch()
        while not Path(self.gate, "open").exists():
            time.sleep(0.01)
        return self.task.run(worker, assignment, weights)


@dataclass(frozen=True)
class Adds:
    """Returns its value, its process and its placement group."""

    value: float

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        group = ray.util.get_current_placement_group() if ray.is_initialized() else None
        update = Update({"w": weights["w"] + self.value}, PLACES, {"w": 1.0})
        subspace = group.id.hex() if group is not None else None
        return ClientResult(update=update, samples=1, steps=os.getpid(), loss=self.value, subspace=subspace)


@pytest.fixture(scope="module")
def cluster(no_ray_cluster: None) -> Iterator[Cluster]:
    """The driver's node; its files are kept away from other clusters', which would else be taken for this one."""
    folder = tempfile.mkdtemp(prefix="fl-")  # short: the paths of sockets must not be long
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
        try:
            ray.init(address=cluster.address, log_to_driver=False)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def second_node(cluster: Cluster) -> Any:
    """A node beside the driver's, a new one if a test has removed it."""
    node = next(iter(cluster.worker_nodes), None) or cluster.add_node(**NODE)
    wait_until(lambda: free_resources().get("CPU") == 2.0, "both CPUs to be free")
    return node


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory, own_cache: Path) -> WorkerSpec:
    from fedloom.experiments.runs.configuration import compose_config

    few = ["tiers.count=2", "tiers.paths=1000", "space.stem_channels=8", "data.num_clients=8"]
    return build_world(compose_config(["experiment=fedoras_digits", *few])).spec


def wait_until(condition: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, f"waited in vain for {what}"
        time.sleep(0.02)


def planned(tasks: Sequence[Task]) -> list[Chunk]:
    return make_chunks([Assignment("train", 3, i, "tier1", task) for i, task in enumerate(tasks)], 1)


def serially(spec: WorkerSpec, tasks: Sequence[Task]) -> RoundResult:
    return merge_chunks(SerialExecutor(Worker(spec)).run(planned(tasks), SharedWeights(OLD, "w@0")))


def assert_same_round(result: RoundResult, expected: RoundResult) -> None:
    assert [(r.client_id, r.status, r.loss) for r in result.client_results] == [
        (r.client_id, r.status, r.loss) for r in expected.client_results
    ]
    assert torch.equal(result.sums.finish(OLD).weights["w"], expected.sums.finish(OLD).weights["w"])


def assert_same_run(results: Path, first: str, second: str) -> None:
    """The same rows, time columns aside, and the same weights, bit for bit."""
    for table in TABLES:
        aside = [*TIME_COLUMNS[table], "run_id", "experiment", *(["config"] if table == "runs" else [])]
        a, b = (read_table(results, table, run_id=run).drop(columns=aside) for run in (first, second))
        assert len(a), f"table {table} is empty"
        pd.testing.assert_frame_equal(a, b, check_exact=True, obj=table)
    groups = [load_checkpoint(find_run(results, run).checkpoint).groups for run in (first, second)]
    assert groups[0].keys() == groups[1].keys()
    for name, group in groups[0].items():
        for tensor, value in group.tensors.items():
            assert value.numpy().tobytes() == groups[1][name].tensors[tensor].numpy().tobytes(), f"{name}: {tensor}"


@dataclass
class LosesANode:
    """An executor whose second node is removed while both nodes are at work in a round."""

    pool: ActorPool
    cluster: Cluster
    node: Any
    gate: Path
    stage: str = "supernet"
    round: int = 1
    at_work: int = 2

    def run(self, chunks: Sequence[Chunk], weights: SharedWeights) -> Iterator[ChunkResult]:
        first, opened = chunks[0].assignments[0], self.gate / "open"
        if (first.stage, first.round) != (self.stage, self.round) or opened.exists():
            return self.pool.run(chunks, weights)  # another round, or what is scored after this one
        held = [self._held(chunk) for chunk in chunks]
        results = self.pool.run(held, weights)
        wait_until(lambda: len(list(self.gate.glob("at work *"))) == self.at_work, "the clients to be at work")
        self.cluster.remove_node(self.node)
        opened.touch()
        return results

    def _held(self, chunk: Chunk) -> Chunk:
        first, *rest = chunk.assignments
        return replace(chunk, assignments=(replace(first, task=Waits(first.task, str(self.gate))), *rest))

    def close(self) -> None:
        self.pool.close()


def test_two_nodes_give_the_bits_of_one_process_and_a_node_lost_in_a_round_changes_nothing(
    tiny_config: Config, cluster: Cluster, second_node: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_config()
    results = Path(config.results)
    serial = start_run(config, make_serial)
    nodes = {f"{os.uname().nodename}/{node['NodeID'][:8]}" for node in ray.nodes() if node["Alive"]}
    assert len(nodes) == 2

    def make(world: World) -> LosesANode:
        return LosesANode(make_pool(world), cluster, second_node, tmp_path)

    on_one_from_then = start_run(config, make)
    assert_same_run(results, serial, on_one_from_then)
    lost = [r.message for r in caplog.records if "a client actor on node" in r.message]
    assert len(lost) == 1
    assert "supernet round 2" in lost[0]
    clients = read_table(results, "clients", run_id=on_one_from_then)
    nodes_of = {(s, r): set(rows["node"]) for (s, r), rows in clients.groupby(["stage", "round"])}
    assert nodes_of[("supernet", 0)] == nodes
    assert len(nodes_of[("supernet", 1)]) == 1
    assert set(read_table(results, "clients", run_id=serial)["node"]) == {os.uname().nodename}


def test_nobody_waits_for_a_lost_nodes_actor_and_a_new_nodes_takes_part(
    spec: WorkerSpec, cluster: Cluster, second_node: Any, tmp_path: Path
) -> None:
    tasks = [Adds(0.1 * (i + 1)) for i in range(5)]
    pool = ActorPool(spec, [ActorGroup("clients", 2, 1.0, 0.0)], actor_attempts=2)
    try:
        weights = SharedWeights(OLD, "w@0")
        gate = tmp_path / "first"
        gate.mkdir()
        loser = LosesANode(pool, cluster, second_node, gate, "train", 3)
        assert_same_round(merge_chunks(loser.run(planned(tasks), weights)), serially(spec, tasks))
        # The actor that has no node is not waited for: this round is done by the other.
        assert len({r.node for r in merge_chunks(pool.run(planned(tasks), weights)).client_results}) == 1
        cluster.add_node(**NODE)
        wait_until(
            lambda: len({r.node for r in merge_chunks(pool.run(planned(tasks), weights)).client_results}) == 2,
            "the new node's actor to take part",
        )
    finally:
        pool.close()


def test_a_resident_client_comes_up_elsewhere_when_its_node_is_lost(
    spec: WorkerSpec, cluster: Cluster, second_node: Any, tmp_path: Path
) -> None:
    tasks = [Adds(0.5), Adds(0.25)]
    pool = ActorPool(spec, [ActorGroup("clients", 1, 1.0, 0.0)], resident=True)
    try:
        weights = SharedWeights(OLD, "w@0")
        assert len({r.node for r in merge_chunks(pool.run(planned(tasks), weights)).client_results}) == 2
        loser = LosesANode(pool, cluster, second_node, tmp_path, "train", 3)
        result = merge_chunks(loser.run(planned(tasks), weights))
        assert_same_round(result, serially(spec, tasks))
        assert len({r.node for r in result.client_results}) == 1
        assert len({r.steps for r in result.client_results}) == 2
    finally:
        pool.close()


class CountsLooks(ActorPool):
    """Counts how often it looks for an actor that has come up."""

    looks = 0

    def _await_starts(self, timeout_s: float) -> None:
        self.looks += 1
        super()._await_starts(timeout_s)


class Holds:
    """Takes a CPU."""

    def ready(self) -> bool:
        return True


def test_clients_fail_with_the_reason_if_no_actor_comes_up(
    spec: WorkerSpec, cluster: Cluster, second_node: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only actor is lost and the CPU of the node that is left is taken."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    holder = ray.remote(Holds).options(num_cpus=1, scheduling_strategy=here).remote()
    pool = None
    try:
        ray.get(holder.ready.remote(), timeout=PATIENCE_S)
        pool = CountsLooks(spec, [ActorGroup("clients", 1, 1.0, 0.0)], actor_attempts=2)
        monkeypatch.setattr("fedloom.actors.pool.START_TIMEOUT_S", 1.0)
        loser = LosesANode(pool, cluster, second_node, tmp_path, "train", 3, at_work=1)
        result = merge_chunks(loser.run(planned([Adds(1.0)] * 3), SharedWeights(OLD, "w@0")))
        reason = (
            "no client actor (clients) of 1 CPUs came up within 1 s (no free CPUs, or no node that can run it): "
            "add a node or end what uses the cluster, and resume the run"
        )
        assert [(r.client_id, r.status, r.error) for r in result.client_results] == [
            (i, "failed", reason) for i in range(3)
        ]
        assert pool.looks <= 6, "it spins"
    finally:
        if pool is not None:
            pool.close()
        ray.kill(holder)


class Trial:
    """As an ablation's trial: the actor in whose placement group the clients are."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.pool: ActorPool | None = None
        self.spec = spec

    def sees(self) -> tuple[dict[str, float], int, dict[str, Any]]:
        """Free resources, the nodes to fill, and where a server would be placed."""
        return free_resources(), nodes_to_fill(), _where_results_are("results")

    def work(self, groups: Sequence[ActorGroup], tasks: Sequence[Task]) -> list[tuple[int, str | None]]:
        """Starts a pool; processes and placement groups of those who did the tasks."""
        self.pool = ActorPool(self.spec, groups)
        result = merge_chunks(self.pool.run(planned(tasks), SharedWeights(OLD, "w@0")))
        return [(report.steps, report.subspace) for report in result.client_results]


def test_in_a_placement_group_the_clients_are_in_it_and_end_with_it(
    spec: WorkerSpec, cluster: Cluster, second_node: Any, tmp_path: Path
) -> None:
    groups = [ActorGroup("clients", 2, 0.5, 0.0)]
    placement = placement_group([{"CPU": 0.5}, *bundles_of(groups)])
    strategy = PlacementGroupSchedulingStrategy(placement, 0, placement_group_capture_child_tasks=True)
    remote = ray.remote(Trial)
    trial = remote.options(num_cpus=0, scheduling_strategy=strategy).remote(spec)
    with_cpus = remote.options(num_cpus=0.5, scheduling_strategy=strategy).remote(spec)
    try:
        assert ray.get(trial.sees.remote(), timeout=PATIENCE_S) == ({"CPU": 1.5}, 1, {})
        assert ray.get(with_cpus.sees.remote(), timeout=PATIENCE_S) == ({"CPU": 1.0}, 1, {})
        (tmp_path / "open").touch()
        tasks = [Waits(Adds(float(i)), str(tmp_path)) for i in range(6)]
        did = ray.get(trial.work.remote(groups, tasks), timeout=PATIENCE_S)
        assert {of_group for _, of_group in did} == {placement.id.hex()}
        pids = {pid for pid, _ in did}
        assert pids
    finally:
        remove_placement_group(placement)
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), "the clients to end")
    wait_until(lambda: free_resources().get("CPU") == 2.0, "the group's CPUs to be free")


def test_the_server_is_placed_on_the_drivers_node_if_the_results_are(cluster: Cluster, second_node: Any) -> None:
    strategy = _where_results_are("results")["scheduling_strategy"]
    assert (strategy.node_id, strategy.soft) == (ray.get_runtime_context().get_node_id(), False)
    assert _where_results_are("s3://bucket/results") == {}
    assert nodes_to_fill() == 2
