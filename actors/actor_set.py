"""The client actors of a pool: starts them, tracks which are starting, idle or busy, and replaces lost ones."""

import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray._private import state as ray_state
from ray.exceptions import RayError

from fedloom.actors.client import About, RemoteClient, source_of
from fedloom.actors.data_transfer import Origin, start_reader
from fedloom.actors.placement import ActorGroup
from fedloom.platform.clients.worker import WorkerSpec
from fedloom.platform.federation.loop import RunFailedError
from fedloom.platform.runs.logs import CONSOLE

logger = logging.getLogger(__name__)

RESTART_S = 5.0
"""Seconds between a failed start and the next attempt; doubles with every further failure."""

MOST_DOUBLINGS = 5

ANSI_COLOUR = re.compile("\x1b\\[[0-9;]*m")
ADVICE = " Some common causes include"
"""From here on, Ray's message is the same for every process that it loses."""


@dataclass
class Member:
    """One client actor. It is up once its first call, to `about`, has returned."""

    actor: Any
    group: ActorGroup
    answer: Any
    """Reference of the result of `about`, which is called when the actor is created."""
    about: About | None = None
    """None until the actor has answered."""
    joins: bool = False
    """Whether it was started because its node has joined: the run can do without it."""
    fetches: bool = False
    """Whether its node lacks the prepared data: `answer` is then that of `fetch_data`."""
    sent: int = 0
    """The number of jobs that were sent to it."""
    jobs: list[Any] = field(default_factory=list)
    """References of the results of its unfinished jobs: one at work, and perhaps the next one."""

    @property
    def answered(self) -> About:
        """The answer of an actor that is up."""
        assert self.about is not None, "only actors that have answered are given work"
        return self.about


class ActorSet:
    """Starts actors, tracks which can be given work, and replaces those that are lost.

    A starting actor may wait for free CPUs without limit; while others are up, no caller blocks on it.
    """

    def __init__(self, spec: WorkerSpec, resident: bool = False, run_id: str = "") -> None:
        self.resident, self._run_id, self._started = resident, run_id, 0
        # The specification holds cost tables: the object store keeps one copy instead of one per actor's creation.
        self._spec_ref = ray.put(spec)
        self._plugins, self._source = spec.plugins, source_of(spec)
        self._paths = spec.dataset_path, spec.partition_path
        self._reader: Any = None
        """Reads the prepared data for nodes that lack it; None if all nodes so far have it."""
        self.members: list[Member] = []
        self.idle: dict[str, list[Member]] = {}
        self.start_errors: dict[str, str] = {}
        """By group: the error of the latest start, if it failed."""
        self._failures: dict[str, int] = {}
        self._unused_nodes = set[str]()
        """Ids of the nodes that have joined and cannot be used, although Ray may place actors there."""
        self._due: list[tuple[float, ActorGroup, bool]] = []
        """Starts to be repeated: when, of which group, and whether the actor `joins`."""

    def start(self, group: ActorGroup, *, joins: bool = False) -> None:
        """Requests one more actor of the group; with `joins`, it is given up if its node cannot be used."""
        remote = RemoteClient.options(num_cpus=group.num_cpus, num_gpus=group.num_gpus, max_restarts=0)
        self._started += 1
        actor = remote.remote(self._spec_ref, group.num_gpus, f"client:{group.name}:{self._started} {self._run_id}")
        self.members.append(Member(actor, group, actor.about.remote(), joins=joins))
        self.idle.setdefault(group.name, [])

    def start_due(self) -> None:
        """Repeats the failed starts whose waiting time is over."""
        now_s = time.monotonic()
        for entry in [e for e in self._due if e[0] <= now_s]:
            self._due.remove(entry)
            self.start(entry[1], joins=entry[2])

    def starting(self) -> list[Any]:
        """References of the answers of starting actors, for `ray.wait` and then `take_answer`."""
        return [member.answer for member in self.members if member.about is None]

    def waiting(self) -> list[Member]:
        """Starting actors that Ray has not given a process on a node yet; the others import torch."""
        return [member for member in self.members if member.about is None and not _has_process(member.actor)]

    def take_answer(self, answer: Any) -> None:
        """Processes the answer of a starting actor: it is idle now, or its start is repeated later; see `check`."""
        member = next(m for m in self.members if m.answer == answer)
        name = member.group.name
        try:
            about: About = ray.get(answer)
        except RayError as error:
            self._start_later(member, cause_of(error), error)
            return
        try:
            check(about, self._source, self._plugins)
            if about.missing_data and member.fetches:
                raise RunFailedError(about.missing_data)
        except RunFailedError as error:
            if member.joins:
                self._unused_nodes.add(about.node_id)
                self._end(member)
                logger.warning("a node that has joined is not used: %s", error)
            elif about.node_id in self._unused_nodes:
                self._start_later(member, str(error), error)
            else:
                raise
            return
        if about.missing_data:
            if self._reader is None:
                self._reader = start_reader()
            member.fetches = True
            member.answer = member.actor.fetch_data.remote(Origin(self._reader, *self._paths))
            return
        if about.fetched:
            CONSOLE.info("node %s fetched %s from the server", about.place, about.fetched)
        member.about, member.fetches = about, False
        self.start_errors.pop(name, None)
        self._failures.pop(name, None)
        self.idle[name].append(member)

    def _start_later(self, member: Member, cause: str, error: Exception) -> None:
        """Ends an actor whose start has failed and repeats the start later."""
        name = member.group.name
        self.start_errors[name] = cause
        failures = self._failures[name] = self._failures.get(name, 0) + 1
        wait_s = RESTART_S * 2 ** min(failures - 1, MOST_DOUBLINGS)
        self._due.append((time.monotonic() + wait_s, self._for_restart(member.group), member.joins))
        self._end(member)
        logger.warning("a client actor (%s) could not be started: %s", name, cause, exc_info=error)

    def is_up(self, group: str) -> bool:
        """Whether any actor of the group is up, idle or busy, or will be as soon as it has fetched its data."""
        return any((member.about or member.fetches) and member.group.name == group for member in self.members)

    def fetching(self) -> bool:
        """Whether any actor is fetching its data, which has no time limit as long as it makes progress."""
        return any(member.fetches for member in self.members)

    def planned(self) -> int:
        """The number of actors, including those whose failed start will be repeated."""
        return len(self.members) + len(self._due)

    def up_on(self, node_id: str, but: Member | None = None) -> Member | None:
        """An actor other than `but` that is up (idle or busy), on this node if possible; None if there is none."""
        up = [member for member in self.members if member.about is not None and member is not but]
        return next((member for member in up if member.answered.node_id == node_id), next(iter(up), None))

    def up_and_starting(self) -> tuple[int, int]:
        """How many actors are up, idle or busy, and how many have not answered yet."""
        members = list(self.members)  # another thread may ask
        up = sum(member.about is not None for member in members)
        return up, len(members) - up

    def take(self, group: str) -> Member | None:
        """Takes an idle actor of the group for a job; None if there is none."""
        idle = self.idle[group]
        return idle.pop() if idle else None

    def give_back(self, member: Member) -> None:
        """Marks an actor as idle after its job."""
        self.idle[member.group.name].append(member)

    def replace(self, member: Member) -> None:
        """Ends an actor, if it still runs, and starts another in its place."""
        self._end(member)
        self.start(self._for_restart(member.group))

    def replace_if_idle(self, member: Member) -> None:
        """Replaces an actor that ended while it was idle; a busy one is replaced when its job is repeated."""
        idle = self.idle[member.group.name]
        if member in idle:
            idle.remove(member)
            self.replace_lost(member)

    def replace_lost(self, member: Member) -> bool:
        """Replaces an actor that ended by itself; returns whether its node is lost.

        Idle actors on lost nodes are replaced as well, so that no further job is sent to them.
        """
        self.replace(member)
        nodes = ray.nodes()  # type: ignore[no-untyped-call]
        alive = {node["NodeID"] for node in nodes if node["Alive"]}
        for idle in self.idle.values():
            for other in [m for m in idle if m.about is not None and m.about.node_id not in alive]:
                idle.remove(other)
                self.replace(other)
        return member.about is not None and member.about.node_id not in alive

    def close(self) -> None:
        """Ends all actors, unless Ray has ended and they with it: `ray.kill` would start Ray again."""
        actors = [member.actor for member in self.members] + [self._reader] * (self._reader is not None)
        for actor in actors if ray.is_initialized() else ():
            ray.kill(actor)
        self._reader = None
        self.members.clear()
        self.idle.clear()
        self._due.clear()

    def _for_restart(self, group: ActorGroup) -> ActorGroup:
        # A resident client's actor must start even if its node is lost and all other CPUs are reserved. An actor that
        # reserves no CPUs shares them with others, and the results are the same.
        return replace(group, num_cpus=0.0) if self.resident else group

    def _end(self, member: Member) -> None:
        ray.kill(member.actor)
        self.members.remove(member)


def _has_process(actor: Any) -> bool:
    known = ray_state.actors(actor._actor_id.hex())  # the address names a node even while there is no room on it
    return bool(known) and known["Pid"] != 0


def check(about: About, source: str, plugins: Sequence[str]) -> None:
    """Raises RunFailedError unless the actor runs the server's source (hash `source`) and version of torch."""
    if about.source_hash != source:
        named = f" and {', '.join(plugins)}" if plugins else ""
        raise RunFailedError(
            f"node {about.node} runs fedloom source {about.source_hash}, the server {source}: install the same "
            f"version of fedloom{named} on every node"
        )
    if about.other_torch:
        raise RunFailedError(about.other_torch)


def cause_of(error: Exception) -> str:
    """The cause that a Ray error names, on one line, with the process and its address if the error names them.

    Ray first says at length what it was doing, then with indents how it got there, and last what happened.
    """
    text = ANSI_COLOUR.sub("", str(error))
    lines = text.splitlines()
    last_indented = max((i for i, line in enumerate(lines) if line[:1].isspace()), default=-1)
    said = " ".join(" ".join(lines[last_indented + 1 :] or lines).split()).partition(ADVICE)[0]
    where = re.search(r"\bip[=:] ?([\w.:]+)", text), re.search(r"\bpid[=:] ?(\d+)", text)
    return f"{said}; on {where[0][1]} (pid {where[1][1]})" if where[0] and where[1] else said
