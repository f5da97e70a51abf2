"""Forward passes on the meta device, which compute shapes without values, and their multiply-accumulates."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten


def _same(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x.new_empty(x.shape)


def _in_place(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x


def _broadcast(x: Tensor, y: Tensor | float, **_: Any) -> Tensor:
    shape = np.broadcast_shapes(x.shape, y.shape) if isinstance(y, Tensor) else x.shape
    return x.new_empty(shape, dtype=torch.result_type(x, y))


def _joined(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    shape = list(tensors[0].shape)
    shape[dim] = sum(x.shape[dim] for x in tensors)
    return tensors[0].new_empty(shape)


def _mean(x: Tensor, dims: Sequence[int] | None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    gone = {d % x.dim() for d in (dims or range(x.dim()))}
    shape = [1 if d in gone else n for d, n in enumerate(x.shape) if keepdim or d not in gone]
    return x.new_empty(shape, dtype=dtype or x.dtype)


def _linear(_bias: Tensor, x: Tensor, weight: Tensor, **_: Any) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[1]))


def _bmm(x: Tensor, y: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:2], y.shape[2]))


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    stride, padding, dilation, transposed = options[:4]
    if transposed:
        out: Tensor = _aten.convolution.default(x, weight, bias, *options)
        return out
    steps = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    places = [(size + 2 * pad - reach * (kernel - 1) - 1) // step + 1 for size, kernel, step, pad, reach in steps]
    return x.new_empty((x.shape[0], weight.shape[0], *places))


def _pooled(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int] = (), padding: Any = (0,), rounds_up: bool = False, *_: Any
) -> Tensor:
    pairs = [list(value) * (2 // len(value)) for value in (kernel, stride or kernel, padding)]
    places = []
    for size, width, step, pad in zip(x.shape[-2:], *pairs, strict=True):
        places.append((size + 2 * pad - width + (step - 1) * rounds_up) // step + 1)
        if rounds_up and (places[-1] - 1) * step >= size + pad:  # no window begins in the padding on the right
            places[-1] -= 1
    return x.new_empty((*x.shape[:-2], *places))


def _zeros(x: Tensor, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Tensor:
    return torch.zeros(x.shape, dtype=dtype or x.dtype, device=device or x.device)


def _norm(x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    none = x.new_empty(0)
    return x.new_empty(x.shape), none, none


def _group_norm(x: Tensor, _w: Any, _b: Any, n: int, _c: int, _size: int, groups: int, _eps: float) -> Any:
    statistics = x.new_empty((n, groups))
    return x.new_empty(x.shape), statistics, statistics


def _where(mask: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return x.new_empty(np.broadcast_shapes(mask.shape, x.shape, y.shape), dtype=torch.result_type(x, y))


_ELEMENTWISE = ("relu", "sigmoid", "tanh", "gelu", "silu", "hardswish", "hardsigmoid", "hardtanh", "leaky_relu", "elu")

SHAPES: Mapping[Any, Callable[..., Any]] = {
    **dict.fromkeys((getattr(_aten, name).default for name in _ELEMENTWISE), _same),
    **dict.fromkeys((getattr(_aten, f"{name}_").default for name in _ELEMENTWISE), _in_place),
    _aten._safe_softmax.default: _same,
    _aten.add.Tensor: _broadcast,
    _aten.mul.Tensor: _broadcast,
    _aten.mul.Scalar: _broadcast,
    _aten.tril.default: _same,
    _aten.where.self: _where,
    _aten.add_.Tensor: _in_place,
    _aten.mul_.Tensor: _in_place,
    _aten.cat.default: _joined,
    _aten.mean.dim: _mean,
    _aten.addmm.default: _linear,
    _aten.bmm.default: _bmm,
    _aten.convolution.default: _convolution,
    _aten.avg_pool2d.default: _pooled,
    _aten.zeros_like.default: _zeros,
    _aten.native_batch_norm.default: _norm,
    _aten.native_group_norm.default: _group_norm,
    _aten.native_layer_norm.default: _norm,
}
"""Shapes of common operators; torch would load its compiler for them, which takes as long as importing torch.

All other operators are left to torch, with the same result.
"""


def _macs_of_convolution(x: Tensor, weight: Tensor, _bias: Any, *options: Any, out: Tensor) -> int:
    is_transposed = options[3]
    return (x if is_transposed else out).numel() * weight.numel() // weight.shape[0]


MACS: Mapping[Any, Callable[..., int]] = {
    _aten.mm: lambda x, y, **_: x.numel() * y.shape[1],
    _aten.addmm: lambda _bias, x, y, **_: x.numel() * y.shape[1],
    _aten.bmm: lambda x, y, **_: x.numel() * y.shape[2],
    _aten.baddbmm: lambda _bias, x, y, **_: x.numel() * y.shape[2],
    _aten.convolution: _macs_of_convolution,
}
"""The multiply-accumulates of operators, as in `torch.utils.flop_counter`, which loads Triton where it is installed.

Attention is decomposed into these on the meta device, and where fused kernels are forbidden.
"""


class ShapesOnly(TorchDispatchMode):
    """Within the block, operators on tensors of the meta device give shapes; their multiply-accumulates are counted.

    Only convolutions and matrix products count.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.macs: int = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would load the compiler only to tell it to skip this

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Called by torch for every operator."""
        named = kwargs or {}
        x = args[0] if args else None
        first = x[0] if isinstance(x, list | tuple) and x else x
        is_plain = (
            isinstance(first, Tensor) and first.is_meta and (first.is_floating_point() or first.dtype == torch.bool)
        )
        shapes_of = SHAPES.get(func, func) if is_plain else func
        out = shapes_of(*args, **named)
        count = MACS.get(func._overloadpacket)
        if count is not None:
            self.macs += count(*args, out=out)
        return out
