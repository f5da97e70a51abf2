"""Local SGD against a loop written by hand, and the learning-rate schedules as literal numbers."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.platform.clients.training import (
    LocalSGD,
    TrainingConfig,
    batch_indices,
    check_training,
    epoch_sizes,
    evaluate,
    learning_rate,
    train_locally,
)
from fedloom.platform.seeding import torch_stream

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
    trained = train_locally(net, list(net.parameters()), (X, Y), local, torch_stream(3, "batches"))
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
    trained = train_locally(net, list(net.parameters()), (X, Y), local, torch_stream(3, "batches"))
    assert trained.loss == pytest.approx(expected_loss)
    assert trained.accuracy == pytest.approx(expected_accuracy)


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

    train_locally(forward, list(nets.parameters()), (X, Y), local, torch_stream(3, "batches"))
    assert calls == 2
    assert all(torch.equal(p, q) for p, q in zip(nets[2].parameters(), untouched, strict=True))
    assert all(torch.equal(p, q) for p, q in zip(nets[0].parameters(), after_first, strict=True))
    assert not any(torch.equal(p, q) for p, q in zip(after_first, start, strict=True))


def test_batches_cover_every_epoch_once_and_depend_on_the_generator_alone() -> None:
    batches = list(batch_indices(10, 4, 3, torch_stream(1, "x")))
    assert [len(b) for b in batches] == [4, 4, 2] * 3
    epochs = [torch.cat(batches[i : i + 3]).tolist() for i in (0, 3, 6)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    again = list(batch_indices(10, 4, 3, torch_stream(1, "x")))
    assert all(torch.equal(a, b) for a, b in zip(batches, again, strict=True))


def test_augmentation_changes_the_batches_and_is_seeded() -> None:
    x = torch.randn(6, 1, 8, 8, generator=torch_stream(1, "x"))
    y = torch.arange(6)

    def seen(augment: bool) -> list[Tensor]:
        batches: list[Tensor] = []
        layer = nn.Linear(64, 6)

        def forward(x_B: Tensor) -> Tensor:
            batches.append(x_B.clone())
            out: Tensor = layer(x_B.flatten(1))
            return out

        local = LocalSGD(epochs=1, batch_size=6, lr=0.0, augment=augment)
        train_locally(forward, list(layer.parameters()), (x, y), local, torch_stream(3, "batches"))
        return batches

    assert torch.equal(seen(True)[0], seen(True)[0])
    assert not torch.equal(seen(True)[0], seen(False)[0])


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
    local = LocalSGD.of(config, 3, augment=True)
    assert local.lr == pytest.approx(0.02)
    assert (local.epochs, local.batch_size, local.momentum, local.clip_norm, local.augment) == (3, 7, 0.5, 5.0, True)


# -- evaluation -------------------------------------------------------------------------------------------------------


def test_evaluation_is_the_mean_over_all_samples_whatever_the_batches() -> None:
    net = model(1)
    score = evaluate(net, (X, Y), batch_size=3)
    assert score.samples == 10
    assert score.loss == pytest.approx(F.cross_entropy(net(X), Y).item())
    assert score.metric == pytest.approx((net(X).argmax(1) == Y).float().mean().item())


def test_no_samples_have_no_score() -> None:
    score = evaluate(model(1), (X[:0], Y[:0]))
    assert math.isnan(score.loss)
    assert math.isnan(score.metric)
    assert score.samples == 0


# -- settings that cannot run -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clients_per_round": 9}, "method.train.clients_per_round=9: must be between 1 and the 8 clients"),
        ({"clients_per_round": 0}, "clients_per_round=0: must be between 1"),
        ({"epochs": 0}, "method.train.epochs=0: must be greater than 0"),
        ({"batch_size": 0}, "batch_size=0: must be greater than 0"),
        ({"lr": 0.0}, r"lr=0\.0: must be greater than 0"),
        ({"lr": math.nan}, "lr=nan: must be greater than 0"),
        ({"momentum": -0.1}, "momentum=-0.1: must be 0 or more"),
        ({"weight_decay": math.nan}, "weight_decay=nan: must be 0 or more"),
        ({"rounds": -1}, "rounds=-1: must be 0 or more"),
        ({"schedule": "linear"}, "schedule='linear': allowed are fixed, cosine, step"),
        ({"min_contributors": 0}, "min_contributors=0: must be at least 1"),
        ({"min_contributors": 5}, "min_contributors=5: only 4 clients take part in a round"),
        ({"weighting": "opq"}, "method.train.weighting: unknown weighting rule 'opq'.*did you mean 'opa'"),
    ],
)
def test_impossible_settings_are_refused_in_one_line(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        check_training(replace(TrainingConfig(clients_per_round=4), **changes), "method.train", 8)
    assert "\n" not in str(caught.value)


def test_good_settings_pass() -> None:
    check_training(TrainingConfig(clients_per_round=8, rounds=0), "method.train", 8)


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
