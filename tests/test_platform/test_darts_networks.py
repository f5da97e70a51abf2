"""What networks of DARTS cells compute, against a reference written out with plain functions."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.nn import functional as F

from fedloom.platform.clients.worker import Worker, WorkerSpec
from fedloom.platform.seeding import stream, torch_stream
from fedloom.platform.spaces import darts
from fedloom.platform.spaces.darts import (
    DARTS,
    OPERATORS,
    DartsDesign,
    DartsSpace,
    FactorisedReduction,
    State,
)
from fedloom.platform.spaces.operator_choice import as_subspace
from fedloom.platform.spaces.registry import build_space
from fedloom.platform.spaces.slices import Subspace, Weights, extract
from fedloom.platform.spaces.space_config import SpaceConfig

pytestmark = pytest.mark.usefixtures("one_thread")


def space_of(name: str, **changes: Any) -> DartsSpace:
    space = build_space(SpaceConfig(name, **changes))
    assert isinstance(space, DartsSpace)
    return space


SMALL = space_of("darts_s2_small")
MIXED = DartsSpace(
    DartsDesign("mixed", (2, 8, 8), 5, cells=4, channels=2, nodes=2, operators=tuple(DARTS), affine=True)
)


def random_weights(space: DartsSpace, seed: int) -> dict[str, Tensor]:
    """Weights whose norms have seen data."""
    generator = torch_stream(seed, "test")
    weights = space.initial_weights(generator)
    for tensor in weights.values():
        if tensor.is_floating_point() and tensor.dim() == 1:
            tensor.uniform_(0.5, 1.5, generator=generator)
    return weights


def inputs(space: DartsSpace, batch: int = 2) -> Tensor:
    return torch.randn(batch, *space.input_shape, generator=torch_stream(0, "x"))


KEPT: Subspace = ((4,), (0, 5), (3, 5), (2, 6), (1,), (3, 4), (), (2,), (4, 6), (3, 7))


def random_subspace(space: DartsSpace, rng: np.random.Generator) -> Subspace:
    """Each operator kept with probability .4: some edges are pruned, some nodes are left with nothing."""
    return tuple(tuple(np.flatnonzero(rng.random(n) < 0.4).tolist()) for n in space.options)


# -- what the networks compute ----------------------------------------------------------------------------------------


def _norm(x: Tensor, w: Weights, at: str) -> Tensor:
    return F.batch_norm(x, w[f"{at}.running_mean"], w[f"{at}.running_var"], w.get(f"{at}.weight"), w.get(f"{at}.bias"))


def _reduced(x: Tensor, w: Weights, at: str) -> Tensor:
    x = x.relu()
    halves = [F.conv2d(x[:, :, i::2, i::2], w[f"{at}.{name}.weight"]) for i, name in enumerate(("even", "odd"))]
    return _norm(torch.cat(halves, 1), w, f"{at}.norm")


def _preprocessed(x: Tensor, w: Weights, at: str) -> Tensor:
    if f"{at}.even.weight" in w:
        return _reduced(x, w, at)
    return _norm(F.conv2d(x.relu(), w[f"{at}.conv.weight"]), w, f"{at}.norm")


def _depthwise(x: Tensor, w: Weights, at: str, first: int, stride: int, dilation: int) -> Tensor:
    kernel = w[f"{at}.{first + 1}.weight"]
    padding = dilation * (kernel.shape[-1] - 1) // 2
    x = F.conv2d(x.relu(), kernel, None, stride, padding, dilation, groups=x.shape[1])
    return _norm(F.conv2d(x, w[f"{at}.{first + 2}.weight"]), w, f"{at}.{first + 3}")


def _operated(x: Tensor, name: str, w: Weights, at: str, stride: int) -> Tensor:
    if name == "none":
        return 0 * x[:, :, ::stride, ::stride]
    if name == "skip_connect":
        return x if stride == 1 else _reduced(x, w, at)
    if name == "max_pool_3x3":
        return _norm(F.max_pool2d(x, 3, stride, 1), w, f"{at}.1")
    if name == "avg_pool_3x3":
        inside = F.avg_pool2d(torch.ones_like(x), 3, stride, 1)
        return _norm(F.avg_pool2d(x, 3, stride, 1) / inside, w, f"{at}.1")
    if name.startswith("dil"):
        return _depthwise(x, w, at, 0, stride, 2)
    return _depthwise(_depthwise(x, w, at, 0, stride, 1), w, at, 4, 1, 1)


def reference(space: DartsSpace, x: Tensor, w: Weights, kept: Subspace) -> Tensor:
    """The logits in evaluation mode, from the tensors by name."""
    before = last = _norm(F.conv2d(x, w["stem.0.weight"], padding=1), w, "stem.1")
    design = space.design
    for cell in range(design.cells):
        reduction = cell in (design.cells // 3, 2 * design.cells // 3)
        states = [_preprocessed(s, w, f"cells.{cell}.preprocess{i}") for i, s in enumerate((before, last))]
        halving = 2 if reduction else 1
        states += [torch.zeros_like(states[0][:, :, ::halving, ::halving]) for _ in range(design.nodes)]
        for edge, (source, node) in enumerate(space.edges("normal")):
            decision = edge + reduction * len(space.edges("normal"))
            for option in kept[decision]:
                name, at = space.operator_names[decision][option], f"cells.{cell}.edges.{edge}.ops.{option}"
                states[node] = states[node] + _operated(states[source], name, w, at, halving if source < 2 else 1)
        before, last = last, torch.cat(states[2:], 1)
    return F.linear(last.mean((2, 3)), w["head.weight"], w["head.bias"])


def test_networks_compute_what_the_reference_computes() -> None:
    weights, rng = random_weights(MIXED, 3), stream(3, "test")
    supernet = MIXED.build_supernet().eval()
    supernet.load_state_dict(weights)
    x = inputs(MIXED)
    outputs = []
    for kept in [MIXED.largest_subspace, *(random_subspace(MIXED, rng) for _ in range(8))]:
        with torch.no_grad():
            outputs.append(supernet(x, kept))
            torch.testing.assert_close(outputs[-1], reference(MIXED, x, weights, kept), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(outputs[0], outputs[1])


@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.tuples(*[st.sampled_from([(), (0,), (1,), (0, 1)])] * 10))
def test_a_stand_alone_subspace_equals_the_supernet_bitwise(kept: Subspace) -> None:
    weights = random_weights(SMALL, 4)
    supernet, alone = SMALL.build_supernet().eval(), SMALL.build_subspace(kept).eval()
    supernet.load_state_dict(weights)
    alone.load_state_dict(extract(weights, SMALL.subspace_slices(kept)))
    x = inputs(SMALL)
    with torch.no_grad():
        expected = supernet(x, kept)
        assert torch.equal(alone(x), expected)
        assert torch.equal(alone(x, kept), expected)


def test_an_architecture_reads_as_one_operator_per_edge() -> None:
    weights = random_weights(MIXED, 5)
    supernet = MIXED.build_supernet().eval()
    supernet.load_state_dict(weights)
    x, rng = inputs(MIXED), stream(5, "test")
    for _ in range(3):
        path = MIXED.sample(rng)
        alone = MIXED.build_subnet(path).eval()
        alone.load_state_dict(extract(weights, MIXED.slices(path)))
        with torch.no_grad():
            assert torch.equal(alone(x), supernet(x, path))
            assert torch.equal(supernet(x, as_subspace(path)), supernet(x, path))
            assert torch.equal(supernet(x), supernet(x, MIXED.largest_subspace))


def test_a_pruned_edge_counts_as_none() -> None:
    """Option 0 of the mixed space is `none`: zeros, as a pruned edge adds nothing."""
    supernet = MIXED.build_supernet().eval()
    supernet.load_state_dict(random_weights(MIXED, 6))
    x = inputs(MIXED)
    kept: Subspace = ((4,), (), (3, 5), (), (1,), (), (), (2,), (4, 6), ())
    zeros = tuple(row or (0,) for row in kept)
    with torch.no_grad():
        assert torch.equal(supernet(x, kept), supernet(x, zeros))
        assert torch.equal(supernet(x, ((),) * 10), supernet(x, ((0,),) * 10))
        assert not torch.equal(supernet(x, kept), supernet(x, ((),) * 10))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_what_is_shared_or_fused_has_the_gradients_of_modules_that_do_all_of_their_own_work(
    monkeypatch: pytest.MonkeyPatch, layout: torch.memory_format
) -> None:
    def halves(module: FactorisedReduction, x: Tensor) -> Tensor:
        # Not with strides: on a CPU with AVX2 alone, oneDNN 3.12 then writes beyond memory (its issue 6035).
        even, odd = x[:, :, ::2, ::2], x[:, :, 1::2, 1::2]
        return torch.cat([F.conv2d(even, module.even.weight), F.conv2d(odd, module.odd.weight)], dim=1)

    def gradients() -> dict[str, Tensor]:
        network = MIXED.build_supernet().train().to(memory_format=layout)
        network.load_state_dict(random_weights(MIXED, 9))
        network(inputs(MIXED).to(memory_format=layout), KEPT).square().sum().backward()
        return {name: p.grad for name, p in network.named_parameters() if p.grad is not None}

    fast = gradients()
    monkeypatch.setattr(State, "through", lambda state, module: module(state.x))
    monkeypatch.setattr(FactorisedReduction, "_halved", halves)
    monkeypatch.setattr(darts, "_with_dense_gradient", lambda x: x)
    slow = gradients()
    assert fast.keys() == slow.keys()
    for name, gradient in slow.items():
        torch.testing.assert_close(fast[name], gradient, rtol=1e-3, atol=1e-3 * gradient.abs().max().item() + 1e-5)


def test_a_step_reaches_exactly_the_kept_operators() -> None:
    weights = random_weights(SMALL, 7)
    supernet = SMALL.build_supernet().train()
    supernet.load_state_dict(weights)
    kept: Subspace = ((0, 1), (1,), (), (0,), (1,), (0,), (0, 1), (1,), (), (0, 1))
    supernet(inputs(SMALL, 8), kept).square().sum().backward()
    used = set(SMALL.subspace_slices(kept))
    for name, parameter in supernet.named_parameters():
        assert (parameter.grad is not None) == (name in used), name
    changed = {name for name, buffer in supernet.named_buffers() if not torch.equal(buffer, weights[name])}
    assert changed == {name for name, _ in supernet.named_buffers() if name in used}


def test_a_published_size_runs() -> None:
    net = space_of("darts_s2").build_supernet()
    net.load_state_dict(space_of("darts_s2").initial_weights(torch_stream(0, "init")))
    y = net(torch.randn(2, 3, 32, 32, generator=torch_stream(0, "x")), (1, 0) * 14)
    assert y.shape == (2, 10)
    assert bool(y.isfinite().all())


# -- noise ------------------------------------------------------------------------------------------------------------


def test_noise_is_standard_normal_whatever_the_input() -> None:
    noise = OPERATORS["noise"](4, 2, False).eval()
    torch.manual_seed(1)
    y = noise(torch.full((8, 4, 32, 32), 7.0))
    assert y.shape == (8, 4, 16, 16)
    assert abs(float(y.mean())) < 0.05
    assert abs(float(y.std()) - 1) < 0.05


def test_noise_depends_on_the_clients_stream_alone() -> None:
    config = SpaceConfig("darts_s2_small", operators=["noise", "sep_conv_3x3"])
    space = build_space(config)
    table = space.cost_table("macs")
    worker = Worker(WorkerSpec(config, "", "", 0, table, table))
    net = worker.supernet
    net.load_state_dict(space.initial_weights(torch_stream(0, "init")))
    x = inputs(SMALL)
    outputs = []
    for seed, client in [(1, 3), (2, 3), (3, 4)]:
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        with worker.randomness(net.eval(), torch_stream(0, "client", client)), torch.no_grad():
            outputs.append(net(x))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
