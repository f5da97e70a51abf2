"""A client actor whose GPU has no room for the weights that a chunk's clients read, on processors alone."""

import os
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray
import torch
from torch import Tensor

from fedloom.actors.client import ClientActor, assigned_device, other_torch, to_arrays
from fedloom.actors.placement import groups_of_run
from fedloom.actors.pool import ActorPool
from fedloom.platform.clients.assignments import SERVER, Assignment, ClientResult
from fedloom.platform.clients.device import CONTEXT_BYTES, GPU, WORKSPACE, context_bytes, memory_of
from fedloom.platform.clients.execution import Chunk, ChunkRunner
from fedloom.platform.federation.config import ExecutorConfig, RunConfig
from fedloom.platform.runs.run import _serial_devices
from fedloom.platform.spaces.slices import Weights
from fedloom.tiers.tier import make_tiers


class Idle:
    """A task that does nothing."""

    def run(self, _worker: object, _assignment: Assignment, _weights: Weights) -> ClientResult:
        return ClientResult()


def test_weights_that_do_not_fit_are_failed_rows_and_not_a_dead_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def uploaded(weights: Weights) -> Weights:
        seen.append(actor._runner._weights)
        if len(seen) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return weights

    monkeypatch.setattr(ray, "get", lambda _reference: to_arrays({"w": torch.zeros(2)}))
    worker = SimpleNamespace(
        device=torch.device("cpu"), node="n", spec=SimpleNamespace(threads=1), uploaded=uploaded, data=None, expect=list
    )
    actor = ClientActor.__new__(ClientActor)
    actor.worker, actor._runner, actor._at = cast(Any, worker), ChunkRunner(cast(Any, worker)), None
    actor._jobs = 0
    gone = Assignment("train", 0, 1, "tier1", Idle(), dropped="the device is gone")
    chunk = Chunk("tier1", (Assignment("train", 0, 0, "tier1", Idle()), gone), stack=2)

    def statuses(version: str) -> list[str]:
        return [result.status for result in actor.run_chunk(chunk, [cast(Any, None)], version).client_results]

    one_by_one = Chunk("tier1", chunk.assignments)
    assert [r.status for r in actor.run_chunk(one_by_one, [cast(Any, None)], "v1").client_results] == ["ok", "dropped"]
    failed, dropped = actor.run_chunk(chunk, [cast(Any, None)], "v2").client_results
    assert (failed.status, dropped.status) == ("failed", "dropped")
    assert failed.error.startswith("the client needs more than its share of the GPU's memory: raise tiers.num_gpus")
    assert seen == [None, None], "the weights before are let go of first"
    chunk = one_by_one
    assert statuses("v2") == ["ok", "dropped"], "and the next chunk tries again"


def test_the_shares_of_a_gpu_leave_room_for_every_context(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, limits = 8_000_000_000, list[float]()
    monkeypatch.setattr("fedloom.platform.clients.device.context_bytes", lambda: 500_000_000)
    monkeypatch.setattr(ray, "get_gpu_ids", lambda: [0])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(total_memory=whole))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, _device: limits.append(share))
    assert assigned_device(0.25) == "cuda:0"
    assert limits == [0.1875]
    assert memory_of("cuda:0", 0.25) == 1_500_000_000
    assert memory_of("cuda:0", 1.0) == 7_500_000_000
    assert memory_of("cpu", 0.25) == 0
    with pytest.raises(ValueError, match=r"tiers.num_gpus=0.05 .* less than CUDA takes \(500,000,000 bytes\)"):
        memory_of("cuda:0", 0.05)


@pytest.mark.parametrize("others", [0, 3_000_000_000])
def test_a_context_is_what_is_taken_besides_tensors(monkeypatch: pytest.MonkeyPatch, others: int) -> None:
    ones, mm, seen = torch.ones, torch.mm, list[str | None]()

    def first_use(a: Tensor, b: Tensor) -> Tensor:
        seen.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
        return mm(a, b)

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # undone at the end
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(torch, "mm", first_use)
    monkeypatch.setattr(torch, "ones", lambda shape, device: ones(shape))  # noqa: ARG005
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (7_500_000_000 - others, 8_000_000_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 20_000_000)
    assert context_bytes() == (CONTEXT_BYTES if others else 480_000_000)
    assert seen == [WORKSPACE], "torch reads it once: without, deterministic runs would fail"


def test_another_version_of_torch_is_named_and_another_build_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    assert other_torch("2.9.1+cpu") is None
    assert other_torch("") is None
    line = other_torch("2.8.0")
    assert line is not None
    assert "runs torch 2.9.1+cu128, the server 2.8.0: install the same version" in line


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize(
    ("gpus", "cpus"),
    [
        ([0.0, 0.0, 0.0], 1.0),
        ([0.5, 0.5, 0.5], 1.0),
        ([0.0, 0.0, 0.5], 1.0),
        ([0.5, 0.0, 0.5], 1.0),
        ([0.5, 0.25, 0.0], 1.0),
        ([0.0, 0.5, 0.0], [1.0, 1.0, 2.0]),
    ],
)
def test_a_serial_run_works_on_the_devices_of_actors(
    monkeypatch: pytest.MonkeyPatch, gpus: list[float], cpus: float | list[float], resident: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    tiers = make_tiers([1.0, 2.0, 3.0], num_gpus=gpus, num_cpus=cpus)
    config = RunConfig(executor=ExecutorConfig(kind="serial", resident=resident))
    world = SimpleNamespace(config=config, tiers=tiers)
    groups = groups_of_run(config.executor, tiers, [{"CPU": 8.0, "GPU": 8.0}], 4)
    pool = ActorPool.__new__(ActorPool)
    pool.resident, pool.groups = False, {group.name: group for group in groups}
    of_actors = {
        name: GPU if pool.groups[pool._group_of(Chunk(name, ()))].num_gpus else "cpu"
        for name in ("tier1", "tier2", "tier3", SERVER)
    }
    assert _serial_devices(cast(Any, world)) == of_actors
