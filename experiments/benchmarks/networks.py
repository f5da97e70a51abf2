"""The networks of the benchmarks, as spaces with one architecture."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fedloom.platform.spaces.operator_choice import Candidate, OperatorChoiceSpace
from fedloom.platform.spaces.space_config import SpaceConfig

Layers = Sequence[Callable[[Tensor], Tensor]]


class TwoConvCnn(nn.Module):
    """The CNN of many papers on federated learning: two 5x5 convolutions (32, 64) with pooling, two linear layers."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 32, 5)
        self.conv2 = nn.Conv2d(32, 64, 5)
        self.hidden = nn.Linear(64 * 25, 512)
        self.classifier = nn.Linear(512, num_classes)

    def forward(self, x: Tensor, layers: Layers) -> Tensor:
        x = torch.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = torch.max_pool2d(torch.relu(self.conv2(layers[0](x))), 2)
        y: Tensor = self.classifier(torch.relu(self.hidden(x.flatten(1))))
        return y


class Logistic(nn.Module):
    """Logistic regression on 3072 inputs."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.classifier = nn.Linear(3072, num_classes)

    def forward(self, x: Tensor, layers: Layers) -> Tensor:
        y: Tensor = self.classifier(layers[0](x.flatten(1)))
        return y


class TinyCnn(nn.Module):
    """Two 3x3 convolutions (8, 16) with pooling and a linear layer, for 8x8 digits."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.classifier = nn.Linear(16 * 4, num_classes)

    def forward(self, x: Tensor, layers: Layers) -> Tensor:
        x = torch.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = torch.max_pool2d(torch.relu(self.conv2(layers[0](x))), 2)
        y: Tensor = self.classifier(x.flatten(1))
        return y


def _space(name: str, build: Callable[[], nn.Module], shape: tuple[int, ...] = (3, 32, 32)) -> OperatorChoiceSpace:
    only = [[Candidate("identity", nn.Identity)]]
    return OperatorChoiceSpace(name=name, input_shape=shape, layers=only, build_fixed=build)


def cnn(config: SpaceConfig) -> OperatorChoiceSpace:
    """The two-convolution CNN as a space."""
    return _space("benchmark_cnn", lambda: TwoConvCnn(config.num_classes))


def logistic(config: SpaceConfig) -> OperatorChoiceSpace:
    """Logistic regression as a space."""
    return _space("benchmark_logistic", lambda: Logistic(config.num_classes))


def tiny(config: SpaceConfig) -> OperatorChoiceSpace:
    """The tiny CNN as a space."""
    return _space("benchmark_tiny", lambda: TinyCnn(config.num_classes), (1, 8, 8))
