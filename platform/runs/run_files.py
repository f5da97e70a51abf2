"""What a run records about itself before its first round, and its inputs: the data, and the files that it names.

The hashes of the inputs are columns of the run's row, and copies of the files lie in its folder `inputs`. All code that
continues a stored run refuses other inputs, which would mix two experiments in one result. Files that code reads
without an option that names them are not tracked.
"""

import json
import logging
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.platform.data.artefact import atomic_folder
from fedloom.platform.data.augment import AUGMENTATIONS
from fedloom.platform.data.federated import FederatedData, size_variation
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.tiers import RunCosts, store_costs
from fedloom.platform.federation.world import World
from fedloom.platform.methods.registry import method_of
from fedloom.platform.results.files import content_hash, from_json, write_atomically
from fedloom.platform.results.manifest import digest_of, manifest_path
from fedloom.platform.results.paths import RunPaths, remove_run, write_names
from fedloom.platform.results.tables import count_rows, read_runs
from fedloom.platform.results.writer import RunWriter, journal_files
from fedloom.platform.runs.source_code import (
    PLUGINS,
    PluginSources,
    UnknownSourceError,
    plugin_sources,
    source_hash,
    texts_of,
)
from fedloom.platform.spaces.space_config import weight_files

logger = logging.getLogger(__name__)

COSTS = "costs.json"
PACKAGES = ("fedloom", "torch", "numpy", "ray", "pymoo", "pyarrow")
"""The packages whose versions a run's row holds."""
GIT_S = 5.0
INPUTS = "inputs"
"""The folder of the copies in a run's artefacts."""
MOST_KEPT_BYTES = 1 << 28
"""Larger files are not copied: only their hash is recorded."""

_NO_INPUTS = ("data", "experiment", "name", "ray", "results", "tags")
"""Sections whose texts name no files, and the section of the data set, which has a hash of its own."""

_OF_DATA_SET = ("dataset", "train_samples", "test_samples", "sequence_length", "options")
"""The keys of `data` that tell data sets apart."""

_TOLD = ("config", "dataset_hash", "inputs")

Row = Mapping[str, Any]


def input_files(config: Mapping[str, Any]) -> dict[str, Path]:
    """The files that a configuration (as plain values) names, or its index of weights, by their paths as written."""
    parts = [value for name, value in config.items() if name not in _NO_INPUTS]
    try:  # of the options of `data` only the augmentation's can name inputs: the others are the data set's
        names = AUGMENTATIONS.options_of(config["data"]["augment"])
        parts += [value for name, value in config["data"]["options"].items() if name in names]
    except (ValueError, KeyError, AttributeError):  # there is no such code here, or in the version that stored it
        pass
    # A text without a dot or a slash is a word, even if the working directory has a file of that name.
    texts = {text for text in texts_of(parts) if "." in text or "/" in text}
    try:
        weights = config["space"]["weights"]
        files = weight_files(_files([weights])[weights])
        texts |= {os.path.join(os.path.dirname(weights), file) for file in files}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):  # none that can be read
        pass
    return _files(sorted(texts))


def _files(texts: Iterable[str]) -> dict[str, Path]:
    """The files among these texts."""
    files = {text: os.path.expanduser(text) for text in texts}
    return {text: Path(file) for text, file in files.items() if os.path.isfile(file)}


def _hashes(files: Mapping[str, Path]) -> dict[str, str]:
    return {text: digest_of(file.resolve()).sha256 for text, file in files.items()}


def input_hashes(config: Mapping[str, Any]) -> dict[str, str]:
    """SHA-256 (hex) of the files of `input_files`."""
    return _hashes(input_files(config))


def input_columns(config: Mapping[str, Any], data: FederatedData) -> dict[str, str]:
    """The columns of a run's row that identify its inputs."""
    return {
        "dataset_hash": data.dataset.hash,
        "partition_hash": data.partition_hash,
        "inputs": json.dumps(input_hashes(config), sort_keys=True),
    }


def _copy_of(artifacts: Path, name: str, sha256: str) -> Path:
    return artifacts / INPUTS / f"{sha256[:16]}-{name}"


def recorded_inputs(paths: RunPaths) -> Row:
    """The columns of `input_columns` in a run's row; without those that an earlier version did not write."""
    rows = read_runs([paths], "runs", ["dataset_hash", "partition_hash", "inputs", "constants_hash"])
    return {str(name): text for name, text in rows.iloc[-1].dropna().items()} if len(rows) else {}


def changed_files(paths: RunPaths, recorded: Row) -> dict[str, str]:
    """A line for each file that differs from what a run has recorded."""
    lines = {}
    files = from_json(recorded.get("inputs", "{}"), paths.table("runs"))
    if not isinstance(files, dict) or not all(isinstance(sha256, str) for sha256 in files.values()):
        raise ValueError(f"the run's row in {paths.table('runs')} does not say which files it began with: restore it")
    now = _hashes(_files(files))
    for text, sha256 in files.items():
        if now.get(text) != sha256:
            copy = _copy_of(paths.artifacts, Path(text).name, sha256)
            advice = f"restore it from {copy}" if copy.is_file() else "restore it"
            what = "has changed since then" if text in now else "is not there"
            lines[text] = f"{text}, with which run {paths.run_id} began, {what}: {advice}, or start a new run"
    return lines


def check_data(paths: RunPaths, dataset: str, data: FederatedData, constants_hash: str) -> None:
    """Raises ValueError if the data set, its partition or a network's constants are not those that a run began with."""
    recorded = recorded_inputs(paths)
    # A run that was killed before its row was written has recorded nothing; in a row, null means no constants.
    if recorded and recorded.get("constants_hash", "") != constants_hash:
        raise ValueError(
            f"space.build gives other constants than those with which run {paths.run_id} began: restore what it reads, "
            "or start a new run"
        )
    for column, now in (("dataset_hash", data.dataset.hash), ("partition_hash", data.partition_hash)):
        if recorded.get(column, now) != now:
            raise ValueError(other_data(paths, dataset))


def begun_with(runs: Sequence[RunPaths]) -> dict[str, tuple[str, str]]:
    """The data sets and files that runs began with: (hash, run id) by their name in the configuration."""
    known: dict[str, tuple[str, str]] = {}
    rows = read_runs(runs, "runs", _TOLD).dropna()
    for run_id, config, dataset_hash, files in zip(*(rows[c] for c in ("run_id", *_TOLD)), strict=True):
        named = _by_name(json.loads(config), {"dataset_hash": dataset_hash, "inputs": files})
        known |= {name: (sha256, run_id) for name, sha256 in named.items()}
    return known


def check_alike(config: Mapping[str, Any], data: FederatedData, known: Mapping[str, tuple[str, str]]) -> None:
    """Raises ValueError if an input of a new run differs from the one of the same name in `known` (`begun_with`)."""
    for name, sha256 in _by_name(config, input_columns(config, data)).items() if known else ():
        other, run_id = known.get(name, (sha256, ""))
        if other != sha256:
            raise ValueError(
                f"{name} is not what run {run_id} began with, so the two cannot be compared: restore the original, or "
                "start all runs anew"
            )


def _by_name(config: Mapping[str, Any], row: Row) -> dict[str, str]:
    """The hashes of the data set and the files by their names in the configuration."""
    # With noise or rotation each partition has a data set of its own.
    skewed = config["data"].get("noise") is not None or config["data"].get("rotation") is not None
    keys = sorted(config["data"]) if skewed else _OF_DATA_SET
    data = [f"data.{key}={config['data'].get(key)}" for key in keys if config["data"].get(key)]
    data += [f"seed={config['seed']}"] if skewed else []
    # The processes of an ablation's trials get absolute paths.
    files = {os.path.abspath(text): sha256 for text, sha256 in json.loads(row["inputs"]).items()}
    return {" ".join(data): row["dataset_hash"], **files}


def other_data(paths: RunPaths, dataset: str) -> str:
    """The one-line refusal of a run whose data has changed."""
    return (
        f"the data of {dataset} is not what run {paths.run_id} was trained on: restore its original files (data.root, "
        "FEDLOOM_DATA, data.options), or go on where the run was made"
    )


def sources_of(config: RunConfig) -> PluginSources:
    """The sources of the plug-ins that a configuration names."""
    try:
        return plugin_sources(asdict(config))
    except UnknownSourceError:
        return PluginSources({})  # code of a notebook or a test has no file to copy


@contextmanager
def whole_or_nothing(paths: RunPaths) -> Iterator[None]:
    """Removes all files of a new run if the block fails: a full disk leaves no run that cannot be resumed."""
    try:
        yield
    except (Exception, KeyboardInterrupt):
        remove_run(paths)
        raise


def has_begun(paths: RunPaths) -> bool:
    """Whether a run has been fully written down, or has a checkpoint or rows; damaged ones count."""
    if manifest_path(paths).exists() or any(paths.checkpoint.glob("*")) or journal_files(paths.artifacts):
        return True
    parts = [part for folder in paths.tables() for part in folder.glob("*.parquet")]
    try:
        return any(count_rows(part) for part in parts)
    except ValueError:
        return True


def write_new_run(paths: RunPaths, config: RunConfig, world: World, sources: PluginSources) -> None:
    """Writes what resuming a run needs: its configuration, names, copies of plug-ins and input files, and last costs.

    A run without costs was killed before all of this was written.
    """
    write_atomically(paths.config, json.dumps(asdict(config), indent=1).encode())
    write_names(paths.artifacts, config.names)
    sources.copy_to(paths.artifacts / PLUGINS)
    for file in input_files(asdict(config)).values():
        if file.stat().st_size <= MOST_KEPT_BYTES:
            content = file.read_bytes()
            copy = _copy_of(paths.artifacts, file.name, content_hash(content))
            copy.parent.mkdir(exist_ok=True)
            write_atomically(copy, content)
    store_costs(paths.artifacts / COSTS, RunCosts(world.cost_table, world.macs_table))


def latest_copies(paths: RunPaths) -> Path:
    """The folder of the plug-ins last used: `plugins`, or `plugins-2` and so on after resumes with changed ones."""
    numbers = {f: f.name.removeprefix(PLUGINS).removeprefix("-") or "1" for f in paths.artifacts.glob(f"{PLUGINS}*")}
    folders = {f: int(number) for f, number in numbers.items() if re.fullmatch("[0-9]{1,9}", number) and f.is_dir()}
    return max(folders, key=lambda f: folders[f], default=paths.artifacts / PLUGINS)


def keep_changed(writer: RunWriter, sources: PluginSources, changed: Sequence[str]) -> None:
    """Copies the changed sources to a new folder, and updates the run's source hash."""
    logger.warning("resumed with changed code: %s", ", ".join(changed))
    before = latest_copies(writer.paths)
    number = int(before.name.partition("-")[2] or 1) + 1 if before.is_dir() else 1
    folder = writer.paths.artifacts / (PLUGINS if number == 1 else f"{PLUGINS}-{number}")
    # The copies come last and all at once: until then the next resume finds the code changed and asks again.
    writer.update_run(source_hash=source_hash(sources))
    with atomic_folder(folder) as temporary:
        sources.copy_to(temporary)
    writer.manifest.add(path for path in folder.rglob("*") if path.is_file())


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
        **_machine(),
        "source_hash": source_hash(sources),
        **input_columns(asdict(config), world.data),
        "constants_hash": world.space.constants_hash or None,
        "label_variation": world.data.label_variation(),
        "size_variation": size_variation(world.data.sizes("train")),
        "traits": json.dumps(method_of(config.method).traits(config.method), sort_keys=True),
    }


def _machine() -> dict[str, str | None]:
    versions = json.dumps({p: _version(p) for p in PACKAGES}, sort_keys=True)
    return {"versions": versions, "processor": processor(), "commit": commit()}


def other_machine(paths: RunPaths, recorded: Row) -> list[str]:
    """How the versions, the processor and the commit of a run's row differ from those here: the last bits may, too."""
    rows: list[Row] = []
    for row in (recorded, _machine()):
        versions = from_json(str(row["versions"]), paths.table("runs"))
        if not isinstance(versions, dict):
            raise ValueError(f"the run's row in {paths.table('runs')} names no versions by package: restore it")
        rows.append({**versions, **row})
    then, now = ({name: row.get(name) for name in (*PACKAGES, "processor", "commit")} for row in rows)
    return [f"{name} {then[name]}, here {now[name]}" for name in then if then[name] not in (None, now[name])]


@cache
def commit() -> str | None:
    """The git commit of fedloom's source, with "-dirty" if files differ from it; None if it is not in a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():  # an installed package may lie in the repository of another project
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=GIT_S, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


@cache
def processor() -> str:
    """The processor's name, and the widest instructions that torch uses on it: the last bits depend on them."""
    import torch

    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else []
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
