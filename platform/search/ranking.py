"""How well two scorings agree, and how good a front is."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pymoo.indicators.hv import HV
from scipy.stats import kendalltau

from fedloom.platform.search.base import Scored, pareto_front

Values = Sequence[float] | NDArray[np.float64]


def kendall_tau(a: Values, b: Values) -> tuple[float, float]:
    """Kendall's tau-b of two scorings of the same models, and the p-value of no association.

    Both are NaN if one scoring is constant.
    Raises ValueError unless there are as many finite values in both, two at least.
    """
    x, y = _pairs(a, b)
    result = kendalltau(x, y)
    return float(result.statistic), float(result.pvalue)


def kendall_interval(
    a: Values,
    b: Values,
    *,
    rng: np.random.Generator,
    confidence: float = 0.95,
    resamples: int = 1000,
) -> tuple[float, float]:
    """Percentile bootstrap interval of Kendall's tau, resampling models (Efron 1979).

    Resamples in which a scoring is constant are left out; NaN if all are.
    Raises ValueError as `kendall_tau`, and unless 0 < confidence < 1.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}, it must lie between 0 and 1")
    x, y = _pairs(a, b)
    draws = rng.integers(len(x), size=(resamples, len(x)))
    taus = np.array([kendalltau(x[draw], y[draw]).statistic for draw in draws])
    taus = taus[~np.isnan(taus)]
    if len(taus) == 0:
        return float("nan"), float("nan")
    low, high = np.quantile(taus, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def _pairs(a: Values, b: Values) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if x.shape != y.shape or x.ndim != 1 or len(x) < 2:
        raise ValueError(f"ranking needs two scorings of the same models, two at least: got {len(a)} and {len(b)}")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ValueError("ranking needs finite scores: leave failed models out")
    return x, y


@dataclass(frozen=True, slots=True)
class Reference:
    """The frame in which fronts are compared: ideal and nadir of both objectives.

    Both are scaled so that the ideal is 0 and the nadir 1; `point` is the reference point in that scale, the same for
    both. Raises ValueError unless the ideal is strictly better than the nadir.
    """

    ideal_metric: float
    nadir_metric: float
    ideal_cost: float
    nadir_cost: float
    point: float = 1.1

    def __post_init__(self) -> None:
        if not (self.ideal_metric > self.nadir_metric and self.ideal_cost < self.nadir_cost):
            raise ValueError(f"{self}: the ideal must have a larger metric and a smaller cost than the nadir")


def reference_of(fronts: Iterable[Iterable[Scored]]) -> Reference:
    """The common frame of several fronts: the best and the worst of their union.

    Raises ValueError if the union has no extent in one of the objectives.
    """
    union = [s for front in fronts for s in front if s.feasible]
    if not union:
        raise ValueError("no feasible model in any front: nothing to compare")
    metrics, costs = [s.metric for s in union], [s.cost for s in union]
    return Reference(max(metrics), min(metrics), min(costs), max(costs))


def hypervolume(front: Iterable[Scored], reference: Reference) -> float:
    """Area between the reference point and the front, in the scale of the reference (Zitzler & Thiele 1998).

    Dominated models add nothing; no feasible model gives 0; `point` squared is reached by the ideal alone.
    """
    points = np.array([(-s.metric, s.cost) for s in pareto_front(front)], dtype=np.float64).reshape(-1, 2)
    if len(points) == 0:
        return 0.0
    ideal = np.array([-reference.ideal_metric, reference.ideal_cost])
    nadir = np.array([-reference.nadir_metric, reference.nadir_cost])
    indicator = HV(ref_point=np.full(2, reference.point))
    return float(indicator((points - ideal) / (nadir - ideal)))
