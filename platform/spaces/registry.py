"""From a configured name to a search space."""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from fedloom.platform.plugins import resolve
from fedloom.platform.spaces.base import SearchSpace
from fedloom.platform.spaces.cnn import CNN_CIFAR, CNN_CIFAR_WIDE, CNN_DIGITS, CnnDesign, cnn_space
from fedloom.platform.spaces.config import SpaceConfig
from fedloom.platform.spaces.darts import (
    DARTS_FULL,
    DARTS_S1,
    DARTS_S2,
    DARTS_S2_SMALL,
    DARTS_S3,
    DARTS_S4,
    DartsDesign,
    DartsSpace,
)
from fedloom.platform.spaces.elastic import ElasticDesign, ElasticSpace
from fedloom.platform.spaces.fixed import (
    DARTS_V2,
    DARTS_V2_SMALL,
    RESNET18,
    RESNET18_SMALL,
    FixedDesign,
    FixedSpace,
)
from fedloom.platform.spaces.modular import RESNET18_MODULAR, RESNET18_MODULAR_SMALL, ModularDesign, ModularSpace
from fedloom.platform.spaces.resnet import RESNET_SMALL, ResnetDesign
from fedloom.platform.spaces.tcn import TcnDesign

SpaceBuilder = Callable[[SpaceConfig], SearchSpace]

_NOT_OF_DESIGNS = ("name", "options")


def _changed(default: Any, config: SpaceConfig) -> Any:
    """The design with what the configuration changes of it."""
    if config.options:
        raise ValueError(f"space {config.name} has no options, given {', '.join(map(str, config.options))}")
    known = [field.name for field in fields(default)]
    changes: dict[str, Any] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name in _NOT_OF_DESIGNS or value is None:
            continue
        if field.name not in known:
            own = ", ".join(name for name in known if name != "name")
            raise ValueError(f"space {config.name} has no {field.name}; it has {own}")
        changes[field.name] = tuple(value) if isinstance(value, list) else value
    return replace(default, **changes)


def _cnn(default: CnnDesign, config: SpaceConfig) -> SearchSpace:
    return cnn_space(_changed(default, config))


def _elastic(default: ElasticDesign, config: SpaceConfig) -> SearchSpace:
    return ElasticSpace(_changed(default, config))


def _darts(default: DartsDesign, config: SpaceConfig) -> SearchSpace:
    return DartsSpace(_changed(default, config))


def _fixed(default: FixedDesign, config: SpaceConfig) -> SearchSpace:
    return FixedSpace(_changed(default, config))


def _modular(default: ModularDesign, config: SpaceConfig) -> SearchSpace:
    return ModularSpace(_changed(default, config))


_CNNS = (CNN_CIFAR, CNN_CIFAR_WIDE, CNN_DIGITS)
_ELASTIC: tuple[ElasticDesign, ...] = (ResnetDesign(), RESNET_SMALL, TcnDesign())
_DARTS = (DARTS_S1, DARTS_S2, DARTS_S3, DARTS_S4, DARTS_FULL, DARTS_S2_SMALL)
_FIXED: tuple[FixedDesign, ...] = (RESNET18, RESNET18_SMALL, DARTS_V2, DARTS_V2_SMALL)
_MODULAR = (RESNET18_MODULAR, RESNET18_MODULAR_SMALL)

SPACES: Mapping[str, SpaceBuilder] = MappingProxyType(
    {design.name: partial(_cnn, design) for design in _CNNS}
    | {design.name: partial(_elastic, design) for design in _ELASTIC}
    | {design.name: partial(_darts, design) for design in _DARTS}
    | {design.name: partial(_fixed, design) for design in _FIXED}
    | {design.name: partial(_modular, design) for design in _MODULAR}
)
"""The builders of the spaces that ship with fedloom, by name."""


def build_space(config: SpaceConfig) -> SearchSpace:
    """The search space that a configuration asks for.

    Raises:
        ValueError: an unknown name (lists the known ones), an import path that leads nowhere, or a value that the
            space does not allow.
    """
    builder = resolve("space", config.name, SPACES)
    if not callable(builder):
        raise ValueError(f"space {config.name!r} is not a function of a SpaceConfig")
    return builder(config)
