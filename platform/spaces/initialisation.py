"""Initial tensors of a module, drawn only from a given generator."""

import math
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

TensorsByName = dict[str, Tensor]


@runtime_checkable
class InitialisesItself(Protocol):
    """A module that initialises its own tensors (such as a hand-written cell)."""

    def initialise_own(self, tensors_by_name: Mapping[str, Tensor], generator: torch.Generator) -> None:
        """Fills the module's own tensors, given by their local names, in place."""
        ...


@runtime_checkable
class DrawsRandomly(Protocol):
    """A module whose forward pass draws random numbers, also in evaluation mode."""

    draws_randomly: bool


def draws_randomly(part: nn.Module) -> bool:
    """Whether a module's forward pass draws from torch's global generator: dropout, also in layers, `DrawsRandomly`."""
    if isinstance(part, nn.RNNBase | nn.MultiheadAttention):
        return part.dropout > 0
    drawing = nn.modules.dropout._DropoutNd | nn.RReLU | nn.FractionalMaxPool2d | nn.FractionalMaxPool3d
    return isinstance(part, drawing | DrawsRandomly)


def is_of_others(part: nn.Module) -> bool:
    """Whether a module's class is neither torch's nor fedloom's: its forward pass may call whatever draws randomly."""
    return type(part).__module__.partition(".")[0] not in ("torch", "fedloom")


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """The module on the meta device: only names and shapes, without memory, values or random draws."""
    with torch.device("meta"):
        return build()


def blank(build: Callable[[], nn.Module]) -> nn.Module:
    """The module on the current default device, every floating tensor filled with NaN where there are values.

    Weights are always loaded afterwards; with NaN, a forgotten load cannot look like a result.
    Raises ValueError for a buffer that is not part of the state dict, because nothing would load its value.
    """
    module, device = on_meta(build), torch.get_default_device()
    state = module.state_dict(keep_vars=True)
    lost = next((name for name, _ in module.named_buffers() if name not in state), None)
    if lost is not None:
        raise ValueError(
            f"buffer {lost} is not persistent, so that its value would be lost: compute it in `forward`, or register "
            "it with persistent=True and fill it in `initialise_own(tensors_by_name, generator)`"
        )
    if device.type == "meta":
        return module
    with torch.no_grad():
        for tensor in emptied(module, device).state_dict(keep_vars=True).values():
            tensor.fill_(math.nan if tensor.is_floating_point() else 0)
    return module


def emptied(module: nn.Module, device: torch.device | str) -> nn.Module:
    """Moves a module from the meta device, with arbitrary values, like its `to_empty`.

    `to_empty` calls `torch.empty_like` on meta tensors, for which torch loads sympy, which takes half a second.
    """
    module._apply(lambda t: torch.empty(t.shape, dtype=t.dtype, device=device))  # type: ignore[no-untyped-call]
    return module


def initialise(module: nn.Module, generator: torch.Generator) -> TensorsByName:
    """Initial CPU values of every parameter and buffer of `module` (which may be on the meta device).

    They are drawn in the order of the state dict. Convolutions: normal of He et al. (2015), fan-out, biases zero.
    Norms: ones and zeros. Linear and recurrent layers: PyTorch's uniform +-1/sqrt(fan). Embeddings: standard normal.

    Raises:
        ValueError: a kind of module with tensors that is not listed here, or a tensor shared by two modules.
    """
    weights: TensorsByName = {}
    for prefix, part in module.named_modules():
        state = part.state_dict(keep_vars=True)
        own_tensors = {n: torch.empty(t.shape, dtype=t.dtype, device="cpu") for n, t in state.items() if "." not in n}
        if own_tensors:
            if isinstance(part, InitialisesItself):
                part.initialise_own(own_tensors, generator)
            else:
                _fill(part, own_tensors, generator)
            weights.update({f"{prefix}.{name}" if prefix else name: t for name, t in own_tensors.items()})
    missing = module.state_dict().keys() - weights.keys()
    if missing:
        raise ValueError(f"tensors shared between modules are not supported: {', '.join(sorted(missing))}")
    return weights


def _fill(part: nn.Module, tensors: TensorsByName, generator: torch.Generator) -> None:
    match part:
        case nn.Conv1d() | nn.Conv2d() | nn.Conv3d():
            for name, tensor in tensors.items():
                if name == "weight":
                    nn.init.kaiming_normal_(tensor, mode="fan_out", nonlinearity="relu", generator=generator)
                else:
                    tensor.zero_()
        case nn.BatchNorm1d() | nn.BatchNorm2d() | nn.BatchNorm3d() | nn.GroupNorm() | nn.LayerNorm():
            for name, tensor in tensors.items():
                tensor.fill_(1 if name in {"weight", "running_var"} else 0)
        case nn.Linear():
            fill_uniform(tensors, tensors["weight"].shape[1], generator)
        case nn.Embedding():
            tensors["weight"].normal_(generator=generator)
        case nn.LSTM() | nn.GRU() | nn.RNN():
            # weight_hh_l0 is (gates * hidden, hidden): PyTorch's bound is 1/sqrt(hidden).
            fill_uniform(tensors, tensors["weight_hh_l0"].shape[1], generator)
        case _:
            raise ValueError(f"no initial values are known for {type(part).__name__}: give it a method initialise_own")


def fill_uniform(tensors: Mapping[str, Tensor], fan: int, generator: torch.Generator) -> None:
    """Fills the tensors, one after the other, with values uniform in +-1/sqrt(fan)."""
    bound = 1 / math.sqrt(max(fan, 1))
    for tensor in tensors.values():
        tensor.uniform_(-bound, bound, generator=generator)


class UniformConvolution(nn.Conv2d):
    """A convolution that starts as torch initialises it (kaiming_uniform with a = sqrt(5))."""

    def initialise_own(self, tensors_by_name: Mapping[str, Tensor], generator: torch.Generator) -> None:
        """Weights and biases uniform in +-1/sqrt(fan-in)."""
        fill_uniform(tensors_by_name, math.prod(tensors_by_name["weight"].shape[1:]), generator)
