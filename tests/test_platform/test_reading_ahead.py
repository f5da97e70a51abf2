"""Samples that a GPU's clients will train on are read before they are asked for, by a thread."""

import threading
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedloom.platform.clients.execution import Chunk, ChunkResult, SharedWeights, run_chunk
from fedloom.platform.clients.worker import Worker
from fedloom.platform.data.dataset import Dataset
from fedloom.platform.data.on_device import OnDevice
from fedloom.platform.federation.algorithm import RunState
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.training_config import TrainingConfig
from fedloom.platform.federation.world import build_world
from fedloom.platform.methods.fedavg import FedAvgConfig
from fedloom.platform.methods.registry import build_stages

Given = tuple[Worker, Chunk, SharedWeights]


@pytest.fixture
def given(tiny_config: Callable[..., RunConfig]) -> Given:
    """A worker that takes its processor for a device which is too small for the data, and five clients of FedAvg."""
    world = build_world(tiny_config(method=FedAvgConfig(train=TrainingConfig(clients_per_round=8))))
    stage = build_stages(world)[0]
    state = stage.begin(RunState())
    plan, worker = stage.plan(state), Worker(world.spec)
    worker.data = worker.data.on(torch.device("cpu"), 0)
    clients = [replace(a, tier="t") for a in plan.assignments if a.client_id is not None][:5]
    return worker, Chunk("t", tuple(clients)), SharedWeights(state.weights(plan.group), "v")


class Watch:
    """Notes whose samples are read and by whom, and how many reads are held when each client begins."""

    def __init__(self, given: Given, monkeypatch: pytest.MonkeyPatch, gone: Collection[int | None] = ()) -> None:
        self.worker, self.chunk, self.weights = given
        self.read: list[tuple[int, str]] = []
        self.held: list[int] = []
        real, splits = Dataset._read, ("train", "validation")
        data = self.worker.data
        owners = {data.indices(k, split).tobytes(): k for k in range(data.num_clients) for split in splits}

        def read(dataset: Dataset, part: str, indices: np.ndarray) -> tuple[Tensor, Tensor]:
            if (client := owners.get(indices.tobytes())) is not None:
                ahead = threading.current_thread() is not threading.main_thread()
                self.read.append((client, "ahead" if ahead else "itself"))
                if client in gone:
                    raise OSError(f"the samples of client {client} are gone")
            return real(dataset, part, indices)

        monkeypatch.setattr(Dataset, "_read", read)

    @property
    def device(self) -> OnDevice:
        on_device = self.worker.data.dataset._on_device
        assert on_device is not None
        return on_device

    def run(self) -> ChunkResult:
        result = run_chunk(self.worker, self.chunk, self.weights, lambda _: self.held.append(len(self.device._reading)))
        assert self.device._reading == {}, "nothing is held when a chunk has ended"
        return result


def with_tasks(given: Given, **changes: Any) -> Given:
    worker, chunk, weights = given
    tasks = [replace(a, task=replace(a.task, **changes)) for a in chunk.assignments]  # type: ignore[type-var]
    return worker, replace(chunk, assignments=tuple(tasks)), weights


@pytest.mark.parametrize(("validation", "reads"), [("unused", 1), ("trained", 2)])
def test_the_next_clients_samples_are_read_ahead_and_give_the_same_bits(
    given: Given, monkeypatch: pytest.MonkeyPatch, validation: str, reads: int
) -> None:
    worker, chunk, weights = given = with_tasks(given, validation=validation)
    plain = run_chunk(Worker(worker.spec), chunk, weights)
    watch = Watch(given, monkeypatch)
    result = watch.run()
    first, *others = (a.client_id for a in chunk.assignments)
    expected = [(first, "itself")] * reads + [(client, "ahead") for client in others for _ in range(reads)]
    assert watch.read == expected, "before the first nobody knows whether the data set is uploaded as a whole"
    assert watch.held == [0, 0, reads, reads, reads]
    assert [r.loss for r in result.client_results] == [r.loss for r in plain.client_results]
    ours, theirs = (of.sums.tensors for of in (result, plain))  # type: ignore[union-attr]
    assert all(torch.equal(ours[name].total, theirs[name].total) for name in theirs)


def test_nothing_is_read_for_clients_that_drop_out(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, chunk, weights = given
    first, second, *others = chunk.assignments
    dropped = [replace(a, dropped="gone") for a in others[:2]]
    watch = Watch((worker, replace(chunk, assignments=(first, second, *dropped, others[2])), weights), monkeypatch)
    assert [r.status for r in watch.run().client_results] == ["ok", "ok", "dropped", "dropped", "ok"]
    assert [client for client, _ in watch.read] == [first.client_id, second.client_id, others[2].client_id]


def test_an_error_of_reading_is_that_of_the_client_who_needs_the_samples(
    given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, chunk, weights = given
    third, last = (chunk.assignments[i].client_id for i in (2, 4))
    retried = replace(chunk, attempts_per_client=2)
    watch = Watch((worker, retried, weights), monkeypatch, gone=(third, last))
    results = watch.run().client_results
    assert [r.status for r in results] == ["ok", "ok", "failed", "ok", "failed"]
    assert results[2].error.startswith(f"OSError: the samples of client {third} are gone")
    assert results[2].attempts == 2
    assert [by for client, by in watch.read if client == third] == ["ahead", "itself"], "and it is tried again"


def test_what_is_uploaded_as_a_whole_and_what_a_processor_reads_is_not_read_ahead(
    given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, chunk, weights = given
    whole = worker.data.on(torch.device("cpu"), 10**9)
    read: list[int] = []
    for data in (whole, replace(whole, dataset=replace(whole.dataset, _on_device=None))):
        worker.data = data
        watch = Watch((worker, chunk, weights), monkeypatch)
        run_chunk(worker, chunk, weights)
        assert "ahead" not in {by for _, by in watch.read}
        read.append(len(watch.read))
    assert read[1] > 0
