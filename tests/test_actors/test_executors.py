"""One class of tests for every executor: what they promise does not depend on where the work runs."""

import logging
import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray import cloudpickle
from ray.exceptions import ActorDiedError

from fedloom.actors.actor_set import RESTART_S, ActorSet, cause_of
from fedloom.actors.client import About, PackedResult, RemoteClient, unpack
from fedloom.actors.placement import ActorGroup
from fedloom.actors.pool import ActorPool, Work
from fedloom.experiments.runs.configuration import compose_config
from fedloom.platform.averaging.average import Update
from fedloom.platform.clients.assignments import Assignment, ClientResult, Task, TaskError
from fedloom.platform.clients.device import DeviceLostError
from fedloom.platform.clients.execution import (
    ChunkResult,
    Executor,
    SerialExecutor,
    SharedWeights,
    make_chunks,
)
from fedloom.platform.clients.worker import Worker, WorkerSpec
from fedloom.platform.federation.loop import RunFailedError, merge_chunks
from fedloom.platform.federation.world import build_world
from fedloom.platform.spaces.slices import Slice, Weights

pytestmark = pytest.mark.ray

# The workers cannot import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

OLD = {"w": torch.zeros(3)}
PLACES = {"w": Slice("w")}


@dataclass(frozen=True)
class Adds:
    """Returns the shared weights plus a value, after a nap."""

    value: float
    nap_s: float = 0.0

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        time.sleep(self.nap_s)
        tensor = weights["w"] + self.value
        return ClientResult(update=Update({"w": tensor}, PLACES, {"w": 1.0}), samples=2, loss=self.value)


@dataclass(frozen=True)
class Refuses:
    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        raise TaskError("too tired")


@dataclass(frozen=True)
class Counts:
    """A client whose state counts how often it took part."""

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        before = assignment.state["count"] if assignment.state else torch.tensor(0)
        return ClientResult(samples=1, state={"count": before + 1})


@dataclass(frozen=True)
class Looks:
    """Tells what it finds: threads, and where the client's data lies."""

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        opened = id(worker.data)
        return ClientResult(samples=torch.get_num_threads(), steps=os.getpid(), loss=float(opened))


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory, own_cache: Path) -> WorkerSpec:
    few = ["tiers.count=2", "tiers.paths=1000", "space.stem_channels=8", "data.num_clients=8"]
    return build_world(compose_config(["experiment=fedoras_digits", *few])).spec


@pytest.fixture(scope="module", params=["serial", "two actors"])
def executor(request: pytest.FixtureRequest, spec: WorkerSpec, ray_cluster: None) -> Iterator[Executor]:
    made: Executor
    if request.param == "serial":
        made = SerialExecutor(Worker(spec))
    else:
        made = ActorPool(spec, [ActorGroup("clients", 2, 1.0, 0.0)])
    yield made
    made.close()


def planned(tasks: Sequence[Task], **changes: Any) -> list[Assignment]:
    return [Assignment("train", 0, i, f"tier{1 + i // 4}", task, **changes) for i, task in enumerate(tasks)]


def run(executor: Executor, plan: Sequence[Assignment], size: int, old: Weights = OLD) -> list[ChunkResult]:
    version = f"w@{float(old['w'].sum())}"
    return list(executor.run(make_chunks(plan, size), SharedWeights(old, version)))


def reports_of(results: Sequence[ChunkResult]) -> list[ClientResult]:
    return [report for result in results for report in result.client_results]


# First in this file, while no pool holds the two CPUs.
def test_torchs_threads_are_the_actors_cpus(spec: WorkerSpec, ray_cluster: None) -> None:
    actor = RemoteClient.options(num_cpus=2).remote(replace(spec, threads=2), 0.0)
    try:
        about = ray.get(actor.about.remote(), timeout=60)
        assert about.threads == 2
        chunk = make_chunks(planned([Looks()]), 1)[0]
        packed = ray.get(actor.run_chunk.remote(chunk, [ray.put({})], "w@0"), timeout=60)
        assert (packed.client_results[0].samples, packed.client_results[0].threads) == (2, 2)
    finally:
        ray.kill(actor)


class TestEveryExecutor:
    def test_results_come_in_the_order_of_the_plan_not_of_finishing(self, executor: Executor) -> None:
        naps = [0.3, 0.0, 0.2, 0.0, 0.1, 0.0, 0.0]
        results = run(executor, planned([Adds(float(i), nap_s) for i, nap_s in enumerate(naps)]), 1)
        assert [report.client_id for report in reports_of(results)] == list(range(7))
        assert [report.loss for report in reports_of(results)] == [float(i) for i in range(7)]
        assert all(report.wall_s >= nap_s for report, nap_s in zip(reports_of(results), naps, strict=True))

    def test_a_chunk_holds_its_clients_sums_and_rows(self, executor: Executor) -> None:
        results = run(executor, planned([Adds(float(i)) for i in range(6)]), 3)
        # Chunks never mix tiers: clients 0..3 are in tier1, 4 and 5 in tier2.
        assert [[r.client_id for r in result.client_results] for result in results] == [[0, 1, 2], [3], [4, 5]]
        whole = merge_chunks(results).sums  # merging reads the parts; finishing uses them up
        means = [result.sums.finish(OLD).weights["w"].tolist() for result in results]
        assert means == [[1.0] * 3, [3.0] * 3, [4.5] * 3]
        assert whole.finish(OLD).weights["w"].tolist() == [2.5] * 3

    def test_sums_that_are_added_on_a_node_are_those_that_the_server_would_add(
        self, executor: Executor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        values, sent = [1e8, 1.0, 1.0, -1e8, 1.0, 1.0, 0.7], []

        def unpacked(packed: PackedResult) -> ChunkResult:
            sent.append(sum(total.nbytes for _, total, _ in packed.sums.values()))
            return unpack(packed)

        plan = planned([Adds(value) for value in values])
        expected = merge_chunks(run(executor, plan, 1), together=3).sums.finish(OLD).weights["w"]
        assert not torch.equal(merge_chunks(run(executor, plan, 1)).sums.finish(OLD).weights["w"], expected)
        monkeypatch.setattr("fedloom.actors.pool.unpack", unpacked)
        monkeypatch.setattr(executor, "sum_chunks", 3, raising=False)
        results = run(executor, plan, 1)
        assert [report.loss for report in reports_of(results)] == values
        assert torch.equal(merge_chunks(results, together=3).sums.finish(OLD).weights["w"], expected)
        if isinstance(executor, ActorPool):
            assert sorted(sent) == [0] * 7 + [12] * 3, "three sums of three floats, and not seven"

    def test_each_round_reads_its_own_weights(self, executor: Executor) -> None:
        for value in (10.0, 20.0):
            old = {"w": torch.full((3,), value)}
            results = run(executor, planned([Adds(1.0)] * 3), 1, old)
            assert merge_chunks(results).sums.finish(old).weights["w"].tolist() == [value + 1.0] * 3

    def test_a_failed_client_is_a_row_and_not_in_the_sum(self, executor: Executor) -> None:
        results = run(executor, planned([Adds(1.0), Refuses(), Adds(3.0)]), 3)
        assert [(r.status, r.error) for r in reports_of(results)] == [("ok", ""), ("failed", "too tired"), ("ok", "")]
        assert results[0].sums.finish(OLD).weights["w"].tolist() == [2.0] * 3

    def test_a_dropped_client_is_a_row_and_does_nothing(self, executor: Executor) -> None:
        report = reports_of(run(executor, planned([Adds(1.0)], dropped="left the room"), 1))[0]
        assert (report.status, report.error, report.wall_s) == ("dropped", "left the room", 0.0)

    def test_a_clients_state_comes_back_whoever_does_the_work(self, executor: Executor) -> None:
        state = None
        for expected in range(1, 7):
            # Two clients at once, so that the first one's work moves between the actors.
            plan = planned([Counts(), Adds(0.0, 0.01 * (expected % 2))], state=state)
            report = reports_of(run(executor, plan, 1))[0]
            assert report.state is not None
            state = {name: tensor.clone() for name, tensor in report.state.items()}
            assert int(state["count"]) == expected

    def test_an_empty_plan_gives_nothing(self, executor: Executor) -> None:
        assert run(executor, [], 2) == []

    def test_the_data_is_opened_once_per_worker(self, executor: Executor) -> None:
        reports = reports_of(run(executor, planned([Looks()] * 8), 1) + run(executor, planned([Looks()] * 8), 2))
        assert len({(r.steps, r.loss) for r in reports}) == len({r.steps for r in reports})

    def test_threads_are_those_of_the_specification(self, executor: Executor) -> None:
        reports = reports_of(run(executor, planned([Looks()] * 4), 1))
        assert {(r.threads, r.samples, r.device) for r in reports} == {(1, 1, "cpu")}


def test_an_actor_that_can_never_start_is_a_failed_client(
    spec: WorkerSpec, ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedloom.actors.pool.START_TIMEOUT_S", 0.5)
    pool = ActorPool(spec, [ActorGroup("clients", 1, 99.0, 0.0)], resident=True, actor_attempts=2)
    try:
        (report,) = reports_of(run(pool, planned([Adds(1.0)]), 1))
        assert report.status == "failed"
        assert re.fullmatch(
            r"no client actor \(resident-0\) of 99 CPUs came up within 0\.5 s \(no node has room for it: "
            r"free: [012] of 2 CPUs on [^ ]+\): add a node or end what uses the cluster, and resume the run",
            str(report.error),
        )
    finally:
        pool.close()


@dataclass(frozen=True)
class DiesTwice:
    """Takes its process with it, the first two times."""

    folder: str

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        if len(os.listdir(self.folder)) < 2:
            Path(self.folder, str(os.getpid())).touch()
            time.sleep(0.5)  # until the result of the chunk before it has left the process
            os.kill(os.getpid(), signal.SIGKILL)
        return ClientResult(samples=1)


@dataclass(frozen=True)
class BreaksTheDevice:
    """Fails as CUDA does, for ever in the first process that tries it, and does the task in others."""

    folder: str
    task: Task

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        first = Path(self.folder, "first")
        if not first.exists():
            first.write_text(str(os.getpid()))
        if first.read_text() == str(os.getpid()):
            raise torch.AcceleratorError("CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA`")
        return self.task.run(worker, assignment, weights)


def test_an_actor_whose_device_is_broken_is_replaced_and_its_work_repeated(
    spec: WorkerSpec, ray_cluster: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tasks = [Adds(1.0), Adds(0.1), Adds(0.7)]
    broken = [tasks[0], BreaksTheDevice(str(tmp_path), tasks[1]), tasks[2]]
    pool = ActorPool(spec, [ActorGroup("clients", 1, 0.0, 0.0)])
    try:
        (result,) = run(pool, planned(broken), 3)
        (intact,) = run(pool, planned(tasks), 3)
        (after,) = run(pool, planned([Looks()]), 1)
    finally:
        pool.close()
    assert [report.status for report in result.client_results] == ["ok"] * 3
    assert torch.equal(result.sums.finish(OLD).weights["w"], intact.sums.finish(OLD).weights["w"])
    assert str(after.client_results[0].steps) != (tmp_path / "first").read_text(), "the broken process took more work"
    assert "DeviceLostError: AcceleratorError: CUDA error: device-side assert triggered" in caplog.text
    with pytest.raises(DeviceLostError, match="CUDA error"):  # nobody replaces the only process that there is
        run(SerialExecutor(Worker(spec)), planned([BreaksTheDevice(str(tmp_path / ".."), Adds(1.0))]), 1)


def test_a_lost_node_counts_once_however_many_of_its_actors_had_the_client(
    spec: WorkerSpec, ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = ActorPool(spec, [ActorGroup("clients", 2, 0.0, 0.0)], actor_attempts=2)
    nodes = [{"NodeID": ray.get_runtime_context().get_node_id(), "Alive": False}]
    monkeypatch.setattr("fedloom.actors.actor_set.ray.nodes", lambda: nodes)
    try:
        (report,) = reports_of(run(pool, planned([DiesTwice(str(tmp_path))]), 1))
        assert (report.status, report.error) == ("ok", "")
        assert report.node == f"{os.uname().nodename}/{ray.get_runtime_context().get_node_id()[:8]}"
    finally:
        pool.close()


def test_a_chunk_that_waits_at_an_actor_is_neither_late_nor_blamed_for_its_end(
    spec: WorkerSpec, ray_cluster: None, tmp_path: Path
) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    dying = [DiesTwice(str(tmp_path / name)) for name in ("first", "second")]
    naps = [Adds(1.0, nap_s=1.0), Adds(2.0, nap_s=60.0), Adds(3.0, nap_s=1.0), Adds(4.0)]
    pool = ActorPool(spec, [ActorGroup("clients", 1, 0.0, 0.0)], actor_attempts=2, client_timeout_s=1.9)
    try:
        results = pool.run(make_chunks(planned([*dying, *naps]), 1), SharedWeights(OLD, "w"))
        assert [len(member.jobs) for member in pool.actors.members] == [2], "it has its next chunk already"
        statuses = [report.status for report in reports_of(list(results))]
        assert [len(member.jobs) for member in pool.actors.members] == [0]
    finally:
        pool.close()
    assert statuses == ["ok", "ok", "ok", "timed_out", "ok", "ok"]


class Stops(ActorPool):
    """Its process stands still until all running jobs have finished, for longer than a client may take."""

    def _collect(self, work: Work) -> None:
        ray.wait([*work.running], num_returns=len(work.running), timeout=60)
        for attempt in work.running.values():
            attempt.since_s -= 2 * self.client_timeout_s
        super()._collect(work)


def test_a_client_that_has_finished_is_not_late_however_long_its_result_waits(
    spec: WorkerSpec, ray_cluster: None
) -> None:
    pool = Stops(spec, [ActorGroup("clients", 2, 0.0, 0.0)])
    try:
        reports = reports_of(run(pool, planned([Adds(float(i)) for i in range(4)]), 1))
        assert pool.actors._started == 2, "no actor is replaced"
    finally:
        pool.close()
    assert [report.status for report in reports] == ["ok"] * 4


def test_an_actor_without_the_data_is_refused_in_one_line(spec: WorkerSpec, ray_cluster: None) -> None:
    place = f"{os.uname().nodename}/{ray.get_runtime_context().get_node_id()[:8]}"
    with pytest.raises(RunFailedError) as refusal:
        ActorPool(replace(spec, partition_path="/nowhere/p"), [ActorGroup("clients", 1, 0.0, 0.0)])
    assert str(refusal.value) == (
        f"node {place} does not have /nowhere/p: let data.cache be a folder that all nodes share, or run `fedloom "
        "prepare` for this experiment on every node (it cannot be fetched from the server: /nowhere/p/partition.json: "
        "not found; prepare the data first)"
    )


def test_an_actor_that_cannot_start_ends_the_run_with_the_cause(
    spec: WorkerSpec, ray_cluster: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING"), pytest.raises(RunFailedError) as failure:
        ActorPool(replace(spec, threads=0), [ActorGroup("clients", 1, 0.0, 0.0)])
    line = r"a client actor \(clients\) could not be started: RuntimeError: .*threads .*; on [\d.]+ \(pid \d+\)"
    assert re.fullmatch(line, str(failure.value)), "what is wrong, and where, on one line"
    (record,) = caplog.records
    assert re.fullmatch(line, record.getMessage())
    whole = logging.Formatter().format(record)
    assert "in __init__\n    torch.set_num_threads(spec.threads)" in whole, "the log has the way there"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            "The actor died because of an error raised in its creation task, \x1b[36mray::A.__init__()\x1b[39m "
            "(pid=17, ip=10.0.0.2, repr=<A>)\n  line 9, in f\n    g()\nValueError: no disk\nin the node",
            "ValueError: no disk in the node; on 10.0.0.2 (pid 17)",
        ),
        (
            "The actor died unexpectedly before finishing this task.\n\tclass_name: B\n\tpid: 18\n\tip: 10.0.0.3\n"
            "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
            "Worker unexpectedly exits. Some common causes include: (1) the process was killed",
            "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
            "Worker unexpectedly exits.; on 10.0.0.3 (pid 18)",
        ),
        ("The object store is full", "The object store is full"),
    ],
)
def test_the_cause_of_a_ray_error_is_its_last_words_and_the_place(text: str, cause: str) -> None:
    assert cause_of(RuntimeError(text)) == cause


def test_an_actor_that_is_made_later_is_checked_too(
    spec: WorkerSpec, ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedloom.actors.actor_set.source_of", lambda _spec: "another")
    pool = ActorPool(spec, [ActorGroup("clients", 1, 0.0, 0.0)], resident=True)
    try:
        with pytest.raises(RuntimeError, match=r"runs fedloom source .* the server another: install the same version"):
            run(pool, planned([Adds(1.0)]), 1)
    finally:
        pool.close()


def test_an_actor_that_ray_replaces_on_a_node_that_cannot_be_used_is_started_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, answers = [0.0], deque[About | Exception]()

    def answer(_reference: object) -> About:
        first = answers.popleft()
        if isinstance(first, Exception):
            raise first
        return first

    about = SimpleNamespace(remote=object)
    client = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: SimpleNamespace(about=about)))
    monkeypatch.setattr("fedloom.actors.actor_set.RemoteClient", client)
    monkeypatch.setattr("fedloom.actors.actor_set.source_of", lambda _spec: "same")
    monkeypatch.setattr("fedloom.actors.actor_set.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    for name, does in {"put": lambda _: None, "kill": lambda _: None, "get": answer}.items():
        monkeypatch.setattr(f"fedloom.actors.actor_set.ray.{name}", does)
    spec: Any = SimpleNamespace(plugins=(), dataset_path="d", partition_path="p")
    actors, group = ActorSet(spec), ActorGroup("clients", 1, 1.0, 0.0)

    def answers_with(source: str, node_id: str) -> None:
        answers.append(About(1, "host", node_id, "cpu", 1, source))
        actors.take_answer(actors.starting()[0])

    actors.start(group)
    answers_with("same", "first")
    actors.start(group, joins=True)
    answers.append(ActorDiedError())
    actors.take_answer(actors.starting()[0])
    now_s[0] += RESTART_S
    actors.start_due()
    answers_with("other", "second")  # it joins, although its first start has failed
    assert (len(actors.members), actors.planned()) == (1, 1)

    actors.replace(actors.members[0])
    answers_with("other", "second")
    assert (actors.is_up("clients"), actors.planned()) == (False, 1)
    now_s[0] += 2 * RESTART_S
    actors.start_due()
    answers_with("same", "first")
    assert actors.is_up("clients")

    actors.start(group)
    with pytest.raises(RunFailedError, match="node host runs fedloom source other"):
        answers_with("other", "third")
