"""What a run's configuration says about its search space."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from fedloom.platform.spaces.base import SearchSpace


@dataclass
class SpaceConfig:
    """A named search space and what to change of it; None keeps the space's own value.

    `name` is one of the names that `fedloom plugins` lists, or `module:function`, a function of this configuration that
    returns a search space; `options` are its keyword parameters. What the values mean is
    said by the space's design (`CnnDesign`, `ResnetDesign`, `TcnDesign`, `DartsDesign`, `Resnet18Design`,
    `DartsV2Design`, `ModularDesign`); one that it does not have is refused.
    """

    name: str = "cnn_digits"
    num_classes: int = 10
    input_shape: list[int] | None = None
    stem_channels: int | None = None
    stage_layers: list[int] | None = None
    stage_strides: list[int] | None = None
    depthwise_link: bool | None = None
    operators: list[str] | None = None
    stage_widths: list[int] | None = None
    depths: list[int] | None = None
    expansions: list[float] | None = None
    width_multiplier: float | None = None
    norm: str | None = None
    channels: int | None = None
    embedding_size: int | None = None
    blocks: list[int] | None = None
    kernel_size: int | None = None
    dropout: float | None = None
    tied: bool | None = None
    cells: int | None = None
    nodes: int | None = None
    stem_multiplier: int | None = None
    affine: bool | None = None
    modules: int | None = None
    options: dict[str, Any] = field(default_factory=dict)


SpaceBuilder = Callable[..., SearchSpace]
"""From a configuration (and options by keyword) to a space."""

_NOT_OF_DESIGNS = ("name", "options")


def from_design(make: Callable[[Any], SearchSpace], default: Any, config: SpaceConfig) -> SearchSpace:
    """The space of a design with what the configuration changes of it.

    Raises ValueError for a value that this design does not have, listing those that it has.
    """
    known = [f.name for f in fields(default)]
    changes: dict[str, Any] = {}
    for each in fields(config):
        value = getattr(config, each.name)
        if each.name in _NOT_OF_DESIGNS or value is None:
            continue
        if each.name not in known:
            own = ", ".join(name for name in known if name != "name")
            raise ValueError(f"space {config.name} has no {each.name}; it has {own}")
        changes[each.name] = tuple(value) if isinstance(value, list) else value
    return make(replace(default, **changes))


Spaces = Mapping[str, SpaceBuilder]
"""The spaces of a module, by name."""
