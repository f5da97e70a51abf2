"""Rank correlation of two scorings of the same models."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Values = Sequence[float] | NDArray[np.float64]


def kendall_tau(a: Values, b: Values) -> tuple[float, float]:
    """Kendall's tau-b of two scorings of the same models, and the p-value of no association.

    Both are NaN if one scoring is constant.
    Raises ValueError unless both have the same number of finite values, at least two.
    """
    from scipy.stats import kendalltau  # half a second, which only evaluations need

    x, y = _pairs(a, b)
    result = kendalltau(x, y)
    return float(result.statistic), float(result.pvalue)


def _pairs(a: Values, b: Values) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if x.shape != y.shape or x.ndim != 1 or len(x) < 2:
        raise ValueError(f"ranking needs two scorings of the same models, two at least: got {len(a)} and {len(b)}")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ValueError("ranking needs finite scores: leave failed models out")
    return x, y
