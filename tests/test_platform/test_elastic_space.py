"""Elastic residual networks: the published numbers, costs of really built subnets, and the laws of their slices."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedloom.platform.seeding import stream, torch_stream
from fedloom.platform.spaces.base import supernet_shapes
from fedloom.platform.spaces.elastic import ElasticSpace
from fedloom.platform.spaces.initialisation import on_meta
from fedloom.platform.spaces.registry import build_space
from fedloom.platform.spaces.resnet import RESNET_SMALL, ResnetDesign, in_eights
from fedloom.platform.spaces.slices import Architecture, Slice, bytes_of, extract, leading
from fedloom.platform.spaces.space_config import SpaceConfig
from fedloom.tiers.measure import activation_bytes_of, macs_of, parameters_of

NORMS = ("none", "batch", "group")
EXPANSIONS = (0.1, 0.14, 0.18, 0.22, 0.25)

NINE = {
    "d=0,0,0,0 e=.1": 0.459,
    "d=0,0,0,1 e=.14": 0.789,
    "d=0,1,0,1 e=.14": 0.959,
    "d=0,1,1,1 e=.14": 1.129,
    "d=1,1,1,1 e=.18": 1.643,
    "d=1,1,1,2 e=.22": 2.200,
    "d=1,2,1,2 e=.22": 2.464,
    "d=1,2,2,2 e=.22": 2.729,
    "d=2,2,2,2 e=.25": 3.403,
}
"""GMACs of the paper's nine subnets."""

# The genome alone is quick to build: parsing needs no modules.
PUBLISHED = ElasticSpace(ResnetDesign(norm="batch"))


def small(norm: str) -> ElasticSpace:
    """36 subnets of up to four blocks; the second stage halves the resolution."""
    design = ResnetDesign(
        "small",
        input_shape=(2, 6, 6),
        num_classes=3,
        stem_channels=8,
        stage_widths=(16, 24),
        stage_strides=(1, 2),
        depths=(1, 1),
        expansions=(0.5, 1.0),
        norm=norm,
    )
    return ElasticSpace(design)


@pytest.fixture(scope="module", params=NORMS)
def space(request: pytest.FixtureRequest) -> ElasticSpace:
    return small(request.param)


def lively(space: ElasticSpace) -> dict[str, Tensor]:
    """Supernet tensors in which statistics, scales and biases are not what they begin with."""
    generator = torch_stream(1, "test")
    weights = space.initial_weights(generator)
    for tensor in weights.values():
        if tensor.is_floating_point() and tensor.dim() == 1:
            tensor.add_(torch.rand(tensor.shape, generator=generator), alpha=0.5)
    return weights


def loaded_supernet(space: ElasticSpace, weights: dict[str, Tensor]) -> nn.Module:
    supernet = space.build_supernet()
    supernet.load_state_dict(weights)
    return supernet


def loaded_subnet(space: ElasticSpace, weights: dict[str, Tensor], architecture: Architecture) -> nn.Module:
    subnet = space.build_subnet(architecture)
    subnet.load_state_dict(extract(weights, space.slices(architecture)))
    return subnet


# -- the published numbers --------------------------------------------------------------------------------------------


def test_as_many_subnets_as_published() -> None:
    assert PUBLISHED.num_architectures == 577_200_625 == (5 + 5**2 + 5**3) ** 4


def test_parameters_and_bytes_as_published() -> None:
    parameters, size_bytes = PUBLISHED.cost_table("parameters"), PUBLISHED.cost_table("bytes")
    assert parameters.cost(PUBLISHED.largest) == 71_726_538
    assert parameters.cost(PUBLISHED.smallest) == 10_396_746
    assert size_bytes.cost(PUBLISHED.largest) / 1e6 == pytest.approx(287.05, abs=0.005)


def test_the_nine_subnets_cost_what_is_published() -> None:
    table = PUBLISHED.cost_table("macs")
    gmacs = {text: round(table.cost(PUBLISHED.parse(text)) / 1e9, 3) for text in NINE}
    assert gmacs == NINE
    assert table.smallest == table.cost(PUBLISHED.smallest)
    assert table.largest == table.cost(PUBLISHED.largest)


def test_inner_channels_as_published() -> None:
    design = ResnetDesign()
    assert [[design.mid_channels(stage, width) for width in range(5)] for stage in range(4)] == [
        [24, 40, 48, 56, 64],
        [48, 72, 96, 112, 128],
        [104, 144, 184, 224, 256],
        [208, 288, 368, 448, 512],
    ]


def test_channels_in_eights_never_lose_more_than_a_tenth() -> None:
    assert [in_eights(c) for c in (1, 8, 11, 12, 25.6, 26, 35.84, 71.68)] == [8, 8, 16, 16, 24, 24, 40, 72]
    for channels in range(1, 3000):
        assert in_eights(channels) % 8 == 0
        assert in_eights(channels) >= 0.9 * channels
        assert abs(in_eights(channels) - channels) < 8


def test_smallest_and_largest_are_what_they_say() -> None:
    assert PUBLISHED.contents(PUBLISHED.smallest) == ((0,),) * 4
    assert PUBLISHED.contents(PUBLISHED.largest) == ((4, 4, 4),) * 4
    assert PUBLISHED.parse("smallest") == PUBLISHED.parse("d=0,0,0,0 e=.1") == (0, 0, 0, 0)
    assert PUBLISHED.parse("largest") == PUBLISHED.parse("d=2,2,2,2 e=.25") == (154, 154, 154, 154)


def test_the_small_preset_is_as_its_comment_says() -> None:
    space = ElasticSpace(RESNET_SMALL)
    assert space.num_architectures == 49_787_136
    assert space.cost_table("macs").smallest == 4_508_160
    assert space.cost_table("macs").largest == 52_873_728


def test_a_width_multiplier_scales_stem_and_stages() -> None:
    assert ResnetDesign(width_multiplier=0.25).channels == (16, 64, 128, 256, 512)


# -- costs against modules that are really built ----------------------------------------------------------------------


def test_every_cost_is_that_of_the_built_subnet(space: ElasticSpace) -> None:
    tables = {m: space.cost_table(m) for m in ("macs", "parameters", "bytes", "activation_bytes")}
    x = torch.zeros((1, *space.input_shape), device="meta")
    architectures = list(space.enumerate())
    assert len(architectures) == space.num_architectures == 36
    for architecture in architectures[::7]:  # the smallest, the largest, and every option of both stages
        module = space.build_subnet(architecture)
        assert tables["macs"].cost(architecture) == macs_of(module, x)
        assert tables["parameters"].cost(architecture) == parameters_of(module)
        assert tables["bytes"].cost(architecture) == bytes_of(module.state_dict())
        assert tables["activation_bytes"].cost(architecture) == activation_bytes_of(module, x)


def test_the_published_spaces_costs_are_those_of_a_built_subnet() -> None:
    architecture = PUBLISHED.sample(stream(3, "test"))
    module = on_meta(partial(PUBLISHED.build_subnet, architecture))
    x = torch.zeros((1, *PUBLISHED.input_shape), device="meta")
    assert PUBLISHED.cost_table("macs").cost(architecture) == macs_of(module, x)
    assert PUBLISHED.cost_table("parameters").cost(architecture) == parameters_of(module)
    assert PUBLISHED.cost_table("bytes").cost(architecture) == bytes_of(module.state_dict())


def test_tables_are_measured_once_and_unknown_measures_refused(space: ElasticSpace) -> None:
    assert space.cost_table("macs") is space.cost_table("macs")
    with pytest.raises(ValueError, match=r"unknown measure 'joules': known are macs, .*, bytes"):
        space.cost_table("joules")


# -- one network, two ways to run it ----------------------------------------------------------------------------------


def test_a_subnet_is_the_supernet_on_its_slices(space: ElasticSpace) -> None:
    weights = lively(space)
    supernet = loaded_supernet(space, weights).eval()
    x = torch.randn((3, *space.input_shape), generator=torch_stream(2, "test"))
    seen = []
    for architecture in space.enumerate():
        subnet = loaded_subnet(space, weights, architecture).eval()
        with torch.no_grad():
            y = supernet(x, architecture)
            assert torch.equal(y, subnet(x)), architecture
        assert y.shape == (3, 3)
        seen.append(y)
    assert len({tuple(y.flatten().tolist()) for y in seen}) == 36, "no two subnets compute the same"


@pytest.mark.parametrize("training", [False, True])
def test_gradients_reach_the_slices_and_nothing_else(space: ElasticSpace, training: bool) -> None:
    weights = lively(space)
    x = torch.randn((4, *space.input_shape), generator=torch_stream(2, "test"))
    for architecture in [space.smallest, space.largest, (1, 4), (5, 0), (3, 2)]:
        supernet = loaded_supernet(space, weights).train(training)
        subnet = loaded_subnet(space, weights, architecture).train(training)
        supernet(x, architecture).square().sum().backward()
        subnet(x).square().sum().backward()
        slices, expected = space.slices(architecture), dict(subnet.named_parameters())
        for name, parameter in supernet.named_parameters():
            dense = torch.zeros_like(parameter)
            if name in expected:
                gradient = expected[name].grad
                assert gradient is not None
                slices[name].of(dense).copy_(gradient)
            found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(found, dense, rtol=1e-5, atol=1e-6, msg=f"{architecture} {name}")
            outside = torch.ones_like(dense, dtype=torch.bool)
            if name in expected:
                slices[name].of(outside).fill_(False)
            assert not found[outside].any(), (architecture, name)


def test_training_moves_the_statistics_of_the_slices_alone() -> None:
    space = small("batch")
    weights = lively(space)
    architecture: Architecture = (1, 0)
    supernet = loaded_supernet(space, weights).train()
    subnet = loaded_subnet(space, weights, architecture).train()
    x = torch.randn((4, *space.input_shape), generator=torch_stream(2, "test"))
    supernet(x, architecture)
    subnet(x)
    slices, own = space.slices(architecture), subnet.state_dict()
    moved = 0
    for name, after in supernet.state_dict().items():
        expected = weights[name].clone()
        if name in slices:
            slices[name].of(expected).copy_(own[name])
        moved += not torch.equal(after, weights[name])
        torch.testing.assert_close(after, expected, rtol=1e-6, atol=1e-7)
        outside = torch.ones_like(after, dtype=torch.bool)
        if name in slices:
            slices[name].of(outside).fill_(False)
        assert torch.equal(after[outside], weights[name][outside]), name
    assert moved > 0


def test_more_subnets_than_skeletons_are_kept_still_run() -> None:
    space = small("none")
    weights = lively(space)
    supernet = loaded_supernet(space, weights).eval()
    x = torch.randn((1, *space.input_shape), generator=torch_stream(2, "test"))
    first = [supernet(x, a) for a in space.enumerate()]
    again = [supernet(x, a) for a in reversed(list(space.enumerate()))][::-1]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_the_supernet_holds_the_spaces_tensors_and_no_other(space: ElasticSpace) -> None:
    supernet = space.build_supernet()
    assert {n: tuple(t.shape) for n, t in supernet.state_dict().items()} == dict(supernet_shapes(space))
    assert all(bool(t.isnan().all()) for t in supernet.parameters()), "a forgotten load must not look like a result"


def test_initial_weights_depend_on_the_generator_alone(space: ElasticSpace) -> None:
    first, second = (space.initial_weights(torch_stream(5, "test")) for _ in range(2))
    other = space.initial_weights(torch_stream(6, "test"))
    assert first.keys() == supernet_shapes(space).keys()
    assert all(torch.equal(t, second[n]) for n, t in first.items())
    assert not torch.equal(first["stem.0.weight"], other["stem.0.weight"])
    alone = space.initial_subnet_weights((1, 4), torch_stream(5, "test"))
    assert {n: t.shape for n, t in alone.items()} == {
        n: t.shape for n, t in extract(first, space.slices((1, 4))).items()
    }


# -- slices -----------------------------------------------------------------------------------------------------------


def test_slices_of_the_largest_are_whole(space: ElasticSpace) -> None:
    slices = space.slices(space.largest)
    assert slices.keys() == supernet_shapes(space).keys()
    assert all(piece == Slice(name) for name, piece in slices.items())


def test_slices_lie_in_the_supernet_and_have_the_subnets_shapes(space: ElasticSpace) -> None:
    weights = space.initial_weights(torch_stream(1, "test"))
    for architecture in space.enumerate():
        slices = space.slices(architecture)
        cut = extract(weights, slices)
        assert {n: t.shape for n, t in cut.items()} == {
            n: t.shape for n, t in space.build_subnet(architecture).state_dict().items()
        }
        for name, piece in slices.items():
            assert piece.source == name, "subnet and supernet name their tensors alike"
            shape = supernet_shapes(space)[name]
            region = piece.region or tuple((0, n) for n in shape)
            assert all(start == 0 and 0 < stop <= whole for (start, stop), whole in zip(region, shape, strict=True))


def test_a_smaller_subnets_slices_lie_inside_a_larger_ones(space: ElasticSpace) -> None:
    sizes = {a: {n: t.shape for n, t in _cut(space, a).items()} for a in space.enumerate()}
    nested = 0
    for a, smaller in sizes.items():
        for b, larger in sizes.items():
            if not _inside(space, a, b):
                continue
            nested += 1
            assert smaller.keys() <= larger.keys()
            assert all(m <= n for name in smaller for m, n in zip(smaller[name], larger[name], strict=True))
    assert nested > 36


def _cut(space: ElasticSpace, architecture: Architecture) -> dict[str, Tensor]:
    meta = {name: torch.empty(shape, device="meta") for name, shape in supernet_shapes(space).items()}
    return extract(meta, space.slices(architecture))


def _inside(space: ElasticSpace, a: Architecture, b: Architecture) -> bool:
    """No stage of `a` is deeper than `b`'s, no block wider."""
    stages = zip(space.contents(a), space.contents(b), strict=True)
    return all(len(p) <= len(q) and all(v <= w for v, w in zip(p, q, strict=False)) for p, q in stages)


def test_a_leading_slice_by_hand() -> None:
    assert leading("w", (2, 3), (4, 3)) == Slice("w", ((0, 2), (0, 3)))
    assert leading("w", (4, 3), (4, 3)) == Slice("w")
    assert leading("n", (), ()) == Slice("n")
    assert Slice("w", ((0, 2), (0, 1))).of(torch.arange(6).reshape(3, 2)).tolist() == [[0], [2]]


# -- random subnets --------------------------------------------------------------------------------------------------


def test_depth_draws_are_as_wide_as_can_be() -> None:
    rng = stream(1, "test")
    drawn = [PUBLISHED.contents(PUBLISHED.sample_depth(rng)) for _ in range(200)]
    assert all(set(content) == {4} for contents in drawn for content in contents)
    assert {len(content) for contents in drawn for content in contents} == {1, 2, 3}


def test_depths_are_drawn_uniformly_not_options() -> None:
    rng = stream(1, "test")
    depths = np.array([[len(c) for c in PUBLISHED.contents(PUBLISHED.sample(rng))] for _ in range(600)])
    counts = np.bincount(depths.ravel(), minlength=4)[1:]
    # 2400 draws, three depths: 800 each, standard deviation 23. Uniform options would give 77, 387 and 1935.
    assert np.all(np.abs(counts - 800) < 100)


# -- what a configuration may change ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SpaceConfig("resnet_elastic", stage_layers=[1, 2]), "resnet_elastic has no stage_layers; it has .*depths"),
        (SpaceConfig("resnet_elastic", operators=["identity"]), "resnet_elastic has no operators"),
        (SpaceConfig("resnet_elastic", dropout=0.1), "resnet_elastic has no dropout"),
        (SpaceConfig("cnn_digits", depths=[1]), "cnn_digits has no depths"),
        (SpaceConfig("resnet_elastic", options={"a": 1}), r"space\.options\.a: not an option of space resnet_elastic"),
        (SpaceConfig("resnet_elastic", norm="layer"), "norm='layer': allowed are none, batch, group"),
        (SpaceConfig("resnet_elastic", depths=[2, 2]), "have 4, 4 and 2 values: give one per stage"),
        (SpaceConfig("resnet_elastic", depths=[2, 2, 2, -1]), "depths 0 or more"),
        (SpaceConfig("resnet_elastic", width_multiplier=0.0), "must be positive"),
        (SpaceConfig("resnet_elastic", expansions=[0.2, 0.1]), "ascending order"),
        (SpaceConfig("resnet_elastic", expansions=[]), "ascending order"),
        (SpaceConfig("resnet_elastik"), "resnet_elastic"),
    ],
)
def test_what_a_space_does_not_have_is_refused_by_name(config: SpaceConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_space(config)


def test_a_configured_space_is_as_configured() -> None:
    space = build_space(SpaceConfig("resnet_elastic", num_classes=7, depths=[0, 1, 0, 0], norm="group"))
    assert isinstance(space, ElasticSpace)
    assert space.options == (5, 30, 5, 5)
    assert not space.keeps_statistics
    assert supernet_shapes(space)["head.2.weight"] == (7, 2048)
