"""What a run writes down about itself before its first round: whole, or not at all."""

import json
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import numpy as np

from fedloom.platform.data.federated import size_variation
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.costs import RunCosts, store_costs
from fedloom.platform.federation.world import World
from fedloom.platform.methods.registry import method_of
from fedloom.platform.results.files import write_atomically
from fedloom.platform.results.journal import journal_files
from fedloom.platform.results.manifest import manifest_path
from fedloom.platform.results.names import write_names
from fedloom.platform.results.owner import OwnershipLostError
from fedloom.platform.results.parts import count_rows
from fedloom.platform.results.paths import RunPaths, remove_run
from fedloom.platform.results.writer import RunWriter
from fedloom.platform.runs.inputs import input_columns, keep_inputs
from fedloom.platform.runs.plugin_sources import FOLDER as PLUGINS
from fedloom.platform.runs.plugin_sources import PluginSources, UnknownSourceError, plugin_sources
from fedloom.platform.runs.source import source_hash

logger = logging.getLogger(__name__)

COSTS = "costs.json"
PACKAGES = ("fedloom", "torch", "numpy", "ray", "pymoo", "pyarrow")


def sources_of(config: RunConfig) -> PluginSources:
    """The sources of the plug-ins that a configuration names."""
    try:
        return plugin_sources(asdict(config))
    except UnknownSourceError:
        return PluginSources({})  # code of a notebook or a test has no file to copy


@contextmanager
def whole_or_nothing(paths: RunPaths) -> Iterator[None]:
    """Removes all files of a new run if the block fails: a full disk leaves no run that cannot be resumed.

    Not if another process has taken the run over, whose files they are now.
    """
    try:
        yield
    except OwnershipLostError:
        raise
    except (Exception, KeyboardInterrupt):
        remove_run(paths)
        raise


def has_begun(paths: RunPaths) -> bool:
    """Whether a run has been written down as a whole, has a checkpoint, or rows; damaged ones count."""
    if manifest_path(paths).exists() or any(paths.checkpoint.glob("*")) or journal_files(paths.artifacts):
        return True
    parts = [part for folder in paths.tables() for part in folder.glob("*.parquet")]
    try:
        return any(count_rows(part) for part in parts)
    except ValueError:
        return True


def write_new_run(paths: RunPaths, config: RunConfig, world: World, sources: PluginSources) -> None:
    """Writes what resuming a run needs: its configuration, names, costs, and copies of plug-ins and input files."""
    write_atomically(paths.config, json.dumps(asdict(config), indent=1).encode())
    write_names(paths.artifacts, config.names)
    store_costs(paths.artifacts / COSTS, RunCosts(world.cost_table, world.macs_table))
    sources.copy_to(paths.artifacts / PLUGINS)
    keep_inputs(paths.artifacts, asdict(config))


def latest_copies(paths: RunPaths) -> Path:
    """The folder of the plug-ins last used: `plugins`, or `plugins-2` and so on after resumes with changed ones."""
    numbers = {f: f.name.removeprefix(PLUGINS).removeprefix("-") or "1" for f in paths.artifacts.glob(f"{PLUGINS}*")}
    folders = {f: int(number) for f, number in numbers.items() if re.fullmatch("[0-9]{1,9}", number) and f.is_dir()}
    return max(folders, key=lambda f: folders[f], default=paths.artifacts / PLUGINS)


def what_changed(paths: RunPaths, changed: Sequence[str]) -> str:
    """The one-line refusal of a run whose plug-ins have changed."""
    return (
        f"code of run {paths.run_id} has changed since it was last at work: {', '.join(changed)}; its copy is in "
        f"{latest_copies(paths)}: restore it, or go on with --changed-plugins if the change is meant"
    )


def keep_changed(writer: RunWriter, sources: PluginSources, changed: Sequence[str]) -> None:
    """Copies the changed sources to a new folder, and updates the run's source hash."""
    logger.warning("resumed with changed code: %s", ", ".join(changed))
    before = latest_copies(writer.paths)
    number = int(before.name.partition("-")[2] or 1) + 1 if before.is_dir() else 1
    folder = writer.paths.artifacts / (PLUGINS if number == 1 else f"{PLUGINS}-{number}")
    sources.copy_to(folder)
    writer.manifest.add(path for path in folder.rglob("*") if path.is_file())
    writer.update_run(source_hash=source_hash(sources))


def run_row(config: RunConfig, world: World, sources: PluginSources) -> dict[str, str | float | None]:
    """The columns of the run's row that are known before its first round."""
    seeds = {p: config.seed_for(p) for p in asdict(config.seeds)}
    sizes = np.bincount(world.tier_of_client, minlength=len(world.tiers))
    tiers = [{"tier": t.name, "upper": t.upper, "clients": int(n)} for t, n in zip(world.tiers, sizes, strict=True)]
    return {
        **config.names.columns(),
        "method": config.method.name,
        "space": config.space.name,
        "dataset": config.data.dataset,
        "seeds": json.dumps(seeds, sort_keys=True),
        "tiers": json.dumps(tiers),
        "config": json.dumps(asdict(config), sort_keys=True),
        "versions": json.dumps({p: _version(p) for p in PACKAGES}, sort_keys=True),
        "source_hash": source_hash(sources),
        **input_columns(asdict(config), world.data),
        "label_variation": world.data.label_variation(),
        "size_variation": size_variation(world.data.sizes("train")),
        "traits": json.dumps(method_of(config.method).traits(config.method), sort_keys=True),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
