"""The Ray executor: a fixed pool of client actors that take chunks as they become free."""

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from fedloom.actors.client import About
from fedloom.actors.crew import Crew, Member, cause_of
from fedloom.actors.placement import Lane
from fedloom.actors.wire import accept_shared_memory, to_arrays, unpack
from fedloom.platform.clients.assignments import Assignment, Report
from fedloom.platform.clients.execution import Chunk, ChunkResult, SharedWeights
from fedloom.platform.clients.worker import WorkerSpec
from fedloom.platform.federation.loop import RunFailedError

logger = logging.getLogger(__name__)

POLL_S = 0.5
"""How often a waiting pool looks for clients that hang."""

LOOK_S = 1.0
"""How often an actor with several clients is asked which one it is at: each has the whole time limit."""

ANSWER_S = 2.0
"""How long such an answer may take; it comes from a thread of its own."""

START_TIMEOUT_S = 300.0
"""How long clients wait for the first actor that could take them: it imports torch before it answers, and may have to
wait for CPUs, or for a node to come (back)."""

RESIDENT = "resident"


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
    nodes: set[str] = field(default_factory=set)
    """Where its actors ended."""

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
        self.crew = Crew(spec, resident)
        self._shared: tuple[str, Any] | None = None
        self._down_since_s: dict[str, float] = {}
        if not resident:
            try:
                self._start_crew()
            except RunFailedError:
                self.crew.close()
                raise

    def _start_crew(self) -> None:
        """Returns when all actors have answered; after a time it will do if there is one of each lane."""
        for lane in self.lanes.values():
            for _ in range(lane.actors):
                self.crew.start(lane)
        end_s = time.monotonic() + START_TIMEOUT_S
        while (starting := self.crew.starting()) and time.monotonic() < end_s:
            for answer in ray.wait(starting, num_returns=1, timeout=min(POLL_S, START_TIMEOUT_S))[0]:
                self.crew.hear(answer)
            if self.crew.why:  # what fails at the very start (a GPU that torch does not see) would fail again
                lane_name, cause = next(iter(self.crew.why.items()))
                raise RunFailedError(f"a client actor ({lane_name}) could not be started: {cause}")
        for lane in self.lanes.values():
            if not self.crew.is_up(lane.name):
                raise RunFailedError(self._no_actor(lane))

    def run(self, chunks: Sequence[Chunk], weights: SharedWeights) -> Iterator[ChunkResult]:
        """See `Executor.run`; the first chunks are on their way when this returns."""
        reference = self._share(weights)
        waiting: Waiting = {}
        for index, chunk in enumerate(chunks):
            waiting.setdefault(self._lane_of(chunk), deque()).append(Job(index, chunk))
        running: Running = {}
        self._down_since_s.clear()
        self._listen(timeout_s=0.0)
        self._dispatch(waiting, running, reference, weights.version)
        return self._results(len(chunks), waiting, running, reference, weights.version)

    def _results(
        self, num_chunks: int, waiting: Waiting, running: Running, reference: Any, version: str
    ) -> Iterator[ChunkResult]:
        finished: Finished = {}
        for index in range(num_chunks):
            while index not in finished:
                self._dispatch(waiting, running, reference, version)
                if running:
                    self._collect(waiting, running, finished)
                else:
                    self._listen(timeout_s=min(POLL_S, START_TIMEOUT_S))
                self._give_up_lanes(waiting, finished)
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
            if name not in self.lanes:
                self.lanes[name] = replace(next(iter(self.lanes.values())), name=name)
                self.crew.start(self.lanes[name])
            return name
        for name, lane in self.lanes.items():
            if chunk.tier in lane.tiers:
                return name
        return next(reversed(self.lanes))

    def _dispatch(self, waiting: Waiting, running: Running, weights: Any, version: str) -> None:
        for lane, jobs in waiting.items():
            while jobs and (member := self.crew.take(lane)):
                job = jobs.popleft()
                job.member = member
                job.attempts += 1
                job.position, job.at_work_since_s = 0, time.monotonic()
                chunk = replace(job.chunk, assignments=tuple(job.chunk.assignments[i] for i in job.left))
                running[member.actor.run_chunk.remote(chunk, [weights], version)] = job

    def _listen(self, timeout_s: float) -> None:
        """Waits for an actor that is starting; each that has come up idles."""
        self.crew.start_due()
        starting = self.crew.starting()
        if not starting:
            time.sleep(timeout_s)
            return
        # All that are there, but no more than one is waited for.
        ready, rest = ray.wait(starting, num_returns=1, timeout=timeout_s)
        ready += ray.wait(rest, num_returns=len(rest), timeout=0)[0] if ready and rest else []
        for answer in ready:
            self.crew.hear(answer)

    def _collect(self, waiting: Waiting, running: Running, finished: Finished) -> None:
        """Waits for something to happen to the jobs at work, or for an actor that could take another."""
        self.crew.start_due()
        references = [*running, *self.crew.starting()]
        ready, _ = ray.wait(references, num_returns=1, timeout=min(POLL_S, self.client_timeout_s))
        for reference in ready:
            job = running.pop(reference, None)
            if job is None:
                self.crew.hear(reference)
            else:
                self._finish(job, reference, waiting, finished)
        for reference, job in list(running.items()):
            if self._hangs(job):
                del running[reference]
                self._give_up_client(job, waiting, finished)

    def _finish(self, job: Job, reference: Any, waiting: Waiting, finished: Finished) -> None:
        try:
            result = unpack(ray.get(reference))
        except RayError as error:
            self._recover(job, cause_of(error), waiting, finished)
            return
        self.crew.give_back(_member(job))
        finished[job.index] = with_timed_out(result, job)

    def _recover(self, job: Job, cause: str, waiting: Waiting, finished: Finished) -> None:
        member = _member(job)
        about = self._about(member)
        who = ", ".join(_who(a) for a in job.chunk.assignments)
        where = f"node {about.node} (pid {about.pid})"
        logger.warning("a client actor on %s ended while it worked on %s: %s", where, who, cause)
        if self.crew.replace_lost(member) and about.node_id in job.nodes:
            # The job was with two actors of one node: it is the node that is lost, once.
            job.attempts -= 1
        job.nodes.add(about.node_id)
        if job.attempts < self.actor_attempts:
            waiting[member.lane.name].appendleft(job)
            return
        text = f"the client actor ended {job.attempts} times while it worked on {who}; last on {where}: {cause}"
        finished[job.index] = failed(job, text, about.place)

    def _give_up_lanes(self, waiting: Waiting, finished: Finished) -> None:
        """Clients for whom no actor has come up for too long fail; those at work elsewhere are not touched."""
        now_s = time.monotonic()
        for name, jobs in waiting.items():
            if not jobs or self.crew.is_up(name):
                self._down_since_s.pop(name, None)
            elif now_s - self._down_since_s.setdefault(name, now_s) >= START_TIMEOUT_S:
                text = self._no_actor(self.lanes[name])
                logger.warning("%d chunks of clients fail: %s", len(jobs), text)
                while jobs:
                    job = jobs.popleft()
                    finished[job.index] = failed(job, text)

    def _no_actor(self, lane: Lane) -> str:
        gpus = f" and {lane.num_gpus:g} GPUs" if lane.num_gpus else ""
        cause = self.crew.why.get(lane.name)
        # Without a cause Ray is still waiting to place it.
        because = f"the last one failed: {cause}" if cause else "no free CPUs, or no node that can run it"
        return (
            f"no client actor ({lane.name}) of {lane.num_cpus:g} CPUs{gpus} came up within {START_TIMEOUT_S:g} s "
            f"({because}): add a node or end what uses the cluster, and resume the run"
        )

    def _about(self, member: Member) -> About:
        assert member.about is not None, "only those that have answered are given work"
        return member.about

    def _hangs(self, job: Job) -> bool:
        """Whether the job's present client has been at work for longer than allowed."""
        now_s = time.monotonic()
        late = now_s - job.at_work_since_s >= self.client_timeout_s
        alone = len(job.left) == 1
        if not late and (alone or now_s - job.looked_s < LOOK_S):
            return False
        job.looked_s = now_s
        try:
            at: tuple[int, float] | None = ray.get(_member(job).actor.position.remote(), timeout=ANSWER_S)
        except (GetTimeoutError, RayError):
            # A dead actor is found by its result. One that holds the interpreter's lock cannot answer, and hangs.
            return late
        if at is not None:
            # The actor's own clock: the clients before do not count.
            job.position, job.at_work_since_s = at[0], now_s - at[1]
        return now_s - job.at_work_since_s >= self.client_timeout_s

    def _give_up_client(self, job: Job, waiting: Waiting, finished: Finished) -> None:
        left = job.left
        place = left[job.position]
        assignment = job.chunk.assignments[place]
        member = _member(job)
        self.crew.replace(member)
        text = f"no answer within {self.client_timeout_s:g} s; its actor was replaced"
        logger.warning("%s gave %s", _who(assignment), text)
        job.timed_out[place] = _lost(assignment, "timed_out", text, self._about(member).place)
        job.attempts -= 1
        if len(left) > 1:
            waiting[member.lane.name].appendleft(job)
        else:
            finished[job.index] = with_timed_out(ChunkResult(), job)

    def close(self) -> None:
        """Ends all actors."""
        self.crew.close()
        self._shared = None


def _member(job: Job) -> Member:
    assert job.member is not None, "a running job has an actor"
    return job.member


def _who(assignment: Assignment) -> str:
    client = "the server's data" if assignment.client_id is None else f"client {assignment.client_id}"
    return f"{client} ({assignment.tier}, {assignment.stage} round {assignment.round}, {_what(assignment)})"


def _what(assignment: Assignment) -> str:
    architecture = getattr(assignment.task, "architecture", None)
    name = type(assignment.task).__name__
    return f"{name} {'-'.join(map(str, architecture))}" if architecture is not None else name


def failed(job: Job, error: str, node: str = "") -> ChunkResult:
    """The result of a job that nobody did: its clients failed, but for those that had hung before."""
    reports = [_lost(a, "failed", error, node) for i, a in enumerate(job.chunk.assignments) if i not in job.timed_out]
    return with_timed_out(ChunkResult(reports=reports), job)


def _lost(assignment: Assignment, status: str, error: str, node: str) -> Report:
    return Report(
        client_id=assignment.client_id,
        tier=assignment.tier,
        status=status,
        error=error,
        selection_probability=assignment.selection_probability,
        selection_reason=assignment.selection_reason,
        node=node,
    )


def with_timed_out(result: ChunkResult, job: Job) -> ChunkResult:
    """The chunk's reports in plan order, those of clients that hung among them."""
    rest = iter(result.reports)
    places = range(len(job.chunk.assignments))
    return ChunkResult(result.sums, [job.timed_out[i] if i in job.timed_out else next(rest) for i in places])
