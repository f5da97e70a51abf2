"""Local training: plain SGD over a client's samples, with whatever forward pass the method asks for."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.sgd import sgd

from fedloom.platform.averaging.weighting import weighting_rule
from fedloom.platform.data.dataset import augment_crop_flip


@dataclass
class TrainingConfig:
    """A federated training stage: how many rounds, who takes part, and the clients' local SGD.

    `clients_per_round` null lets all clients take part in every round.
    `schedule` is fixed, cosine (down to `final_lr_share` of lr in the last round), step (x0.1 at 1/2 and 3/4) or steps
    (x0.1 every `step_rounds` rounds). `weighting` is what a client's work counts (`platform.weighting`).
    `clip_norm` limits the gradient's norm, 0 switches clipping off. `evaluate_every` rounds the server scores the
    current weights on validation data, 0 never.
    """

    rounds: int = 50
    clients_per_round: int | None = 10
    epochs: int = 1
    batch_size: int = 32
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 0.0
    clip_norm: float = 0.0
    schedule: str = "fixed"
    final_lr_share: float = 0.1
    step_rounds: int = 10
    min_contributors: int = 1
    weighting: str = "fedavg"
    evaluate_every: int = 0


def check_training(config: TrainingConfig, name: str, num_clients: int) -> None:
    """Raises ValueError for values that no training can run with; `name` is the configuration key of the stage."""
    if config.clients_per_round is not None and not 1 <= config.clients_per_round <= num_clients:
        raise ValueError(
            f"{name}.clients_per_round={config.clients_per_round}: must be between 1 and the {num_clients} clients "
            "there are; lower it or raise data.num_clients"
        )
    positive = {"epochs": config.epochs, "batch_size": config.batch_size, "lr": config.lr}
    positive |= {"step_rounds": config.step_rounds}
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
    in_round = cohort_size(config, num_clients)
    if config.min_contributors > in_round:
        raise ValueError(
            f"{name}.min_contributors={config.min_contributors}: only {in_round} clients take part in "
            "a round, so that nothing would ever be trained; lower it or raise clients_per_round"
        )
    try:
        weighting_rule(config.weighting)
    except ValueError as error:
        raise ValueError(f"{name}.weighting: {error}") from error


def cohort_size(config: TrainingConfig, num_clients: int) -> int:
    """How many clients a full round of the stage has."""
    return num_clients if config.clients_per_round is None else config.clients_per_round


def _fixed(_config: TrainingConfig, _round: int) -> float:
    return 1.0


def _cosine(config: TrainingConfig, round_: int) -> float:
    progress = round_ / max(1, config.rounds - 1)
    return config.final_lr_share + (1 - config.final_lr_share) * (1 + math.cos(math.pi * progress)) / 2


def _step(config: TrainingConfig, round_: int) -> float:
    return 0.1 ** sum(round_ >= config.rounds * share for share in (0.5, 0.75))


def _steps(config: TrainingConfig, round_: int) -> float:
    return 0.1 ** (round_ // config.step_rounds)


SCHEDULES: dict[str, Callable[[TrainingConfig, int], float]] = {
    "fixed": _fixed,
    "cosine": _cosine,
    "step": _step,
    "steps": _steps,
}


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
    """Index batches over freshly shuffled epochs, of the sizes that `epoch_sizes` gives."""
    sizes = epoch_sizes(num_samples, batch_size)
    for _ in range(epochs):
        yield from torch.split(torch.randperm(num_samples, generator=generator), sizes)


def epoch_sizes(num_samples: int, batch_size: int) -> list[int]:
    """The sizes of an epoch's batches: the last may be smaller, and a rest of one sample joins the batch before it.

    One sample on a 1x1 map has no variance: batch norms cannot train on it.
    """
    full, rest = divmod(num_samples, batch_size)
    if rest == 1 and full:
        return [batch_size] * (full - 1) + [batch_size + 1]
    return [batch_size] * full + ([rest] if rest else [])


IGNORED = -100
"""The target of a position that is no position (the padding of a text): neither loss nor metric counts it."""


def batch_sizes(num_samples: int, local: LocalSGD) -> list[int]:
    """The sizes of the batches that `batch_indices` gives."""
    return epoch_sizes(num_samples, local.batch_size) * local.epochs


@contextmanager
def own_randomness(generator: torch.Generator, device: torch.device) -> Iterator[None]:
    """Dropout draws from torch's global generators: for the block they are seeded as `generator` was, then put back."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(generator.initial_seed())
        yield


def train_locally(
    forward: Callable[[Tensor], Tensor],
    parameters: Sequence[Tensor],
    data: tuple[Tensor, Tensor],
    local: LocalSGD,
    generator: torch.Generator,
    passes: int = 1,
    optimizer: "Step | None" = None,
) -> Trained:
    """Runs local SGD: one step per batch on the cross entropy of `forward`.

    Args:
        forward: maps a batch (B, ...) to logits (B, classes) or (B, classes, T); may choose another path at every call.
        parameters: what is trained; those that a batch's path does not touch have no gradient and stay.
        data: all samples x (n, ...) and labels y (n,) or (n, T) on the device; a label of -100 is not counted.
        local: hyper-parameters.
        generator: shuffles and augments; on the CPU whatever the device.
        passes: forward and backward passes per batch; their gradients are added up (progressive shrinking's subnets).
        optimizer: what a step does; SGD over the parameters if not given.
    """
    x, y = data
    optimizer = SGD(local, parameters) if optimizer is None else optimizer
    # Figures stay on the device: one synchronisation per client, not one per step.
    losses: list[Tensor] = []
    correct: list[Tensor] = []
    targets: list[Tensor | int] = []
    steps = seen = 0
    for index in batch_indices(len(y), local.batch_size, local.epochs, generator):
        place = index.to(x.device)
        x_B, y_B = x.index_select(0, place), y.index_select(0, place)
        if local.augment:
            x_B = augment_crop_flip(x_B, generator)
        for _ in range(passes):
            logits = forward(x_B)
            loss = F.cross_entropy(logits, y_B, ignore_index=IGNORED)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
            correct.append((logits.detach().argmax(dim=1) == y_B).sum())
            targets.append(_counted(y_B))
        optimizer.step()
        steps, seen = steps + 1, seen + len(index)
    counts = torch.stack([torch.as_tensor(t, dtype=torch.float64, device=x.device) for t in targets])
    loss_sum = torch.dot(torch.stack(losses).double(), counts)
    total = counts.sum().item()
    return Trained(steps, seen, loss_sum.item() / total, torch.stack(correct).sum().item() / total)


def _counted(y_B: Tensor) -> Tensor | int:
    """Targets that count: all labels of a batch of images, the positions of texts that are not padding."""
    return len(y_B) if y_B.dim() == 1 else (y_B != IGNORED).sum()


class Step(Protocol):
    """What follows the backward pass of a batch."""

    def step(self) -> None:
        """Uses up the gradients."""
        ...


class SGD:
    """SGD with momentum, weight decay and clipping over the parameters that the last backward pass reached.

    The arithmetic is torch's own `sgd`; an `Optimizer` object would go through all operators of a supernet at every
    step, and its bookkeeping costs more than a small client's arithmetic.
    """

    def __init__(self, local: LocalSGD, parameters: Sequence[Tensor]) -> None:
        self.local, self.parameters = local, parameters
        self.pull = 0.0
        self.anchors: Sequence[Tensor] = ()
        """Where `pull` draws the parameters to: the gradient of pull / 2 times the squared distance is added."""
        self.momentum: dict[int, Tensor | None] = {}
        for parameter in parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """One step; the gradients are gone afterwards, and what had none stays as it is (its momentum, too)."""
        local = self.local
        touched = [i for i, p in enumerate(self.parameters) if p.grad is not None]
        parameters = [self.parameters[i] for i in touched]
        if self.pull:
            for i in touched:
                _grad(self.parameters[i]).add_(self.parameters[i] - self.anchors[i], alpha=self.pull)
        if local.clip_norm > 0:
            torch.nn.utils.clip_grad_norm_(parameters, local.clip_norm)
        buffers = [self.momentum.get(i) for i in touched]
        sgd(
            parameters,
            [_grad(p) for p in parameters],
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


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "only parameters that were reached take a step"
    return parameter.grad


@dataclass(frozen=True)
class Score:
    """Mean loss and accuracy over the targets of a number of samples (one per image, one per position of a text)."""

    loss: float
    metric: float
    samples: int
    per_position: bool = False


@torch.no_grad()
def evaluate(forward: Callable[[Tensor], Tensor], data: tuple[Tensor, Tensor], batch_size: int = 256) -> Score:
    """Mean cross entropy and accuracy of `forward` over all targets, in batches."""
    x, y = data
    if len(y) == 0:
        return Score(math.nan, math.nan, 0)
    loss_sum = torch.zeros((), dtype=torch.float64, device=x.device)
    correct = torch.zeros((), dtype=torch.int64, device=x.device)
    targets = 0
    if y.dim() > 1:  # logits of every position: a batch of texts is far larger than one of images
        batch_size = max(1, batch_size // 8)
    for x_B, y_B in zip(torch.split(x, batch_size), torch.split(y, batch_size), strict=True):
        logits = forward(x_B)
        loss_sum += F.cross_entropy(logits, y_B, reduction="sum", ignore_index=IGNORED).double()
        correct += (logits.argmax(dim=1) == y_B).sum()
        targets += int(_counted(y_B))
    return Score(loss_sum.item() / targets, correct.item() / targets, len(y), per_position=y.dim() > 1)


@torch.no_grad()
def estimate_statistics(module: nn.Module, x: Tensor, batch_size: int = 128) -> None:
    """Replaces the running statistics of the module's batch norms by those of `x` (n, ...), labels not needed.

    Every batch counts alike, as the cumulative mean of once-for-all's calibration (Cai et al. 2020). For stand-alone
    modules: what a supernet holds is not to be changed by looking at one of its subnets.
    """
    norms = [part for part in module.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    # Batches as even as can be: they count alike, and a rest of one sample may have no variance to estimate. Each takes
    # every so manieth sample: where they come client by client, a run of them has less variance than the whole.
    batches = math.ceil(len(x) / batch_size)
    for first in range(batches):
        module(x[first::batches])
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        norm.eval()
