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

AUTOCAST = {"bfloat16": torch.bfloat16}
"""The types of precisions that torch casts to; in the others tensors are float32 throughout."""
GPU = "cuda:0"
"""The GPU of a process that has one; Ray shows an actor no other."""
WORKSPACE = ":4096:8"
"""What cuBLAS needs for the same bits every time; torch reads it from the environment once, at its first use."""


def set_up_process(precision: str, *, deterministic: bool) -> None:
    """Sets what is kept per process: TF32 on GPUs, which torch itself allows to convolutions, algorithms, and malloc.

    The last worker that is made in a process decides. On processors TF32 does not exist, and nothing changes.
    """
    keep_freed_memory()
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    if torch.get_deterministic_debug_mode() != (2 if deterministic else 0):
        torch.use_deterministic_algorithms(deterministic)  # loads torch's compiler, for a second
    # Filling every new tensor with NaN would only show reads of values that nobody wrote.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


KEPT_BYTES = 2**28
"""The most freed memory that a process keeps for its next step."""
LARGEST_KEPT_BYTES = 2**25
"""Larger tensors are returned to the system when they are freed; more than this is not allowed to be kept."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Makes glibc's malloc keep what a training step frees; without glibc nothing happens.

    By default it returns most of a step's activations to the system and asks for them again in the next step, and the
    page faults of a small network take a sixth of its training.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)


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
            # Inputs by name, of which a network of one's own may take several, are left as they are.
            module.register_forward_pre_hook(lambda _, inputs: inputs and (self.laid_out(inputs[0]), *inputs[1:]))
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


COMPILER: Mapping[str, str | int | bool | Callable[..., Any]] = {"deterministic": True, "shape_padding": False}
"""What torch's compiler may not do: choose by timing what changes rounding. Older versions lack the first option."""


def compiled(module: nn.Module, x_B: Tensor) -> Callable[[Tensor], Tensor]:
    """The forward pass of a module in training, compiled for batches of exactly this shape and type.

    It is tried in a step on zeros, which changes the module's gradients and running statistics. Raises a RuntimeError,
    as torch's compiler does, for a module that cannot be compiled as a whole. Other shapes are left to the caller: a
    graph for several of them would depend on which of them came first, and its rounding on the order of clients.
    """

    def forward(x: Tensor) -> Tensor:
        outputs: Tensor = module(x)
        return outputs

    # Torch counts graphs by code, and compiles at most eight of the same code.
    of_its_own = FunctionType(forward.__code__.replace(), forward.__globals__, closure=forward.__closure__)
    options = {name: value for name, value in COMPILER.items() if name in torch._inductor.list_options()}
    step = torch.compile(of_its_own, fullgraph=True, dynamic=False, options=options)
    step(torch.zeros_like(x_B)).sum().backward()

    def of_this_shape(x: Tensor) -> Tensor:
        outputs: Tensor = step(x.contiguous()) if x.shape == x_B.shape else module(x)
        return outputs

    return of_this_shape


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
    """What the bits of results on a GPU depend on besides torch's version."""

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
    """The process's device fails, and with it all its further work: another process has to repeat the work."""


CONTEXT_BYTES = 600_000_000
"""The most that a process's CUDA context is taken for; about 500 MB with cuBLAS and cuDNN."""


def context_bytes() -> int:
    """Bytes of the GPU that this process takes besides its tensors, once the device has been used.

    CUDA does not tell processes apart: exact while no other uses the GPU, else at most `CONTEXT_BYTES`.
    """
    # Also for deterministic runs that come later in this process.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACE)
    ones = torch.ones((8, 8), device=GPU)
    torch.mm(ones, ones)  # loads cuBLAS
    free, total = torch.cuda.mem_get_info(0)
    return min(CONTEXT_BYTES, total - free - torch.cuda.memory_reserved(0))


def memory_of(device: str, gpu_share: float) -> int:
    """Bytes of the GPU's memory that are this process's for tensors, without its CUDA context; 0 for the CPU.

    Raises ValueError for a share that the context takes.
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
"""What torch's, cuBLAS's and cuDNN's errors of too little memory say; only torch's own have a class."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU's memory, or a process's share of it, did not suffice."""
    text = " ".join(map(str, error.args)) if isinstance(error, RuntimeError) else ""
    is_gpus = "CUDA" in text or "CUBLAS" in text or "CUDNN" in text
    return isinstance(error, torch.OutOfMemoryError) or (is_gpus and any(words in text for words in _NO_MEMORY))


def check_device(error: BaseException) -> None:
    """Raises DeviceLostError for an error after which a process cannot use its device any more, or one caused by it.

    Such are CUDA's errors (a failed assertion, an illegal address, ECC); too little memory is not among them.
    """
    cause: BaseException | None = error
    while cause is not None:
        text = " ".join(map(str, cause.args))  # a user's exception may fail to say what it is
        # torch before 2.8 has no AcceleratorError and raises a RuntimeError with the same text.
        sticks = type(cause).__name__ == "AcceleratorError" or text.startswith("CUDA error:")
        if isinstance(cause, RuntimeError) and sticks and not is_out_of_memory(cause):
            raise DeviceLostError(f"{type(cause).__name__}: {next(iter(text.splitlines()), '')}") from error
        cause = cause.__cause__
