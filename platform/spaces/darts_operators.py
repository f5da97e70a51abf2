"""The operators of DARTS cells (Liu et al. 2019) and of the spaces of RobustDARTS (Zela et al. 2020), by name.

Each maps (N, c, H, W) to (N, c, H/stride, W/stride) with a stride of 1 or 2. No operator changes its input, because all
edges from a node read the same tensor; what several of them would compute of it, a `State` computes once. Norms have no
scale and shift during a search (`affine`).
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional


def strided(x_NCHW: Tensor, stride: int) -> Tensor:
    """A view of every stride-th row and column."""
    return x_NCHW if stride == 1 else x_NCHW[:, :, ::stride, ::stride]


class ReluFirst(nn.Module, ABC):
    """A module that begins with a ReLU, which all that read the same tensor may share: `after_relu(relu(x))`."""

    relu: nn.Module

    @abstractmethod
    def after_relu(self, x: Tensor) -> Tensor:
        """What comes after the ReLU."""

    def forward(self, x: Tensor) -> Tensor:
        return self.after_relu(self.relu(x))


class State:
    """A tensor that many modules read, and its ReLU, computed once for all of them and only if one needs it."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    @cached_property
    def positive(self) -> Tensor:
        """The tensor's ReLU."""
        return torch.relu(self.x)

    def through(self, module: nn.Module) -> Tensor:
        """A module's output; where costs are counted, on the meta device, every module does all of its own work."""
        if isinstance(module, ReluFirst) and not self.x.is_meta:
            return module.after_relu(self.positive)
        y: Tensor = module(self.x)
        return y


class ReluConvNorm(ReluFirst):
    """ReLU, 1x1 convolution, BatchNorm: (N, c_in, H, W) -> (N, c_out, H, W)."""

    def __init__(self, in_channels: int, out_channels: int, affine: bool) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.conv = nn.Conv2d(in_channels, out_channels, 1, bias=False)
        self.norm = nn.BatchNorm2d(out_channels, affine=affine)

    def after_relu(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.conv(x))
        return y


class FactorisedReduction(ReluFirst):
    """Halves the sides without losing a pixel: (N, c_in, H, W) -> (N, c_out, H/2, W/2), H, W and c_out even.

    ReLU, two 1x1 convolutions of stride 2 to half the channels each, the second shifted by one pixel, BatchNorm.
    """

    def __init__(self, in_channels: int, out_channels: int, affine: bool) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.even = nn.Conv2d(in_channels, out_channels // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(in_channels, out_channels // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(out_channels, affine=affine)

    def after_relu(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self._halves(x) if x.is_meta else self._halved(x))
        return y

    def _halves(self, x: Tensor) -> Tensor:
        return torch.cat([self.even(x), self.odd(x[:, :, 1:, 1:])], dim=1)

    def _halved(self, x: Tensor) -> Tensor:
        """Both convolutions as one of 2x2 pixels with zeros: four times faster, because the image is passed once."""
        even, odd = functional.pad(self.even.weight, (0, 1, 0, 1)), functional.pad(self.odd.weight, (1, 0, 1, 0))
        return functional.conv2d(x, torch.cat([even, odd]), stride=2)


class ReluSequence(nn.Sequential, ReluFirst):
    """Modules one after the other, the first of which is a ReLU."""

    def after_relu(self, x: Tensor) -> Tensor:
        for part in itertools.islice(self, 1, None):
            x = part(x)
        return x


class Zero(nn.Module):
    """No connection: zeros, through which no gradient flows back."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(strided(x, self.stride))


class Noise(nn.Module):
    """Standard normal noise independent of the input, in training and in evaluation (space S4 of Zela et al. 2020).

    It is drawn from torch's global generator, like dropout.
    """

    draws_randomly = True

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        return torch.randn_like(strided(x, self.stride))


def _depthwise(
    channels: int, kernel: int, stride: int, dilation: int, affine: bool, *, first: bool = True
) -> list[nn.Module]:
    padding = dilation * (kernel - 1) // 2
    return [
        nn.ReLU(inplace=not first),
        nn.Conv2d(channels, channels, kernel, stride, padding, dilation, groups=channels, bias=False),
        nn.Conv2d(channels, channels, 1, bias=False),
        nn.BatchNorm2d(channels, affine=affine),
    ]


def _separable(kernel: int) -> "Build":
    """Twice ReLU, depthwise, 1x1, BatchNorm; the first depthwise convolution has the stride."""
    return lambda c, stride, affine: ReluSequence(
        *_depthwise(c, kernel, stride, 1, affine), *_depthwise(c, kernel, 1, 1, affine, first=False)
    )


def _dilated(kernel: int) -> "Build":
    """ReLU, depthwise with dilation 2, 1x1, BatchNorm."""
    return lambda c, stride, affine: ReluSequence(*_depthwise(c, kernel, stride, 2, affine))


def _max_pool(channels: int, stride: int, affine: bool) -> nn.Module:
    return nn.Sequential(nn.MaxPool2d(3, stride, padding=1), nn.BatchNorm2d(channels, affine=affine))


def _average_pool(channels: int, stride: int, affine: bool) -> nn.Module:
    pool = nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)
    return nn.Sequential(pool, nn.BatchNorm2d(channels, affine=affine))


def _skip(channels: int, stride: int, affine: bool) -> nn.Module:
    return nn.Identity() if stride == 1 else FactorisedReduction(channels, channels, affine)


Build = Callable[[int, int, bool], nn.Module]
"""An operator's module, from channels, stride and affine."""

OPERATORS: Mapping[str, Build] = MappingProxyType(
    {
        "none": lambda _c, stride, _affine: Zero(stride),
        "noise": lambda _c, stride, _affine: Noise(stride),
        "max_pool_3x3": _max_pool,
        "avg_pool_3x3": _average_pool,
        "skip_connect": _skip,
        "sep_conv_3x3": _separable(3),
        "sep_conv_5x5": _separable(5),
        "dil_conv_3x3": _dilated(3),
        "dil_conv_5x5": _dilated(5),
    }
)
"""The operators by their names in the papers."""
