"""Serial runs that ask for a GPU, and what tables say of GPUs, on processors alone."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from fedloom.platform.averaging.average import Update
from fedloom.platform.clients.assignments import Assignment, ClientResult
from fedloom.platform.clients.device import DeviceLostError, Gpu, gpu_of
from fedloom.platform.clients.execution import ChunkResult, SerialExecutor, SharedWeights, make_chunks
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.config import ExecutorConfig, RunConfig, TiersConfig
from fedloom.platform.federation.recorder import Record, Recorder
from fedloom.platform.results.writer import RunWriter
from fedloom.platform.runs.run import Watcher, make_serial, run_to_end
from fedloom.platform.spaces.slices import Slice, Weights

H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB"


class Says:
    """A task that sends the name of its worker's node, as one letter."""

    def run(self, worker: Worker, _assignment: Assignment, weights: Weights) -> ClientResult:
        value = torch.tensor([float(ord(worker.node))]) + weights["w"]
        return ClientResult(samples=1, update=Update({"w": value}, {"w": Slice("w")}, {"w": 1.0}))


class Device:
    """A worker that notes what is uploaded to it."""

    def __init__(self, name: str) -> None:
        self.uploads: list[float] = []
        self.errors: list[RuntimeError] = []
        worker = SimpleNamespace(
            device=torch.device("cpu"), node=name, spec=SimpleNamespace(threads=1), data=None, expect=list
        )
        worker.uploaded = self.uploaded
        self.worker = cast(Worker, worker)

    def uploaded(self, weights: Weights) -> Weights:
        self.uploads.append(float(weights["w"]))
        if self.errors:
            raise self.errors.pop()
        return dict(weights)


def plan(*tiers: str, **changes: Any) -> list[Assignment]:
    return [Assignment("train", 0, i, tier, Says(), **changes) for i, tier in enumerate(tiers)]


def shared(value: float, version: str) -> SharedWeights:
    return SharedWeights({"w": torch.tensor([value])}, version)


def test_weights_are_uploaded_once_per_version_and_device() -> None:
    cpu, gpu = Device("c"), Device("g")
    executor = SerialExecutor(gpu.worker, {"tier1": cpu.worker, "tier2": gpu.worker, "tier3": gpu.worker})
    chunks = make_chunks(plan("tier1", "tier1", "tier2", "tier2", "tier3", "server"), 1)

    def run(value: float, version: str) -> list[ChunkResult]:
        return list(executor.run(chunks, shared(value, version)))

    results = run(0.0, "w@0")
    assert [r.client_results[0].node for r in results] == ["c", "c", "g", "g", "g", "g"]
    assert (cpu.uploads, gpu.uploads) == ([0.0], [0.0])
    run(0.0, "w@0")
    assert (cpu.uploads, gpu.uploads) == ([0.0], [0.0])
    results = run(1.0, "w@1")
    assert (cpu.uploads, gpu.uploads) == ([0.0, 1.0], [0.0, 1.0])
    sums = [r.sums.finish({"w": torch.zeros(1)}).weights["w"].item() for r in results]
    assert sums == [ord("c") + 1.0] * 2 + [ord("g") + 1.0] * 4


def test_weights_without_room_on_the_device_are_failed_rows_and_other_errors_of_it_end_the_run() -> None:
    gpu = Device("g")
    executor, chunks = SerialExecutor(gpu.worker), make_chunks([*plan("tier1"), *plan("tier1", dropped="gone")], 2)

    def statuses(version: str) -> list[str]:
        return [r.status for result in executor.run(chunks, shared(0.0, version)) for r in result.client_results]

    gpu.errors.append(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert statuses("w@0") == ["failed", "dropped"]
    assert statuses("w@0") == ["ok", "dropped"], "the next chunk tries again"
    gpu.errors.append(RuntimeError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(DeviceLostError, match="illegal memory access"):
        statuses("w@1")
    gpu.errors.append(RuntimeError("something else"))
    with pytest.raises(RuntimeError, match="something else"):
        statuses("w@1")


def test_a_serial_run_that_asks_for_a_gpu_is_refused_where_there_is_none(
    tiny_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    tiers = TiersConfig(count=2, paths=2000, rho_high=0.5, num_gpus=[0.0, 0.25])
    config = tiny_config(tiers=tiers, executor=ExecutorConfig(kind="serial"))
    end = run_to_end(config, make_serial, Watcher())
    assert end.kind == "refused"
    assert end.message == (
        "tiers.num_gpus=[0.0, 0.25] with executor.kind=serial needs a GPU, and torch sees none in this process: leave "
        "tiers.num_gpus out to train on the CPU, or run it where there is one"
    )
    assert not list((tmp_path / "results").rglob("*.json")), "nothing is written"
    assert run_to_end(replace(config, dry_run=True), make_serial, Watcher()).kind == "done", "counting needs no GPU"


# -- which GPU it was -------------------------------------------------------------------------------------------------


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Names of GPUs by device, which torch gives in this test."""
    names = {"cuda:0": H100}
    file = tmp_path / "version"
    file.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs)\nGCC 12.3\n"
    )
    monkeypatch.setattr("fedloom.platform.clients.device.DRIVER_FILE", str(file))
    monkeypatch.setattr(torch.cuda, "get_device_name", names.__getitem__)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    gpu_of.cache_clear()
    yield names
    gpu_of.cache_clear()


@pytest.mark.usefixtures("named")
def test_a_gpu_is_its_model_with_the_software_that_bits_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_of("cpu") is None
    assert gpu_of("cuda:0") == Gpu(H100, "570.86.15", "12.8", 91002)
    assert str(gpu_of("cuda:0")) == f"{H100}, driver 570.86.15, CUDA 12.8, cuDNN 91002"
    monkeypatch.setattr("fedloom.platform.clients.device.DRIVER_FILE", "/nowhere")
    gpu_of.cache_clear()
    assert str(gpu_of("cuda:0")) == f"{H100}, driver unknown, CUDA 12.8, cuDNN 91002"


@pytest.mark.usefixtures("named")
def test_rows_name_the_gpu_that_trained_their_client(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("reset_peak_memory", "peak_memory_bytes"):
        monkeypatch.setattr(f"fedloom.platform.clients.execution.{name}", lambda _device: 0)
    gpu = Device("g")
    gpu.worker.device = torch.device("cuda:0")
    rows = []
    for worker in (gpu.worker, Device("c").worker):
        (result,) = SerialExecutor(worker).run(make_chunks(plan("tier1"), 1), shared(0.0, "w@0"))
        rows += [r.row("train", 0) for r in result.client_results]
    assert [(row["device"], row["gpu"]) for row in rows] == [("cuda:0", H100), ("cpu", None)]
    assert "gpu_software" not in rows[0]


def test_the_runs_row_lists_its_gpus_and_unlike_ones_are_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def row_after(*rounds: set[str], position: Mapping[str, Any] | None = None) -> tuple[Any, RunWriter]:
        if position is None:
            writer = RunWriter.create(tmp_path, "tiny", "run-1")
        else:
            writer = RunWriter.resume(tmp_path, "tiny", "run-1", dict(position))
        recorder = Recorder(writer)
        for gpus in rounds:
            recorder.submit(Record((), gpus=frozenset(gpus)))
        recorder.close()
        writer.close()
        return writer.run_row.get("gpus"), writer

    gpus, writer = row_after(set(), set())
    assert gpus is None, "on CPUs it is null"
    gpus, writer = row_after({H100}, {H100}, position=writer.position)
    assert json.loads(gpus) == [H100]
    assert caplog.messages == []
    gpus, writer = row_after({H100}, {A100}, {A100, H100}, position=writer.position)
    assert json.loads(gpus) == [H100, A100], "also what a resumed run began with"
    (warning,) = caplog.messages
    assert warning.startswith(
        "the run's clients are trained on GPUs of several kinds, between which results may differ"
    )
    assert f"{H100}; {A100}" in warning
    gpus, _ = row_after({"another"}, position=writer.position)
    assert json.loads(gpus) == [H100, A100, "another"]
    assert len(caplog.messages) == 1
