"""Spaces of exactly one architecture: fixed networks that are trained without a search."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.platform.spaces.base import Measure, SearchSpace, cost_of
from fedloom.platform.spaces.initialisation import blank, initialise, on_meta
from fedloom.platform.spaces.operator_choice import SpaceSizes
from fedloom.platform.spaces.slices import Architecture, Slice, SliceMap
from fedloom.tiers.costs import CostTable
from fedloom.tiers.measure import MEASURES

ONLY: Architecture = (0,)
"""The one architecture: a single decision with a single option."""


class FixedDesign(Protocol):
    """A network's name, input shape and construction."""

    @property
    def name(self) -> str: ...

    @property
    def input_shape(self) -> tuple[int, ...]: ...

    def build(self) -> nn.Module:
        """The network, called as `forward(x)`."""
        ...


@dataclass(frozen=True)
class FixedNetwork:
    """A network of the user's own: `build()` makes the module, which is called as `forward(x)`."""

    name: str
    input_shape: tuple[int, ...]
    build: Callable[[], nn.Module]


def _without_architecture(_network: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return inputs[:1]


class FixedSpace(SearchSpace):
    """A network as a space of one architecture, `(0,)`."""

    def __init__(self, design: FixedDesign) -> None:
        self.design = design
        self.name = design.name
        self.input_shape: tuple[int, ...] = tuple(design.input_shape)
        self.options: tuple[int, ...] = (1,)

    def validate(self, architecture: Architecture) -> None:
        """Raises ValueError for anything but the one architecture."""
        if tuple(architecture) != ONLY:
            raise ValueError(f"{self.name} has one architecture, {ONLY}, given {architecture}")

    def sample(self, rng: np.random.Generator) -> Architecture:
        """The only architecture; nothing is drawn."""
        del rng
        return ONLY

    def build_supernet(self) -> nn.Module:
        """The network, called with `(x, architecture)`; floating tensors are NaN until weights are loaded."""
        network = blank(self.design.build)
        network.register_forward_pre_hook(_without_architecture)
        return network

    def build_subnet(self, architecture: Architecture) -> nn.Module:
        """The same network, `forward(x)`; floating tensors are NaN until weights are loaded."""
        self.validate(architecture)
        return blank(self.design.build)

    @cached_property
    def _meta_network(self) -> nn.Module:
        return on_meta(self.design.build).eval()

    def initial_weights(self, generator: torch.Generator) -> dict[str, Tensor]:
        return initialise(self._meta_network, generator)

    def initial_subnet_weights(self, architecture: Architecture, generator: torch.Generator) -> dict[str, Tensor]:
        self.validate(architecture)
        return self.initial_weights(generator)

    @cached_property
    def _slices(self) -> SliceMap:
        return {name: Slice(name) for name in self._meta_network.state_dict()}

    def slices(self, architecture: Architecture) -> SliceMap:
        """Whole tensors under the same names."""
        self.validate(architecture)
        return dict(self._slices)

    @property
    def num_parameters(self) -> SpaceSizes:
        """The number of trainable parameters, all in the fixed part."""
        count = int(self.cost_table("parameters").fixed)
        return SpaceSizes(count, count, count, count)

    def _table_of(self, measure: str, of: Measure, device: str) -> CostTable:
        """The network's cost as the fixed part; the only option costs 0."""
        cost = cost_of(self.design.build, (1, *self.input_shape), of, device)
        return CostTable(measure, cost, ((0.0,),), MEASURES.get(measure, "sum"))
