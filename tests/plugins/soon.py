"""An arrival rule: the client's weights, pulled to the server's the more, the further these have moved meanwhile."""

from typing import Annotated

import torch
from torch import Tensor

from fedloom.platform.averaging.staleness import Arrival
from fedloom.platform.settings import ZERO_OR_MORE


def soon(arrival: Arrival, *, pull: Annotated[float, ZERO_OR_MORE, "how much a distance of 1 counts"] = 1.0) -> Tensor:
    """The change, less where the server's weights are far from those that the client has received."""
    moved = (arrival.old - arrival.received).square().mean().sqrt()
    return torch.add(arrival.old, arrival.value - arrival.received, alpha=float(1 / (1 + pull * moved)))
