"""FedAvg whose server steps shrink with the round t: x <- x + server_lr / sqrt(t + 1) (mean - x).

With `decay=false` and `server_lr=1`, every step is as long as the mean change: this is FedAvg, bit for bit.
"""

from math import sqrt
from typing import Annotated

from torch import Tensor

from fedloom.platform.averaging.server import ServerStep
from fedloom.platform.settings import POSITIVE


def shrinking(
    step: ServerStep,
    *,
    server_lr: Annotated[float, POSITIVE, "length of the first step as a share of the mean change"] = 1.0,
    decay: Annotated[bool, "whether steps become shorter"] = True,
) -> Tensor:
    """The new values of one region of a parameter."""
    length = server_lr / sqrt(step.about.round + 1) if decay else server_lr
    return step.mean if length == 1 else step.old + length * step.change
