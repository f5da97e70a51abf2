"""The configuration of a search space."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Interval

from fedloom.platform.settings import NOT_EMPTY, PATH, SHARE, UP_TO_A_THOUSAND, ComponentName
from fedloom.platform.spaces.base import SearchSpace

CHANNELS = Interval(ge=1, le=100_000)


@dataclass
class LoraConfig:
    """Low-rank adapters (Hu et al. 2022) on a space's largest network, whose own tensors are constants."""

    ranks: Annotated[
        list[Annotated[int, CHANNELS]] | None,
        "adapter ranks to choose from, ascending; a tier gets those it can afford; null: no adapters",
    ] = None
    layers: Annotated[list[Annotated[str, NOT_EMPTY]], "name patterns of the linear layers that get adapters"] = field(
        default_factory=lambda: ["*"]
    )
    trained: Annotated[
        list[Annotated[str, NOT_EMPTY]], "name patterns of the tensors that are trained and sent in full"
    ] = field(default_factory=list)
    alpha: Annotated[
        float | None, Interval(gt=0, le=1e6), "adapters are scaled by alpha / (largest rank), at every rank; null: 1"
    ] = None
    merged: Annotated[bool, "whether layers also hold the sum of earlier adapters, which flora needs"] = False


@dataclass
class SpaceConfig:
    """A named search space and overrides of its values; null keeps the space's own value.

    The designs document the values (`CnnDesign`, `ResnetDesign`, `TcnDesign`, `RnnDesign`, `DartsDesign`,
    `Resnet18Design`, `DartsV2Design`, `ModularDesign`, `CnnWidthDesign`, `ResnetWidthDesign`, `LstmWidthDesign`,
    `CnnDepthDesign`, `ResnetDepthDesign`, `CnnScaledDesign`, `ResnetScaledDesign`, `TransformerDesign`); a value that a
    space does not have is an error.
    """

    name: Annotated[str, ComponentName("space"), "the search space"] = "cnn_digits"
    num_classes: Annotated[int, Interval(ge=2, le=10_000_000), "number of classes, or the size of the vocabulary"] = 10
    heads: Annotated[
        list[Annotated[int, Interval(ge=2, le=10_000_000)]] | None,
        "cnn: number of classes of every task's classifier, in the order of tiers.tasks; null: one task",
    ] = None
    input_shape: Annotated[list[Annotated[int, CHANNELS]] | None, "shape of one sample"] = None
    stem_channels: Annotated[int | None, CHANNELS, "channels of the stem"] = None
    stem_stride: Annotated[int | None, UP_TO_A_THOUSAND, "cnn, darts, resnet18: stride of the stem"] = None
    stage_layers: Annotated[list[Annotated[int, UP_TO_A_THOUSAND]] | None, "layers per stage"] = None
    stage_strides: Annotated[list[Annotated[int, UP_TO_A_THOUSAND]] | None, "stride per stage"] = None
    depthwise_link: Annotated[bool | None, "cnn: whether stages are linked by a depthwise convolution"] = None
    operators: Annotated[list[Annotated[str, NOT_EMPTY]] | None, "the operators to choose from"] = None
    stage_widths: Annotated[list[Annotated[int, CHANNELS]] | None, "channels per stage"] = None
    depths: Annotated[
        list[Annotated[int, Interval(ge=0, le=100)]] | None, "largest number of extra blocks per stage"
    ] = None
    expansions: Annotated[
        list[Annotated[float, Interval(gt=0, le=1000)]] | None, "inner widths of a block, as shares of the stage width"
    ] = None
    widths: Annotated[
        list[Annotated[float, SHARE]] | None, "width, scaled, split: shares of the channels, ascending to 1.0"
    ] = None
    scaler: Annotated[bool | None, "width, split: whether narrow layers are scaled up in training (HeteroFL)"] = None
    coupled: Annotated[
        bool | None, "elastic: whether the depth of a stage decides the width of its blocks (CompOFA)"
    ] = None
    width_multiplier: Annotated[float | None, Interval(gt=0, le=1000), "factor on all channels"] = None
    norm: Annotated[str | None, NOT_EMPTY, "normalisation, such as batch or none"] = None
    initialisation: Annotated[str | None, NOT_EMPTY, "resnet: initial weights of convolutions, torch or he"] = None
    bias: Annotated[bool | None, "resnet: whether convolutions have biases"] = None
    channels: Annotated[int | None, CHANNELS, "channels of the first cells or blocks"] = None
    embedding_size: Annotated[int | None, CHANNELS, "size of a token's or patch's embedding"] = None
    blocks: Annotated[list[Annotated[int, UP_TO_A_THOUSAND]] | None, "blocks per stage"] = None
    patch_size: Annotated[int | None, UP_TO_A_THOUSAND, "vit: side of a patch in pixels"] = None
    attention_heads: Annotated[int | None, UP_TO_A_THOUSAND, "vit, gpt: attention heads per block"] = None
    mlp_ratio: Annotated[
        float | None, Interval(gt=0, le=1000), "vit, gpt: hidden channels of a block, as a multiple of embedding_size"
    ] = None
    head_shares: Annotated[
        list[Annotated[float, SHARE]] | None, "vit_elastic, gpt_elastic: shares of the heads, ascending to 1.0"
    ] = None
    kernel_size: Annotated[int | None, UP_TO_A_THOUSAND, "kernel size of the temporal convolutions"] = None
    dropout: Annotated[float | None, Interval(ge=0, lt=1), "dropout probability"] = None
    embedding_dropout: Annotated[
        float | None, Interval(ge=0, lt=1), "dropout probability of the embedding; null: dropout"
    ] = None
    tied: Annotated[bool | None, "whether embedding and output share their weights"] = None
    cells: Annotated[int | None, UP_TO_A_THOUSAND, "number of cells"] = None
    nodes: Annotated[int | None, Interval(ge=1, le=100), "number of intermediate nodes per cell"] = None
    stem_multiplier: Annotated[int | None, UP_TO_A_THOUSAND, "channels of the stem as a multiple of the cells'"] = None
    affine: Annotated[bool | None, "whether batch norms have scale and shift"] = None
    modules: Annotated[int | None, Interval(ge=1, le=100), "number of modules per block to choose from"] = None
    lora: LoraConfig = field(default_factory=LoraConfig)
    build: Annotated[str | None, ComponentName("network"), "module: the function that builds the network"] = None
    weights: Annotated[
        str | None,
        PATH,
        "module, lora: a .safetensors file, or an index of several, that replaces the network's own values",
    ] = None
    weights_names: Annotated[
        dict[str, str] | None, "prefixes of names in that file, and the network's prefixes that replace them"
    ] = None
    options: Annotated[dict[str, Any], "options of a user's space or network, by name"] = field(default_factory=dict)


def stored_space(values: Mapping[str, Any]) -> SpaceConfig:
    """The configuration from plain values, as a run stores them; those of runs from before adapters have none."""
    return SpaceConfig(**{**values, "lora": LoraConfig(**values.get("lora", {}))})


def weight_files(file: Path) -> list[str]:
    """The names of the files beside `space.weights` that hold its tensors: its own, or those that it, an index, lists.

    An index is JSON as Hugging Face writes it. Raises OSError, ValueError, KeyError, TypeError or AttributeError for
    another file that ends in .json.
    """
    if file.suffix != ".json":
        return [file.name]
    return sorted(set(json.loads(file.read_text())["weight_map"].values()))


SpaceBuilder = Callable[..., SearchSpace]
"""Builds a space from a configuration (and options by keyword)."""

_NOT_OF_DESIGNS = ("name", "options", "lora")


def from_design(make: Callable[[Any], SearchSpace], default: Any, config: SpaceConfig) -> SearchSpace:
    """The space of a design with the configuration's overrides.

    Raises ValueError for a value that the design does not have, listing the ones it has.
    """
    known = [f.name for f in fields(default)]
    changes: dict[str, Any] = {}
    for each in fields(config):
        value = getattr(config, each.name)
        if each.name in _NOT_OF_DESIGNS or value is None:
            continue
        if each.name not in known:
            allowed = ", ".join(name for name in known if name != "name")
            raise ValueError(f"space {config.name} has no {each.name}; it has {allowed}: leave it out, or give null")
        changes[each.name] = tuple(value) if isinstance(value, list) else value
    return make(replace(default, **changes))


Spaces = Mapping[str, SpaceBuilder]
"""The spaces of a module, by name."""


def spaces_of(make: Callable[[Any], SearchSpace], *designs: Any) -> Spaces:
    """The builders of several designs' spaces, each made by `make`, by the designs' names."""
    return {design.name: partial(from_design, make, design) for design in designs}
