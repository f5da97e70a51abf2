"""Architectures, subspaces, named tensors, and the slices of a supernet that form a subnet."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise, product

import torch
from torch import Tensor, nn
from torch.func import functional_call

Architecture = tuple[int, ...]
"""One chosen option index per decision of the space."""

Subspace = tuple[tuple[int, ...], ...]
"""Per decision, the sorted indices of the options in a part of a supernet."""

Region = tuple[tuple[int, int], ...]
"""Per dimension, the half-open range [start, stop) of a supernet tensor; `()` for a scalar tensor."""

Weights = Mapping[str, Tensor]
"""Named tensors: parameters and buffers, as in a state dict."""


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Named tensors in a run's state, and their version: equal versions of a group have equal content."""

    tensors: Weights
    version: int


@dataclass(frozen=True, slots=True)
class Slice:
    """The location of one subnet tensor in the supernet.

    `source` names the supernet tensor; `region` is the index region, None for the whole tensor.
    """

    source: str
    region: Region | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """A view of the supernet tensor's region."""
        return tensor if self.region is None else part_of(tensor, self.region)

    def region_of(self, tensor: Tensor) -> Region:
        """The region of the supernet tensor: all of it if `region` is None."""
        return whole_region(tensor) if self.region is None else self.region


def whole_region(tensor: Tensor) -> Region:
    """The region of all of a tensor."""
    return tuple((0, n) for n in tensor.shape)


def part_of(tensor: Tensor, region: Region) -> Tensor:
    """A view of a region of a full tensor."""
    return tensor[tuple(slice(start, stop) for start, stop in region)]


def part_in(tensor: Tensor, box: Region, region: Region) -> Tensor:
    """A view of a region, from a tensor that holds only the region `box` of the full tensor."""
    if region == box:
        return tensor
    return tensor[tuple(slice(r[0] - b[0], r[1] - b[0]) for b, r in zip(box, region, strict=True))]


def inside(cell: Region, region: Region) -> bool:
    """Whether a region contains a whole cell."""
    return all(r[0] <= c[0] and c[1] <= r[1] for c, r in zip(cell, region, strict=True))


SliceMap = Mapping[str, Slice]
"""The slice of the supernet for each tensor of a subnet, by its name in the subnet."""


def cells(regions: Iterable[Region]) -> Iterator[Region]:
    """Cuts the regions' bounding box into cells that lie either wholly inside or wholly outside every region."""
    edges = [sorted({edge for interval in dimension for edge in interval}) for dimension in zip(*regions, strict=True)]
    yield from product(*(list(pairwise(dimension)) for dimension in edges))


def extract(weights: Weights, slices: SliceMap) -> dict[str, Tensor]:
    """The subnet's tensors as views of the supernet's, by the subnet's names."""
    return {name: piece.of(weights[piece.source]) for name, piece in slices.items()}


def leading(name: str, shape: tuple[int, ...], whole: tuple[int, ...]) -> Slice:
    """The slice of the leading entries in every dimension; the whole tensor if the shapes are equal."""
    if shape == whole:
        return Slice(name)
    return Slice(name, tuple((0, n) for n in shape))


FLOAT_BYTES = 4
"""Bytes per parameter: all are float32."""


def bytes_of(tensors: Weights) -> int:
    """The size of the tensors' values in bytes, as counted for communication."""
    return sum(t.numel() * t.element_size() for t in tensors.values())


def widened(tensor: Tensor) -> Tensor:
    """The floats in a type in which they can be added up: float32 instead of one of 16 bits, else as they are."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def difference(new: Tensor, old: Tensor) -> Tensor:
    """new - old, and 0 where both are the same infinite value, as in a mask for attention."""
    return torch.where(new == old, 0.0, new - old)


@torch.no_grad()
def first_not_finite(tensors: Weights, received: Callable[[str], Tensor | None] = lambda _: None) -> str | None:
    """The name of the first floating-point tensor with a NaN or infinite value, None if there is none.

    Infinite values that a tensor was `received` with, as a mask for attention is, do not count while they stay.
    """
    # One reduction per tensor and one device synchronisation in all: a sum is finite only if all of its entries are. A
    # sum of finite entries that overflows also means that training diverged.
    sums = {name: widened(tensor).sum() for name, tensor in tensors.items() if tensor.is_floating_point()}
    if not sums:
        return None
    totals = list(sums.values())
    if len({each.dtype for each in totals}) > 1:
        totals = [each.double() for each in totals]
    for name, total in zip(sums, torch.stack(totals).cpu().tolist(), strict=True):
        if not math.isfinite(total) and _differs_infinitely(tensors[name], received(name)):
            return name
    return None


def _differs_infinitely(tensor: Tensor, received: Tensor | None) -> bool:
    if received is not None:
        tensor = torch.where(tensor == received.to(tensor.device), 0.0, tensor)
    return not math.isfinite(widened(tensor).sum().item())


def architecture_id(architecture: Architecture) -> str:
    """The architecture's id in the result tables, such as 3-1-8-0."""
    return "-".join(str(choice) for choice in architecture)


def parse_architecture(text: str) -> Architecture:
    """The inverse of `architecture_id`."""
    return tuple(int(choice) for choice in text.split("-"))


def subspace_id(subspace: Subspace) -> str:
    """A subspace's id in the result tables: the options of each layer, such as 0,1,3,8/8/2,5."""
    return "/".join(",".join(str(option) for option in layer) for layer in subspace)


def parse_subspace(text: str) -> Subspace:
    """The inverse of `subspace_id`."""
    return tuple(tuple(int(option) for option in layer.split(",") if option) for layer in text.split("/"))


# -- a supernet that can run any of its subnets -----------------------------------------------------------------------

SKELETONS_KEPT = 8
"""Number of modules without tensors (on the meta device) that a supernet caches to run its subnets."""


class SlicedSupernet(nn.Module):
    """The largest network, which can run any of its subnets: `forward(x, architecture)`.

    The subnet's tensors are views of the supernet's, so that gradients and, in training, running statistics affect only
    its slices. The architecture is an argument, not state of the module.
    """

    def __init__(
        self,
        whole: nn.Module,
        slices: Callable[[Architecture], SliceMap],
        skeleton: Callable[[Architecture], nn.Module],
    ) -> None:
        """`whole` is the largest network; `slices` and `skeleton` (on the meta device) are those of a subnet."""
        super().__init__()
        # Its tensors have the network's names, without a prefix.
        for name, child in whole.named_children():
            self.add_module(name, child)
        for name, parameter in whole.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in whole.named_buffers(recurse=False):
            self.register_buffer(name, buffer, persistent=name in whole.state_dict())
        if hasattr(whole, "initialise_own"):
            self.initialise_own = whole.initialise_own
        self._constants = [name for name, tensor in self.named_parameters() if not tensor.requires_grad]
        self._slices, self._build = slices, skeleton
        self._skeletons: OrderedDict[Architecture, nn.Module] = OrderedDict()

    def _skeleton(self, architecture: Architecture) -> nn.Module:
        if architecture not in self._skeletons:
            self._skeletons[architecture] = self._build(architecture)
            if len(self._skeletons) > SKELETONS_KEPT:
                self._skeletons.popitem(last=False)
        self._skeletons.move_to_end(architecture)
        return self._skeletons[architecture].train(self.training)

    def forward(self, x: Tensor, architecture: Architecture) -> Tensor:
        """Logits of a batch on one subnet."""
        tensors: Mapping[str, Tensor] = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        views = {name: tensors[name] for name in self._constants} | extract(tensors, self._slices(architecture))
        y: Tensor = functional_call(self._skeleton(architecture), views, (x,))
        return y
