"""FedorAS' recurrent space: its published sizes, every operator against a plain one, gradients, causality, refusals."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.initialisation import initialise, on_meta
from fedloom.platform.spaces.registry import build_space
from fedloom.platform.spaces.rnn import OPERATORS, Gru, LiGru, Lstm, QuasiRnn, build_of
from fedloom.platform.spaces.space_config import SpaceConfig

PAPER = SpaceConfig("rnn_shakespeare", num_classes=90)
INPUTS, UNITS, SAMPLES, STEPS = 5, 7, 3, 11


def made(name: str, inputs: int = INPUTS) -> nn.Module:
    """An operator with random weights, larger than those at the start so that its gates matter."""
    module = build_of(name)(inputs, UNITS)
    weights = initialise(module, torch_stream(1, name))
    module.load_state_dict({key: 3 * value for key, value in weights.items()})
    return module


def texts(inputs: int = INPUTS) -> Tensor:
    return torch.randn((SAMPLES, STEPS, inputs), generator=torch_stream(2, "x"))


# -- the published space ----------------------------------------------------------------------------------------------


def test_the_space_has_its_published_size() -> None:
    space = build_space(PAPER)
    assert space.num_architectures == 2352
    assert space.options == (6, 7, 7, 8)
    parameters, macs = space.cost_table("parameters"), space.cost_table("macs")
    assert parameters.fixed + sum(map(sum, parameters.options)) == 1_238_570  # 1.2386 M
    # Two LSTM layers and two in the skips over 80 characters, and the decoder; the paper says 33.8 M.
    hidden = 4 * 128 * 128
    assert macs.cost(space.largest) == 80 * (2 * (4 * 128 * 8 + hidden) + 4 * hidden + 128 * 90)
    assert space.label(space.largest) == "0-0-0-0"
    # The paper's tiers hold 316, 577, 787, 473 and 196 models, with what its count of FLOPs has besides.
    bounds, costs = (0.0, 7.8, 12.8, 17.8, 22.8, 33.8), [macs.cost(a) / 1e6 for a in space.enumerate()]
    held = [sum(low < c <= high for c in costs) for low, high in itertools.pairwise(bounds)]
    assert held == [286, 608, 778, 509, 171]


def test_a_subnet_computes_what_the_supernet_computes() -> None:
    space = build_space(replace(PAPER, channels=16, input_shape=[12]))
    weights = space.initial_weights(torch_stream(3, "weights"))
    supernet = space.build_supernet().eval()
    supernet.load_state_dict(weights)
    x = torch.randint(0, 90, (4, 12), generator=torch_stream(4, "x"))
    for architecture in [(0, 1, 2, 3), (5, 6, 6, 7), (3, 4, 0, 6), space.smallest, space.largest]:
        subnet = space.build_subnet(architecture).eval()
        subnet.load_state_dict({name: weights[piece.source] for name, piece in space.slices(architecture).items()})
        logits = subnet(x)
        assert logits.shape == (4, 90, 12)
        torch.testing.assert_close(supernet(x, architecture), logits)


# -- operators --------------------------------------------------------------------------------------------------------


def by_hand(module: nn.Module, x: Tensor) -> Tensor:
    """An operator from its equations, one position after the other."""
    units = UNITS
    state, cell, states = x.new_zeros((len(x), units)), x.new_zeros((len(x), units)), []
    for t in range(x.shape[1]):
        if isinstance(module, LiGru):
            update, new = (x[:, t] @ module.weight_input.t() + state @ _of(module.weight_hidden).t()).chunk(2, dim=1)
            kept = torch.sigmoid(update)
            state = kept * state + (1 - kept) * torch.tanh(new)
            states.append(state)
        elif isinstance(module, QuasiRnn):
            new, forget, out = (x[:, t] @ module.weight_input.t() + _of(module.bias_input)).chunk(3, dim=1)
            kept = torch.sigmoid(forget)
            cell = kept * cell + (1 - kept) * torch.tanh(new)
            states.append(torch.sigmoid(out) * cell)
    return torch.stack(states, dim=1)


def _of(tensor: Any) -> Tensor:
    assert isinstance(tensor, Tensor)
    return tensor


def torchs(module: nn.Module, kind: type[nn.LSTM | nn.GRU], x: Tensor) -> Tensor:
    own = kind(x.shape[2], UNITS, batch_first=True).to(x.dtype)
    for parameter, ours in zip(own.parameters(), module.parameters(), strict=True):
        parameter.data = ours.data
    y: Tensor = own(x)[0]
    return y


def reference(name: str, module: nn.Module, x: Tensor) -> Tensor:
    """The operator with torch's plain layers."""
    if name == "conv(5)":
        found = []
        padded = torch.cat([x.new_zeros((len(x), 4, x.shape[2])), x], dim=1)
        for t in range(x.shape[1]):
            window = padded[:, t : t + 5].transpose(1, 2).flatten(1)  # (N, inputs * 5), as the kernel lies
            found.append(torch.sigmoid(window @ _of(module.weight).flatten(1).t() + _of(module.bias)))
        return torch.stack(found, dim=1)
    plain: dict[str, Callable[[], Tensor]] = {
        "lstm": lambda: torchs(module, nn.LSTM, x),
        "gru": lambda: torchs(module, nn.GRU, x),
        "linear": lambda: torch.sigmoid(F.linear(x, _of(module.weight), _of(module.bias))),
        "zero": lambda: x.new_zeros((*x.shape[:2], UNITS)),
        "identity": lambda: x,
    }
    return plain[name]() if name in plain else by_hand(module, x)


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_is_what_plain_torch_computes(name: str) -> None:
    inputs = UNITS if name == "identity" else INPUTS
    module, x = made(name, inputs), texts(inputs)
    torch.testing.assert_close(module(x), reference(name, module, x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["gru", "ligru", "qrnn"])
def test_gradients_are_those_of_plain_torch(name: str) -> None:
    """In float64 by plain operators; ours are written out."""
    module, x = made(name), texts().requires_grad_()
    weights = torch.randn((SAMPLES, STEPS, UNITS), generator=torch_stream(5, "w"))
    (module(x) * weights).sum().backward()
    exact, y = made(name).double(), texts().double().requires_grad_()
    (_plain(name, exact, y) * weights.double()).sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    torch.testing.assert_close(x.grad.double(), y.grad, rtol=1e-4, atol=1e-5)
    for (key, ours), theirs in zip(module.named_parameters(), exact.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-5, msg=key)


def _plain(name: str, module: nn.Module, x: Tensor) -> Tensor:
    if name != "gru":
        return by_hand(module, x)
    assert isinstance(module, Gru)
    weights = [module.weight_input, module.weight_hidden, module.bias_input, module.bias_hidden]
    y: Tensor = torch.gru(x, x.new_zeros((1, len(x), UNITS)), weights, True, 1, 0.0, True, False, True)[0]
    return y


@pytest.mark.parametrize("name", ["gru", "ligru", "qrnn"])
def test_shapes_alone_are_found_without_the_steps_of_our_own(name: str) -> None:
    """On the meta device, and in exports, plain operators are used."""
    module = on_meta(lambda: build_of(name)(INPUTS, UNITS))
    assert module(texts().to("meta")).shape == (SAMPLES, STEPS, UNITS)


@pytest.mark.parametrize("name", OPERATORS)
def test_no_position_sees_a_later_one(name: str) -> None:
    inputs = UNITS if name == "identity" else INPUTS
    module, x = made(name, inputs), texts(inputs)
    changed = x.clone()
    changed[:, 6:] = 9.0
    assert torch.equal(module(x)[:, :6], module(changed)[:, :6])


def test_an_lstm_starts_as_torchs() -> None:
    tensors = initialise(on_meta(lambda: Lstm(8, 100)), torch_stream(6, "start"))
    assert [tuple(t.shape) for t in tensors.values()] == [(400, 8), (400, 100), (400,), (400,)]
    assert all(0.099 < float(t.abs().max()) <= 0.1 for name, t in tensors.items() if name.startswith("weight"))


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"operators": ["lstm", "rnn"]}, "unknown operator 'rnn': known are lstm, gru, ligru, qrnn, linear, identity"),
        ({"operators": ["conv(0)"]}, r"unknown operator 'conv\(0\)'"),
        ({"operators": ["lstm", "lstm"]}, r"space.operators=\['lstm', 'lstm'\]: name each operator once"),
        ({"operators": ["identity", "zero"]}, "add one that changes the number of channels"),
        ({"input_shape": [1, 8, 8]}, r"space.input_shape=\[1, 8, 8\]: rnn_shakespeare takes texts, \[T\]"),
        ({"stem_channels": 4}, "space rnn_shakespeare has no stem_channels"),
    ],
)
def test_impossible_networks_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_space(replace(PAPER, **change))


@pytest.mark.parametrize("operator", ["lstm", "gru"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_recurrent_layers_of_devices_compute_in_float32_whatever_comes_in(operator: str, dtype: torch.dtype) -> None:
    # cuDNN's autocast would make float16 of them. A device without values stands for a GPU.
    layer = build_of(operator)(3, 5).to("meta")
    assert layer(torch.empty((2, 4, 3), dtype=dtype, device="meta")).dtype == torch.float32
