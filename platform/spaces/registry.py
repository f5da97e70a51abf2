"""The registry of search spaces by name, and trials of a user's own space before a run starts."""

from collections import OrderedDict
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from fedloom.platform.plugins import PluginError, Registry, Shipped, an, blaming, is_import_path
from fedloom.platform.settings import component_specs
from fedloom.platform.spaces.base import SearchSpace, load_sent, miscounted
from fedloom.platform.spaces.capabilities import HasExits, lacking
from fedloom.platform.spaces.slices import Architecture, extract
from fedloom.platform.spaces.space_config import LoraConfig, SpaceBuilder, SpaceConfig

SAMPLES = 2


def try_space(space: SearchSpace, config: SpaceConfig) -> None:
    """Raises PluginError for an object that is no space, and for networks that do not return one logit per class.

    The smallest and the largest subnet are built, loaded with slices of initial supernet weights, and run on zeros, as
    is the supernet. The costs of every option are counted, which builds each option.
    """
    with blaming("space", config.name):
        missing = lacking(space, SearchSpace)
        if missing:
            raise PluginError(
                f"space {config.name!r} returns {type(space).__name__}, which has no {', '.join(missing[:6])}: derive "
                "it from fedloom.platform.spaces.base.SearchSpace, which works most of that out"
            )
        if not space.options:
            raise PluginError(f"space {config.name!r} has no decisions: give options of at least one")
        space.cost_table("macs")
        weights = space.initial_weights(torch.Generator().manual_seed(0))
        x = torch.zeros((SAMPLES, *space.input_shape), dtype=space.input_dtype)
        supernet = _loaded(space.build_supernet(), weights)
        for architecture in dict.fromkeys((space.smallest, space.largest)):
            cut = extract(weights, space.slices(architecture))
            subnet = _loaded(space.build_subnet(architecture), cut)
            for what, logits in (("subnet", subnet(x)), ("supernet", supernet(x, architecture))):
                _check_logits(logits, config, what, architecture)
        _check_costs(space, config)


def try_exits(space: HasExits, config: SpaceConfig) -> None:
    """Raises PluginError unless subnets append every exit's logits and return their mean or the last exit's."""
    with blaming("space", config.name):
        weights = space.initial_weights(torch.Generator().manual_seed(0))
        x = torch.zeros((SAMPLES, *space.input_shape), dtype=space.input_dtype)
        for architecture in dict.fromkeys((space.smallest, space.largest)):
            subnet = _loaded(space.build_subnet(architecture), extract(weights, space.slices(architecture)))
            exits: list[torch.Tensor] = []
            outputs, wanted = subnet(x, exits), space.num_exits(architecture)
            where = f"space {config.name!r}: the subnet of architecture {'-'.join(map(str, architecture))}"
            if len(exits) != wanted:
                raise PluginError(
                    f"{where} appends the logits of {len(exits)} exits to the list, num_exits is {wanted}"
                )
            for logits in (outputs, *exits):
                _check_logits(logits, config, "subnet", architecture)
            if not any(
                torch.allclose(outputs, each, rtol=1e-4, atol=1e-5)
                for each in (torch.stack(exits).mean(dim=0), exits[-1])
            ):
                raise PluginError(f"{where} returns neither the mean of its exits' logits nor the last exit's")


def _loaded(module: nn.Module, weights: dict[str, torch.Tensor]) -> nn.Module:
    load_sent(module, weights)
    return module.eval().requires_grad_(False)


def _check_costs(space: SearchSpace, config: SpaceConfig) -> None:
    """Raises PluginError if the default cost tables, which change one decision at a time, miss what others change."""
    measured = type(space).cost_table is SearchSpace.cost_table and type(space)._table_of is SearchSpace._table_of
    if not measured:
        return
    mixed = tuple(count // 2 for count in space.options)
    for architecture, measure, summed, built in miscounted(
        space, ("macs", "parameters", "bytes"), (space.largest, mixed)
    ):
        raise PluginError(
            f"space {config.name!r}: architecture {'-'.join(map(str, architecture))} has {built:.10g} {measure}, "
            f"and {summed:.10g} as a sum over its decisions, so that costs are not additive: join decisions that "
            "depend on each other into one, or override `_table_of`"
        )


def _check_logits(logits: object, config: SpaceConfig, what: str, architecture: Architecture) -> None:
    where = f"space {config.name!r}: the {what} of architecture {'-'.join(map(str, architecture))}"
    if not isinstance(logits, torch.Tensor):
        raise PluginError(f"{where} gives {type(logits).__name__}, not logits")
    if logits.dim() < 2 or tuple(logits.shape[:2]) != (SAMPLES, config.num_classes):
        raise PluginError(
            f"{where} gives the shape {tuple(logits.shape)} for {SAMPLES} samples: expected ({SAMPLES}, "
            f"{config.num_classes}), one logit per class of space.num_classes"
        )
    if not bool(torch.isfinite(logits).all()):
        raise PluginError(f"{where} gives logits that are not finite for inputs of zeros")


# -- spaces by name ---------------------------------------------------------------------------------------------------

_MODULES: Mapping[str, tuple[str, ...]] = {
    "cnn": ("cnn_cifar", "cnn_cifar_wide", "cnn_digits", "cnn_speech"),
    "resnet": ("resnet_elastic", "resnet_elastic_small", "resnet18", "resnet18_small", "resnet34"),
    "tcn": ("tcn_elastic",),
    "rnn": ("rnn_shakespeare",),
    "darts": (
        *("darts_s1", "darts_s2", "darts_s3", "darts_s4", "darts_full", "darts_s2_small"),
        *("darts_v2", "darts_v2_small", "fednas_v1"),
    ),
    "modular": ("resnet18_modular", "resnet18_modular_small"),
    "width": ("width", "cnn_width", "resnet_width", "lstm_width"),
    "split": ("split", "cnn_split", "resnet_split"),
    "depth": ("cnn_depth", "resnet_depth", "cnn_scaled", "resnet_scaled"),
    "module": ("module",),
    "transformer": (
        *("vit_elastic", "gpt_elastic", "vit_width", "gpt_width", "vit_depth", "gpt_depth"),
        *("vit_scaled", "gpt_scaled"),
    ),
}

_OWN = {name: f"fedloom.platform.spaces.{module}:SPACES" for module, names in _MODULES.items() for name in names}
SPACES_KEPT = 16
"""The number of spaces, those used last, that a process keeps for equal configurations."""
_built: OrderedDict[str | None, SearchSpace] = OrderedDict()

SPACES: Registry[SpaceBuilder] = Registry(
    "space",
    Shipped(_OWN),
    ("config",),
)
"""The builders of spaces."""


class _Networks(Registry[Any]):
    """Functions that build networks, with or without the positional arguments; options are keyword-only."""

    def check_callable(self, name: str, code: Any) -> None:
        """Raises PluginError for an object that is not callable; the call itself is tried later, on a batch."""
        if not callable(code):
            raise PluginError(f"{self.kind} {name!r} is {an(type(code).__name__)}, not {self.form}")


NETWORKS: Registry[Any] = _Networks("network", {}, ("input_shape", "num_classes"))
"""The functions that `space.build` names."""


def build_space(config: SpaceConfig) -> SearchSpace:
    """Builds the configured search space, and tries it out if it is a user's own.

    Raises:
        ValueError: an unknown name (lists the known ones), or a value that the space does not allow.
        PluginError: an import path that does not exist, or an object that is no space.
    """
    space = untried_space(config)
    if is_import_path(config.name):
        try_space(space, config)
    return space


def untried_space(config: SpaceConfig) -> SearchSpace:
    """Like `build_space`, but without the trial.

    Equal configurations of fedloom's own networks share a space in a process, with all that it has computed once: its
    cost tables take as long as a short run's training.
    """
    if config.lora != LoraConfig():
        from fedloom.platform.spaces.lora import LoraSpace, without_adapters  # few runs need it

        return LoraSpace(config, untried_space(without_adapters(config)))
    chosen: list[tuple[Registry[Any], str]] = [(SPACES, config.name)]
    if config.build is not None:
        chosen.append((NETWORKS, config.build))
    key = repr(config) if config.name in _OWN and config.build is None else None
    if key in _built:
        _built.move_to_end(key)
        return _built[key]
    builder = SPACES.make(component_specs(chosen, config.options, "space.options")[0])
    space = builder(deepcopy(config))
    if key is not None:
        _built[key] = space
        if len(_built) > SPACES_KEPT:
            _built.popitem(last=False)
    return space
