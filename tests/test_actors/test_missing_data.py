"""A node without the prepared data fetches it from the server, or says in one line what is missing."""

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray import cloudpickle

from fedloom.actors import data_transfer
from fedloom.actors.actor_set import ActorSet
from fedloom.actors.client import ADD, WATCH, About, ClientActor
from fedloom.actors.data_transfer import DataReader, Fetched, Offer, Origin, fetch
from fedloom.actors.placement import ActorGroup
from fedloom.actors.pool import START_TIMEOUT_S, ActorPool
from fedloom.platform.averaging.average import Update
from fedloom.platform.clients.assignments import Assignment, ClientResult
from fedloom.platform.clients.execution import Executor, SerialExecutor, SharedWeights, make_chunks
from fedloom.platform.clients.worker import Worker, WorkerSpec
from fedloom.platform.data.artefact import ByteArray
from fedloom.platform.data.dataset import Dataset
from fedloom.platform.data.partition import Partition
from fedloom.platform.federation.algorithm import RoundResult
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.loop import merge_chunks
from fedloom.platform.federation.world import build_world
from fedloom.platform.runs.logs import CONSOLE
from fedloom.platform.spaces.slices import Slice, Weights

# The workers cannot import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Reads:
    """A client that reads its data."""

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        return ClientResult(samples=len(worker.client_data(0, "train")[1]))


@pytest.fixture
def spec(tiny_config: Callable[..., RunConfig]) -> WorkerSpec:
    return build_world(tiny_config()).spec


def test_a_worker_with_its_data_misses_nothing(spec: WorkerSpec) -> None:
    assert Worker(spec).missing_data() is None


@pytest.mark.parametrize("field", ["dataset_path", "partition_path"])
@pytest.mark.parametrize("node", ["", "host/1a2b3c4d"])
def test_a_missing_folder_is_named_with_its_node_and_what_to_do(
    spec: WorkerSpec, tmp_path: Path, field: str, node: str
) -> None:
    folder = str(tmp_path / "away")
    worker = Worker(replace(spec, node=node, **{field: folder}))  # type: ignore[arg-type]
    chunks = make_chunks([Assignment("train", 0, 0, "tier1", Reads())], 1)
    (result,) = SerialExecutor(worker).run(chunks, SharedWeights({}, "w@0"))
    (report,) = result.client_results
    assert report.status == "failed"
    assert report.error == (
        f"ValueError: node {node or os.uname().nodename} does not have {folder}: let data.cache be a folder that all "
        "nodes share, or run `fedloom prepare` for this experiment on every node"
    )
    assert report.node == (node or os.uname().nodename)


# -- fetching, without Ray --------------------------------------------------------------------------------------------


@dataclass
class Folders:
    """A sender of this machine's folders, which may change one byte of one file, and counts what it has sent."""

    damaged: str = ""
    sent: list[str] = field(default_factory=list)

    def offer(self, folder: str, manifest: str) -> Offer:
        return DataReader().offer(folder, manifest)

    def blocks(self, path: str, size_bytes: int) -> Iterator[ByteArray]:
        self.sent.append(Path(path).name)
        for offset_bytes in range(0, size_bytes, data_transfer.BLOCK_BYTES):
            block = DataReader().block(path, offset_bytes, data_transfer.BLOCK_BYTES)
            if Path(path).name == self.damaged and not offset_bytes:
                block[-1] ^= 1
            yield block


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of another node, in which nothing is."""
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "elsewhere"))
    monkeypatch.setattr(data_transfer, "BLOCK_BYTES", 1000)
    return tmp_path / "elsewhere"


@pytest.fixture
def offered(spec: WorkerSpec, tmp_path: Path) -> Origin:
    """What the server has: a data set with coarser classes, and a partition."""
    paths = [Path(spec.dataset_path), Path(spec.partition_path)]
    copies = [shutil.copytree(path, tmp_path / "server" / path.name) for path in paths]
    (copies[0] / "label_sets.json").write_text("{}")
    return Origin(None, *map(str, copies))


def fetched(sender: Folders, offered: Origin) -> Fetched:
    return fetch(sender, offered, "/nowhere/d", "/nowhere/p")


def files_of(folder: str | Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def test_what_is_fetched_has_the_same_bytes_and_is_fetched_once(offered: Origin, elsewhere: Path) -> None:
    sender = Folders()
    with ThreadPoolExecutor(4) as actors:
        results = list(actors.map(lambda _: fetched(sender, offered), range(4)))
    assert {(r.dataset_path, r.partition_path) for r in results} == {
        (
            str(elsewhere / Path(offered.dataset_path).name),
            str(elsewhere / "partitions" / Path(offered.partition_path).name),
        )
    }
    assert files_of(results[0].dataset_path) == files_of(offered.dataset_path)
    assert files_of(results[0].partition_path) == files_of(offered.partition_path)
    assert len(sender.sent) == len({*files_of(offered.dataset_path)}) + len({*files_of(offered.partition_path)})
    dataset = Dataset.open(Path(results[0].dataset_path))
    dataset.verify()
    assert Partition.open(Path(results[0].partition_path), dataset).num_clients == 8


def test_only_what_is_missing_is_fetched(offered: Origin, elsewhere: Path) -> None:
    sender = Folders()
    result = fetch(sender, offered, offered.dataset_path, "/nowhere/p")
    assert result.dataset_path == offered.dataset_path
    assert re.fullmatch(r"the partition digits-\w+ \([\d.]+ kB\)", result.what)
    assert "train_x.npy" not in sender.sent


@pytest.mark.parametrize(
    "damaged", ["dataset.json", "train_x.npy", "test_y.npy", "label_sets.json", "partition.json", "validation.npy"]
)
def test_what_arrives_damaged_is_refused_and_not_kept(offered: Origin, elsewhere: Path, damaged: str) -> None:
    with pytest.raises(ValueError, match="what arrived does not have the recorded hashes"):
        fetched(Folders(damaged), offered)
    kept = {path.name for path in elsewhere.rglob("*.npy")}
    assert damaged not in kept
    assert not list(elsewhere.rglob("*.tmp"))
    assert fetched(Folders(), offered).what


def test_a_full_disk_is_said_before_anything_is_sent(
    offered: Origin, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = Folders()
    monkeypatch.setattr(data_transfer.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 0, 10))
    with pytest.raises(ValueError, match=rf"^it takes [\d.]+ kB, and {elsewhere} has 10 B left$"):
        fetched(sender, offered)
    assert not sender.sent


def test_other_data_of_the_same_name_is_refused(offered: Origin, elsewhere: Path) -> None:
    own = elsewhere / Path(offered.dataset_path).name
    shutil.copytree(offered.partition_path, own)
    (own / "partition.json").rename(own / "dataset.json")
    with pytest.raises(
        ValueError, match=rf"^{own} has the hash [0-9a-f]{{16}}, the server's [0-9a-f]{{16}}: delete it$"
    ):
        fetched(Folders(), offered)


# -- fetching through Ray ---------------------------------------------------------------------------------------------


class Adds:
    """Returns the shared weights plus the mean of the client's samples."""

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        x, y = worker.client_data(assignment.client_id or 0, "train")
        return ClientResult(
            update=Update({"w": weights["w"] + x.mean()}, {"w": Slice("w")}, {"w": 1.0}), samples=len(y)
        )


def round_of(executor: Executor) -> RoundResult:
    chunks = make_chunks([Assignment("train", 0, client, "tier1", Adds()) for client in range(8)], 1)
    return merge_chunks(executor.run(chunks, SharedWeights({"w": torch.zeros(3)}, "w@0")))


def on_a_node_without_data(cache: Path) -> Any:
    """Client actors of a node that does not see the server's disk."""

    class Elsewhere(ClientActor):
        def __init__(self, spec: WorkerSpec, gpu_share: float, name: str) -> None:
            os.environ["FEDLOOM_CACHE"] = str(cache)
            super().__init__(replace(spec, dataset_path="/nowhere/d", partition_path="/nowhere/p"), gpu_share, name)

        def fetch_data(self, server: Origin) -> About:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(data_transfer, "BLOCK_BYTES", 4000)
                return super().fetch_data(server)

    return ray.remote(concurrency_groups={WATCH: 1, ADD: 1})(Elsewhere)  # type: ignore[call-overload]


@pytest.mark.ray
def test_a_node_without_the_data_fetches_it_once_and_gives_the_same_bits_however_long_that_takes(
    spec: WorkerSpec,
    ray_cluster: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fedloom.actors.actor_set.RemoteClient", on_a_node_without_data(tmp_path / "cache"))
    take_answer, passed_s = ActorSet.take_answer, [0.0]

    def for_long(actors: ActorSet, answer: Any) -> None:
        take_answer(actors, answer)
        passed_s[0] = 2 * START_TIMEOUT_S if actors.fetching() else passed_s[0]

    monkeypatch.setattr(ActorSet, "take_answer", for_long)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s[0], sleep=time.sleep)
    monkeypatch.setattr("fedloom.actors.pool.time", clock)
    said: list[str] = []
    monkeypatch.setattr(CONSOLE, "info", lambda text, *values: said.append(text % values))
    pool = ActorPool(spec, [ActorGroup("clients", 2, 0.0, 0.0)])
    try:
        result, expected = round_of(pool), round_of(SerialExecutor(Worker(spec)))
        assert [(r.status, r.samples) for r in result.client_results] == [("ok", 36)] * 8
        old = {"w": torch.zeros(3)}
        assert torch.equal(result.sums.finish(old).weights["w"], expected.sums.finish(old).weights["w"])
    finally:
        pool.close()
    assert passed_s[0]
    # Each once: both by one actor, or the partition by the one that has waited for the data set.
    artefact = r"the (data set|partition) digits-\w+ \([\d.]+ kB\)"
    assert sorted(re.findall(artefact, " ".join(said))) == ["data set", "partition"]
    for line in said:
        assert re.fullmatch(rf"node [^ ]+/\w{{8}} fetched {artefact}(?: and {artefact})? from the server", line)
    assert files_of(tmp_path / "cache" / Path(spec.dataset_path).name) == files_of(spec.dataset_path)
