"""Spaces of exactly one architecture: networks that are trained as they are, beside those that are searched."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.platform.spaces.base import Architecture, Slice, SliceMap
from fedloom.platform.spaces.darts import DARTS
from fedloom.platform.spaces.darts_network import DartsDesign, DartsNetwork
from fedloom.platform.spaces.initialisation import blank, initialise, on_meta
from fedloom.platform.spaces.measuring import cost_of, measure_of
from fedloom.platform.spaces.named_operators import SpaceSizes, Subspace
from fedloom.platform.spaces.resnet import MULTIPLE, convolution, norm_of
from fedloom.tiers.costs import CostTable
from fedloom.tiers.measure import MEASURES

ONLY: Architecture = (0,)
"""The one architecture: a single decision with a single option."""


class FixedDesign(Protocol):
    """What a network is called, what it takes, and how it is built."""

    @property
    def name(self) -> str: ...

    @property
    def input_shape(self) -> tuple[int, int, int]: ...

    def build(self) -> nn.Module:
        """The network, `forward(x, architecture=None)`: the architecture is not looked at."""
        ...


class FixedSpace:
    """A network as a space of one architecture, `(0,)`; see `fedloom.platform.spaces.base.SearchSpace`."""

    def __init__(self, design: FixedDesign) -> None:
        self.design = design
        self.name = design.name
        self.input_shape: tuple[int, ...] = tuple(design.input_shape)
        self.input_dtype = torch.float32
        self.options: tuple[int, ...] = (1,)
        self._tables: dict[str, CostTable] = {}

    @property
    def num_architectures(self) -> int:
        """One."""
        return 1

    def validate(self, architecture: Architecture) -> None:
        """Raises ValueError for anything but the one architecture."""
        if tuple(architecture) != ONLY:
            raise ValueError(f"{self.name} has one architecture, {ONLY}, given {architecture}")

    def sample(self, rng: np.random.Generator) -> Architecture:  # noqa: ARG002  # nothing to draw
        """The one architecture."""
        return ONLY

    def enumerate(self) -> Iterator[Architecture]:
        """The one architecture."""
        return iter((ONLY,))

    def build_supernet(self) -> nn.Module:
        """The network, `forward(x, architecture=None)`; floating tensors are NaN until weights are loaded."""
        return blank(self.design.build)

    def build_subnet(self, architecture: Architecture) -> nn.Module:
        """The same network, `forward(x)`; floating tensors are NaN until weights are loaded."""
        self.validate(architecture)
        return blank(self.design.build)

    @cached_property
    def _meta_network(self) -> nn.Module:
        return on_meta(self.design.build).eval()

    def initial_weights(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Fresh tensors drawn from the generator alone."""
        return initialise(self._meta_network, generator)

    def initial_subnet_weights(self, architecture: Architecture, generator: torch.Generator) -> dict[str, Tensor]:
        """As `initial_weights`."""
        self.validate(architecture)
        return self.initial_weights(generator)

    @cached_property
    def _slices(self) -> SliceMap:
        return {name: Slice(name) for name in self._meta_network.state_dict()}

    def slices(self, architecture: Architecture) -> SliceMap:
        """Every tensor whole, under its own name."""
        self.validate(architecture)
        return dict(self._slices)

    @property
    def num_parameters(self) -> SpaceSizes:
        """Trainable parameters; all of them are fixed."""
        count = int(self.cost_table("parameters").fixed)
        return SpaceSizes(count, count, count, count)

    def cost_table(self, measure: str) -> CostTable:
        """The network's cost for one sample as the fixed part's; the one option adds nothing. Computed once.

        `measure` is one of `fedloom.tiers.measure.MEASURES`, or bytes (all tensors, buffers included: what travels).
        Latency is measured here and now on one CPU sample.

        Raises:
            ValueError: an unknown measure.
        """
        if measure not in self._tables:
            of, device = measure_of(measure)
            cost = cost_of(self.design.build, (1, *self.input_shape), of, device)
            self._tables[measure] = CostTable(measure, cost, ((0.0,),), MEASURES.get(measure, "sum"))
        return self._tables[measure]


# -- ResNet-18 --------------------------------------------------------------------------------------------------------

STAGES = ((1, 1), (2, 2), (4, 2), (8, 2))
"""Width as a multiple of the stem's, and stride, of the four stages of two blocks."""


@dataclass(frozen=True)
class BlockPlan:
    """Channels and stride of one residual block."""

    in_channels: int
    out_channels: int
    stride: int

    @property
    def projects(self) -> bool:
        """Whether the shortcut has to change the shape."""
        return self.stride != 1 or self.in_channels != self.out_channels


@dataclass(frozen=True)
class Resnet18Size:
    """The size of a ResNet-18 for small images: stages of 1, 2, 4 and 8 times `stem_channels`.

    `input_shape` is (C, H, W); `norm` is none, batch or group (groups of eight channels).

    Raises:
        ValueError: a size that cannot be built.
    """

    name: str
    input_shape: tuple[int, int, int] = (3, 32, 32)
    num_classes: int = 10
    stem_channels: int = 64
    norm: str = "batch"

    def __post_init__(self) -> None:
        norm_of(self.norm)
        for field in ("num_classes", "stem_channels"):
            if getattr(self, field) < 1:
                raise ValueError(f"space {self.name}: {field} must be at least 1, given {getattr(self, field)}")
        if len(self.input_shape) != 3 or min(self.input_shape) < 1:
            raise ValueError(f"space {self.name} takes images (C, H, W), given {tuple(self.input_shape)}")
        if self.norm == "group" and self.stem_channels % MULTIPLE:
            raise ValueError(
                f"space {self.name}: with norm=group, stem_channels must be a multiple of {MULTIPLE}, "
                f"given {self.stem_channels}"
            )

    @property
    def blocks(self) -> tuple[BlockPlan, ...]:
        """The eight blocks in order; the first of a stage changes the shape."""
        plans: list[BlockPlan] = []
        channels = self.stem_channels
        for multiple, stride in STAGES:
            width = multiple * self.stem_channels
            plans += [BlockPlan(channels, width, stride), BlockPlan(width, width, 1)]
            channels = width
        return tuple(plans)

    def build_stem(self) -> nn.Module:
        """3x3 convolution, norm, ReLU."""
        return nn.Sequential(*_conv_norm(self.input_shape[0], self.stem_channels, 3, 1, self.norm), nn.ReLU())

    def build_branch(self, plan: BlockPlan) -> nn.Module:
        """Convolution, norm, ReLU, convolution, norm: what a block adds to its shortcut."""
        first = _conv_norm(plan.in_channels, plan.out_channels, 3, plan.stride, self.norm)
        return nn.Sequential(*first, nn.ReLU(), *_conv_norm(plan.out_channels, plan.out_channels, 3, 1, self.norm))

    def build_shortcut(self, plan: BlockPlan) -> nn.Module:
        """An identity, or a 1x1 convolution and norm where the shape changes."""
        if not plan.projects:
            return nn.Identity()
        return nn.Sequential(*_conv_norm(plan.in_channels, plan.out_channels, 1, plan.stride, self.norm))

    def build_head(self) -> nn.Linear:
        """The classifier of the pooled features."""
        return nn.Linear(self.blocks[-1].out_channels, self.num_classes)


def _conv_norm(in_channels: int, out_channels: int, kernel: int, stride: int, norm: str) -> list[nn.Module]:
    return [convolution(in_channels, out_channels, kernel, stride, bias=norm == "none"), norm_of(norm)(out_channels)]


@dataclass(frozen=True)
class Resnet18Design(Resnet18Size):
    """ResNet-18 for small images: a 3x3 stem instead of a strided 7x7 one and pooling (He et al. 2016, Sec. 4.2).

    As in SPIDER's baselines; He et al.'s own networks for 32x32 images are narrower and have three stages.
    """

    def build(self) -> nn.Module:
        """The network, see `Resnet18`."""
        return Resnet18(self)


class BasicBlock(nn.Module):
    """(N, in, H, W) -> (N, out, H/stride, W/stride): ReLU of the branch plus the shortcut."""

    def __init__(self, size: Resnet18Size, plan: BlockPlan) -> None:
        super().__init__()
        self.shortcut, self.branch = size.build_shortcut(plan), size.build_branch(plan)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.branch(x) + self.shortcut(x))


class Resnet18(nn.Module):
    """Stem, eight blocks, global average, classifier: `forward(x_NCHW)` gives logits (N, classes)."""

    def __init__(self, size: Resnet18Size) -> None:
        super().__init__()
        self.stem = size.build_stem()
        self.blocks = nn.Sequential(*(BasicBlock(size, plan) for plan in size.blocks))
        self.head = size.build_head()

    def forward(self, x: Tensor, architecture: Architecture | None = None) -> Tensor:  # noqa: ARG002  # there is one
        y: Tensor = self.head(self.blocks(self.stem(x)).mean(dim=(2, 3)))
        return y


RESNET18 = Resnet18Design("resnet18")
RESNET18_SMALL = Resnet18Design("resnet18_small", stem_channels=16)

# -- a network of given cells -----------------------------------------------------------------------------------------

Genotype = tuple[tuple[str, int], ...]
"""A cell as it is published: (operator, source), two per node, the first node's first."""

DARTS_V2_CELLS: tuple[Genotype, Genotype] = (
    (
        ("sep_conv_3x3", 0), ("sep_conv_3x3", 1), ("sep_conv_3x3", 0), ("sep_conv_3x3", 1),
        ("sep_conv_3x3", 1), ("skip_connect", 0), ("skip_connect", 0), ("dil_conv_3x3", 2),
    ),
    (
        ("max_pool_3x3", 0), ("max_pool_3x3", 1), ("skip_connect", 2), ("max_pool_3x3", 1),
        ("max_pool_3x3", 0), ("skip_connect", 2), ("skip_connect", 2), ("max_pool_3x3", 1),
    ),
)  # fmt: skip
"""Normal and reduction cell that second-order DARTS found on CIFAR-10 (Liu et al. 2019, Fig. 4 and 5)."""


@dataclass(frozen=True)
class DartsV2Design:
    """The network of the cells `DARTS_V2_CELLS`, see `DartsDesign` for the sizes.

    Pooling is followed by a norm, as in the search network; Liu et al. evaluate without.

    Raises:
        ValueError: a size that cannot be built.
    """

    name: str = "darts_v2"
    input_shape: tuple[int, int, int] = (3, 32, 32)
    num_classes: int = 10
    cells: int = 20
    channels: int = 36

    def __post_init__(self) -> None:
        _ = self.darts

    @property
    def darts(self) -> DartsDesign:
        """The space that the network is a subspace of."""
        return DartsDesign(
            self.name, self.input_shape, self.num_classes, self.cells, self.channels, operators=DARTS, affine=True
        )

    def build(self) -> nn.Module:
        """The network, see `FixedDarts`."""
        return FixedDarts(self.darts, kept_by(self.darts, DARTS_V2_CELLS))


def kept_by(design: DartsDesign, cells: tuple[Genotype, Genotype]) -> Subspace:
    """The subspace of a normal and a reduction cell as they are published: edges that they do not name are pruned."""
    rows: list[tuple[int, ...]] = []
    for first, cell in zip((0, len(design.edges)), cells, strict=True):
        operators = {(source, 2 + place // 2): name for place, (name, source) in enumerate(cell)}
        for decision, edge in enumerate(design.edges, start=first):
            names = design.operator_names[decision]
            rows.append((names.index(operators[edge]),) if edge in operators else ())
    return tuple(rows)


class FixedDarts(DartsNetwork):
    """A network of cells that always uses all that it holds: `forward(x_NCHW)` gives logits (N, classes)."""

    def forward(  # type: ignore[override]  # there is nothing to choose
        self,
        x: Tensor,
        architecture: Architecture | None = None,  # noqa: ARG002
    ) -> Tensor:
        return super().forward(x)


DARTS_V2 = DartsV2Design()
DARTS_V2_SMALL = DartsV2Design("darts_v2_small", cells=5, channels=8)
