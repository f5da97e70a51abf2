"""The convolutional operators of FedorAS: `conv(k)`, `ds(k,e)`, `mb(k,e)`, `identity`.

They preserve the shape (c channels in and out, "same" padding). Every convolution is followed by BatchNorm and ReLU,
except for the two of squeeze-and-excitation, which have biases instead (FedorAS, App. E.3).
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Operator:
    """An operator that preserves the shape: `build(channels)` makes its module."""

    name: str
    build: Callable[[int], nn.Module]


class ConvNormRelu(nn.Module):
    """Convolution without bias, BatchNorm, ReLU: (N, c_in, H, W) -> (N, c_out, H', W')."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel: int, *, stride: int = 1, padding: int = 0, groups: int = 1
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel, stride, padding, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)), inplace=True)


class SqueezeExcitation(nn.Module):
    """Scales each channel by a gate in (0, 1) computed from the global averages, without a bottleneck."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(channels, channels, 1)
        self.excite = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate: Tensor = self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1))))
        return x * gate.sigmoid()


class Residual(nn.Module):
    """The input plus the output of the parts in sequence."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for part in self.parts:
            y = part(y)
        return x + y


def _build_conv(kernel: int, channels: int) -> nn.Module:
    return ConvNormRelu(channels, channels, kernel, padding=kernel // 2)


def _build_ds(kernel: int, expansion: float, channels: int) -> nn.Module:
    middle = _expanded(f"ds({kernel},{expansion:g})", channels, expansion)
    groups = min(channels, middle)
    if channels % groups or middle % groups:
        raise ValueError(
            f"ds({kernel},{expansion:g}) cannot group {channels} channels into {middle}: one must divide the other"
        )
    return Residual(
        ConvNormRelu(channels, middle, kernel, padding=kernel // 2, groups=groups), ConvNormRelu(middle, channels, 1)
    )


def _build_mb(kernel: int, expansion: float, channels: int) -> nn.Module:
    middle = _expanded(f"mb({kernel},{expansion:g})", channels, expansion)
    return Residual(
        ConvNormRelu(channels, middle, kernel, padding=kernel // 2),
        SqueezeExcitation(middle),
        ConvNormRelu(middle, channels, 1),
    )


def _build_identity(_channels: int) -> nn.Module:
    return nn.Identity()


def _expanded(name: str, channels: int, expansion: float) -> int:
    middle = math.floor(channels * expansion)
    if middle < 1:
        raise ValueError(f"{name} leaves no channel of {channels}: use a larger expansion or more channels")
    return middle


def conv(kernel: int) -> Operator:
    """k x k convolution, c -> c."""
    return Operator(f"conv({_odd(kernel)})", partial(_build_conv, kernel))


def ds(kernel: int, expansion: float) -> Operator:
    """Input + [k x k convolution in min(c, m) groups, c -> m; 1 x 1 convolution, m -> c], m = floor(c * expansion)."""
    name = f"ds({_odd(kernel)},{_positive(expansion):g})"
    return Operator(name, partial(_build_ds, kernel, expansion))


def mb(kernel: int, expansion: float) -> Operator:
    """Input + [dense k x k convolution, c -> m; squeeze-and-excitation; 1 x 1 convolution, m -> c], m = floor(c*e)."""
    name = f"mb({_odd(kernel)},{_positive(expansion):g})"
    return Operator(name, partial(_build_mb, kernel, expansion))


def identity() -> Operator:
    """The input: no parameters, no cost."""
    return Operator("identity", _build_identity)


def _odd(kernel: int) -> int:
    if kernel < 1 or kernel % 2 == 0:
        raise ValueError(f"a kernel must be odd and positive to keep the shape, given {kernel}")
    return kernel


def _positive(expansion: float) -> float:
    if not 0 < expansion < math.inf:
        raise ValueError(f"an expansion must be positive, given {expansion}")
    return expansion


_FORMS = "conv(k), ds(k,e), mb(k,e), identity"
_SPELLING = re.compile(r"(conv|ds|mb|identity)(?:\(([^()]*)\))?")


def parse_operator(text: str) -> Operator:
    """Parses an operator as written in the configuration: `conv(1)`, `ds(3,.5)`, `mb(1,2)`, `identity`.

    Raises:
        ValueError: any other spelling.
    """
    match = _SPELLING.fullmatch(text.replace(" ", ""))
    if match is None:
        raise ValueError(f"unknown operator {text!r}: known are {_FORMS}")
    kind, inside = match.groups()
    numbers = [] if inside is None else inside.split(",")
    try:
        match (kind, numbers):
            case ("conv", [kernel]):
                return conv(int(kernel))
            case ("ds", [kernel, expansion]):
                return ds(int(kernel), float(expansion))
            case ("mb", [kernel, expansion]):
                return mb(int(kernel), float(expansion))
            case ("identity", []):
                return identity()
    except ValueError as error:
        raise ValueError(f"operator {text!r}: {error}") from error
    raise ValueError(f"operator {text!r} has the wrong numbers: known are {_FORMS}")
