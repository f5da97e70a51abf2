"""The Ray executor: a fixed pool of client actors, each of which takes the next chunk when it is idle."""

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from fedloom.actors.actor_set import ActorSet, Member, cause_of
from fedloom.actors.client import About
from fedloom.actors.placement import ActorGroup
from fedloom.actors.wire import accept_shared_memory, to_arrays, unpack
from fedloom.platform.clients.assignments import Assignment, ClientResult
from fedloom.platform.clients.execution import Chunk, ChunkResult, SharedWeights, nothing_done
from fedloom.platform.clients.networks import Subnet
from fedloom.platform.clients.scoring import ScoreSubnet
from fedloom.platform.clients.trainer import Train
from fedloom.platform.clients.worker import WorkerSpec
from fedloom.platform.federation.loop import RunFailedError
from fedloom.platform.spaces.slices import architecture_id

logger = logging.getLogger(__name__)

POLL_S = 0.5
"""Seconds between two checks of a waiting pool for clients that hang."""

LOOK_S = 1.0
"""Seconds between two requests to an actor for its position in its chunk: the time limit holds for each client."""

ANSWER_S = 2.0
"""Seconds within which the actor answers such a request, from a separate thread."""

START_TIMEOUT_S = 300.0
"""Seconds that clients wait while no actor of their group is up.

Long enough for an actor to import torch and to wait for free CPUs or for a node to join the cluster.
"""

STACK_TIME_FACTOR = 2
"""A stack of clients may take so many times as long as one client: it is one training, with vectorised steps."""

SLOW_S = 300.0
"""Seconds after which a client at work is first named in the log, or half of its time limit if that is less."""

STACK_TIMED_OUT = "its stack exceeded the time limit"

RESIDENT = "resident"

LAST_JOBS = 4
"""Jobs per actor at the end of a round of which the largest start first."""


@dataclass
class Job:
    """A chunk in execution: its index in the plan, its attempts, and the clients in it that ran or may run too long."""

    index: int
    chunk: Chunk
    attempts: int = 0
    timed_out: dict[int, ClientResult] = field(default_factory=dict)
    """Results of the clients that ran too long, by index in the chunk."""
    member: Member | None = None
    position: int = 0
    """Index in `left` of the running client, as last reported by the actor."""
    at_work_since_s: float = 0.0
    """Start of that client on the monotonic clock, as last reported."""
    looked_s: float = 0.0
    """Time of the last request for the position, on the monotonic clock."""
    named_after_s: float = 0.0
    """How long that client had been at work when the log last named it; 0 if it has not."""
    nodes: set[str] = field(default_factory=set)
    """Ids of the nodes on which actors ended during this job."""
    fallback: str | None = None
    """Why its clients are trained one by one although a stack was planned."""

    @property
    def left(self) -> list[int]:
        """Indices in the chunk of the clients that have not timed out."""
        return [i for i in range(len(self.chunk.assignments)) if i not in self.timed_out]

    def time_limit_s(self, client_timeout_s: float) -> float:
        """The time limit of what the actor trains at once: one client, or several as a stack."""
        return client_timeout_s * (STACK_TIME_FACTOR if self.chunk.stack > 1 and len(self.left) > 1 else 1)


Waiting = dict[str, deque[Job]]
"""Jobs that have not started, by group, in the order in which they start."""
Running = dict[Any, Job]
"""Running jobs, by the reference of their result."""
Finished = dict[int, ChunkResult]
"""Results that have not been yielded, by index in the plan."""


def in_balance(jobs: Sequence[Job], actors: int) -> deque[Job]:
    """Jobs in plan order, but of the last ones the largest first, so that no actor ends a round long after the others.

    Only the last ones, because results wait in memory until those that come before them in the plan are there.
    """
    start = max(0, len(jobs) - LAST_JOBS * actors)
    return deque([*jobs[:start], *sorted(jobs[start:], key=lambda job: -job.chunk.samples)])


class ActorPool:
    """An `Executor` that runs chunks on client actors and yields results in the order of the plan.

    Args:
        spec: the specification from which each actor builds its worker.
        groups: the actors to start.
        resident: every client has its own actor, started at first use with the resources of the first group.
        actor_attempts: attempts at a chunk whose actors die, before its clients are reported as failed.
        client_timeout_s: wall-clock seconds after which a client is reported as timed out and its actor is replaced. A
            stack of clients has `STACK_TIME_FACTOR` times as long, and is then trained one client after the other.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        groups: Sequence[ActorGroup],
        *,
        resident: bool = False,
        actor_attempts: int = 3,
        client_timeout_s: float = 3600.0,
    ) -> None:
        accept_shared_memory()
        self.spec, self.groups, self.resident = spec, {group.name: group for group in groups}, resident
        self.actor_attempts, self.client_timeout_s = actor_attempts, client_timeout_s
        self.actors = ActorSet(spec, resident)
        self._shared: tuple[str, Any] | None = None
        self._down_since_s: dict[str, float] = {}
        if not resident:
            try:
                self._start_actors()
            except RunFailedError:
                self.actors.close()
                raise

    def _start_actors(self) -> None:
        """Returns when all actors have answered, or after `START_TIMEOUT_S` if at least one of each group has.

        Raises RunFailedError if a start fails or if a group has no actor after that time.
        """
        for group in self.groups.values():
            for _ in range(group.actors):
                self.actors.start(group)
        end_s = time.monotonic() + START_TIMEOUT_S
        while (starting := self.actors.starting()) and time.monotonic() < end_s:
            for answer in ray.wait(starting, num_returns=1, timeout=min(POLL_S, START_TIMEOUT_S))[0]:
                self.actors.take_answer(answer)
            if self.actors.start_errors:  # causes at this point, such as a GPU that torch does not see, persist
                group_name, cause = next(iter(self.actors.start_errors.items()))
                raise RunFailedError(f"a client actor ({group_name}) could not be started: {cause}")
        for group in self.groups.values():
            if not self.actors.is_up(group.name):
                raise RunFailedError(self._no_actor(group))

    def run(self, chunks: Sequence[Chunk], weights: SharedWeights) -> Iterator[ChunkResult]:
        reference = self._share(weights)
        jobs: dict[str, list[Job]] = {}
        for index, chunk in enumerate(chunks):
            jobs.setdefault(self._group_of(chunk), []).append(Job(index, chunk))
        waiting: Waiting = {name: in_balance(own, self.groups[name].actors) for name, own in jobs.items()}
        running: Running = {}
        self._down_since_s.clear()
        self._await_starts(timeout_s=0.0)
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
                    self._await_starts(timeout_s=min(POLL_S, START_TIMEOUT_S))
                self._give_up_groups(waiting, finished)
            yield finished.pop(index)

    def _share(self, weights: SharedWeights) -> Any:
        """The weights' reference in the object store, kept while the version is the same, as throughout a search."""
        if self._shared is None or self._shared[0] != weights.version:
            self._shared = (weights.version, ray.put(to_arrays(weights.tensors)))
        return self._shared[1]

    def _group_of(self, chunk: Chunk) -> str:
        if self.resident:
            client_id = chunk.assignments[0].client_id
            name = f"{RESIDENT}-{client_id}" if client_id is not None else f"{RESIDENT}-server"
            if name not in self.groups:
                self.groups[name] = replace(next(iter(self.groups.values())), name=name)
                self.actors.start(self.groups[name])
            return name
        for name, group in self.groups.items():
            if chunk.tier in group.tiers:
                return name
        return next(reversed(self.groups))

    def _dispatch(self, waiting: Waiting, running: Running, weights: Any, version: str) -> None:
        for group, jobs in waiting.items():
            while jobs and (member := self.actors.take(group)):
                job = jobs.popleft()
                job.member = member
                job.attempts += 1
                job.position, job.at_work_since_s = 0, time.monotonic()
                job.looked_s = job.at_work_since_s  # who has just begun need not be asked
                job.named_after_s = 0.0
                chunk = replace(job.chunk, assignments=tuple(job.chunk.assignments[i] for i in job.left))
                running[member.actor.run_chunk.remote(chunk, [weights], version)] = job

    def _await_starts(self, timeout_s: float) -> None:
        """Waits until a starting actor answers, or until the timeout."""
        self.actors.start_due()
        starting = self.actors.starting()
        if not starting:
            time.sleep(timeout_s)
            return
        # Waits for one answer and then takes all that are available.
        ready, rest = ray.wait(starting, num_returns=1, timeout=timeout_s)
        ready += ray.wait(rest, num_returns=len(rest), timeout=0)[0] if ready and rest else []
        for answer in ready:
            self.actors.take_answer(answer)

    def _collect(self, waiting: Waiting, running: Running, finished: Finished) -> None:
        """Waits for a job to finish, an actor to start or a client to time out."""
        self.actors.start_due()
        references = [*running, *self.actors.starting()]
        ready, _ = ray.wait(references, num_returns=1, timeout=min(POLL_S, self.client_timeout_s))
        for reference in ready:
            job = running.pop(reference, None)
            if job is None:
                self.actors.take_answer(reference)
            else:
                self._finish(job, reference, waiting, finished)
        for reference, job in list(running.items()):
            if self._hangs(job):
                del running[reference]
                self._give_up_client(job, waiting, finished)
            else:
                self._name_if_slow(job)

    def _finish(self, job: Job, reference: Any, waiting: Waiting, finished: Finished) -> None:
        try:
            result = unpack(ray.get(reference))
        except RayError as error:
            self._recover(job, error, waiting, finished)
            return
        self.actors.give_back(_member(job))
        finished[job.index] = with_timed_out(result, job)

    def _recover(self, job: Job, error: RayError, waiting: Waiting, finished: Finished) -> None:
        cause = cause_of(error)
        member = _member(job)
        about = self._about(member)
        who = ", ".join(named_client(a) for a in job.chunk.assignments)
        where = f"node {about.node} (pid {about.pid})"
        logger.warning("a client actor on %s ended while it worked on %s: %s", where, who, cause, exc_info=error)
        if self.actors.replace_lost(member) and about.node_id in job.nodes:
            # Both actors of the job were on the same lost node: the loss counts as one attempt.
            job.attempts -= 1
        job.nodes.add(about.node_id)
        if job.attempts < self.actor_attempts:
            waiting[member.group.name].appendleft(job)
            return
        text = f"the client actor ended {job.attempts} times while it worked on {who}; last on {where}: {cause}"
        finished[job.index] = failed(job, text, about.place)

    def _give_up_groups(self, waiting: Waiting, finished: Finished) -> None:
        """Fails the waiting clients of every group that has had no actor for `START_TIMEOUT_S`."""
        now_s = time.monotonic()
        for name, jobs in waiting.items():
            if not jobs or self.actors.is_up(name):
                self._down_since_s.pop(name, None)
            elif now_s - self._down_since_s.setdefault(name, now_s) >= START_TIMEOUT_S:
                text = self._no_actor(self.groups[name])
                logger.warning("%d chunks of clients fail: %s", len(jobs), text)
                while jobs:
                    job = jobs.popleft()
                    finished[job.index] = failed(job, text)

    def _no_actor(self, group: ActorGroup) -> str:
        gpus = f" and {group.num_gpus:g} GPUs" if group.num_gpus else ""
        cause = self.actors.start_errors.get(group.name)
        # No start error means that Ray has not placed the actor yet.
        because = f"the last one failed: {cause}" if cause else "no free CPUs, or no node that can run it"
        return (
            f"no client actor ({group.name}) of {group.num_cpus:g} CPUs{gpus} came up within {START_TIMEOUT_S:g} s "
            f"({because}): add a node or end what uses the cluster, and resume the run"
        )

    def _about(self, member: Member) -> About:
        assert member.about is not None, "only actors that have answered are given work"
        return member.about

    def _hangs(self, job: Job) -> bool:
        """Whether the job's running client has exceeded the time limit."""
        now_s = time.monotonic()
        limit_s = job.time_limit_s(self.client_timeout_s)
        late = now_s - job.at_work_since_s >= limit_s
        alone = len(job.left) == 1
        if not late and (alone or now_s - job.looked_s < LOOK_S):
            return False
        job.looked_s = now_s
        try:
            at: tuple[int, float] | None = ray.get(_member(job).actor.position.remote(), timeout=ANSWER_S)
        except (GetTimeoutError, RayError):
            # A dead actor is detected through its result. An actor that holds the interpreter lock counts as hanging.
            return late
        if at is not None:
            # Measured by the actor from the start of this client, without the chunk's earlier clients.
            if at[0] != job.position:
                job.named_after_s = 0.0
            job.position, job.at_work_since_s = at[0], now_s - at[1]
        return now_s - job.at_work_since_s >= limit_s

    def _name_if_slow(self, job: Job) -> None:
        """Names a client in the log that has been at work for long, and again whenever that time has doubled."""
        limit_s, at_work_s = job.time_limit_s(self.client_timeout_s), time.monotonic() - job.at_work_since_s
        if at_work_s < max(min(SLOW_S, limit_s / 2), 2 * job.named_after_s):
            return
        job.named_after_s = at_work_s
        about = self._about(_member(job))
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() - at_work_s))
        stack = min(job.chunk.stack, len(job.left))
        logger.warning(
            "%s has been at work for %.0f s, since %s, on node %s (pid %d)%s; the limit is %g s",
            *(named_client(job.chunk.assignments[job.left[job.position]]), at_work_s, since, about.place, about.pid),
            *(f", perhaps in a stack of up to {stack} clients" if stack > 1 else "", limit_s),
        )

    def _give_up_client(self, job: Job, waiting: Waiting, finished: Finished) -> None:
        left = job.left
        if job.chunk.stack > 1 and len(left) > 1:  # one by one, who hangs is told apart
            limit_s = job.time_limit_s(self.client_timeout_s)
            logger.warning("a stack gave no answer within %g s; its clients are trained one by one", limit_s)
            self.actors.replace(_member(job))
            job.chunk, job.attempts, job.fallback = replace(job.chunk, stack=1), job.attempts - 1, STACK_TIMED_OUT
            waiting[_member(job).group.name].appendleft(job)
            return
        place = left[job.position]
        assignment = job.chunk.assignments[place]
        member = _member(job)
        self.actors.replace(member)
        text = f"no answer within {self.client_timeout_s:g} s; its actor was replaced"
        logger.warning("%s gave %s", named_client(assignment), text)
        job.timed_out[place] = _lost(assignment, "timed_out", text, self._about(member).place)
        job.attempts -= 1
        if len(left) > 1:
            waiting[member.group.name].appendleft(job)
        else:
            finished[job.index] = with_timed_out(ChunkResult(), job)

    def close(self) -> None:
        """Ends all actors."""
        self.actors.close()
        self._shared = None


def _member(job: Job) -> Member:
    assert job.member is not None, "a running job has an actor"
    return job.member


def named_client(assignment: Assignment) -> str:
    """A client as messages name it: its tier, stage, round, and what it does, with the architecture if it has one."""
    client = "the server's data" if assignment.client_id is None else f"client {assignment.client_id}"
    return f"{client} ({assignment.tier}, {assignment.stage} round {assignment.round + 1}, {_what(assignment)})"


def _what(assignment: Assignment) -> str:
    name = type(assignment.task).__name__
    match assignment.task:
        case Train(network=Subnet() as subnet) | ScoreSubnet(subnet=subnet):
            return f"{name} {architecture_id(subnet.architecture)}"
        case _:
            return name


def failed(job: Job, error: str, node: str = "") -> ChunkResult:
    """The result of a job that no actor finished: all clients failed, except those that had timed out."""
    lost = [_lost(a, "failed", error, node) for i, a in enumerate(job.chunk.assignments) if i not in job.timed_out]
    return with_timed_out(ChunkResult(client_results=lost), job)


def _lost(assignment: Assignment, status: str, error: str, node: str) -> ClientResult:
    return nothing_done(
        status,
        error,
        client_id=assignment.client_id,
        tier=assignment.tier,
        selection_probability=assignment.selection_probability,
        selection_reason=assignment.selection_reason,
        node=node,
    )


def with_timed_out(result: ChunkResult, job: Job) -> ChunkResult:
    """The result with those of timed-out clients inserted, in plan order, and the `fallback` of those trained."""
    rest = iter(result.client_results)
    places = range(len(job.chunk.assignments))
    reports = [job.timed_out[i] if i in job.timed_out else next(rest) for i in places]
    if job.fallback is not None:
        reports = [r if r.status == "dropped" else replace(r, fallback=job.fallback) for r in reports]
    return ChunkResult(result.sums, reports)
