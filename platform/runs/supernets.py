"""Trained supernets that runs share, stored in the results folder under a key of everything that training depends on.

`RESULTS/supernets/KEY/` holds the run's whole state after its last training round, and `origin.json`, which names the
run that trained it. A run that differs only in later stages starts from that state.
"""

import logging
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from fedloom.platform.data.artefact import atomic_folder, hash_of
from fedloom.platform.federation.algorithm import RunState
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.recorder import restored_state, save_state
from fedloom.platform.federation.world import World
from fedloom.platform.methods.registry import shared_training
from fedloom.platform.results.checkpoint import differences, load_checkpoint
from fedloom.platform.results.copies import mirror_folder
from fedloom.platform.results.files import (
    first_irregular,
    from_hashed_json,
    hashed_json,
    irregular,
    read_file,
    write_atomically,
)
from fedloom.platform.results.lock import one_at_a_time
from fedloom.platform.results.manifest import digest_of
from fedloom.platform.results.paths import STATE_FILE, SUPERNETS, RunPaths
from fedloom.platform.runs.run_files import input_hashes
from fedloom.platform.runs.source_code import UnknownSourceError, plugin_sources, source_hash
from fedloom.platform.words import in_words, why

logger = logging.getLogger(__name__)

ORIGIN = "origin.json"
KEY_LENGTH = 32

WITHOUT_BEARING = (
    "experiment",
    "name",
    "tags",
    "results",
    "dry_run",
    "reuse_supernet",
    "tensorboard",
    "tracking",
    "checkpoint",
    "data.root",
    "data.cache",
    "data.download",
    "executor.kind",
    "executor.actors",
    "ray",
)
"""The keys that do not affect training; all others are part of a supernet's key."""
BY_CONTENT = ("seed", "seeds", "tiers.device_table", "devices.availability_table")
"""The keys that enter a supernet's key by the content they refer to, not by their value."""
SEEDS = ("partition", "initialisation", "selection", "training")
"""The seeds that training depends on."""


def supernet_key(config: RunConfig, world: World) -> str | None:
    """The key of the configuration's supernet, 32 hexadecimal digits; None if its training cannot be shared.

    It is a hash of everything that training depends on: the configuration without later stages, seeds, data, partition,
    tiers, fedloom's source, torch's version, and whether clients train on GPUs. Results are bitwise equal only on the
    same kind of machine; different machines with one results folder still share its supernets. Code that the
    configuration names (`module:function`) enters with its module and the module's imports from outside the installed
    packages. Measured costs (latency_s) vary, so that such runs do not share a supernet.
    """
    shared = shared_training(config.method)
    if shared is None or config.dry_run:
        return None
    counted = _counted(config, asdict(config))
    try:
        own_code = plugin_sources(counted).hash
    except UnknownSourceError:
        return None
    hashes = input_hashes(asdict(config))
    tables = [table or "" for table in (config.tiers.device_table, config.devices.availability_table)]
    return hash_of(
        {
            "config": counted,
            "seeds": {purpose: config.seed_for(purpose) for purpose in SEEDS},
            "data": [world.data.dataset.hash, world.data.partition_hash],
            "costs": [asdict(world.cost_table), asdict(world.macs_table)],
            "tiers": [[t.name, t.upper] for t in world.tiers],
            "clients": world.tier_of_client.tolist(),
            "devices": [hashes.get(table, table) for table in tables],
            "inputs": {file: content for file, content in hashes.items() if file not in tables},
            "code": [source_hash(), own_code, torch.__version__],
            "gpu": any(t.num_gpus > 0 for t in world.tiers),
        }
    )[:KEY_LENGTH]


def _counted(config: RunConfig, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a configuration that training depends on, without its method's later stages."""
    shared = shared_training(config.method)
    later = tuple(f"method.{part}" for part in shared.later) if shared is not None else ()
    return _without(values, (*WITHOUT_BEARING, *BY_CONTENT, *later))


def _seeds(values: Mapping[str, Any]) -> dict[str, Any]:
    """The seeds that the training of a stored configuration depended on."""
    seeds = values["seeds"]
    return {purpose: values["seed"] if seeds[purpose] is None else seeds[purpose] for purpose in SEEDS}


def _without(values: Mapping[str, Any], names: Collection[str], prefix: str = "") -> dict[str, Any]:
    """A nested configuration without the keys of these dotted names."""
    return {
        name: _without(value, names, f"{prefix}{name}.") if isinstance(value, Mapping) else value
        for name, value in values.items()
        if f"{prefix}{name}" not in names
    }


@dataclass(frozen=True)
class StoredSupernet:
    """The run that trained a supernet, and its state after the last round of training."""

    run_id: str
    state: RunState


def stored_supernet(root: Path, key: str) -> str | None:
    """The id of the run that stored a supernet with this key, None if there is none; reads no tensors."""
    try:
        return str(_origin(_folder(root, key))["run_id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def load_supernet(root: Path, key: str, config: RunConfig) -> StoredSupernet | None:
    """The stored supernet of this configuration; None if there is none.

    Also None, with a warning, if it is damaged, or belongs to another key and was moved here.
    """
    try:
        return _load(root, key, config) if _folder(root, key).is_dir() else None
    except ValueError as error:
        logger.warning("supernet %s cannot be used: %s. This run trains its own and replaces it if it can", key, error)
        return None


def _load(root: Path, key: str, config: RunConfig) -> StoredSupernet:
    folder = _folder(root, key)
    try:
        origin = _origin(folder)
        run_id, expected_sha256 = str(origin["run_id"]), origin["state_sha256"]
        sha256 = digest_of(folder / STATE_FILE).sha256
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / ORIGIN} or {STATE_FILE} beside it cannot be read") from error
    if sha256 != expected_sha256:
        raise ValueError(f"{folder / STATE_FILE} does not match {ORIGIN}")
    checkpoint = load_checkpoint(folder)
    try:
        stored, present = (
            {"seeds": _seeds(values), **_counted(config, values)}
            for values in (checkpoint.data["config"], asdict(config))
        )
        changes = differences(stored, present)
    except (KeyError, TypeError) as error:
        raise ValueError("it does not say with which configuration it was trained") from error
    if changes or origin.get("key", key) != key:
        raise ValueError(f"{folder} holds the supernet of another training ({changes or origin['key']})")
    return StoredSupernet(run_id, restored_state(checkpoint.data, checkpoint.groups))


def store_supernet(root: Path, key: str, state: RunState, run_id: str, config: RunConfig) -> None:
    """Stores a trained supernet for later runs atomically, unless an intact one exists.

    If several runs finish at the same time, the first one wins. Raises OSError for disk errors, and ValueError for a
    link in the place of its folder.
    """
    folder = _folder(root, key)
    with one_at_a_time(root / SUPERNETS):
        if folder.is_dir():
            try:
                _load(root, key, config)
                return
            except ValueError:
                # Renamed first, so that no run reads a partly deleted folder.
                aside = folder.parent / f".{folder.name}.{uuid4().hex}.tmp"
                folder.rename(aside)
                shutil.rmtree(aside, ignore_errors=True)
        with atomic_folder(folder) as temporary:
            save_state(temporary, state, {}, asdict(config), run_id)
            origin = {
                "key": key,
                "run_id": run_id,
                "experiment": config.experiment,
                "created": datetime.now(UTC).isoformat(timespec="seconds"),
                "state_sha256": digest_of(temporary / STATE_FILE).sha256,
            }
            write_atomically(temporary / ORIGIN, hashed_json(origin))


def keeper(config: RunConfig, paths: RunPaths, key: str) -> Callable[[RunState], None]:
    """Returns a callback for every stage's last state, which stores the supernet after the last stage of its training.

    It also stores it at the results' URL, for other machines. An error only causes a warning, because only later runs
    need the supernet.
    """
    training = shared_training(config.method)

    def keep(state: RunState) -> None:
        if training is None or state.stage != training.stages - 1:
            return
        try:
            store_supernet(paths.root, key, state, paths.run_id, config)
        except (OSError, ValueError) as error:
            reason = why(error, paths.root / SUPERNETS / key)
            logger.warning("the supernet could not be stored for later runs: %s", reason)
        try:
            mirror_folder(config.results, f"{SUPERNETS}/{key}")
        except OSError as error:
            logger.warning("the supernet could not be stored for runs on other machines: %s", in_words(error))

    return keep


def _folder(root: Path, key: str) -> Path:
    """The folder of a supernet; ValueError for a link in its place."""
    if (path := first_irregular(root, f"{SUPERNETS}/{key}")) is not None:
        raise ValueError(irregular(path))
    return root / SUPERNETS / key


def _origin(folder: Path) -> dict[str, Any]:
    return from_hashed_json(read_file(folder / ORIGIN), folder / ORIGIN, allow_plain=True)
