"""Shapes found without torch's compiler are torch's own, and so are the multiply-accumulates."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fedloom.tiers.measure import macs_of
from fedloom.tiers.shapes import _ELEMENTWISE, SHAPES, ShapesOnly

aten = torch.ops.aten
SIZES = st.integers(1, 4)


def alike(func: Any, *args: Any, **named: Any) -> None:
    """The operator's outputs have torch's shapes and types."""
    expected, found = func(*args, **named), SHAPES[func](*args, **named)
    pairs = zip(expected, found, strict=True) if isinstance(expected, tuple) else [(expected, found)]
    for one, other in list(pairs)[:1]:  # the statistics of norms are not used
        assert (one.shape, one.dtype, one.device.type) == (other.shape, other.dtype, other.device.type)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@settings(max_examples=50, deadline=None)
@given(st.lists(SIZES, min_size=1, max_size=4), st.data())
def test_shapes_are_those_of_torch(shape: list[int], data: st.DataObject) -> None:
    dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])
    x = meta(*shape, dtype=data.draw(dtypes))
    other = [data.draw(st.sampled_from([n, 1])) for n in shape[data.draw(st.integers(0, len(shape))) :]]
    y = meta(*other, dtype=data.draw(dtypes))
    for func in (aten.add.Tensor, aten.mul.Tensor):
        alike(func, x, y)
        alike(func, x, 2.0)
    alike(aten.mul.Scalar, x, 2.0)
    for name in _ELEMENTWISE:
        alike(getattr(aten, name).default, x)
        alike(getattr(aten, f"{name}_").default, x)
    joined = data.draw(st.integers(-len(shape), len(shape) - 1))
    longer = list(shape)
    longer[joined] += 1
    alike(aten.cat.default, [x, meta(*longer, dtype=x.dtype)], joined)
    gone = data.draw(st.lists(st.integers(0, len(shape) - 1), unique=True))
    alike(aten.mean.dim, x, gone, data.draw(st.booleans()))


def test_layers_have_the_shapes_of_torch() -> None:
    weight = meta(4)
    alike(aten.native_batch_norm.default, meta(2, 4, 3, 3), weight, weight, weight, weight, False, 0.1, 1e-5)
    alike(aten.native_group_norm.default, meta(2, 4, 3, 3), weight, weight, 2, 4, 9, 2, 1e-5)
    alike(aten.native_layer_norm.default, meta(2, 3, 4), [4], weight, weight, 1e-5)
    alike(aten.addmm.default, meta(5), meta(2, 3), meta(3, 5))
    alike(aten.bmm.default, meta(6, 2, 3), meta(6, 3, 5))
    mask = meta(3, 3, dtype=torch.bool)
    alike(aten.tril.default, mask)
    alike(aten.where.self, mask, meta(), meta(2, 1, 3, dtype=torch.float64))
    alike(aten._safe_softmax.default, meta(2, 3, 3), -1)


@pytest.mark.parametrize(
    "options",
    [([3, 3],), ([2],), ([3, 2], [2, 1]), ([3], [2], [1]), ([3, 3], [], [1, 0]), ([2], [2], [0], False, False)],
)
def test_pools_have_the_shapes_of_torch(options: tuple[Any, ...]) -> None:
    alike(aten.avg_pool2d.default, meta(2, 4, 9, 8), *options)
    alike(aten.zeros_like.default, meta(2, 4), dtype=torch.float64)
    with ShapesOnly():
        assert nn.functional.avg_pool2d(meta(1, 1, 5, 5), 2, 2, ceil_mode=True).shape == (1, 1, 3, 3)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 2), st.integers(1, 2), st.booleans(), st.integers(1, 2))
def test_convolutions_have_the_shapes_of_torch(
    kernel: int, stride: int, padding: int, dilation: int, transposed: bool, dimensions: int
) -> None:
    each = [[n] * dimensions for n in (stride, padding, dilation)]
    x, weight = meta(2, 4, *[7] * dimensions), meta(4, 4, *[kernel] * dimensions)
    alike(aten.convolution.default, x, weight, None, *each, transposed, [0] * dimensions, 1)


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (
            lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(True), nn.Flatten(), nn.LazyLinear(5)),
            8,
        ),
        (lambda: nn.Sequential(nn.Conv2d(3, 6, 3, groups=3), nn.GroupNorm(2, 6), nn.Hardswish(), nn.MaxPool2d(2)), 9),
        (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), None),
        (lambda: nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4), nn.GELU(), nn.Softmax(-1)), None),
    ],
)
def test_multiply_accumulates_are_those_of_torch(build: Callable[[], nn.Module], shape: int | None) -> None:
    module = build().eval()
    x = torch.zeros(1, 7, 8) if shape is None else torch.zeros(1, 3, shape, shape)
    with torch.no_grad():
        module(x)  # lazy layers
        counter = FlopCounterMode(display=False)
        with counter:
            module.to("meta")(x.to("meta"))
    assert macs_of(module, x.to("meta")) == counter.get_total_flops() // 2


def test_outside_the_meta_device_nothing_changes() -> None:
    x, y = torch.arange(6.0).reshape(2, 3) - 3, torch.ones(3)
    expected = [x + y, x * y, torch.relu(x), torch.cat([x, x]), x.mean(1)]
    with ShapesOnly():
        found = [x + y, x * y, torch.relu(x), torch.cat([x, x]), x.mean(1)]
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_runs_are_prepared_and_begun_without_the_compiler() -> None:
    code = """
import sys
from fedloom.experiments.runs.configuration import compose_config
from fedloom.platform.averaging.average import WeightedSums
from fedloom.platform.clients.execution import SharedWeights, run_assignment
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.world import build_world
from fedloom.platform.federation.algorithm import RunState
from fedloom.platform.methods.registry import build_stages

for experiment in sys.argv[1:]:
    world = build_world(compose_config([f"experiment={experiment}", "tiers.paths=10", "executor.kind=serial"]))
    stage = build_stages(world)[0]
    state = stage.begin(RunState())
    plan = stage.plan(state)
    weights = SharedWeights(state.groups[plan.group].tensors, "v0")
    client = next(a for a in plan.assignments if a.client_id is not None)
    report = run_assignment(Worker(world.spec), client, weights, WeightedSums())
    loaded = sorted({"torch._dynamo", "torch._inductor", "sympy", "pymoo"} & set(sys.modules))
    print(experiment, report.status, loaded)
"""
    experiments = ["fedoras_digits", "superfednas_vit_digits", "spider_digits"]
    done = subprocess.run([sys.executable, "-c", code, *experiments], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{experiment} ok []" for experiment in experiments]
