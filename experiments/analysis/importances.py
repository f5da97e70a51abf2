"""The importance of each axis of an ablation, and of pairs of axes, for an outcome, beyond the noise of the seeds."""

import itertools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from fedloom.experiments.analysis.ablation import check_measure
from fedloom.experiments.analysis.tables import METRIC
from fedloom.experiments.store.ablations import Ablation

Array = npt.NDArray[np.float64]

FEWEST_SETTINGS = 10
"""Minimum number of settings for a forest, so that there are enough to train and to test it on."""
TREES, SPLITS, SHUFFLES = 50, 8, 5
FURTHER, OF_SEEDS = "three or more axes", "seeds"
AXIS, PAIR, MORE, NOISE = 1, 2, 3, 0
"""Values of the column `order`: how many axes act together (`MORE` for three or more), or `NOISE` for the seeds."""


def importances(frame: pd.DataFrame, ablation: Ablation, measure: str = METRIC) -> pd.DataFrame:
    """One row per axis, and on a grid per pair of axes: its share of the variance of a measure between trials.

    `frame` comes from `ablation_frame`, best with `each="run"`; several rows of a trial are averaged. Columns: axes (an
    axis, or "a × b"), order (number of axes that act together: 1, 2, 3 for all effects of three or more, 0 for the
    seeds), importance (a share from 0 to 1), method:

    "variance", if some seeds have a value of every setting: the analysis of variance of the grid, with these seeds as
    blocks. Every effect's sum of squares is reduced by what the seeds' noise alone adds to it (Kelley's epsilon
    squared, 1935), but not below 0; the row "seeds" has the rest, so that importances sum to 1.

    "one seed", if only one has: the same without a row "seeds". The noise is unknown, and the effects contain it.

    "forest", for random searches and grids of which no seed is whole: the increase of a random forest's squared error
    (Breiman 2001) on held-out settings when the axis is permuted, divided by twice the variance of the measure. It
    estimates the share of the axis with all its interactions (Gregorutti et al. 2017) and is at most 1. Pairs are not
    separated. Fewer than `FEWEST_SETTINGS` settings give no rows.

    A measure without variance gives no rows. Raises ValueError for an unknown measure.
    """
    check_measure(frame, measure)
    axes = [axis for axis, values in ablation.axes.items() if len(values) > 1]
    values = frame.dropna(subset=[measure]).groupby([*axes, "seed"], observed=True)[measure].mean()
    rows: list[tuple[str, int, float]] = []
    method = ""
    grid = _whole_grid(values, [len(frame[axis].cat.categories) for axis in axes])
    varied = values.to_numpy(dtype=np.float64) if grid is None else grid
    if axes and varied.size and float(np.ptp(varied)) > 1e-9 * float(np.abs(varied).max()):
        if grid is not None:
            rows, method = variances(grid, axes), "variance" if grid.shape[-1] > 1 else "one seed"
        elif len(values.groupby(axes, observed=True)) >= FEWEST_SETTINGS:
            rows, method = _by_forest(values, axes), "forest"
    kinds = {"axes": "object", "order": "int64", "importance": "float64"}
    return pd.DataFrame(rows, columns=[*kinds]).astype(kinds).assign(method=method)


def _whole_grid(values: "pd.Series[float]", lengths: list[int]) -> Array | None:
    """The values of the seeds that have every setting, in the shape (*lengths, seeds); None if no seed has."""
    of_seed = values.groupby("seed")
    whole = [seed for seed, size in of_seed.size().items() if size == math.prod(lengths)]
    if not whole:
        return None
    rows = values[values.index.isin(whole, level="seed")].sort_index()
    return np.asarray(rows, dtype=np.float64).reshape(*lengths, len(whole))


def variances(grid: Array, axes: list[str]) -> list[tuple[str, int, float]]:
    """The rows of `importances` for a full grid, whose last dimension is the seeds.

    The effect of a set of axes is the mean over all other dimensions, less the effects of its subsets: effects are
    orthogonal, and their sums of squares add up to that of the grid.
    """
    *lengths, seeds = grid.shape
    dimensions = range(len(axes))
    means = grid.mean(axis=-1, keepdims=True)
    residuals = grid - means - grid.mean(axis=tuple(dimensions), keepdims=True) + grid.mean()
    freedom = math.prod(lengths) - 1
    noise = float((residuals**2).sum()) / (freedom * (seeds - 1)) if seeds > 1 else 0.0

    effects: dict[tuple[int, ...], Array] = {(): grid.mean(keepdims=True)}
    squares: dict[tuple[int, ...], float] = {}
    degrees: dict[tuple[int, ...], int] = {}
    for order in (AXIS, PAIR):
        for subset in itertools.combinations(dimensions, order):
            others = tuple(d for d in dimensions if d not in subset)
            lower = (effect for part, effect in effects.items() if set(part) < set(subset))
            effects[subset] = means.mean(axis=others, keepdims=True) - sum(lower, np.zeros(1))
            squares[subset] = grid.size / effects[subset].size * float((effects[subset] ** 2).sum())
            degrees[subset] = math.prod(lengths[d] - 1 for d in subset)

    total = float(((grid - grid.mean()) ** 2).sum())
    rows = [
        (" × ".join(axes[d] for d in subset), len(subset), max(0.0, squares[subset] - degrees[subset] * noise) / total)
        for subset in squares
    ]
    if len(axes) > PAIR:
        further = seeds * float(((means - grid.mean()) ** 2).sum()) - sum(squares.values())
        left = freedom - sum(degrees.values())
        rows.append((FURTHER, MORE, max(0.0, further - left * noise) / total))
    if seeds > 1:
        rows.append((OF_SEEDS, NOISE, max(0.0, 1.0 - sum(share for _, _, share in rows))))
    return rows


def _by_forest(values: "pd.Series[float]", axes: list[str]) -> list[tuple[str, int, float]]:
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.inspection import permutation_importance
    from sklearn.model_selection import GroupShuffleSplit

    rows = values.reset_index()
    settings = rows.groupby(axes, observed=True).ngroup()  # keeps the seeds of a setting in one part of a split
    x = np.column_stack([_as_numbers(rows[axis]) for axis in axes])
    y = rows[values.name].to_numpy(dtype=np.float64)
    sums = np.zeros(len(axes))
    for train, test in GroupShuffleSplit(SPLITS, test_size=1 / 3, random_state=0).split(x, y, settings):
        forest = RandomForestRegressor(TREES, random_state=0).fit(x[train], y[train])
        options = {"scoring": "neg_mean_squared_error", "n_repeats": SHUFFLES, "random_state": 0}
        sums += permutation_importance(forest, x[test], y[test], **options).importances_mean
    shares = np.clip(sums / SPLITS / (2 * y.var()), 0.0, 1.0)
    return [(axis, AXIS, float(share)) for axis, share in zip(axes, shares, strict=True)]


def _as_numbers(values: "pd.Series[Any]") -> Array:
    """Numbers unchanged, names as their positions among the axis' values."""
    numeric = all(isinstance(value, int | float) for value in values.cat.categories)
    return np.asarray(values if numeric else values.cat.codes, dtype=np.float64)
