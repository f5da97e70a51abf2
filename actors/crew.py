"""The client actors of a pool: who is starting, who is up, who idles, and who takes the place of one that is lost."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayError

from fedloom.actors.client import About, RemoteClient, source_of
from fedloom.actors.placement import Lane
from fedloom.platform.clients.worker import WorkerSpec
from fedloom.platform.federation.loop import RunFailedError

logger = logging.getLogger(__name__)

RESTART_S = 5.0
"""How long a start that failed is waited for before the next one; twice as long after every further failure."""

MOST_DOUBLINGS = 5

CAUSE_CHARACTERS = 400


@dataclass
class Member:
    """One actor. It is up once it has answered; what it says about itself was asked when it was made."""

    actor: Any
    lane: Lane
    answer: Any
    about: About | None = None


class Crew:
    """Starts actors, knows which can be given work, and replaces those that are lost.

    A member that is starting may wait for CPUs for as long as it takes: nobody waits for it while others are up.
    """

    def __init__(self, spec: WorkerSpec, resident: bool = False) -> None:
        self.resident = resident
        # The specification (with its cost tables) goes into the object store once, not into every actor's creation.
        self._spec_ref = ray.put(spec)
        self._plugins, self._source = spec.plugins, source_of(spec)
        self.members: list[Member] = []
        self.idle: dict[str, list[Member]] = {}
        self.why: dict[str, str] = {}
        """Per lane what the last failed start, since the last that succeeded, failed of."""
        self._failures: dict[str, int] = {}
        self._due: list[tuple[float, Lane]] = []

    def start(self, lane: Lane) -> None:
        """Asks for one more actor of the lane."""
        remote = RemoteClient.options(num_cpus=lane.num_cpus, num_gpus=lane.num_gpus, max_restarts=0)
        actor = remote.remote(self._spec_ref, lane.num_gpus)
        self.members.append(Member(actor, lane, actor.about.remote()))
        self.idle.setdefault(lane.name, [])

    def start_due(self) -> None:
        """Starts again what failed to start and has waited long enough."""
        now_s = time.monotonic()
        for entry in [e for e in self._due if e[0] <= now_s]:
            self._due.remove(entry)
            self.start(entry[1])

    def starting(self) -> list[Any]:
        """References of the answers that are still to come: for `ray.wait`, and then `hear`."""
        return [member.answer for member in self.members if member.about is None]

    def hear(self, answer: Any) -> None:
        """Takes a starting actor's answer, which is there: it idles from now on, or is to be started again later.

        Raises RunFailedError for an actor that could only spoil the run: of another source, or without the data.
        """
        member = next(m for m in self.members if m.answer == answer)
        name = member.lane.name
        try:
            about: About = ray.get(answer)
        except RayError as error:
            self.why[name] = cause_of(error)
            failures = self._failures[name] = self._failures.get(name, 0) + 1
            wait_s = RESTART_S * 2 ** min(failures - 1, MOST_DOUBLINGS)
            self._due.append((time.monotonic() + wait_s, self._again(member.lane)))
            self._end(member)
            logger.warning("a client actor (%s) could not be started: %s", name, self.why[name])
            return
        check(about, self._source, self._plugins)
        member.about = about
        self.why.pop(name, None)
        self._failures.pop(name, None)
        self.idle[name].append(member)

    def is_up(self, lane: str) -> bool:
        """Whether any actor of the lane can do work, now or when it has done what it is at."""
        return any(member.about is not None and member.lane.name == lane for member in self.members)

    def take(self, lane: str) -> Member | None:
        """An actor that idles, for a job; None if there is none."""
        idle = self.idle[lane]
        return idle.pop() if idle else None

    def give_back(self, member: Member) -> None:
        """The job is done."""
        self.idle[member.lane.name].append(member)

    def replace(self, member: Member) -> None:
        """Ends an actor, if it has not ended by itself, and starts another in its place."""
        self._end(member)
        self.start(self._again(member.lane))

    def replace_lost(self, member: Member) -> bool:
        """Replaces an actor that ended by itself; returns whether it is because its node is gone.

        Then those that idled on that node are replaced, too: no job is sent after the first that told of the loss.
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
        """Ends all actors."""
        for member in self.members:
            ray.kill(member.actor)
        self.members.clear()
        self.idle.clear()
        self._due.clear()

    def _again(self, lane: Lane) -> Lane:
        # A client's own actor must come up somewhere, also where a node is gone and the others' CPUs are all taken:
        # fewer CPUs in Ray's books mean that clients share them, not that results differ.
        return replace(lane, num_cpus=0.0) if self.resident else lane

    def _end(self, member: Member) -> None:
        ray.kill(member.actor)
        self.members.remove(member)


def check(about: About, own: str, plugins: Sequence[str]) -> None:
    """Raises RunFailedError unless an actor runs the server's source (`own`) and finds the data."""
    if about.source_hash != own:
        named = f" and {', '.join(plugins)}" if plugins else ""
        raise RunFailedError(
            f"node {about.node} runs fedloom source {about.source_hash}, the server {own}: install the same "
            f"version of fedloom{named} on every node"
        )
    if about.missing_data:
        raise RunFailedError(about.missing_data)


def cause_of(error: Exception) -> str:
    """An error's text on one line, not too long for a row."""
    return " ".join(str(error).split())[:CAUSE_CHARACTERS]
