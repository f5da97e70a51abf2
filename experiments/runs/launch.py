"""Starts runs in this process, or in a server actor that the driver watches and may leave running."""

import logging
import os
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol, cast

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fedloom.actors.address import resolve_address
from fedloom.actors.cluster import connected, own_resources
from fedloom.actors.placement import groups_in_line, groups_of_run
from fedloom.actors.server import NAMESPACE, RemoteServer, Told
from fedloom.experiments.terminal import where
from fedloom.platform.federation.config import RayConfig, RunConfig
from fedloom.platform.federation.loop import AT_ONCE, RoundProgress
from fedloom.platform.results.copies import check_results, fetch, mirror_run
from fedloom.platform.results.lock import OwnedError, Ownership, owned
from fedloom.platform.results.paths import RunPaths, new_run_id, run_paths
from fedloom.platform.results.status import StatusFile, read_status
from fedloom.platform.results.store import local_root
from fedloom.platform.runs.logs import warnings_in
from fedloom.platform.runs.resuming import check_name_is_free, check_run_unowned
from fedloom.platform.runs.run import (
    NOT_BEGUN,
    Kind,
    Resume,
    RunEnd,
    Watcher,
    make_serial,
    planned_stages,
    planned_world,
    run_to_end,
    stored_world,
)

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 10.0
POLL_S = 0.2
KILLED_S = 5.0
"""Seconds within which a process that was killed ends."""
ACTIVE = ("running", "stalled", "dead")
LONGEST_CAUSE = 120


class View(Protocol):
    """Shows the progress of a run."""

    def doing(self, what: str) -> None:
        """`what` is being started, which takes a while."""
        ...

    def stages(self, names: Sequence[str]) -> None:
        """The names of the run's stages; called before `started`."""
        ...

    def started(self, run_id: str, supernet_of: str) -> None:
        """The run has an id; `supernet_of` is the run whose trained supernet it starts from, empty if none."""
        ...

    def round(self, progress: RoundProgress) -> None:
        """A round is finished and stored on disk."""
        ...

    def waiting(self, message: str) -> None:
        """The run does not start yet."""
        ...


def launch(config: RunConfig, view: View, resume: Resume | None = None) -> RunEnd:
    """Runs a configuration to its end with the configured executor.

    A configuration that cannot run is rejected before any worker starts: a serial run ends as refused, one with actors
    raises ValueError.
    """
    root = check_results(config.results)
    view.doing("preparing the data and its partition")
    if config.executor.kind == "serial" or config.dry_run:
        return run_to_end(config, make_serial, Watcher(view.started, view.round, stages=view.stages), resume)
    starts_ray = resolve_address(config.ray.address) == "local"
    if config.ray.detached and starts_ray:
        raise ValueError(
            "ray.detached=true needs a cluster that outlives this command: start one (ray start --head), or give the "
            "address of a running one (ray.address=HOST:PORT)"
        )
    # These checks take about a second and raise their errors before Ray is started.
    planned: list[str] = []
    with warnings_in(planned):
        if resume is None:
            check_name_is_free(root, config)
            world = planned_world(config)
        else:
            paths = run_paths(local_root(config.results), config.experiment, resume.run_id)
            check_run_unowned(paths)
            world = stored_world(paths, config)
        planned_stages(world)
    if starts_ray:
        groups_of_run(config.executor, world.tiers, [own_resources(config.ray)], world.num_clients)
    view.doing("starting Ray on this machine" if starts_ray else f"connecting to Ray at {config.ray.address}")
    with connected(config.ray):
        # Raises if the cluster is too small, before the server writes the run's first files.
        groups_in_line(world, view.waiting)
        view.doing("starting the server")
        return _through_server(config, view, resume, planned)


def _through_server(config: RunConfig, view: View, resume: Resume | None, planned: Sequence[str] = ()) -> RunEnd:
    """Runs in a server actor; `planned` are the warnings given already, which the server repeats as it plans again."""
    root = local_root(config.results)
    run_id = new_run_id(root, config.experiment) if resume is None else resume.run_id
    paths, is_detached = run_paths(root, config.experiment, run_id), config.ray.detached
    detached = {"name": run_id, "namespace": NAMESPACE, "lifetime": "detached"} if is_detached else {}
    remote = RemoteServer.options(num_cpus=0, max_restarts=0, **detached, **_where_results_are(config.results))
    try:
        server = remote.remote(run_id, config, resume, os.getcwd())
    except ValueError as error:  # only a named actor can exist already
        again = attaching(run_id, config.results, config.ray.address)
        raise ValueError(f"run {run_id} has a server on this cluster already: {again}") from error
    shown = _Shown(view, planned)
    if is_detached:
        return _watch_detached(server, shown, config.results, paths, config.ray.address)
    ending = server.run.remote()
    try:
        return _watch(server, ending, shown)
    except KeyboardInterrupt:
        return _interrupted(server, ending, shown, config.results, paths)
    except RayError as error:
        return RunEnd(shown.run_id, "infrastructure", _lost_server(error))


def _watch(server: Any, ending: Any, shown: "_Shown") -> RunEnd:
    while not ray.wait([ending], timeout=POLL_S)[0]:
        shown.update(server)
    end: RunEnd = ray.get(ending)
    shown.update(server)
    return end


def _interrupted(server: Any, ending: Any, shown: "_Shown", results: str, paths: RunPaths) -> RunEnd:
    end = _interrupt(server, ending, shown)
    if end.kind == "interrupted" and end.run_id:
        # The server could not record this, but this process can if the results are on this machine.
        mark_interrupted(results, paths, end.message)
    return end


# -- a server that goes on without its driver --------------------------------------------------------------------------


def attach(results: str | Path, paths: RunPaths, address: str, view: View, *, stop: bool = False) -> RunEnd:
    """Watches a run whose server is detached, as `launch` does, until the run ends or Ctrl-C; `stop` ends it.

    For a run that has ended already, returns the end that its status records.
    Raises ValueError if the cluster at the address has no server of the run.
    """
    if (end := _end_told(results, paths)) is not None:
        return end
    cluster = read_status(paths.status).cluster
    began = f"it began on {cluster}" if cluster else "it was started without ray.detached=true"
    if resolve_address(address) == "local":
        raise ValueError(f"no Ray cluster runs on this machine: give its address, --address HOST:PORT ({began})")
    with connected(RayConfig(address=address)):
        try:
            server = ray.get_actor(paths.run_id, namespace=NAMESPACE)
        except ValueError as error:
            raise ValueError(
                f"run {paths.run_id} has no server on this cluster ({began}); if it runs nowhere else, continue with: "
                f"fedloom resume {paths.run_id}{where(results)}"
            ) from error
        return _watch_detached(server, _Shown(view), str(results), paths, address, stop=stop)


def attaching(run_id: str, results: str | Path, address: str) -> str:
    """The commands that watch and end a run whose server is detached."""
    at = "" if address == "auto" else f" --address {address}"
    command = f"fedloom attach {run_id}{where(results)}{at}"
    return f"watch it with: {command}; end it with: {command} --stop"


def _watch_detached(
    server: Any, shown: "_Shown", results: str, paths: RunPaths, address: str, *, stop: bool = False
) -> RunEnd:
    run_id = paths.run_id
    try:
        (ending,) = ray.get(server.ending.remote())
        shown.update(server)
        end = _interrupted(server, ending, shown, results, paths) if stop else _watch(server, ending, shown)
        ray.kill(server)
    except KeyboardInterrupt:
        return RunEnd(run_id, "detached", attaching(run_id, results, address))
    except RayError as error:  # another command may have seen the run end, too, and killed the server
        return _end_told(results, paths) or RunEnd(run_id, "infrastructure", _lost_server(error))
    return end


def _end_told(results: str | Path, paths: RunPaths) -> RunEnd | None:
    """How a run has ended, by its status; None if it has not ended, or has not recorded its end."""
    fetch(results, [paths.run_id], tensors=False)
    status = read_status(paths.status) if paths.status.exists() else None
    if status is None or status.state in ACTIVE:
        return None
    return RunEnd(paths.run_id, cast(Kind, status.state), status.message)


def _lost_server(error: RayError) -> str:
    """The cause in one short line; Ray's own message has many, about its logs, and says no more about the cause."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    cause = textwrap.shorten(first.partition(". ")[0].rstrip(".:"), LONGEST_CAUSE, placeholder=" ...")
    return f"the run's server process is gone ({cause}): Ray was stopped, or the process or its node died"


def _where_results_are(results: str) -> dict[str, Any]:
    """The server's placement: on the driver's node if the results are a local path, since the user reads them there."""
    # A driver that is connected through ray://... is not on a node of the cluster.
    remote_driver = ray.util.client.ray.is_connected()  # type: ignore[no-untyped-call]
    if "://" in results or remote_driver or get_current_placement_group() is not None:
        return {}
    node_id = ray.get_runtime_context().get_node_id()
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False)}


class _Shown:
    """Shows the server's progress and tracks what has been shown."""

    def __init__(self, view: View, planned: Sequence[str] = ()) -> None:
        self.view, self.run_id, self.rounds, self.waits = view, "", 0, False
        self.planned, self.warned = planned, 0

    def update(self, server: Any) -> None:
        """Fetches and shows the rounds and the warnings since the last call."""
        try:
            told: Told = ray.get(server.progress.remote(self.rounds, self.warned), timeout=30)
        except GetTimeoutError:
            return
        if told.run_id and not self.run_id:
            self.run_id = told.run_id
            self.view.stages(told.stages)
            self.view.started(told.run_id, told.supernet_of)
            self.view.doing("starting the client actors, and their first round")
        if told.waiting and not self.waits:
            self.waits = True
            self.view.waiting(told.waiting)
        for text in told.warnings:
            if text not in self.planned:
                logger.warning("%s", text)
        self.warned += len(told.warnings)
        for progress in told.rounds:
            self.view.round(progress)
        self.rounds += len(told.rounds)


def _interrupt(server: Any, ending: Any, shown: _Shown) -> RunEnd:
    """Waits up to `STOP_TIMEOUT_S` for the current round; the checkpoint of the previous round exists in any case."""
    message = "interrupted"
    try:
        ray.get(server.stop.remote(), timeout=2)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while time.monotonic() < deadline and not ray.wait([ending], timeout=POLL_S)[0]:
            shown.update(server)
        if ray.wait([ending], timeout=0)[0]:
            end: RunEnd = ray.get(ending)
            return end
        message = f"the present round did not end within {STOP_TIMEOUT_S:g} s and is lost"
    except (KeyboardInterrupt, RayError):
        message = AT_ONCE if shown.run_id else NOT_BEGUN
    # Otherwise its heartbeat would continue to report that the run is alive.
    ray.kill(server)
    return RunEnd(shown.run_id, "interrupted", message)


def mark_interrupted(results: str, paths: RunPaths, message: str) -> None:
    """Sets the status of a run whose process has ended to interrupted, if it still says that the run is active."""
    if not paths.status.exists() or read_status(paths.status).state not in ACTIVE:
        return
    # The run may have been resumed elsewhere; the copy here is then old and must not replace the newer one.
    try:
        with _owned_soon(results, paths) as ownership:
            fetch(results, [paths.run_id], owned=paths.run_id)
            if read_status(paths.status).state in ACTIVE:
                StatusFile(paths.status).write("interrupted", message=message)
                mirror_run(results, paths, ownership)
    except OwnedError:
        return
    except (OSError, ValueError) as error:  # the URL cannot be reached now, but the run has ended in any case
        logger.warning("%s", error)
        StatusFile(paths.status).write("interrupted", message=message)


@contextmanager
def _owned_soon(results: str, paths: RunPaths) -> Iterator[Ownership]:
    """Owns a run as soon as its process has ended, for which a killed process may take up to `KILLED_S`."""
    end_s = time.monotonic() + KILLED_S
    with ExitStack() as stack:
        while True:
            try:
                ownership = stack.enter_context(owned(paths.artifacts, f"run {paths.run_id}", results, paths.root))
                break
            except OwnedError:
                if time.monotonic() > end_s:
                    raise
            time.sleep(POLL_S)
        yield ownership
