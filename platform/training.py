"""Local training: plain SGD over a client's samples, with whatever forward pass the method asks for."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.sgd import sgd

from fedloom.platform.data.dataset import augment_crop_flip
from fedloom.platform.weighting import weighting_rule


@dataclass
class TrainingConfig:
    """A federated training stage: how many rounds, who takes part, and the clients' local SGD.

    `schedule` is fixed, cosine (down to `final_lr_share` of lr in the last round) or step (x0.1 at 1/2 and 3/4).
    `clip_norm` limits the gradient's norm, 0 switches clipping off. `evaluate_every` rounds the server scores the
    current weights on validation data, 0 never.
    """

    rounds: int = 50
    clients_per_round: int = 10
    epochs: int = 1
    batch_size: int = 32
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 0.0
    clip_norm: float = 0.0
    schedule: str = "fixed"
    final_lr_share: float = 0.1
    min_contributors: int = 1
    weighting: str = "fedavg"
    evaluate_every: int = 0


def check_training(config: TrainingConfig, name: str, num_clients: int) -> None:
    """Raises ValueError for values that no training can run with; `name` is the configuration key of the stage."""
    if not 1 <= config.clients_per_round <= num_clients:
        raise ValueError(
            f"{name}.clients_per_round={config.clients_per_round}: must be between 1 and the {num_clients} clients "
            "there are; lower it or raise data.num_clients"
        )
    positive = {"epochs": config.epochs, "batch_size": config.batch_size, "lr": config.lr}
    for key, value in positive.items():
        if not value > 0:
            raise ValueError(f"{name}.{key}={value}: must be greater than 0")
    zero_or_more = {"rounds": config.rounds, "momentum": config.momentum, "weight_decay": config.weight_decay}
    zero_or_more |= {"clip_norm": config.clip_norm, "evaluate_every": config.evaluate_every}
    for key, value in zero_or_more.items():
        if not value >= 0:
            raise ValueError(f"{name}.{key}={value}: must be 0 or more")
    if config.schedule not in SCHEDULES:
        raise ValueError(f"{name}.schedule={config.schedule!r}: allowed are {', '.join(SCHEDULES)}")
    if config.min_contributors < 1:
        raise ValueError(f"{name}.min_contributors={config.min_contributors}: must be at least 1")
    if config.min_contributors > config.clients_per_round:
        raise ValueError(
            f"{name}.min_contributors={config.min_contributors}: only {config.clients_per_round} clients take part in "
            "a round, so that nothing would ever be trained; lower it or raise clients_per_round"
        )
    try:
        weighting_rule(config.weighting)
    except ValueError as error:
        raise ValueError(f"{name}.weighting: {error}") from error


def _fixed(_config: TrainingConfig, _round: int) -> float:
    return 1.0


def _cosine(config: TrainingConfig, round_: int) -> float:
    progress = round_ / max(1, config.rounds - 1)
    return config.final_lr_share + (1 - config.final_lr_share) * (1 + math.cos(math.pi * progress)) / 2


def _step(config: TrainingConfig, round_: int) -> float:
    return 0.1 ** sum(round_ >= config.rounds * share for share in (0.5, 0.75))


SCHEDULES: dict[str, Callable[[TrainingConfig, int], float]] = {"fixed": _fixed, "cosine": _cosine, "step": _step}


def learning_rate(config: TrainingConfig, round_: int) -> float:
    """The learning rate of a round, counted from 0."""
    return config.lr * SCHEDULES[config.schedule](config, round_)


@dataclass(frozen=True)
class LocalSGD:
    """One client's local training in one round."""

    epochs: int
    batch_size: int
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float = 0.0
    augment: bool = False

    @classmethod
    def of(cls, config: TrainingConfig, round_: int, augment: bool = False) -> "LocalSGD":
        """The local part of a stage's configuration at a round."""
        return cls(
            epochs=config.epochs,
            batch_size=config.batch_size,
            lr=learning_rate(config, round_),
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            clip_norm=config.clip_norm,
            augment=augment,
        )


@dataclass(frozen=True)
class Trained:
    """What local training saw: optimiser steps, samples (epochs times the client's own), mean loss and accuracy."""

    steps: int
    seen_samples: int
    loss: float
    accuracy: float


def batch_indices(num_samples: int, batch_size: int, epochs: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Index batches over freshly shuffled epochs; the last batch of an epoch may be smaller."""
    for _ in range(epochs):
        yield from torch.split(torch.randperm(num_samples, generator=generator), batch_size)


def train_locally(
    forward: Callable[[Tensor], Tensor],
    parameters: Sequence[Tensor],
    data: tuple[Tensor, Tensor],
    local: LocalSGD,
    generator: torch.Generator,
) -> Trained:
    """Runs local SGD: one step per batch on the cross entropy of `forward`.

    Args:
        forward: maps a batch (B, ...) to logits (B, classes); may choose another path at every call.
        parameters: what is trained; those that a batch's path does not touch have no gradient and stay.
        data: all samples x (n, ...) and labels y (n,) on the device.
        local: hyper-parameters.
        generator: shuffles and augments; on the CPU whatever the device.
    """
    x, y = data
    optimizer = SGD(local, parameters)
    # Figures stay on the device: one synchronisation per client, not one per step.
    losses: list[Tensor] = []
    correct: list[Tensor] = []
    sizes: list[int] = []
    for index in batch_indices(len(y), local.batch_size, local.epochs, generator):
        place = index.to(x.device)
        x_B, y_B = x.index_select(0, place), y.index_select(0, place)
        if local.augment:
            x_B = augment_crop_flip(x_B, generator)
        logits = forward(x_B)
        loss = F.cross_entropy(logits, y_B)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach())
        correct.append((logits.detach().argmax(dim=1) == y_B).sum())
        sizes.append(len(index))
    seen = sum(sizes)
    loss_sum = torch.dot(torch.stack(losses).double(), torch.tensor(sizes, dtype=torch.float64, device=x.device))
    return Trained(len(sizes), seen, loss_sum.item() / seen, torch.stack(correct).sum().item() / seen)


class SGD:
    """SGD with momentum, weight decay and clipping over the parameters that the last backward pass reached.

    The arithmetic is torch's own `sgd`; an `Optimizer` object would go through all operators of a supernet at every
    step, and its bookkeeping costs more than a small client's arithmetic.
    """

    def __init__(self, local: LocalSGD, parameters: Sequence[Tensor]) -> None:
        self.local, self.parameters = local, parameters
        self.momentum: dict[int, Tensor | None] = {}
        for parameter in parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """One step; the gradients are gone afterwards, and what had none stays as it is (its momentum, too)."""
        local = self.local
        touched = [i for i, p in enumerate(self.parameters) if p.grad is not None]
        parameters = [self.parameters[i] for i in touched]
        if local.clip_norm > 0:
            torch.nn.utils.clip_grad_norm_(parameters, local.clip_norm)
        buffers = [self.momentum.get(i) for i in touched]
        sgd(
            parameters,
            [p.grad for p in parameters if p.grad is not None],
            buffers,
            foreach=len(parameters) > 4,
            lr=local.lr,
            momentum=local.momentum,
            weight_decay=local.weight_decay,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        if local.momentum:
            self.momentum.update(zip(touched, buffers, strict=True))
        for parameter in parameters:
            parameter.grad = None


@dataclass(frozen=True)
class Score:
    """Mean loss and accuracy over a number of samples."""

    loss: float
    metric: float
    samples: int


@torch.no_grad()
def evaluate(forward: Callable[[Tensor], Tensor], data: tuple[Tensor, Tensor], batch_size: int = 256) -> Score:
    """Mean cross entropy and accuracy of `forward` over all samples, in batches."""
    x, y = data
    if len(y) == 0:
        return Score(math.nan, math.nan, 0)
    loss_sum = torch.zeros((), dtype=torch.float64, device=x.device)
    correct = torch.zeros((), dtype=torch.int64, device=x.device)
    for x_B, y_B in zip(torch.split(x, batch_size), torch.split(y, batch_size), strict=True):
        logits = forward(x_B)
        loss_sum += F.cross_entropy(logits, y_B, reduction="sum").double()
        correct += (logits.argmax(dim=1) == y_B).sum()
    return Score(loss_sum.item() / len(y), correct.item() / len(y), len(y))
