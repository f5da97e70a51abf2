"""Spaces of one decision, the depth: a subnet keeps the first blocks of a network, each with an exit of its own.

The spaces of DepthFL (Kim et al. 2023, Sec. 3), whose subnets classify by the mean logits of their exits, and of
ScaleFL (Ilhan et al. 2023), whose subnets of fewer blocks are also narrower and classify by their last exit. An exit is
a global average and a linear layer; exits of the authors' ResNets begin with convolutions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from fedloom.platform.spaces.base import SlicedSpace, supernet_shapes
from fedloom.platform.spaces.resnet import MULTIPLE, STAGES, BasicBlock, Resnet18Size, in_eights, norm_of
from fedloom.platform.spaces.slices import Architecture
from fedloom.platform.spaces.space_config import spaces_of
from fedloom.platform.spaces.width import channels_kept


class DepthNetwork(nn.Module):
    """Blocks in sequence, an exit after each: `forward(x)` returns the mean of the exits' logits (N, classes)."""

    def __init__(self, blocks: Sequence[nn.Module], exits: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks, self.exits = nn.ModuleList(blocks), nn.ModuleList(exits)

    def forward(self, x: Tensor, of_exits: list[Tensor] | None = None) -> Tensor:
        """Appends every exit's logits, the shallowest first, to `of_exits` if it is given."""
        logits = [] if of_exits is None else of_exits
        for block, leave in zip(self.blocks, self.exits, strict=True):
            x = block(x)
            logits.append(leave(x))
        return torch.stack(logits).mean(dim=0)


class DepthDesign(Protocol):
    """The parts of a network with exits."""

    @property
    def name(self) -> str: ...

    @property
    def input_shape(self) -> tuple[int, ...]: ...

    @property
    def input_dtype(self) -> torch.dtype: ...

    @property
    def num_exits(self) -> int:
        """The number of blocks, each of which has an exit."""
        ...

    def build_blocks(self) -> list[nn.Module]:
        """All blocks in order; the first one takes the inputs."""
        ...

    def build_exits(self) -> list[nn.Module]:
        """Each block's exit, from the block's output to logits."""
        ...


class DepthSpace(SlicedSpace):
    """One decision: the number of blocks."""

    def __init__(self, design: DepthDesign) -> None:
        self.design, self.name = design, design.name
        self.input_shape, self.input_dtype = tuple(design.input_shape), design.input_dtype
        self.options = (design.num_exits,)

    @property
    def keeps_statistics(self) -> bool:
        """False: a block's inputs are the same at every depth."""
        return False

    def num_exits(self, architecture: Architecture) -> int:
        """The number of blocks, each of which has an exit."""
        return architecture[0] + 1

    def label(self, architecture: Architecture) -> str:
        """Such as `blocks=2`."""
        return f"blocks={self.num_exits(architecture)}"

    def _network(self, architecture: Architecture) -> nn.Module:
        blocks = self.num_exits(architecture)
        return DepthNetwork(self.design.build_blocks()[:blocks], self.design.build_exits()[:blocks])


# -- spaces of depth and width ----------------------------------------------------------------------------------------


class ScaledDesign(DepthDesign, Protocol):
    """A network with exits that can be made narrower."""

    @property
    def widths(self) -> tuple[float, ...]:
        """The share of the channels that subnets keep, for each number of blocks, ascending."""
        ...

    def narrower(self, share: float) -> ScaledDesign:
        """The same design with this share of all channels."""
        ...


class ScaledNetwork(DepthNetwork):
    """Blocks in sequence, an exit after each: `forward(x)` returns the last exit's logits (N, classes)."""

    def forward(self, x: Tensor, of_exits: list[Tensor] | None = None) -> Tensor:
        """Appends every exit's logits, the shallowest first, to `of_exits` if it is given."""
        logits: list[Tensor] = [] if of_exits is None else of_exits
        super().forward(x, logits)
        return logits[-1]


class ScaledSpace(DepthSpace):
    """One decision: the number of blocks, with which their width grows (ScaleFL)."""

    design: ScaledDesign

    def __init__(self, design: ScaledDesign) -> None:
        widths, exits = design.widths, design.num_exits
        if len(widths) != exits or list(widths) != sorted(widths) or widths[0] <= 0 or widths[-1] != 1.0:
            raise ValueError(
                f"space.widths={list(widths)}: give {design.name} a share of the channels for each of its {exits} "
                "depths, above 0, none smaller than the one before, the last one 1.0"
            )
        super().__init__(design)

    @cached_property
    def keeps_statistics(self) -> bool:
        """Whether it has batch norms, whose statistics differ between widths."""
        return any(name.endswith("running_mean") for name in supernet_shapes(self))

    def label(self, architecture: Architecture) -> str:
        """Such as `blocks=2 p=0.5`."""
        return f"{super().label(architecture)} p={self.design.widths[architecture[0]]:g}"

    def _network(self, architecture: Architecture) -> nn.Module:
        blocks = self.num_exits(architecture)
        narrow = self.design.narrower(self.design.widths[architecture[0]])
        return ScaledNetwork(narrow.build_blocks()[:blocks], narrow.build_exits()[:blocks])


# -- networks ---------------------------------------------------------------------------------------------------------


class PooledExits(ABC):
    """Networks for images whose exits are a global average and a linear layer."""

    num_classes: int
    input_dtype: ClassVar[torch.dtype] = torch.float32

    @property
    @abstractmethod
    def block_channels(self) -> tuple[int, ...]:
        """Output channels of each block."""

    @property
    def num_exits(self) -> int:
        return len(self.block_channels)

    def build_exits(self) -> list[nn.Module]:
        channels, classes = self.block_channels, self.num_classes
        return [nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, classes)) for c in channels]


@dataclass(frozen=True)
class CnnDepthDesign(PooledExits):
    """A plain convolutional network with exits: blocks of 3x3 convolutions, each with norm and ReLU.

    `stage_widths`, `stage_layers` and `stage_strides` are each block's channels, convolutions, and the first
    convolution's stride; `norm` is none, batch or group (groups of eight channels).
    """

    name: str = "cnn_depth"
    input_shape: tuple[int, int, int] = (3, 32, 32)
    num_classes: int = 10
    stage_widths: tuple[int, ...] = (64, 128, 256, 512)
    stage_layers: tuple[int, ...] = (2, 2, 2, 2)
    stage_strides: tuple[int, ...] = (1, 2, 2, 2)
    norm: str = "batch"

    def __post_init__(self) -> None:
        norm_of(self.norm)
        if len(self.input_shape) != 3:
            raise ValueError(f"space {self.name} takes images (C, H, W), given {list(self.input_shape)}")
        if not self.stage_widths:
            raise ValueError("space.stage_widths=[]: give the channels of at least one block")
        for name in ("stage_layers", "stage_strides"):
            values = getattr(self, name)
            if len(values) != len(self.stage_widths):
                raise ValueError(
                    f"space.{name}={list(values)}: give one number for each of the {len(self.stage_widths)} blocks of "
                    f"space.stage_widths={list(self.stage_widths)}"
                )
        if self.norm == "group" and any(width % MULTIPLE for width in self.stage_widths):
            raise ValueError(
                f"space.stage_widths={list(self.stage_widths)}: with norm=group, give multiples of {MULTIPLE}"
            )

    @property
    def block_channels(self) -> tuple[int, ...]:
        return self.stage_widths

    def build_blocks(self) -> list[nn.Module]:
        """All blocks: (N, C, H, W) -> (N, C', H', W')."""
        blocks: list[nn.Module] = []
        channels = self.input_shape[0]
        for width, convolutions, stride in zip(self.stage_widths, self.stage_layers, self.stage_strides, strict=True):
            layers: list[nn.Module] = []
            for i in range(convolutions):
                layers += [nn.Conv2d(channels, width, 3, 1 if i else stride, 1), norm_of(self.norm)(width), nn.ReLU()]
                channels = width
            blocks.append(nn.Sequential(*layers))
        return blocks


@dataclass(frozen=True)
class ResnetDepthDesign(PooledExits, Resnet18Size):
    """ResNet-18 for small images with an exit after each of its four stages, as in DepthFL, Sec. 4.

    The exits are linear layers on averaged channels; the authors' also have attention and separable convolutions.
    """

    name: str = "resnet_depth"

    @property
    def block_channels(self) -> tuple[int, ...]:
        return tuple(multiple * self.stem_channels for multiple, _ in STAGES)

    def build_blocks(self) -> list[nn.Module]:
        plans = iter(self.block_plans)
        parts = [nn.Sequential(*(BasicBlock(self, plan) for plan in islice(plans, n))) for n in self.blocks]
        return [nn.Sequential(self.build_stem(), parts[0]), *parts[1:]]


SCALED_WIDTHS = (0.7, 0.7, 0.75, 1.0)
"""The shares of the ScaleFL authors' ResNet-110 with four exits."""


def _kept(norm: str, share: float, channels: int) -> int:
    """The number of channels that a share keeps; with group norms, in whole groups."""
    return in_eights(share * channels) if norm == "group" else channels_kept(share, channels)


@dataclass(frozen=True)
class CnnScaledDesign(CnnDepthDesign):
    """The network of `CnnDepthDesign`; subnets of i blocks have the share `widths[i - 1]` of all channels."""

    name: str = "cnn_scaled"
    widths: tuple[float, ...] = SCALED_WIDTHS

    def narrower(self, share: float) -> CnnScaledDesign:
        return replace(self, stage_widths=tuple(_kept(self.norm, share, width) for width in self.stage_widths))


@dataclass(frozen=True)
class ResnetScaledDesign(ResnetDepthDesign):
    """ResNet-18; subnets of i stages have the share `widths[i - 1]` of all channels."""

    name: str = "resnet_scaled"
    widths: tuple[float, ...] = SCALED_WIDTHS

    def narrower(self, share: float) -> ResnetScaledDesign:
        return replace(self, stem_channels=_kept(self.norm, share, self.stem_channels))


SPACES = {
    **spaces_of(DepthSpace, CnnDepthDesign(), ResnetDepthDesign()),
    **spaces_of(ScaledSpace, CnnScaledDesign(), ResnetScaledDesign()),
}
