"""ResNet-18 and ResNet-34 for small images, as fixed networks (He et al. 2016)."""

from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.platform.spaces.fixed import FixedSpace
from fedloom.platform.spaces.resnet import MULTIPLE, norm_of
from fedloom.platform.spaces.space_config import Spaces, from_design

STAGES = ((1, 1), (2, 2), (4, 2), (8, 2))
"""Width (as a multiple of the stem's) and stride of the four stages."""


@dataclass(frozen=True)
class BlockPlan:
    """Channels and stride of one residual block."""

    in_channels: int
    out_channels: int
    stride: int

    @property
    def projects(self) -> bool:
        """Whether the shortcut changes the shape."""
        return self.stride != 1 or self.in_channels != self.out_channels


@dataclass(frozen=True)
class Resnet18Size:
    """The size of a ResNet-18 or ResNet-34 for small images: stages of 1, 2, 4 and 8 times `stem_channels`.

    `input_shape` is (C, H, W); `norm` is none, batch or group (groups of eight channels); `blocks` are those per stage.

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
        if not plan.projects:
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

SPACES: Spaces = {d.name: partial(from_design, FixedSpace, d) for d in (RESNET18, RESNET18_SMALL, RESNET34)}
