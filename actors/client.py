"""The client actor: a process with its own CPUs and share of a GPU that runs the assignments of clients.

Tensors travel as NumPy arrays, which Ray shares between processes without copying.
"""

from __future__ import annotations

import os
import platform
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
from ray.exceptions import RayError
from torch import Tensor

import fedloom.platform.methods  # noqa: F401 - registers the built-in rules
from fedloom.actors.data_transfer import Origin, ServersNode, fetch
from fedloom.platform.averaging.aggregators import KeptUpdates
from fedloom.platform.averaging.average import Coverage, TensorSum, Update, WeightedSums
from fedloom.platform.clients.assignments import ClientResult
from fedloom.platform.clients.device import GPU, memory_of
from fedloom.platform.clients.execution import Chunk, ChunkResult, ChunkRunner
from fedloom.platform.clients.worker import Worker, WorkerSpec
from fedloom.platform.data.config import machine_cache
from fedloom.platform.runs.source_code import source_hash, sources_of
from fedloom.platform.spaces.slices import Region, Weights
from fedloom.platform.words import why

WATCH = "watch"
"""Ray's concurrency group for methods that answer while the actor runs a chunk."""

ADD = "add"
"""Ray's concurrency group for adding the sums of other actors meanwhile."""

NODE_ID_DIGITS = 8


@dataclass(frozen=True)
class About:
    """The process, node, device and source version of an actor."""

    pid: int
    node: str
    node_id: str
    device: str
    threads: int
    source_hash: str
    other_torch: str | None = None
    """A one-line message if its node does not have the server's version of torch."""
    missing_data: str | None = None
    """A one-line message naming the prepared data that its node lacks; None if it has all."""
    fetched: str = ""
    """What this actor has fetched from the server's node, with sizes."""

    @property
    def place(self) -> str:
        """Host and Ray node id, since one machine may run two Ray nodes."""
        return place(self.node, self.node_id)


def place(host: str, node_id: str) -> str:
    """Host and the first digits of the Ray node's id, as in the column `node` of the table `clients`."""
    return f"{host}/{node_id[:NODE_ID_DIGITS]}"


def assigned_device(gpu_share: float) -> str:
    """The device that Ray assigned to this actor; other devices that torch sees are not used.

    Raises ValueError if Ray assigned a GPU and torch sees none.
    """
    if not ray.get_gpu_ids():
        return "cpu"
    if not torch.cuda.is_available():
        raise ValueError("Ray gave this actor a GPU, torch sees none: start Ray with num_gpus=0 or mend the driver")
    if gpu_share < 1:
        # Ray does not enforce GPU fractions; this limit keeps a client from using the memory of its neighbours.
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(memory_of(GPU, gpu_share) / whole, 0)
    return GPU


def other_torch(server: str) -> str | None:
    """A message if this node's torch version differs from the server's, so bits may differ; builds do not count."""
    here = str(torch.__version__)
    if not server or here.partition("+")[0] == server.partition("+")[0]:
        return None
    return f"node {platform.node()} runs torch {here}, the server {server}: install the same version on every node"


def source_of(spec: WorkerSpec) -> str:
    """Hash of the code that a worker runs: fedloom and the plug-ins as installed on its node."""
    return source_hash(sources_of(spec.plugins))


class Position(NamedTuple):
    """What an actor works on: the number of its job, the client's index in the chunk, and its seconds so far."""

    job: int
    client: int
    for_s: float


class ClientActor:
    """Runs chunks of assignments, for any client or (if resident) for one client only.

    It holds the tier's device, memory limit and thread count, the memory-mapped data and one module that it reuses.
    """

    def __init__(self, spec: WorkerSpec, gpu_share: float, name: str = "") -> None:
        """`name` is the actor's name in Ray's dashboard and logs."""
        self._name = name
        accept_shared_memory()
        torch.set_num_threads(spec.threads)
        self._threads = torch.get_num_threads()
        self._node_id: str = ray.get_runtime_context().get_node_id()
        here = place(platform.node(), self._node_id)
        device = assigned_device(gpu_share)
        self.worker = Worker(replace(spec, device=device, device_bytes=memory_of(device, gpu_share), node=here))
        self._runner = ChunkRunner(self.worker)
        self._jobs = 0
        self._at: tuple[int, int, float] | None = None

    def __repr__(self) -> str:
        return self._name

    def about(self) -> About:
        """The actor's process, node, device and source version."""
        device = str(self.worker.device)
        source, other = source_of(self.worker.spec), other_torch(self.worker.spec.torch)
        missing = self.worker.missing_data()
        return About(os.getpid(), platform.node(), self._node_id, device, self._threads, source, other, missing)

    def fetch_data(self, server: Origin) -> About:
        """Fetches the prepared data that its node lacks, once for all of the node's actors; answers like `about`."""
        spec = self.worker.spec
        try:
            fetched = fetch(ServersNode(server.reader), server, spec.dataset_path, spec.partition_path)
        except (ValueError, OSError, RayError) as error:
            about = self.about()
            cannot = f"it cannot be fetched from the server: {why(error, machine_cache())}"
            return replace(about, missing_data=f"{about.missing_data} ({cannot})")
        self.worker.spec = replace(spec, dataset_path=fetched.dataset_path, partition_path=fetched.partition_path)
        return replace(self.about(), fetched=fetched.what)

    def run_chunk(self, chunk: Chunk, weights_ref: list[ray.ObjectRef[Any]], version: str) -> PackedResult:
        """Runs the chunk on the shared weights, which are mapped into memory, or uploaded, once per version."""
        self._jobs += 1
        # Some builds of torch keep the thread count per calling thread.
        torch.set_num_threads(self.worker.spec.threads)
        result = self._runner.run(chunk, version, lambda: to_tensors(ray.get(weights_ref[0])), self._begins)
        self._at = None
        return pack(result)

    def run_part(
        self, chunk: Chunk, weights_ref: list[ray.ObjectRef[Any]], version: str
    ) -> tuple[PackedResult, PackedResult]:
        """`run_chunk` that returns the clients' results and the sums apart: the sums stay on the node until `add`."""
        packed = self.run_chunk(chunk, weights_ref, version)
        return replace(NOTHING, client_results=packed.client_results), replace(packed, client_results=())

    @ray.method(concurrency_group=ADD)
    def add(self, sums: list[ray.ObjectRef[PackedResult]]) -> PackedResult:
        """The sum of the sums of consecutive chunks, while `run_chunk` runs."""
        total = WeightedSums()
        for packed in ray.get(sums):
            part = unpack(packed).sums
            assert isinstance(part, WeightedSums), "single updates are not added"
            total.merge(part)
        return pack(ChunkResult(total))

    def _begins(self, index: int) -> None:
        self._at = (self._jobs, index, time.monotonic())

    @ray.method(concurrency_group=WATCH)
    def position(self) -> Position | None:
        """The actor's position, while `run_chunk` runs; None if it does not."""
        at = self._at
        return None if at is None else Position(at[0], at[1], time.monotonic() - at[2])


RemoteClient: Any = ray.remote(concurrency_groups={WATCH: 1, ADD: 1})(ClientActor)  # type: ignore[call-overload]
"""`ClientActor` as a Ray actor class."""


# -- tensors between processes ----------------------------------------------------------------------------------------

Arrays = Mapping[str, np.ndarray]
BFLOAT16 = np.dtype("V2")
"""The type of arrays of bfloat16, which NumPy lacks: two bytes without a meaning."""
PackedSum = tuple[Region, np.ndarray, dict[Region, Coverage]]


def accept_shared_memory() -> None:
    """Silences torch's warning about read-only arrays: fedloom never writes to shared tensors."""
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


def to_arrays(tensors: Weights) -> dict[str, np.ndarray]:
    """Tensors in main memory as arrays, without a copy."""
    return {name: _array_of(tensor.detach()) for name, tensor in tensors.items()}


def to_tensors(arrays: Arrays) -> dict[str, Tensor]:
    """Arrays as tensors without a copy; the tensors must not be written to."""
    return {name: _tensor_of(array) for name, array in arrays.items()}


def _array_of(tensor: Tensor) -> np.ndarray:
    return tensor.view(torch.int16).numpy().view(BFLOAT16) if tensor.dtype == torch.bfloat16 else tensor.numpy()


def _tensor_of(array: np.ndarray) -> Tensor:
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


@dataclass(frozen=True)
class PackedResult:
    """The result of a chunk, as it is sent to the server."""

    sums: Mapping[str, PackedSum]
    updates: int
    whole_weight: float
    client_results: tuple[ClientResult, ...]
    kept: tuple[tuple[Update, Arrays], ...] | None = None
    """Each update without its tensors, and these as arrays; None unless single updates are kept."""


NOTHING = PackedResult({}, 0, 0.0, ())


def pack(result: ChunkResult) -> PackedResult:
    """Converts the sums of a result, or its updates, to arrays."""
    if isinstance(result.sums, KeptUpdates):
        updates = tuple((replace(update, tensors={}), to_arrays(update.tensors)) for update in result.sums.kept)
        return PackedResult({}, 0, 0.0, tuple(result.client_results), updates)
    totals = to_arrays({name: s.total for name, s in result.sums.tensors.items()})
    sums = {name: (s.box, totals[name], s.coverage) for name, s in result.sums.tensors.items()}
    return PackedResult(sums, result.sums.updates, result.sums.whole_weight, tuple(result.client_results))


def unpack(packed: PackedResult) -> ChunkResult:
    """The inverse of `pack`; the sums must not be written to."""
    if packed.kept is not None:
        updates = [replace(update, tensors=to_tensors(arrays)) for update, arrays in packed.kept]
        return ChunkResult(KeptUpdates(updates), list(packed.client_results))
    sums = {n: TensorSum(box, torch.from_numpy(total), cover) for n, (box, total, cover) in packed.sums.items()}
    return ChunkResult(WeightedSums(sums, packed.updates, packed.whole_weight), list(packed.client_results))
