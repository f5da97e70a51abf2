"""Named tensors as safetensors bytes, the format of checkpoints and models."""

import json
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from fedloom.platform.results.files import MOST_BYTES, content_hash, from_json, read_file

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
        raise ValueError(f"a bag of tensors of the types {kinds} cannot be saved as safetensors: {error}") from error


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
