"""A tier: the interval of costs that a group of devices affords, and the Ray resources to simulate one of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

SMALLEST_SHARE = 0.0001
"""The smallest GPU share: Ray counts fractional resources in units of 0.0001."""


@dataclass(frozen=True)
class Tier:
    """Devices that afford models whose cost lies in (lower, upper].

    `lower` and `upper` are in the unit of the cost measure (MACs of one forward pass by default). The lowest tier, with
    `lower` 0, includes the cost 0. `num_gpus` (0, a whole number, or a fraction 1/k) and `num_cpus` are reserved for
    each client that is simulated at the same time; `profile` names the device profile.
    Raises ValueError for an empty interval and for resources that cannot be reserved.

    Source: FedorAS, App. E.4, Tab. 8.
    """

    name: str
    lower: float
    upper: float
    num_gpus: float = 0.0
    num_cpus: float = 1.0
    profile: str = "default"

    def __post_init__(self) -> None:
        if not 0 <= self.lower < self.upper:  # false for NaN, too
            raise ValueError(f"tier {self.name}: bounds ({self.lower:g}, {self.upper:g}] must be 0 <= lower < upper")
        nearest = nearest_num_gpus(self.num_gpus)
        if nearest != self.num_gpus:
            raise ValueError(
                f"tier {self.name}: num_gpus={self.num_gpus!r} must be 0, a whole number or 1/k, "
                f"or devices would be shared unevenly; the nearest valid value is {nearest!r}"
            )
        if not 0 < self.num_cpus < math.inf or (self.num_cpus > 1 and self.num_cpus % 1):
            raise ValueError(
                f"tier {self.name}: num_cpus={self.num_cpus!r} must be above 0, and whole if above 1: give 1 or more"
            )

    def contains(self, cost: float) -> bool:
        """Whether a model of this cost belongs to the tier; NaN and infinity (unsupported) never do."""
        return (self.lower < cost <= self.upper or cost == self.lower == 0) and cost < math.inf


def nearest_num_gpus(num_gpus: float) -> float:
    """The nearest GPU share that divides devices evenly: 0, 1/k, or a whole number."""
    if not num_gpus >= SMALLEST_SHARE:
        return 0.0
    if math.isinf(num_gpus):
        return 1.0
    if num_gpus >= 1:
        return float(round(num_gpus))
    k = round(1 / num_gpus)
    # Rounding 1 / num_gpus finds the nearest k, but the share of a neighbouring k may be nearer.
    return min((1 / j for j in (k, k + 1, max(k - 1, 1))), key=lambda share: abs(share - num_gpus))


def make_tiers(
    uppers: Sequence[float],
    *,
    num_gpus: float | Sequence[float] = 0.0,
    num_cpus: float | Sequence[float] = 1.0,
    profile: str | Sequence[str] = "default",
) -> tuple[Tier, ...]:
    """Makes adjacent tiers "tier1", "tier2", … from their upper bounds.

    Resources and profiles are one value for all tiers or one per tier. The first tier starts at 0 instead of the fixed
    cost, as in FedorAS, Tab. 8, because intervals exclude their lower bound and the first tier must include the
    all-identity model, whose cost *is* the fixed cost. Raises ValueError if there are no bounds, if they do not
    increase, or if the number of values is neither one nor one per tier.
    """
    if not len(uppers):
        raise ValueError("no tier bounds were given: give one upper bound per tier")
    lowers = (0.0, *uppers[:-1])
    gpus = _per_tier("num_gpus", num_gpus, len(uppers))
    cpus = _per_tier("num_cpus", num_cpus, len(uppers))
    profiles = (profile,) * len(uppers) if isinstance(profile, str) else tuple(profile)
    if len(profiles) != len(uppers):
        raise ValueError(f"profile has {len(profiles)} values for {len(uppers)} tiers: give one value, or one per tier")
    rows = zip(lowers, uppers, gpus, cpus, profiles, strict=True)
    return tuple(Tier(f"tier{i}", *row) for i, row in enumerate(rows, start=1))


def _per_tier(name: str, value: float | Sequence[float], num_tiers: int) -> tuple[float, ...]:
    values = tuple(value) if isinstance(value, Sequence) else (value,) * num_tiers
    if len(values) != num_tiers:
        raise ValueError(f"{name} has {len(values)} values for {num_tiers} tiers: give one value, or one per tier")
    return values
