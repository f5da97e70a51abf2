"""Measures the cost of a module on an input: multiply-accumulates, parameters, activation memory and latency."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

if TYPE_CHECKING:
    from fedloom.tiers.shapes import ShapesOnly

MEASURES: Final = {"macs": "sum", "parameters": "sum", "activation_bytes": "max", "latency_s": "sum"}
"""The measures of cost tables and how the costs of parts are joined (`CostTable.reduce`)."""

COUNTED_AS_MACS: Final = "convolutions and matrix products only (no norms, activations, pooling, additions)"
"""The operations whose multiply-accumulates count, as in `torch.utils.flop_counter`."""


@dataclass(frozen=True)
class Latency:
    """Seconds of one forward pass: the median and the interquartile range over the repeats."""

    median_s: float
    spread_s: float
    repeats: int


@contextmanager
def _evaluation_mode(module: nn.Module) -> Iterator[None]:
    flags = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in flags:
            part.training = training


def shapes_only() -> "ShapesOnly":
    """A context manager in which operators on the meta device give shapes, without loading torch's compiler."""
    # Imported here, because clients measure nothing and do not need what it loads.
    from fedloom.tiers.shapes import ShapesOnly

    return ShapesOnly()


def one_of(x: Any, device: str) -> Any:
    """The first sample of a batch of one or several tensors."""
    return {name: t[:1].to(device) for name, t in x.items()} if isinstance(x, Mapping) else x[:1].to(device)


def _forward_on_meta(module: nn.Module, x: Any) -> int:
    """Runs a forward pass on the meta device and returns its multiply-accumulates."""
    # Only shapes are needed: meta tensors do no arithmetic, and the module's own tensors and buffers stay unchanged.
    tensors = {name: t.to("meta") for name, t in chain(module.named_parameters(), module.named_buffers())}
    shapes = shapes_only()
    with torch.no_grad(), _evaluation_mode(module):
        try:
            with shapes:
                functional_call(module, tensors, (one_of(x, "meta"),))
        except RuntimeError:
            if next(iter(tensors.values())).is_meta and next(module.parameters()).is_meta:
                raise
            # The module depends on values: it runs for real, by operators that are counted, not by fused ones.
            shapes.macs = 0
            with shapes, sdpa_kernel(SDPBackend.MATH), _without_fused_layers():
                module(one_of(x, "cpu"))
    return shapes.macs


@contextmanager
def _without_fused_layers() -> Iterator[None]:
    """Without torch's operators for whole layers: the fast path of encoders and attention, and oneDNN's LSTM."""
    before = torch.backends.mha.get_fastpath_enabled(), torch.backends.mkldnn.enabled
    torch.backends.mha.set_fastpath_enabled(False)
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before[0])
        torch.backends.mkldnn.enabled = before[1]


def macs_of(module: nn.Module, x: Any) -> int:
    """Multiply-accumulates of one forward pass of one sample (the first of the batch `x`, a tensor or several by name).

    Only convolutions and matrix products count, as in `torch.utils.flop_counter`; normalisation, activation, pooling
    and additions count 0.
    """
    return _forward_on_meta(module, x)


def parameters_of(module: nn.Module) -> int:
    """Number of trainable scalars; a shared tensor counts once."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(item)


def activation_bytes_of(module: nn.Module, x: Any) -> int:
    """Peak activation memory of one forward pass of one sample (the first of the batch `x`), in bytes.

    It is the maximum, over all leaf modules (those without children), of the bytes of the distinct tensors among the
    leaf's inputs and outputs: the memory of the largest step if every tensor is freed as early as possible.
    Tensors that are held for a residual link are not counted, so that the peak of a path is the maximum over its parts.
    """
    peak_bytes = 0

    def see(_leaf: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal peak_bytes
        distinct = {id(t): t.numel() * t.element_size() for t in chain(_tensors_in(inputs), _tensors_in(output))}
        peak_bytes = max(peak_bytes, sum(distinct.values()))

    leaves = [part for part in module.modules() if next(part.children(), None) is None]
    hooks = [leaf.register_forward_hook(see) for leaf in leaves]
    try:
        _forward_on_meta(module, x)
    finally:
        for hook in hooks:
            hook.remove()
    return peak_bytes


def latency_s_of(module: nn.Module, x: Any, *, warmup: int = 3, repeats: int = 20) -> Latency:
    """Measures the seconds of one forward pass on the batch `x` (a tensor or several by name), on their device.

    The module runs in evaluation mode without gradients; the first `warmup` passes are discarded.

    Raises:
        ValueError: `repeats` is below 1 or `warmup` is negative.
    """
    if repeats < 1 or warmup < 0:
        raise ValueError(f"a latency needs repeats >= 1 and warmup >= 0, given repeats={repeats}, warmup={warmup}")

    device = next(_tensors_in(x)).device

    def now_s() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    samples_s = []
    with torch.no_grad(), _evaluation_mode(module):
        for _ in range(warmup + repeats):
            start_s = now_s()
            module(x)
            samples_s.append(now_s() - start_s)
    low, median, high = np.percentile(samples_s[warmup:], [25, 50, 75])
    return Latency(float(median), float(high - low), repeats)
