"""Spaces of one decision, the depth: a subnet keeps the first blocks of a network, each with an exit of its own.

The spaces of DepthFL (Kim et al. 2023, Sec. 3). A subnet classifies by the mean logits of its exits, as DepthFL's
ensemble does. An exit is a global average and a linear layer; those of the authors' ResNet convolve before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from fedloom.platform.spaces.base import SlicedSpace
from fedloom.platform.spaces.resnet import MULTIPLE, STAGES, BasicBlock, Resnet18Size, norm_of
from fedloom.platform.spaces.slices import Architecture
from fedloom.platform.spaces.space_config import spaces_of


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

    def num_exits(self, architecture: Architecture) -> int:
        """The number of blocks, each of which has an exit."""
        return architecture[0] + 1

    def label(self, architecture: Architecture) -> str:
        """Such as `blocks=2`."""
        return f"blocks={self.num_exits(architecture)}"

    def _network(self, architecture: Architecture) -> nn.Module:
        blocks = self.num_exits(architecture)
        return DepthNetwork(self.design.build_blocks()[:blocks], self.design.build_exits()[:blocks])


# -- networks ---------------------------------------------------------------------------------------------------------


class PooledExits(ABC):
    """Images whose exits are a global average and a linear layer."""

    num_classes: int
    input_dtype: ClassVar[torch.dtype] = torch.float32

    @property
    @abstractmethod
    def block_channels(self) -> tuple[int, ...]:
        """The channels that each block ends with."""

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

    The exits are linear layers on averaged channels; the authors' have attention and separable convolutions besides.
    """

    name: str = "resnet_depth"

    @property
    def block_channels(self) -> tuple[int, ...]:
        return tuple(multiple * self.stem_channels for multiple, _ in STAGES)

    def build_blocks(self) -> list[nn.Module]:
        plans = iter(self.block_plans)
        parts = [nn.Sequential(*(BasicBlock(self, plan) for plan in islice(plans, n))) for n in self.blocks]
        return [nn.Sequential(self.build_stem(), parts[0]), *parts[1:]]


SPACES = spaces_of(DepthSpace, CnnDepthDesign(), ResnetDepthDesign())
