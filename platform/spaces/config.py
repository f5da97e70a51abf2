"""What a run's configuration says about its search space."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class SpaceConfig:
    """A named search space and what to change of it; None keeps the space's own value.

    `name` is one of `fedloom.platform.spaces.registry.SPACES` or `package.module:function`, a function of this
    configuration that returns a search space; `options` are free values for such a function. What the values mean is
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
