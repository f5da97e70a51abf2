"""The server actor: holds the global state, runs the method's rounds and writes results; the driver only watches."""

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import ray
import torch

from fedloom.actors.client import WATCH, accept_shared_memory
from fedloom.actors.metrics import RunMetrics
from fedloom.actors.placement import groups_in_line
from fedloom.actors.pool import ActorPool
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.loop import RoundProgress
from fedloom.platform.federation.world import World
from fedloom.platform.runs.logs import CONSOLE, warnings_in
from fedloom.platform.runs.run import MakeExecutor, Resume, RunEnd, RunIdentity, Watcher, run_to_end
from fedloom.platform.runs.source_code import named_modules

logger = logging.getLogger(__name__)


def make_pool(world: World, tell: Callable[[str], None] = CONSOLE.info, run_id: str = "") -> ActorPool:
    """The client actors of a run, in this process's placement group or else on the cluster's free resources.

    `tell` gets the message of a run that has to wait for them; `run_id` is part of their names.
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
        run_id=run_id,
    )


def metered(
    run_id: str, watch: Callable[[RoundProgress], None], tell: Callable[[str], None] = CONSOLE.info
) -> tuple[MakeExecutor, Callable[[RoundProgress], None]]:
    """`make_pool` and `watch`, wrapped so that every round is reported to Ray's metrics."""
    pools, metrics = list[ActorPool](), RunMetrics(run_id)

    def make(world: World) -> ActorPool:
        pools.append(make_pool(world, tell, run_id))
        return pools[0]

    def watched(progress: RoundProgress) -> None:
        metrics.tell(progress, pools[0])
        watch(progress)

    return make, watched


class Told(NamedTuple):
    """A run's report: its id once it has begun, the run whose supernet it uses, its stages, what it waits for, and the
    latest rounds and warnings.
    """

    run_id: str
    supernet_of: str
    stages: list[str]
    waiting: str
    rounds: list[RoundProgress]
    warnings: list[str]


NAMESPACE = "fedloom"
"""Ray's namespace for detached servers, which outlive their driver; each is named by its run's id there."""
UNWATCHED_S = 20.0
"""Seconds after the last question about an ended run, after which its detached server ends itself."""


class ServerActor:
    """Executes one run. `run` blocks until the run ends; the other methods answer meanwhile.

    A detached server calls its own methods at its start: Ray would drop the calls of a driver that dies.
    """

    def __init__(self, run_id: str, config: RunConfig, resume: Resume | None, folder: str) -> None:
        """`run_id` is that of the run to resume, or an unused one; relative paths start at `folder`, if it exists here.

        Otherwise they start at the folder where Ray was started.
        """
        with suppress(OSError):
            os.chdir(folder)
        self._run_id, self._config, self._resume = run_id, config, resume
        self._has_begun, self._supernet_of, self._waiting = False, "", ""
        self._stages: list[str] = []
        self._rounds: list[RoundProgress] = []
        self._warnings: list[str] = []
        self._stop = threading.Event()
        self._asked_s = time.monotonic()
        self._calls: list[Any] = []
        if config.ray.detached:
            this = ray.get_runtime_context().current_actor
            self._calls = [this.run.remote(), this.leave.remote()]

    def __repr__(self) -> str:
        return f"server of {self._run_id}"

    def run(self) -> RunEnd:
        """Starts or resumes the run and returns when it has ended."""
        config = self._config
        accept_shared_memory()
        torch.set_num_threads(config.executor.threads)

        def started(_run_id: str, supernet_of: str) -> None:
            self._supernet_of, self._has_begun = supernet_of, True

        def waits(message: str) -> None:  # another run took resources that the driver had found free
            CONSOLE.info(message)
            self._waiting = message

        cluster = ray.get_runtime_context().gcs_address if config.ray.detached else ""
        make, watch = metered(self._run_id, self._rounds.append, waits)
        watcher = Watcher(started, watch, self._stop.is_set, cluster, self._stages.extend)
        with warnings_in(self._warnings):
            return run_to_end(config, make, watcher, self._resume, RunIdentity(self._run_id))

    def leave(self) -> None:
        """Ends this process after its run, once questions about it have stopped for `UNWATCHED_S`."""
        self._asked_s = time.monotonic()
        while time.monotonic() < self._asked_s + UNWATCHED_S:
            time.sleep(1.0)
        ray.actor.exit_actor()  # type: ignore[no-untyped-call]

    @ray.method(concurrency_group=WATCH)
    def ending(self) -> list[Any]:
        """A detached server's reference to the result of `run`; in a list, since Ray would wait for a bare one."""
        return self._calls[:1]

    @ray.method(concurrency_group=WATCH)
    def progress(self, after: int, warned: int = 0) -> Told:
        """The run's report, without the first `after` finished rounds and the first `warned` warnings."""
        self._asked_s = time.monotonic()
        run_id = self._run_id if self._has_begun else ""
        rounds, warnings = self._rounds[after:], self._warnings[warned:]
        return Told(run_id, self._supernet_of, self._stages, self._waiting, rounds, warnings)

    @ray.method(concurrency_group=WATCH)
    def stop(self) -> None:
        """Asks the run to end after the current round."""
        self._stop.set()


RemoteServer: Any = ray.remote(concurrency_groups={WATCH: 1})(ServerActor)  # type: ignore[call-overload]
"""`ServerActor` as a Ray actor class."""
