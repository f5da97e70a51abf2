"""What a run's configuration says about its search space."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class SpaceConfig:
    """A named search space and what to change of it; None keeps the space's own value.

    `name` is one of `fedloom.platform.spaces.registry.SPACES` or `package.module:function`, a function of this
    configuration that returns a search space; `options` are free values for such a function.
    """

    name: str = "cnn_digits"
    num_classes: int = 10
    input_shape: list[int] | None = None
    stem_channels: int | None = None
    stage_layers: list[int] | None = None
    stage_strides: list[int] | None = None
    depthwise_link: bool | None = None
    operators: list[str] | None = None
    options: dict[str, Any] = field(default_factory=dict)
