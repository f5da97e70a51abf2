"""Networks that are not searched: their published sizes, what they compute, and how they stand as spaces."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.experiments.runs.configuration import compose_config
from fedloom.platform.federation.tiers import split_into_tiers
from fedloom.platform.seeding import stream, torch_stream
from fedloom.platform.spaces.base import FixedNetwork, FixedSpace
from fedloom.platform.spaces.darts import DARTS_V2_CELLS, DartsSpace, DartsV2Design, kept_by
from fedloom.platform.spaces.registry import build_space
from fedloom.platform.spaces.resnet import Resnet18Design
from fedloom.platform.spaces.slices import Weights, bytes_of, extract
from fedloom.platform.spaces.space_config import SpaceConfig
from fedloom.tiers.measure import MEASURES, activation_bytes_of, macs_of, parameters_of

ALL = ("resnet18", "resnet18_small", "darts_v2", "darts_v2_small", "fednas_v1")


pytestmark = pytest.mark.usefixtures("one_thread")


def space_of(name: str, **changes: Any) -> FixedSpace:
    space = build_space(SpaceConfig(name, **changes))
    assert isinstance(space, FixedSpace)
    return space


def num_parameters(space: FixedSpace) -> int:
    return int(space.cost_table("parameters").fixed)


TINY = space_of("resnet18_small", input_shape=[3, 8, 8], stem_channels=8)
TINY_CELLS = space_of("darts_v2_small", input_shape=[3, 8, 8], channels=4, cells=3)
both = pytest.mark.parametrize("space", [TINY, TINY_CELLS], ids=["resnet18", "darts_v2"])


def random_weights(space: FixedSpace, seed: int) -> dict[str, Tensor]:
    """Weights whose norms have seen data."""
    generator = torch_stream(seed, "test")
    weights = space.initial_weights(generator)
    for tensor in weights.values():
        if tensor.is_floating_point() and tensor.dim() == 1:
            tensor.uniform_(0.5, 1.5, generator=generator)
    return weights


def loaded(space: FixedSpace, weights: Weights) -> nn.Module:
    network = space.build_subnet((0,)).eval()
    network.load_state_dict(dict(weights))
    return network


def inputs(space: FixedSpace, batch: int = 2) -> Tensor:
    return torch.randn(batch, *space.input_shape, generator=torch_stream(0, "x"))


# -- sizes ------------------------------------------------------------------------------------------------------------


def test_resnet18_has_the_published_size() -> None:
    space = space_of("resnet18")
    assert num_parameters(space) == 11_173_962
    assert space.cost_table("macs").fixed == pytest.approx(0.556e9, rel=0.01)
    assert num_parameters(space_of("resnet18", num_classes=100)) == 11_173_962 + 90 * 513


def test_resnet34_has_the_size_that_fedoras_publishes_for_35_spoken_words() -> None:
    space = space_of("resnet34", input_shape=[1, 40, 51], num_classes=35)
    assert num_parameters(space) == 21_293_795  # Tab. 5: 21.29 M
    assert space.cost_table("macs").fixed == pytest.approx(2.382e9, rel=0.01)


def test_resnet18_counted_by_hand() -> None:
    for name, stem in [("resnet18", 64), ("resnet18_small", 16)]:
        parameters = 27 * stem + 2 * stem
        for before, width in [(stem, stem), (stem, 2 * stem), (2 * stem, 4 * stem), (4 * stem, 8 * stem)]:
            parameters += 9 * before * width + 3 * 9 * width * width + 4 * 2 * width
            parameters += 0 if before == width else before * width + 2 * width
        assert num_parameters(space_of(name)) == parameters + 8 * stem * 10 + 10
    assert num_parameters(space_of("resnet18_small")) == 701_466


def test_darts_v2_has_the_published_size() -> None:
    """The authors' code prints 3.349342 million; we add a norm to five pools in cells of 72 and of 144 channels."""
    assert num_parameters(space_of("darts_v2")) == 3_351_502 == 3_349_342 + 5 * 2 * (72 + 144)
    assert space_of("darts_v2").cost_table("macs").fixed == 528_359_040
    assert num_parameters(space_of("darts_v2_small")) == 37_498


def test_norms_of_resnet18() -> None:
    parameters = {norm: num_parameters(space_of("resnet18_small", norm=norm)) for norm in ("batch", "group")}
    assert parameters["batch"] == parameters["group"]
    batch, group, none = (space_of("resnet18_small", norm=norm) for norm in ("batch", "group", "none"))
    assert any(name.endswith("running_mean") for name in batch.slices((0,)))
    assert not any(name.endswith("running_mean") for name in group.slices((0,)))
    assert "stem.0.bias" in none.slices((0,))
    # A bias instead of scale and shift: one value per channel less.
    channels = 16 + 4 * (16 + 32 + 64 + 128) + 32 + 64 + 128
    assert parameters["batch"] - num_parameters(none) == channels


# -- a space of one ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_there_is_one_architecture(name: str) -> None:
    space = space_of(name)
    assert (space.name, space.options, space.num_architectures) == (name, (1,), 1)
    assert space.input_shape == (3, 32, 32)
    assert list(space.enumerate()) == [(0,)] == [space.sample(stream(0, "test"))]
    space.validate((0,))


def test_a_network_of_one_s_own_is_not_split_into_tiers() -> None:
    own = FixedSpace(FixedNetwork("own", (1, 2, 2), lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 3))))
    (tier,) = split_into_tiers(compose_config(["method=fedavg"]), own, own.cost_table("macs"))
    assert (tier.lower, tier.upper) == (0, 12)
    weights, x = own.initial_weights(torch_stream(0, "test")), torch.ones(5, 1, 2, 2)
    supernet = own.build_supernet()
    supernet.load_state_dict(weights)
    assert torch.equal(supernet(x, (0,)), loaded(own, weights)(x))


@pytest.mark.parametrize("architecture", [(1,), (), (0, 0)])
def test_any_other_is_refused(architecture: tuple[int, ...]) -> None:
    for refuse in (TINY.validate, TINY.slices, TINY.build_subnet):
        with pytest.raises(ValueError, match=r"resnet18_small has one architecture, .* given"):
            refuse(architecture)
    with pytest.raises(ValueError, match="has one architecture"):
        TINY.initial_subnet_weights(architecture, torch_stream(0, "init"))


@both
def test_supernet_and_subnet_are_the_same_network(space: FixedSpace) -> None:
    weights, x = random_weights(space, 1), inputs(space)
    supernet = space.build_supernet().eval()
    assert list(supernet.state_dict()) == list(space.slices((0,))) == list(weights)
    assert all(name == piece.source and piece.region is None for name, piece in space.slices((0,)).items())
    supernet.load_state_dict(weights)
    network = loaded(space, extract(weights, space.slices((0,))))
    with torch.no_grad():
        expected = network(x)
        assert torch.equal(supernet(x, (0,)), expected)
        assert torch.equal(supernet(x), expected)
    assert bool(expected.isfinite().all())


@both
def test_networks_without_weights_do_not_pass_for_trained_ones(space: FixedSpace) -> None:
    assert bool(space.build_supernet().eval()(inputs(space)).isnan().all())
    assert bool(space.build_subnet((0,)).eval()(inputs(space)).isnan().all())


@both
def test_initial_weights_come_from_the_generator_alone(space: FixedSpace) -> None:
    before = torch.get_rng_state()
    first = space.initial_weights(torch_stream(1, "init"))
    again = space.initial_subnet_weights((0,), torch_stream(1, "init"))
    other = space.initial_weights(torch_stream(2, "init"))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert not torch.equal(first["stem.0.weight"], other["stem.0.weight"])


@pytest.mark.parametrize("name", ALL)
def test_the_head_is_the_last_linear_layer_and_reads_the_features(name: str) -> None:
    space = space_of(name, input_shape=[3, 8, 8])
    network = loaded(space, space.initial_weights(torch_stream(0, "init")))
    linear = {place: part for place, part in network.named_modules() if isinstance(part, nn.Linear)}
    assert list(linear) == ["head"]
    seen: list[Tensor] = []
    linear["head"].register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    with torch.no_grad():
        y = network(inputs(space))
    features = {
        "resnet18": 512,
        "resnet18_small": 128,
        "darts_v2": 4 * 144,
        "darts_v2_small": 4 * 32,
        "fednas_v1": 4 * 64,
    }[name]
    assert [x.shape for x in seen] == [(2, features)]
    assert torch.equal(y, F.linear(seen[0], linear["head"].weight, linear["head"].bias))


@both
def test_a_step_reaches_every_parameter(space: FixedSpace) -> None:
    network = space.build_subnet((0,)).train()
    network.load_state_dict(space.initial_weights(torch_stream(3, "init")))
    network(inputs(space, 8)).square().sum().backward()
    # The cell of DARTS uses all of its nodes.
    assert [name for name, p in network.named_parameters() if p.grad is None or not bool(p.grad.any())] == []


# -- what the networks compute ----------------------------------------------------------------------------------------


def _norm(x: Tensor, w: Weights, at: str) -> Tensor:
    return F.batch_norm(x, w[f"{at}.running_mean"], w[f"{at}.running_var"], w[f"{at}.weight"], w[f"{at}.bias"])


def _block(x: Tensor, w: Weights, at: str, stride: int, project: bool) -> Tensor:
    y = _norm(F.conv2d(x, w[f"{at}.branch.0.weight"], stride=stride, padding=1), w, f"{at}.branch.1").relu()
    y = _norm(F.conv2d(y, w[f"{at}.branch.3.weight"], padding=1), w, f"{at}.branch.4")
    if project:
        x = _norm(F.conv2d(x, w[f"{at}.shortcut.0.weight"], stride=stride), w, f"{at}.shortcut.1")
    return (x + y).relu()


@pytest.mark.parametrize(("side", "stride"), [(8, 1), (7, 1), (16, 2)])
def test_resnet18_computes_what_the_reference_computes(side: int, stride: int) -> None:
    space = space_of("resnet18_small", input_shape=[2, side, side], stem_channels=8, stem_stride=stride)
    w, x = random_weights(space, 4), inputs(space)
    y = _norm(F.conv2d(x, w["stem.0.weight"], stride=stride, padding=1), w, "stem.1").relu()
    for block in range(8):
        first = block in (2, 4, 6)
        y = _block(y, w, f"blocks.{block}", 2 if first else 1, first)
    expected = F.linear(y.mean((2, 3)), w["head.weight"], w["head.bias"])
    with torch.no_grad():
        torch.testing.assert_close(loaded(space, w)(x), expected, rtol=1e-4, atol=1e-4)


def test_fednas_v1_has_the_sizes_that_superfednas_gives_for_64_images() -> None:
    """Their README names 3.66, 1.82 and .67 GFLOPs, which also count norms; their notebook 190 580 parameters, too."""
    sizes = ((24, 4, 3.66), (16, 4, 1.82), (16, 2, 0.67), (38, 2, 3.18))
    spaces = [space_of("fednas_v1", channels=channels, cells=cells) for channels, cells, _ in sizes]
    for space, (_, _, gflops) in zip(spaces, sizes, strict=True):
        assert 0.85 * gflops < 64e-9 * space.cost_table("macs").fixed < gflops
    assert abs(num_parameters(spaces[3]) - 190_580) < 3_000
    with pytest.raises(ValueError, match="cells must be at least 2, given 1"):
        space_of("fednas_v1", cells=1)


def test_the_cells_of_darts_v2() -> None:
    """Every node's edges by hand, as in the published genotype."""
    space = DartsSpace(DartsV2Design().darts)
    kept = kept_by(space.design, DARTS_V2_CELLS)
    space.validate_subspace(kept)
    found = {space.design.edge_name(d): space.operator_names[d][row[0]] for d, row in enumerate(kept) if row}
    assert all(len(row) <= 1 for row in kept)
    assert found == {
        "normal 0->2": "sep_conv_3x3",
        "normal 1->2": "sep_conv_3x3",
        "normal 0->3": "sep_conv_3x3",
        "normal 1->3": "sep_conv_3x3",
        "normal 0->4": "skip_connect",
        "normal 1->4": "sep_conv_3x3",
        "normal 0->5": "skip_connect",
        "normal 2->5": "dil_conv_3x3",
        "reduction 0->2": "max_pool_3x3",
        "reduction 1->2": "max_pool_3x3",
        "reduction 1->3": "max_pool_3x3",
        "reduction 2->3": "skip_connect",
        "reduction 0->4": "max_pool_3x3",
        "reduction 2->4": "skip_connect",
        "reduction 1->5": "max_pool_3x3",
        "reduction 2->5": "skip_connect",
    }


def test_darts_v2_is_a_subspace_of_darts() -> None:
    design = TINY_CELLS.design
    assert isinstance(design, DartsV2Design)
    full, x = DartsSpace(design.darts), inputs(TINY_CELLS)
    weights = full.initial_weights(torch_stream(5, "init"))
    supernet, kept = full.build_supernet().eval(), kept_by(full.design, DARTS_V2_CELLS)
    supernet.load_state_dict(weights)
    network = loaded(TINY_CELLS, extract(weights, full.subspace_slices(kept)))
    with torch.no_grad():
        assert torch.equal(network(x), supernet(x, kept))


# -- costs ------------------------------------------------------------------------------------------------------------


@both
def test_tables_equal_measures_of_the_whole_network(space: FixedSpace) -> None:
    network, x = space.build_subnet((0,)), inputs(space, 1)
    expected = {
        "macs": macs_of(network, x),
        "parameters": parameters_of(network),
        "bytes": bytes_of(network.state_dict()),
        "activation_bytes": activation_bytes_of(network, x),
    }
    for measure, cost in expected.items():
        table = space.cost_table(measure)
        assert (table.measure, table.reduce) == (measure, MEASURES.get(measure, "sum"))
        assert (table.fixed, table.options) == (cost, ((0.0,),))
        assert table.cost((0,)) == table.smallest == table.largest == cost
        assert space.cost_table(measure) is table


def test_latency_is_measured_and_unknown_measures_are_refused() -> None:
    before = torch.get_rng_state()
    table = TINY.cost_table("latency_s")
    assert table.cost((0,)) > 0
    assert table.options == ((0.0,),)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ValueError, match=r"unknown measure 'flops': known are macs, parameters, .* bytes"):
        TINY.cost_table("flops")


# -- designs ----------------------------------------------------------------------------------------------------------


def test_a_configuration_changes_the_design() -> None:
    space = space_of("resnet18", input_shape=[1, 28, 28], num_classes=62, stem_channels=8, norm="group")
    assert space.design == Resnet18Design("resnet18", (1, 28, 28), 62, 8, "group")
    assert space.build_supernet()(inputs(space)).shape == (2, 62)
    cells = space_of("darts_v2", input_shape=[1, 28, 28], num_classes=62, cells=3, channels=4)
    assert cells.design == DartsV2Design("darts_v2", (1, 28, 28), 62, 3, 4)
    assert cells.build_supernet()(inputs(cells)).shape == (2, 62)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("resnet18", {"norm": "layer"}, "space.norm='layer': allowed are none, batch, group"),
        ("resnet18", {"stem_channels": 0}, "stem_channels must be at least 1, given 0"),
        ("resnet18", {"num_classes": 0}, "num_classes must be at least 1, given 0"),
        ("resnet18", {"input_shape": [32, 32]}, r"takes images \(C, H, W\), given \(32, 32\)"),
        ("resnet18", {"norm": "group", "stem_channels": 12}, "must be a multiple of 8, given 12"),
        ("resnet18", {"cells": 3}, "space resnet18 has no cells; it has .*stem_channels, norm"),
        ("resnet18", {"modules": 3}, "space resnet18 has no modules"),
        ("darts_v2", {"cells": 2}, "cells must be at least 3, given 2"),
        ("darts_v2", {"channels": 0}, "channels must be at least 1, given 0"),
        ("darts_v2", {"input_shape": [3, 30, 30]}, "multiples of 4"),
        ("darts_v2", {"operators": ["none"]}, "space darts_v2 has no operators; it has .*cells, channels"),
    ],
)
def test_designs_that_cannot_be_built(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        space_of(name, **changes)
