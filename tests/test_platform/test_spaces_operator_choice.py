"""Operator-choice spaces: architectures, tensors, extraction, costs."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedloom.platform.seeding import stream, torch_stream
from fedloom.platform.spaces.operator_choice import Candidate, NamedOperatorSpace, OperatorChoiceSpace
from fedloom.platform.spaces.registry import build_space
from fedloom.platform.spaces.slices import Architecture, bytes_of, extract
from fedloom.platform.spaces.space_config import SpaceConfig
from fedloom.tiers.measure import MEASURES, activation_bytes_of, macs_of, parameters_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def digits() -> OperatorChoiceSpace:
    space = build_space(SpaceConfig("cnn_digits"))
    assert isinstance(space, OperatorChoiceSpace)
    return space


def tensors_of(space: NamedOperatorSpace, owner: tuple[int, int] | None) -> tuple[str, ...]:
    """The tensors of one operator anywhere in the network, or of the fixed part."""
    return tuple(name for name, known in space.owner_of.items() if known == owner)


def random_weights(space: OperatorChoiceSpace, seed: int) -> dict[str, Tensor]:
    """Initial weights with norms that have seen data."""
    generator = torch_stream(seed, "test")
    weights = space.initial_weights(generator)
    for name, tensor in weights.items():
        if ".norm." in name and tensor.is_floating_point():
            tensor.uniform_(0.5, 1.5, generator=generator)
    return weights


def test_architectures(digits: OperatorChoiceSpace) -> None:
    assert digits.num_architectures == 9**5
    assert digits.options == (9,) * 5
    assert digits.operator_names[3][1] == "ds(3,0.5)"
    first = list(itertools.islice(digits.enumerate(), 10))
    assert first[:2] == [(0, 0, 0, 0, 0), (0, 0, 0, 0, 1)]
    assert first[9] == (0, 0, 0, 1, 0)


def test_samples_are_uniform_and_plain(digits: OperatorChoiceSpace) -> None:
    rng = stream(1, "test")
    paths = [digits.sample(rng) for _ in range(9000)]
    assert all(type(option) is int for option in paths[0])
    counts = np.stack([np.bincount(column, minlength=9) for column in np.array(paths).T])
    chi_square = ((counts - 1000) ** 2 / 1000).sum()
    assert chi_square < 80  # 40 degrees of freedom: exceeded with probability 2e-4


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ((0, 0, 0, 0), "has 5 layers, given 4"),
        ((0, 0, 9, 0, 0), r"layer 2 .* operators 0 to 8 \(conv\(1\), .*identity\), given 9"),
        ((0, -1, 0, 0, 0), "layer 1 .* given -1"),
        ((0, 0, 0, 0, 1.0), r"layer 4 .* given 1\.0"),
    ],
)
def test_an_architecture_outside_the_space_is_named(
    digits: OperatorChoiceSpace, architecture: Architecture, message: str
) -> None:
    for refuse in (digits.validate, digits.slices, digits.build_subnet):
        with pytest.raises(ValueError, match=message):
            refuse(architecture)


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (((0,), (1,)), "has 5 layers, given 2"),
        (((0,), (1,), (), (0,), (0,)), "layer 2 .* given \\(\\)"),
        (((0,), (1,), (2, 1), (0,), (0,)), "layer 2 .* given \\(2, 1\\)"),
        (((0,), (1,), (1, 1), (0,), (0,)), "layer 2 .* given \\(1, 1\\)"),
        (((0,), (1,), (1, 9), (0,), (0,)), "layer 2 .* given 9"),
    ],
)
def test_a_subspace_outside_the_space_is_named(
    digits: OperatorChoiceSpace, kept: tuple[tuple[int, ...], ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        digits.subspace_slices(kept)


def test_every_tensor_has_one_owner(digits: OperatorChoiceSpace) -> None:
    names = list(digits.build_supernet().state_dict())
    assert list(digits.owner_of) == names
    grouped = list(tensors_of(digits, None))
    for layer, option in itertools.product(range(5), range(9)):
        tensors = tensors_of(digits, (layer, option))
        assert all(digits.owner_of[name] == (layer, option) for name in tensors)
        assert bool(tensors) == (option != 8)
        grouped += tensors
    assert sorted(grouped) == sorted(names)
    assert "layers.3.ops.5.parts.1.squeeze.bias" in tensors_of(digits, (3, 5))
    assert "fixed.classifier.weight" in tensors_of(digits, None)


def test_slices_name_exactly_the_subnets_tensors(digits: OperatorChoiceSpace) -> None:
    weights = random_weights(digits, 0)
    rng = stream(2, "test")
    for _ in range(10):
        path = digits.sample(rng)
        subnet = digits.build_subnet(path)
        own = extract(weights, digits.slices(path))
        assert set(own) == set(subnet.state_dict())
        assert all(own[name].shape == t.shape and own[name].dtype == t.dtype for name, t in subnet.state_dict().items())
        assert all(own[name].data_ptr() == weights[name].data_ptr() for name in own)


def test_a_subspace_is_the_supernet_with_operators_missing(digits: OperatorChoiceSpace) -> None:
    kept = ((0, 8), (3,), (1, 2, 5), (8,), (7, 8))
    slices = digits.subspace_slices(kept)
    module = digits.build_subspace(kept)
    assert set(slices) == set(module.state_dict())
    weights = random_weights(digits, 0)
    module.load_state_dict(extract(weights, slices))
    supernet = digits.build_supernet()
    supernet.load_state_dict(weights)
    x = torch.randn(3, 1, 8, 8, generator=torch_stream(0, "x"))
    path = (8, 3, 5, 8, 7)
    assert torch.equal(module.eval()(x, path), supernet.eval()(x, path))
    with pytest.raises(ValueError, match="layer 1 holds 3, not 2"):
        module(x, (8, 2, 5, 8, 7))
    assert set(digits.subspace_slices(digits.largest_subspace)) == set(weights)


def test_extracted_subnets_compute_what_the_supernet_computes(digits: OperatorChoiceSpace) -> None:
    weights = random_weights(digits, 3)
    supernet = digits.build_supernet()
    supernet.load_state_dict(weights)
    supernet.eval()
    x = torch.randn(4, 1, 8, 8, generator=torch_stream(0, "x"))
    rng = stream(3, "test")
    outputs = []
    for _ in range(10):
        path = digits.sample(rng)
        subnet = digits.build_subnet(path).eval()
        subnet.load_state_dict(extract(weights, digits.slices(path)))
        with torch.no_grad():
            outputs.append(supernet(x, path))
            torch.testing.assert_close(subnet(x), outputs[-1], rtol=1e-6, atol=1e-6)
    assert not torch.allclose(outputs[0], outputs[1])


def test_weights_can_be_passed_instead_of_loaded(digits: OperatorChoiceSpace) -> None:
    with torch.device("meta"):
        supernet = digits.build_supernet().eval()
    weights = random_weights(digits, 6)
    loaded = digits.build_supernet().eval()
    loaded.load_state_dict(weights)
    x = torch.randn(2, 1, 8, 8, generator=torch_stream(0, "x"))
    path = (3, 8, 4, 6, 0)
    assert torch.equal(functional_call(supernet, weights, (x, path)), loaded(x, path))


def test_a_step_touches_only_the_chosen_operators(digits: OperatorChoiceSpace) -> None:
    weights = random_weights(digits, 4)
    supernet = digits.build_supernet().train()
    supernet.load_state_dict(weights)
    path = (0, 4, 8, 7, 1)
    supernet(torch.randn(8, 1, 8, 8, generator=torch_stream(0, "x")), path).square().sum().backward()
    used = set(digits.slices(path))
    for name, parameter in supernet.named_parameters():
        assert (parameter.grad is not None) == (name in used), name
    changed = {name for name, buffer in supernet.named_buffers() if not torch.equal(buffer, weights[name])}
    assert changed == {name for name, _ in supernet.named_buffers() if name in used}


def test_initial_weights_come_from_the_generator_alone(digits: OperatorChoiceSpace) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = digits.initial_weights(torch_stream(1, "init"))
    digits.build_supernet()
    digits.build_subnet((0,) * 5)
    assert torch.equal(torch.get_rng_state(), before)
    again = digits.initial_weights(torch_stream(1, "init"))
    other = digits.initial_weights(torch_stream(2, "init"))
    assert list(first) == list(digits.owner_of)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["fixed.stem.conv.weight"], other["fixed.stem.conv.weight"])
    assert all(bool(t.isfinite().all()) for t in first.values())


def test_initial_subnet_weights_fit_the_subnet(digits: OperatorChoiceSpace) -> None:
    path = (7, 0, 8, 5, 2)
    weights = digits.initial_subnet_weights(path, torch_stream(1, "init"))
    digits.build_subnet(path).load_state_dict(weights)
    assert set(weights) == set(digits.slices(path))


def test_modules_without_weights_do_not_pass_for_trained_ones(digits: OperatorChoiceSpace) -> None:
    x = torch.zeros(2, 1, 8, 8)
    assert bool(digits.build_supernet().eval()(x, (0,) * 5).isnan().all())
    assert bool(digits.build_subnet((8,) * 5).eval()(x).isnan().all())
    with torch.device("meta"):
        assert next(digits.build_subnet((8,) * 5).parameters()).is_meta


def test_tables_equal_measures_of_whole_subnets(digits: OperatorChoiceSpace) -> None:
    rng = stream(5, "test")
    x = torch.zeros(1, 1, 8, 8)
    for path in [(8,) * 5, (7,) * 5, *(digits.sample(rng) for _ in range(8))]:
        subnet = digits.build_subnet(path)
        assert digits.cost_table("macs").cost(path) == macs_of(subnet, x)
        assert digits.cost_table("parameters").cost(path) == parameters_of(subnet)
        assert digits.cost_table("activation_bytes").cost(path) == activation_bytes_of(subnet, x)
        assert digits.cost_table("bytes").cost(path) == bytes_of(subnet.state_dict())


def test_tables_are_computed_once_and_know_their_kind(digits: OperatorChoiceSpace) -> None:
    for measure in ("macs", "parameters", "activation_bytes"):
        table = digits.cost_table(measure)
        assert table is digits.cost_table(measure)
        assert (table.measure, table.reduce) == (measure, MEASURES[measure])
        assert all(row[8] == 0 for row in table.options)
    with pytest.raises(ValueError, match="unknown measure 'flops': known are macs, parameters"):
        digits.cost_table("flops")


def test_latency_table_is_measured(digits: OperatorChoiceSpace) -> None:
    table = digits.cost_table("latency_s")
    assert table.fixed > 0
    assert all(row[8] == 0 and min(row[:8]) > 0 for row in table.options)
    assert table.largest < 1


class Doubling(nn.Module):
    """A skeleton with layers that change the width and are not in a row: 2 -> 3 twice, added."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 4)

    def forward(self, x: Tensor, layers: list[nn.Module]) -> Tensor:
        y: Tensor = self.head(layers[0](x) + layers[1](x))
        return y


def parallel_space(width: int = 3) -> OperatorChoiceSpace:
    plain = Candidate("linear", lambda: nn.Linear(2, 3))
    deep = Candidate("deep", lambda: nn.Sequential(nn.Linear(2, 5), nn.Linear(5, width)))
    return OperatorChoiceSpace(name="parallel", input_shape=(2,), layers=[[plain, deep], [deep]], build_fixed=Doubling)


def test_any_skeleton_will_do() -> None:
    space = parallel_space()
    table = space.cost_table("macs")
    assert (table.fixed, table.options) == (12, ((6, 25), (25,)))
    assert space.num_architectures == 2
    assert space.num_parameters.supernet == 16 + 9 + 2 * 33
    subnet = space.build_subnet((1, 0))
    assert macs_of(subnet, torch.zeros(1, 2)) == table.cost((1, 0)) == math.fsum([12, 25, 25])


def test_candidates_must_agree_on_their_output() -> None:
    with pytest.raises(ValueError, match=r"layer 0 of parallel: deep gives the shape \(1, 7\), linear gives \(1, 3\)"):
        parallel_space(width=7).cost_table("macs")
    with pytest.raises(ValueError, match="layer 1 of empty has no operator"):
        OperatorChoiceSpace(
            name="empty", input_shape=(2,), layers=[[Candidate("i", nn.Identity)], []], build_fixed=Doubling
        )
