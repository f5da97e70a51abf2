"""The client actor: one process pinned to its CPUs and its share of a GPU, which does clients' work."""

import os
import platform
import time
from dataclasses import dataclass, replace
from typing import Any

import ray
import torch

from fedloom.actors.wire import Arrays, PackedResult, accept_shared_memory, pack, to_tensors
from fedloom.platform.clients.execution import Chunk, ChunkResult, SharedWeights, run_assignment
from fedloom.platform.clients.worker import Worker, WorkerSpec
from fedloom.platform.runs.plugin_sources import sources_of
from fedloom.platform.runs.source import source_hash

WATCH = "watch"
"""The group of methods that answer while the actor works."""

NODE_ID_DIGITS = 8


@dataclass(frozen=True)
class About:
    """Where an actor lives and what it runs on."""

    pid: int
    node: str
    node_id: str
    device: str
    threads: int
    source_hash: str
    missing_data: str | None = None
    """What of the prepared data its node lacks, in one line."""

    @property
    def place(self) -> str:
        """Host and Ray node: two nodes may be on one machine."""
        return place(self.node, self.node_id)


def place(host: str, node_id: str) -> str:
    """Host and the beginning of a Ray node's id, as in the column `node` of the table `clients`."""
    return f"{host}/{node_id[:NODE_ID_DIGITS]}"


def assigned_device(gpu_share: float) -> str:
    """The device that Ray gave this actor; what torch could see besides is not used."""
    if not ray.get_gpu_ids():
        return "cpu"
    if not torch.cuda.is_available():
        raise ValueError("Ray gave this actor a GPU, torch sees none: start Ray with num_gpus=0 or mend the driver")
    if gpu_share < 1:
        # Ray's fractions are bookkeeping; this is what keeps one client from taking its neighbours' memory.
        torch.cuda.set_per_process_memory_fraction(gpu_share, 0)
    return "cuda:0"


def source_of(spec: WorkerSpec) -> str:
    """A hash of the code that a worker runs: fedloom's own, and the plug-ins' as they are on its node."""
    return source_hash(sources_of(spec.plugins))


class ClientActor:
    """Does chunks of clients' work; takes on one client after the other, or the same one always (resident).

    Holds the tier's device, memory cap and thread number, the memory-mapped data and one re-used module instance.
    """

    def __init__(self, spec: WorkerSpec, gpu_share: float) -> None:
        accept_shared_memory()
        torch.set_num_threads(spec.threads)
        self._threads = torch.get_num_threads()
        self._node_id: str = ray.get_runtime_context().get_node_id()
        here = place(platform.node(), self._node_id)
        self.worker = Worker(replace(spec, device=assigned_device(gpu_share), node=here))
        self._weights: SharedWeights | None = None
        self._at: tuple[int, float] | None = None

    def about(self) -> About:
        """Who and where this actor is."""
        device, missing = str(self.worker.device), self.worker.missing_data()
        source = source_of(self.worker.spec)
        return About(os.getpid(), platform.node(), self._node_id, device, self._threads, source, missing)

    def run_chunk(self, chunk: Chunk, weights_ref: list[ray.ObjectRef[Any]], version: str) -> PackedResult:
        """Does the chunk on the shared weights; they are mapped once per version."""
        # Threads are a property of the calling thread in some builds of torch.
        torch.set_num_threads(self.worker.spec.threads)
        if self._weights is None or self._weights.version != version:
            arrays: Arrays = ray.get(weights_ref[0])
            self._weights = SharedWeights(to_tensors(arrays), version)
        result = ChunkResult()
        for position, assignment in enumerate(chunk.assignments):
            self._at = (position, time.monotonic())
            attempts = chunk.attempts_per_client
            report = run_assignment(self.worker, assignment, self._weights, result.sums, attempts)
            result.reports.append(report)
        self._at = None
        return pack(result)

    @ray.method(concurrency_group=WATCH)
    def position(self) -> tuple[int, float] | None:
        """Index in the chunk of the assignment at work, and for how many seconds; answers while `run_chunk` runs.

        None if no assignment is at work.
        """
        at = self._at
        return None if at is None else (at[0], time.monotonic() - at[1])


RemoteClient: Any = ray.remote(concurrency_groups={WATCH: 1})(ClientActor)  # type: ignore[call-overload]
"""The client as a Ray actor class."""
