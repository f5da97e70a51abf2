"""Initial values: the distributions, the order, and what is refused."""

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from fedloom.platform.spaces.initialisation import blank, initialise, on_meta


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_distributions() -> None:
    net = on_meta(lambda: nn.Sequential(nn.Conv2d(32, 64, 3), nn.BatchNorm2d(64), nn.Linear(256, 100)))
    weights = initialise(net, generator())
    assert list(weights) == list(net.state_dict())
    assert weights["0.weight"].std().item() == pytest.approx(math.sqrt(2 / (64 * 9)), rel=0.03)
    assert not weights["0.bias"].any()
    assert bool((weights["1.weight"] == 1).all() and (weights["1.running_var"] == 1).all())
    assert not weights["1.bias"].any()
    assert not weights["1.running_mean"].any()
    assert weights["1.num_batches_tracked"].dtype == torch.int64
    assert weights["2.weight"].abs().max().item() == pytest.approx(1 / 16, rel=0.01)
    assert weights["2.weight"].std().item() == pytest.approx(1 / 16 / math.sqrt(3), rel=0.03)


def test_embeddings_and_recurrent_layers() -> None:
    weights = initialise(
        on_meta(lambda: nn.ModuleList([nn.Embedding(90, 8), nn.LSTM(8, 64), nn.GRU(8, 64)])), generator()
    )
    assert weights["0.weight"].std().item() == pytest.approx(1, rel=0.1)
    assert weights["1.weight_hh_l0"].abs().max().item() == pytest.approx(1 / 8, rel=0.01)
    assert weights["2.bias_ih_l0"].abs().max().item() <= 1 / 8


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(3))
        self.linear = nn.Linear(2, 2)


class Knowing(Own):
    def initialise_own(self, tensors_by_name: Mapping[str, Tensor], generator: torch.Generator) -> None:
        tensors_by_name["gain"].fill_(7)


def test_modules_with_tensors_of_their_own() -> None:
    with pytest.raises(ValueError, match="no initial values are known for Own"):
        initialise(on_meta(Own), generator())
    weights = initialise(on_meta(Knowing), generator())
    assert weights["gain"].tolist() == [7, 7, 7]
    assert set(weights) == {"gain", "linear.weight", "linear.bias"}


def test_shared_tensors_are_refused() -> None:
    shared = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"shared between modules .* 1\.bias, 1\.weight"):
        initialise(nn.ModuleList([shared, shared]), generator())


def test_blank_modules_are_nan_and_touch_no_generator() -> None:
    before = torch.get_rng_state()
    module = blank(lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    assert torch.equal(torch.get_rng_state(), before)
    assert bool(module[0].weight.isnan().all())
    assert bool(module[1].running_var.isnan().all())
    assert module[1].num_batches_tracked.item() == 0


def test_a_buffer_that_nothing_would_load_is_refused() -> None:
    def build() -> nn.Module:
        module = nn.Sequential(nn.Linear(2, 2))
        module.register_buffer("mask", torch.ones(2), persistent=False)
        return module

    with pytest.raises(ValueError, match="buffer mask is not persistent, so that its value would be lost"):
        blank(build)
