"""Architectures, bags of tensors, and the slices of a supernet that a subnet is made of."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

Architecture = tuple[int, ...]
"""One chosen option index per decision of the space."""

Subspace = tuple[tuple[int, ...], ...]
"""The options held per decision: sorted option indices."""

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


def leading(name: str, shape: tuple[int, ...], whole: tuple[int, ...]) -> Slice:
    """The slice of the first entries in every dimension; the whole tensor where the shapes agree."""
    if shape == whole:
        return Slice(name)
    return Slice(name, tuple((0, n) for n in shape))


def bytes_of(tensors: Weights) -> int:
    """Size of the tensors in bytes, as they would travel: values only."""
    return sum(t.numel() * t.element_size() for t in tensors.values())


def architecture_id(architecture: Architecture) -> str:
    """The architecture as it stands in the result tables, such as 3-1-8-0."""
    return "-".join(str(choice) for choice in architecture)


def parse_architecture(text: str) -> Architecture:
    """The inverse of `architecture_id`."""
    return tuple(int(choice) for choice in text.split("-"))


def subspace_id(kept: Subspace) -> str:
    """A subspace as it stands in the result tables: the kept options of each layer, such as 0,1,3,8/8/2,5."""
    return "/".join(",".join(str(option) for option in layer) for layer in kept)


def parse_subspace(text: str) -> Subspace:
    """The inverse of `subspace_id`."""
    return tuple(tuple(int(option) for option in layer.split(",") if option) for layer in text.split("/"))
