"""A run's checkpoint: named bags of tensors and JSON data; a consistent state can be loaded at any moment."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.platform.results.bag import Bag
from fedloom.platform.results.fence import Fence, newest
from fedloom.platform.results.files import check_name, content_hash, read_file, typed, within
from fedloom.platform.results.paths import STATE_FILE, RunPaths
from fedloom.platform.results.sealed import sealed_text, unsealed
from fedloom.platform.results.tensor_files import damaged, from_bytes, read_checked, to_bytes

CHECKPOINT_VERSION = 2


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A loaded checkpoint."""

    bags: dict[str, Bag]
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StoredBag:
    """The file of the checkpoint folder that holds a bag."""

    file: str
    sha256: str
    version: int


Saved = Mapping[str, StoredBag]
"""The files of a checkpoint by bag, passed from one `save_checkpoint` to the next."""


def save_checkpoint(
    folder: Path,
    bags: Mapping[str, Bag],
    data: Mapping[str, Any],
    previous: Saved | None = None,
    fence: Fence | None = None,
) -> dict[str, StoredBag]:
    """Replaces the checkpoint in the folder atomically: a crash leaves either the old or the new one.

    `previous` is the return value of the last call for this folder: bags of an unchanged version are not written again
    (without it, all are); an owner's first call has none, so that all files of its checkpoint are its own. `data` is a
    JSON value; note that JSON turns tuples into lists and all keys into strings.
    Raises ValueError for data or tensors that cannot be stored, OSError for disk errors.
    """
    state, fence = _state_json(data), fence or Fence()
    folder.mkdir(parents=True, exist_ok=True)
    saved = {name: _store(folder, name, bag, (previous or {}).get(name), fence) for name, bag in bags.items()}
    references = {name: {"file": bag.file, "sha256": bag.sha256, "version": bag.version} for name, bag in saved.items()}
    head = json.dumps({"checkpoint_version": CHECKPOINT_VERSION, "bags": references})
    # The data is already encoded, so it is inserted as text instead of being encoded twice.
    fence.replace(folder / STATE_FILE, sealed_text(f'{head[:-1]}, "data": {state}}}'))
    _remove_unreferenced(folder, saved, fence)
    return saved


def load_checkpoint(folder: Path) -> Checkpoint:
    """Loads the checkpoint in the folder; one-line ValueError if there is none or a file is damaged."""
    path = newest(folder / STATE_FILE)
    state = _read_state(path)
    try:
        bags = {name: _load_bag(folder, reference) for name, reference in state["bags"].items()}
        return Checkpoint(bags, dict(state["data"].items()))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(damaged(path, "it is not the state of a checkpoint")) from error


_OF_RUNS: dict[str, Any] = {
    "stage": int,
    "round": int,
    "simulated_s": int | float,
    "data": dict,
    "position": dict,
    "config": dict,
}
"""What a run's checkpoint holds beside its tensors."""


def run_checkpoint(paths: RunPaths) -> Checkpoint:
    """Loads a run's checkpoint; one-line ValueError like `load_checkpoint`, and if it is that of another run."""
    checkpoint = load_checkpoint(paths.checkpoint)
    lacking = [name for name, kind in _OF_RUNS.items() if not isinstance(checkpoint.data.get(name), kind)]
    if lacking:
        raise ValueError(damaged(paths.checkpoint / STATE_FILE, f"it has no {', '.join(lacking)}"))
    named = checkpoint.data.get("run_id", paths.run_id)  # those of earlier versions name no run
    if named != paths.run_id:
        raise ValueError(
            f"{paths.checkpoint / STATE_FILE} is the checkpoint of run {named}: restore that of {paths.run_id} from a "
            "copy, or start a new run"
        )
    return checkpoint


def check_same_config(saved: Mapping[str, Any], given: Mapping[str, Any], *, later: bool = False) -> None:
    """Raises ValueError with the dotted keys in which the configurations differ.

    `later` says that the given one may have keys that the saved one lacks, because they came with a later version:
    whoever restores a configuration gives them the meaning of before.
    """
    if changes := differences(saved, given, later=later):
        raise ValueError(
            f"checkpoint of another configuration: {changes}; resume with the saved values or start a new run"
        )


def differences(saved: Mapping[str, Any], given: Mapping[str, Any], most: int = 5, *, later: bool = False) -> str:
    """The dotted keys, at most `most`, in which two configurations differ, with both values; "" if in none.

    `later` is of keys that the saved one lacks: they do not count.
    """
    old, new = _flat(saved), _flat(given)
    changes = [
        f"{key} {old.get(key, 'absent')} -> {new.get(key, 'absent')}"
        for key in [*old, *(key for key in new if key not in old and not later)]
        if old.get(key) != new.get(key)
    ]
    return ", ".join(changes[:most]) + (f" and {len(changes) - most} more" if len(changes) > most else "")


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted keys with their values as JSON, so that tuples equal lists and NaN equals NaN."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = json.dumps(value)
    return flat


def _state_json(data: Mapping[str, Any]) -> str:
    try:
        return json.dumps(data)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the data of a checkpoint cannot be written as JSON: {error}") from error


def _store(folder: Path, name: str, bag: Bag, previous: StoredBag | None, fence: Fence) -> StoredBag:
    if previous is not None and previous.version == bag.version:
        return previous
    check_name("bag", name)
    content = to_bytes(bag.tensors)
    sha256 = content_hash(content)
    # The hash in the name prevents overwriting a file that the current state.json refers to.
    path = fence.named(folder / f"{name}-v{bag.version}-{sha256[:16]}.safetensors")
    fence.write(path, content)
    return StoredBag(path.name, sha256, bag.version)


def _remove_unreferenced(folder: Path, saved: Saved, fence: Fence) -> None:
    needed = {bag.file for bag in saved.values()}
    for path in folder.glob("*.safetensors"):
        if path.name not in needed:
            fence.remove(path)
    fence.remove_temporaries(folder)


def _read_state(path: Path) -> dict[str, Any]:
    try:
        content = read_file(path)
    except FileNotFoundError as error:
        raise ValueError(f"there is no checkpoint in {path.parent}: the run stopped before its first one") from error
    except OSError as error:
        raise ValueError(damaged(path, error.strerror or "it cannot be read")) from error
    if content.startswith(b'{"checkpoint_version": 1,'):
        raise ValueError(f"{path} was written by an earlier version of fedloom: resume with that version")
    state = unsealed(content, path)
    if state.get("checkpoint_version") != CHECKPOINT_VERSION:
        raise ValueError(f"{path} was written by a newer version of fedloom: resume with that version")
    return state


def _load_bag(folder: Path, reference: Any) -> Bag:
    stored = typed(StoredBag, reference)
    path = within(folder, stored.file)
    return Bag(from_bytes(read_checked(path, stored.sha256), path), stored.version)
