"""Costs of single modules on one sample."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedloom.platform.spaces.initialisation import emptied, initialise, on_meta
from fedloom.platform.spaces.slices import bytes_of
from fedloom.tiers.measure import MEASURES, activation_bytes_of, latency_s_of, macs_of, parameters_of

Measure = Callable[[nn.Module, Tensor], float]
"""Returns the cost of a module on one sample."""


def measure_of(measure: str) -> tuple[Measure, str]:
    """The function of a measure, and the device that it needs; ValueError for an unknown measure."""
    match measure:
        case "macs":
            return macs_of, "meta"
        case "parameters":
            return lambda module, _x: parameters_of(module), "meta"
        case "bytes":
            return lambda module, _x: bytes_of(module.state_dict()), "meta"
        case "activation_bytes":
            return activation_bytes_of, "meta"
        case "latency_s":
            return median_seconds(), "cpu"
    raise ValueError(f"unknown measure {measure!r}: known are {', '.join(MEASURES)}, bytes")


def median_seconds(warmup: int = 3, repeats: int = 20) -> Measure:
    """The measure of the median latency in seconds."""
    return lambda module, x: latency_s_of(module, x, warmup=warmup, repeats=repeats).median_s


def cost_of(
    build: Callable[[], nn.Module],
    input_shape: tuple[int, ...],
    of: Measure,
    device: str,
    input_dtype: torch.dtype = torch.float32,
) -> float:
    """A module's cost on an input of zeros; the global generators' states do not change."""
    place = torch.device(device)
    with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []):
        return float(of(ready(build, device), torch.zeros(input_shape, device=place, dtype=input_dtype)))


def zeros_on(device: str, x: Tensor) -> Tensor:
    """Zeros of the shape and type of a tensor of the meta device."""
    return x if device == "meta" else torch.zeros(x.shape, dtype=x.dtype, device=device)


def ready(build: Callable[[], nn.Module], device: str) -> nn.Module:
    """A module for measurement; initialised unless on the meta device, because kernels may be slower with NaN."""
    module = on_meta(build).eval()
    if device == "meta":
        return module
    weights = initialise(module, torch.Generator().manual_seed(0))
    emptied(module, device).load_state_dict(weights)
    return module
