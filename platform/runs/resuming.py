"""Resuming runs: the keys that may change, the ownership of a run and its name, and updates of a run that is done."""

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedloom.platform.data.config import DataConfig
from fedloom.platform.federation.config import RayConfig, RunConfig
from fedloom.platform.results.copies import mirror_run
from fedloom.platform.results.files import from_json, read_file
from fedloom.platform.results.lock import Ownership, check_unowned, owned
from fedloom.platform.results.manifest import Manifest
from fedloom.platform.results.paths import ARTIFACTS, Names, RunPaths, named_runs, read_names, run_paths, write_names
from fedloom.platform.results.status import StatusFile, says_done
from fedloom.platform.results.store import is_remote, local_root
from fedloom.platform.results.tables import TABLES, is_done, read_runs
from fedloom.platform.results.writer import TableParts

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
    "tracking",
    "name",
    "tags",
)
"""The keys that may change when a run is resumed, because they do not affect its results."""


def placed_here(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A stored configuration with the default addresses and folders in place of those that it was stored with.

    Results may come from strangers, to whose addresses fedloom would connect, and to whose folders it would write.
    """
    here = asdict(DataConfig())
    data = stored.get("data")
    if isinstance(data, Mapping):
        data = {**data, **{name: here[name] for name in ("root", "cache", "download")}}
    return {**stored, "data": data, "ray": asdict(RayConfig())}


def free_on_resume(key: str) -> bool:
    """Whether a configuration key, such as `ray.num_cpus`, may be changed when a run is resumed."""
    return any(key == free or key.startswith(f"{free}.") for free in FREE_ON_RESUME)


def what_is_computed(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The configuration without the keys that may change on resume, and without the results folder."""
    return {
        name: what_is_computed(value, f"{prefix}{name}.") if isinstance(value, Mapping) else value
        for name, value in config.items()
        if f"{prefix}{name}" != "results" and not free_on_resume(f"{prefix}{name}")
    }


def check_name_is_free(root: Path, config: RunConfig) -> None:
    """Raises ValueError if another run has the name, unless both have one setting with different seeds.

    A dry run does not reserve its name: a real run may have it, too.
    """
    if config.name is None:
        return
    own_setting, own_seeds = _setting_and_seeds(json.loads(json.dumps(asdict(config))))
    for run_id, names in named_runs(root).items():
        if names.name != config.name:
            continue
        try:
            stored = root / ARTIFACTS / run_id / "config.json"
            setting, seeds = _setting_and_seeds(from_json(read_file(stored), stored))
        except (OSError, ValueError, AttributeError):
            setting, seeds = {}, {}
        if setting.get("dry_run") and not config.dry_run:
            continue
        if setting != own_setting or seeds == own_seeds:
            raise ValueError(
                f"name={config.name} is that of run {run_id}; only runs of its setting with other seeds may share it: "
                f"choose another, or tags=[{config.name}]"
            )


def _setting_and_seeds(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    computed = what_is_computed(values)
    seeds = {name: computed.pop(name, None) for name in ("seed", "seeds")}
    return computed, seeds


def owned_run(
    config: RunConfig, paths: RunPaths, *, fresh: bool = False, take_over: bool = False
) -> AbstractContextManager[Ownership]:
    """Owns a run, and its copy at the results' URL, for the duration of the block (see `owned`)."""
    what = f"run {paths.run_id}"
    return owned(paths.artifacts, what, config.results, paths.root, fresh=fresh, take_over=take_over)


def check_run_unowned(paths: RunPaths) -> None:
    """Raises OwnedError if another process of this machine is at work on a run; does not wait."""
    check_unowned(paths.artifacts, f"run {paths.run_id}")


# -- a run that is done ------------------------------------------------------------------------------------------------


def is_finished(config: RunConfig, run_id: str) -> bool:
    """Whether the run is done, so that there is nothing to resume."""
    return is_done(_paths(config, run_id))


def leave_finished(config: RunConfig, run_id: str, *, take_over: bool = False) -> Names | None:
    """Gives a run that is done the configuration's name and tags, and completes its copy at the results' URL.

    Returns the name and tags if they are new.
    Raises OwnedError if another process is doing so.
    """
    paths = _paths(config, run_id)
    if not (_is_renamed(config, paths) or is_remote(config.results)) and says_done(paths.status):
        return None  # nothing is written, and nothing is owned
    with owned_run(config, paths, take_over=take_over) as ownership:
        is_renamed = _is_renamed(config, paths)
        if is_renamed:
            if config.names.name != read_names(paths.artifacts).name:
                check_name_is_free(paths.root, config)
            manifest = Manifest.of_run(paths)
            rows = TableParts(paths.table("runs"), TABLES["runs"], 1, manifest)
            rows.replace([{**rows.read_last().to_pylist()[0], **config.names.columns()}])
            manifest.settle()
            write_names(paths.artifacts, config.names)
        # Other machines replace their copies, and so the old names, only if the status is later. It does not say done
        # if the run's process was killed before it wrote so, or the file was damaged since.
        if is_renamed or not says_done(paths.status):
            StatusFile(paths.status).write("done")
        mirror_run(config.results, paths, ownership)
    return config.names if is_renamed else None


def _is_renamed(config: RunConfig, paths: RunPaths) -> bool:
    """Whether the configuration has other names than the run's row or its file, which a kill may leave unlike."""
    columns = {column: text or "" for column, text in config.names.columns().items()}
    in_row = read_runs([paths], "runs", [*columns])[[*columns]].fillna("").to_dict("records")
    return in_row != [columns] or config.names != read_names(paths.artifacts)


def _paths(config: RunConfig, run_id: str) -> RunPaths:
    return run_paths(local_root(config.results), config.experiment, run_id)
