"""Spaces of one decision, the number of base nets: a wide network is split into narrow, independent ones.

The spaces of SplitMix (Hong et al. 2022, Sec. 3): base nets have the smallest width b of `space.widths`, and a subnet
of width p mixes p / b of them and classifies by their mean logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated

import torch
from torch import Tensor, nn

from fedloom.platform.settings import NOT_EMPTY
from fedloom.platform.spaces.base import SearchSpace, SlicedSpace, samples_of
from fedloom.platform.spaces.slices import Architecture
from fedloom.platform.spaces.space_config import SpaceConfig, Spaces, from_design, spaces_of
from fedloom.platform.spaces.width import (
    CnnWidthDesign,
    OwnWidthDesign,
    ResnetWidthDesign,
    WidthDesign,
    channels_kept,
    check_widths,
    narrowed,
    scaled_while_training,
)


class Mix(nn.Module):
    """Base nets side by side: `forward(x)` returns the mean of their logits (N, classes)."""

    def __init__(self, bases: Sequence[nn.Module]) -> None:
        super().__init__()
        self.bases = nn.ModuleList(bases)

    def forward(self, x: Tensor, of_bases: list[Tensor] | None = None) -> Tensor:
        """Appends every base net's logits to `of_bases` if it is given."""
        logits = [] if of_bases is None else of_bases
        logits += [base(x) for base in self.bases]
        return torch.stack(logits).mean(dim=0)


class SplitSpace(SlicedSpace):
    """One decision: the width, as a number of base nets."""

    def __init__(self, design: WidthDesign) -> None:
        check_widths(design.widths)
        base = design.widths[0]
        self.counts = tuple(round(width / base) for width in design.widths)
        uneven = [w for w, count in zip(design.widths, self.counts, strict=True) if abs(w - count * base) > 1e-6]
        if uneven:
            raise ValueError(
                f"space.widths={list(design.widths)}: {uneven[0]} is no multiple of the base nets' width of {base}"
            )
        self.design, self.name = design, design.name
        self.input_shape, self.input_dtype = tuple(design.input_shape), design.input_dtype
        self.options = (len(self.counts),)

    def num_bases(self, architecture: Architecture) -> int:
        """The number of base nets of a subnet."""
        return self.counts[architecture[0]]

    def label(self, architecture: Architecture) -> str:
        """Such as `nets=2`."""
        return f"nets={self.num_bases(architecture)}"

    def _network(self, architecture: Architecture) -> nn.Module:
        return Mix([self._base() for _ in range(self.num_bases(architecture))]).eval()  # as its base nets are

    def _base(self) -> nn.Module:
        share, sample = self.design.widths[0], samples_of(self, 2)
        module = narrowed(self.design.build, sample, partial(channels_kept, share))
        return scaled_while_training(module, sample, share) if self.design.scaler and share < 1 else module


def own_network(
    config: SpaceConfig,
    *,
    network: Annotated[str, NOT_EMPTY, "module:build, where build(input_shape, num_classes) gives the whole network"],
) -> SearchSpace:
    """The split space of a user's own network."""
    return from_design(SplitSpace, replace(OwnWidthDesign(), name="split", network=network), config)


SPACES: Spaces = {
    "split": own_network,
    **spaces_of(
        SplitSpace, replace(CnnWidthDesign(), name="cnn_split"), replace(ResnetWidthDesign(), name="resnet_split")
    ),
}
