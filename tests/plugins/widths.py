"""A space of one decision: how many hidden units of a perceptron a client holds, the first ones of the supernet's."""

from math import prod
from typing import Annotated

from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.platform.settings import ONE_OR_MORE
from fedloom.platform.spaces.base import SearchSpace
from fedloom.platform.spaces.slices import Architecture
from fedloom.platform.spaces.space_config import SpaceConfig


class Perceptron(nn.Module):
    """The supernet, or a subnet of its own: the same module with fewer units."""

    def __init__(self, inputs: int, widths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.widths = widths
        self.hidden, self.logits = nn.Linear(inputs, max(widths)), nn.Linear(max(widths), classes)

    def forward(self, x: Tensor, architecture: Architecture = (-1,)) -> Tensor:
        width = self.widths[architecture[0]]
        units = F.linear(x.flatten(1), self.hidden.weight[:width], self.hidden.bias[:width]).relu()
        return F.linear(units, self.logits.weight[:, :width], self.logits.bias)


class Widths(SearchSpace):
    """What is sent, averaged and counted is worked out from the two networks' tensors."""

    name = "widths"

    def __init__(self, config: SpaceConfig, widths: tuple[int, ...]) -> None:
        self.input_shape = tuple(config.input_shape or (1, 8, 8))
        self.options = (len(widths),)
        self.widths, self.classes = widths, config.num_classes

    def build_supernet(self) -> Perceptron:
        return Perceptron(prod(self.input_shape), self.widths, self.classes)

    def build_subnet(self, architecture: Architecture) -> Perceptron:
        width = self.widths[architecture[0]]
        return Perceptron(prod(self.input_shape), (width,), self.classes)


def widths(
    config: SpaceConfig,
    *,
    least: Annotated[int, ONE_OR_MORE, "hidden units of the smallest subnet"] = 16,
    doublings: Annotated[int, ONE_OR_MORE, "wider subnets, each of twice the units of the one before"] = 3,
) -> Widths:
    """16, 32, 64 or 128 hidden units, unless told otherwise."""
    return Widths(config, tuple(least * 2**k for k in range(doublings + 1)))
