"""Execution of a plan: chunks of assignments, and the executors that run them.

A chunk holds consecutive assignments of one tier. Its length is set by the configuration, not by the number of workers,
and its weighted sums are added in plan order. This fixed reduction tree makes results bit-identical for any executor
and any number of workers.
"""

import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from fedloom.platform.averaging.average import Update, WeightedSums, first_not_finite
from fedloom.platform.clients.assignments import (
    AccountableTask,
    Assignment,
    Outcome,
    Report,
    TaskError,
    check_device,
    own_copy,
)
from fedloom.platform.clients.memory import peak_memory_bytes, reset_peak_memory
from fedloom.platform.clients.together import Together, trained_together
from fedloom.platform.clients.worker import Worker
from fedloom.platform.plugins import PluginError, ends_process, place_in_own, raised_by_own
from fedloom.platform.spaces.slices import Weights, bytes_of
from fedloom.tiers.clock import EVALUATION_FACTOR, client_time_s


@dataclass(frozen=True)
class Chunk:
    """Consecutive assignments of one tier that one worker executes in one call."""

    tier: str
    assignments: tuple[Assignment, ...]
    attempts_per_client: int = 1
    stack: int = 1
    """The number of clients that are trained as one batch if their tasks allow it."""

    @property
    def samples(self) -> int:
        """The training samples of its clients that arrive."""
        return sum(assignment.train_samples for assignment in self.assignments if not assignment.dropped)


@dataclass
class ChunkResult:
    """The chunk's partial weighted sums, added in plan order, and one report per assignment."""

    sums: WeightedSums = field(default_factory=WeightedSums)
    reports: list[Report] = field(default_factory=list)


@dataclass(frozen=True)
class SharedWeights:
    """The tensors that all assignments of a round read; `version` changes whenever the tensors do."""

    tensors: Weights
    version: str


OUT_OF_MEMORY = (
    "the client needs more than its share of the GPU's memory: raise tiers.num_gpus, or lower the batch size or "
    "executor.stack_clients"
)


class Executor(Protocol):
    """Runs chunks of assignments, in this process or elsewhere."""

    def run(self, chunks: Sequence[Chunk], weights: SharedWeights) -> Iterator[ChunkResult]:
        """Yields the chunks' results in the order of `chunks`, independent of the order in which they finish.

        An executor that runs chunks in other processes has started them when the call returns, so that the caller can
        do other work meanwhile.
        """
        ...

    def close(self) -> None:
        """Releases workers and memory; a closed executor must not be used again."""
        ...


def make_chunks(
    assignments: Iterable[Assignment], size: int, attempts_per_client: int = 1, stack: int = 1
) -> list[Chunk]:
    """Splits the plan into chunks of at most `size` (at least `stack`) assignments, each of one tier."""
    chunks: list[list[Assignment]] = []
    for assignment in assignments:
        if not chunks or len(chunks[-1]) >= max(size, stack) or chunks[-1][0].tier != assignment.tier:
            chunks.append([])
        chunks[-1].append(assignment)
    return [Chunk(chunk[0].tier, tuple(chunk), attempts_per_client, stack) for chunk in chunks]


def run_chunk(
    worker: Worker, chunk: Chunk, weights: SharedWeights, begins: Callable[[int], None] = lambda _place: None
) -> ChunkResult:
    """Executes a chunk's assignments in order and sums their updates.

    `begins` is told the place of every assignment before its work, and of the first one of those that are trained as
    one batch before their work. Raises DeviceLostError if the process has to be replaced.
    """
    result = ChunkResult()
    together = Together()
    if chunk.stack > 1:
        together = trained_together(worker, chunk.assignments, weights.tensors, chunk.stack, begins)
    for place, assignment in enumerate(chunk.assignments):
        begins(place)
        given = replace(assignment, task=together.ready.get(place, assignment.task))
        report = run_assignment(worker, given, weights, result.sums, chunk.attempts_per_client)
        result.reports.append(replace(report, fallback=together.fallbacks.get(place)))
    return result


def run_assignment(
    worker: Worker, assignment: Assignment, weights: SharedWeights, sums: WeightedSums, attempts: int = 1
) -> Report:
    """Executes one assignment; its update is added to `sums` only if the report's status is `ok`.

    This is the only place that turns an exception into a failed row. Raises DeviceLostError (see `run_chunk`).
    """
    base = Report(
        client_id=assignment.client_id,
        tier=assignment.tier,
        status="dropped",
        error=assignment.dropped,
        device=str(worker.device),
        node=worker.node,
        threads=worker.spec.threads,
        selection_probability=assignment.selection_probability,
        selection_reason=assignment.selection_reason,
    )
    report = base
    for attempt in range(1, attempts + 1):
        started = time.perf_counter()
        try:
            if assignment.dropped:
                return replace(base, simulated_s=_waited_for_s(worker, assignment, weights.tensors))
            begun = base if attempt == 1 else replace(base, attempts=attempt)
            return _attempt(worker, assignment, weights, sums, begun)
        except BaseException as error:
            if ends_process(error):
                raise
            check_device(error)
            wall_s = time.perf_counter() - started
            report = _failed(base, error, wall_s, attempt)
    return report


def _failed(base: Report, error: BaseException, wall_s: float, attempt: int) -> Report:
    if isinstance(error, TaskError):
        return replace(base, status="failed", error=str(error), wall_s=wall_s, attempts=attempt)
    # The row's error must not depend on file paths; the traceback has a column of its own.
    named = _message(error) if isinstance(error, PluginError) else f"{type(error).__name__}: {_message(error)}"
    if isinstance(error, torch.OutOfMemoryError):
        named = OUT_OF_MEMORY  # torch's own words are numbers of bytes, and stay in the traceback
    first_line = (named.splitlines() or [type(error).__name__])[0]
    first_line += place_in_own(error) if raised_by_own(error) else ""
    text = "".join(traceback.format_exception(error)).strip()
    return replace(base, status="failed", error=first_line, traceback=text, wall_s=wall_s, attempts=attempt)


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - an exception of a plug-in may fail in any way
        return "(it fails to say why)"


def _attempt(
    worker: Worker, assignment: Assignment, weights: SharedWeights, sums: WeightedSums, base: Report
) -> Report:
    reset_peak_memory(worker.device)
    started = time.perf_counter()
    if assignment.state is not None:
        assignment = replace(assignment, state=own_copy(assignment.state))
    if assignment.reads_test:
        with worker.data.reading_test():
            outcome = assignment.task.run(worker, assignment, weights.tensors)
    else:
        outcome = assignment.task.run(worker, assignment, weights.tensors)
    worked = time.perf_counter()
    simulated_s = _simulated_s(assignment, outcome)
    late = assignment.deadline_s is not None and simulated_s > assignment.deadline_s
    if outcome.update is not None and not late:
        _check_finite(outcome.update)
        sums.add(outcome.update)
    return replace(
        base,
        status="timed_out" if late else "ok",
        error=f"simulated time {simulated_s:.6g} s is over the deadline of {assignment.deadline_s} s" if late else "",
        architecture=outcome.architecture,
        subspace=outcome.subspace,
        parameters=outcome.parameters,
        samples=outcome.samples,
        steps=outcome.steps,
        macs=outcome.macs,
        bytes_down=outcome.bytes_down,
        bytes_up=0 if late else outcome.bytes_up,
        loss=outcome.loss,
        metric=outcome.metric,
        loss_norm=outcome.loss_norm,
        wall_s=worked - started if outcome.wall_s is None else outcome.wall_s,
        overhead_s=time.perf_counter() - worked,
        simulated_s=simulated_s,
        peak_memory_bytes=peak_memory_bytes(worker.device)
        if outcome.peak_memory_bytes is None
        else outcome.peak_memory_bytes,
        # An update that arrives after the deadline is ignored, and so are scores and state.
        measurements=() if late else outcome.measurements,
        state=None if late or outcome.state is None else own_copy(outcome.state),
    )


def _waited_for_s(worker: Worker, assignment: Assignment, weights: Weights) -> float:
    """Simulated seconds until the server gives up a device that has dropped out, of which nobody notifies it.

    It waits until the deadline; without one for as long as the device is expected to need. That is exact for a task
    that can be counted, and otherwise, or if counting fails, which no server would learn of a device that is gone,
    estimated from the plan's MACs and a transfer of all shared weights both ways.
    """
    if assignment.deadline_s is not None:
        return assignment.deadline_s
    if isinstance(assignment.task, AccountableTask):
        try:
            return _simulated_s(assignment, assignment.task.account(worker, assignment))
        except Exception as error:  # noqa: BLE001 - the code of a plug-in may fail in any way
            check_device(error)
    size = bytes_of(weights)
    return client_time_s(assignment.profile, assignment.expected_macs, size, size, factor=1.0)


def _simulated_s(assignment: Assignment, outcome: Outcome) -> float:
    if assignment.client_id is None:
        return 0.0
    weighed = outcome.clock_factor * (outcome.macs - outcome.forward_macs) + EVALUATION_FACTOR * outcome.forward_macs
    return client_time_s(assignment.profile, weighed, outcome.bytes_down, outcome.bytes_up, factor=1.0)


def _check_finite(update: Update) -> None:
    name = first_not_finite(update.tensors)
    if name is not None:
        raise TaskError(f"the update is not finite (first in {name}): it was left out of the average")


class SerialExecutor:
    """Runs all chunks in this process, one after the other, without Ray; easy to debug."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        torch.set_num_threads(worker.spec.threads)

    def run(self, chunks: Sequence[Chunk], weights: SharedWeights) -> Iterator[ChunkResult]:
        for chunk in chunks:
            yield run_chunk(self.worker, chunk, weights)

    def close(self) -> None:
        """Does nothing."""
