"""Two nodes of one CPU each, on one machine: the results are those of one process, whatever happens to a node."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
import ray
import torch
from ray import cloudpickle
from ray.cluster_utils import Cluster
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from fedloom.actors.actor_set import Member
from fedloom.actors.client import ADD, WATCH, ClientActor, place
from fedloom.actors.placement import ActorGroup, bundles_of, can_grow, free_rooms, total
from fedloom.actors.pool import ActorPool, Block, Work
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
from fedloom.platform.federation.config import ExecutorConfig, RunConfig
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
    wait_until(lambda: free_cpus() == 2.0, "both CPUs to be free")
    return node


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory, own_cache: Path) -> WorkerSpec:
    from fedloom.experiments.runs.configuration import compose_config

    few = ["tiers.count=2", "tiers.paths=1000", "space.stem_channels=8", "data.num_clients=8"]
    return build_world(compose_config(["experiment=fedoras_digits", *few])).spec


def free_cpus() -> float:
    return total(list(free_rooms().values()))["CPU"]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, f"waited in vain for {what}"
        time.sleep(0.02)


def planned(tasks: Sequence[Task]) -> list[Chunk]:
    return make_chunks([Assignment("train", 3, i, "tier1", task) for i, task in enumerate(tasks)], 1)


def serially(spec: WorkerSpec, tasks: Sequence[Task], together: int = 1) -> RoundResult:
    results = SerialExecutor(Worker(spec)).run(planned(tasks), SharedWeights(OLD, "w@0"))
    return merge_chunks(results, together=together)


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
    config = tiny_config(executor=ExecutorConfig(sum_chunks=2))
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


def test_a_run_starts_without_the_actors_that_have_no_node_and_uses_one_that_joins_in_the_round_in_progress(
    spec: WorkerSpec,
    cluster: Cluster,
    second_node: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tasks = [Adds(0.1 * (i + 1)) for i in range(8)]
    monkeypatch.setattr("fedloom.actors.pool.SLOW_START_S", 0.5)
    pool = ActorPool(spec, [ActorGroup("clients", 3, 1.0, 0.0)], most=4)
    (message,) = [r.getMessage() for r in caplog.records if "client actors have" in r.getMessage()]
    assert re.fullmatch(
        r"[012] of 3 client actors have a process after 0\.5 s; [123] of 1 CPUs wait for a node with room "
        r"\(free: [01] of 1 CPUs on [^ ]+; [01] of 1 CPUs on [^ ]+\): the run starts without them, as soon as each "
        "group has one",
        message,
    )
    third = None
    try:
        held = [
            replace(chunk, assignments=tuple(replace(a, task=Waits(a.task, str(tmp_path))) for a in chunk.assignments))
            for chunk in planned(tasks)
        ]
        results = pool.run(held, SharedWeights(OLD, "w@0"))
        wait_until(lambda: len(list(tmp_path.glob("at work *"))) == 2, "both actors to be at work")
        third = cluster.add_node(**{**NODE, "num_cpus": 3})

        def open_when_four_are_at_work() -> None:
            wait_until(lambda: len(list(tmp_path.glob("at work *"))) == 4, "the new node's actors to be at work")
            (tmp_path / "open").touch()

        waiting = threading.Thread(target=open_when_four_are_at_work)
        waiting.start()
        result = merge_chunks(results)
        waiting.join()
        assert_same_round(result, serially(spec, tasks))
        assert len({r.node for r in result.client_results}) == 3
        assert len(pool.actors.members) == 4, "not one for each of the three CPUs"
    finally:
        pool.close()
        if third is not None:
            cluster.remove_node(third)


class Pretends(ClientActor):
    """An actor that takes the GPU that Ray gives it for a CPU."""

    def __init__(self, spec: WorkerSpec, gpu_share: float, name: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fedloom.actors.client.assigned_device", lambda _share: "cpu")
            super().__init__(spec, gpu_share, name)


@pytest.mark.slow
def test_shares_of_a_gpu_are_placed_on_the_node_that_has_one(
    spec: WorkerSpec,
    tiny_config: Config,
    cluster: Cluster,
    second_node: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Three CPUs and a GPU on one of three nodes: one actor there, or as many as there are residents."""
    monkeypatch.setattr(
        "fedloom.actors.actor_set.RemoteClient", ray.remote(concurrency_groups={WATCH: 1, ADD: 1})(Pretends)
    )
    config = tiny_config()
    results = Path(config.results)
    serial = start_run(config, make_serial)
    third = cluster.add_node(**NODE, num_gpus=1)
    its_place = place(os.uname().nodename, third.node_id)
    try:
        config = replace(config, tiers=replace(config.tiers, num_gpus=0.5))
        world = build_world(config)
        on_gpu = start_run(config, make_pool)
        assert_same_run(results, serial, on_gpu)
        assert set(read_table(results, "clients", run_id=on_gpu)["node"]) == {its_place}

        resident = replace(config, executor=replace(config.executor, resident=True))
        pool = make_pool(replace(world, config=resident))
        try:
            tasks = [Adds(0.5), Adds(0.25), Adds(0.125)]
            result = merge_chunks(pool.run(planned(tasks), SharedWeights(OLD, "w@0")))
            assert_same_round(result, serially(spec, tasks))
            assert {r.node for r in result.client_results} == {its_place}
            assert len({r.steps for r in result.client_results}) == 3
        finally:
            pool.close()
        assert "9 actors, each with 0.1111 of a GPU instead of 0.5, so that all fit" in caplog.text
    finally:
        cluster.remove_node(third)


def fail() -> None:
    raise ValueError("an object is lost")


class LosesSums(ActorPool):
    """Loses the sums of the first block, and who was to add those of the next one."""

    blocks = 0

    def _add(self, work: Work, block: Block, but: Member | None = None) -> None:
        member = self.actors.up_on(block.node_id, but)
        assert member is not None
        self.blocks += 1
        if self.blocks == 1:
            work.adding[ray.remote(fail).options(num_cpus=0).remote()] = (block, member)
            return
        if self.blocks == 2:
            ray.kill(member.actor)
            with suppress(RayError):
                while True:  # it may still answer
                    ray.get(member.actor.position.remote())
        super()._add(work, block, but)


def test_sums_that_are_lost_are_computed_again_and_those_whose_adder_is_lost_are_not(
    spec: WorkerSpec, cluster: Cluster, second_node: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tasks = [Adds(value) for value in (1e8, 1.0, -1e8, 1.0, 3.0)]
    pool = LosesSums(spec, [ActorGroup("clients", 2, 1.0, 0.0)], sum_chunks=2)
    try:
        result = merge_chunks(pool.run(planned(tasks), SharedWeights(OLD, "w@0")), together=2)
        assert_same_round(result, serially(spec, tasks, together=2))
        assert pool.blocks == 5, "one is repeated, one is added by another"
        wait_until(lambda: len(pool.actors.members) == 2, "the lost actor to be replaced")
    finally:
        pool.close()
    assert len(re.findall("the sums of [12] chunks are lost: ", caplog.text)) == 1


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
        pool.looks = 0
        monkeypatch.setattr("fedloom.actors.pool.START_TIMEOUT_S", 1.0)
        loser = LosesANode(pool, cluster, second_node, tmp_path, "train", 3, at_work=1)
        result = merge_chunks(loser.run(planned([Adds(1.0)] * 3), SharedWeights(OLD, "w@0")))
        reason = (
            "no client actor (clients) of 1 CPUs came up within 1 s (no node has room for it: free: 0 of 1 CPUs on "
            f"{place(os.uname().nodename, ray.get_runtime_context().get_node_id())}): "
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

    def sees(self) -> tuple[list[float], dict[str, Any]]:
        """The free CPUs of its bundles, and where a server would be placed."""
        return [room["CPU"] for room in free_rooms().values()], _where_results_are("results")

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
        assert ray.get(trial.sees.remote(), timeout=PATIENCE_S) == ([0.5, 0.5, 0.5], {})
        assert ray.get(with_cpus.sees.remote(), timeout=PATIENCE_S) == ([0.0, 0.5, 0.5], {})
        (tmp_path / "open").touch()
        tasks = [Waits(Adds(float(i)), str(tmp_path)) for i in range(6)]
        did = ray.get(trial.work.remote(groups, tasks), timeout=PATIENCE_S)
        assert {of_group for _, of_group in did} == {placement.id.hex()}
        pids = {pid for pid, _ in did}
        assert pids
    finally:
        remove_placement_group(placement)
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), "the clients to end")
    wait_until(lambda: free_cpus() == 2.0, "the group's CPUs to be free")


def test_the_server_is_placed_on_the_drivers_node_if_the_results_are(cluster: Cluster, second_node: Any) -> None:
    strategy = _where_results_are("results")["scheduling_strategy"]
    assert (strategy.node_id, strategy.soft) == (ray.get_runtime_context().get_node_id(), False)
    assert _where_results_are("s3://bucket/results") == {}
    assert len(free_rooms()) == 2
    assert not can_grow()


# -- a cluster that grows ----------------------------------------------------------------------------------------------


@pytest.fixture
def growing(no_ray_cluster: None, tmp_path: Path) -> Iterator[str]:
    """The address of a cluster without any CPU, whose autoscaler starts nodes of two CPUs on this machine."""
    ray.shutdown()  # the other tests are done
    folder = tempfile.mkdtemp(prefix="fl-")
    types = {
        "head": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
        "small": {
            "resources": {"CPU": 2, "object_store_memory": 100_000_000},
            "node_config": {},
            "min_workers": 0,
            "max_workers": 1,
        },
    }
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = f"{ray.util.get_node_ip_address()}:{held.getsockname()[1]}"
    config = {
        "cluster_name": "growing",
        "max_workers": 1,
        "idle_timeout_minutes": 1,
        "provider": {"type": "fake_multinode", "gcs_address": address},
        "available_node_types": types,
        "head_node_type": "head",
        **{key: {} for key in ("docker", "auth", "file_mounts")},
        **{key: [] for key in ("cluster_synced_files", "rsync_exclude", "rsync_filter", "initialization_commands")},
        **{f"{of}setup_commands": [] for of in ("", "head_", "worker_")},
        **{f"{of}_start_ray_commands": [] for of in ("head", "worker")},
    }
    (tmp_path / "growing.json").write_text(json.dumps(config))
    environment = {**os.environ, "RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_TMPDIR": folder}
    environment["RAY_AUTH_MODE"] = "disabled"
    ray_command = shutil.which("ray", path=str(Path(sys.executable).parent))
    assert ray_command is not None
    command = [ray_command, "start", "--head", "--block", "--num-cpus=0", "--include-dashboard=false"]
    command += [f"--port={address.rpartition(':')[2]}", "--object-store-memory=100000000"]
    command += [f"--autoscaling-config={tmp_path / 'growing.json'}"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield address
    finally:
        ray.shutdown()
        of_cluster = psutil.Process(process.pid).children(recursive=True)
        for each in (psutil.Process(process.pid), *of_cluster):
            with suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
def test_a_cluster_that_has_nothing_grows_for_a_run_with_the_bits_of_one_process(
    growing: str, tiny_config: Config
) -> None:
    config = tiny_config()
    serial = start_run(config, make_serial)

    def connect() -> bool:
        with suppress(ConnectionError, ValueError):
            ray.init(address=growing, log_to_driver=False)
        return ray.is_initialized()

    wait_until(connect, "the cluster to start")
    wait_until(can_grow, "its autoscaler to say so")
    assert free_cpus() == 0
    told: list[str] = []
    grown = start_run(config, partial(make_pool, tell=told.append))
    assert told == [
        "asking this cluster to grow: 1 client actors of 1 CPUs need 1 CPUs, the cluster has 0 free: lower "
        "executor.actors or give Ray more CPUs (ray.num_cpus)"
    ]
    assert_same_run(Path(config.results), serial, grown)
