"""Local optimisers: steps in numbers and against torch's, rates within a round, and what a client keeps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.platform.clients.local_rules import LocalClient
from fedloom.platform.clients.training import LocalSGD, Optimizer
from fedloom.platform.federation.config import RunConfig, TiersConfig
from fedloom.platform.federation.training_config import TrainingConfig, rules_of
from fedloom.platform.federation.world import build_world
from fedloom.platform.methods.fedrolex import FedRolexConfig
from fedloom.platform.methods.local_adaptation import LocalAdaptationConfig
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.plugins import ComponentSpec
from fedloom.platform.spaces.slices import Slice
from fedloom.platform.spaces.space_config import SpaceConfig

HERE, W = __name__, "layer.weight"


@pytest.mark.parametrize("parameters", [2, 6])
@pytest.mark.parametrize(
    ("name", "in_torch", "expected"),
    [
        # Of a: g 1 + .5;  m .75, v .5625;  x 1 - .1 * 1.5 / 1.5.   g -2 + .45;  m -.4, v 1.0225;
        # x .9 + .1 * (.4 / .75) / sqrt(1.0225 / .4375).   b rests in the second step.
        ("adam", torch.optim.Adam, [(0.9, 0.9), (0.9348864, 0.9), (0.9102426, 0.8086188)]),
        # Of a: x .95 - .1 * 1;  the decay is no part of the gradient.
        ("adamw", torch.optim.AdamW, [(0.85, 0.85), (0.8681977, 0.85), (0.8359138, 0.7193083)]),
    ],
)
def test_three_steps_in_numbers_and_as_torch_makes_them(
    name: str, in_torch: Any, expected: list[tuple[float, float]], parameters: int
) -> None:
    ours, theirs = ([torch.ones(1, requires_grad=True) for _ in range(parameters)] for _ in range(2))
    chosen = ComponentSpec(name, (("beta1", 0.5), ("beta2", 0.75)))
    optimizer = Optimizer(
        LocalSGD(1, 1, 0.1, weight_decay=0.5, optimizer=chosen), dict(zip("abcdef"[:parameters], ours, strict=True))
    )
    reference = in_torch(theirs, lr=0.1, betas=(0.5, 0.75), weight_decay=0.5, foreach=parameters > 4)
    for gradients, values in zip([(1.0, 2.0), (-2.0, None), (0.5, 1.0)], expected, strict=True):
        for i, pair in enumerate(zip(ours, theirs, strict=True)):
            for parameter in pair:
                gradient = gradients[i % 2]
                parameter.grad = None if gradient is None else torch.tensor([gradient])
        optimizer.step()
        reference.step()
        assert [p.item() for p in ours[:2]] == pytest.approx(values, abs=1e-7)
        assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("local", "rates"),
    [
        (LocalSGD(1, 1, 2.0), [2, 2, 2, 2, 2, 2, 2, 2]),
        (LocalSGD(1, 1, 2.0, warmup_steps=3), [0.5, 1, 1.5, 2, 2, 2, 2, 2]),
        (LocalSGD(1, 1, 2.0, warmup_steps=9), [0.2, 0.4, 0.6, 0.8, 1, 1.2, 1.4, 1.6]),
        # 2 (.5 + .5 (1 + cos(pi / 4)) / 2) = 1 + .8535534
        (LocalSGD(1, 1, 2.0, warmup_steps=3, cosine_to=0.5), [0.5, 1, 1.5, 2, 1.8535534, 1.5, 1.1464466, 1]),
        (LocalSGD(1, 1, 2.0, warmup_steps=7, cosine_to=0.0), [0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2]),
    ],
)
def test_the_rates_of_a_round_of_eight_steps(local: LocalSGD, rates: list[float]) -> None:
    client = client_of(local, {}, steps=8)
    optimizer, x = Optimizer(local, client.parameters, steps=client.steps), client.parameters[W]
    for rate in rates:
        before = x.detach().clone()
        x.grad = torch.ones(2)
        optimizer.step()
        assert (before - x.detach()).tolist() == pytest.approx([rate, rate], abs=1e-6)


def client_of(local: LocalSGD, state: dict[str, Tensor], steps: int = 2) -> LocalClient:
    """A client at the start of a round: it holds the last two of a tensor's three numbers."""
    piece, x = Slice(W, ((1, 3),)), torch.zeros(2, requires_grad=True)
    return LocalClient(0, 0, 4, steps, local, {W: x}, {W: piece}, {W: torch.zeros(3)}, state)


@pytest.mark.parametrize(
    ("name", "first", "second", "kept"),
    [
        # v = 1 and .5 * 1 + 1;  x - .1 v
        ("sgd", -0.1, -0.15, {f"optimizer/momentum/{W}": [0.0, 1.5, 1.5]}),
        # m .5, v .25;  m .75, v .4375: both corrected to 1
        (
            "adam",
            -0.1,
            -0.1,
            {
                f"optimizer/mean/{W}": [0.0, 0.75, 0.75],
                f"optimizer/square/{W}": [0.0, 0.4375, 0.4375],
                f"counters/optimizer/steps/{W}": 2.0,
            },
        ),
    ],
)
def test_a_client_goes_on_with_what_it_has_kept(name: str, first: float, second: float, kept: dict[str, Any]) -> None:
    options = (("beta1", 0.5), ("beta2", 0.75)) if name == "adam" else ()
    local = LocalSGD(1, 1, 0.1, momentum=0.5, optimizer=ComponentSpec(name, options), keeps_state=True)
    state: dict[str, Tensor] = {}
    for expected in (first, second):
        client = client_of(local, state)
        optimizer, x = Optimizer(local, client.parameters, client=client), client.parameters[W]
        x.grad = torch.ones(2)
        optimizer.step()
        assert x.tolist() == pytest.approx([expected] * 2, abs=1e-6)
    assert {key: tensor.tolist() for key, tensor in state.items()} == kept


ALLOWED: dict[str, Any] = {"optimizer": "adam", "momentum": 0.0, "lr": 0.01}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "adm"}, "method.train.optimizer: unknown local optimizer 'adm': known are adam, adamw, sgd"),
        ({**ALLOWED, "options": {"beta1": 1.0}}, "method.train.options.beta1=1.0: must be 0 or more and below 1"),
        ({"options": {"eps": 1e-8}}, "method.train.options.eps: not an option of .*local optimizer sgd"),
        (
            {**ALLOWED, "idle_momentum": True},
            "method.train.idle_momentum=true is for SGD only: use method.train.optimizer=sgd, given adam",
        ),
        (
            {**ALLOWED, "local_rule": "scaffold"},
            "local_rule=scaffold cannot be used with method.train.optimizer=adam: option 2 takes x - y for the sum of "
            "the gradients; use optimizer=sgd",
        ),
        (
            {"momentum": 0.0, "local_warmup_steps": 3, "local_rule": "scaffold"},
            "method.train.local_warmup_steps=3: option 2 takes x - y for the sum of the gradients with one rate; use "
            "local_warmup_steps=0",
        ),
        (
            {"local_cosine_to": 0.0, "local_rule": "fednova", "server": "fednova"},
            "method.train.local_cosine_to=0.0: a_i counts steps of SGD with one rate; use local_cosine_to=null",
        ),
        (
            {"optimizer_state": "kept", "local_rule": "fednova", "server": "fednova"},
            "method.train.optimizer_state=kept: a_i assumes that momentum starts at zero; use optimizer_state",
        ),
        ({"optimizer": f"{HERE}:still"}, "optimizer '.*:still' leaves the parameters as they are: change step.param"),
        ({"optimizer": f"{HERE}:endless"}, "local optimizer '.*:endless' makes parameters that are not finite"),
        ({"optimizer": f"{HERE}:Broken"}, r"local optimizer '.*:Broken' fails: KeyError: 'no' \(line \d+ of test_lo"),
    ],
)
def test_what_does_not_work_is_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        rules_of(TrainingConfig(**changes), "method.train")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [{"local_rule": "scaffold", "options": {"option": 1}}, {"local_rule": "feddyn", "server": "feddyn"}],
)
def test_rules_that_hold_for_any_optimiser_are_allowed(changes: dict[str, Any]) -> None:
    assert rules_of(TrainingConfig(**ALLOWED, **changes), "method.train").optimizer == ComponentSpec("adam")


def still(step: object) -> None:
    """Makes no step."""


def endless(step: Any, *, by: float = 2.0) -> None:
    """Makes a step without end."""
    step.parameters[0].fill_(float("inf") * by)


class Broken:
    """Fails."""

    def __call__(self, step: object) -> None:
        raise KeyError("no")


def test_methods_that_keep_momentum_or_roll_say_so(tiny_config: Callable[..., RunConfig]) -> None:
    silos = LocalAdaptationConfig()
    silos.train.optimizer = "adamw"
    with pytest.raises(ValueError, match=r"^method\.train\.optimizer=adamw: silos train by SGD at one rate per round"):
        build_stages(build_world(tiny_config(method=silos)))
    rolling = FedRolexConfig()
    rolling.train.optimizer_state = "kept"
    space = SpaceConfig("cnn_width", input_shape=[1, 8, 8], stage_widths=[4, 8], widths=[0.5, 1.0])
    with pytest.raises(ValueError, match=r"^method\.train\.optimizer_state=kept: fedrolex rolls the channels"):
        build_stages(build_world(tiny_config(method=rolling, space=space, tiers=TiersConfig(count=1, paths=10))))
