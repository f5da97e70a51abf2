"""Starts a run from its configuration or resumes it from its last checkpoint, with any executor; tells how it ended."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

import torch

from fedloom.platform.clients.assignments import SERVER
from fedloom.platform.clients.device import GPU, memory_of
from fedloom.platform.clients.execution import Executor, SerialExecutor
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.algorithm import RunState
from fedloom.platform.federation.config import RunConfig, TrackingConfig
from fedloom.platform.federation.event_files import FOLDER as EVENTS, EventFiles, Events, NoEvents, check_event_files
from fedloom.platform.federation.ineffective_keys import clients_without_effect, keys_without_effect
from fedloom.platform.federation.loop import AT_ONCE, InterruptedRunError, Loop, RoundProgress, RunFailedError
from fedloom.platform.federation.method import Stage
from fedloom.platform.federation.recorder import Recorder, restored_state, save_state
from fedloom.platform.federation.tiers import RunCosts, load_costs
from fedloom.platform.federation.trackers import TrackedRun, Trackers, check_trackers
from fedloom.platform.federation.world import World, build_world
from fedloom.platform.methods.registry import build_stages, check_space, shared_training
from fedloom.platform.plugins import blaming_own
from fedloom.platform.results.checkpoint import Saved, check_same_config, run_checkpoint
from fedloom.platform.results.copies import MirrorError, check_results, fetch, fetch_folder, mirrored
from fedloom.platform.results.files import as_stored
from fedloom.platform.results.lock import OwnershipLostError
from fedloom.platform.results.manifest import check_files, check_regular, lost_records
from fedloom.platform.results.paths import (
    STATE_FILE,
    SUPERNETS,
    RunPaths,
    new_run_id,
    read_names,
    run_paths,
    write_names,
)
from fedloom.platform.results.status import Heartbeat, StatusFile, WrittenState, read_status
from fedloom.platform.results.store import is_remote, local_root
from fedloom.platform.results.writer import RunWriter
from fedloom.platform.runs.dry_run import DryExecutor, dry_stages
from fedloom.platform.runs.logs import CONSOLE, and_logged, close_log, log_to
from fedloom.platform.runs.resuming import check_name_is_free, owned_run, what_is_computed
from fedloom.platform.runs.run_files import (
    COSTS,
    changed_files,
    check_data,
    keep_changed,
    latest_copies,
    other_machine,
    recorded_inputs,
    run_row,
    sources_of,
    whole_or_nothing,
    write_new_run,
)
from fedloom.platform.runs.source_code import check_code_places
from fedloom.platform.runs.supernets import keeper, load_supernet, supernet_key
from fedloom.platform.words import shown

logger = logging.getLogger(__name__)

MakeExecutor = Callable[[World], Executor]
"""Creates the executor of a run."""


def make_serial(world: World) -> SerialExecutor:
    """An executor that trains the world's clients in this process; tiers with a share of a GPU use all of its memory.

    Raises ValueError if a tier has a share of a GPU and torch sees none.
    """
    devices = _serial_devices(world)
    kinds = dict.fromkeys(devices.values())
    workers = {d: Worker(replace(world.spec, device=d, device_bytes=memory_of(d, 1.0))) for d in kinds}
    return SerialExecutor(workers[devices[SERVER]], {tier: workers[device] for tier, device in devices.items()})


def _serial_devices(world: World) -> dict[str, str]:
    """The device of every tier's clients and of the server's data: the one that client actors would use."""
    sizes = {tier.name: (tier.num_cpus, tier.num_gpus) for tier in world.tiers}
    if world.config.executor.resident:  # every actor has what the largest tier asks for
        sizes = dict.fromkeys(sizes, (max(cpus for cpus, _ in sizes.values()), max(gpus for _, gpus in sizes.values())))
    groups = list(dict.fromkeys(sizes.values()))  # the last one has the server's data
    devices = {name: GPU if gpus else "cpu" for name, (_, gpus) in {**sizes, SERVER: groups[-1]}.items()}
    if GPU in devices.values() and not torch.cuda.is_available():
        raise ValueError(
            f"tiers.num_gpus={shown(world.config.tiers.num_gpus)} with executor.kind=serial needs a GPU, and torch "
            "sees none in this process: leave tiers.num_gpus out to train on the CPU, or run it where there is one"
        )
    return devices


@dataclass(frozen=True)
class Watcher:
    """Callbacks of a run: its start, every finished round, and whether it should stop.

    `started` gets the run's id, and the id of the run whose trained supernet it uses (empty if none). `stages` gets the
    names of all stages before that. `cluster` is the address at which the run can be watched again (see `Status`).
    """

    started: Callable[[str, str], None] = lambda _run_id, _supernet_of: None
    round: Callable[[RoundProgress], None] = lambda _: None
    should_stop: Callable[[], bool] = lambda: False
    cluster: str = ""
    stages: Callable[[Sequence[str]], None] = lambda _names: None


@dataclass(frozen=True)
class RunIdentity:
    """A run's id (generated if not given), and the trial of an ablation to which it belongs.

    `setting` holds the values that the ablation varies in this trial, by axis.
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
    config: RunConfig, make_executor: MakeExecutor, watcher: Watcher | None = None, identity: RunIdentity | None = None
) -> str:
    """Runs a new experiment to its end and returns its run id.

    Raises ValueError for an invalid configuration, before anything is written.
    Raises RunFailedError, InterruptedRunError.
    """
    root = check_results(config.results)
    check_code_places([asdict(config)], root)
    identity = identity or RunIdentity()
    if identity.ablation is None:
        check_name_is_free(root, config)
    world = planned_world(config)
    stages = _begun_stages(world)
    run_id = identity.run_id or new_run_id(root, config.experiment)
    if identity.run_id is not None:
        fetch(config.results, [run_id], tensors=False)  # so that an id used at the URL is rejected, too
    writer = RunWriter.create(root, config.experiment, run_id)
    with ExitStack() as held:
        with whole_or_nothing(writer.paths):
            ownership = held.enter_context(owned_run(config, writer.paths, fresh=True))
            sources = sources_of(config)
            write_new_run(writer.paths, config, world, sources)
            writer.manifest.begin()  # before a reused supernet's checkpoint: a checkpoint implies a manifest
            beginning = _beginning(world, writer)
            row = {**run_row(config, world, sources), **identity.row(), **beginning.row}
            writer.update_run(**row, status="running", started=datetime.now(UTC))
        with mirrored(config.results, writer.paths, ownership) as stored:
            _go(world, stages, writer, beginning, make_executor, watcher or Watcher(), stored)
    return run_id


@dataclass(frozen=True)
class _Beginning:
    """The state from which a run starts or continues, and its files in the checkpoint.

    `row` holds the columns of the supernet used; `ending` is called with every stage's last state (see `Loop`).
    """

    state: RunState
    saved: Saved | None = None
    row: Mapping[str, Any] = field(default_factory=dict)
    ending: Callable[[RunState], None] = lambda _: None


def _beginning(world: World, writer: RunWriter) -> _Beginning:
    """The initial state, or the state after training of an earlier run with the same configuration."""
    config, paths = world.config, writer.paths
    key = supernet_key(config, world) if config.reuse_supernet else None
    if key is None:
        return _Beginning(RunState())
    fetch_folder(config.results, f"{SUPERNETS}/{key}")
    supernet = load_supernet(paths.root, key, config)
    if supernet is None:
        row = {"supernet": key, "supernet_run_id": paths.run_id}
        return _Beginning(RunState(), None, row, keeper(config, paths, key))
    # Saved before the row is written, so that a resumed run never trains a supernet that its row attributes to another.
    saved = save_state(paths.checkpoint, supernet.state, writer.position, asdict(config), paths.run_id)
    writer.manifest.require(paths.checkpoint / STATE_FILE)
    return _Beginning(supernet.state, saved, {"supernet": key, "supernet_run_id": supernet.run_id})


def _going_on(world: World, writer: RunWriter, state: RunState) -> _Beginning:
    """The beginning of a resumed run, whose supernet is shared only if the run trains all of it with the same key."""
    config, run_id, recorded = world.config, writer.paths.run_id, writer.run_row
    training = shared_training(config.method)
    if recorded.get("supernet_run_id") != run_id or training is None or state.stage >= training.stages:
        return _Beginning(state)
    key = supernet_key(config, world) if config.reuse_supernet else None
    if key is None or key != recorded.get("supernet"):
        return _Beginning(state, None, {"supernet": None, "supernet_run_id": None})
    return _Beginning(state, None, {}, keeper(config, writer.paths, key))


def resume_run(
    config: RunConfig,
    run_id: str,
    make_executor: MakeExecutor,
    watcher: Watcher | None = None,
    identity: RunIdentity | None = None,
    *,
    changed_plugins: bool = False,
    take_over: bool = False,
) -> str:
    """Continues a run from its last checkpoint; without one it starts at round 0.

    `identity` is only used for a run that was killed before its row was written.
    `changed_plugins` allows changed sources of its plug-ins; `take_over` replaces the lease at a URL.
    Raises ValueError, before anything is changed, for a checkpoint of another configuration, a damaged checkpoint, and
    changed plug-ins, data and input files.
    """
    paths, identity = run_paths(local_root(config.results), config.experiment, run_id), identity or RunIdentity()
    if is_remote(config.results):
        paths.artifacts.mkdir(parents=True, exist_ok=True)
    elif not paths.artifacts.is_dir():
        raise ValueError(f"there is no run {run_id!r} of experiment {config.experiment!r} under {paths.root} to resume")
    check_regular(paths)  # before its owner's file is opened
    with owned_run(config, paths, take_over=take_over) as ownership:
        fetch(config.results, [run_id], owned=run_id)
        check_files(paths)
        if config.name != read_names(paths.artifacts).name and identity.ablation is None:
            check_name_is_free(paths.root, config)
        world = stored_world(paths, config)
        stages = _begun_stages(world)
        sources, copies = sources_of(config), latest_copies(paths)
        changed = sources.changed_since(copies)
        if changed and not changed_plugins:
            raise ValueError(
                f"code of run {run_id} has changed since it last ran: {', '.join(changed)}; its copy is in "
                f"{copies}: restore it, or go on with --changed-plugins if the change is intended"
            )
        for line in lost_records(paths):
            raise ValueError(line)
        state, position = RunState(), dict[str, Any]()
        if as_stored(paths.checkpoint / STATE_FILE).exists():
            checkpoint = run_checkpoint(paths)
            saved_config = what_is_computed(checkpoint.data["config"])
            check_same_config(saved_config, what_is_computed(asdict(config)), later=True)
            state, position = restored_state(checkpoint.data, checkpoint.groups), checkpoint.data["position"]
        writer = RunWriter.resume(paths.root, config.experiment, run_id, position)
        if "config" in writer.run_row:
            beginning = _going_on(world, writer, state)
            if differences := other_machine(paths, writer.run_row):
                what = "; ".join(differences)
                logger.warning("run %s began with %s: its last bits may be others than without a stop", run_id, what)
        else:  # killed before its row was written, and so before its first round: it starts again
            beginning = _beginning(world, writer)
            row = {**run_row(config, world, sources), **identity.row()}
            writer.update_run(**row, started=datetime.now(UTC))
        if changed:
            keep_changed(writer, sources, changed)
        write_names(paths.artifacts, config.names)
        writer.update_run(**beginning.row, **config.names.columns(), status="running", ended=None, error=None)
        with mirrored(config.results, writer.paths, ownership) as stored:
            _go(world, stages, writer, beginning, make_executor, watcher or Watcher(), stored)
    return run_id


def planned_world(config: RunConfig, costs: RunCosts | None = None) -> World:
    """The world of a configuration; a space that its method cannot use is refused before data is prepared."""
    return build_world(config, costs, partial(check_space, config.method))


def stored_world(paths: RunPaths, config: RunConfig) -> World:
    """The world of an existing run; all code that computes with a stored run builds it here.

    Raises ValueError if the data or a file that the configuration names is not what the run began with.
    """
    for line in changed_files(paths, recorded_inputs(paths)).values():
        raise ValueError(line)
    world = build_world(config, load_costs(paths.artifacts / COSTS))
    check_data(paths, config.data.dataset, world.data, world.space.constants_hash)
    return world


def planned_stages(world: World) -> list[Stage]:
    """The method's stages, or those of a dry run; ValueError for invalid settings."""
    if _has_event_files(world.config):
        check_event_files()
    check_trackers(world.config.tracking)
    stages = build_stages(world)
    return dry_stages(stages) if world.config.dry_run else stages


def _begun_stages(world: World) -> list[Stage]:
    """The stages of a run that begins in this process; also raises ValueError if its clients need a missing GPU."""
    if world.config.executor.kind == "serial" and not world.config.dry_run:
        _serial_devices(world)
    return planned_stages(world)


def _go(
    world: World,
    stages: Sequence[Stage],
    writer: RunWriter,
    beginning: _Beginning,
    make_executor: MakeExecutor,
    watcher: Watcher,
    stored: Callable[[], None],
) -> None:
    config, paths = world.config, writer.paths
    status = StatusFile(paths.status, watcher.cluster)
    status.write("running", message="starting workers")
    executor: Executor | None = None
    trackers = _trackers(config, writer)
    heartbeat = Heartbeat(status)
    log = log_to(paths.logs)
    CONSOLE.info("run %s", paths.run_id)
    events: Events = NoEvents()
    if _has_event_files(config):
        events = EventFiles(paths.artifacts / EVENTS, writer.position["rounds"], asdict(config))
    recorder = Recorder(writer, asdict(config), beginning.saved, events, stored, trackers.add)
    try:
        with _end_written(recorder, status):
            # From here on whoever knows the run's id may interrupt it.
            supernet_of = str(writer.run_row.get("supernet_run_id") or "")
            watcher.stages([stage.name for stage in stages])
            watcher.started(paths.run_id, "" if supernet_of == paths.run_id else supernet_of)
            unused = clients_without_effect(config.data, world.data.dataset)
            for line in (*keys_without_effect(config), *unused):
                logger.warning("%s", line)
            executor = DryExecutor(Worker(world.spec)) if config.dry_run else make_executor(world)
            status.write(message="")
            loop = Loop(
                stages,
                executor,
                recorder,
                status,
                execution=config.executor,
                checkpoint=config.checkpoint,
                deadline_s=config.devices.deadline_s,
                watch=and_logged(watcher.round),
                should_stop=watcher.should_stop,
                ending=beginning.ending,
            )
            loop.run(beginning.state)
    finally:
        try:
            trackers.close(_state_of(paths))
        finally:
            heartbeat.stop()
            if executor is not None:
                executor.close()
            close_log(log)


def _state_of(paths: RunPaths) -> str:
    """How the run has ended; failed if its files are gone."""
    try:
        return read_status(paths.status).state
    except (OSError, ValueError):
        return "failed"


def _has_event_files(config: RunConfig) -> bool:
    return config.tensorboard or "tensorboard" in config.tracking.to


def _trackers(config: RunConfig, writer: RunWriter) -> Trackers:
    """The trackers of a run that begins or goes on; a dry run has none."""
    run_id, ablation = writer.paths.run_id, str(writer.run_row.get("ablation") or "")
    tags = [*config.tags, config.experiment, *([ablation] if ablation else [])]
    values = json.loads(json.dumps(what_is_computed(asdict(config))))
    run = TrackedRun(run_id, config.name or run_id, tags, ablation or None, values)
    chosen = TrackingConfig() if config.dry_run else config.tracking
    return Trackers(chosen, run, writer.paths, writer.position["rounds"])


@contextmanager
def _end_written(recorder: Recorder, status: StatusFile) -> Iterator[None]:
    """Records in the run's row and its status how the block ends."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        is_interrupted = isinstance(error, InterruptedRunError | KeyboardInterrupt)
        message = str(error) or (AT_ONCE if is_interrupted else "")
        try:
            _finish(recorder, status, "interrupted" if is_interrupted else "failed", message)
        except (OSError, ValueError) as unwritten:  # the caller gets the error that ended the run, not this one
            logger.error("the end of the run could not be recorded: %s", unwritten)
        raise
    _finish(recorder, status, "done", "")


def _finish(recorder: Recorder, status: StatusFile, state: WrittenState, message: str) -> None:
    written: WrittenState = "failed" if state == "done" else state
    try:
        recorder.close()
        recorder.writer.close()
        recorder.writer.update_run(status=state, ended=datetime.now(UTC), error=message or None)
        recorder.writer.manifest.settle()
        written = state
    finally:
        status.write(written, message=message)
        CONSOLE.info("%s", f"{written}: {message}" if message else written)


# -- how a run ended ---------------------------------------------------------------------------------------------------

Kind = Literal["done", "refused", "failed", "infrastructure", "interrupted", "detached"]


NOT_BEGUN = "its work had not begun"
"""The message of an interruption before the run has an id, when no round can be lost."""


@dataclass(frozen=True)
class RunEnd:
    """How a run ended: done, refused (invalid configuration), failed, infrastructure (failed copy) or interrupted.

    `detached` means that the run goes on without its command: only the watching has ended.
    """

    run_id: str
    kind: Kind
    message: str = ""


@dataclass(frozen=True)
class Resume:
    """A run to resume.

    `changed` allows plug-ins that have changed since it started; `take_over` replaces the lease at a URL.
    """

    run_id: str
    changed: bool = False
    take_over: bool = False


def run_to_end(
    config: RunConfig,
    make_executor: MakeExecutor,
    watcher: Watcher,
    resume: Resume | None = None,
    identity: RunIdentity | None = None,
) -> RunEnd:
    """Starts or resumes a run and returns how it ended; all other errors are raised."""
    run_ids: list[str] = []

    def started(run_id: str, supernet_of: str) -> None:
        run_ids.append(run_id)
        watcher.started(run_id, supernet_of)

    def ended(kind: Kind, message: str = "") -> RunEnd:
        return RunEnd(run_ids[0] if run_ids else "", kind, message)

    watched = replace(watcher, started=started)
    try:
        with blaming_own(RunFailedError, InterruptedRunError, MirrorError, OwnershipLostError):
            if resume is None:
                start_run(config, make_executor, watched, identity)
            else:
                allowed = {"changed_plugins": resume.changed, "take_over": resume.take_over}
                resume_run(config, resume.run_id, make_executor, watched, identity, **allowed)
    except (MirrorError, OwnershipLostError) as error:
        return ended("infrastructure", str(error))
    except ValueError as error:  # if it has begun, its rows and its checkpoint are there to be resumed
        return ended("failed" if run_ids else "refused", str(error))
    except RunFailedError as error:
        return ended("failed", str(error))
    except (InterruptedRunError, KeyboardInterrupt) as error:
        return ended("interrupted", (str(error) or AT_ONCE) if run_ids else NOT_BEGUN)
    return ended("done")
