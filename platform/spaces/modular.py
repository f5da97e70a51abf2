"""The modular ResNet-18 of FedMN (Wang et al. 2022): each residual block has several branches to choose from.

A decision is a block, an option one of its branches, each with its own weights. A block without active branches
is just its shortcut. Stem, shortcuts and head are fixed.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.platform.spaces.operator_choice import Part, SummedOperatorSpace, as_subspace, outputs_of
from fedloom.platform.spaces.resnet import Resnet18Size
from fedloom.platform.spaces.slices import Architecture, Subspace
from fedloom.platform.spaces.space_config import spaces_of


@dataclass(frozen=True)
class ModularDesign(Resnet18Size):
    """A ResNet-18 whose blocks have `modules` branches each, which can be on or off (FedMN).

    Raises:
        ValueError: a size that cannot be built.
    """

    modules: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.modules < 1:
            raise ValueError(f"space {self.name}: modules must be at least 1, given {self.modules}")

    @property
    def operator_names(self) -> tuple[tuple[str, ...], ...]:
        """The branches of every block."""
        return (tuple(f"branch_{option}" for option in range(self.modules)),) * len(self.block_plans)


class ModularBlock(nn.Module):
    """(N, in, H, W) -> (N, out, H/stride, W/stride): ReLU of the shortcut plus the chosen branches' sum."""

    def __init__(self, design: ModularDesign, block: int, held: Sequence[int]) -> None:
        super().__init__()
        plan = design.block_plans[block]
        self.block = block
        self.shortcut = design.build_shortcut(plan)
        self.branches = nn.ModuleDict({str(option): design.build_branch(plan) for option in held})

    def forward(self, x: Tensor, options: Sequence[int], mix: Tensor | None = None) -> Tensor:
        """Each branch is weighted by its entry of `mix` (one per option), if given."""
        outputs = outputs_of(self.branches, options, lambda branch: branch(x), mix, f"block {self.block}")
        shortcut: Tensor = self.shortcut(x)
        return F.relu(reduce(torch.add, outputs) + shortcut if outputs else shortcut)


class ModularNetwork(nn.Module):
    """Stem, eight blocks, global average, classifier: `forward(x_NCHW, subspace)` returns logits (N, classes).

    `subspace` (or an architecture) selects the branches, by default all that the network holds. `mix` (blocks,
    branches) are their weights, by default 1. The active branches are an argument, not state of the module.
    """

    def __init__(self, design: ModularDesign, subspace: Subspace) -> None:
        super().__init__()
        self.design, self.held = design, subspace
        self.stem = design.build_stem()
        self.blocks = nn.ModuleList(ModularBlock(design, block, row) for block, row in enumerate(subspace))
        self.head = design.build_head()

    def forward(self, x: Tensor, subspace: Subspace | Architecture | None = None, mix: Tensor | None = None) -> Tensor:
        """Raises ValueError naming the block if `subspace` has a branch that the network does not hold."""
        used = self.held if subspace is None else as_subspace(subspace)
        if len(used) != len(self.blocks):
            raise ValueError(f"{self.design.name} has {len(self.blocks)} blocks, given {len(used)}")
        mixes = [None] * len(self.blocks) if mix is None else mix
        x = self.stem(x)
        for block, options, row in zip(self.blocks, used, mixes, strict=True):
            x = block(x, options, row)
        y: Tensor = self.head(x.mean(dim=(2, 3)))
        return y


class ModularSpace(SummedOperatorSpace):
    """A search space of branches; see `fedloom.platform.spaces.base.SearchSpace` for the protocol.

    Source: FedMN (Wang et al. 2022, "Personalized Federated Learning via Heterogeneous Modular Networks").
    """

    _decision_kind = "block"
    _tensor_of_operator = re.compile(r"blocks\.(\d+)\.branches\.(\d+)\.")

    def __init__(self, design: ModularDesign) -> None:
        super().__init__(design.name, design.input_shape, design.operator_names)
        self.design = design

    def _network(self, subspace: Subspace) -> nn.Module:
        return ModularNetwork(self.design, subspace)

    def _parts(self, decision: int, option: int) -> Sequence[Part]:  # noqa: ARG002  # a block's branches are alike
        plan = self.design.block_plans[decision]
        return [Part((plan,), self._shape(decision), partial(self.design.build_branch, plan))]

    def _shape(self, block: int) -> tuple[int, ...]:
        """A block's input shape for one sample."""
        height, width = self.design.input_shape[1:]
        for plan in self.design.block_plans[:block]:
            height, width = -(-height // plan.stride), -(-width // plan.stride)
        return 1, self.design.block_plans[block].in_channels, height, width


RESNET18_MODULAR = ModularDesign("resnet18_modular")
RESNET18_MODULAR_SMALL = ModularDesign("resnet18_modular_small", stem_channels=16)

SPACES = spaces_of(ModularSpace, RESNET18_MODULAR, RESNET18_MODULAR_SMALL)
