"""FedorAS' recurrent search space: two layers and their skip connections, each with a choice of operators."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from fedloom.platform.spaces.base import in_float32
from fedloom.platform.spaces.initialisation import fill_uniform
from fedloom.platform.spaces.operator_choice import Candidate, OperatorChoiceSpace
from fedloom.platform.spaces.space_config import spaces_of

# -- recurrences with hand-written gradients, which take a third of the time of torch's on a CPU ----------------------
# Every step of a recurrence is a few operators on small tensors, whose cost is mostly call overhead. Everything that
# does not depend on the previous step is therefore computed for all steps at once, in the forward and the backward
# pass. Tensors are (T, N, ...), so that a step's values are contiguous. `ligru_steps` and `mixed` compute the same with
# plain operators, for devices and exports that do not support these functions.


def ligru_steps(inputs: Tensor, hidden: Tensor) -> Tensor:
    """The same as `LiGruSteps`, in plain operators."""
    state, states = inputs.new_zeros((inputs.shape[1], hidden.shape[1])), []
    for gates in inputs.unbind(0):
        update, new = torch.addmm(gates, state, hidden.t()).chunk(2, dim=1)
        state = torch.lerp(new.tanh(), state, update.sigmoid())
        states.append(state)
    return torch.stack(states)


def mixed(new: Tensor, forget: Tensor) -> Tensor:
    """The same as `Mixing`, in plain operators."""
    state, states = torch.zeros_like(new[0]), []
    for value, share in zip(new.unbind(0), forget.unbind(0), strict=True):
        state = torch.lerp(value, state, share)
        states.append(state)
    return torch.stack(states)


def _back_through_time(gradient: Tensor, factors: Tensor, kept_share: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Backpropagates through time: the gradients of the states, and of the gates' inputs from the previous state.

    Args:
        gradient: of all states (T, N, H), from outside the recurrence.
        factors: the derivative of each step's state by these inputs of its gates (T, N, G, H).
        kept_share: the share of the previous state that a step keeps (T, N, H).
        hidden: the gates' weights for the previous state (G H, H).

    Returns the states' total gradients (T, N, H) and the gates' (T, N, G H).
    """
    steps, samples, gates, units = factors.shape
    states, of_gates = torch.empty_like(kept_share), torch.empty_like(factors)
    flat = of_gates.view(steps, samples, gates * units)
    before = torch.zeros_like(kept_share[0])
    for t in range(steps - 1, -1, -1):
        state = torch.add(gradient[t], before, out=states[t])
        torch.mul(factors[t], state.unsqueeze(1), out=of_gates[t])
        before = torch.addmm(state * kept_share[t], flat[t], hidden)
    return states, flat


class GruSteps(torch.autograd.Function):
    """h_t = (1 - z) n + z h_{t-1}, n = tanh(x_n + r u_n), as in torch's GRU (gates in the order r, z, n).

    `apply(inputs, hidden, bias)`: the inputs' part of all gates (T, N, 3 H), the weights for the previous state
    (3 H, H) and their bias (3 H,), which give u. Returns all states (T, N, H), starting from a state of zeros.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, hidden: Tensor, bias: Tensor) -> Tensor:
        units, weight = hidden.shape[1], hidden.t().contiguous()
        gates, fed = inputs.clone(), torch.empty_like(inputs)
        states = inputs.new_zeros((len(inputs) + 1, inputs.shape[1], units))
        two, new, fed_new = gates[..., : 2 * units], gates[..., 2 * units :], fed[..., 2 * units :]
        for t in range(len(inputs)):
            torch.addmm(bias, states[t], weight, out=fed[t])
            torch.sigmoid_(two[t].add_(fed[t, :, : 2 * units]))
            torch.tanh_(new[t].addcmul_(two[t, :, :units], fed_new[t]))
            torch.lerp(new[t], states[t], two[t, :, units:], out=states[t + 1])
        ctx.save_for_backward(gates, fed_new.contiguous(), states, hidden)
        return states[1:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gates, fed_new, states, hidden = ctx.saved_tensors
        steps, samples, width = gates.shape
        reset, update, new = gates.view(steps, samples, 3, width // 3).unbind(2)
        of_new = (1 - update) * (1 - new * new)
        of_reset = of_new * fed_new * reset * (1 - reset)
        of_update = (states[:-1] - new) * update * (1 - update)
        factors = torch.stack([of_reset, of_update, of_new * reset], dim=2)
        whole, of_fed = _back_through_time(gradient, factors, update, hidden)
        of_inputs = torch.cat([of_fed[..., : width - width // 3], whole * of_new], dim=2)
        rows = of_fed.flatten(0, 1)
        return of_inputs, rows.t() @ states[:-1].flatten(0, 1), rows.sum(dim=0)


class LiGruSteps(torch.autograd.Function):
    """h_t = (1 - z) c + z h_{t-1}, c = tanh (gates in the order z, c): a light GRU (Ravanelli et al. 2018).

    `apply(inputs, hidden)`: the inputs' part of both gates (T, N, 2 H), and the weights for the previous state
    (2 H, H). Returns all states (T, N, H), starting from a state of zeros.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, hidden: Tensor) -> Tensor:
        units, weight = hidden.shape[1], hidden.t().contiguous()
        gates = torch.empty_like(inputs)
        states = inputs.new_zeros((len(inputs) + 1, inputs.shape[1], units))
        update, new = gates[..., :units], gates[..., units:]
        for t in range(len(inputs)):
            torch.addmm(inputs[t], states[t], weight, out=gates[t])
            torch.sigmoid_(update[t])
            torch.tanh_(new[t])
            torch.lerp(new[t], states[t], update[t], out=states[t + 1])
        ctx.save_for_backward(gates, states, hidden)
        return states[1:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gates, states, hidden = ctx.saved_tensors
        steps, samples, width = gates.shape
        update, new = gates.view(steps, samples, 2, width // 2).unbind(2)
        of_update = (states[:-1] - new) * update * (1 - update)
        factors = torch.stack([of_update, (1 - update) * (1 - new * new)], dim=2)
        _, of_inputs = _back_through_time(gradient, factors, update, hidden)
        return of_inputs, of_inputs.flatten(0, 1).t() @ states[:-1].flatten(0, 1)


class Mixing(torch.autograd.Function):
    """c_t = f_t c_{t-1} + (1 - f_t) z_t: a quasi-recurrent network's pooling (Bradbury et al. 2017, Eq. 3).

    `apply(new, forget)`: z and f (T, N, H). Returns all c, starting from zeros.
    """

    @staticmethod
    def forward(ctx: Any, new: Tensor, forget: Tensor) -> Tensor:
        states = new.new_zeros((len(new) + 1, *new.shape[1:]))
        for t in range(len(new)):
            torch.lerp(new[t], states[t], forget[t], out=states[t + 1])
        ctx.save_for_backward(new, forget, states)
        return states[1:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        new, forget, states = ctx.saved_tensors
        whole = gradient.clone()
        for t in range(len(new) - 2, -1, -1):
            whole[t].addcmul_(whole[t + 1], forget[t + 1])
        return whole * (1 - forget), whole * (states[:-1] - new)


# -- operators: (N, T, inputs) -> (N, T, units), all causal -----------------------------------------------------------
# `lstm`, `gru`, `ligru`, `qrnn`, `linear`, `conv(k)`, `identity`, `zero`; without normalisation (FedorAS, App. E.3).


class _Gated(nn.Module):
    """Stacked weights and biases of several gates, for the inputs and for the previous state, as in torch."""

    gates: ClassVar[int]
    biased: ClassVar[bool] = True
    recurrent: ClassVar[bool] = True

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        rows, self.units = self.gates * units, units
        self.weight_input = nn.Parameter(torch.empty(rows, inputs))
        self.weight_hidden = nn.Parameter(torch.empty(rows, units)) if self.recurrent else None
        self.bias_input = nn.Parameter(torch.empty(rows)) if self.biased else None
        self.bias_hidden = nn.Parameter(torch.empty(rows)) if self.biased and self.recurrent else None

    def initialise_own(self, tensors_by_name: Mapping[str, Tensor], generator: torch.Generator) -> None:
        """Uniform in +-1/sqrt(units), as torch's recurrent layers."""
        fill_uniform(tensors_by_name, self.units, generator)

    def _inputs(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight_input, self.bias_input)

    def _as_torch(self, x: Tensor) -> tuple[Tensor, list[Any]]:
        """A zero initial state and the weights, as torch's functions take them."""
        weights = [self.weight_input, self.weight_hidden, self.bias_input, self.bias_hidden]
        return x.new_zeros((1, x.shape[0], self.units)), weights


class Lstm(_Gated):
    """Torch's LSTM of one layer, gates in the order i, f, g, o; on CPUs oneDNN's."""

    gates = 4

    def forward(self, x: Tensor) -> Tensor:
        def layer(x: Tensor) -> Tensor:
            start, weights = self._as_torch(x)
            y: Tensor = torch.lstm(x, (start, start), weights, True, 1, 0.0, self.training, False, True)[0]
            return y

        return layer(x) if x.device.type == "cpu" else in_float32(layer, x)


class Gru(_Gated):
    """Torch's GRU of one layer, gates in the order r, z, n; on CPUs computed by `GruSteps`."""

    gates = 3

    def forward(self, x: Tensor) -> Tensor:
        if not _on_processor(x):

            def layer(x: Tensor) -> Tensor:
                start, weights = self._as_torch(x)
                y: Tensor = torch.gru(x, start, weights, True, 1, 0.0, self.training, False, True)[0]
                return y

            return layer(x) if x.device.type == "cpu" else in_float32(layer, x)
        return _over_time(GruSteps.apply, self._inputs(x), self.weight_hidden, self.bias_hidden)


class LiGru(_Gated):
    """A light GRU with tanh and without biases, gates in the order z, c (Ravanelli et al. 2018)."""

    gates = 2
    biased = False

    def forward(self, x: Tensor) -> Tensor:
        steps = LiGruSteps.apply if _on_processor(x) else ligru_steps
        return _over_time(steps, self._inputs(x), self.weight_hidden)


class QuasiRnn(_Gated):
    """A quasi-recurrent layer of window 1 with output gates, in the order z, f, o (Bradbury et al. 2017, Eq. 4)."""

    gates = 3
    recurrent = False

    def forward(self, x: Tensor) -> Tensor:
        new, forget, out = self._inputs(x).chunk(3, dim=2)
        steps = Mixing.apply if _on_processor(x) else mixed
        return out.sigmoid() * _over_time(steps, new.tanh(), forget.sigmoid(), over=2)


def _on_processor(x: Tensor) -> bool:
    """Whether to use the hand-written gradients: on a CPU, unless a graph is exported; not on the meta device."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def _over_time(steps: Callable[..., Any], *tensors: Any, over: int = 1) -> Tensor:
    """Runs a recurrence, in float32 if tensors have half precision; the first `over` tensors are (N, T, ...)."""
    device = "cuda" if tensors[0].is_cuda else "cpu"
    with torch.autocast(device, enabled=False):
        transposed = [t.float() if t.dtype in (torch.bfloat16, torch.float16) else t for t in tensors]
        transposed[:over] = [t.transpose(0, 1).contiguous() for t in transposed[:over]]
        states: Tensor = steps(*transposed)
    return states.transpose(0, 1)


class SigmoidLinear(nn.Linear):
    """A linear layer on every position, then a sigmoid."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sigmoid()


class CausalConvolution(nn.Conv1d):
    """A convolution over a position and those before it, then a sigmoid."""

    def __init__(self, kernel: int, inputs: int, units: int) -> None:
        super().__init__(inputs, units, kernel)

    def initialise_own(self, tensors_by_name: Mapping[str, Tensor], generator: torch.Generator) -> None:
        """Uniform in +-1/sqrt(fan-in), as in torch, because no ReLU follows."""
        fill_uniform(tensors_by_name, self.in_channels * self.kernel_size[0], generator)

    def forward(self, x: Tensor) -> Tensor:
        before = F.pad(x.transpose(1, 2), (self.kernel_size[0] - 1, 0))
        return super().forward(before).sigmoid().transpose(1, 2)


class Zero(nn.Module):
    """Returns zeros: no skip connection."""

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
    """The function that builds the operator of this name; ValueError for an unknown name."""
    match = re.fullmatch(r"conv\((\d+)\)", operator)
    if match is not None and 1 <= int(match[1]) <= 1000:
        return partial(CausalConvolution, int(match[1]))
    if operator not in _NAMED:
        raise ValueError(f"unknown operator {operator!r}: known are {', '.join(_NAMED)}, conv(k) with k of 1 to 1000")
    return _NAMED[operator]


# -- networks and the space -------------------------------------------------------------------------------------------

OPERATORS = ("lstm", "gru", "ligru", "qrnn", "linear", "conv(5)", "identity", "zero")
"""In the order of their option indices."""
LAYERS = (("op1", ("identity", "zero")), ("skip1", ("identity",)), ("op2", ("zero",)), ("skip2", ()))
"""The searchable layers and the operators excluded from each; the first two change the number of channels."""


@dataclass(frozen=True)
class RnnDesign:
    """A recurrent network over characters with a choice of operators (FedorAS, App. E.3); `input_shape` is (T,).

    An embedding of `embedding_size`, the layers op1 + skip1 and op2 + skip2 of `channels` units, a linear decoder.
    """

    name: str = "rnn_shakespeare"
    input_shape: tuple[int, ...] = (80,)
    num_classes: int = 90
    embedding_size: int = 8
    channels: int = 128
    operators: tuple[str, ...] = OPERATORS

    def __post_init__(self) -> None:
        if len(self.input_shape) != 1:
            raise ValueError(f"space.input_shape={list(self.input_shape)}: {self.name} takes texts, [T]")
        for name in self.operators:
            build_of(name)
        if len(set(self.operators)) < len(self.operators):
            raise ValueError(f"space.operators={list(self.operators)}: name each operator once")
        if not self.allowed(("identity", "zero")):
            raise ValueError(f"space.operators={list(self.operators)}: add one that changes the number of channels")

    def allowed(self, excluded: Sequence[str]) -> list[str]:
        """The operators without the excluded ones."""
        return [name for name in self.operators if name not in excluded]


class RnnSkeleton(nn.Module):
    """Embedding and decoder: `forward(x_NT, layers)` gives logits (N, vocabulary, T)."""

    def __init__(self, design: RnnDesign) -> None:
        super().__init__()
        self.embedding = nn.Embedding(design.num_classes, design.embedding_size)
        self.decoder = nn.Linear(design.channels, design.num_classes)

    def forward(self, x: Tensor, layers: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
        first, first_skip, second, second_skip = layers
        x = self.embedding(x)
        x = first(x) + first_skip(x)
        x = second(x) + second_skip(x)
        y: Tensor = self.decoder(x).transpose(1, 2)
        return y


def rnn_space(design: RnnDesign) -> OperatorChoiceSpace:
    """The operator-choice space of a design."""

    def candidates(inputs: int, excluded: Sequence[str]) -> list[Candidate]:
        return [Candidate(name, partial(build_of(name), inputs, design.channels)) for name in design.allowed(excluded)]

    widths = (design.embedding_size, design.embedding_size, design.channels, design.channels)
    return OperatorChoiceSpace(
        name=design.name,
        input_shape=design.input_shape,
        input_dtype=torch.int64,
        layers=[candidates(width, excluded) for width, (_, excluded) in zip(widths, LAYERS, strict=True)],
        build_fixed=partial(RnnSkeleton, design),
    )


SPACES = spaces_of(rnn_space, RnnDesign())
