"""The server actor: holds the global state, runs the method's rounds and writes results; the driver only watches."""

import logging
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple

import ray
import torch

from fedloom.actors.client import WATCH, accept_shared_memory
from fedloom.actors.placement import groups_in_line
from fedloom.actors.pool import ActorPool
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.loop import RoundProgress
from fedloom.platform.federation.world import World
from fedloom.platform.runs.logs import CONSOLE, warnings_in
from fedloom.platform.runs.run import Resume, RunEnd, Watcher, run_to_end
from fedloom.platform.runs.source_code import named_modules

logger = logging.getLogger(__name__)


def make_pool(world: World, tell: Callable[[str], None] = CONSOLE.info) -> ActorPool:
    """The client actors of a run, in this process's placement group or else on the cluster's free resources.

    `tell` gets the message of a run that has to wait for them.
    """
    executor, groups = world.config.executor, groups_in_line(world, tell)
    wanted = max(tier.num_gpus for tier in world.tiers)
    if executor.resident and groups[0].num_gpus < wanted:
        logger.warning(
            "%d actors, each with %g of a GPU instead of %g, so that all fit (executor.resident)",
            groups[0].actors,
            groups[0].num_gpus,
            wanted,
        )
    return ActorPool(
        replace(world.spec, plugins=tuple(named_modules(asdict(world.config))), torch=str(torch.__version__)),
        groups,
        resident=executor.resident,
        most=executor.actors,
        sum_chunks=executor.sum_chunks or 1,
        wait_s=world.config.ray.wait_s,
        actor_attempts=executor.failures.actor_attempts,
        client_timeout_s=executor.client_timeout_s,
    )


class Told(NamedTuple):
    """What a run has told: its id, whose supernet it uses, what it waits for, and the latest rounds and warnings."""

    run_id: str
    supernet_of: str
    waiting: str
    rounds: list[RoundProgress]
    warnings: list[str]


class ServerActor:
    """Executes one run. `run` blocks until the run ends; the other methods answer meanwhile."""

    def __init__(self) -> None:
        self._run_id, self._supernet_of, self._waiting = "", "", ""
        self._rounds: list[RoundProgress] = []
        self._warnings: list[str] = []
        self._stop = threading.Event()

    def run(self, config: RunConfig, resume: Resume | None = None) -> RunEnd:
        """Starts or resumes the run and returns when it has ended."""
        accept_shared_memory()
        torch.set_num_threads(config.executor.threads)

        def started(run_id: str, supernet_of: str) -> None:
            self._supernet_of, self._run_id = supernet_of, run_id

        def waits(message: str) -> None:  # another run was faster since the driver looked for free resources
            CONSOLE.info(message)
            self._waiting = message

        watcher = Watcher(started, self._rounds.append, self._stop.is_set)
        with warnings_in(self._warnings):
            return run_to_end(config, partial(make_pool, tell=waits), watcher, resume)

    @ray.method(concurrency_group=WATCH)
    def progress(self, after: int, warned: int = 0) -> Told:
        """What the run has told, without the first `after` finished rounds and the first `warned` warnings."""
        rounds, warnings = self._rounds[after:], self._warnings[warned:]
        return Told(self._run_id, self._supernet_of, self._waiting, rounds, warnings)

    @ray.method(concurrency_group=WATCH)
    def stop(self) -> None:
        """Asks the run to end after the current round."""
        self._stop.set()


RemoteServer: Any = ray.remote(concurrency_groups={WATCH: 1})(ServerActor)  # type: ignore[call-overload]
"""`ServerActor` as a Ray actor class."""
