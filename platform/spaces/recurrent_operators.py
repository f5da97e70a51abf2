"""The operators of FedorAS' recurrent space: (N, T, inputs) -> (N, T, units), none of which looks ahead.

`lstm`, `gru`, `ligru`, `qrnn`, `linear`, `conv(k)`, `identity`, `zero`; without normalisation (FedorAS, App. E.3).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.platform.spaces.through_time import GruSteps, LiGruSteps, Mixing, ligru_steps, mixed


class _Gated(nn.Module):
    """Weights and biases of several gates side by side, for the inputs and for the state before, as torch's."""

    gates: ClassVar[int]

    def __init__(self, inputs: int, units: int, *, biased: bool = True, recurrent: bool = True) -> None:
        super().__init__()
        rows, self.units = self.gates * units, units
        self.weight_input = nn.Parameter(torch.empty(rows, inputs))
        self.weight_hidden = nn.Parameter(torch.empty(rows, units)) if recurrent else None
        self.bias_input = nn.Parameter(torch.empty(rows)) if biased else None
        self.bias_hidden = nn.Parameter(torch.empty(rows)) if biased and recurrent else None

    def initialise_own(self, tensors_by_name: Mapping[str, Tensor], generator: torch.Generator) -> None:
        """Uniform in +-1/sqrt(units), as torch's recurrent layers."""
        bound = 1 / math.sqrt(self.units)
        for tensor in tensors_by_name.values():
            tensor.uniform_(-bound, bound, generator=generator)

    def _inputs(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight_input, self.bias_input)

    def _as_torch(self, x: Tensor) -> tuple[Tensor, list[Any]]:
        """Zeros to start from, and the weights, as torch's functions take them."""
        weights = [self.weight_input, self.weight_hidden, self.bias_input, self.bias_hidden]
        return x.new_zeros((1, x.shape[0], self.units)), weights


class Lstm(_Gated):
    """Torch's LSTM of one layer, gates in the order i, f, g, o; on processors oneDNN's."""

    gates = 4

    def forward(self, x: Tensor) -> Tensor:
        start, weights = self._as_torch(x)
        y: Tensor = torch.lstm(x, (start, start), weights, True, 1, 0.0, self.training, False, True)[0]
        return y


class Gru(_Gated):
    """Torch's GRU of one layer, gates in the order r, z, n; on processors with steps of our own."""

    gates = 3

    def forward(self, x: Tensor) -> Tensor:
        if not _on_processor(x):
            start, weights = self._as_torch(x)
            y: Tensor = torch.gru(x, start, weights, True, 1, 0.0, self.training, False, True)[0]
            return y
        return _over_time(GruSteps.apply, self._inputs(x), self.weight_hidden, self.bias_hidden)


class LiGru(_Gated):
    """A light GRU with tanh and without biases, gates in the order z, c (Ravanelli et al. 2018)."""

    gates = 2

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__(inputs, units, biased=False)

    def forward(self, x: Tensor) -> Tensor:
        steps = LiGruSteps.apply if _on_processor(x) else ligru_steps
        return _over_time(steps, self._inputs(x), self.weight_hidden)


class QuasiRnn(_Gated):
    """A quasi-recurrent layer of window 1 with output gates, in the order z, f, o (Bradbury et al. 2017, Eq. 4)."""

    gates = 3

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__(inputs, units, recurrent=False)

    def forward(self, x: Tensor) -> Tensor:
        new, forget, out = self._inputs(x).chunk(3, dim=2)
        steps = Mixing.apply if _on_processor(x) else mixed
        return out.sigmoid() * _over_time(steps, new.tanh(), forget.sigmoid(), over=2)


def _on_processor(x: Tensor) -> bool:
    """Whether gradients of our own are of use: not where a graph is exported or only shapes are wanted."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def _over_time(steps: Callable[..., Any], *tensors: Any, over: int = 1) -> Tensor:
    """A recurrence, in float32 where the network is in half precision; the first `over` tensors are (N, T, ...)."""
    device = "cuda" if tensors[0].is_cuda else "cpu"
    with torch.autocast(device, enabled=False):
        given = [t.float() if t.dtype in (torch.bfloat16, torch.float16) else t for t in tensors]
        given[:over] = [t.transpose(0, 1).contiguous() for t in given[:over]]
        states: Tensor = steps(*given)
    return states.transpose(0, 1)


class SigmoidLinear(nn.Linear):
    """A linear layer of every position, and a sigmoid."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sigmoid()


class CausalConvolution(nn.Conv1d):
    """A convolution over a position and those before it, and a sigmoid."""

    def __init__(self, kernel: int, inputs: int, units: int) -> None:
        super().__init__(inputs, units, kernel)

    def initialise_own(self, tensors_by_name: Mapping[str, Tensor], generator: torch.Generator) -> None:
        """Uniform in +-1/sqrt(fan-in), as torch's; no rectifier follows."""
        bound = 1 / math.sqrt(self.in_channels * self.kernel_size[0])
        for tensor in tensors_by_name.values():
            tensor.uniform_(-bound, bound, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        before = F.pad(x.transpose(1, 2), (self.kernel_size[0] - 1, 0))
        return super().forward(before).sigmoid().transpose(1, 2)


class Zero(nn.Module):
    """Zeros: a skip connection that is not there."""

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        del inputs
        self.units = units

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros((*x.shape[:2], self.units))


Build = Callable[[int, int], nn.Module]
"""Makes an operator's module from the numbers of its inputs and units."""

_NAMED: Mapping[str, Build] = {
    "lstm": Lstm,
    "gru": Gru,
    "ligru": LiGru,
    "qrnn": QuasiRnn,
    "linear": SigmoidLinear,
    "identity": lambda _inputs, _units: nn.Identity(),
    "zero": Zero,
}


def build_of(operator: str) -> Build:
    """What makes the operator of this name; ValueError for any other than the known ones."""
    match = re.fullmatch(r"conv\((\d+)\)", operator)
    if match is not None and 1 <= int(match[1]) <= 1000:
        return partial(CausalConvolution, int(match[1]))
    if operator not in _NAMED:
        raise ValueError(f"unknown operator {operator!r}: known are {', '.join(_NAMED)}, conv(k) with k of 1 to 1000")
    return _NAMED[operator]
