"""Execution of a plan: chunks of assignments, and the executors that run them.

A chunk holds consecutive assignments of one tier. Its length is set by the configuration, not by the number of workers,
and its weighted sums are added in plan order. This fixed reduction tree makes results bit-identical for any executor
and any number of workers.
"""

import logging
import math
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, Protocol

import torch

from fedloom.platform.averaging.aggregators import KeptUpdates, Sums
from fedloom.platform.averaging.average import Update, WeightedSums
from fedloom.platform.clients.assignments import AccountableTask, Assignment, ClientResult, TaskError, own_copy
from fedloom.platform.clients.device import check_device, gpu_of, is_out_of_memory, peak_memory_bytes, reset_peak_memory
from fedloom.platform.clients.networks import Subnet
from fedloom.platform.clients.scoring import ScoreSubnet
from fedloom.platform.clients.stacks import Stacked, StackedTask, train_in_stacks
from fedloom.platform.clients.trainer import Train
from fedloom.platform.clients.worker import Worker
from fedloom.platform.data.on_device import moved
from fedloom.platform.plugins import PluginError, ends_process, nearest, place_in_own, raised_by_own
from fedloom.platform.spaces.slices import Weights, architecture_id, bytes_of, first_not_finite
from fedloom.tiers.devices import EVALUATION_FACTOR, client_time_s, done_by

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Chunk:
    """Consecutive assignments of one tier that one worker executes in one call."""

    tier: str
    assignments: tuple[Assignment, ...]
    attempts_per_client: int = 1
    stack: int = 1
    """The number of clients that are trained as one batch if their tasks allow it."""
    keeps_updates: bool = False
    """Whether its updates are returned one by one instead of their sums."""
    version: str | None = None
    """The version of the weights that it reads; None: the current round's."""

    @property
    def samples(self) -> int:
        """The number of training samples of the clients whose work is done."""
        return sum(assignment.train_samples for assignment in self.assignments if assignment.is_done)


@dataclass
class ChunkResult:
    """The chunk's partial weighted sums, added in plan order, or its updates, and one result per assignment."""

    sums: Sums = field(default_factory=WeightedSums)
    client_results: list[ClientResult] = field(default_factory=list)


@dataclass(frozen=True)
class SharedWeights:
    """The tensors that a round's assignments read; `version` changes whenever the tensors do.

    `older` holds the tensors of other versions, for chunks that name one (`Chunk.version`).
    """

    tensors: Weights
    version: str
    older: Mapping[str, Weights] = field(default_factory=dict)

    def read_by(self, chunk: Chunk) -> "SharedWeights":
        """The tensors that a chunk reads."""
        if chunk.version is None:
            return self
        return SharedWeights(self.older[chunk.version], chunk.version)


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

    @property
    def lanes(self) -> int:
        """How many chunks it works on at a time."""
        return 1

    def close(self) -> None:
        """Releases workers and memory; a closed executor must not be used again."""
        ...


def make_chunks(
    assignments: Iterable[Assignment],
    size: int,
    attempts_per_client: int = 1,
    stack: int = 1,
    keeps_updates: bool = False,
) -> list[Chunk]:
    """Splits the plan into chunks of at most `size` (at least `stack`) assignments of one tier that read one group."""
    chunks: list[list[Assignment]] = []
    for assignment in assignments:
        last = chunks[-1] if chunks else []
        alike = bool(last) and (last[0].tier, last[0].reads) == (assignment.tier, assignment.reads)
        if not alike or len(last) >= max(size, stack):
            chunks.append([])
        chunks[-1].append(assignment)
    return [Chunk(chunk[0].tier, tuple(chunk), attempts_per_client, stack, keeps_updates) for chunk in chunks]


def run_chunk(
    worker: Worker, chunk: Chunk, weights: SharedWeights, begins: Callable[[int], None] = lambda _index: None
) -> ChunkResult:
    """Executes a chunk's assignments in order and sums their updates.

    `begins` is called with an assignment's index before it is executed, and with the index of a stack's first client
    before the stack is trained. Raises DeviceLostError if the process has to be replaced.
    """
    sums = KeptUpdates() if chunk.keeps_updates else WeightedSums()
    chunk_result, attempts = ChunkResult(sums), chunk.attempts_per_client
    stacked = Stacked()
    if chunk.stack > 1:
        stacked = train_in_stacks(worker, chunk.assignments, weights.tensors, chunk.stack, begins)
    planned = [replace(a, task=stacked.tasks.get(i, a.task)) for i, a in enumerate(chunk.assignments)]
    for index, assignment in enumerate(planned):
        begins(index)
        worker.expect(_read_next(planned[index:]))
        done = run_assignment(worker, assignment, weights, chunk_result.sums, attempts)
        chunk_result.client_results.append(replace(done, fallback=stacked.fallbacks.get(index, done.fallback)))
    worker.expect(())
    return chunk_result


def _read_next(assignments: Iterable[Assignment]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The ids of the next two clients that train, the current one included, with the splits that they read."""
    coming = (
        (a.client_id, a.task.splits)
        for a in assignments
        if a.client_id is not None and isinstance(a.task, Train) and a.is_done
    )
    return islice(coming, 2)


class ChunkRunner:
    """Runs chunks on one worker, to whose device the weights are uploaded once per version."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._weights: SharedWeights | None = None

    def run(
        self, chunk: Chunk, version: str, tensors: Callable[[], Weights], begins: Callable[[int], None]
    ) -> ChunkResult:
        """Executes a chunk as `run_chunk` does; its result is in main memory.

        `tensors` is called for the weights if the worker does not hold this version. If they do not fit on the device,
        the chunk's clients fail. Raises DeviceLostError if the process has to be replaced.
        """
        if self._weights is None or self._weights.version != version:
            self._weights = None  # the device need not have room for both versions
            shared = SharedWeights(tensors(), version)
            try:
                self._weights = shared = replace(shared, tensors=self.worker.uploaded(shared.tensors))
            except RuntimeError as error:
                check_device(error)
                if not is_out_of_memory(error):
                    raise
                chunk = without_memory(chunk, error)
        else:
            shared = self._weights
        return _in_main_memory(run_chunk(self.worker, chunk, shared, begins))


def _in_main_memory(result: ChunkResult) -> ChunkResult:
    """The result with its sums in main memory, by one copy per dtype; kept updates are there already."""
    if isinstance(result.sums, KeptUpdates):
        return result
    totals = moved({name: s.total for name, s in result.sums.tensors.items()}, torch.device("cpu"))
    tensors = {name: replace(s, total=totals[name]) for name, s in result.sums.tensors.items()}
    return replace(result, sums=replace(result.sums, tensors=tensors))


def without_memory(chunk: Chunk, error: RuntimeError) -> Chunk:
    """The chunk, changed so that its clients fail with this error because their weights do not fit on the device.

    Clients that drop out still drop out.
    """
    error.__context__ = None  # its frames hold what was uploaded
    failing = StackedTask(error.with_traceback(None))
    assignments = tuple(replace(a, task=failing) if a.is_done else a for a in chunk.assignments)
    return replace(chunk, assignments=assignments, stack=1)


def run_assignment(
    worker: Worker, assignment: Assignment, weights: SharedWeights, sums: Sums, attempts: int = 1
) -> ClientResult:
    """Executes one assignment; its update is added to `sums` only if the result's status is `ok`.

    This is the only place that turns an exception into a failed row. Raises DeviceLostError (see `run_chunk`).
    """
    gpu = gpu_of(str(worker.device))
    about: dict[str, Any] = {
        "client_id": assignment.client_id,
        "tier": assignment.tier,
        "attacker": assignment.attacker,
        "device": str(worker.device),
        "gpu": gpu and gpu.model,
        "gpu_software": gpu and str(gpu),
        "node": worker.node,
        "threads": worker.spec.threads,
        "selection_probability": assignment.selection_probability,
        "selection_reason": assignment.selection_reason,
    }
    for attempt in range(1, attempts + 1):
        started = time.perf_counter()
        try:
            if assignment.dropped:
                waited_s = _waited_for_s(worker, assignment, weights.tensors)
                return nothing_done("dropped", assignment.dropped, simulated_s=waited_s, **about)
            if assignment.ignored is not None:
                return replace(_ignored(worker, assignment, *assignment.ignored), attempts=attempt, **about)
            return replace(_attempt(worker, assignment, weights, sums), attempts=attempt, **about)
        except BaseException as error:
            if ends_process(error):
                raise
            check_device(error)
            wall_s = time.perf_counter() - started
            failed = nothing_done("failed", *_why(error), wall_s=wall_s, attempts=attempt, **about)
    return failed


def nothing_done(status: str, error: str, traceback: str | None = None, **values: Any) -> ClientResult:
    """The result of an assignment that produced nothing, because its client dropped out or failed."""
    measured = {"wall_s": 0.0, "peak_memory_bytes": 0, **values}
    return ClientResult(status=status, error=error, traceback=traceback, **measured)


def _why(error: BaseException) -> tuple[str, str | None]:
    """The error of a failed client's row in one line, and its traceback if it is not a TaskError."""
    if isinstance(error, TaskError):
        return str(error), None
    # The row's error must not depend on file paths; the traceback has a column of its own.
    named = _message(error) if isinstance(error, PluginError) else f"{type(error).__name__}: {_message(error)}"
    if is_out_of_memory(error):
        named = OUT_OF_MEMORY  # torch's message consists of byte counts, which stay in the traceback
    first_line = (named.splitlines() or [type(error).__name__])[0]
    first_line += place_in_own(error) if raised_by_own(error) else ""
    return first_line, "".join(traceback.format_exception(error)).strip()


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - an exception of a plug-in may fail in any way
        return "(it fails to say why)"


def _attempt(worker: Worker, assignment: Assignment, weights: SharedWeights, sums: Sums) -> ClientResult:
    reset_peak_memory(worker.device)
    started = time.perf_counter()
    worker.not_compiled = None
    if assignment.state is not None:
        assignment = replace(assignment, state=own_copy(assignment.state))
    with worker.data.reading_test() if assignment.reads_test else nullcontext():
        result = assignment.task.run(worker, assignment, weights.tensors)
    worked = time.perf_counter()
    simulated_s = simulated_time_s(assignment, result)
    deadline_s = math.inf if assignment.deadline_s is None else assignment.deadline_s
    goes_off = assignment.offline_s is not None and assignment.offline_s < min(simulated_s, deadline_s)
    ignored = goes_off or simulated_s > deadline_s
    # Before the update is added: a client whose state cannot be kept has failed as a whole.
    state = None if ignored or result.state is None else own_copy(result.state)
    if result.update is not None and not ignored:
        if assignment.client_id is not None:  # the server's own work may make tensors that clients do not share
            check_belongs(result.update, weights.tensors)
        broken = first_not_finite(result.update.tensors, partial(_received, result.update, weights.tensors))
        if broken is not None:
            raise TaskError(f"the update is not finite (first in {broken}): it was left out of the average")
        sums.add(result.update)
    peak = peak_memory_bytes(worker.device) if result.peak_memory_bytes is None else result.peak_memory_bytes
    done = replace(
        result,
        status="ok",
        update=None,
        wall_s=worked - started if result.wall_s is None else result.wall_s,
        overhead_s=time.perf_counter() - worked,
        simulated_s=simulated_s,
        peak_memory_bytes=peak,
        fallback=worker.not_compiled,
        state=state,
    )
    if not ignored:
        return done
    if goes_off:
        return _gone_off(assignment, done)
    # An update that arrives after the deadline is ignored, and so are scores and state.
    error = f"simulated time {simulated_s:.6g} s is over the deadline of {assignment.deadline_s} s"
    return replace(done, status="timed_out", error=error, bytes_up=0, measurements=())


def _received(update: Update, shared: Weights, name: str) -> torch.Tensor | None:
    """The shared values that a tensor of an update is for, None if there are none."""
    piece = update.slices[name]
    return piece.of(shared[piece.source]) if piece.source in shared else None


def check_belongs(update: Update, shared: Weights) -> None:
    """Raises TaskError for a tensor of a client's update that is not like the shared tensor that it is for."""
    for name, tensor in update.tensors.items():
        piece = update.slices.get(name)
        if piece is None:
            raise TaskError(f"the update has no slice for {name}: give it one, Slice({name!r}) for a whole tensor")
        if piece.source not in shared:
            raise TaskError(
                f"the update's {name} is for {piece.source!r}, and the stage's initial weights have no such tensor"
                f"{nearest(piece.source, [*shared])}"
            )
        if not update.masked and tensor.is_floating_point() != shared[piece.source].is_floating_point():
            raise TaskError(
                f"the update's {name} is of {tensor.dtype}, and {piece.source} of {shared[piece.source].dtype}: send "
                "numbers of the same kind"
            )
        expected = tuple(piece.of(shared[piece.source]).shape)
        if tuple(tensor.shape) != expected:
            raise TaskError(
                f"the update's {name} has the shape {tuple(tensor.shape)}, and its slice of {piece.source} the shape "
                f"{expected}: give new values of that shape"
            )


def _gone_off(assignment: Assignment, done: ClientResult) -> ClientResult:
    """The result of a client whose device went offline before its work was done, with its costs up to that moment.

    The server is not notified, and waits for it as for a client that drops out.
    """
    assert assignment.offline_s is not None
    error = f"the device went offline after {assignment.offline_s:.6g} s, its work takes {done.simulated_s:.6g} s"
    return replace(
        _spent(assignment, done, assignment.offline_s),
        status="dropped",
        error=error,
        loss=None,
        metric=None,
        loss_norm=None,
        simulated_s=done.simulated_s if assignment.deadline_s is None else min(done.simulated_s, assignment.deadline_s),
        measurements=(),
    )


def _ignored(worker: Worker, assignment: Assignment, status: str, why: str, until_s: float) -> ClientResult:
    """The result of a client whose work is discarded: its costs until it is told to stop, without running the task."""
    assert isinstance(assignment.task, AccountableTask), "it was counted to know when it ends"
    counted = assignment.task.account(worker, assignment)
    result = replace(counted, status=status, error=why, wall_s=0.0, peak_memory_bytes=0)
    simulated_s = simulated_time_s(assignment, counted)
    works_s = until_s if assignment.offline_s is None else min(until_s, assignment.offline_s)
    spent = result if simulated_s <= works_s else _spent(assignment, result, works_s)
    return replace(spent, simulated_s=min(simulated_s, until_s))


def _spent(assignment: Assignment, whole: ClientResult, until_s: float) -> ClientResult:
    """The result `whole` of a task, reduced to its costs after `until_s` simulated seconds, when it is cut off."""
    amounts = _weighed_macs(whole), whole.bytes_down, whole.bytes_up
    download, computation, upload = done_by(assignment.profile, *amounts, until_s)
    return replace(
        whole,
        samples=0,
        steps=0,
        macs=whole.macs * computation,
        forward_macs=whole.forward_macs * computation,
        bytes_down=round(whole.bytes_down * download),
        bytes_up=round(whole.bytes_up * upload),
    )


def expected_s(worker: Worker, assignment: Assignment) -> float:
    """Simulated seconds that a client's task takes, counted without executing it."""
    assert isinstance(assignment.task, AccountableTask), "who asks has checked it"
    return simulated_time_s(assignment, assignment.task.account(worker, assignment))


def _waited_for_s(worker: Worker, assignment: Assignment, weights: Weights) -> float:
    """Simulated seconds until the server gives up on a device that has dropped out without notice.

    It waits until the deadline; without one, for as long as it expects the device to need. That time is exact for a
    task that can count its costs. Otherwise, or if counting fails (the server would never learn of that error), it is
    estimated from the plan's MACs and a transfer of all shared weights both ways.
    """
    if assignment.deadline_s is not None:
        return assignment.deadline_s
    if isinstance(assignment.task, AccountableTask):
        try:
            return expected_s(worker, assignment)
        except Exception as error:  # noqa: BLE001 - the code of a plug-in may fail in any way
            check_device(error)
    size = bytes_of(weights)
    return client_time_s(assignment.profile, assignment.expected_macs, size, size, factor=1.0)


def simulated_time_s(assignment: Assignment, result: ClientResult) -> float:
    """Seconds on the assignment's simulated device; 0 for work of the server."""
    if assignment.client_id is None:
        return 0.0
    return client_time_s(assignment.profile, _weighed_macs(result), result.bytes_down, result.bytes_up, factor=1.0)


def _weighed_macs(result: ClientResult) -> float:
    return result.clock_factor * (result.macs - result.forward_macs) + EVALUATION_FACTOR * result.forward_macs


# -- clients that take long -------------------------------------------------------------------------------------------

SLOW_S = 300.0
"""Seconds after which a client at work is first named in the log."""


def named_client(assignment: Assignment) -> str:
    """A client as messages name it: its tier, stage, round, and what it does, with the architecture if it has one."""
    client = "the server's data" if assignment.client_id is None else f"client {assignment.client_id}"
    task = type(assignment.task).__name__
    match assignment.task:
        case Train(network=Subnet() as subnet) | ScoreSubnet(subnet=subnet):
            task += f" {architecture_id(subnet.architecture)}"
    return f"{client} ({assignment.tier}, {assignment.stage} round {assignment.round + 1}, {task})"


def at_work_for(assignment: Assignment, at_work_s: float) -> str:
    """Says how long a client has been at work, and since when."""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() - at_work_s))
    return f"{named_client(assignment)} has been at work for {at_work_s:.0f} s, since {since}"


class _SlowClients(threading.Thread):
    """Logs a client that has been at work for a long time, and again whenever that time has doubled."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.at_work: tuple[Assignment, float] | None = None
        self._ended = threading.Event()

    def begins(self, chunk: Chunk, index: int) -> None:
        """Records which client of a chunk begins."""
        self.at_work = (chunk.assignments[index], time.monotonic())

    def run(self) -> None:
        named: tuple[Assignment, float] | None = None
        next_s = SLOW_S
        while not self._ended.wait(min(1.0, SLOW_S / 2)):
            if (at_work := self.at_work) is None:
                continue
            if at_work is not named:
                named, next_s = at_work, SLOW_S
            at_work_s = time.monotonic() - at_work[1]
            if at_work_s >= next_s:
                logger.warning("%s, in this process", at_work_for(at_work[0], at_work_s))
                next_s = 2 * at_work_s

    def end(self) -> None:
        self._ended.set()


class SerialExecutor(Executor):
    """Runs all chunks in this process, one after the other, without Ray; easy to debug.

    `by_tier` holds the workers of the tiers whose clients train on another device than `worker`.
    """

    def __init__(self, worker: Worker, by_tier: Mapping[str, Worker] | None = None) -> None:
        by_tier = by_tier or {}
        runners = {id(w): ChunkRunner(w) for w in (worker, *by_tier.values())}
        self._runner, self._runners = runners[id(worker)], {tier: runners[id(w)] for tier, w in by_tier.items()}
        torch.set_num_threads(worker.spec.threads)

    def run(self, chunks: Sequence[Chunk], weights: SharedWeights) -> Iterator[ChunkResult]:
        slow_clients = _SlowClients()
        slow_clients.start()
        try:
            for chunk in chunks:
                runner = self._runners.get(chunk.tier, self._runner)
                begins = partial(slow_clients.begins, chunk)
                read = weights.read_by(chunk)
                result = runner.run(chunk, read.version, partial(getattr, read, "tensors"), begins)
                slow_clients.at_work = None
                yield result
        finally:
            slow_clients.end()

    def close(self) -> None:
        """Does nothing."""
