"""The elastic residual networks of SuperFedNAS (once-for-all's ResNet for 32x32 images)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.platform.spaces.elastic import ElasticNetwork, ElasticSpace
from fedloom.platform.spaces.genome import ElasticGenome, ElasticStage
from fedloom.platform.spaces.initialisation import UniformConvolution
from fedloom.platform.spaces.space_config import Spaces, from_design

NORMS = ("none", "batch", "group")
INITIALISATIONS = ("torch", "he")
MULTIPLE = 8
"""Channels are multiples of 8, also the group size of group normalisation, so that groups do not depend on width."""


def in_eights(channels: float) -> int:
    """The multiple of 8 nearest to the number of channels that loses at most 10 % of them."""
    rounded = max(MULTIPLE, int(channels + MULTIPLE / 2) // MULTIPLE * MULTIPLE)
    return rounded + MULTIPLE if rounded < 0.9 * channels else rounded


def norm_of(kind: str) -> Callable[[int], nn.Module]:
    """A function from channels to a norm of this kind; ValueError for an unknown kind."""
    kinds: dict[str, Callable[[int], nn.Module]] = {
        "none": lambda _channels: nn.Identity(),
        "batch": nn.BatchNorm2d,
        "group": lambda channels: nn.GroupNorm(channels // MULTIPLE, channels),
    }
    if kind not in kinds:
        raise ValueError(f"space.norm={kind!r}: allowed are {', '.join(NORMS)}")
    return kinds[kind]


@dataclass(frozen=True)
class ResnetDesign:
    """An elastic residual network: depth and width per stage (SuperFedNAS).

    `depths` is the largest number of extra blocks per stage, which has 1 to 1 + that many blocks. `expansions` scale a
    block's inner channels; `width_multiplier` scales the stem and all stages. `norm` is none, batch or group.

    `initialisation` of the convolutions is torch (uniform +-1/sqrt(fan-in)) or he (normal, fan-out), by default torch
    without norms: they cannot undo He's scale, with which the largest subnet starts at a loss of 5 and a gradient norm
    of 200 instead of 2.30 and .3. `bias` adds biases to the convolutions.

    Source: SuperFed, Sec. 4.1; OFA's search space; the authors' code (identity norms, no biases, torch's defaults).
    """

    name: str = "resnet_elastic"
    input_shape: tuple[int, ...] = (3, 32, 32)
    num_classes: int = 10
    stem_channels: int = 64
    stage_widths: tuple[int, ...] = (256, 512, 1024, 2048)
    stage_strides: tuple[int, ...] = (1, 2, 2, 2)
    depths: tuple[int, ...] = (2, 2, 2, 2)
    expansions: tuple[float, ...] = (0.1, 0.14, 0.18, 0.22, 0.25)
    width_multiplier: float = 1.0
    norm: str = "none"
    initialisation: str | None = None
    bias: bool = False

    def __post_init__(self) -> None:
        norm_of(self.norm)
        if self.initialisation not in (None, *INITIALISATIONS):
            raise ValueError(f"space.initialisation={self.initialisation!r}: allowed are {', '.join(INITIALISATIONS)}")
        lengths = {len(self.stage_widths), len(self.stage_strides), len(self.depths)}
        if len(lengths) != 1:
            raise ValueError(
                f"space.stage_widths, stage_strides and depths have {len(self.stage_widths)}, "
                f"{len(self.stage_strides)} and {len(self.depths)} values: give one per stage to each"
            )
        if not self.stage_widths:
            raise ValueError("space.stage_widths is empty: give the channels of at least one stage")
        positive = (*self.stage_widths, *self.stage_strides, self.stem_channels, self.width_multiplier)
        if min(positive) <= 0 or min(self.depths) < 0:
            raise ValueError("space.stage_widths, stage_strides, stem_channels must be positive, depths 0 or more")
        if list(self.expansions) != sorted(set(self.expansions)) or not self.expansions or self.expansions[0] <= 0:
            raise ValueError(f"space.expansions={list(self.expansions)}: give positive values in ascending order")

    @property
    def input_dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def genome(self) -> ElasticGenome:
        """Depths and widths per stage."""
        return ElasticGenome(tuple(ElasticStage(1, 1 + depth, len(self.expansions)) for depth in self.depths))

    @property
    def keeps_statistics(self) -> bool:
        """True with batch normalisation."""
        return self.norm == "batch"

    @property
    def channels(self) -> tuple[int, ...]:
        """Channels of the stem and of each stage's output."""
        scaled = [c * self.width_multiplier for c in (self.stem_channels, *self.stage_widths)]
        return tuple(in_eights(c) for c in scaled)

    def mid_channels(self, stage: int, width: int) -> int:
        """Inner channels of a block."""
        return in_eights(round(self.channels[stage + 1] * self.expansions[width]))

    def distinct_widths(self, stage: int) -> int:
        """The number of distinct widths of a stage's blocks."""
        return len({self.mid_channels(stage, width) for width in range(len(self.expansions))})

    @property
    def layers(self) -> "Layers":
        """The kind of all convolutions and norms."""
        as_norm = "torch" if self.norm == "none" else "he"
        return Layers(self.norm, self.bias, self.initialisation or as_norm)

    def build_stem(self) -> nn.Module:
        """3x3 convolution, norm, ReLU."""
        channels = self.channels[0]
        return nn.Sequential(*self.layers.convolved(self.input_shape[0], channels, 3), nn.ReLU())

    def build_block(self, stage: int, block: int, width: int) -> nn.Module:
        """A residual block; the first of a stage changes resolution and channels."""
        out_channels = self.channels[stage + 1]
        first = block == 0
        return ResidualBlock(
            self.channels[stage] if first else out_channels,
            self.mid_channels(stage, width),
            out_channels,
            self.stage_strides[stage] if first else 1,
            self.layers,
            project=first,
        )

    def build_head(self) -> nn.Module:
        """Global average pooling and a linear layer."""
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(self.channels[-1], self.num_classes))

    def join(self, stem: nn.Module, stages: Sequence[nn.Module], head: nn.Module) -> nn.Module:
        """The parts in sequence."""
        return ElasticNetwork(stem, stages, head)


RESNET_SMALL = ResnetDesign(
    "resnet_elastic_small",
    stem_channels=16,
    stage_widths=(32, 64, 128, 256),
    stage_strides=(2, 2, 2, 2),
    expansions=(0.25, 0.5, 0.75, 1.0),
)
"""For CPUs: 49 787 136 subnets of 4.5 to 53 M MACs; narrow stages need larger expansions for distinct widths."""


@dataclass(frozen=True)
class Layers:
    """The norm after every convolution, and the convolutions' biases and initial weights."""

    norm: str
    bias: bool
    initialisation: str

    def convolved(self, in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> list[nn.Module]:
        """A convolution with "same" padding and its norm."""
        kind = UniformConvolution if self.initialisation == "torch" else nn.Conv2d
        padding = kernel // 2
        first = kind(in_channels, out_channels, kernel, stride, padding=padding, bias=self.bias)
        return [first, norm_of(self.norm)(out_channels)]


class ResidualBlock(nn.Module):
    """(N, in, H, W) -> (N, out, H/stride, W/stride): two 3x3 convolutions plus a shortcut.

    ReLU follows each norm and the sum. A projecting shortcut is average pooling and a 1x1 convolution.
    """

    def __init__(
        self, in_channels: int, mid_channels: int, out_channels: int, stride: int, layers: Layers, *, project: bool
    ) -> None:
        super().__init__()
        self.conv1, self.norm1 = layers.convolved(in_channels, mid_channels, 3, stride)
        self.conv2, self.norm2 = layers.convolved(mid_channels, out_channels, 3)
        self.shortcut = _projection(in_channels, out_channels, stride, layers) if project else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(y + self.shortcut(x))


def _projection(in_channels: int, out_channels: int, stride: int, layers: Layers) -> nn.Module:
    # With ceil_mode, odd sides (such as 7x7) give the same output size as the strided convolution.
    pool = nn.AvgPool2d(stride, stride, ceil_mode=True) if stride > 1 else nn.Identity()
    return nn.Sequential(pool, *layers.convolved(in_channels, out_channels, 1))


SPACES: Spaces = {design.name: partial(from_design, ElasticSpace, design) for design in (ResnetDesign(), RESNET_SMALL)}
