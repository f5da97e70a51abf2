"""Fixed networks of published cells: those of second-order DARTS (Liu et al. 2019) and of FedNAS (He et al. 2020)."""

from dataclasses import asdict, dataclass
from functools import partial
from typing import ClassVar

from torch import nn

from fedloom.platform.spaces.darts import DARTS
from fedloom.platform.spaces.darts_network import DartsDesign, DartsNetwork
from fedloom.platform.spaces.fixed import FixedSpace
from fedloom.platform.spaces.slices import Subspace
from fedloom.platform.spaces.space_config import Spaces, from_design

Genotype = tuple[tuple[str, int], ...]
"""A cell as published: two pairs (operator, source) per node, in the order of the nodes."""

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
"""Normal and reduction cell found by second-order DARTS on CIFAR-10 (Liu et al. 2019, Fig. 4 and 5)."""
FEDNAS_V1_CELLS: tuple[Genotype, Genotype] = (
    (
        ("sep_conv_3x3", 1), ("sep_conv_3x3", 0), ("sep_conv_3x3", 2), ("sep_conv_5x5", 0),
        ("sep_conv_3x3", 1), ("sep_conv_5x5", 3), ("dil_conv_5x5", 3), ("sep_conv_3x3", 4),
    ),
    (
        ("max_pool_3x3", 0), ("skip_connect", 1), ("max_pool_3x3", 0), ("max_pool_3x3", 2),
        ("max_pool_3x3", 0), ("dil_conv_5x5", 1), ("max_pool_3x3", 0), ("dil_conv_5x5", 2),
    ),
)  # fmt: skip
"""Normal and reduction cell found by FedNAS on CIFAR-10 (He et al. 2020, as its authors published them in FedML)."""


@dataclass(frozen=True)
class DartsV2Design:
    """The fixed network of the cells found by DARTS (second order); for the sizes see `DartsDesign`.

    Pooling is followed by a norm, as in the search network; Liu et al. evaluate without norms.

    Raises:
        ValueError: a size that cannot be built.
    """

    name: str = "darts_v2"
    input_shape: tuple[int, int, int] = (3, 32, 32)
    num_classes: int = 10
    cells: int = 20
    channels: int = 36
    stem_stride: int = 1
    published_cells: ClassVar[tuple[Genotype, Genotype]] = DARTS_V2_CELLS

    def __post_init__(self) -> None:
        _ = self.darts

    @property
    def darts(self) -> DartsDesign:
        """The space that the network is a subspace of."""
        return DartsDesign(**asdict(self), operators=DARTS, affine=True)

    def build(self) -> nn.Module:
        """The network, which always uses all of its operators."""
        return DartsNetwork(self.darts, kept_by(self.darts, self.published_cells))


@dataclass(frozen=True)
class ShallowDesign(DartsDesign):
    """One that may have two cells, both of which reduce: in a fixed network no decision is idle for it."""

    fewest_cells: ClassVar[int] = 2


@dataclass(frozen=True)
class FedNasV1Design(DartsV2Design):
    """The fixed network of the cells found by FedNAS, from two cells on."""

    name: str = "fednas_v1"
    cells: int = 2
    channels: int = 16
    published_cells: ClassVar[tuple[Genotype, Genotype]] = FEDNAS_V1_CELLS

    @property
    def darts(self) -> DartsDesign:
        """The space that the network is a subspace of."""
        return ShallowDesign(**asdict(self), operators=DARTS, affine=True)


def kept_by(design: DartsDesign, cells: tuple[Genotype, Genotype]) -> Subspace:
    """The subspace of a published normal and reduction cell; edges that they do not name are pruned."""
    rows: list[tuple[int, ...]] = []
    for first, cell in zip((0, len(design.edges)), cells, strict=True):
        operators = {(source, 2 + place // 2): name for place, (name, source) in enumerate(cell)}
        for decision, edge in enumerate(design.edges, start=first):
            names = design.operator_names[decision]
            rows.append((names.index(operators[edge]),) if edge in operators else ())
    return tuple(rows)


DARTS_V2 = DartsV2Design()
DARTS_V2_SMALL = DartsV2Design("darts_v2_small", cells=5, channels=8)

FEDNAS_V1 = FedNasV1Design()

SPACES: Spaces = {
    design.name: partial(from_design, FixedSpace, design) for design in (DARTS_V2, DARTS_V2_SMALL, FEDNAS_V1)
}
