"""Connects to Ray: to a running cluster, or to a new one with explicit limits on the loopback interface only."""

import logging
import os
import platform
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import worker as ray_worker
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fedloom.actors.address import AUTH_MODE, check_listening, resolve_address
from fedloom.actors.watcher import records_folder, unwatch, watched
from fedloom.platform.federation.config import RayConfig

SET_TOKEN = f"set {AUTH_MODE}=token and RAY_AUTH_TOKEN_PATH (a file) or RAY_AUTH_TOKEN to the cluster's token"

NO_TOKEN = ("InvalidAuthToken", "Unauthenticated")
"""What Ray's C++ part prints, but its exception does not contain, if the token is missing or wrong."""

PRELOADED = ["fedloom.actors.client", "fedloom.actors.server"]
"""Modules that Ray's idle workers import in advance: importing torch takes half of an actor's start-up time."""


@contextmanager
def connected(config: RayConfig) -> Iterator[None]:
    """Connects to Ray for the duration of the block; a cluster started here ends with it.

    Raises:
        ConnectionError: the cluster does not answer or could not be started.
    """
    with _ray_silent(), _connection(config):
        yield


@contextmanager
def _ray_silent() -> Iterator[None]:
    """Keeps Ray from printing within the block.

    When a Ray process dies, Ray would print up to dozens of lines to standard output in spite of `log_to_driver=False`,
    among a run's lines or before its JSON object. fedloom reports the cause itself, and Ray's log has it, too. There is
    no public setting; this one is for Ray's debugger, which needs the terminal as well.
    """
    before = ray_worker._worker_logs_enabled
    ray_worker._worker_logs_enabled = False
    try:
        yield
    finally:
        ray_worker._worker_logs_enabled = before


@contextmanager
def _connection(config: RayConfig) -> Iterator[None]:
    address = resolve_address(config.address)
    check_listening(address)
    noise: list[str] = []
    on_sigterm = signal.getsignal(signal.SIGTERM) if threading.current_thread() is threading.main_thread() else None
    try:
        if address == "local":
            with watched(records_folder()):
                ray.init(
                    address="local",
                    num_cpus=int(own_resources(config)["CPU"]),
                    num_gpus=config.num_gpus,
                    object_store_memory=config.object_store_memory_bytes or free_memory_bytes() // 5,
                    include_dashboard=config.dashboard,
                    dashboard_host="127.0.0.1",
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _system_config={"preload_python_modules": PRELOADED},
                )
        else:
            folder = os.getcwd()
            with _held_stderr() as noise:
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            if not address.startswith("ray://"):
                _unpack_jobs_files(folder)
    except ValueError as error:
        if address == "local":
            raise
        raise ValueError(f"ray.address={address}: {error}; give HOST:PORT, auto or local") from error
    except Exception as error:  # Ray raises bare ones, too, for example if one of its processes dies at the start
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        sentence = first_line.split(". ")[0].rstrip(".")
        raise ConnectionError(f"no Ray at {address!r}: {sentence}{_hint(address, f'{error} {noise}')}") from error
    # Ray's own handler ends the process with a stack dump when Slurm or Kubernetes stops a run.
    if on_sigterm is not None:
        signal.signal(signal.SIGTERM, on_sigterm)
    try:
        yield
    finally:
        ray.shutdown()
        unwatch()


def _unpack_jobs_files(folder: str) -> None:
    """Has every node on this machine unpack the files of this process's job, and enters their `folder` again.

    By default the nodes of one machine share Ray's session folder. Each unpacks a job's files there at its first work
    for the job, and thereby removes the folder in which others are at work.
    """
    if not ray.get_runtime_context().runtime_env.get("working_dir"):
        return
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    here = [node["NodeID"] for node in nodes if node["Alive"] and node["NodeManagerHostname"] == platform.node()]
    if len(here) > 1:
        task = ray.remote(num_cpus=0)(_do_nothing)
        strategies = [NodeAffinitySchedulingStrategy(node, soft=True) for node in here]
        ray.get([task.options(scheduling_strategy=strategy).remote() for strategy in strategies])
        os.chdir(folder)


def _do_nothing() -> None:
    return


@contextmanager
def _held_stderr() -> Iterator[list[str]]:
    """Holds back what the block writes to stderr, and shows it if the block succeeds.

    As long as Ray does not reach a cluster, its C++ part prints a line per second, bypassing `sys.stderr`.
    """
    said: list[str] = []
    with tempfile.TemporaryFile() as held, os.fdopen(os.dup(2), "wb") as screen:
        os.dup2(held.fileno(), 2)
        try:
            yield said
        finally:
            os.dup2(screen.fileno(), 2)
            held.seek(0)
            said.append(held.read().decode(errors="replace"))
        screen.write(said[0].encode())


def own_resources(config: RayConfig) -> dict[str, float]:
    """CPUs and GPUs of a cluster that fedloom will start, known before the start, which takes seconds."""
    cpus = config.num_cpus if config.num_cpus is not None else usable_cpus()
    return {"CPU": float(cpus), "GPU": float(config.num_gpus)}


def usable_cpus() -> int:
    """CPUs that this process may use: the least of its CPU affinity, SLURM_CPUS_PER_TASK and its container's limit."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    slurm = os.environ.get("SLURM_CPUS_PER_TASK", "")
    quota, _, period = _limit("cpu.max").partition(" ")  # microseconds of all CPUs together, in each period
    limit = max(1, int(quota) // int(period)) if quota.isdigit() else cpus
    return min(cpus, limit, int(slurm) if slurm.isdigit() else cpus)


def free_memory_bytes() -> int:
    """Free memory of this machine or the limit of its container, whichever is smaller."""
    free_bytes, limit_bytes = psutil.virtual_memory().available, _limit("memory.max")
    return min(free_bytes, int(limit_bytes)) if limit_bytes.isdigit() else int(free_bytes)


CGROUP = Path("/sys/fs/cgroup")


def _limit(name: str) -> str:
    """A limit of this process's container; "max" if there is none."""
    file = CGROUP / name
    return file.read_text().strip() if file.is_file() else "max"


def _hint(address: str, text: str) -> str:
    if address != "local" and any(word in text for word in NO_TOKEN):
        return f"; it asks for its token: {SET_TOKEN}; {AUTH_MODE}=token is enough where ~/.ray/auth_token holds it"
    # A cluster that rejects a wrong token causes the same error as one that does not answer, without naming a token.
    if address == "local" and "token" not in text.lower() and "auth" not in text.lower():
        return ""
    return f"; {SET_TOKEN}" if address == "local" else f"; is it running there? If it asks for a token, {SET_TOKEN}"
