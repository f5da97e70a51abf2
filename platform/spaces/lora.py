"""Low-rank adapters (LoRA, Hu et al. 2022) whose ranks differ between clients: `space.lora.ranks=[4,8,16]`.

The largest network of any space, a user's module included, becomes a constant base. A linear layer W0 x gets a pair of
matrices, B (out, r) and A (r, in), and computes W0 x + s B A x. A network of rank r has the first r rows of A and the
first r columns of B. Ranks are thus slices of the largest pair, as widths are slices of the widest network, and methods
for widths, tiers, costs and exports work with them unchanged.

The factor s is alpha / (largest rank) for every client. With alpha / r for each client's own r, the same rows and
columns would mean something else at every rank, and their slices and averages would not belong to one network.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.platform.data.trees import Tree
from fedloom.platform.plugins import PluginError
from fedloom.platform.spaces.base import LeadingSpace, Measure, SearchSpace, travelling
from fedloom.platform.spaces.capabilities import Pair
from fedloom.platform.spaces.initialisation import on_meta
from fedloom.platform.spaces.module import WithConstants, load_stored
from fedloom.platform.spaces.slices import Architecture, SlicedSupernet, SliceMap, Weights, extract, leading
from fedloom.platform.spaces.space_config import LoraConfig, SpaceConfig
from fedloom.tiers.costs import CostTable

DOWN, UP, MERGED = "lora_A", "lora_B", "lora_merged"
"""The names of a layer's A (r, in), B (out, r), and sum of merged products (out, in)."""
SHOWN = 8
"""The number of layers named in an error message."""


# -- layers -----------------------------------------------------------------------------------------------------------


class AdaptedLinear(nn.Linear):
    """A linear layer with an adapter: W x + s B A x, where W is the base's weight plus the merged sum, if any."""

    lora_A: Tensor  # noqa: N815  # as in peft
    lora_B: Tensor  # noqa: N815
    lora_merged: Tensor | None
    lora_scale: float

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.lora_merged is None else self.weight + self.lora_merged
        return F.linear(x, weight, self.bias) + self.lora_scale * F.linear(F.linear(x, self.lora_A), self.lora_B)


def add_adapter(layer: nn.Linear, rank: int, scale: float, *, merged: bool = False) -> None:
    """Adds an adapter of this rank to a linear layer: A Kaiming-uniform from torch's generator, B zero.

    The layer is changed in place, and its tensors keep their names.
    """
    weight = layer.weight.detach()
    down = weight.new_empty(rank, layer.in_features)
    nn.init.kaiming_uniform_(down, a=math.sqrt(5))
    layer.__class__ = AdaptedLinear
    layer.register_parameter(DOWN, nn.Parameter(down))
    layer.register_parameter(UP, nn.Parameter(weight.new_zeros(layer.out_features, rank)))
    layer.register_buffer(MERGED, torch.zeros_like(weight) if merged else None)
    layer.lora_scale = scale  # type: ignore[assignment]  # a plain number
    # In evaluation, torch's encoder layers read their sublayers' weights directly, unless one has a hook.
    layer.register_forward_hook(_nothing)


def _nothing(_layer: nn.Module, _inputs: object, _output: object) -> None: ...


def adapted_layers(module: nn.Module) -> dict[str, AdaptedLinear]:
    """The layers with adapters, by name."""
    return {name: part for name, part in module.named_modules() if isinstance(part, AdaptedLinear)}


# -- spaces -----------------------------------------------------------------------------------------------------------


class LoraSpace(WithConstants, LeadingSpace):
    """One decision: the rank of the adapters on another space's largest network."""

    def __init__(self, config: SpaceConfig, base: SearchSpace) -> None:
        """Raises ValueError for ranks that are not ascending."""
        self.config, self.base, self.name = config, base, base.name
        self.input_dtype, self.channels_last = base.input_dtype, base.channels_last
        ranks = config.lora.ranks or []
        if not ranks or ranks != sorted(set(ranks)):
            raise ValueError(
                f"space.lora.ranks={config.lora.ranks}: give the adapters' ranks in ascending order, such as [4,8,16]"
            )
        self.ranks, self.options = tuple(ranks), (len(ranks),)
        self.adapter_scale = 1.0 if config.lora.alpha is None else config.lora.alpha / ranks[-1]

    @property
    def input_shape(self) -> Any:  # type: ignore[override]  # shapes by name for several inputs
        """The input shape of the base."""
        return self.base.input_shape

    def fitted(self, config: Any, dataset: Any) -> tuple[SearchSpace, Any]:
        """The adapters' space on the base fitted to the data set."""
        base, fitted = self.base.fitted(without_adapters(config), dataset)
        fitted = replace(fitted, lora=config.lora, weights=config.weights, weights_names=config.weights_names)
        return LoraSpace(fitted, base), fitted

    def label(self, architecture: Architecture) -> str:
        """Such as `r=8`."""
        return f"r={self.ranks[architecture[0]]}"

    # -- networks ---------------------------------------------------------------------------------------------------

    def largest_network(self, seed: int) -> nn.Module:
        """The base with adapters of the largest rank.

        Raises ValueError for layers that do not exist or are smaller than the rank.
        """
        lora, module = self.config.lora, self.base.largest_network(seed)
        if self.config.weights is not None:
            load_stored(module, Path(self.config.weights).expanduser(), self.config.weights_names or {})
        linear = {name: part for name, part in module.named_modules() if type(part).forward is nn.Linear.forward}
        chosen = _named(lora.layers, linear, "space.lora.layers", "linear layer")
        whole = _named(lora.trained, dict(module.named_parameters()), "space.lora.trained", "tensor")
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in whole)
        most = self.ranks[-1]
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            for name in chosen:
                layer = linear[name]
                if most > min(layer.weight.shape):
                    raise ValueError(
                        f"space.lora.ranks={list(self.ranks)}: layer {name} has {layer.in_features} inputs and "
                        f"{layer.out_features} outputs, too few for rank {most}: give at most "
                        f"{min(layer.weight.shape)}, or other space.lora.layers"
                    )
                add_adapter(layer, most, self.adapter_scale, merged=lora.merged)
        return module

    def _of_rank(self, module: nn.Module, architecture: Architecture) -> nn.Module:
        """Cuts a network of the largest rank to the architecture's rank, in place."""
        self.validate(architecture)
        rank = self.ranks[architecture[0]]
        for layer in adapted_layers(module).values():
            layer.lora_A = nn.Parameter(layer.lora_A.detach()[:rank].clone())
            layer.lora_B = nn.Parameter(layer.lora_B.detach()[:, :rank].clone())
        return module

    def _network(self, architecture: Architecture) -> nn.Module:
        """The network with adapters of a rank; its trained tensors are NaN until weights are loaded."""
        return self._of_rank(self._copy(), architecture)

    def build_subnet(self, architecture: Architecture) -> nn.Module:
        return self._network(architecture)

    def build_supernet(self) -> nn.Module:
        """The network of the largest rank, `forward(x, architecture)`."""
        return SlicedSupernet(self._copy(), self.slices, lambda a: on_meta(partial(self._network, a)))

    def _outputs(self, module: nn.Module, x: Tree) -> Any:
        layers, called = adapted_layers(module), set[nn.Module]()
        for layer in layers.values():
            layer.register_forward_hook(lambda layer, _inputs, _output: called.add(layer))
        outputs = super()._outputs(module, x)
        unused = [name for name, layer in layers.items() if layer not in called]
        if unused:
            raise PluginError(
                f"the network never calls its layer {unused[0]} (another layer may read its weight), so that an "
                "adapter would do nothing: give other space.lora.layers"
            )
        return outputs

    # -- tensors ----------------------------------------------------------------------------------------------------

    def initial_subnet_weights(self, architecture: Architecture, generator: torch.Generator) -> dict[str, Tensor]:
        weights = self.initial_weights(generator)
        return {name: tensor.clone() for name, tensor in extract(weights, self.slices(architecture)).items()}

    def _leading_slices(self, architecture: Architecture) -> SliceMap:
        rank = self.ranks[architecture[0]]
        slices = {}
        for name, tensor in travelling(self._template).items():
            shape = tuple(tensor.shape)
            if name.endswith(DOWN):
                slices[name] = leading(name, (rank, *shape[1:]), shape)
            elif name.endswith(UP):
                slices[name] = leading(name, (*shape[:1], rank), shape)
            else:
                slices[name] = leading(name, shape, shape)
        return slices

    def rolled(self, weights: Weights, step: int) -> dict[str, Tensor]:
        """The weights after all ranks have moved `step` places to the front, the first ones to the end."""
        parts = dict(weights)
        for up, down, _ in self.pairs if weights else ():  # empty in a dry run
            parts[up], parts[down] = weights[up].roll(-step, 1).contiguous(), weights[down].roll(-step, 0).contiguous()
        return parts

    @cached_property
    def pairs(self) -> tuple[Pair, ...]:
        """The names of every layer's B, A and merged sum."""
        prefixes = [name.removesuffix(DOWN) for name in self.parameter_names if name.rpartition(".")[2] == DOWN]
        return tuple(Pair(*(f"{prefix}{kind}" for kind in (UP, DOWN, MERGED))) for prefix in sorted(prefixes))

    # -- costs ------------------------------------------------------------------------------------------------------

    def _table_of(self, measure: Measure) -> CostTable:
        """The cost of the base with the smallest adapters, and the extra cost of larger ones."""
        modules = (self._of_rank(copy.deepcopy(self._template), (i,)) for i in range(self.options[0]))
        costs = [self._measured(measure, module) for module in modules]
        first = costs[0]
        return measure.table(first, [[cost if measure.is_of_peaks else cost - first for cost in costs]])


def without_adapters(config: SpaceConfig) -> SpaceConfig:
    """The configuration of the base, without stored weights: the adapters' space loads them into it."""
    return replace(config, lora=LoraConfig(), weights=None, weights_names=None)


def _named(patterns: Iterable[str], among: Mapping[str, object], key: str, what: str) -> dict[str, None]:
    """The names that the patterns match, in the network's order; ValueError for a pattern that matches none."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in among):
            names = [*among]
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            raise ValueError(f"{key}: {pattern!r} names no {what}; there are {', '.join(names[:SHOWN])}{more}")
    return {name: None for name in among if any(fnmatchcase(name, pattern) for pattern in patterns)}
