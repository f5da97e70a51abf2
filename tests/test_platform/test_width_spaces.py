"""Spaces of widths: published sizes, leading slices of any network, scaling, permutations, and what is refused."""

import sys
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedloom.platform.averaging.conformance import check_space
from fedloom.platform.plugins import PluginError
from fedloom.platform.spaces.registry import build_space
from fedloom.platform.spaces.slices import extract
from fedloom.platform.spaces.space_config import SpaceConfig
from fedloom.platform.spaces.width import Lstm, WidthSpace, channels_kept, narrowed


def space_of(name: str, **values: object) -> WidthSpace:
    space = build_space(SpaceConfig(name, **values))  # type: ignore[arg-type]
    assert isinstance(space, WidthSpace)
    return space


def costs(space: WidthSpace, measure: str) -> list[float]:
    return [space.cost_table(measure).cost((i,)) for i in range(space.options[0])]


# -- sizes ------------------------------------------------------------------------------------------------------------


def test_heterofls_network_has_the_published_parameters() -> None:
    # HeteroFL, Tab. 1: 1.6 M, 391 K, 99 K, 25 K and 6.7 K of the CNN for MNIST, of widths a to e.
    published = [6.7e3, 25e3, 99e3, 391e3, 1.6e6]
    found = costs(space_of("cnn_width", input_shape=[1, 28, 28]), "parameters")
    assert found == pytest.approx(published, rel=0.04)


def test_fjords_resnet_has_the_published_costs() -> None:
    # FedorAS, Tab. 5: FjORD's operating points, in MFLOPs and M parameters.
    space = space_of("resnet_width", widths=[0.25, 0.5, 0.75, 1.0])
    assert [round(c / 1e6) for c in costs(space, "macs")] == [35, 139, 313, 555]
    assert [round(c / 1e6, 2) for c in costs(space, "parameters")] == [0.7, 2.8, 6.29, 11.17]


def test_the_lstm_is_leafs() -> None:
    # An embedding of 8, two layers of 256 cells, a decoder; torch's layers have two biases per gate, these one.
    space = space_of("lstm_width", num_classes=80)
    module = nn.ModuleList([nn.Embedding(80, 8), nn.LSTM(8, 256, 2, bias=True), nn.Linear(256, 80)])
    theirs = sum(p.numel() for p in module.parameters()) - 2 * 4 * 256
    assert costs(space, "parameters")[-1] == theirs


# -- narrower networks ------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Depthwise, dense and flattened layers, a residual sum, and norms of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.depthwise = nn.Conv2d(8, 16, 3, padding=1, groups=8)
        self.norm = nn.GroupNorm(8, 16)
        self.back = nn.Conv2d(16, 8, 1, bias=False)
        self.hidden = nn.Linear(8 * 16, 12)
        self.layer_norm = nn.LayerNorm(12)
        self.logits = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        x = x + self.back(self.norm(self.depthwise(x)))
        x = nn.functional.avg_pool2d(x, 2).flatten(1)
        y: Tensor = self.logits(torch.relu(self.layer_norm(self.hidden(x))))
        return y


@pytest.fixture
def own_network(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("own_network")
    module.odd = lambda _shape, _classes: Odd()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_network", module)
    return module


def own(widths: list[float], network: str = "own_network:odd") -> WidthSpace:
    return space_of("width", widths=widths, input_shape=[1, 8, 8], options={"network": network})


def test_a_narrow_network_of_ones_own_by_hand(own_network: ModuleType) -> None:
    shapes = {name: tuple(t.shape) for name, t in own([0.5, 1.0]).build_subnet((0,)).state_dict().items()}
    assert shapes == {
        "stem.weight": (4, 1, 3, 3),
        "stem.bias": (4,),
        "depthwise.weight": (8, 1, 3, 3),
        "depthwise.bias": (8,),
        "norm.weight": (8,),
        "norm.bias": (8,),
        "back.weight": (4, 8, 1, 1),
        "hidden.weight": (6, 4 * 16),
        "hidden.bias": (6,),
        "layer_norm.weight": (6,),
        "layer_norm.bias": (6,),
        "logits.weight": (10, 6),
        "logits.bias": (10,),
    }


class Scaled(nn.Module):
    """A tensor of the network itself, and a norm of one group."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.convolution, self.norm = nn.Conv2d(1, 6, 3, padding=1), nn.GroupNorm(1, 6)
        self.logits = nn.Linear(6, 10)

    def initialise_own(self, tensors_by_name: dict[str, Tensor], generator: torch.Generator) -> None:
        """A scale of 2."""
        tensors_by_name["scale"].fill_(2.0)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.logits(self.norm(self.convolution(self.scale * x)).relu().mean((2, 3)))
        return y


@pytest.mark.parametrize("network", ["odd", "scaled"])
def test_a_network_of_ones_own_obeys_the_laws_of_spaces(own_network: ModuleType, network: str) -> None:
    own_network.scaled = lambda _shape, _classes: Scaled()  # type: ignore[attr-defined]
    options = {"network": f"own_network:{network}"}
    check_space(SpaceConfig("width", widths=[0.5, 1.0], input_shape=[1, 8, 8], options=options))


class Named(Scaled):
    """Outputs by name, one of which is hidden channels."""

    def forward(self, x: Tensor) -> Any:
        features = self.convolution(x).relu().mean((2, 3))
        return {"features": features, "logits": self.logits(features)}


class Concatenated(Named):
    """A classifier that sees the inputs beside the hidden channels."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Linear(6 + 6, 10)
        self.again = nn.Conv2d(1, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        features = torch.cat([self.convolution(x), self.again(x)], dim=1).relu().mean((2, 3))
        return {"features": features, "logits": self.logits(features)}


def test_outputs_by_name_have_channels_that_can_be_permuted_or_not(own_network: ModuleType) -> None:
    own_network.named = lambda _shape, _classes: Named()  # type: ignore[attr-defined]
    own_network.concatenated = lambda _shape, _classes: Concatenated()  # type: ignore[attr-defined]
    assert own([0.5, 1.0], "own_network:named").options == (2,)
    with pytest.raises(ValueError, match="a layer concatenates channels"):
        own([0.5, 1.0], "own_network:concatenated")


def test_the_lstm_computes_what_torchs_does() -> None:
    ours, theirs = Lstm(3, 4), nn.LSTM(3, 4, batch_first=True)
    ours.initialise_own(ours.state_dict(), torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs.weight_ih_l0.copy_(ours.weight_input.reshape(16, 3))
        theirs.weight_hh_l0.copy_(ours.weight_hidden.reshape(16, 4))
        theirs.bias_ih_l0.copy_(ours.bias.reshape(16))
        theirs.bias_hh_l0.zero_()
    x = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(ours(x), theirs(x)[0], rtol=1e-6, atol=1e-6)


def test_heterofls_scaler_undoes_the_share_in_training_alone() -> None:
    scaled, plain = (
        space_of("cnn_width", input_shape=[1, 8, 8], stage_widths=[8], widths=[0.5, 1.0], norm="none", scaler=on)
        for on in (True, False)
    )
    weights = plain.initial_subnet_weights((0,), torch.Generator().manual_seed(0))
    x = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    modules = [space.build_subnet((0,)) for space in (scaled, plain)]
    for module in modules:
        module.load_state_dict({name: t.clone() for name, t in weights.items()})
    ours, reference = modules
    assert torch.equal(ours.eval()(x), reference.eval()(x))
    # One hidden layer and no biases after it: its outputs, and so the logits less their bias, are doubled.
    bias = weights["5.bias"]
    torch.testing.assert_close(ours.train()(x) - bias, 2 * (reference.train()(x) - bias))


def test_static_norms_keep_their_statistics_in_training() -> None:
    space = space_of("resnet_width", input_shape=[3, 8, 8], stem_channels=4, widths=[0.5, 1.0])
    module = space.build_subnet((1,))
    module.load_state_dict(space.initial_weights(torch.Generator().manual_seed(0)))
    before = {name: t.clone() for name, t in module.state_dict().items() if "running" in name}
    module.train()(torch.randn(4, 3, 8, 8))
    assert before
    assert all(torch.equal(module.state_dict()[name], t) for name, t in before.items())


# -- permutations: what FedRolex rests on ------------------------------------------------------------------------------

ROLLED: dict[str, dict[str, object]] = {
    "cnn_width": {"input_shape": [1, 8, 8], "stage_widths": [6, 9], "widths": [0.5, 1.0]},
    "resnet_width": {"input_shape": [3, 8, 8], "stem_channels": 5, "widths": [0.5, 1.0]},
    "lstm_width": {"input_shape": [7], "num_classes": 11, "channels": 6, "embedding_size": 5},
    "width": {"input_shape": [1, 8, 8], "widths": [0.5, 1.0], "options": {"network": "own_network:plain"}},
}


def plain(_shape: object, _classes: int) -> nn.Module:
    hidden = nn.Sequential(nn.Conv2d(1, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(hidden, nn.Linear(80, 7), nn.LayerNorm(7), nn.ReLU(), nn.Linear(7, 10))


@pytest.mark.parametrize("name", ROLLED)
def test_rolled_channels_compute_the_same(name: str, own_network: ModuleType) -> None:
    own_network.plain = plain  # type: ignore[attr-defined]
    space = space_of(name, **ROLLED[name])
    weights = space.initial_weights(torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    for tensor_name in weights:  # statistics and scales that differ between channels
        if tensor_name.endswith(("running_mean", "running_var")) or ".1.weight" in tensor_name:
            weights[tensor_name] = torch.rand(weights[tensor_name].shape, generator=generator) + 0.5
    tokens = space.input_dtype == torch.int64
    x = torch.randint(0, 11, (3, 7), generator=generator) if tokens else torch.rand(3, *space.input_shape)
    module = space.build_subnet(space.largest).eval()
    module.load_state_dict(weights)
    expected = module(x).clone()
    moved = space.rolled(weights, 2)
    assert any(not torch.equal(moved[n], weights[n]) for n in weights)
    module.load_state_dict(moved)
    torch.testing.assert_close(module(x), expected, rtol=1e-4, atol=1e-5)


def test_leading_slices_after_rolls_are_the_windows_of_the_paper() -> None:
    space = space_of("cnn_width", input_shape=[1, 8, 8], stage_widths=[4, 6], widths=[0.5, 1.0], norm="none")
    weights = space.initial_weights(torch.Generator().manual_seed(0))
    for round_ in range(8):
        held = extract(space.rolled(weights, round_), space.slices((0,)))
        first, second = (torch.arange(k // 2).add(round_) % k for k in (4, 6))  # windows that wrap around
        assert torch.equal(held["0.weight"], weights["0.weight"][first])
        middle = next(n for n, t in weights.items() if t.shape[:2] == (6, 4))
        assert torch.equal(held[middle], weights[middle][second][:, first])
        last = next(n for n, t in weights.items() if t.shape == (10, 6))
        assert torch.equal(held[last], weights[last][:, second])


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"widths": [0.5, 0.25, 1.0]}, r"space.widths=\[0.5, 0.25, 1.0\]: give shares in ascending order"),
        ({"widths": [0.5]}, "the last one 1.0"),
        ({"norm": "layer"}, "space.norm='layer': allowed are none, batch, static, group"),
        ({"input_shape": [3, 4, 4]}, "takes images of at least 8 x 8"),
        ({"kernel_size": 5}, "space cnn_width has no kernel_size; it has"),
    ],
)
def test_impossible_designs_are_refused(values: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        space_of("cnn_width", **values)


def test_layers_that_cannot_be_narrower_are_named(own_network: ModuleType) -> None:
    own_network.lstm = lambda _s, _c: nn.Sequential(nn.Flatten(2), nn.LSTM(64, 4))  # type: ignore[attr-defined]
    own_network.grouped = lambda _s, _c: nn.Sequential(  # type: ignore[attr-defined]
        nn.Conv2d(1, 8, 1), nn.Conv2d(8, 8, 1, groups=2), nn.Flatten(), nn.Linear(512, 10)
    )
    own_network.number = lambda _s, _c: 3  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="1 is a convolution of 2 groups: use 1, or one per channel"):
        own([0.5, 1.0], "own_network:grouped").build_subnet((0,))
    with pytest.raises(ValueError, match="no convolution, linear or recurrent layer"):
        own([0.5, 1.0], "own_network:lstm").build_subnet((0,))
    with pytest.raises(PluginError, match=r"network 'own_network:number' gives int: give a torch\.nn"):
        own([0.5, 1.0], "own_network:number").build_subnet((0,))
    with pytest.raises(ValueError, match=r"'p=.3' is no architecture of cnn_width: known are p=0.0625, .*p=1"):
        space_of("cnn_width").parse("p=.3")


def test_channels_are_kept_as_heterofl_rounds_them() -> None:
    assert [channels_kept(0.3, c) for c in (10, 11, 1)] == [3, 4, 1]
    module = narrowed(partial(nn.Linear, 4, 2), torch.zeros(1, 4, device="meta"), lambda _: 1)
    assert module.weight.shape == (2, 4), "inputs and classes stay"


def test_networks_whose_channels_have_no_order_are_refused(own_network: ModuleType) -> None:
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.last = nn.Linear(64, 4), nn.Linear(64, 4), nn.Linear(8, 10)

        def forward(self, x: Tensor) -> Tensor:
            x = x.flatten(1)
            y: Tensor = self.last(torch.cat([self.a(x), self.b(x)], dim=1).relu())
            return y

    own_network.joined = lambda _s, _c: Joined()  # type: ignore[attr-defined]

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle, self.last = nn.Linear(64, 6), nn.Linear(6, 6), nn.Linear(6, 10)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.last(self.middle(self.middle(self.first(x.flatten(1))).relu()))
            return y

    own_network.twice = lambda _s, _c: Twice()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="a layer concatenates channels of several layers"):
        own([0.5, 1.0], "own_network:joined")
    with pytest.raises(ValueError, match="uses a layer twice"):
        own([0.5, 1.0], "own_network:twice")
