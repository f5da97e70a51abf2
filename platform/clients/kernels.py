"""How networks compute on a worker: precision, memory format of images, and torch's choice of algorithms."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

AUTOCAST = {"bfloat16": torch.bfloat16}
"""The types of precisions that torch casts to; in the others tensors are float32 throughout."""
WORKSPACE = ":4096:8"
"""What cuBLAS needs for the same bits every time; it reads it from the environment when it is first used."""


def set_up_process(precision: str, *, deterministic: bool) -> None:
    """Sets what torch keeps per process: TF32 on GPUs, which torch itself allows to convolutions, and algorithms.

    The last worker that is made in a process decides. On processors TF32 does not exist, and nothing changes.
    """
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACE)
    if torch.get_deterministic_debug_mode() != (2 if deterministic else 0):
        torch.use_deterministic_algorithms(deterministic)  # loads torch's compiler, for a second
    # Filling every new tensor with NaN would only show reads of values that nobody wrote.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Kernels:
    """Plain data: part of what a run is, because rounding depends on it.

    Attributes:
        precision: that of convolutions and matrix products; weights, gradients, the optimiser's state, losses and
            averages are float32 in any case. `bfloat16` is torch's autocast, `tf32` is up to `set_up_process`.
        channels_last: whether images and the kernels of convolutions are stored with the channels last.
    """

    precision: str = "float32"
    channels_last: bool = False

    def prepared(self, module: nn.Module, device: torch.device) -> nn.Module:
        """The module on the device, computing this way whenever it is called; its output is float32."""
        module = module.to(device)
        if self.channels_last:
            module = module.to(memory_format=torch.channels_last)
            module.register_forward_pre_hook(lambda _, inputs: (self.laid_out(inputs[0]), *inputs[1:]))
        if self.precision in AUTOCAST:
            module.forward = _in_precision(module.forward, device, self.precision)
            for part in module.modules() if device.type == "cpu" else ():
                if _is_slow(part):
                    part.forward = _in_float32(part.forward, device)
        return module

    def laid_out(self, x: Any) -> Any:
        """A batch of images as networks take it, or anything else as it is: once, where several networks share it."""
        if self.channels_last and isinstance(x, Tensor) and x.dim() == 4:
            return x.contiguous(memory_format=torch.channels_last)
        return x

    def functional(self, module: nn.Module, device: torch.device) -> Callable[[Mapping[str, Tensor], Tensor], Tensor]:
        """The forward pass of a module with tensors of any values, in this precision; its output is float32.

        It computes in the contiguous format, the only one of torch's vectorised functions.
        """

        def forward(tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
            outputs: Tensor = functional_call(module, dict(tensors), (x,))
            return outputs

        return _in_precision(forward, device, self.precision) if self.precision in AUTOCAST else forward


def _is_slow(part: nn.Module) -> bool:
    """Whether it is a grouped convolution with a stride: processors' gradients of these take five times longer."""
    return isinstance(part, nn.Conv2d) and part.groups > 1 and max(part.stride) > 1


def _in_float32(forward: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    def cast(x: Tensor) -> Any:
        with torch.autocast(device.type, enabled=False):
            return forward(x.float())

    return cast


def _in_precision(forward: Callable[..., Any], device: torch.device, precision: str) -> Callable[..., Any]:
    dtype = AUTOCAST[precision]

    def cast(*inputs: Any, **options: Any) -> Any:
        with torch.autocast(device.type, dtype):
            outputs = forward(*inputs, **options)
        return outputs.float() if isinstance(outputs, Tensor) else outputs

    return cast
