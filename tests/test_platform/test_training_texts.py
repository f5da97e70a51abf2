"""Local training on texts, and with several passes per batch: what is counted, and what is added up."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.platform.clients.evaluation import evaluate
from fedloom.platform.clients.objectives import IGNORED, Objective
from fedloom.platform.clients.training import LocalSGD, Optimizer, batch_indices, batch_sizes, train_locally
from fedloom.platform.federation.training_config import TrainingConfig, learning_rate
from fedloom.platform.seeding import torch_stream


def logits_of(tokens: Tensor) -> Tensor:
    """(N, T) -> (N, 3, T): as sure of the token itself as two thirds against one sixth each."""
    return torch.log(torch.where(F.one_hot(tokens, 3) == 1, 4.0, 1.0)).transpose(1, 2)


X = torch.tensor([[0, 1, 2, 0], [1, 1, 2, 2]])
Y = torch.tensor([[0, 1, 1, IGNORED], [1, IGNORED, IGNORED, IGNORED]])


def test_a_texts_score_by_hand() -> None:
    # Four positions count: three are right (4/6 each), one is wrong (1/6).
    score = evaluate(logits_of, (X, Y), Objective())
    assert score.metric == 0.75
    assert score.loss == pytest.approx((3 * math.log(6 / 4) + math.log(6)) / 4)
    assert score.samples == 2
    assert score.per_position


def test_a_texts_score_does_not_depend_on_the_batches() -> None:
    x = torch.randint(0, 3, (40, 4), generator=torch_stream(1, "test"))
    y = x.roll(1, dims=1)
    y[3, 2:] = IGNORED
    scores = [evaluate(logits_of, (x, y), Objective(), size) for size in (8, 64, 320)]
    assert all(s.loss == pytest.approx(scores[0].loss, rel=1e-6) and s.metric == scores[0].metric for s in scores)


def test_an_image_has_one_target() -> None:
    x = torch.eye(3)
    score = evaluate(lambda x_B: x_B, (x, torch.tensor([0, 1, 0])), Objective())
    assert score.metric == pytest.approx(2 / 3)
    assert not score.per_position


def test_training_reports_the_mean_over_positions_that_count() -> None:
    bias = nn.Parameter(torch.zeros(3, 1))
    local = LocalSGD(epochs=1, batch_size=1, lr=0.0)
    sgd, generator = Optimizer(local, {"bias": bias}), torch_stream(1, "batches")
    trained = train_locally(lambda x: logits_of(x) + bias, sgd, (X, Y), local, generator, objective=Objective())
    # Three positions of the first text, one of the second: not the mean of the two texts' means.
    assert trained.loss == pytest.approx((3 * math.log(6 / 4) + math.log(6)) / 4)
    assert trained.accuracy == 0.75
    assert (trained.steps, trained.seen_samples) == (2, 2)


def test_padding_has_no_gradient() -> None:
    table = nn.Parameter(torch.zeros(2, 3, 4))
    local = LocalSGD(epochs=1, batch_size=2, lr=1.0)
    sgd, generator = Optimizer(local, {"table": table}), torch_stream(1, "batches")
    train_locally(lambda _x: table, sgd, (X, Y), local, generator, objective=Objective())
    assert bool((table != 0).any(dim=1).sum() == 4)


# -- several passes per batch -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip_norm", [0.0, 0.3])
def test_passes_add_up_their_gradients(clip_norm: float) -> None:
    generator = torch_stream(2, "test")
    x, y = torch.randn((10, 4), generator=generator), torch.randint(0, 3, (10,), generator=generator)
    start = [torch.randn((4, 3), generator=generator) for _ in range(2)]
    local = LocalSGD(epochs=2, batch_size=4, lr=0.2, clip_norm=clip_norm)
    weights = [w.clone().requires_grad_() for w in start]
    calls: list[int] = []

    def forward(x_B: Tensor) -> Tensor:
        calls.append(len(x_B))
        return x_B @ weights[len(calls) % 2]

    sgd, generator = Optimizer(local, dict(zip("ab", weights, strict=True))), torch_stream(3, "batches")
    trained = train_locally(forward, sgd, (x, y), local, generator, objective=Objective(), passes=3)

    slow, call, losses = [w.double().requires_grad_() for w in start], 0, []
    for index in batch_indices(10, 4, 2, torch_stream(3, "batches")):
        total = torch.zeros((), dtype=torch.float64)
        for _ in range(3):
            call += 1
            loss = F.cross_entropy(x[index].double() @ slow[call % 2], y[index])
            losses.append((loss.item(), len(index)))
            total = total + loss
        gradients = torch.autograd.grad(total, slow)
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        scale = min(1.0, clip_norm / norm.item()) if clip_norm else 1.0
        slow = [(w - 0.2 * scale * g).detach().requires_grad_() for w, g in zip(slow, gradients, strict=True)]
    for found, expected in zip(weights, slow, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    assert calls == [n for n in batch_sizes(10, local) for _ in range(3)]
    assert (trained.steps, trained.seen_samples) == (6, 20)
    assert trained.loss == pytest.approx(sum(v * n for v, n in losses) / sum(n for _, n in losses), rel=1e-5)


@pytest.mark.parametrize(("samples", "expected"), [(10, [4, 4, 2] * 2), (8, [4, 4] * 2), (3, [3] * 2)])
def test_batch_sizes_are_those_of_the_batches(samples: int, expected: list[int]) -> None:
    local = LocalSGD(epochs=2, batch_size=4, lr=0.1)
    assert batch_sizes(samples, local) == expected
    assert [len(i) for i in batch_indices(samples, 4, 2, torch_stream(1, "batches"))] == expected


def test_steps_fall_to_a_tenth_every_so_many_rounds() -> None:
    config = TrainingConfig(rounds=120, lr=4.0, schedule="steps", step_rounds=50)
    assert [learning_rate(config, t) for t in (0, 49, 50, 99, 100)] == pytest.approx([4.0, 4.0, 0.4, 0.4, 0.04])
