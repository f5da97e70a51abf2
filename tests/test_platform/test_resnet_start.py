"""How an elastic residual network without norms starts: its initial weights, biases, first loss and gradient."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedloom.platform.clients.stacks import layers_stack
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.base import supernet_shapes
from fedloom.platform.spaces.elastic import ElasticSpace
from fedloom.platform.spaces.initialisation import UniformConvolution, initialise, on_meta
from fedloom.platform.spaces.registry import build_space
from fedloom.platform.spaces.resnet import ResnetDesign
from fedloom.platform.spaces.space_config import SpaceConfig


def narrow(initialisation: str | None = None, *, norm: str = "none", bias: bool = False) -> ElasticSpace:
    """The papers' network at an eighth of its width."""
    return ElasticSpace(ResnetDesign(width_multiplier=0.125, norm=norm, initialisation=initialisation, bias=bias))


def start(space: ElasticSpace, subnet: str, seed: int = 1) -> tuple[float, float]:
    """Loss and gradient norm of a subnet of fresh weights on a batch of noise."""
    generator = torch_stream(seed, "test")
    supernet = space.build_supernet()
    supernet.load_state_dict(space.initial_weights(generator))
    x, y = torch.randn((16, 3, 32, 32), generator=generator), torch.randint(0, 10, (16,), generator=generator)
    loss = F.cross_entropy(supernet(x, space.parse(subnet)), y)
    loss.backward()  # type: ignore[no-untyped-call]
    norms = [p.grad.norm() for p in supernet.parameters() if p.grad is not None]
    return loss.item(), torch.stack(norms).norm().item()


@pytest.mark.parametrize("seed", [1, 2])
def test_without_norms_every_subnet_starts_at_the_loss_of_guessing(seed: int) -> None:
    space = narrow()
    for subnet in ("smallest", "largest"):
        loss, gradient = start(space, subnet, seed)
        assert loss == pytest.approx(math.log(10), abs=0.03), subnet
        assert 0.05 < gradient < 0.5, subnet


def test_with_hes_weights_the_largest_subnet_starts_far_too_large() -> None:
    space = narrow("he", bias=True)
    assert start(space, "smallest")[0] == pytest.approx(math.log(10), abs=0.1)
    loss, gradient = start(space, "largest")
    assert loss > 2 * math.log(10)
    assert gradient > 100


def test_the_published_network_has_no_biases_and_torchs_bounds() -> None:
    space = ElasticSpace(ResnetDesign())
    assert space.cost_table("parameters").largest == 71_689_930
    assert ElasticSpace(ResnetDesign(bias=True)).cost_table("parameters").largest == 71_708_234
    assert [n for n in supernet_shapes(space) if n.endswith("bias")] == ["head.2.bias"]


def test_convolutions_start_as_torchs_own() -> None:
    weights = initialise(on_meta(lambda: nn.Sequential(UniformConvolution(32, 64, 3))), torch_stream(1, "test"))
    torch.manual_seed(1)
    own = nn.Conv2d(32, 64, 3)
    for name, theirs in own.state_dict().items():
        ours = weights[f"0.{name}"]
        assert ours.abs().max().item() == pytest.approx(1 / math.sqrt(32 * 9), rel=0.05)
        assert ours.abs().max().item() <= 1 / math.sqrt(32 * 9)
        assert ours.std().item() == pytest.approx(theirs.std().item(), rel=0.2 if name == "bias" else 0.03)


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_with_norms_convolutions_start_as_before_unless_told(norm: str) -> None:
    before, told = narrow(norm=norm), narrow("torch", norm=norm)
    assert supernet_shapes(before) == supernet_shapes(told)
    stems = [space.initial_weights(torch_stream(1, "test"))["stem.0.weight"] for space in (before, told)]
    assert stems[0].std().item() == pytest.approx(math.sqrt(2 / (8 * 9)), rel=0.15), "He's, by the fan-out of 8 x 9"
    assert stems[1].abs().max().item() <= 1 / math.sqrt(3 * 9)


def test_networks_of_both_starts_are_trained_in_stacks() -> None:
    for space in (narrow(), narrow("he", bias=True)):
        assert layers_stack(space.build_subnet(space.smallest))


def test_an_unknown_start_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"space\.initialisation='glorot': allowed are torch, he"):
        build_space(SpaceConfig("resnet_elastic", initialisation="glorot"))
