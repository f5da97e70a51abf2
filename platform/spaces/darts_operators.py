"""The operators of DARTS cells (Liu et al. 2019) and of the spaces of RobustDARTS (Zela et al. 2020), by name.

Each maps (N, c, H, W) to (N, c, H/stride, W/stride) with a stride of 1 or 2. No operator works in place, because all
edges from a node read the same tensor. Norms have no scale and shift during a search (`affine`).
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn


def strided(x_NCHW: Tensor, stride: int) -> Tensor:
    """A view of every stride-th row and column."""
    return x_NCHW if stride == 1 else x_NCHW[:, :, ::stride, ::stride]


class ReluConvNorm(nn.Module):
    """ReLU, 1x1 convolution, BatchNorm: (N, c_in, H, W) -> (N, c_out, H, W)."""

    def __init__(self, in_channels: int, out_channels: int, affine: bool) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.conv = nn.Conv2d(in_channels, out_channels, 1, bias=False)
        self.norm = nn.BatchNorm2d(out_channels, affine=affine)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.conv(self.relu(x)))
        return y


class FactorisedReduction(nn.Module):
    """Halves the sides without losing a pixel: (N, c_in, H, W) -> (N, c_out, H/2, W/2), H, W and c_out even.

    ReLU, two 1x1 convolutions of stride 2 to half the channels each, the second shifted by one pixel, BatchNorm.
    """

    def __init__(self, in_channels: int, out_channels: int, affine: bool) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.even = nn.Conv2d(in_channels, out_channels // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(in_channels, out_channels // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(out_channels, affine=affine)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(x)
        y: Tensor = self.norm(torch.cat([self.even(x), self.odd(x[:, :, 1:, 1:])], dim=1))
        return y


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


def _depthwise(channels: int, kernel: int, stride: int, dilation: int, affine: bool) -> list[nn.Module]:
    padding = dilation * (kernel - 1) // 2
    return [
        nn.ReLU(),
        nn.Conv2d(channels, channels, kernel, stride, padding, dilation, groups=channels, bias=False),
        nn.Conv2d(channels, channels, 1, bias=False),
        nn.BatchNorm2d(channels, affine=affine),
    ]


def _separable(kernel: int) -> "Build":
    """Twice ReLU, depthwise, 1x1, BatchNorm; the first depthwise convolution has the stride."""
    return lambda c, stride, affine: nn.Sequential(
        *_depthwise(c, kernel, stride, 1, affine), *_depthwise(c, kernel, 1, 1, affine)
    )


def _dilated(kernel: int) -> "Build":
    """ReLU, depthwise with dilation 2, 1x1, BatchNorm."""
    return lambda c, stride, affine: nn.Sequential(*_depthwise(c, kernel, stride, 2, affine))


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
