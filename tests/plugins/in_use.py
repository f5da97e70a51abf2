"""A budget: a device that is in use has a part of its tier's budget left."""

from typing import Annotated

import numpy as np

from fedloom.platform.settings import PART, SHARE


def in_use(
    round: int,
    rng: np.random.Generator,
    *,
    probability: Annotated[float, PART, "that a device is in use in a round"] = 0.3,
    left: Annotated[float, SHARE, "share of the budget that is left then"] = 0.5,
) -> float:
    """The first round finds all devices idle; `rng` belongs to this round and client."""
    return left if round > 0 and rng.random() < probability else 1.0
