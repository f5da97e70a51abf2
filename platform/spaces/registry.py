"""From a configured name to a search space."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from fedloom.platform.plugins import resolve
from fedloom.platform.spaces.base import SearchSpace
from fedloom.platform.spaces.cnn import CNN_CIFAR, CNN_CIFAR_WIDE, CNN_DIGITS, CnnDesign, cnn_space
from fedloom.platform.spaces.config import SpaceConfig
from fedloom.platform.spaces.operator_choice import OperatorChoiceSpace

SpaceBuilder = Callable[[SpaceConfig], SearchSpace]

_OVERRIDES = ("input_shape", "stem_channels", "stage_layers", "stage_strides", "depthwise_link", "operators")


def _cnn(default: CnnDesign, config: SpaceConfig) -> OperatorChoiceSpace:
    if config.options:
        raise ValueError(f"space {config.name} has no options, given {', '.join(map(str, config.options))}")
    changes: dict[str, Any] = {"num_classes": config.num_classes}
    for field in _OVERRIDES:
        value = getattr(config, field)
        if value is not None:
            changes[field] = value if isinstance(value, (int, bool)) else tuple(value)
    return cnn_space(replace(default, **changes))


SPACES: Mapping[str, SpaceBuilder] = MappingProxyType(
    {design.name: partial(_cnn, design) for design in (CNN_CIFAR, CNN_CIFAR_WIDE, CNN_DIGITS)}
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
