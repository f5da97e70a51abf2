"""Precision and memory format of a worker's networks."""

import resource
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fedloom.platform.averaging.average import WeightedSums
from fedloom.platform.clients.device import AUTOCAST, Kernels, set_up_process
from fedloom.platform.clients.execution import SharedWeights, run_assignment
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.algorithm import RunState
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.world import build_world
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.spaces.space_config import SpaceConfig

CPU = torch.device("cpu")


class Looks(nn.Module):
    """Notes the dtype and the memory format in which its convolution computes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor, option: int = 0) -> torch.Tensor:
        y: torch.Tensor = self.conv(x)
        self.seen.append((y.dtype, y.is_contiguous(memory_format=torch.channels_last), option))
        return y.mean((2, 3))


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
def test_a_network_computes_as_asked_and_its_tensors_stay_float32(precision: str, channels_last: bool) -> None:
    module = Looks()
    assert Kernels(precision, channels_last).prepared(module, CPU) is module
    y = module(torch.randn(2, 3, 8, 8), option=5)
    y.sum().backward()
    assert module.seen == [(AUTOCAST.get(precision, torch.float32), channels_last, 5)]
    weight = module.conv.weight
    assert (y.dtype, weight.dtype) == (torch.float32, torch.float32)
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    assert weight.is_contiguous(memory_format=torch.channels_last) == channels_last


class Named(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return {"logits": y, "parts": [y, y.argmax(1)]}


def test_outputs_by_name_are_float32_too() -> None:
    outputs = Kernels("bfloat16").prepared(Named(4, 2), CPU)(torch.ones(3, 4))
    parts = outputs["parts"]
    assert (outputs["logits"].dtype, parts[0].dtype, parts[1].dtype) == (torch.float32, torch.float32, torch.int64)


def test_texts_have_no_channels() -> None:
    module = Kernels(channels_last=True).prepared(nn.Embedding(5, 2), CPU)
    assert module(torch.tensor([[1, 2]])).shape == (1, 2, 2)


@pytest.fixture
def sums_of(tiny_config: Callable[..., RunConfig]) -> Callable[..., tuple[Worker, WeightedSums]]:
    """The worker and the sums of one client's training under `executor` settings."""

    def train(**executor: Any) -> tuple[Worker, WeightedSums]:
        config = tiny_config()
        world = build_world(replace(config, executor=replace(config.executor, **executor)))
        stage = build_stages(world)[0]
        state = stage.begin(RunState())
        plan = stage.plan(state)
        worker, sums = Worker(world.spec), WeightedSums()
        report = run_assignment(worker, plan.assignments[0], SharedWeights(state.weights(plan.group), "v"), sums)
        assert report.status == "ok", report.traceback
        return worker, sums

    return train


def test_the_space_decides_and_the_configuration_may_overrule_it(sums_of: Any) -> None:
    for wanted, last in (("auto", True), ("contiguous", False), ("channels_last", True)):
        worker, sums = sums_of(memory_format=wanted)
        assert worker.space.channels_last
        assert worker.kernels.channels_last == last
        kernels = [t for t in worker.tensors_of(worker.supernet).values() if t.dim() == 4 and t.shape[1] > 1]
        assert kernels
        assert all(t.is_contiguous(memory_format=torch.channels_last) for t in kernels) is last
        assert all(s.total.is_contiguous() for s in sums.tensors.values()), "what travels is in one format"


@pytest.mark.parametrize("channels", [4, 8])
@pytest.mark.parametrize("capability", ["AVX2", "AVX512"])
def test_no_network_that_would_write_beyond_memory_is_channels_last(
    tiny_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, channels: int, capability: str
) -> None:
    space = SpaceConfig("resnet18_modular_small", stem_channels=channels)
    worker = Worker(replace(build_world(tiny_config()).spec, space=space))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert worker.kernels.channels_last == (capability == "AVX512" or channels == 8)


def test_formats_differ_by_rounding_and_precisions_by_more(sums_of: Any) -> None:
    totals = {
        name: {n: s.total for n, s in sums_of(**executor)[1].tensors.items()}
        for name, executor in {
            "plain": {"memory_format": "contiguous"},
            "last": {"memory_format": "channels_last"},
            "tf32": {"memory_format": "contiguous", "precision": "tf32"},
            "half": {"memory_format": "contiguous", "precision": "bfloat16"},
        }.items()
    }
    for name, total in totals["plain"].items():
        torch.testing.assert_close(totals["last"][name], total, rtol=1e-3, atol=1e-2, msg=name)
        assert totals["half"][name].dtype == total.dtype
        assert torch.equal(totals["tf32"][name], total), "processors have no TF32"
    assert any(not torch.equal(totals["half"][n], t) for n, t in totals["plain"].items())


def test_strided_depthwise_convolutions_stay_float32_on_processors() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, 2, groups=4), nn.Conv2d(4, 4, 3, groups=4))
    seen: list[torch.dtype] = []
    for layer in network:
        layer.register_forward_hook(lambda _layer, _inputs, y: seen.append(y.dtype))
    Kernels("bfloat16").prepared(network, torch.device("cpu"))(torch.ones(1, 3, 9, 9))
    assert seen == [torch.bfloat16, torch.float32, torch.bfloat16]


@pytest.fixture
def as_before() -> Iterator[None]:
    """Leaves the process as other tests expect it."""
    yield
    set_up_process("float32", deterministic=False)


@pytest.mark.usefixtures("as_before")
def test_a_worker_sets_up_its_process(sums_of: Any) -> None:
    assert not torch.are_deterministic_algorithms_enabled()
    plain = sums_of()[1]
    assert not torch.backends.cudnn.allow_tf32, "float32 is float32 in convolutions, too"
    exact = sums_of(deterministic=True, precision="tf32")[1]
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.allow_tf32
    assert torch.backends.cuda.matmul.allow_tf32
    assert all(torch.equal(s.total, plain.tensors[n].total) for n, s in exact.tensors.items())
    sums_of()
    assert not torch.are_deterministic_algorithms_enabled(), "the last worker decides"


def test_a_process_keeps_the_memory_that_a_step_frees() -> None:
    set_up_process("float32", deterministic=False)

    def page_faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        activations = [torch.ones(2_500_000) for _ in range(10)]  # 100 MB
        del activations
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    page_faults()
    # In the memory of a process that has run other tests one of the ten may find no room, and begin anew.
    assert page_faults() < 6000, "100 MB have 24 000 pages"
