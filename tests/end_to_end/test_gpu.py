"""Clients on a GPU: what they compute, that no step waits, how many share it, and what exceeds a share."""

import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.platform.averaging.average import WeightedSums
from fedloom.platform.clients.assignments import Assignment, ClientResult
from fedloom.platform.clients.device import memory_of, set_up_process
from fedloom.platform.clients.execution import Chunk, SharedWeights, run_assignment, run_chunk
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.algorithm import RunState
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.world import build_world
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.results.tables import read_table
from fedloom.platform.spaces.slices import Weights

DEVICE = "cuda:0"
ON_GPU = ["ray.num_gpus=1", "tiers.num_gpus=[0.5]"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU on this machine"),
    pytest.mark.usefixtures("as_before"),
]

Tiny = Callable[..., RunConfig]


@pytest.fixture
def as_before() -> Iterator[None]:
    """Leaves the process as other tests expect it."""
    yield
    set_up_process("float32", deterministic=False)


@dataclass(frozen=True)
class FirstRound:
    """The clients of a run's first round, and what they are sent."""

    clients: tuple[Assignment, ...]
    weights: Mapping[str, Tensor]
    on: Callable[[str], Worker]

    @classmethod
    def of(cls, config: RunConfig) -> "FirstRound":
        world = build_world(config)
        stage = build_stages(world)[0]
        state = stage.begin(RunState())
        plan = stage.plan(state)

        def on(device: str) -> Worker:
            device_bytes = 0 if device == "cpu" else memory_of(device, 1.0)
            return Worker(replace(world.spec, device=device, device_bytes=device_bytes))

        clients = tuple(a for a in plan.assignments if a.client_id is not None)
        return cls(clients, state.weights(plan.group), on)

    def trained(self, worker: Worker, client: int = 0) -> tuple[ClientResult, dict[str, Tensor]]:
        """The report of a client, and the round's new weights, as if it were the only one."""
        sums = WeightedSums()
        shared = SharedWeights(worker.uploaded(self.weights), "v0")
        report = run_assignment(worker, self.clients[client], shared, sums)
        assert report.status == "ok", report.traceback or report.error
        new = sums.finish(shared.tensors).weights
        return report, {name: tensor.cpu() for name, tensor in new.items()}


FAMILIES = ["fedoras", "superfednas", "multi_stage", "spider", "milenas", "fedpnas", "fedmn"]


@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_a_gpu_computes_what_a_processor_does_up_to_rounding(tiny: Tiny) -> None:
    # A small learning rate: every step of a large one multiplies the differences of rounding.
    first = FirstRound.of(tiny("method.train.epochs=1", "method.train.lr=0.001"))
    on_cpu, expected = first.trained(first.on("cpu"))
    on_gpu, found = first.trained(first.on(DEVICE))
    assert on_gpu.device == DEVICE
    assert (on_gpu.steps, on_gpu.samples, on_gpu.macs) == (on_cpu.steps, on_cpu.samples, on_cpu.macs)
    assert on_gpu.loss == pytest.approx(on_cpu.loss, rel=1e-3)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-2, atol=2e-3, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_the_same_client_gives_the_same_bits_twice(tiny: Tiny) -> None:
    first = FirstRound.of(tiny("executor.deterministic=true"))
    (report, once), (_, again) = (first.trained(first.on(DEVICE)) for _ in range(2))
    assert report.device == DEVICE
    assert all(torch.equal(once[name], again[name]) for name in once)


def waits(work: Callable[[], Any]) -> int:
    """How often the process waits for the GPU in some work."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


def with_epochs(assignment: Assignment, epochs: int) -> Assignment:
    task: Any = assignment.task
    return replace(assignment, task=replace(task, local=replace(task.local, epochs=epochs)))


@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_more_steps_do_not_wait_more_often(tiny: Tiny) -> None:
    first = FirstRound.of(tiny("executor.stack_clients=off"))
    worker = first.on(DEVICE)
    found = []
    for epochs in (1, 1, 4):  # the first one builds modules and uploads the data
        clients = tuple(with_epochs(client, epochs) for client in first.clients)
        found.append(waits(lambda clients=clients: replace(first, clients=clients).trained(worker)))
    assert found[1] > 0, "the figures are read at the end"
    assert found[2] == found[1]


STACKED = ["method=fedavg", "space.name=cnn_digits", "space.stem_channels=4", "data.dataset=digits"]
STACKED += ["data.num_clients=6", "tiers.paths=100", "tiers.count=1", "method.train.clients_per_round=6"]
STACKED += ["method.train.lr=0.001", "data.augment=crop_flip"]


def test_stacked_clients_compute_what_they_compute_alone(tmp_path: Path) -> None:
    from fedloom.experiments.runs.configuration import compose_config

    first = FirstRound.of(compose_config([*STACKED, f"results={tmp_path}"]))
    worker = first.on(DEVICE)
    shared = SharedWeights(worker.uploaded(first.weights), "v0")
    alone, together = (run_chunk(worker, Chunk("tier1", first.clients, stack=k), shared) for k in (1, 6))
    a, b = (result.sums.finish(shared.tensors).weights for result in (alone, together))
    assert [r.status for r in together.client_results] == ["ok"] * 6
    for name, tensor in a.items():
        torch.testing.assert_close(b[name], tensor, rtol=1e-2, atol=2e-3)


def run(overrides: list[str], results: Path) -> tuple[Path, str]:
    """Runs a configuration by the command line, with a cluster of its own."""
    once = {override.partition("=")[0]: override for override in overrides}.values()  # the last one counts
    command = [sys.executable, "-m", "fedloom.experiments.cli", "run", *once, f"results={results}", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return results, str(json.loads(done.stdout.strip().splitlines()[-1])["run_id"])


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("family", ["fedoras", "superfednas", "spider"], indirect=True)
def test_one_result_for_any_number_of_actors_on_a_gpu(
    tiny_overrides: list[str], tmp_path: Path, assert_same_run: Callable[..., None], empty_tables: tuple[str, ...]
) -> None:
    given = [*tiny_overrides, "tiers.count=1", "executor.deterministic=true", *ON_GPU]
    one, two = (run([*given, f"ray.num_cpus={k}"], tmp_path / str(k)) for k in (1, 2))
    assert set(read_table(one[0], "clients", run_id=one[1])["device"]) == {DEVICE}
    assert_same_run(one, two, empty=empty_tables)


@dataclass(frozen=True)
class Needs:
    """A task that needs so many bytes."""

    size_bytes: int

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        return ClientResult(samples=len(torch.zeros(self.size_bytes, dtype=torch.uint8, device=worker.device)))


def test_an_exceeded_share_is_a_failed_row_and_the_next_client_goes_on(tiny: Tiny) -> None:
    first = FirstRound.of(tiny())
    worker, share = first.on(DEVICE), 1 / 16
    share_bytes = memory_of(DEVICE, share)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(share, 0)
    try:
        reports = [
            run_assignment(worker, replace(first.clients[0], task=Needs(size)), SharedWeights({}, "v0"), WeightedSums())
            for size in (2 * share_bytes, share_bytes // 2)
        ]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)
    assert [report.status for report in reports] == ["failed", "ok"]
    assert reports[0].error.startswith("the client needs more than its share of the GPU's memory")
    assert share_bytes // 2 <= reports[1].peak_memory_bytes <= share_bytes
