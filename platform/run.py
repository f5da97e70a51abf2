"""One run from its configuration to its last row, with any executor; also from its last checkpoint."""

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.platform.config import RunConfig
from fedloom.platform.dry_run import dry_executor, dry_stages
from fedloom.platform.execution import Executor
from fedloom.platform.logs import close_log, log_to
from fedloom.platform.loop import InterruptedRunError, Loop, RoundProgress, RunFailedError
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.recorder import Recorder, restored_state
from fedloom.platform.results.checkpoint import Saved, check_same_config, load_checkpoint, stored_bags
from fedloom.platform.results.files import check_writable, write_atomically
from fedloom.platform.results.paths import RunPaths, new_run_id, run_paths
from fedloom.platform.results.status import Heartbeat, StatusFile, WrittenState, read_status
from fedloom.platform.results.writer import RunWriter
from fedloom.platform.run_costs import RunCosts, load_costs, store_costs
from fedloom.platform.stage import Stage
from fedloom.platform.state import RunState
from fedloom.platform.world import World, build_world

logger = logging.getLogger(__name__)

MakeExecutor = Callable[[World], Executor]
"""Starts the workers of a run."""

COSTS = "costs.json"
PACKAGES = ("fedloom", "torch", "numpy", "ray", "pymoo", "pyarrow")


@dataclass(frozen=True)
class Watcher:
    """How a run is watched: told of every round, and asked whether it should stop."""

    started: Callable[[str], None] = lambda _: None
    round: Callable[[RoundProgress], None] = lambda _: None
    should_stop: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class Label:
    """What a run is called: its id (drawn if not given), and its place in an ablation.

    `setting` is what the ablation varies in this trial, by the names of its axes.
    """

    run_id: str | None = None
    ablation: str | None = None
    trial: int | None = None
    setting: Mapping[str, Any] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """The columns of the run's row."""
        if self.ablation is None:
            return {}
        return {"ablation": self.ablation, "trial": self.trial, "setting": json.dumps(dict(self.setting))}


def start_run(
    config: RunConfig, make_executor: MakeExecutor, watcher: Watcher | None = None, label: Label | None = None
) -> str:
    """Runs a new experiment to its end and returns its run id.

    Everything that can be refused is refused (ValueError) before anything is written.
    Raises RunFailedError, InterruptedRunError.
    """
    root = Path(config.results)
    check_writable(root)
    world = build_world(config)
    stages = planned_stages(world)
    label = label or Label()
    run_id = label.run_id or new_run_id(root, config.experiment)
    writer = RunWriter.create(root, config.experiment, run_id)
    write_atomically(writer.paths.config, json.dumps(asdict(config), indent=1).encode())
    store_costs(writer.paths.artifacts / COSTS, RunCosts(world.cost_table, world.macs_table))
    writer.update_run(**_run_row(config, world), **label.row(), status="running", started=datetime.now(UTC))
    _go(world, stages, writer, RunState(), None, make_executor, watcher or Watcher())
    return run_id


def resume_run(config: RunConfig, run_id: str, make_executor: MakeExecutor, watcher: Watcher | None = None) -> str:
    """Continues a run from its last checkpoint; one that was never saved starts at round 0.

    Raises ValueError for a checkpoint of another configuration, or one that is damaged; then nothing was changed.
    """
    root = Path(config.results)
    paths = run_paths(root, config.experiment, run_id)
    _check_not_running(paths)
    world = build_world(config, load_costs(paths.artifacts / COSTS))
    stages = planned_stages(world)
    state, position, saved = RunState(), {}, None
    if (paths.checkpoint / "state.json").exists():
        checkpoint = load_checkpoint(paths.checkpoint)
        check_same_config(what_is_computed(checkpoint.data["config"]), what_is_computed(asdict(config)))
        state, position = restored_state(checkpoint.data, checkpoint.bags), checkpoint.data["position"]
        saved = stored_bags(paths.checkpoint)
    writer = RunWriter.resume(root, config.experiment, run_id, position)
    writer.update_run(status="running", ended=None, error=None)
    _go(world, stages, writer, state, saved, make_executor, watcher or Watcher())
    return run_id


def planned_stages(world: World) -> list[Stage]:
    """The method's stages, or what a dry run leaves of them; ValueError for settings that cannot run."""
    stages = build_stages(world)
    return dry_stages(stages) if world.config.dry_run else stages


def _check_not_running(paths: RunPaths) -> None:
    if not paths.status.exists():
        return
    status = read_status(paths.status)
    if status.state == "running" and status.pid != os.getpid():
        raise ValueError(
            f"run {paths.run_id} is still running (process {status.pid} on {status.host}): stop it first, "
            "or wait a minute if that machine is gone"
        )


FREE_ON_RESUME = (
    "executor.kind",
    "executor.actors",
    "executor.client_timeout_s",
    "executor.failures",
    "ray",
    "checkpoint",
    "data.root",
    "data.cache",
    "data.download",
    "reuse_supernet",
    "tensorboard",
)
"""What may be changed when a run is resumed: where and how safely it runs, not what it computes."""


def free_on_resume(key: str) -> bool:
    """Whether a configuration key, such as `ray.num_cpus`, may be changed when a run is resumed."""
    return any(key == free or key.startswith(f"{free}.") for free in FREE_ON_RESUME)


def what_is_computed(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The configuration without what may differ when it is resumed; the results may have been moved, too."""
    return {
        name: what_is_computed(value, f"{prefix}{name}.") if isinstance(value, Mapping) else value
        for name, value in config.items()
        if f"{prefix}{name}" != "results" and not free_on_resume(f"{prefix}{name}")
    }


def _go(
    world: World,
    stages: Sequence[Stage],
    writer: RunWriter,
    state: RunState,
    saved: Saved | None,
    make_executor: MakeExecutor,
    watcher: Watcher,
) -> None:
    config = world.config
    status = StatusFile(writer.paths.status)
    status.write("running", message="starting workers")
    watcher.started(writer.paths.run_id)
    executor: Executor | None = None
    heartbeat = Heartbeat(status)
    log = log_to(writer.paths.logs / "server.log")
    recorder = Recorder(writer, asdict(config), saved)
    try:
        executor = dry_executor(world) if config.dry_run else make_executor(world)
        loop = Loop(
            stages,
            executor,
            recorder,
            status,
            execution=config.executor,
            checkpoint=config.checkpoint,
            deadline_s=config.devices.deadline_s,
            watch=watcher.round,
            should_stop=watcher.should_stop,
        )
        loop.run(state)
    except (InterruptedRunError, KeyboardInterrupt) as error:
        _finish_broken(recorder, status, "interrupted", str(error))
        raise
    except Exception as error:
        _finish_broken(recorder, status, "failed", str(error))
        raise
    else:
        _finish(recorder, status, "done", "")
    finally:
        heartbeat.stop()
        if executor is not None:
            executor.close()
        close_log(log)


def _finish_broken(recorder: Recorder, status: StatusFile, state: WrittenState, message: str) -> None:
    try:
        _finish(recorder, status, state, message)
    except (OSError, ValueError) as error:
        # The caller is told of what broke the run, not of what came after it.
        logger.error("the end of the run could not be written down: %s", error)


def _finish(recorder: Recorder, status: StatusFile, state: WrittenState, message: str) -> None:
    written: WrittenState = "failed" if state == "done" else state
    try:
        recorder.close()
        recorder.writer.close()
        recorder.writer.update_run(status=state, ended=datetime.now(UTC), error=message or None)
        written = state
    finally:
        status.write(written, message=message)


def _run_row(config: RunConfig, world: World) -> dict[str, str]:
    seeds = {p: config.seed_for(p) for p in asdict(config.seeds)}
    sizes = np.bincount(world.tier_of_client, minlength=len(world.tiers))
    tiers = [{"tier": t.name, "upper": t.upper, "clients": int(n)} for t, n in zip(world.tiers, sizes, strict=True)]
    return {
        "method": config.method.name,
        "space": config.space.name,
        "dataset": config.data.dataset,
        "seeds": json.dumps(seeds, sort_keys=True),
        "tiers": json.dumps(tiers),
        "config": json.dumps(asdict(config), sort_keys=True),
        "versions": json.dumps({p: _version(p) for p in PACKAGES}, sort_keys=True),
        "source_hash": source_hash(),
        "partition_hash": world.data.partition_hash,
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def source_hash() -> str:
    """A hash of the science's own source: workers and driver must run the same."""
    here = Path(__file__).resolve().parent
    digest = sha256()
    for folder in (here, here.parent / "tiers"):
        for file in sorted(folder.rglob("*.py")):
            digest.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


__all__ = ["InterruptedRunError", "RunFailedError", "Watcher", "resume_run", "source_hash", "start_run"]
