"""The CIFAR spaces meet the published numbers; operators, designs and the registry refuse what they cannot build."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.base import SearchSpace
from fedloom.platform.spaces.cnn import OPERATORS, conv, ds, identity, mb, parse_operator
from fedloom.platform.spaces.operator_choice import OperatorChoiceSpace
from fedloom.platform.spaces.registry import SPACES, build_space
from fedloom.platform.spaces.space_config import SpaceConfig
from fedloom.tiers.measure import macs_of, parameters_of


def space_of(name: str, **changes: Any) -> OperatorChoiceSpace:
    space = build_space(SpaceConfig(name, **changes))
    assert isinstance(space, OperatorChoiceSpace)
    return space


@pytest.fixture(scope="module")
def cifar() -> OperatorChoiceSpace:
    """The published space; its tables are counted once."""
    return space_of("cnn_cifar")


def test_cnn_cifar_has_the_published_size(cifar: OperatorChoiceSpace) -> None:
    space = cifar
    assert space.num_architectures == 1_853_020_188_851_841
    sizes = space.num_parameters
    assert (sizes.supernet, sizes.fixed, sizes.largest_path) == (20_802_298, 619_226, 9_678_874)
    macs = space.cost_table("macs")
    assert (macs.largest, macs.cost((8,) * 16)) == (710_938_504, 18_179_976)
    assert macs.fixed == macs.smallest == 18_179_976
    # The paper's largest path also counts normalisation and activation.
    assert macs.largest == pytest.approx(716.0e6, rel=0.015)


def test_cnn_cifar_costs_are_exact_for_whole_subnets(cifar: OperatorChoiceSpace) -> None:
    space = cifar
    rng = np.random.default_rng(0)
    x = torch.zeros(1, 3, 32, 32, device="meta")
    for _ in range(5):
        path = space.sample(rng)
        with torch.device("meta"):
            subnet = space.build_subnet(path)
        assert macs_of(subnet, x) == space.cost_table("macs").cost(path)
        assert parameters_of(subnet) == space.cost_table("parameters").cost(path)


def test_cnn_speech_has_the_published_size() -> None:
    space = space_of("cnn_speech", num_classes=12)
    assert space.num_architectures == 11**6 == 1_771_561
    assert space.num_parameters.supernet == 3_170_572  # 3.17 M
    macs = space.cost_table("macs")
    assert (macs.fixed, macs.largest) == (445_568, 19_707_008)  # 19.7 M, of convolutions and matrix products
    names = "conv(1) ds(3,0.5) ds(3,1) ds(1,2) ds(3,2) mb(1,2) mb(3,0.5) conv(3) mb(3,1) mb(3,2) identity"
    assert space.operator_names == (tuple(names.split()),) * 6
    module = space.build_subnet(space.largest).eval()
    module.load_state_dict(space.initial_weights(torch.Generator().manual_seed(0)), strict=False)
    assert module(torch.zeros((2, 1, 40, 51))).shape == (2, 12)


def test_cnn_cifar_100_differs_in_the_classifier_alone() -> None:
    sizes = space_of("cnn_cifar", num_classes=100).num_parameters
    assert sizes.supernet - 20_802_298 == 90 * (324 + 1)


def test_cnn_cifar_wide_has_the_published_size() -> None:
    space = space_of("cnn_cifar_wide")
    assert space.num_architectures == 9**32
    assert space.num_parameters.supernet == 191_241_288
    macs = space.cost_table("macs")
    assert (macs.largest, macs.fixed) == (4_439_811_322, 52_457_466)
    assert macs.largest == pytest.approx(4450.7e6, rel=0.015)
    assert macs.fixed == pytest.approx(53.8e6, rel=0.03)


@pytest.mark.parametrize(
    ("spelling", "parameters"),
    [
        ("conv(1)", 64 + 16),
        ("conv(3)", 9 * 64 + 16),
        ("ds(3,.5)", 9 * 4 * 2 + 8 + 32 + 16),
        ("ds(3,1)", 9 * 8 + 16 + 64 + 16),
        ("ds(3,2)", 9 * 16 + 32 + 128 + 16),
        ("mb(1,2)", 128 + 32 + 2 * (256 + 16) + 128 + 16),
        ("mb(3,.5)", 9 * 32 + 8 + 2 * (16 + 4) + 32 + 16),
        ("identity", 0),
    ],
)
def test_operators_on_eight_channels(spelling: str, parameters: int) -> None:
    module = parse_operator(spelling).build(8)
    assert parameters_of(module) == parameters
    assert module(torch.zeros(2, 8, 5, 5)).shape == (2, 8, 5, 5)


def test_ds_and_mb_add_their_input_and_conv_does_not() -> None:
    x = torch.randn(2, 8, 5, 5, generator=torch.Generator().manual_seed(0))
    given = x.clone()
    for operator, residual in ((ds(3, 0.5), True), (mb(3, 2), True), (conv(3), False)):
        module = operator.build(8).eval()
        y = module(x)
        assert bool((y >= (x if residual else 0)).all())
        assert bool((y < 0).any()) == residual
        assert torch.equal(x, given)
    assert identity().build(8)(x) is x


def test_spellings_are_normalised() -> None:
    names = [parse_operator(text).name for text in OPERATORS]
    assert names[:3] == ["conv(1)", "ds(3,0.5)", "ds(3,1)"]
    assert [parse_operator(name).name for name in names] == names
    assert parse_operator(" mb( 3, 0.50 ) ").name == "mb(3,0.5)"


@pytest.mark.parametrize(
    ("spelling", "message"),
    [
        ("pool(3)", r"unknown operator 'pool\(3\)': known are conv\(k\), ds\(k,e\)"),
        ("conv", "wrong numbers"),
        ("conv(1,2)", "wrong numbers"),
        ("identity(1)", "wrong numbers"),
        ("conv(2)", "odd and positive"),
        ("ds(3,0)", "expansion must be positive"),
        ("mb(3,x)", r"operator 'mb\(3,x\)'"),
    ],
)
def test_unknown_operators(spelling: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_operator(spelling)


def test_operators_that_do_not_fit_the_channels() -> None:
    with pytest.raises(ValueError, match=r"ds\(3,1\.5\) cannot group 8 channels into 12"):
        ds(3, 1.5).build(8)
    with pytest.raises(ValueError, match=r"mb\(3,0\.1\) leaves no channel of 8"):
        mb(3, 0.1).build(8)


def test_a_configuration_changes_what_it_names() -> None:
    space = space_of("cnn_digits", operators=["conv(3)", "identity"], stage_layers=[1, 1], stem_channels=4)
    assert space.operator_names == (("conv(3)", "identity"),) * 2
    assert space.num_parameters.fixed < 1000
    assert space.input_shape == (1, 8, 8)


def test_a_stem_of_stride_two_leaves_a_quarter_of_the_macs(cifar: OperatorChoiceSpace) -> None:
    space = space_of("cnn_cifar", stem_stride=2)
    for option, operator in enumerate(OPERATORS):
        path = (option,) + (8,) * 15
        costs = [s.cost_table("macs").cost(path) - s.cost_table("macs").fixed for s in (space, cifar)]
        # Approximately: gates of squeeze-and-excitation cost the same at every resolution.
        assert 4 * costs[0] == pytest.approx(costs[1], rel=0.01), operator
    assert space.cost_table("parameters").fixed == cifar.cost_table("parameters").fixed


def test_the_configuration_is_structured() -> None:
    merged = OmegaConf.merge(OmegaConf.structured(SpaceConfig), {"operators": ["ds(3,.5)"], "stem_channels": 4})
    config = OmegaConf.to_object(merged)
    assert config == SpaceConfig(operators=["ds(3,.5)"], stem_channels=4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stage_layers": [2, 2, 2]}, r"one stride for each of the 3 stages, given \[2, 2\]"),
        ({"stage_layers": [2, 0]}, r"stage_layers .* given \[2, 0\]"),
        ({"stage_strides": [2, 1]}, "stage_strides of cnn_digits may be 2, given 1"),
        ({"depthwise_link": True, "stage_strides": [2, 3]}, "may be 1 or 2, given 3"),
        ({"input_shape": [1, 6, 8]}, "multiples of 4, given 6 x 8"),
        ({"stem_stride": 4}, "multiples of 16, given 8 x 8"),
        ({"input_shape": [8, 8]}, "channels, height, width"),
        ({"num_classes": 0}, "num_classes must be at least 1, given 0"),
        ({"stem_channels": 1}, "stem_channels must be at least 2, given 1"),
        ({"operators": []}, "at least one operator"),
        ({"options": {"depth": 3}}, r"space\.options\.depth: not an option of space cnn_digits"),
    ],
)
def test_designs_that_cannot_be_built(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        space_of("cnn_digits", **changes)


def user_space(config: SpaceConfig, *, stem: int = 4) -> SearchSpace:
    """Stands for a function in a user's package."""
    few = SpaceConfig("cnn_digits", stage_layers=[1, 1], operators=["conv(1)", "identity"])
    return build_space(replace(few, num_classes=config.num_classes, stem_channels=stem))


def test_a_users_space_is_found_by_its_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    from types import ModuleType

    module = ModuleType("users_package")
    module.space = user_space  # type: ignore[attr-defined]
    module.number = 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "users_package", module)
    space = build_space(SpaceConfig("users_package:space", num_classes=3, options={"stem": 8}))
    assert space.build_subnet((1, 1))(torch.zeros(2, 1, 8, 8)).shape == (2, 3)
    assert space.initial_weights(torch_stream(1, "init"))["fixed.stem.conv.weight"].shape[0] == 8
    with pytest.raises(ValueError, match=r"'users_package:number' is an int, not a function of \(config\)"):
        build_space(SpaceConfig("users_package:number"))
    with pytest.raises(ValueError, match="'users_package:nothing' cannot be imported"):
        build_space(SpaceConfig("users_package:nothing"))
    with pytest.raises(ValueError, match=r"space\.options\.depth: not an option of .*; the options are stem"):
        build_space(SpaceConfig("users_package:space", options={"depth": 3}))


@pytest.mark.parametrize("name", ["cnn_cifr", ""])
def test_an_unknown_space_lists_the_known(name: str) -> None:
    with pytest.raises(ValueError, match=r"known are .*cnn_cifar, cnn_cifar_wide, cnn_depth, .*or module:name"):
        build_space(SpaceConfig(name))
    assert set(SPACES.known) >= {"cnn_cifar", "cnn_cifar_wide", "cnn_digits"}
