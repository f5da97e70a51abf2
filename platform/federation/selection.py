"""Which clients take part in a round: uniform among the eligible ones that are available."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

DRAWS_PER_CLIENT = 50
"""Draws per wanted client before a cohort is left short because too few devices are available."""


@dataclass(frozen=True)
class Cohort:
    """The selected clients in ascending order, with the probability that each had, and the reason.

    The probability is NaN (null in the tables) where devices may be unavailable: it then depends on who else is
    available, which is not asked of every registered client.
    """

    client_ids: tuple[int, ...]
    probability: float
    reason: str


def select_uniform(
    eligible: np.ndarray, size: int, rng: np.random.Generator, available: Callable[[int], bool] | None = None
) -> Cohort:
    """Draws `size` distinct clients uniformly from the eligible ones, passing over those not available.

    The cost grows with `size`, not with the number of eligible clients. If there are fewer than `size`, all are taken;
    if too few are available, the cohort is smaller.
    """
    population = len(eligible)
    wanted = min(size, population)
    if available is None:
        # Floyd's method inside numpy: no permutation of all registered clients.
        chosen = rng.choice(population, size=wanted, replace=False, shuffle=False) if wanted else np.empty(0, np.int64)
        probability = wanted / population if population else 0.0
        return Cohort(tuple(sorted(int(eligible[i]) for i in chosen)), probability, "uniform")
    seen: set[int] = set()
    taken: list[int] = []
    for _ in range(DRAWS_PER_CLIENT * wanted):
        if len(taken) == wanted or len(seen) == population:
            break
        place = int(rng.integers(population))
        if place not in seen:
            seen.add(place)
            if available(int(eligible[place])):
                taken.append(int(eligible[place]))
    return Cohort(tuple(sorted(taken)), math.nan, "uniform among available")
