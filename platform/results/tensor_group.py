"""A tensor group: a set of named tensors in a run's state and checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Named tensors and a version number; equal versions of a tensor group have equal content."""

    tensors: Mapping[str, Tensor]
    version: int
