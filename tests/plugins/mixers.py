"""A space of one's own for small images: three layers that each choose how to mix pixels and channels."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated

import torch
from torch import Tensor, nn

from fedloom.platform.settings import ONE_OR_MORE
from fedloom.platform.spaces.operator_choice import Candidate, OperatorChoiceSpace
from fedloom.platform.spaces.space_config import SpaceConfig


class Residual(nn.Module):
    """x + mix(norm(x))."""

    def __init__(self, channels: int, mix: nn.Module) -> None:
        super().__init__()
        self.norm, self.mix = nn.GroupNorm(1, channels), mix

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(self.norm(x))


class Skeleton(nn.Module):
    """A patch embedding, the searched layers, and a classifier."""

    def __init__(self, inputs: int, channels: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(inputs, channels, 2, stride=2)
        self.classifier = nn.Linear(channels, classes)

    def forward(self, x: Tensor, layers: Sequence[object]) -> Tensor:
        x = self.patches(x)
        for layer in layers:
            x = layer(x)
        return self.classifier(torch.relu(x).mean(dim=(2, 3)))


def mixers(
    config: SpaceConfig, *, channels: Annotated[int, ONE_OR_MORE, "channels of every layer"] = 8
) -> OperatorChoiceSpace:
    """Candidates of a layer: a cheap depthwise one, pointwise ones of two widths, a full convolution, and none."""

    def mlp(width: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(channels, width, 1), nn.GELU(), nn.Conv2d(width, channels, 1))

    mixes = {
        "depthwise": partial(nn.Conv2d, channels, channels, 3, padding=1, groups=channels),
        "mlp": partial(mlp, channels),
        "wide_mlp": partial(mlp, 4 * channels),
        "conv": partial(nn.Conv2d, channels, channels, 3, padding=1),
    }
    candidates = [Candidate(name, lambda mix=mix: Residual(channels, mix())) for name, mix in mixes.items()]
    layer = [*candidates, Candidate("identity", nn.Identity)]
    shape = tuple(config.input_shape or (1, 8, 8))
    fixed = partial(Skeleton, shape[0], channels, config.num_classes)
    return OperatorChoiceSpace(name="mixers", input_shape=shape, layers=[layer] * 3, build_fixed=fixed)
