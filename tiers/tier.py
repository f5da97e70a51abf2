"""Tiers: the intervals of costs that groups of devices afford, their bounds, and the tier of each client."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from fedloom.tiers.devices import TRAINING_FACTOR, DeviceTable

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
    profiles = _per_tier("profile", profile, len(uppers))
    rows = zip(lowers, uppers, gpus, cpus, profiles, strict=True)
    return tuple(Tier(f"tier{i}", *row) for i, row in enumerate(rows, start=1))


def _per_tier(name: str, value: Any, num_tiers: int) -> tuple[Any, ...]:
    values = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    if len(values) == 1:
        values *= num_tiers
    if len(values) != num_tiers:
        raise ValueError(f"{name} has {len(values)} values for {num_tiers} tiers: give one value, or one per tier")
    return values


# -- bounds: computed from a sample of the space, or given ------------------------------------------------------------

ROUNDING = 0.02
"""Relative amount by which the largest path may exceed the last given bound.

Published bounds are rounded and count normalisation and activation as well.
"""


def tier_upper_bounds(
    path_costs: npt.NDArray[np.float64],
    fixed: float,
    largest: float,
    num_tiers: int,
    rho_low: float,
    rho_high: float,
) -> tuple[float, ...]:
    """Computes the upper bounds of the tiers of a space from the costs of uniformly drawn paths.

    The costs are sorted, normalised by their sum and cumulated. The top tier begins at the first cost whose cumulated
    share exceeds `rho_high` and ends at `largest`. If `rho_low` > 0, tier 1 ends at the first cost whose share exceeds
    `rho_low`, and the bounds in between are evenly spaced; if it is 0, all bounds up to the top tier are evenly spaced
    from `fixed`. A single tier ends at `largest`.

    `path_costs` has shape (paths,); infinite costs (unsupported operators) are left out. `fixed` is the cost of the
    part that all paths share and `largest` that of the largest path, in the same unit. Raises ValueError if shares or
    costs are out of range, or if the bounds would not increase.

    Source: FedorAS, App. E.4 (100 000 paths there).
    """
    if num_tiers < 1:
        raise ValueError(f"num_tiers={num_tiers} must be at least 1")
    if num_tiers > 1 and not 0 <= rho_low < rho_high < 1:
        raise ValueError(f"rho_low={rho_low:g} and rho_high={rho_high:g} must be 0 <= rho_low < rho_high < 1")
    if num_tiers == 2 and rho_low > 0:
        raise ValueError(f"two tiers have one bound, set by rho_high: give rho_low=0 instead of {rho_low:g}")
    costs = np.asarray(path_costs, dtype=np.float64).ravel()
    if np.isnan(costs).any() or (costs < 0).any():
        raise ValueError("path costs must be numbers that are not negative")
    costs = np.sort(costs[np.isfinite(costs)])
    if not costs.size or costs[-1] <= 0:
        raise ValueError("the space has no path of finite, positive cost: use another cost measure")
    # (1 + 1e-9) allows for the rounding of a sum of floats, far below the cost of any operator.
    if not costs[-1] <= largest * (1 + 1e-9) or not np.isfinite(largest):
        raise ValueError(
            f"largest={largest:.10g} must be the cost of the largest path that is supported; "
            f"a drawn path costs {costs[-1]:.10g}"
        )
    # A latency summed in another order may exceed `largest` by a rounding error; every path must belong to a tier.
    top = max(float(largest), float(costs[-1]))
    if num_tiers == 1:
        return (top,)
    cumulated = np.cumsum(costs)
    shares = cumulated / cumulated[-1]
    high = float(costs[np.searchsorted(shares, rho_high, side="right")])
    if rho_low > 0:
        low = float(costs[np.searchsorted(shares, rho_low, side="right")])
        inner = np.linspace(low, high, num_tiers - 1)
    else:
        inner = np.linspace(fixed, high, num_tiers)[1:]
    uppers = (*(float(bound) for bound in inner), top)
    if any(a >= b for a, b in pairwise((fixed if rho_low == 0 else 0.0, *uppers))):
        raise ValueError(
            f"rho_low={rho_low:g} and rho_high={rho_high:g} split this space at {_shown(uppers)}, which leaves a tier "
            f"empty: use fewer tiers than {num_tiers} (tiers.count=1 if they do not matter), other shares, or own "
            "bounds in tiers.upper_bounds"
        )
    return uppers


def check_upper_bounds(bounds: Sequence[float], smallest: float, largest: float) -> tuple[float, ...]:
    """Checks explicit upper bounds, so that every model of the space belongs to exactly one tier, and returns them.

    `smallest` and `largest` are the costs of the cheapest and the most expensive path, in the unit of the bounds. A
    last bound that is below `largest` by a share of up to `ROUNDING` is extended to it. Raises ValueError if the bounds
    do not increase strictly, if tier 1 does not hold the smallest model, if the last bound excludes models, or if the
    top tier would be empty.
    """
    uppers = tuple(float(bound) for bound in bounds)
    if not uppers:
        raise ValueError("no tier bounds were given: give one upper bound per tier")
    if not all(np.isfinite(uppers)) or any(a >= b for a, b in pairwise(uppers)):
        raise ValueError(f"tier bounds {_shown(uppers)} must be finite and strictly increasing")
    if uppers[0] < smallest:
        raise ValueError(
            f"the first tier's bound {uppers[0]:.10g} is below the smallest model's cost {smallest:.10g}: "
            "raise it (bounds are in the unit of the cost, so MACs and not millions of them)"
        )
    if uppers[-1] < largest * (1 - ROUNDING):
        raise ValueError(
            f"the last tier's bound {uppers[-1]:.10g} leaves out models that cost up to {largest:.10g}: "
            f"end with {largest:.10g} or more"
        )
    if len(uppers) > 1 and uppers[-2] >= largest:
        raise ValueError(
            f"the top tier (above {uppers[-2]:.10g}) is empty, as the largest model costs {largest:.10g}: "
            "lower the bounds or use fewer tiers"
        )
    return (*uppers[:-1], max(uppers[-1], float(largest)))


def tier_of(costs: npt.ArrayLike, uppers: Sequence[float]) -> npt.NDArray[np.int64]:
    """Index of the tier whose interval (lower, upper] holds each cost, in the shape of `costs`.

    The first tier is 0 and has no lower bound. A cost above the last bound, and infinity and NaN, belongs to no tier:
    its index is `len(uppers)`.
    """
    return np.asarray(np.searchsorted(np.asarray(uppers, dtype=np.float64), costs, side="left"), dtype=np.int64)


def share_of_models(path_costs: npt.ArrayLike, uppers: Sequence[float]) -> tuple[float, ...]:
    """Share of the drawn paths in each tier; the shares sum to 1 unless some paths cost more than the last bound.

    Source: FedorAS, Tab. 8, "portion". Raises ValueError if there are no paths.
    """
    tiers = tier_of(path_costs, uppers).ravel()
    if not tiers.size:
        raise ValueError("no path costs were given: draw at least one path")
    counts = np.bincount(tiers, minlength=len(uppers))[: len(uppers)]
    return tuple(float(count) / tiers.size for count in counts)


def _shown(uppers: Sequence[float]) -> str:
    return " / ".join(f"{bound:.10g}" for bound in uppers)


# -- the tier of each client: by a share per tier, by a list, or by the speed of its device ---------------------------

TierOfClient = npt.NDArray[np.int16]
"""Shape (clients,): the index of each client's tier, 0 for tier1; two bytes per client."""


def by_shares(num_clients: int, shares: Sequence[float], rng: np.random.Generator) -> TierOfClient:
    """Assigns clients to tiers at random, independently of their data, with an exact number of clients per tier.

    `shares` holds one share per tier. Every tier gets its share of the clients rounded down; the remaining clients go
    to the tiers with the largest remainders (ties: the lower tier). The assignment is a uniform permutation.
    Raises ValueError if a share is negative or if the shares do not sum to 1 within 1e-6.

    Source: FedorAS, App. E.4, Tab. 8.
    """
    if num_clients < 1:
        raise ValueError(f"num_clients={num_clients} must be at least 1")
    wanted = np.asarray(shares, dtype=np.float64)
    if not wanted.size or not (wanted >= 0).all():
        raise ValueError(f"shares {list(shares)} must be one number per tier, none negative")
    total = float(wanted.sum())
    if abs(total - 1) > 1e-6:
        raise ValueError(f"shares {list(shares)} sum to {total:.10g}, but must sum to 1")
    # 0.29 * 100 is 28.999999999999996: without rounding, floating-point errors would decide remainders and ties.
    exact = np.round(wanted / total * num_clients, 6)
    counts = np.floor(exact).astype(np.int64)
    left_over = num_clients - int(counts.sum())
    by_remainder = np.argsort(-np.round(exact - counts, 6), kind="stable")
    counts[by_remainder[:left_over]] += 1
    return rng.permutation(np.repeat(np.arange(len(counts), dtype=np.int16), counts))


def by_list(tier_of_client: Sequence[int] | npt.NDArray[np.integer], num_tiers: int, num_clients: int) -> TierOfClient:
    """Checks an explicit tier index per client and returns the indices.

    Raises ValueError if the number of entries is not `num_clients` or if an entry is not the index of a tier.
    """
    tiers = np.asarray(tier_of_client)
    if tiers.shape != (num_clients,):
        raise ValueError(
            f"the list of tiers has shape {tiers.shape}, but there are {num_clients} clients: give one each"
        )
    if tiers.size and tiers.dtype.kind not in "iu":
        raise ValueError(f"the list of tiers must hold whole numbers, not {tiers.dtype}")
    outside = (tiers < 0) | (tiers >= num_tiers)
    if outside.any():
        client = int(np.argmax(outside))
        raise ValueError(
            f"client {client} is in tier index {tiers[client]}, which must be from 0 (tier1) to {num_tiers - 1}"
        )
    return tiers.astype(np.int16)


def by_device_table(
    table: DeviceTable, tier_uppers: Sequence[float], *, batch_size: int, max_step_s: float
) -> TierOfClient:
    """Assigns each client to the highest tier whose largest model its device trains in time; client i has device row i.

    A device can train a tier if `TRAINING_FACTOR * upper_macs * batch_size / macs_per_s <= max_step_s`, where
    `upper_macs` is the tier's upper bound in MACs of one forward pass of one sample: one step on a batch takes at most
    `max_step_s` seconds. (`TRAINING_FACTOR` is 3: one forward pass, and a backward pass that costs two.)
    A device that is too slow for every tier belongs to tier 0, which has the smallest models.
    Raises ValueError if the bounds do not increase or a limit is not positive.

    Source: FedorAS, App. J.3, assigns tiers by a device trace; the rule itself is our own.
    """
    if batch_size < 1 or not max_step_s > 0:
        raise ValueError(f"batch_size={batch_size} and max_step_s={max_step_s:g} must be positive")
    if not len(tier_uppers) or not (np.diff([0.0, *tier_uppers]) > 0).all():
        raise ValueError(f"tier bounds {list(tier_uppers)} must be positive and strictly increasing")
    tiers = np.zeros(len(table), dtype=np.int16)
    for index, upper_macs in enumerate(tier_uppers):
        step_s = TRAINING_FACTOR * upper_macs * batch_size / table.macs_per_s
        tiers[step_s <= max_step_s] = index
    return tiers
