"""Converts tensors to NumPy arrays for transport between actors, because Ray shares arrays without copying."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedloom.platform.averaging.aggregators import KeptUpdates
from fedloom.platform.averaging.average import Coverage, TensorSum, Update, WeightedSums
from fedloom.platform.clients.assignments import ClientResult
from fedloom.platform.clients.execution import ChunkResult
from fedloom.platform.spaces.slices import Region, Weights

Arrays = Mapping[str, np.ndarray]
PackedSum = tuple[Region, np.ndarray, dict[Region, Coverage]]


def accept_shared_memory() -> None:
    """Silences torch's warning about read-only arrays: fedloom never writes to shared tensors."""
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


def to_arrays(tensors: Weights) -> dict[str, np.ndarray]:
    """Tensors as arrays, without a copy if they are in main memory; all copies from a GPU are waited for once."""
    moved = {name: tensor.detach().to("cpu", non_blocking=True) for name, tensor in tensors.items()}
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.synchronize()
    return {name: tensor.numpy() for name, tensor in moved.items()}


def to_tensors(arrays: Arrays) -> dict[str, Tensor]:
    """Arrays as tensors without a copy; the tensors must not be written to."""
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


@dataclass(frozen=True)
class PackedResult:
    """The result of a chunk in the form in which it is sent to the server."""

    sums: Mapping[str, PackedSum]
    updates: int
    whole_weight: float
    client_results: tuple[ClientResult, ...]
    kept: tuple[tuple[Update, Arrays], ...] | None = None
    """The updates without their tensors, and these, if single updates are kept."""


def pack(result: ChunkResult) -> PackedResult:
    """Converts the sums of a result, or its updates, to arrays."""
    if isinstance(result.sums, KeptUpdates):
        kept = tuple((replace(update, tensors={}), to_arrays(update.tensors)) for update in result.sums.kept)
        return PackedResult({}, 0, 0.0, tuple(result.client_results), kept)
    totals = to_arrays({name: s.total for name, s in result.sums.tensors.items()})
    sums = {name: (s.box, totals[name], s.coverage) for name, s in result.sums.tensors.items()}
    return PackedResult(sums, result.sums.updates, result.sums.whole_weight, tuple(result.client_results))


def unpack(packed: PackedResult) -> ChunkResult:
    """The inverse of `pack`; the sums must not be written to."""
    if packed.kept is not None:
        kept = [replace(update, tensors=to_tensors(arrays)) for update, arrays in packed.kept]
        return ChunkResult(KeptUpdates(kept), list(packed.client_results))
    sums = {n: TensorSum(box, torch.from_numpy(total), cover) for n, (box, total, cover) in packed.sums.items()}
    return ChunkResult(WeightedSums(sums, packed.updates, packed.whole_weight), list(packed.client_results))
