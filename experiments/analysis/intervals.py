"""Means with 95 % confidence intervals."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pandas as pd

CONFIDENCE = 0.95

FEWEST = 3
"""Values from which there is an interval and a test: Student's quantile is 12.7 for two values, 4.3 for three."""


@dataclass(frozen=True)
class Estimate:
    """The mean of `runs` independent values and the interval mean ± half_width; null for fewer than `FEWEST` values.

    Runs that repeat a seed are not independent: they count as one value, their mean.
    """

    mean: float
    half_width: float | None
    runs: int
    values: tuple[float, ...]


def is_absent(value: Any) -> bool:
    """Whether a value is None, NaN or pandas' NA."""
    return bool(pd.isna(value))


def estimate(values: Iterable[Any]) -> Estimate | None:
    """Mean and 95 % interval by Student's t with n - 1 degrees of freedom; None if all values are absent."""
    known = tuple(float(v) for v in values if not is_absent(v))
    n = len(known)
    if n == 0:
        return None
    mean = math.fsum(known) / n  # independent of the order of the runs
    if n < FEWEST:
        return Estimate(mean, None, n, known)
    variance = math.fsum((v - mean) ** 2 for v in known) / (n - 1)
    from scipy.special import stdtrit  # half a second, which a few runs do not need

    quantile = float(stdtrit(n - 1, 0.5 + CONFIDENCE / 2))
    return Estimate(mean, quantile * math.sqrt(variance / n), n, known)
