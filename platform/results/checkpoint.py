"""A run's checkpoint and its models: groups of named tensors as safetensors, with JSON beside them."""

import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from fedloom.platform.results.files import (
    ADVICE,
    MOST_BYTES,
    as_stored,
    check_name,
    content_hash,
    from_hashed_json,
    from_json,
    hashed_text,
    read_file,
    read_json,
    remove_temporaries,
    stamp_of,
    typed,
    within,
    without_number,
    write_atomically,
)
from fedloom.platform.results.manifest import Digest, Replacing
from fedloom.platform.results.paths import STATE_FILE, RunPaths
from fedloom.platform.spaces.slices import TensorGroup

_ORDER = "order"


def to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """The tensors as the content of a safetensors file, with values, shapes, dtypes and the order of the names.

    Views and tensors on other devices are copied. Raises ValueError for a tensor that the format cannot hold.
    """
    # The format sorts by name; the original order is stored as metadata, because it determines the order of sums.
    metadata = {_ORDER: json.dumps(list(tensors))}
    storable: dict[str, Tensor] = {}
    pointers: set[int] = set()
    try:
        for name, tensor in tensors.items():
            if tensor.layout != torch.strided:
                raise ValueError(f"tensor {name!r} is {tensor.layout}: save it dense")
            dense = tensor.detach().to("cpu").contiguous()
            pointer = dense.untyped_storage().data_ptr()
            # The format does not allow tensors that share memory, such as slices of one supernet tensor.
            storable[name] = dense.clone(memory_format=torch.contiguous_format) if pointer in pointers else dense
            pointers.add(pointer)
        return safetensors.torch.save(storable, metadata)
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
        raise ValueError(_damaged(origin, "it is not a whole safetensors file")) from error


def _read_tensors(path: Path, sha256: str) -> dict[str, Tensor]:
    """The tensors in a file; ValueError if it is missing or has another hash."""
    try:
        content = read_file(path, MOST_BYTES)
    except OSError as error:
        raise ValueError(_damaged(path, error.strerror or "it cannot be read")) from error
    if content_hash(content) != sha256:
        raise ValueError(_damaged(path, "its content does not have the recorded hash"))
    return from_bytes(content, path)


def _damaged(path: Path, reason: str) -> str:
    return f"{path} is damaged ({reason}): {ADVICE}"


# -- checkpoints -------------------------------------------------------------------------------------------------------

CHECKPOINT_VERSION = 2


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A loaded checkpoint."""

    groups: dict[str, TensorGroup]
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """The file of the checkpoint folder that holds a group of tensors."""

    file: str
    sha256: str
    version: int


Saved = Mapping[str, StoredGroup]
"""The files of a checkpoint by group of tensors, passed from one `save_checkpoint` to the next."""


def save_checkpoint(
    folder: Path, groups: Mapping[str, TensorGroup], data: Mapping[str, Any], previous: Saved | None = None
) -> dict[str, StoredGroup]:
    """Replaces the checkpoint in the folder atomically: a crash leaves either the old or the new one.

    `previous` is the return value of the last call for this folder: groups of an unchanged version are not written
    again (without it, all are). `data` is a JSON value; note that JSON turns tuples into lists and all keys into
    strings. Raises ValueError for data or tensors that cannot be stored, OSError for disk errors.
    """
    try:
        state = json.dumps(data)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the data of a checkpoint cannot be written as JSON: {error}") from error
    folder.mkdir(parents=True, exist_ok=True)
    saved: dict[str, StoredGroup] = {}
    for name, group in groups.items():
        before = (previous or {}).get(name)
        saved[name] = before if before is not None and before.version == group.version else _store(folder, name, group)
    head = {"checkpoint_version": CHECKPOINT_VERSION, "bags": {name: asdict(stored) for name, stored in saved.items()}}
    # The data is already encoded, so it is inserted as text instead of being encoded twice.
    write_atomically(folder / STATE_FILE, hashed_text(f'{json.dumps(head)[:-1]}, "data": {state}}}'))
    needed = {stored.file for stored in saved.values()}
    for path in folder.glob("*.safetensors"):
        if path.name not in needed:
            path.unlink(missing_ok=True)
    remove_temporaries(folder)
    return saved


def _store(folder: Path, name: str, group: TensorGroup) -> StoredGroup:
    check_name("tensor group", name)
    content = to_bytes(group.tensors)
    sha256 = content_hash(content)
    # The hash in the name prevents overwriting a file that the current state.json refers to.
    path = folder / f"{name}-v{group.version}-{sha256[:16]}.safetensors"
    write_atomically(path, content)
    return StoredGroup(path.name, sha256, group.version)


def load_checkpoint(folder: Path) -> Checkpoint:
    """Loads the checkpoint in the folder; one-line ValueError if there is none or a file is damaged."""
    path = as_stored(folder / STATE_FILE)
    stamp = stamp_of(path)
    try:
        content = read_file(path)
    except FileNotFoundError as error:
        raise ValueError(f"there is no checkpoint in {folder}: the run stopped before its first one") from error
    except OSError as error:
        raise ValueError(_damaged(path, error.strerror or "it cannot be read")) from error
    if content.startswith(b'{"checkpoint_version": 1,'):
        raise ValueError(f"{path} was written by an earlier version of fedloom: resume with that version")
    state = from_hashed_json(content, path)
    if state.get("checkpoint_version") != CHECKPOINT_VERSION:
        raise ValueError(f"{path} was written by a newer version of fedloom: resume with that version")
    try:
        references = {name: typed(StoredGroup, reference) for name, reference in state["bags"].items()}
        data = dict(state["data"].items())
        groups = {
            name: TensorGroup(_read_tensors(within(folder, stored.file), stored.sha256), stored.version)
            for name, stored in references.items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(_damaged(path, "it is not the state of a checkpoint")) from error
    except ValueError:
        if stamp_of(path) == stamp:
            raise
        return load_checkpoint(folder)  # a run at work has replaced it, and deleted the tensors of the earlier one
    return Checkpoint(groups, data)


def run_checkpoint(paths: RunPaths) -> Checkpoint:
    """Loads a run's checkpoint; one-line ValueError like `load_checkpoint`, and if it belongs to another run."""
    path = paths.checkpoint / STATE_FILE
    checkpoint = load_checkpoint(paths.checkpoint)
    kinds = {"stage": int, "round": int, "simulated_s": int | float, "data": dict, "position": dict, "config": dict}
    if missing := [name for name, kind in kinds.items() if not isinstance(checkpoint.data.get(name), kind)]:
        raise ValueError(_damaged(path, f"it has no {', '.join(missing)}"))
    run_id = checkpoint.data.get("run_id", paths.run_id)  # checkpoints of earlier versions have no run id
    if run_id != paths.run_id:
        raise ValueError(
            f"{path} is the checkpoint of run {run_id}: restore that of {paths.run_id} from a copy, or start a new run"
        )
    return checkpoint


def check_same_config(saved: Mapping[str, Any], asked: Mapping[str, Any], *, later: bool = False) -> None:
    """Raises ValueError with the dotted keys in which the configurations differ.

    `later` allows keys in `asked` that `saved` lacks because a later version added them: whoever restores a
    configuration sets them to the behaviour of before.
    """
    if changes := differences(saved, asked, later=later):
        raise ValueError(
            f"checkpoint of another configuration: {changes}; resume with the saved values or start a new run"
        )


def differences(saved: Mapping[str, Any], asked: Mapping[str, Any], most: int = 5, *, later: bool = False) -> str:
    """The dotted keys, at most `most`, in which two configurations differ, with both values; "" if in none.

    With `later`, keys that the saved configuration lacks do not count.
    """
    old, new = _flat(saved), _flat(asked)
    changes = [
        f"{key} {old.get(key, 'absent')} -> {new.get(key, 'absent')}"
        for key in [*old, *(key for key in new if key not in old and not later)]
        if old.get(key) != new.get(key)
    ]
    return ", ".join(changes[:most]) + (f" and {len(changes) - most} more" if len(changes) > most else "")


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted keys with their values as sorted JSON, so that tuples equal lists and NaN equals NaN."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = json.dumps(value, sort_keys=True)
    return flat


# -- models ------------------------------------------------------------------------------------------------------------


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
    replacing: Replacing = lambda _path, _digest: nullcontext(),
) -> ModelFile:
    """Stores a model under its name, replacing an earlier one.

    `card` is JSON data about the model (architecture, costs, scores); `replacing` lists its file in the run's manifest.
    A crash leaves either the old or the new model.
    """
    check_name("model", name)
    content = to_bytes(tensors)
    sha256 = content_hash(content)
    # With the hash in the file name, the old model's card never refers to the new model's tensors.
    model = ModelFile(name, f"models/{name}.{sha256[:16]}.safetensors", sha256, len(content))
    try:
        values = {"name": name, "file": model.file, "hash": sha256, "card": card}
        text = json.dumps(values, indent=1).encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"the card of model {name!r} cannot be written as JSON: {error}") from error
    paths.models.mkdir(parents=True, exist_ok=True)
    write_atomically(paths.artifacts / model.file, content)
    with replacing(paths.models / f"{name}.json", Digest.of(text)):
        write_atomically(paths.models / f"{name}.json", text)
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
    stamp = stamp_of(path)
    try:
        content = read_json(path)
        file, sha256, card = within(paths.artifacts, content["file"]), content["hash"], content["card"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(_damaged(path, "it is not the card of a model")) from error
    try:
        return _read_tensors(file, sha256), card
    except ValueError:
        if stamp_of(path) == stamp:
            raise
        return load_model(paths, name)  # a run at work has replaced it, and deleted the earlier tensors


def list_models(paths: RunPaths) -> list[str]:
    """The names of the run's stored models."""
    return sorted({without_number(path.name).removesuffix(".json") for path in paths.models.glob("*.json")})
