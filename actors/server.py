"""The server actor: holds the global state, runs the method's loop, writes results; the driver only watches."""

import threading
from dataclasses import asdict, replace
from typing import Any

import ray
import torch

from fedloom.actors.client import WATCH
from fedloom.actors.placement import free_resources, lanes_of_run, nodes_to_fill
from fedloom.actors.pool import ActorPool
from fedloom.actors.wire import accept_shared_memory
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.loop import RoundProgress
from fedloom.platform.federation.world import World
from fedloom.platform.runs.ending import Resume, RunEnd, run_to_end
from fedloom.platform.runs.plugin_sources import named_modules
from fedloom.platform.runs.run import Watcher


def make_pool(world: World) -> ActorPool:
    """The client actors for a run: in this process's placement group, or else on what the cluster has free."""
    executor = world.config.executor
    lanes = lanes_of_run(executor, world.tiers, free_resources(), world.num_clients, nodes_to_fill())
    return ActorPool(
        replace(world.spec, plugins=tuple(named_modules(asdict(world.config)))),
        lanes,
        resident=executor.resident,
        actor_attempts=executor.failures.actor_attempts,
        client_timeout_s=executor.client_timeout_s,
    )


class ServerActor:
    """One run. `run` blocks until its end; the other methods answer meanwhile."""

    def __init__(self) -> None:
        self._run_id, self._supernet_of = "", ""
        self._rounds: list[RoundProgress] = []
        self._stop = threading.Event()

    def run(self, config: RunConfig, resume: Resume | None = None) -> RunEnd:
        """Runs (or resumes) to the end."""
        accept_shared_memory()
        torch.set_num_threads(config.executor.threads)
        return run_to_end(config, make_pool, Watcher(self._started, self._rounds.append, self._stop.is_set), resume)

    def _started(self, run_id: str, supernet_of: str) -> None:
        self._supernet_of, self._run_id = supernet_of, run_id

    @ray.method(concurrency_group=WATCH)
    def progress(self, after: int) -> tuple[str, str, list[RoundProgress]]:
        """The run's id, that of the run whose supernet it uses, and the rounds finished since the first `after`."""
        return self._run_id, self._supernet_of, self._rounds[after:]

    @ray.method(concurrency_group=WATCH)
    def stop(self) -> None:
        """Asks the run to end after the present round."""
        self._stop.set()


RemoteServer: Any = ray.remote(concurrency_groups={WATCH: 1})(ServerActor)  # type: ignore[call-overload]
"""The server as a Ray actor class."""
