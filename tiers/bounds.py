"""Cost bounds of tiers: computed from a sample of the space or given, and the tier of each cost."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

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
    _check_split(num_tiers, rho_low, rho_high)
    costs = _sorted_finite(path_costs, largest)
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


def _check_split(num_tiers: int, rho_low: float, rho_high: float) -> None:
    if num_tiers < 1:
        raise ValueError(f"num_tiers={num_tiers} must be at least 1")
    if num_tiers == 1:
        return
    if not 0 <= rho_low < rho_high < 1:
        raise ValueError(f"rho_low={rho_low:g} and rho_high={rho_high:g} must be 0 <= rho_low < rho_high < 1")
    if num_tiers == 2 and rho_low > 0:
        raise ValueError(f"two tiers have one bound, which rho_high sets: give rho_low=0 instead of {rho_low:g}")


def _sorted_finite(path_costs: npt.NDArray[np.float64], largest: float) -> npt.NDArray[np.float64]:
    costs = np.asarray(path_costs, dtype=np.float64).ravel()
    if np.isnan(costs).any() or (costs < 0).any():
        raise ValueError("path costs must be numbers that are not negative")
    costs = np.sort(costs[np.isfinite(costs)])
    if not costs.size or costs[-1] <= 0:
        raise ValueError("the space has no path of finite, positive cost: draw more paths, or use another cost measure")
    # (1 + 1e-9) allows for the rounding of a sum of floats, far below the cost of any operator.
    if not costs[-1] <= largest * (1 + 1e-9) or not np.isfinite(largest):
        raise ValueError(
            f"largest={largest:.10g} must be the cost of the largest path that is supported; "
            f"a drawn path costs {costs[-1]:.10g}"
        )
    return costs


def _shown(uppers: Sequence[float]) -> str:
    return " / ".join(f"{bound:.10g}" for bound in uppers)
