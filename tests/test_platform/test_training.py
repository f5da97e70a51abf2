"""Local SGD against a loop written by hand, and the learning-rate schedules as literal numbers."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.platform.clients.evaluation import evaluate
from fedloom.platform.clients.local_rules import one_by_one
from fedloom.platform.clients.objectives import Objective
from fedloom.platform.clients.training import LocalSGD, Optimizer, Trained, batch_indices, epoch_sizes, train_locally
from fedloom.platform.data.augment import NO_AUGMENTATION
from fedloom.platform.federation.training_config import (
    TrainingConfig,
    check_training,
    learning_rate,
    local_sgd,
    rules_of,
)
from fedloom.platform.methods.silos import endless_batches
from fedloom.platform.plugins import ComponentSpec
from fedloom.platform.seeding import torch_stream
from fedloom.platform.settings import check_settings

X = torch.randn(10, 3, generator=torch_stream(1, "x"))
Y = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 0, 1])


def model(layers: int) -> nn.Sequential:
    """One linear layer, or so many that the optimiser takes its path for many tensors."""
    parts: list[nn.Module] = [nn.Linear(3, 4)]
    for _ in range(layers - 1):
        parts += [nn.Tanh(), nn.Linear(4, 4)]
    net = nn.Sequential(*parts)
    generator = torch_stream(2, "weights")
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.uniform_(-0.7, 0.7, generator=generator)
    return net


def by_hand(net: nn.Module, local: LocalSGD) -> tuple[int, list[Tensor]]:
    """SGD as in the textbook (and in PyTorch's documentation), scalar rules on whole tensors."""
    parameters = list(net.parameters())
    velocity: list[Tensor | None] = [None] * len(parameters)
    generator = torch_stream(3, "batches")
    steps = 0
    for _ in range(local.epochs):
        order = torch.randperm(10, generator=generator)
        for batch in {3: [order[:3], order[3:6], order[6:]], 4: [order[:4], order[4:8], order[8:]]}[local.batch_size]:
            gradients = torch.autograd.grad(F.cross_entropy(net(X[batch]), Y[batch]), parameters)
            if local.clip_norm:
                norm = torch.stack([g.norm() for g in gradients]).norm()
                scale = (local.clip_norm / (norm + 1e-6)).clamp(max=1.0)
                gradients = tuple(g * scale for g in gradients)
            with torch.no_grad():
                for i, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
                    gradient = gradient.add(parameter, alpha=local.weight_decay) if local.weight_decay else gradient
                    if local.momentum:
                        before = velocity[i]
                        velocity[i] = gradient.clone() if before is None else local.momentum * before + gradient
                        gradient = velocity[i]  # type: ignore[assignment]
                    parameter.add_(gradient, alpha=-local.lr)
            steps += 1
    return steps, [p.detach() for p in parameters]


def trained_by(net: nn.Module, local: LocalSGD) -> Trained:
    """The network's parameters after local training on the ten samples."""
    sgd = Optimizer(local, dict(net.named_parameters()))
    return train_locally(net, sgd, (X, Y), local, torch_stream(3, "batches"), objective=Objective())


PLAIN = LocalSGD(epochs=3, batch_size=4, lr=0.3)
CASES = [
    PLAIN,
    replace(PLAIN, momentum=0.9),
    replace(PLAIN, weight_decay=0.01),
    replace(PLAIN, clip_norm=0.05),
    replace(PLAIN, momentum=0.9, weight_decay=0.01, clip_norm=0.3, batch_size=3),
]


@pytest.mark.parametrize("layers", [1, 6])
@pytest.mark.parametrize("local", CASES)
def test_equals_sgd_written_by_hand(local: LocalSGD, layers: int) -> None:
    net, reference = model(layers), model(layers)
    trained = trained_by(net, local)
    steps, expected = by_hand(reference, local)
    assert (trained.steps, trained.seen_samples) == (steps, 30)
    for parameter, value in zip(net.parameters(), expected, strict=True):
        assert torch.equal(parameter.detach(), value)
        assert parameter.grad is None


def test_the_reported_loss_is_that_of_the_batches_seen() -> None:
    net = model(1)
    local = LocalSGD(epochs=1, batch_size=10, lr=0.1)
    expected_loss = F.cross_entropy(net(X), Y).item()
    expected_accuracy = (net(X).argmax(1) == Y).float().mean().item()
    trained = trained_by(net, local)
    assert trained.loss == pytest.approx(expected_loss)
    assert trained.accuracy == pytest.approx(expected_accuracy)


def test_the_loss_norm_is_the_root_of_the_mean_squared_loss_of_single_samples() -> None:
    net, local = model(1), LocalSGD(epochs=1, batch_size=10, lr=0.1)
    squares = [F.cross_entropy(net(X[i : i + 1]), Y[i : i + 1]).item() ** 2 for i in range(10)]
    assert trained_by(net, replace(local, loss_norm=True)).loss_norm == pytest.approx(math.sqrt(sum(squares) / 10))
    assert trained_by(net, local).loss_norm is None, "nobody asked for it"


def test_a_correction_is_part_of_the_gradient_that_is_clipped() -> None:
    weight = torch.zeros(2, requires_grad=True)
    local = LocalSGD(epochs=1, batch_size=1, lr=1.0, clip_norm=1.0)
    seen: list[tuple[str, list[float]]] = []

    def correct(name: str, parameter: Tensor, gradient: Tensor) -> None:
        seen.append((name, gradient.tolist()))
        gradient.add_(torch.tensor([2.0, 4.0]) - parameter)

    sgd = Optimizer(local, {"w": weight}, one_by_one(correct))
    weight.backward(torch.tensor([1.0, 0.0]))
    sgd.step()
    # (1, 0) + (2, 4) is (3, 4), of the norm 5: clipped to (0.6, 0.8).
    assert seen == [("w", [1.0, 0.0])]
    assert weight.tolist() == pytest.approx([-0.6, -0.8], abs=1e-6)


def test_what_a_path_does_not_touch_stays_bit_for_bit() -> None:
    # Momentum and weight decay must not move a parameter that has no gradient in a step.
    nets = nn.ModuleList([model(1), model(1), model(1)])
    untouched = [p.detach().clone() for p in nets[2].parameters()]
    start = [p.detach().clone() for p in nets[0].parameters()]
    local = LocalSGD(epochs=1, batch_size=5, lr=0.5, momentum=0.9, weight_decay=0.1)
    after_first: list[Tensor] = []
    calls = 0

    def forward(x: Tensor) -> Tensor:
        nonlocal calls, after_first
        if calls == 1:
            after_first = [p.detach().clone() for p in nets[0].parameters()]
        calls += 1
        y: Tensor = nets[calls - 1](x)
        return y

    sgd = Optimizer(local, dict(nets.named_parameters()))
    train_locally(forward, sgd, (X, Y), local, torch_stream(3, "batches"), objective=Objective())
    assert calls == 2
    assert all(torch.equal(p, q) for p, q in zip(nets[2].parameters(), untouched, strict=True))
    assert all(torch.equal(p, q) for p, q in zip(nets[0].parameters(), after_first, strict=True))
    assert not any(torch.equal(p, q) for p, q in zip(after_first, start, strict=True))


@pytest.mark.parametrize(("idle_momentum", "expected"), [(False, [-0.75, -0.5]), (True, [-0.8125, -0.75])])
def test_what_momentum_does_to_an_operator_that_a_step_leaves_out(idle_momentum: bool, expected: list[float]) -> None:
    """The steps use a, b, a, with gradients 1, 2 and 1.5; the rate is .25, momentum .5.

    They rest:     a: v 1, -, .5 + 1.5 = 2;  x 0 - .25 - .5 = -.75.     b: v -, 2, -;  x -.5
    They move on:  a: v 1, .5, .25 + 1.5 = 1.75; x -.25 - .125 - .4375.  b: v -, 2, 1;  x -.5 - .25
    """
    a, b = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    sgd = Optimizer(LocalSGD(1, 1, lr=0.25, momentum=0.5, idle_momentum=idle_momentum), {"a": a, "b": b})
    for loss in (a * 1.0, b * 2.0, a * 1.5):
        loss.backward()
        sgd.step()
    assert [a.item(), b.item()] == expected


def test_batches_cover_every_epoch_once_and_depend_on_the_generator_alone() -> None:
    batches = list(batch_indices(10, 4, 3, torch_stream(1, "x")))
    assert [len(b) for b in batches] == [4, 4, 2] * 3
    epochs = [torch.cat(batches[i : i + 3]).tolist() for i in (0, 3, 6)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    again = list(batch_indices(10, 4, 3, torch_stream(1, "x")))
    assert all(torch.equal(a, b) for a, b in zip(batches, again, strict=True))


def test_balanced_batches_draw_a_class_and_then_one_of_its_samples() -> None:
    labels = torch.tensor([7, 7, 7, 2, 7, 7, 7, 2, 5])

    def drawn(epochs: int, labels: Tensor) -> list[Tensor]:
        return list(batch_indices(len(labels), 4, epochs, torch_stream(1, "x"), balanced=labels))

    batches = drawn(4000, labels)
    assert [len(b) for b in batches[:4]] == [4, 5, 4, 5], "an epoch has the steps that it has otherwise"
    counts = torch.bincount(torch.cat(batches), minlength=9) / (9 * 4000)
    # Six samples of class 7 share a third of the draws, two of class 2 another, and the only one of class 5 the last.
    expected = torch.tensor([1 / 18, 1 / 18, 1 / 18, 1 / 6, 1 / 18, 1 / 18, 1 / 18, 1 / 6, 1 / 3])
    assert (counts - expected).abs().max() < 0.006
    assert all(torch.equal(a, b) for a, b in zip(drawn(3, labels), batches, strict=False)), "from the stream alone"
    one_class = torch.bincount(torch.cat(drawn(4000, torch.full((9,), 3))), minlength=9) / (9 * 4000)
    assert (one_class - 1 / 9).abs().max() < 0.006


def test_a_client_trains_on_the_balanced_batches() -> None:
    seen: list[Tensor] = []

    def forward(x: Tensor) -> Tensor:
        seen.append(x.detach().flatten().round().long())
        return layer(x)

    layer, labels = nn.Linear(1, 3), torch.tensor([0] * 97 + [1, 1, 2])
    x, local = torch.arange(100.0).view(100, 1), LocalSGD(60, 25, 0.0, balanced=True)
    train_locally(forward, Optimizer(local, {}), (x, labels), local, torch_stream(4, "batches"), objective=Objective())
    shares = torch.bincount(labels[torch.cat(seen)], minlength=3) / 6000
    assert (shares - 1 / 3).abs().max() < 0.03
    endless = endless_batches((x, labels), local, torch_stream(4, "batches"))
    assert torch.equal(next(endless)[0].flatten().long(), seen[0])


def test_augmentation_changes_the_batches_and_is_seeded() -> None:
    x = torch.randn(6, 1, 8, 8, generator=torch_stream(1, "x"))
    y = torch.arange(6)

    def seen(augment: ComponentSpec) -> list[Tensor]:
        batches: list[Tensor] = []
        layer = nn.Linear(64, 6)

        def forward(x_B: Tensor) -> Tensor:
            batches.append(x_B.clone())
            out: Tensor = layer(x_B.flatten(1))
            return out

        local = LocalSGD(epochs=1, batch_size=6, lr=0.0, augment=augment)
        sgd = Optimizer(local, dict(layer.named_parameters()))
        train_locally(forward, sgd, (x, y), local, torch_stream(3, "batches"), objective=Objective())
        return batches

    crop_flip = ComponentSpec("crop_flip")
    assert torch.equal(seen(crop_flip)[0], seen(crop_flip)[0])
    assert not torch.equal(seen(crop_flip)[0], seen(NO_AUGMENTATION)[0])


# -- schedules --------------------------------------------------------------------------------------------------------


def rates(schedule: str, rounds: int, **changes: float) -> list[float]:
    config = TrainingConfig(rounds=rounds, lr=2.0, schedule=schedule, **changes)  # type: ignore[arg-type]
    return [learning_rate(config, r) for r in range(rounds)]


def test_fixed() -> None:
    assert rates("fixed", 3) == [2.0, 2.0, 2.0]


def test_cosine_ends_at_a_tenth_in_the_last_round() -> None:
    # 0.1 + 0.9 (1 + cos(pi r / 4)) / 2, times 2
    half = math.sqrt(0.5)
    assert rates("cosine", 5) == pytest.approx([2.0, 0.2 + 0.9 * (1 + half), 1.1, 0.2 + 0.9 * (1 - half), 0.2])
    assert rates("cosine", 1) == [2.0]
    assert rates("cosine", 2, final_lr_share=0.5) == pytest.approx([2.0, 1.0])


def test_step_at_one_half_and_three_quarters() -> None:
    assert rates("step", 8) == pytest.approx([2.0] * 4 + [0.2] * 2 + [0.02] * 2)
    assert rates("step", 20) == pytest.approx([2.0] * 10 + [0.2] * 5 + [0.02] * 5)
    assert rates("step", 5) == pytest.approx([2.0] * 3 + [0.2] + [0.02])


def test_the_rounds_rate_reaches_the_client() -> None:
    config = TrainingConfig(rounds=4, lr=2.0, schedule="step", epochs=3, batch_size=7, momentum=0.5, clip_norm=5.0)
    config = replace(config, weight_decay=0.25, loss_norms=True)
    crop_flip = ComponentSpec("crop_flip")
    local = local_sgd(config, 3, crop_flip, balanced=True)
    assert local.lr == pytest.approx(0.02)
    assert replace(local, lr=0.0) == LocalSGD(
        3, 7, 0.0, 0.5, 0.25, 5.0, augment=crop_flip, balanced=True, loss_norm=True
    )


# -- evaluation -------------------------------------------------------------------------------------------------------


def test_evaluation_is_the_mean_over_all_samples_whatever_the_batches() -> None:
    net = model(1)
    score = evaluate(net, (X, Y), Objective(), sizes=[3, 3, 3, 1])
    assert score.samples == 10
    assert score.loss == pytest.approx(F.cross_entropy(net(X), Y).item())
    assert score.metric == pytest.approx((net(X).argmax(1) == Y).float().mean().item())


def test_no_samples_have_no_score() -> None:
    score = evaluate(model(1), (X[:0], Y[:0]), Objective())
    assert math.isnan(score.loss)
    assert math.isnan(score.metric)
    assert score.samples == 0


# -- settings that cannot run -----------------------------------------------------------------------------------------


def refuse(config: TrainingConfig) -> None:
    """As a run of 8 clients does, before anything is written."""
    check_settings(config, "method.train.")
    check_training(config, "method.train", 8)
    rules_of(config, "method.train")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clients_per_round": 9}, "method.train.clients_per_round=9: must be between 1 and the 8 clients"),
        ({"clients_per_round": 0}, "clients_per_round=0: must be at least 1"),
        ({"epochs": 0}, "method.train.epochs=0: must be between 1 and 100000"),
        ({"batch_size": 0}, "batch_size=0: must be at least 1"),
        ({"lr": 0.0}, r"lr=0\.0: must be greater than 0"),
        ({"lr": math.nan}, "lr=nan: must be greater than 0"),
        ({"momentum": -0.1}, "momentum=-0.1: must be 0 or more"),
        ({"weight_decay": math.nan}, "weight_decay=nan: must be 0 or more"),
        ({"rounds": -1}, "rounds=-1: must be 0 or more"),
        ({"schedule": "linear"}, "schedule=linear: must be one of fixed, cosine, step, steps"),
        ({"evaluate_every": -1}, "evaluate_every=-1: must be 0 or more"),
        ({"step_rounds": 0}, "step_rounds=0: must be at least 1"),
        ({"final_lr_share": 1.5}, r"final_lr_share=1\.5: must be between 0 and 1"),
        ({"min_contributors": 0}, "min_contributors=0: must be at least 1"),
        ({"min_contributors": 5}, "min_contributors=5: only 4 clients take part in a round"),
        ({"weighting": "opq"}, "method.train.weighting: unknown weighting rule 'opq'.*did you mean 'opa'"),
        ({"selection": "al"}, "method.train.selection: unknown selection rule 'al'.*did you mean 'all'"),
        ({"local_rule": "fedprx"}, "method.train.local_rule: unknown local rule 'fedprx'.*did you mean 'fedprox'"),
        ({"server": "adam"}, "method.train.server: unknown server rule 'adam'.*did you mean 'fedadam'"),
        ({"options": {"mu": 0.1}}, r"method\.train\.options\.mu: not an option of .*they have no options"),
        (
            {"local_rule": "fedprox", "options": {"mi": 0.1}},
            r"train\.options\.mi: not an option of .*local rule fedprox.*; the options are mu; did you mean 'mu'",
        ),
        ({"local_rule": "fedprox", "options": {"mu": -1}}, r"method\.train\.options\.mu=-1: must be 0 or more"),
        ({"server": "fedadam", "options": {"beta_2": "x"}}, r"options\.beta_2=x: must be a float"),
    ],
)
def test_impossible_settings_are_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        refuse(replace(TrainingConfig(clients_per_round=4), **changes))
    assert "\n" not in str(caught.value)


def test_good_settings_pass() -> None:
    refuse(TrainingConfig(clients_per_round=8, rounds=0))
    refuse(TrainingConfig(clients_per_round=None, min_contributors=8))


def test_a_rest_of_one_sample_joins_the_batch_before_it() -> None:
    assert epoch_sizes(64, 32) == [32, 32]
    assert epoch_sizes(66, 32) == [32, 32, 2]
    assert epoch_sizes(65, 32) == [32, 33]
    assert epoch_sizes(33, 32) == [33]
    assert epoch_sizes(1, 32) == [1], "there is none before it"
    assert epoch_sizes(3, 1) == [1, 1, 1]
    batches = list(batch_indices(33, 16, 2, torch.Generator().manual_seed(1)))
    assert [len(b) for b in batches] == [16, 17, 16, 17]
    assert sorted(torch.cat(batches[:2]).tolist()) == list(range(33))
