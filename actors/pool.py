"""The Ray executor: a fixed pool of client actors that take chunks as they become free."""

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from fedloom.actors.client import About, RemoteClient
from fedloom.actors.placement import Lane
from fedloom.actors.wire import accept_shared_memory, to_arrays, unpack
from fedloom.platform.execution import Assignment, Chunk, ChunkResult, Report, SharedWeights
from fedloom.platform.run import source_hash
from fedloom.platform.worker import WorkerSpec

logger = logging.getLogger(__name__)

POLL_S = 0.5
"""How often a waiting pool looks for clients that hang."""

LOOK_S = 1.0
"""How often an actor with several clients is asked which one it is at: each has the whole time limit."""

ANSWER_S = 2.0
"""How long such an answer may take; it comes from a thread of its own."""

START_TIMEOUT_S = 300.0
"""An actor imports torch and maps the data before its first answer."""

RESIDENT = "resident"


@dataclass
class Member:
    """One actor of the pool; what it says about itself was asked when it was made, before any work."""

    actor: Any
    lane: Lane
    answer: Any
    about: About | None = None
    started_s: float = field(default_factory=time.monotonic)
    """When its start was asked for."""


@dataclass
class Job:
    """A chunk on its way: its place in the plan, how often it was begun, and what is known to hang or to have hung."""

    index: int
    chunk: Chunk
    attempts: int = 0
    timed_out: dict[int, Report] = field(default_factory=dict)
    member: Member | None = None
    position: int = 0
    """Index among `left` of the client at work, when last looked at."""
    at_work_since_s: float = 0.0
    """When that client began, as far as is known."""
    looked_s: float = 0.0

    @property
    def left(self) -> list[int]:
        """Places in the chunk of the clients that have not hung."""
        return [i for i in range(len(self.chunk.assignments)) if i not in self.timed_out]


Waiting = dict[str, deque[Job]]
"""Jobs not begun, by lane, in plan order."""
Running = dict[Any, Job]
"""Jobs at work, by the reference of their answer."""
Finished = dict[int, ChunkResult]
"""Results whose turn has not come, by place in the plan."""


class ActorPool:
    """Client actors behind the `Executor` protocol. Results come in the order of the plan.

    Args:
        spec: from which each actor builds its worker.
        lanes: which actors there are.
        resident: every client has an actor of its own, made at first use, in the first lane's size.
        actor_attempts: how often a chunk whose actor died is begun before its clients count as failed.
        client_timeout_s: real time after which a client counts as hanging: it is reported, dropped, and its actor
            is replaced.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        lanes: Sequence[Lane],
        *,
        resident: bool = False,
        actor_attempts: int = 3,
        client_timeout_s: float = 3600.0,
    ) -> None:
        accept_shared_memory()
        self.spec, self.lanes, self.resident = spec, {lane.name: lane for lane in lanes}, resident
        self.actor_attempts, self.client_timeout_s = actor_attempts, client_timeout_s
        # The specification (with its cost tables) goes into the object store once, not into every actor's creation.
        self._spec_ref = ray.put(spec)
        self.idle: dict[str, list[Member]] = {name: [] for name in self.lanes}
        self.members: list[Member] = []
        self._shared: tuple[str, Any] | None = None
        if not resident:
            for lane in lanes:
                self.idle[lane.name] = [self._start(lane) for _ in range(lane.actors)]
            for member in self.members:
                self._about(member)

    def _start(self, lane: Lane) -> Member:
        remote = RemoteClient.options(num_cpus=lane.num_cpus, num_gpus=lane.num_gpus, max_restarts=0)
        actor = remote.remote(self._spec_ref, lane.num_gpus)
        member = Member(actor, lane, actor.about.remote())
        self.members.append(member)
        return member

    def _about(self, member: Member) -> About:
        if member.about is None:
            member.about = ray.get(member.answer, timeout=START_TIMEOUT_S)
            _check_source(member.about)
        return member.about

    def _known(self, member: Member) -> About | None:
        """What an actor has said about itself so far; None if it is still starting, or died of that."""
        if member.about is None and ray.wait([member.answer], timeout=0)[0]:
            try:
                return self._about(member)
            except RayError:
                return None
        return member.about

    def run(self, chunks: Sequence[Chunk], weights: SharedWeights) -> Iterator[ChunkResult]:
        """See `Executor.run`; the first chunks are on their way when this returns."""
        reference = self._share(weights)
        waiting: Waiting = {}
        for index, chunk in enumerate(chunks):
            waiting.setdefault(self._lane_of(chunk), deque()).append(Job(index, chunk))
        running: Running = {}
        self._dispatch(waiting, running, reference, weights.version)
        return self._results(len(chunks), waiting, running, reference, weights.version)

    def _results(
        self, num_chunks: int, waiting: Waiting, running: Running, reference: Any, version: str
    ) -> Iterator[ChunkResult]:
        finished: Finished = {}
        for index in range(num_chunks):
            while index not in finished:
                self._dispatch(waiting, running, reference, version)
                self._collect(waiting, running, finished)
            yield finished.pop(index)

    def _share(self, weights: SharedWeights) -> Any:
        """The weights' reference in the object store; a search reads the same ones in every generation."""
        if self._shared is None or self._shared[0] != weights.version:
            self._shared = (weights.version, ray.put(to_arrays(weights.tensors)))
        return self._shared[1]

    def _lane_of(self, chunk: Chunk) -> str:
        if self.resident:
            client_id = chunk.assignments[0].client_id
            name = f"{RESIDENT}-{client_id}" if client_id is not None else f"{RESIDENT}-server"
            if name not in self.idle:
                lane = replace(next(iter(self.lanes.values())), name=name)
                self.lanes[name], self.idle[name] = lane, [self._start(lane)]
            return name
        for name, lane in self.lanes.items():
            if chunk.tier in lane.tiers:
                return name
        return next(reversed(self.lanes))

    def _dispatch(self, waiting: Waiting, running: Running, weights: Any, version: str) -> None:
        for lane, jobs in waiting.items():
            while jobs and self.idle[lane]:
                job = jobs.popleft()
                job.member = self.idle[lane].pop()
                job.attempts += 1
                job.position, job.at_work_since_s = 0, time.monotonic()
                chunk = replace(job.chunk, assignments=tuple(job.chunk.assignments[i] for i in job.left))
                running[job.member.actor.run_chunk.remote(chunk, [weights], version)] = job

    def _collect(self, waiting: Waiting, running: Running, finished: Finished) -> None:
        ready, _ = ray.wait(list(running), num_returns=1, timeout=min(POLL_S, self.client_timeout_s))
        for reference in ready:
            job = running.pop(reference)
            assert job.member is not None, "a running job has an actor"
            try:
                self._about(job.member)
                result = unpack(ray.get(reference))
            except RayError as error:
                self._recover(job, str(error), waiting, finished)
                continue
            self.idle[job.member.lane.name].append(job.member)
            finished[job.index] = with_timed_out(result, job)
        for reference, job in list(running.items()):
            if self._never_starts(job):
                del running[reference]
                text = f"it did not start within {START_TIMEOUT_S:g} s (no free CPUs, or a node that cannot run it)"
                self._recover(job, text, waiting, finished)
            elif self._hangs(job):
                del running[reference]
                self._give_up_client(job, waiting, finished)

    def _recover(self, job: Job, error: str, waiting: Waiting, finished: Finished) -> None:
        member = self._replace(job)
        who = ", ".join(_who(a) for a in job.chunk.assignments)
        about = self._known(member)
        where = f"node {about.node} (pid {about.pid})" if about else "an unknown node"
        cause = " ".join(error.split())[:400]
        logger.warning("a client actor on %s ended while it worked on %s: %s", where, who, cause)
        if job.attempts < self.actor_attempts:
            waiting[member.lane.name].appendleft(job)
            return
        text = f"the client actor ended {job.attempts} times while it worked on {who}; last on {where}: {cause}"
        finished[job.index] = ChunkResult(reports=[_lost(a, "failed", text) for a in job.chunk.assignments])

    def _replace(self, job: Job) -> Member:
        old = job.member
        assert old is not None, "a running job has an actor"
        ray.kill(old.actor)
        self.members.remove(old)
        self.idle[old.lane.name].append(self._start(old.lane))
        return old

    def _never_starts(self, job: Job) -> bool:
        member = job.member
        assert member is not None, "a running job has an actor"
        return self._known(member) is None and time.monotonic() - member.started_s >= START_TIMEOUT_S

    def _hangs(self, job: Job) -> bool:
        """Whether the job's present client has been at work for longer than allowed."""
        now_s = time.monotonic()
        late = now_s - job.at_work_since_s >= self.client_timeout_s
        alone = len(job.left) == 1
        if not late and (alone or now_s - job.looked_s < LOOK_S):
            return False
        job.looked_s = now_s
        member = job.member
        assert member is not None, "a running job has an actor"
        if self._known(member) is None:  # made in the place of another, and still importing torch
            job.at_work_since_s = now_s
            return False
        try:
            at: tuple[int, float] | None = ray.get(member.actor.position.remote(), timeout=ANSWER_S)
        except (GetTimeoutError, RayError):
            # A dead actor is found by its result. One that holds the interpreter's lock cannot answer, and hangs.
            return late
        if at is not None:
            # The actor's own clock: neither its start nor the clients before count.
            job.position, job.at_work_since_s = at[0], now_s - at[1]
        return now_s - job.at_work_since_s >= self.client_timeout_s

    def _give_up_client(self, job: Job, waiting: Waiting, finished: Finished) -> None:
        left = job.left
        place = left[job.position]
        assignment = job.chunk.assignments[place]
        member = self._replace(job)
        text = f"no answer within {self.client_timeout_s:g} s; its actor was replaced"
        logger.warning("%s gave %s", _who(assignment), text)
        job.timed_out[place] = _lost(assignment, "timed_out", text)
        job.attempts -= 1
        if len(left) > 1:
            waiting[member.lane.name].appendleft(job)
        else:
            finished[job.index] = with_timed_out(ChunkResult(), job)

    def close(self) -> None:
        """Ends all actors."""
        for member in self.members:
            ray.kill(member.actor)
        self.members.clear()
        self.idle.clear()
        self._shared = None


def _check_source(about: About) -> None:
    own = source_hash()
    if about.source_hash != own:
        raise RuntimeError(
            f"node {about.node} runs fedloom source {about.source_hash}, the server {own}: install the same "
            "version on every node"
        )


def _who(assignment: Assignment) -> str:
    client = "the server's data" if assignment.client_id is None else f"client {assignment.client_id}"
    return f"{client} ({assignment.tier}, {assignment.stage} round {assignment.round}, {_what(assignment)})"


def _what(assignment: Assignment) -> str:
    architecture = getattr(assignment.task, "architecture", None)
    name = type(assignment.task).__name__
    return f"{name} {'-'.join(map(str, architecture))}" if architecture is not None else name


def _lost(assignment: Assignment, status: str, error: str) -> Report:
    return Report(
        client_id=assignment.client_id,
        tier=assignment.tier,
        status=status,
        error=error,
        selection_probability=assignment.selection_probability,
        selection_reason=assignment.selection_reason,
    )


def with_timed_out(result: ChunkResult, job: Job) -> ChunkResult:
    """The chunk's reports in plan order, those of clients that hung among them."""
    rest = iter(result.reports)
    places = range(len(job.chunk.assignments))
    return ChunkResult(result.sums, [job.timed_out[i] if i in job.timed_out else next(rest) for i in places])
