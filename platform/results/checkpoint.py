"""A run's checkpoint and its models: named tensors as safetensors, with JSON beside them."""

import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from fedloom.platform.results.files import (
    MOST_BYTES,
    as_stored,
    check_name,
    content_hash,
    from_json,
    read_file,
    read_json,
    remove_temporaries,
    sealed_text,
    typed,
    unsealed,
    within,
    without_number,
    write_atomically,
)
from fedloom.platform.results.manifest import Replacing, seal_of_bytes
from fedloom.platform.results.paths import STATE_FILE, RunPaths
from fedloom.platform.results.tensor_group import TensorGroup

_ORDER = "order"


def to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """The tensors as the content of a safetensors file, with values, shapes, dtypes and the order of the names.

    Views and tensors on other devices are copied. Raises ValueError for a tensor that the format cannot hold.
    """
    # The format sorts by name; the original order is stored as metadata, because it determines the order of sums.
    metadata = {_ORDER: json.dumps(list(tensors))}
    try:
        return safetensors.torch.save(_storable(tensors), metadata)
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        kinds = sorted({str(tensor.dtype) for tensor in tensors.values()})
        raise ValueError(f"a group of tensors of the types {kinds} cannot be saved as safetensors: {error}") from error


def from_bytes(content: bytes, origin: Path) -> dict[str, Tensor]:
    """The tensors in their original order; ValueError naming `origin` for content that is no safetensors file."""
    try:
        tensors = safetensors.torch.load(content)
        header = from_json(content[8 : 8 + int.from_bytes(content[:8], "little")], origin)
        order = from_json(header.get("__metadata__", {}).get(_ORDER, json.dumps(sorted(tensors))), origin)
        return {name: tensors[name] for name in order}
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ValueError(damaged(origin, "it is not a whole safetensors file")) from error


def read_checked(path: Path, sha256: str) -> bytes:
    """The file's content; ValueError if it is missing or has another hash."""
    try:
        content = read_file(path, MOST_BYTES)
    except OSError as error:
        raise ValueError(damaged(path, error.strerror or "it cannot be read")) from error
    if content_hash(content) != sha256:
        raise ValueError(damaged(path, "its content does not have the recorded hash"))
    return content


def damaged(path: Path, reason: str) -> str:
    """The one-line error for a damaged file."""
    return f"{path} is damaged ({reason}): restore it from a copy, or start a new run"


def _storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided:
            raise ValueError(f"tensor {name!r} is {tensor.layout}: save it dense")
        stored = tensor.detach().to("cpu").contiguous()
        pointer = stored.untyped_storage().data_ptr()
        # The format does not allow tensors that share memory, such as slices of one supernet tensor.
        result[name] = stored.clone(memory_format=torch.contiguous_format) if pointer in seen else stored
        seen.add(pointer)
    return result


CHECKPOINT_VERSION = 2


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A loaded checkpoint."""

    groups: dict[str, TensorGroup]
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """The file of the checkpoint folder that holds a tensor group."""

    file: str
    sha256: str
    version: int


Saved = Mapping[str, StoredGroup]
"""The files of a checkpoint by tensor group, passed from one `save_checkpoint` to the next."""


def save_checkpoint(
    folder: Path,
    groups: Mapping[str, TensorGroup],
    data: Mapping[str, Any],
    previous: Saved | None = None,
) -> dict[str, StoredGroup]:
    """Replaces the checkpoint in the folder atomically: a crash leaves either the old or the new one.

    `previous` is the return value of the last call for this folder: groups of an unchanged version are not written
    again (without it, all are). `data` is a JSON value: tuples become lists, and all keys strings.
    Raises ValueError for data or tensors that cannot be stored, OSError for disk errors.
    """
    state = _state_json(data)
    folder.mkdir(parents=True, exist_ok=True)
    saved = {name: _store(folder, name, group, (previous or {}).get(name)) for name, group in groups.items()}
    references = {
        name: {"file": group.file, "sha256": group.sha256, "version": group.version} for name, group in saved.items()
    }
    head = json.dumps({"checkpoint_version": CHECKPOINT_VERSION, "bags": references})
    # The data is already encoded, so it is inserted as text instead of being encoded twice.
    write_atomically(folder / STATE_FILE, sealed_text(f'{head[:-1]}, "data": {state}}}'))
    _remove_unreferenced(folder, saved)
    return saved


def load_checkpoint(folder: Path) -> Checkpoint:
    """Loads the checkpoint in the folder; one-line ValueError if there is none or a file is damaged."""
    path = as_stored(folder / STATE_FILE)
    state = _read_state(path)
    try:
        groups = {name: _load_group(folder, reference) for name, reference in state["bags"].items()}
        return Checkpoint(groups, dict(state["data"].items()))
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


def _store(folder: Path, name: str, group: TensorGroup, previous: StoredGroup | None) -> StoredGroup:
    if previous is not None and previous.version == group.version:
        return previous
    check_name("tensor group", name)
    content = to_bytes(group.tensors)
    sha256 = content_hash(content)
    # The hash in the name prevents overwriting a file that the current state.json refers to.
    path = folder / f"{name}-v{group.version}-{sha256[:16]}.safetensors"
    write_atomically(path, content)
    return StoredGroup(path.name, sha256, group.version)


def _remove_unreferenced(folder: Path, saved: Saved) -> None:
    needed = {group.file for group in saved.values()}
    for path in folder.glob("*.safetensors"):
        if path.name not in needed:
            path.unlink(missing_ok=True)
    remove_temporaries(folder)


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


def _load_group(folder: Path, reference: Any) -> TensorGroup:
    stored = typed(StoredGroup, reference)
    path = within(folder, stored.file)
    return TensorGroup(from_bytes(read_checked(path, stored.sha256), path), stored.version)


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A stored model: `file` is relative to the run's artefacts, `hash` is the file's SHA-256."""

    name: str
    file: str
    hash: str
    size_bytes: int


def save_model(
    paths: RunPaths,
    name: str,
    tensors: Mapping[str, Tensor],
    card: Mapping[str, Any],
    replacing: Replacing = lambda _path, _seal: nullcontext(),
) -> ModelFile:
    """Stores a model under its name, replacing an earlier one.

    `card` is JSON data about the model (architecture, costs, scores), which the run's manifest lists (`replacing`). A
    crash leaves either the old or the new model.
    """
    check_name("model", name)
    content = to_bytes(tensors)
    sha256 = content_hash(content)
    # With the hash in the file name, the old model's card never refers to the new model's tensors.
    model = ModelFile(name, f"models/{name}.{sha256[:16]}.safetensors", sha256, len(content))
    text = _card_json(model, card)
    paths.models.mkdir(parents=True, exist_ok=True)
    write_atomically(paths.artifacts / model.file, content)
    path, content = paths.models / f"{name}.json", text.encode()
    with replacing(path, seal_of_bytes(content)):
        write_atomically(path, content)
    for path in paths.models.glob(f"{name}.{'[0-9a-f]' * 16}.safetensors"):
        if path != paths.artifacts / model.file:
            path.unlink(missing_ok=True)
    remove_temporaries(paths.models)
    return model


def load_model(paths: RunPaths, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the card of a model; ValueError listing the models if it is unknown, or naming a damaged file."""
    path = as_stored(paths.models / f"{name}.json")
    if name not in list_models(paths):
        known = ", ".join(list_models(paths)) or "none"
        raise ValueError(f"run {paths.run_id!r} has no model {name!r}; its models: {known}")
    try:
        content = read_json(path)
        file, sha256, card = within(paths.artifacts, content["file"]), content["hash"], content["card"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(damaged(path, "it is not the card of a model")) from error
    return from_bytes(read_checked(file, sha256), file), card


def list_models(paths: RunPaths) -> list[str]:
    """The names of the run's stored models."""
    return sorted({without_number(path.name).removesuffix(".json") for path in paths.models.glob("*.json")})


def _card_json(model: ModelFile, card: Mapping[str, Any]) -> str:
    content = {"name": model.name, "file": model.file, "hash": model.hash, "card": card}
    try:
        return json.dumps(content, indent=1)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the card of model {model.name!r} cannot be written as JSON: {error}") from error
