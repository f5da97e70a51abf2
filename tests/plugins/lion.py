"""A server rule: the sign of an interpolated mean change, as the optimiser Lion takes it (Chen et al. 2023)."""

from typing import Annotated

from torch import Tensor

from fedloom.platform.averaging.server import ServerStep
from fedloom.platform.settings import POSITIVE


def lion(step: ServerStep, *, server_lr: Annotated[float, POSITIVE, "length of every scalar's step"] = 1e-3) -> Tensor:
    """Old values plus the learning rate, up or down."""
    mean = step.state("mean")
    direction = (0.9 * mean + 0.1 * step.change).sign()
    mean.mul_(0.99).add_(step.change, alpha=0.01)
    return step.old + server_lr * direction
