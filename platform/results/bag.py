"""A bag of tensors: how weights lie in a run's state and in its checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Bag:
    """Named tensors and the number of their state: as long as the version is the same, so is the content."""

    tensors: Mapping[str, Tensor]
    version: int
