"""The server actor: holds the global state, runs the method's loop, writes results; the driver only watches."""

import threading
from dataclasses import dataclass
from typing import Any

import ray
import torch

from fedloom.actors.client import WATCH
from fedloom.actors.placement import free_resources, lanes_of_run, nodes_to_fill
from fedloom.actors.pool import ActorPool
from fedloom.actors.wire import accept_shared_memory
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.loop import InterruptedRunError, RoundProgress, RunFailedError
from fedloom.platform.federation.world import World
from fedloom.platform.results.mirror import MirrorError
from fedloom.platform.runs.run import Watcher, resume_run, start_run


def make_pool(world: World) -> ActorPool:
    """The client actors for a run: in this process's placement group, or else on what the cluster has free."""
    executor = world.config.executor
    lanes = lanes_of_run(executor, world.tiers, free_resources(), world.num_clients, nodes_to_fill())
    return ActorPool(
        world.spec,
        lanes,
        resident=executor.resident,
        actor_attempts=executor.failures.actor_attempts,
        client_timeout_s=executor.client_timeout_s,
    )


@dataclass(frozen=True)
class RunEnd:
    """How a run ended: `kind` is done, refused (a bad configuration), failed, infrastructure or interrupted."""

    run_id: str
    kind: str
    message: str = ""


class ServerActor:
    """One run. `run` blocks until its end; the other methods answer meanwhile."""

    def __init__(self) -> None:
        self._run_id = ""
        self._rounds: list[RoundProgress] = []
        self._stop = threading.Event()

    def run(self, config: RunConfig, resume: str | None = None) -> RunEnd:
        """Runs (or resumes) to the end."""
        accept_shared_memory()
        torch.set_num_threads(config.executor.threads)
        watcher = Watcher(self._started, self._rounds.append, self._stop.is_set)
        try:
            if resume is None:
                start_run(config, make_pool, watcher)
            else:
                resume_run(config, resume, make_pool, watcher)
        except ValueError as error:
            return RunEnd(self._run_id, "refused", str(error))
        except RunFailedError as error:
            return RunEnd(self._run_id, "failed", str(error))
        except MirrorError as error:
            return RunEnd(self._run_id, "infrastructure", str(error))
        except InterruptedRunError as error:
            return RunEnd(self._run_id, "interrupted", str(error))
        return RunEnd(self._run_id, "done")

    def _started(self, run_id: str) -> None:
        self._run_id = run_id

    @ray.method(concurrency_group=WATCH)
    def progress(self, after: int) -> tuple[str, list[RoundProgress]]:
        """The run id and the rounds finished since the first `after`."""
        return self._run_id, self._rounds[after:]

    @ray.method(concurrency_group=WATCH)
    def stop(self) -> None:
        """Asks the run to end after the present round."""
        self._stop.set()


RemoteServer: Any = ray.remote(concurrency_groups={WATCH: 1})(ServerActor)  # type: ignore[call-overload]
"""The server as a Ray actor class."""
