"""Measures of modules small enough to count by hand."""

import pytest
import torch
from torch import Tensor, nn

from fedloom.tiers.costs import CostTable
from fedloom.tiers.measure import MEASURES, activation_bytes_of, latency_s_of, macs_of, parameters_of


def small_net() -> nn.Sequential:
    """Conv 3->4 (3x3, same), norm, ReLU, 2x2 average pool, linear 64->5 on an 8x8 image."""
    conv = nn.Conv2d(3, 4, 3, padding=1)
    return nn.Sequential(conv, nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(64, 5))


def test_macs_count_convolutions_and_linears_of_one_sample() -> None:
    expected = 3 * 4 * 9 * 64 + 64 * 5
    assert macs_of(small_net(), torch.zeros(1, 3, 8, 8)) == expected
    assert macs_of(small_net(), torch.zeros(7, 3, 8, 8)) == expected


def test_macs_of_grouped_and_strided_convolutions() -> None:
    net = nn.Conv2d(6, 12, 3, stride=2, padding=1, groups=6)
    assert macs_of(net, torch.zeros(1, 6, 8, 8)) == 12 * 9 * 16


def test_macs_of_an_lstm_are_its_matrix_products() -> None:
    assert macs_of(nn.LSTM(8, 16, batch_first=True), torch.zeros(1, 5, 8)) == 5 * 4 * 16 * (8 + 16)


class AfterAQuestion(nn.Module):
    """A layer of torch's behind a step that depends on values, so that it is measured on a processor."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x if float(x.sum()) < 1e9 else 0 * x)
        return y[0] if isinstance(y, tuple) else y


@pytest.mark.parametrize(
    "layer", [nn.LSTM(8, 16, batch_first=True), nn.GRU(8, 16), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)]
)
def test_macs_are_the_same_whether_a_network_depends_on_values_or_not(layer: nn.Module) -> None:
    x = torch.ones(1, 5, 8)
    fast = torch.backends.mha.get_fastpath_enabled(), torch.backends.mkldnn.enabled
    assert macs_of(AfterAQuestion(layer), x) == macs_of(layer, x) > 1000
    assert (torch.backends.mha.get_fastpath_enabled(), torch.backends.mkldnn.enabled) == fast


def test_parameters_are_the_trainable_ones_counted_once() -> None:
    net = small_net()
    assert parameters_of(net) == (3 * 4 * 9 + 4) + 8 + (64 * 5 + 5)
    net[0].bias.requires_grad_(False)
    net.append(net[1])
    assert parameters_of(net) == 3 * 4 * 9 + 8 + (64 * 5 + 5)


def test_activation_peak_is_the_hungriest_leaf() -> None:
    # The norm and the ReLU read and write 4 x 8 x 8 floats each; the convolution holds 3 + 4 channels.
    assert activation_bytes_of(small_net(), torch.zeros(2, 3, 8, 8)) == 2 * 4 * 64 * 4


def test_work_in_place_holds_one_tensor() -> None:
    assert activation_bytes_of(nn.ReLU(inplace=True), torch.zeros(1, 10)) == 40
    assert activation_bytes_of(nn.ReLU(), torch.zeros(1, 10)) == 80


def test_measuring_leaves_the_module_as_it_was() -> None:
    net = small_net().train()
    net[1].eval()
    before = {name: t.clone() for name, t in net.state_dict().items()}
    x = torch.ones(1, 3, 8, 8)
    macs_of(net, x)
    activation_bytes_of(net, x)
    latency_s_of(net, x, warmup=0, repeats=1)
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())
    assert [part.training for part in net] == [True, False, True, True, True, True]
    assert not any(part._forward_hooks for part in net.modules())


class Counting(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        assert not torch.is_grad_enabled()
        assert not self.training
        return x


def test_latency_repeats_as_told() -> None:
    net = Counting()
    latency = latency_s_of(net, torch.zeros(1), warmup=2, repeats=5)
    assert net.calls == 7
    assert latency.repeats == 5
    assert latency.median_s > 0
    assert latency.spread_s >= 0


@pytest.mark.parametrize(("warmup", "repeats"), [(0, 0), (-1, 3)])
def test_latency_needs_repeats(warmup: int, repeats: int) -> None:
    with pytest.raises(ValueError, match=f"repeats={repeats}, warmup={warmup}"):
        latency_s_of(nn.Identity(), torch.zeros(1), warmup=warmup, repeats=repeats)


def test_every_measure_says_how_it_is_joined() -> None:
    assert MEASURES == {"macs": "sum", "parameters": "sum", "activation_bytes": "max", "latency_s": "sum"}
    for measure, reduce in MEASURES.items():
        assert CostTable(measure, 1.0, ((2.0,),), reduce).cost((0,)) == (3 if reduce == "sum" else 2)
