"""How a process computes on its device: precision, memory format, torch's algorithms, peak memory, lost devices."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import PackedSequence

from fedloom.platform.data.trees import mapped_within
from fedloom.platform.spaces.initialisation import on_meta

AUTOCAST = {"bfloat16": torch.bfloat16}
"""The dtypes of the precisions that use autocast; in all other precisions tensors are float32 throughout."""
GPU = "cuda:0"
"""The GPU of a process that has one; Ray makes only one GPU visible to an actor."""
WORKSPACE = ":4096:8"
"""The workspace setting with which cuBLAS is deterministic; torch reads it from the environment once, at first use."""


def set_up_process(precision: str, *, deterministic: bool) -> None:
    """Sets what is global to the process: TF32 on GPUs, deterministic algorithms, and the memory that malloc keeps.

    The last worker that is created in a process decides. By default torch allows TF32 for convolutions. CPUs have no
    TF32, so nothing changes there.
    """
    keep_freed_memory()
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    if torch.get_deterministic_debug_mode() != (2 if deterministic else 0):
        torch.use_deterministic_algorithms(deterministic)  # only if needed: it loads torch's compiler for a second
    # Filling every new tensor with NaN would only reveal reads of uninitialised memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


KEPT_BYTES = 2**28
"""The most freed memory that a process keeps for its next step."""
LARGEST_KEPT_BYTES = 2**25
"""Tensors larger than this are returned to the system when they are freed; glibc allows no higher threshold."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Makes glibc's malloc keep the memory that a training step frees; does nothing without glibc.

    By default malloc returns most of a step's activations to the system and requests them again in the next step. The
    page faults then take a sixth of a small network's training time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)


def overflows_channels_last(build: Callable[[], nn.Module]) -> bool:
    """Whether training the network that this builds with channels last would write beyond memory on this CPU.

    With AVX2 alone, oneDNN does so in the gradient of strided 1x1 convolutions of fewer than eight channels
    (https://github.com/uxlfoundation/oneDNN/issues/6035).
    """
    return torch.backends.cpu.get_cpu_capability() == "AVX2" and any(
        isinstance(part, nn.Conv2d)
        and part.in_channels // part.groups < 8
        and part.kernel_size == (1, 1)
        and part.stride != (1, 1)
        for part in on_meta(build).modules()
    )


@dataclass(frozen=True)
class Kernels:
    """How networks compute: plain data, and part of a run's identity, because rounding depends on it.

    Attributes:
        precision: of convolutions and matrix products; weights, gradients, the optimiser's state, losses and averages
            are always float32. `bfloat16` is torch's autocast, `tf32` is set by `set_up_process`.
        channels_last: whether images and convolution kernels are stored with the channels last.
    """

    precision: str = "float32"
    channels_last: bool = False

    def prepared(self, module: nn.Module, device: torch.device) -> nn.Module:
        """Moves the module to the device and makes it compute in this precision and format; outputs are float32.

        All of its layers are in training mode, in whatever mode they were built: if a frozen body were still in
        evaluation mode, it would train otherwise after the first evaluation.
        """
        module = module.to(device)
        module.train()
        if self.channels_last:
            module = module.to(memory_format=torch.channels_last)
            # Named inputs, of which a user's own network may take several, are left as they are.
            module.register_forward_pre_hook(lambda _, inputs: inputs and (self.laid_out(inputs[0]), *inputs[1:]))
        if self.precision in AUTOCAST:
            module.forward = _in_precision(module.forward, device, self.precision)
            for part in module.modules():
                if _is_slow(part) if device.type == "cpu" else isinstance(part, nn.RNNBase):  # see `in_float32`
                    part.forward = _in_float32(part.forward, device)
        return module

    def laid_out(self, x: Any) -> Any:
        """A batch of images in this memory format, else `x` unchanged; call it once for networks that share a batch."""
        if self.channels_last and isinstance(x, Tensor) and x.dim() == 4:
            return x.contiguous(memory_format=torch.channels_last)
        return x

    def functional(self, module: nn.Module, device: torch.device) -> Callable[[Mapping[str, Tensor], Tensor], Tensor]:
        """The module's forward pass as a function of its tensors and a batch, in this precision; outputs are float32.

        It uses the contiguous format, the only one that torch's vectorised functions support.
        """

        def forward(tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
            outputs: Tensor = functional_call(module, dict(tensors), (x,))
            return outputs

        return _in_precision(forward, device, self.precision) if self.precision in AUTOCAST else forward


COMPILER: Mapping[str, str | int | bool | Callable[..., Any]] = {"deterministic": True, "shape_padding": False}
"""Options that keep torch's compiler from choosing by timing, which changes rounding; older versions lack the first."""


def compiled(module: nn.Module, x_B: Tensor) -> Callable[[Tensor], Tensor]:
    """The forward pass of a module in training, compiled for batches of exactly this shape and type.

    A trial step on zeros changes the module's gradients and running statistics. Raises a RuntimeError, as torch's
    compiler does, for a module that cannot be compiled as a whole. Batches of other shapes run uncompiled: a graph for
    several shapes would depend on which came first, and its rounding on the order of clients.
    """

    def forward(x: Tensor) -> Tensor:
        outputs: Tensor = module(x)
        return outputs

    # Torch counts graphs per code object and compiles at most eight for each, so every module gets its own copy.
    of_its_own = FunctionType(forward.__code__.replace(), forward.__globals__, closure=forward.__closure__)
    options = {name: value for name, value in COMPILER.items() if name in torch._inductor.list_options()}
    step = torch.compile(of_its_own, fullgraph=True, dynamic=False, options=options)
    step(torch.zeros_like(x_B)).sum().backward()

    def of_this_shape(x: Tensor) -> Tensor:
        outputs: Tensor = step(x.contiguous()) if x.shape == x_B.shape else module(x)
        return outputs

    return of_this_shape


def _is_slow(part: nn.Module) -> bool:
    """Whether it is a grouped convolution with a stride, whose low-precision gradient is five times slower on CPUs."""
    return isinstance(part, nn.Conv2d) and part.groups > 1 and max(part.stride) > 1


def _in_float32(forward: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    def as_float32(given: Any) -> Any:
        if isinstance(given, PackedSequence):
            return given.float()
        return mapped_within(lambda each: each.float() if each.is_floating_point() else each, given)

    def cast(*inputs: Any, **options: Any) -> Any:
        with torch.autocast(device.type, enabled=False):
            return forward(*map(as_float32, inputs), **{name: as_float32(given) for name, given in options.items()})

    return cast


def _in_precision(forward: Callable[..., Any], device: torch.device, precision: str) -> Callable[..., Any]:
    dtype = AUTOCAST[precision]

    def cast(*inputs: Any, **options: Any) -> Any:
        with torch.autocast(device.type, dtype):
            outputs = forward(*inputs, **options)
        return mapped_within(lambda each: each.float() if each.is_floating_point() else each, outputs)

    return cast


@cache
def _proc(name: str, flags: int, pid: int) -> int | None:
    """The descriptor of a file of /proc, opened once: opening it per client costs more than reading it."""
    try:
        return os.open(f"/proc/{pid}/{name}", flags)
    except OSError:
        return None


def reset_peak_memory(device: torch.device) -> None:
    """Starts a new measurement; on the CPU it resets Linux's high-water mark of the resident set.

    Without permission to reset it, the measurement is the process's peak so far, an upper bound.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    clear = _proc("clear_refs", os.O_WRONLY, os.getpid())
    if clear is not None:
        os.pwrite(clear, b"5", 0)


def peak_memory_bytes(device: torch.device) -> int:
    """Peak bytes since the last reset: allocated device memory on a GPU, the process's resident set on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    file = _proc("status", os.O_RDONLY, os.getpid())
    if file is None:
        return 0
    status = os.pread(file, 4096, 0)
    at = status.find(b"VmHWM:")
    return int(status[at + 6 : status.find(b"kB", at)]) * 1024 if at >= 0 else 0


DRIVER_FILE = "/proc/driver/nvidia/version"


@dataclass(frozen=True)
class Gpu:
    """The GPU and its software, on which the bits of results depend besides torch's version."""

    model: str
    driver: str
    cuda: str | None
    cudnn: int | None

    def __str__(self) -> str:
        return f"{self.model}, driver {self.driver}, CUDA {self.cuda}, cuDNN {self.cudnn}"


@cache
def gpu_of(device: str) -> Gpu | None:
    """The GPU of a device of this process; None for the CPU."""
    if torch.device(device).type != "cuda":
        return None
    try:
        text = Path(DRIVER_FILE).read_text()
    except OSError:
        text = ""
    driver = re.search(r"\b\d+\.\d[\d.]*", text)  # ... Kernel Module  550.54.15  Fri ...
    cudnn: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    name = torch.cuda.get_device_name(device)
    return Gpu(name, driver[0] if driver else "unknown", torch.version.cuda, cudnn)


class DeviceLostError(RuntimeError):
    """The process's device has failed and cannot be used any more: another process has to repeat the work."""


CONTEXT_BYTES = 600_000_000
"""The upper bound assumed for a process's CUDA context, which takes about 500 MB with cuBLAS and cuDNN."""


def context_bytes() -> int:
    """Bytes of GPU memory that this process takes besides its tensors, once it has used the device.

    CUDA reports no memory per process: exact while no other process uses the GPU, else at most `CONTEXT_BYTES`.
    """
    # Set here for deterministic runs later in this process, because torch reads it only once.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACE)
    ones = torch.ones((8, 8), device=GPU)
    torch.mm(ones, ones)  # loads cuBLAS
    free, total = torch.cuda.mem_get_info(0)
    return min(CONTEXT_BYTES, total - free - torch.cuda.memory_reserved(0))


def memory_of(device: str, gpu_share: float) -> int:
    """Bytes of GPU memory that this process may use for tensors, without its CUDA context; 0 for the CPU.

    Raises ValueError if the context takes the whole share.
    """
    if device == "cpu":
        return 0
    context = context_bytes()
    left = int(min(1.0, gpu_share) * torch.cuda.get_device_properties(0).total_memory) - context
    if left <= 0:
        raise ValueError(
            f"tiers.num_gpus={gpu_share:g} of this GPU is less than CUDA takes ({context:,} bytes): raise it"
        )
    return left


_NO_MEMORY = ("out of memory", "ALLOC_FAILED", "ALLOCATION_FAILED")
"""Texts in the out-of-memory errors of torch, cuBLAS and cuDNN; only torch's own has an exception class."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that a GPU's memory, or the process's share of it, was exhausted."""
    text = " ".join(map(str, error.args)) if isinstance(error, RuntimeError) else ""
    is_gpus = "CUDA" in text or "CUBLAS" in text or "CUDNN" in text
    return isinstance(error, torch.OutOfMemoryError) or (is_gpus and any(words in text for words in _NO_MEMORY))


def check_device(error: BaseException) -> None:
    """Raises DeviceLostError if the error, or one that caused it, leaves the process unable to use its device.

    CUDA's errors do so (a failed assertion, an illegal address, ECC), except for those of too little memory.
    """
    cause: BaseException | None = error
    while cause is not None:
        text = " ".join(map(str, cause.args))  # not str(cause), which may fail for a user's exception
        # torch before 2.8 has no AcceleratorError and raises a RuntimeError with the same text.
        sticks = type(cause).__name__ == "AcceleratorError" or text.startswith("CUDA error:")
        if isinstance(cause, RuntimeError) and sticks and not is_out_of_memory(cause):
            raise DeviceLostError(f"{type(cause).__name__}: {next(iter(text.splitlines()), '')}") from error
        cause = cause.__cause__
