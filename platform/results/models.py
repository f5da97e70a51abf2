"""Stored models of a run: a safetensors file and a JSON card with its description."""

import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedloom.platform.results.fence import Fence, newest, plain
from fedloom.platform.results.files import check_name, content_hash, read_json, within, write_atomically
from fedloom.platform.results.manifest import Replacing, seal_of_bytes
from fedloom.platform.results.paths import RunPaths
from fedloom.platform.results.tensor_files import damaged, from_bytes, read_checked, to_bytes


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
    fence: Fence | None = None,
) -> ModelFile:
    """Stores a model under its name, replacing an earlier one.

    `card` is JSON data about the model (architecture, costs, scores), which the run's manifest lists (`replacing`). A
    crash leaves either the old or the new model.
    """
    check_name("model", name)
    content = to_bytes(tensors)
    sha256 = content_hash(content)
    # With the hash in the file name, the old model's card never refers to the new model's tensors, nor does what a
    # replaced owner writes. It has no number, because it is in the tables, which do not depend on who wrote them.
    fence = fence or Fence()
    model = ModelFile(name, f"models/{name}.{sha256[:16]}.safetensors", sha256, len(content))
    text = _card_json(model, card)
    paths.models.mkdir(parents=True, exist_ok=True)
    write_atomically(paths.artifacts / model.file, content, check=fence.check)
    path, content = fence.named(paths.models / f"{name}.json"), text.encode()
    with replacing(path, seal_of_bytes(content)):
        fence.replace(path, content)
    for path in paths.models.glob(f"{name}.{'[0-9a-f]' * 16}.safetensors"):
        if path != paths.artifacts / model.file:
            fence.remove(path)
    fence.remove_temporaries(paths.models)
    return model


def load_model(paths: RunPaths, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the card of a model; ValueError listing the models if it is unknown, or naming a damaged file."""
    path = newest(paths.models / f"{name}.json")
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
    return sorted({plain(path.name).removesuffix(".json") for path in paths.models.glob("*.json")})


def _card_json(model: ModelFile, card: Mapping[str, Any]) -> str:
    content = {"name": model.name, "file": model.file, "hash": model.hash, "card": card}
    try:
        return json.dumps(content, indent=1)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the card of model {model.name!r} cannot be written as JSON: {error}") from error
