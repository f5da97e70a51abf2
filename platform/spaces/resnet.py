"""Residual networks: the elastic ones of SuperFedNAS (once-for-all's ResNet for 32x32 images), and fixed ones."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.platform.spaces.base import FixedSpace
from fedloom.platform.spaces.elastic import ElasticNetwork, ElasticSpace
from fedloom.platform.spaces.genome import ElasticGenome, elastic_stage
from fedloom.platform.spaces.initialisation import UniformConvolution
from fedloom.platform.spaces.space_config import spaces_of

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

    `initialisation` of the convolutions is torch (uniform +-1/sqrt(fan-in)) or he (normal, fan-out). The default is he
    with norms and torch without: no norm then undoes He's scale, with which the largest subnet starts at a loss of 5
    and a gradient norm of 200 instead of 2.30 and .3. `bias` adds biases to the convolutions. If `coupled`, the depth
    of a stage decides the width of its blocks (CompOFA).

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
    coupled: bool = False
    input_dtype: ClassVar[torch.dtype] = torch.float32

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
    def genome(self) -> ElasticGenome:
        """Depths and widths per stage."""
        widths = len(self.expansions)
        return ElasticGenome(tuple(elastic_stage(1, 1 + n, widths, coupled=self.coupled) for n in self.depths))

    @property
    def keeps_statistics(self) -> bool:
        """True with batch normalisation."""
        return self.norm == "batch"

    @property
    def channels(self) -> tuple[int, ...]:
        """Channels of the stem and of each stage's output."""
        scaled = [c * self.width_multiplier for c in (self.stem_channels, *self.stage_widths)]
        return tuple(in_eights(c) for c in scaled)

    @property
    def widths(self) -> Mapping[str, tuple[float, ...]]:
        """The expansion of each width index."""
        return {"expansions": self.expansions}

    def mid_channels(self, stage: int, width: int) -> int:
        """Inner channels of a block."""
        return in_eights(round(self.channels[stage + 1] * self.expansions[width]))

    def distinct_widths(self, stage: int) -> int:
        """The number of distinct widths of a stage's blocks."""
        return len({self.mid_channels(stage, width) for width in range(len(self.expansions))})

    @property
    def layers(self) -> "Layers":
        """The settings of all convolutions and norms."""
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


# -- ResNet-18 and ResNet-34 for small images, as fixed networks (He et al. 2016) -------------------------------------

STAGES = ((1, 1), (2, 2), (4, 2), (8, 2))
"""Width (as a multiple of the stem's) and stride of the four stages."""


@dataclass(frozen=True)
class BlockPlan:
    """Channels and stride of one residual block."""

    in_channels: int
    out_channels: int
    stride: int


@dataclass(frozen=True)
class Resnet18Size:
    """The size of a ResNet-18 or ResNet-34 for small images: stages of 1, 2, 4 and 8 times `stem_channels`.

    `input_shape` is (C, H, W); `norm` is none, batch or group (groups of eight channels); `blocks` is the number of
    blocks per stage.

    Raises:
        ValueError: a size that cannot be built.
    """

    name: str
    input_shape: tuple[int, int, int] = (3, 32, 32)
    num_classes: int = 10
    stem_channels: int = 64
    norm: str = "batch"
    stem_stride: int = 1
    blocks: tuple[int, ...] = (2, 2, 2, 2)

    def __post_init__(self) -> None:
        norm_of(self.norm)
        for field in ("num_classes", "stem_channels", "stem_stride"):
            if getattr(self, field) < 1:
                raise ValueError(f"space {self.name}: {field} must be at least 1, given {getattr(self, field)}")
        if len(self.input_shape) != 3 or min(self.input_shape) < 1:
            raise ValueError(f"space {self.name} takes images (C, H, W), given {tuple(self.input_shape)}")
        if len(self.blocks) != len(STAGES):
            raise ValueError(
                f"space {self.name}: blocks={list(self.blocks)}: give a number for each of {len(STAGES)} stages"
            )
        if self.norm == "group" and self.stem_channels % MULTIPLE:
            raise ValueError(
                f"space {self.name}: with norm=group, stem_channels must be a multiple of {MULTIPLE}, "
                f"given {self.stem_channels}"
            )

    @property
    def block_plans(self) -> tuple[BlockPlan, ...]:
        """All blocks in order; the first of a stage changes the shape."""
        plans: list[BlockPlan] = []
        channels = self.stem_channels
        for (multiple, stride), blocks in zip(STAGES, self.blocks, strict=True):
            width = multiple * self.stem_channels
            plans += [BlockPlan(channels, width, stride), *[BlockPlan(width, width, 1)] * (blocks - 1)]
            channels = width
        return tuple(plans)

    def build_stem(self) -> nn.Module:
        """3x3 convolution, norm, ReLU."""
        convolved = _conv_norm(self.input_shape[0], self.stem_channels, 3, self.stem_stride, self.norm)
        return nn.Sequential(*convolved, nn.ReLU())

    def build_branch(self, plan: BlockPlan) -> nn.Module:
        """The residual branch of a block: convolution, norm, ReLU, convolution, norm."""
        first = _conv_norm(plan.in_channels, plan.out_channels, 3, plan.stride, self.norm)
        return nn.Sequential(*first, nn.ReLU(), *_conv_norm(plan.out_channels, plan.out_channels, 3, 1, self.norm))

    def build_shortcut(self, plan: BlockPlan) -> nn.Module:
        """An identity, or a 1x1 convolution and norm if the shape changes."""
        if plan.stride == 1 and plan.in_channels == plan.out_channels:
            return nn.Identity()
        return nn.Sequential(*_conv_norm(plan.in_channels, plan.out_channels, 1, plan.stride, self.norm))

    def build_head(self) -> nn.Linear:
        """The classifier of the pooled features."""
        return nn.Linear(self.block_plans[-1].out_channels, self.num_classes)


def _conv_norm(in_channels: int, out_channels: int, kernel: int, stride: int, norm: str) -> list[nn.Module]:
    bias, padding = norm == "none", kernel // 2
    convolution = nn.Conv2d(in_channels, out_channels, kernel, stride, padding, bias=bias)
    return [convolution, norm_of(norm)(out_channels)]


@dataclass(frozen=True)
class Resnet18Design(Resnet18Size):
    """A network for small images: a 3x3 stem instead of a strided 7x7 one and pooling (He et al. 2016, Sec. 4.2).

    As in SPIDER's baselines; He et al.'s own networks for 32x32 images are narrower and have three stages.
    """

    def build(self) -> nn.Module:
        """The network, a `Resnet18`."""
        return Resnet18(self)


class BasicBlock(nn.Module):
    """(N, in, H, W) -> (N, out, H/stride, W/stride): ReLU of the branch plus the shortcut."""

    def __init__(self, size: Resnet18Size, plan: BlockPlan) -> None:
        super().__init__()
        self.shortcut, self.branch = size.build_shortcut(plan), size.build_branch(plan)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.branch(x) + self.shortcut(x))


class Resnet18(nn.Module):
    """Stem, residual blocks, global average, classifier: `forward(x_NCHW)` returns logits (N, classes)."""

    def __init__(self, size: Resnet18Size) -> None:
        super().__init__()
        self.stem = size.build_stem()
        self.blocks = nn.Sequential(*(BasicBlock(size, plan) for plan in size.block_plans))
        self.head = size.build_head()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.blocks(self.stem(x)).mean(dim=(2, 3)))
        return y


RESNET18 = Resnet18Design("resnet18")
RESNET18_SMALL = Resnet18Design("resnet18_small", stem_channels=16)
RESNET34 = Resnet18Design("resnet34", blocks=(3, 4, 6, 3))

SPACES = {
    **spaces_of(ElasticSpace, ResnetDesign(), RESNET_SMALL),
    **spaces_of(FixedSpace, RESNET18, RESNET18_SMALL, RESNET34),
}
