"""The modular ResNet-18: branches, subspaces, mixing weights, tensors and costs."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.nn import functional as F

from fedloom.platform.seeding import stream, torch_stream
from fedloom.platform.spaces.modular import ModularDesign, ModularSpace
from fedloom.platform.spaces.operator_choice import SpaceSizes, SummedOperatorSpace
from fedloom.platform.spaces.registry import build_space
from fedloom.platform.spaces.resnet import Resnet18Design
from fedloom.platform.spaces.slices import Subspace, Weights, bytes_of, extract
from fedloom.platform.spaces.space_config import SpaceConfig
from fedloom.tiers.costs import size_of
from fedloom.tiers.measure import activation_bytes_of, macs_of, parameters_of
from tests.test_platform.test_spaces_operator_choice import tensors_of

pytestmark = pytest.mark.usefixtures("one_thread")


def space_of(name: str, **changes: Any) -> ModularSpace:
    space = build_space(SpaceConfig(name, **changes))
    assert isinstance(space, ModularSpace)
    return space


SMALL = space_of("resnet18_modular_small", input_shape=[3, 8, 8], stem_channels=4, modules=2)
ODD = space_of("resnet18_modular_small", input_shape=[2, 7, 7], stem_channels=8, modules=3, norm="group")
NOTHING: Subspace = ((),) * 8


def random_weights(space: ModularSpace, seed: int) -> dict[str, Tensor]:
    """Weights whose norms have seen data."""
    generator = torch_stream(seed, "test")
    weights = space.initial_weights(generator)
    for tensor in weights.values():
        if tensor.is_floating_point() and tensor.dim() == 1:
            tensor.uniform_(0.5, 1.5, generator=generator)
    return weights


def supernet_of(space: ModularSpace, weights: Weights) -> torch.nn.Module:
    supernet = space.build_supernet().eval()
    supernet.load_state_dict(dict(weights))
    return supernet


def inputs(space: ModularSpace, batch: int = 2) -> Tensor:
    return torch.randn(batch, *space.input_shape, generator=torch_stream(0, "x"))


def random_subspace(space: ModularSpace, rng: np.random.Generator) -> Subspace:
    return tuple(tuple(np.flatnonzero(rng.random(n) < 0.5).tolist()) for n in space.options)


subspaces = st.tuples(*[st.sampled_from([(), (0,), (1,), (0, 1)])] * 8)


# -- the space --------------------------------------------------------------------------------------------------------


def test_sizes() -> None:
    """A second branch adds to ResNet-18's 11 173 962 all that is not stem, projection or head."""
    space = space_of("resnet18_modular")
    fixed = 27 * 64 + 2 * 64 + sum(w * 2 * w + 2 * 2 * w for w in (64, 128, 256)) + 512 * 10 + 10
    assert fixed == 180_810
    assert space.num_parameters == SpaceSizes(2 * 11_173_962 - fixed, fixed, 11_173_962)
    assert (space.options, space.num_architectures) == ((2,) * 8, 256)
    assert space.cost_table("macs").largest == pytest.approx(0.556e9, rel=0.01)
    three = space_of("resnet18_modular_small", modules=3)
    assert (three.options, three.num_architectures) == ((3,) * 8, 6561)
    assert three.operator_names[7] == ("branch_0", "branch_1", "branch_2")
    assert three.num_parameters.largest_path == 701_466


def test_it_is_a_space_of_kept_operators() -> None:
    assert isinstance(SMALL, SummedOperatorSpace)
    assert SMALL.largest_subspace == ((0, 1),) * 8
    assert list(itertools.islice(SMALL.enumerate(), 2)) == [(0,) * 8, (0,) * 7 + (1,)]
    drawn = [SMALL.sample(stream(1, "test", i)) for i in range(500)]
    assert np.abs(np.array(drawn).mean(axis=0) - 0.5).max() < 0.12  # 5 standard deviations


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ((0,) * 7, "an architecture of resnet18_modular_small has 8 blocks, given 7"),
        ((0, 0, 0, 2, *(0,) * 4), r"block 3 of .* operators 0 \(branch_0\), 1 \(branch_1\), given 2"),
        ((*(0,) * 7, 1.0), r"block 7 .* given 1\.0"),
    ],
)
def test_an_architecture_outside_the_space_is_named(architecture: Any, message: str) -> None:
    for refuse in (SMALL.validate, SMALL.slices, SMALL.build_subnet):
        with pytest.raises(ValueError, match=message):
            refuse(architecture)


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (((0,),) * 9, "a subspace of resnet18_modular_small has 8 blocks, given 9"),
        (((0,), (1, 0), *((0,),) * 6), r"block 1 of .* distinct operators in order, given \(1, 0\)"),
        ((*((0,),) * 7, (0, 2)), "block 7 .* given 2"),
        ((0,) * 8, "block 0 .* must be a tuple of operators, given 0"),
    ],
)
def test_a_subspace_outside_the_space_is_named(kept: Any, message: str) -> None:
    for refuse in (SMALL.validate_subspace, SMALL.subspace_slices, SMALL.build_subspace):
        with pytest.raises(ValueError, match=message):
            refuse(kept)


def test_a_network_names_what_it_does_not_hold() -> None:
    net = SMALL.build_subspace(((0,), (), *((0, 1),) * 6))
    x = inputs(SMALL)
    with pytest.raises(ValueError, match="block 0 holds 0, not 1"):
        net(x, ((1,), (), *((0, 1),) * 6))
    with pytest.raises(ValueError, match="block 1 holds nothing, not 0"):
        net(x, (0,) * 8)
    with pytest.raises(ValueError, match="has 8 blocks, given 7"):
        net(x, (0,) * 7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modules": 0}, "modules must be at least 1, given 0"),
        ({"stem_channels": 0}, "stem_channels must be at least 1"),
        ({"norm": "layer"}, "allowed are none, batch, group"),
        ({"cells": 5}, "has no cells; it has .*norm, stem_stride, blocks, modules"),
    ],
)
def test_designs_that_cannot_be_built(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        space_of("resnet18_modular_small", **changes)
    assert ODD.design == ModularDesign("resnet18_modular_small", (2, 7, 7), 10, 8, "group", modules=3)


# -- tensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("space", [SMALL, ODD], ids=["small", "odd"])
def test_slices_are_complete_and_disjoint(space: ModularSpace) -> None:
    names = list(space.build_supernet().state_dict())
    assert list(space.owner_of) == names
    pairs = [(decision, option) for decision, n in enumerate(space.options) for option in range(n)]
    groups = [tensors_of(space, None), *(tensors_of(space, pair) for pair in pairs)]
    assert sorted(itertools.chain(*groups)) == sorted(names)
    assert all(len(group) == len(groups[1]) > 0 for group in groups[1:])
    assert set(space.subspace_slices(NOTHING)) == set(tensors_of(space, None))
    rng = stream(2, "test")
    for _ in range(3):
        kept = random_subspace(space, rng)
        assert set(space.subspace_slices(kept)) == set(space.build_subspace(kept).state_dict())


def test_what_is_fixed() -> None:
    assert {name.split(".")[0] for name in tensors_of(SMALL, None)} == {"stem", "blocks", "head"}
    shortcuts = {name.split(".")[1] for name in tensors_of(SMALL, None) if ".shortcut." in name}
    assert shortcuts == {"2", "4", "6"}
    assert SMALL.owner_of["blocks.5.branches.1.3.weight"] == (5, 1)
    assert SMALL.owner_of["blocks.4.shortcut.0.weight"] is None


def test_weights_are_blank_until_drawn_from_the_generator() -> None:
    assert bool(SMALL.build_supernet().eval()(inputs(SMALL)).isnan().all())
    before = torch.get_rng_state()
    first, again = (SMALL.initial_weights(torch_stream(1, "init")) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["blocks.0.branches.0.0.weight"], first["blocks.0.branches.1.0.weight"])
    assert set(SMALL.initial_subnet_weights((1,) * 8, torch_stream(1, "init"))) == set(SMALL.slices((1,) * 8))


# -- what the networks compute ----------------------------------------------------------------------------------------


def _norm(x: Tensor, w: Weights, at: str) -> Tensor:
    return F.batch_norm(x, w[f"{at}.running_mean"], w[f"{at}.running_var"], w[f"{at}.weight"], w[f"{at}.bias"])


def reference(x: Tensor, w: Weights, kept: Subspace, mix: Tensor) -> Tensor:
    """The logits in evaluation mode, from the tensors by name."""
    y = _norm(F.conv2d(x, w["stem.0.weight"], padding=1), w, "stem.1").relu()
    for block in range(8):
        stride, at = 2 if block in (2, 4, 6) else 1, f"blocks.{block}"
        total = y
        if stride == 2:
            total = _norm(F.conv2d(y, w[f"{at}.shortcut.0.weight"], stride=2), w, f"{at}.shortcut.1")
        for m in kept[block]:
            z = F.conv2d(y, w[f"{at}.branches.{m}.0.weight"], stride=stride, padding=1)
            z = _norm(z, w, f"{at}.branches.{m}.1").relu()
            z = _norm(F.conv2d(z, w[f"{at}.branches.{m}.3.weight"], padding=1), w, f"{at}.branches.{m}.4")
            total = total + mix[block, m] * z
        y = total.relu()
    return F.linear(y.mean((2, 3)), w["head.weight"], w["head.bias"])


@settings(max_examples=15, deadline=None, derandomize=True)
@given(subspaces, st.integers(0, 99))
def test_networks_compute_what_the_reference_computes(kept: Subspace, seed: int) -> None:
    weights, x = random_weights(SMALL, 3), inputs(SMALL)
    mix = torch.rand(8, 2, generator=torch_stream(seed, "mix")) + 0.5
    supernet = supernet_of(SMALL, weights)
    with torch.no_grad():
        plain, mixed = supernet(x, kept), supernet(x, kept, mix)
        torch.testing.assert_close(plain, reference(x, weights, kept, torch.ones(8, 2)), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mixed, reference(x, weights, kept, mix), rtol=1e-4, atol=1e-4)
        assert torch.equal(supernet(x, kept, torch.ones(8, 2)), plain)
        assert any(kept) != torch.allclose(plain, mixed)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(subspaces)
def test_a_stand_alone_subspace_equals_the_supernet_bitwise(kept: Subspace) -> None:
    weights, x = random_weights(SMALL, 4), inputs(SMALL)
    supernet, alone = supernet_of(SMALL, weights), SMALL.build_subspace(kept).eval()
    alone.load_state_dict(extract(weights, SMALL.subspace_slices(kept)))
    with torch.no_grad():
        expected = supernet(x, kept)
        assert torch.equal(alone(x), expected)
        assert torch.equal(alone(x, kept), expected)


def test_one_branch_per_block_is_resnet18() -> None:
    weights, x = random_weights(SMALL, 5), inputs(SMALL)
    plain = Resnet18Design("resnet18", (3, 8, 8), stem_channels=4).build().eval()
    path = (0, 1, 1, 0, 1, 0, 0, 1)
    own = extract(weights, SMALL.slices(path))
    for block, option in enumerate(path):
        for name in tensors_of(SMALL, (block, option)):
            own[name.replace(f"branches.{option}", "branch")] = own.pop(name)
    plain.load_state_dict(own)
    subnet = SMALL.build_subnet(path).eval()
    subnet.load_state_dict(extract(weights, SMALL.slices(path)))
    with torch.no_grad():
        expected = plain(x)
        assert torch.equal(supernet_of(SMALL, weights)(x, path), expected)
        assert torch.equal(subnet(x), expected)


def test_a_step_reaches_exactly_the_kept_branches_and_the_mix() -> None:
    weights = random_weights(SMALL, 7)
    supernet = SMALL.build_supernet().train()
    supernet.load_state_dict(weights)
    kept: Subspace = ((0, 1), (1,), (), (0,), (1,), (0,), (0, 1), ())
    mix = torch.full((8, 2), 0.5, requires_grad=True)
    supernet(inputs(SMALL, 8), kept, mix).square().sum().backward()
    used = set(SMALL.subspace_slices(kept))
    for name, parameter in supernet.named_parameters():
        assert (parameter.grad is not None) == (name in used), name
    changed = {name for name, buffer in supernet.named_buffers() if not torch.equal(buffer, weights[name])}
    assert changed == {name for name, _ in supernet.named_buffers() if name in used}
    assert mix.grad is not None
    assert [tuple(row.nonzero().flatten().tolist()) for row in mix.grad] == list(kept)


# -- costs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("space", [SMALL, ODD], ids=["small", "odd"])
def test_tables_add_up_over_subspaces(space: ModularSpace) -> None:
    rng, x = stream(9, "test"), inputs(space, 1)
    for kept in [space.largest_subspace, NOTHING, *(random_subspace(space, rng) for _ in range(3))]:
        net = space.build_subspace(kept)
        assert size_of(space.cost_table("macs"), kept) == macs_of(net, x)
        assert size_of(space.cost_table("parameters"), kept) == parameters_of(net)
        assert size_of(space.cost_table("bytes"), kept) == bytes_of(net.state_dict())
    path = space.sample(rng)
    assert space.cost_table("activation_bytes").cost(path) == activation_bytes_of(space.build_subnet(path), x)


def test_latency_and_unknown_measures() -> None:
    table = SMALL.cost_table("latency_s")
    assert table.fixed > 0
    assert all(cost > 0 for row in table.options for cost in row)
    with pytest.raises(ValueError, match="unknown measure 'flops'"):
        SMALL.cost_table("flops")
