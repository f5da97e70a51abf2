"""The Ray executor: a pool of client actors, each with one chunk at work, and a second one queued while many wait."""

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from fedloom.actors.actor_set import ActorSet, Member, cause_of
from fedloom.actors.client import Position, accept_shared_memory, place, to_arrays, unpack
from fedloom.actors.placement import ActorGroup, Rooms, filled, free_rooms, said_free, whole_rooms
from fedloom.platform.clients.assignments import Assignment, ClientResult
from fedloom.platform.clients.execution import (
    SLOW_S,
    Chunk,
    ChunkResult,
    Executor,
    SharedWeights,
    at_work_for,
    named_client,
    nothing_done,
)
from fedloom.platform.clients.worker import WorkerSpec
from fedloom.platform.federation.loop import RunFailedError
from fedloom.platform.runs.logs import CONSOLE

logger = logging.getLogger(__name__)

POLL_S = 0.5
"""Seconds between two checks of a waiting pool for clients that hang."""

LOOK_S = 1.0
"""Seconds between two requests to an actor for its position in its chunk, as the time limit is one per client."""

ANSWER_S = 2.0
"""Seconds within which the actor answers such a request, from a separate thread."""

START_TIMEOUT_S = 300.0
"""Seconds that clients wait while no actor of their group is up.

Long enough for an actor to import torch and to wait for free CPUs or for a node to join the cluster.
"""

SLOW_START_S = 10.0
"""Seconds after which a run logs which actors wait for a node, and starts without them."""

NODES_S = 1.0
"""Seconds between two looks for nodes that have joined."""

STACK_TIME_FACTOR = 2
"""A stack of clients may take this many times as long as one client: it is a single training with vectorised steps."""

STACK_TIMED_OUT = "its stack exceeded the time limit"

RESIDENT = "resident"

MOST_NODES = 8
"""Largest number of nodes whose free resources a message lists."""

LAST_JOBS = 4
"""Jobs per actor at the end of a round that start in order of size, the largest first."""


@dataclass
class Job:
    """A chunk that an actor has to run: its index in the plan, its attempts, and their outcomes so far."""

    index: int
    chunk: Chunk
    attempts: int = 0
    timed_out: dict[int, ClientResult] = field(default_factory=dict)
    """Results of the clients that ran too long, by index in the chunk."""
    nodes: set[str] = field(default_factory=set)
    """Ids of the nodes on which actors ended during this job."""
    alone: bool = False
    """Whether no job may be queued behind its next attempt: an actor with one died, perhaps because of that one."""
    fallback: str | None = None
    """Why its clients are trained one by one although a stack was planned."""

    @property
    def left(self) -> list[int]:
        """Indices in the chunk of the clients that have not timed out."""
        return [i for i in range(len(self.chunk.assignments)) if i not in self.timed_out]

    @property
    def stack(self) -> int:
        """The largest number of clients that may be trained as one batch."""
        return min(self.chunk.stack, len(self.left))

    def time_limit_s(self, client_timeout_s: float) -> float:
        """The time limit of what the actor trains at once: one client, or several as a stack."""
        return client_timeout_s * (STACK_TIME_FACTOR if self.stack > 1 else 1)

    def finished(self, result: ChunkResult) -> ChunkResult:
        """The result in plan order, with timed-out clients inserted and `fallback` set for the clients that trained."""
        rest = iter(result.client_results)
        indices = range(len(self.chunk.assignments))
        results = [self.timed_out[i] if i in self.timed_out else next(rest) for i in indices]
        if self.fallback is not None:
            results = [r if r.status == "dropped" else replace(r, fallback=self.fallback) for r in results]
        return ChunkResult(result.sums, results)

    def failed(self, error: str, node: str = "") -> ChunkResult:
        """The result of a job that no actor finished: its clients failed, timed out, or had dropped out."""
        left = [self.chunk.assignments[i] for i in self.left]
        lost = [lost_client(a, "dropped" if a.dropped else "failed", a.dropped or error, node) for a in left]
        return self.finished(ChunkResult(client_results=lost))


def lost_client(assignment: Assignment, status: str, error: str, node: str) -> ClientResult:
    """The result of a client whose actor returned none."""
    return nothing_done(
        status,
        error,
        client_id=assignment.client_id,
        tier=assignment.tier,
        attacker=assignment.attacker,
        selection_probability=assignment.selection_probability,
        selection_reason=assignment.selection_reason,
        node=node,
    )


@dataclass
class Block:
    """Consecutive chunks whose sums are added on a node before they are sent."""

    indices: range
    node_id: str = ""
    """The node that its chunks go to as long as it has idle actors."""
    parts: dict[int, tuple[Job, ChunkResult, Any]] = field(default_factory=dict)
    """By index in the plan: a job, its result without sums, and the reference of its sums (None: no sums)."""


@dataclass
class Attempt:
    """A job on an actor, and which of its clients is at work there."""

    job: Job
    member: Member
    number: int
    """The number of jobs sent to the actor so far, including this one."""
    since_s: float
    """Start of that client on the monotonic clock, as last reported; infinite while the actor runs another job."""
    looked_s: float
    """Time of the last request for the position, on the monotonic clock."""
    position: int = 0
    """Index in `job.left` of that client, as last reported by the actor."""
    followed: bool = False
    """Whether another job is queued on the actor, which begins it before this one's result has arrived."""
    sums: Any = None
    """The reference of the job's sums, if they are added to others before they are sent."""
    named_after_s: float = 0.0
    """How long that client had been at work when the log last named it; 0 if it has not."""

    @property
    def index(self) -> int:
        """Index in the chunk of the client at work."""
        return self.job.left[self.position]


@dataclass
class Work:
    """One call of `ActorPool.run`: the shared weights by version, and the jobs that wait, run and have finished.

    `waiting` holds each group's jobs in the order in which they start, `running` the attempts by the reference of their
    result, `finished` the results that have not been yielded, by index in the plan. `blocks` is empty if each chunk's
    sums are sent separately; `adding` holds blocks and the actors that add their sums, by the reference of the sum.
    """

    weights: dict[str, Any]
    version: str
    waiting: dict[str, deque[Job]]
    blocks: list[Block] = field(default_factory=list)
    running: dict[Any, Attempt] = field(default_factory=dict)
    adding: dict[Any, tuple[Block, Member]] = field(default_factory=dict)
    finished: dict[int, ChunkResult] = field(default_factory=dict)


def said_nodes() -> str:
    """The free resources of each node, for a message."""
    nodes, free, whole = ray.nodes(), free_rooms(), whole_rooms()  # type: ignore[no-untyped-call]
    hosts = {node["NodeID"]: place(node["NodeManagerHostname"], node["NodeID"]) for node in nodes}
    said = [f"{said_free(free[node], whole[node])} on {hosts.get(node, node)}" for node in whole if node in free]
    return "free: " + "; ".join(said[:MOST_NODES] + ["..."] * (len(said) > MOST_NODES))


def in_balance(jobs: Sequence[Job], actors: int) -> deque[Job]:
    """Jobs in plan order, except that the last ones start largest first, so that all actors end at about the same time.

    Only the last ones are reordered, because results wait in memory until all earlier ones in the plan are there.
    """
    start = max(0, len(jobs) - LAST_JOBS * actors)
    return deque([*jobs[:start], *sorted(jobs[start:], key=lambda job: -job.chunk.samples)])


class ActorPool(Executor):
    """An `Executor` that runs chunks on client actors and yields results in the order of the plan.

    Args:
        spec: the specification from which each actor builds its worker.
        groups: the actors to start.
        resident: every client has its own actor, started at first use with the resources of the first group.
        most: the largest number of actors, up to which nodes that join are used; None for no limit.
        actor_attempts: attempts at a chunk whose actors die, before its clients are reported as failed.
        client_timeout_s: wall-clock seconds after which a client is reported as timed out and its actor is replaced. A
            stack of clients has `STACK_TIME_FACTOR` times as long, and is then trained one client after the other.
        sum_chunks: consecutive chunks whose sums are added on a node before they are sent to this process.
        wait_s: seconds that the first actors may take to start, if that is more than `START_TIMEOUT_S`.
        run_id: part of the actors' names in Ray's dashboard.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        groups: Sequence[ActorGroup],
        *,
        resident: bool = False,
        most: int | None = None,
        actor_attempts: int = 3,
        client_timeout_s: float = 3600.0,
        sum_chunks: int = 1,
        wait_s: float = 0.0,
        run_id: str = "",
    ) -> None:
        accept_shared_memory()
        self.spec, self.groups, self.resident = spec, {group.name: group for group in groups}, resident
        self.most, self.actor_attempts, self.client_timeout_s = most, actor_attempts, client_timeout_s
        self.sum_chunks, self.wait_s = sum_chunks, wait_s
        self.actors = ActorSet(spec, resident, run_id)
        self._waiting: dict[str, deque[Job]] = {}
        self._shared = dict[str, Any]()
        self._down_since_s: dict[str, float] = {}
        self._nodes, self._joined = set(free_rooms()), Rooms()
        self._looked_s = time.monotonic()
        if not resident:
            try:
                self._start_actors()
            except RunFailedError:
                self.actors.close()
                raise

    def _start_actors(self) -> None:
        """Starts the actors; returns when all have answered, or all with a process, at least one of each group.

        Actors without a process are logged after `SLOW_START_S`, and join when they come up. Raises RunFailedError if a
        start fails or if a group has no actor after the time-out.
        """
        for group in sorted(self.groups.values(), key=lambda group: (-group.num_gpus, -group.num_cpus)):
            for _ in range(group.actors):
                self.actors.start(group)
        start_s, timeout_s, told = time.monotonic(), max(START_TIMEOUT_S, self.wait_s), False
        while self.actors.starting() and (time.monotonic() - start_s < timeout_s or self.actors.fetching()):
            self._await_starts(min(POLL_S, timeout_s))
            if self.actors.start_errors:  # causes at this point, such as a GPU that torch does not see, persist
                group_name, cause = next(iter(self.actors.start_errors.items()))
                raise RunFailedError(f"a client actor ({group_name}) could not be started: {cause}")
            if time.monotonic() - start_s < SLOW_START_S or not (waiting := self.actors.waiting()):
                continue
            if not told:
                told = True
                logger.warning("%s", self._missing(waiting))
            if len(waiting) == len(self.actors.starting()) and all(map(self.actors.is_up, self.groups)):
                return
        for group in self.groups.values():
            if not self.actors.is_up(group.name):
                raise RunFailedError(self._no_actor(group, timeout_s))

    def _missing(self, waiting: Sequence[Member]) -> str:
        needs = Counter(str(member.group) for member in waiting)
        wanted, members = " and ".join(f"{n} of {size}" for size, n in needs.items()), len(self.actors.members)
        return (
            f"{members - len(waiting)} of {members} client actors have a process after {SLOW_START_S:g} s; {wanted} "
            f"wait for a node with room ({said_nodes()}): the run starts without them, as soon as each group has one"
        )

    def run(self, chunks: Sequence[Chunk], weights: SharedWeights) -> Iterator[ChunkResult]:
        references = self._share(weights)
        jobs: dict[str, list[Job]] = {}
        for index, chunk in enumerate(chunks):
            jobs.setdefault(self._group_of(chunk), []).append(Job(index, chunk))
        waiting = {name: in_balance(of_group, self.groups[name].actors) for name, of_group in jobs.items()}
        work = Work(references, weights.version, waiting)
        if self.sum_chunks > 1 and not any(chunk.keeps_updates for chunk in chunks):
            starts = range(0, len(chunks), self.sum_chunks)
            work.blocks = [Block(range(start, min(start + self.sum_chunks, len(chunks)))) for start in starts]
        self._waiting = waiting
        self._down_since_s.clear()
        self._await_starts(timeout_s=0.0)
        self._dispatch(work)
        return self._results(work, len(chunks))

    def _results(self, work: Work, num_chunks: int) -> Iterator[ChunkResult]:
        for index in range(num_chunks):
            while index not in work.finished:
                self._dispatch(work)
                if work.running or work.adding:
                    self._collect(work)
                else:
                    self._await_starts(timeout_s=min(POLL_S, START_TIMEOUT_S))
                self._give_up_groups(work)
            yield work.finished.pop(index)

    @property
    def lanes(self) -> int:
        return max(1, len(self.actors.members))

    def clients_waiting(self) -> int:
        """The number of clients of the current call that no actor has begun; may be called from another thread."""
        return sum(len(job.left) for jobs in self._waiting.values() for job in list(jobs))

    def close(self) -> None:
        """Ends all actors."""
        self.actors.close()
        self._shared.clear()

    # -- starting jobs and actors -------------------------------------------------------------------------------------

    def _share(self, weights: SharedWeights) -> dict[str, Any]:
        """The weights' references in the object store by version, reused while calls read them, as in a search."""
        tensors = {**weights.older, weights.version: weights.tensors}
        self._shared = {v: self._shared[v] if v in self._shared else ray.put(to_arrays(t)) for v, t in tensors.items()}
        return self._shared

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

    def _use_new_nodes(self) -> None:
        """Starts actors on nodes that have joined, once two looks in a row have found the same resources free there."""
        if self.resident or self.actors.starting() or time.monotonic() - self._looked_s < NODES_S:
            return
        self._looked_s = time.monotonic()
        joined = {node: room for node, room in free_rooms().items() if node not in self._nodes}
        if joined and joined == self._joined:
            self._nodes |= joined.keys()
            most = None if self.most is None else max(0, self.most - self.actors.planned())
            for group in filled(list(self.groups.values()), list(joined.values()), most):
                if group.actors:
                    CONSOLE.info("nodes have joined: %d client actors (%s) more", group.actors, group.name)
                for _ in range(group.actors):
                    self.actors.start(group, joins=True)
        self._joined = joined

    def _dispatch(self, work: Work) -> None:
        """Gives the next jobs to idle actors."""
        self._use_new_nodes()
        for group, jobs in work.waiting.items():
            while jobs and (member := self.actors.take(group)):
                self._send(work, jobs, member)
            # Actors at work get a second job, so that none waits for its next call. The last jobs go to the first idle
            # actor.
            at_work = [member for member in self.actors.members if member.jobs and member.group.name == group]
            for member in at_work if len(jobs) > len(at_work) else ():
                if len(member.jobs) == 1 and not work.running[member.jobs[0]].job.alone:
                    self._send(work, jobs, member)

    def _send(self, work: Work, jobs: deque[Job], member: Member) -> None:
        """Sends an actor one of these jobs, which it begins as soon as it has no other."""
        job = self._next_job(work, jobs, member.answered.node_id)
        job.attempts += 1
        chunk = replace(job.chunk, assignments=tuple(job.chunk.assignments[i] for i in job.left))
        sums, version = None, chunk.version or work.version
        if work.blocks:
            call = member.actor.run_part.options(num_returns=2)
            reference, sums = call.remote(chunk, [work.weights[version]], version)
        else:
            reference = member.actor.run_chunk.remote(chunk, [work.weights[version]], version)
        now_s = time.monotonic()
        since_s = now_s
        if member.jobs:
            since_s, work.running[member.jobs[0]].followed = math.inf, True
        member.sent += 1
        member.jobs.append(reference)
        work.running[reference] = Attempt(job, member, member.sent, since_s, looked_s=now_s, sums=sums)

    def _ended(self, work: Work, member: Member, reference: Any) -> None:
        """Notes that an actor has finished a job: it begins its next one, or is idle."""
        member.jobs.remove(reference)
        if not member.jobs:
            self.actors.give_back(member)
            return
        begun = work.running[member.jobs[0]]
        begun.since_s = min(begun.since_s, time.monotonic())

    @staticmethod
    def _withdraw(work: Work, member: Member) -> None:
        """Takes back the jobs that an actor to be replaced has not begun."""
        for reference in member.jobs:
            if (attempt := work.running.pop(reference, None)) is not None:
                attempt.job.attempts -= 1
                work.waiting[member.group.name].appendleft(attempt.job)
        member.jobs.clear()

    def _next_job(self, work: Work, jobs: deque[Job], node_id: str) -> Job:
        """The first job whose block is assigned to this node or to none yet, or else the first job."""
        for position, job in enumerate(jobs if work.blocks else ()):
            block = work.blocks[job.index // self.sum_chunks]
            if block.node_id in ("", node_id):
                block.node_id = node_id
                del jobs[position]
                return job
        return jobs.popleft()

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

    # -- results ------------------------------------------------------------------------------------------------------

    def _collect(self, work: Work) -> None:
        """Waits for a job to finish, an actor to start or a client to time out."""
        self.actors.start_due()
        references = [*work.running, *work.adding, *self.actors.starting()]
        ready, _ = ray.wait(references, num_returns=1, timeout=min(POLL_S, self.client_timeout_s))
        for reference in ready:
            if (adding := work.adding.pop(reference, None)) is not None:
                self._take_sum(work, *adding, reference)
                continue
            attempt = work.running.pop(reference, None)
            if attempt is None:
                self.actors.take_answer(reference)
                continue
            try:
                result = unpack(ray.get(reference))
            except RayError as error:
                self._recover(work, attempt, reference, error)
            else:
                self._ended(work, attempt.member, reference)
                self._finish(work, attempt.job, attempt.job.finished(result), attempt.sums)
        for reference, attempt in list(work.running.items()):
            now_s = time.monotonic()
            if reference not in work.running or attempt.since_s > now_s:
                continue
            self._look(attempt, now_s)
            if now_s - attempt.since_s >= attempt.job.time_limit_s(self.client_timeout_s):
                if ray.wait([reference], timeout=0, fetch_local=False)[0]:
                    continue  # it has finished: its result waits for this process, which was busy or stopped
                del work.running[reference]
                self._give_up_client(work, attempt)
            else:
                self._name_if_slow(attempt)

    def _finish(self, work: Work, job: Job, result: ChunkResult, sums: Any = None) -> None:
        """Stores a job's result; adds the sums of the job's block once all of the block's jobs have results."""
        if not work.blocks:
            work.finished[job.index] = result
            return
        block = work.blocks[job.index // self.sum_chunks]
        block.parts[job.index] = (job, result, sums)
        if len(block.parts) == len(block.indices):
            self._add(work, block)

    def _add(self, work: Work, block: Block, but: Member | None = None) -> None:
        """Has an actor other than `but`, on the block's node if possible, add the block's sums, if there are any."""
        references = [sums for i in block.indices if (sums := block.parts[i][2]) is not None]
        member = self.actors.up_on(block.node_id, but)
        if references and member is not None:
            work.adding[member.actor.add.remote(references)] = (block, member)
        elif references:
            self._repeat(work, block, "no client actor is up")
        else:
            work.finished.update((i, block.parts[i][1]) for i in block.indices)

    def _take_sum(self, work: Work, block: Block, member: Member, reference: Any) -> None:
        """Takes a block's sum; if it is lost, has its jobs' sums added again, or repeats the jobs if these are lost."""
        try:
            sums = unpack(ray.get(reference)).sums
        except RayActorError:  # the jobs' sums outlive the actor that was to add them, unless their node is lost, too
            self.actors.replace_if_idle(member)
            self._add(work, block, but=member)
            return
        except RayError as error:
            self._repeat(work, block, cause_of(error))
            return
        results = {i: block.parts[i][1] for i in block.indices}
        block.parts.clear()  # the store need not keep what was added
        last = block.indices[-1]
        work.finished |= {**results, last: replace(results[last], sums=sums)}

    def _repeat(self, work: Work, block: Block, cause: str) -> None:
        """Repeats the jobs of a block whose sums are lost, unless that was the last attempt."""
        logger.warning("the sums of %d chunks are lost: %s", len(block.indices), cause)
        block.node_id = ""
        for index in reversed(block.indices):
            job, _, sums = block.parts[index]
            if sums is None:
                continue
            if job.attempts < self.actor_attempts:
                del block.parts[index]
                work.waiting[self._group_of(job.chunk)].appendleft(job)
            else:
                block.parts[index] = (job, job.failed(f"its sums were lost {job.attempts} times; last: {cause}"), None)
        if len(block.parts) == len(block.indices):
            self._add(work, block)

    def _recover(self, work: Work, attempt: Attempt, reference: Any, error: RayError) -> None:
        """Repeats a job whose actor has ended, unless that was its last attempt."""
        job, member, cause = attempt.job, attempt.member, cause_of(error)
        if attempt.since_s == math.inf:  # the actor ended while it ran another job, which has the same error
            member.jobs.remove(reference)
            job.attempts -= 1
            work.waiting[member.group.name].appendleft(job)
            return
        self._withdraw(work, member)
        about = member.answered
        who = ", ".join(named_client(a) for a in job.chunk.assignments)
        where = f"node {about.node} (pid {about.pid})"
        logger.warning("a client actor on %s ended while it worked on %s: %s", where, who, cause, exc_info=error)
        counted = self.actors.replace_lost(member) and about.node_id in job.nodes  # both actors were on one lost node
        if counted or attempt.followed:
            job.attempts -= 1
        job.alone |= attempt.followed
        job.nodes.add(about.node_id)
        if job.attempts < self.actor_attempts:
            work.waiting[member.group.name].appendleft(job)
            return
        text = f"the client actor ended {job.attempts} times while it worked on {who}; last on {where}: {cause}"
        self._finish(work, job, job.failed(text, about.place))

    def _give_up_groups(self, work: Work) -> None:
        """Fails the waiting clients of every group that has had no actor for `START_TIMEOUT_S`."""
        now_s = time.monotonic()
        for name, jobs in work.waiting.items():
            if not jobs or self.actors.is_up(name):
                self._down_since_s.pop(name, None)
            elif now_s - self._down_since_s.setdefault(name, now_s) >= START_TIMEOUT_S:
                text = self._no_actor(self.groups[name], START_TIMEOUT_S)
                logger.warning("%d chunks of clients fail: %s", len(jobs), text)
                while jobs:
                    job = jobs.popleft()
                    self._finish(work, job, job.failed(text))

    def _no_actor(self, group: ActorGroup, waited_s: float) -> str:
        cause = self.actors.start_errors.get(group.name)
        # No start error means that Ray has not placed the actor yet.
        because = f"the last one failed: {cause}" if cause else f"no node has room for it: {said_nodes()}"
        return (
            f"no client actor ({group.name}) of {group} came up within {waited_s:g} s ({because}): "
            "add a node or end what uses the cluster, and resume the run"
        )

    # -- clients that hang --------------------------------------------------------------------------------------------

    def _look(self, attempt: Attempt, now_s: float) -> None:
        """Asks an actor which of its clients is at work, if that may have changed or the client seems to hang."""
        late = now_s - attempt.since_s >= attempt.job.time_limit_s(self.client_timeout_s)
        if not late and (len(attempt.job.left) == 1 or now_s - attempt.looked_s < LOOK_S):
            return
        attempt.looked_s = now_s
        try:
            at: Position | None = ray.get(attempt.member.actor.position.remote(), timeout=ANSWER_S)
        except (GetTimeoutError, RayError):
            # A dead actor is detected through its result. An actor that holds the interpreter lock counts as hanging.
            return
        if at is not None and at.job == attempt.number:  # else its result is on the way
            # Measured by the actor from the start of this client, without the chunk's earlier clients.
            if at.client != attempt.position:
                attempt.named_after_s = 0.0
            attempt.position, attempt.since_s = at.client, now_s - at.for_s

    def _name_if_slow(self, attempt: Attempt) -> None:
        """Logs a client that has been at work for long, and again whenever that time has doubled."""
        job, about = attempt.job, attempt.member.answered
        limit_s, at_work_s = job.time_limit_s(self.client_timeout_s), time.monotonic() - attempt.since_s
        if at_work_s < max(min(SLOW_S, limit_s / 2), 2 * attempt.named_after_s):
            return
        attempt.named_after_s = at_work_s
        said = at_work_for(job.chunk.assignments[attempt.index], at_work_s)
        stack = f", perhaps in a stack of up to {job.stack} clients" if job.stack > 1 else ""
        logger.warning("%s, on node %s (pid %d)%s; the limit is %g s", said, about.place, about.pid, stack, limit_s)

    def _give_up_client(self, work: Work, attempt: Attempt) -> None:
        """Replaces the actor of a client that hangs; the other unfinished clients of its chunk are repeated."""
        job, member = attempt.job, attempt.member
        job.attempts -= 1
        self._withdraw(work, member)
        self.actors.replace(member)
        if job.stack > 1:  # training one by one shows which client hangs
            limit_s = job.time_limit_s(self.client_timeout_s)
            logger.warning("a stack gave no answer within %g s; its clients are trained one by one", limit_s)
            job.chunk, job.fallback = replace(job.chunk, stack=1), STACK_TIMED_OUT
        else:
            index = attempt.index
            assignment = job.chunk.assignments[index]
            text = f"no answer within {self.client_timeout_s:g} s; its actor was replaced"
            logger.warning("%s gave %s", named_client(assignment), text)
            job.timed_out[index] = lost_client(assignment, "timed_out", text, member.answered.place)
        if job.left:
            work.waiting[member.group.name].appendleft(job)
        else:
            self._finish(work, job, job.finished(ChunkResult()))
