"""The configuration of a search space."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any

from fedloom.platform.settings import ONE_OR_MORE, POSITIVE, ZERO_OR_MORE, Brought, Range
from fedloom.platform.spaces.base import SearchSpace


@dataclass
class SpaceConfig:
    """A named search space and changes of its values; null keeps the space's own value.

    The designs document the values (`CnnDesign`, `ResnetDesign`, `TcnDesign`, `DartsDesign`, `Resnet18Design`,
    `DartsV2Design`, `ModularDesign`); a value that a space does not have is an error.
    """

    name: Annotated[str, Brought("space"), "the search space"] = "cnn_digits"
    num_classes: Annotated[int, Range(least=2), "number of classes, or the size of the vocabulary"] = 10
    input_shape: Annotated[list[int] | None, ONE_OR_MORE, "shape of one sample"] = None
    stem_channels: Annotated[int | None, ONE_OR_MORE, "channels of the stem"] = None
    stage_layers: Annotated[list[int] | None, ONE_OR_MORE, "layers per stage"] = None
    stage_strides: Annotated[list[int] | None, ONE_OR_MORE, "stride per stage"] = None
    depthwise_link: Annotated[bool | None, "cnn: whether stages are linked by a depthwise convolution"] = None
    operators: Annotated[list[str] | None, "the operators to choose from"] = None
    stage_widths: Annotated[list[int] | None, ONE_OR_MORE, "channels per stage"] = None
    depths: Annotated[list[int] | None, ZERO_OR_MORE, "largest number of extra blocks per stage"] = None
    expansions: Annotated[list[float] | None, POSITIVE, "widths of a block, as shares of its stage's"] = None
    width_multiplier: Annotated[float | None, POSITIVE, "factor on all channels"] = None
    norm: Annotated[str | None, "normalisation, such as batch or none"] = None
    channels: Annotated[int | None, ONE_OR_MORE, "channels of the first cells or blocks"] = None
    embedding_size: Annotated[int | None, ONE_OR_MORE, "size of a token's embedding"] = None
    blocks: Annotated[list[int] | None, ONE_OR_MORE, "blocks per stage"] = None
    kernel_size: Annotated[int | None, ONE_OR_MORE, "kernel size of the temporal convolutions"] = None
    dropout: Annotated[float | None, Range(least=0, below=1), "dropout probability"] = None
    tied: Annotated[bool | None, "whether embedding and output share their weights"] = None
    cells: Annotated[int | None, ONE_OR_MORE, "number of cells"] = None
    nodes: Annotated[int | None, ONE_OR_MORE, "number of intermediate nodes per cell"] = None
    stem_multiplier: Annotated[int | None, ONE_OR_MORE, "channels of the stem as a multiple of the cells'"] = None
    affine: Annotated[bool | None, "whether batch norms have scale and shift"] = None
    modules: Annotated[int | None, ONE_OR_MORE, "number of modules per block to choose from"] = None
    options: Annotated[dict[str, Any], "options of a user's own space, by name"] = field(default_factory=dict)


SpaceBuilder = Callable[..., SearchSpace]
"""Builds a space from a configuration (and options by keyword)."""

_NOT_OF_DESIGNS = ("name", "options")


def from_design(make: Callable[[Any], SearchSpace], default: Any, config: SpaceConfig) -> SearchSpace:
    """The space of a design with the configuration's changes.

    Raises ValueError for a value that the design does not have, listing those that it has.
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
