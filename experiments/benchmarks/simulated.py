"""A pool of many actors in few processes: the platform's own pool and actors, and Ray's own transport.

Every simulated actor is a thread of a client actor, because 64 processes that import torch need 64 cores and 16 GB to
say anything about the server. The server's side sees no difference: 64 handles, each with one chunk at a time.
"""

from typing import Any

from fedloom.actors.actor_set import ActorSet, Member
from fedloom.actors.client import RemoteClient
from fedloom.actors.placement import ActorGroup
from fedloom.actors.pool import ActorPool
from fedloom.platform.federation.world import World


class ThreadedSet(ActorSet):
    """An actor set that starts one process, and in it a thread per actor."""

    _process: Any = None

    def start(self, group: ActorGroup) -> None:
        """Adds one more actor of the group, which shares the process of the others."""
        if self._process is None:
            remote = RemoteClient.options(num_cpus=group.num_cpus, max_concurrency=group.actors, max_restarts=0)
            self._process = remote.remote(self._spec_ref, group.num_gpus)
        self.members.append(Member(self._process, group, self._process.about.remote()))
        self.idle.setdefault(group.name, [])


class SimulatedPool(ActorPool):
    """The platform's pool over threads instead of processes."""

    def _start_actors(self) -> None:
        self.actors = ThreadedSet(self.spec, self.resident)
        super()._start_actors()


def make_simulated(world: World) -> SimulatedPool:
    """A pool of `executor.actors` simulated actors."""
    actors = world.config.executor.actors or 1
    return SimulatedPool(world.spec, [ActorGroup("all", actors, num_cpus=1.0, num_gpus=0.0)])
