"""What a search space is: decisions, architectures, and the slices of the supernet that a subnet is made of."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.tiers.costs import CostTable

Architecture = tuple[int, ...]
"""One chosen option index per decision of the space."""

Region = tuple[tuple[int, int], ...]
"""Per dimension the half-open range [start, stop) of a supernet tensor; `()` for a scalar tensor."""

Weights = Mapping[str, Tensor]
"""A bag of named tensors: parameters and buffers, as in a state dict."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Where one tensor of a subnet lies in the supernet.

    `source` names the supernet tensor; `region` is the index region, None for the whole tensor.
    """

    source: str
    region: Region | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """A view of the supernet tensor's region."""
        if self.region is None:
            return tensor
        return tensor[tuple(slice(start, stop) for start, stop in self.region)]


SliceMap = Mapping[str, Slice]
"""For each tensor of the subnet (by its name there), its slice of the supernet."""


def extract(weights: Weights, slices: SliceMap) -> dict[str, Tensor]:
    """The subnet's tensors as views of the supernet's, by the subnet's names."""
    return {name: piece.of(weights[piece.source]) for name, piece in slices.items()}


def bytes_of(tensors: Weights) -> int:
    """Size of the tensors in bytes, as they would travel: values only."""
    return sum(t.numel() * t.element_size() for t in tensors.values())


class Supernet(Protocol):
    """A module whose forward pass takes the architecture as an argument."""

    def __call__(self, x: Tensor, architecture: Architecture) -> Tensor: ...


class SearchSpace(Protocol):
    """A family of architectures that share the tensors of one supernet."""

    name: str
    input_shape: tuple[int, ...]
    """Shape of one sample, without the batch."""
    options: tuple[int, ...]
    """Number of options per decision."""

    @property
    def num_architectures(self) -> int:
        """How many distinct architectures there are (exact)."""
        ...

    def validate(self, architecture: Architecture) -> None:
        """Raises ValueError naming the offending decision, if the architecture is outside the space."""
        ...

    def sample(self, rng: np.random.Generator) -> Architecture:
        """A uniformly drawn architecture."""
        ...

    def enumerate(self) -> Iterator[Architecture]:
        """All architectures in lexicographic order."""
        ...

    def build_supernet(self) -> nn.Module:
        """The supernet module: `forward(x, architecture)`; parameters are not initialised by a stated seed."""
        ...

    def build_subnet(self, architecture: Architecture) -> nn.Module:
        """A stand-alone module for one architecture: `forward(x)`."""
        ...

    def initial_weights(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Fresh supernet tensors (parameters and buffers) drawn from the generator."""
        ...

    def initial_subnet_weights(self, architecture: Architecture, generator: torch.Generator) -> dict[str, Tensor]:
        """Fresh tensors of one stand-alone subnet, by its own names, drawn from the generator."""
        ...

    def slices(self, architecture: Architecture) -> SliceMap:
        """Where each tensor of the stand-alone subnet lies in the supernet."""
        ...

    def cost_table(self, measure: str) -> CostTable:
        """Costs of the fixed part and of every option, in the unit of the measure (see fedloom.tiers.costs)."""
        ...
