"""Hypervolume of the fronts of searches in the plane of cost and accuracy."""

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from fedloom.experiments.analysis.frames import pareto
from fedloom.experiments.analysis.tables import Tables

MARGIN = 0.1
"""Default distance of the reference point from the worst values of the fronts, as a share of their range."""


@dataclass(frozen=True)
class Box:
    """The box that normalises hypervolumes, from the ideal point to the reference point, each (MACs, metric)."""

    ideal: tuple[float, float]
    reference: tuple[float, float]


def hypervolume(tables: Tables, reference: tuple[float, float] | None = None) -> pd.DataFrame:
    """One row per (run, tier): the share of a box in the plane of MACs and metric that the run's candidates dominate.

    All runs of a tier share one box: from the ideal point (fewest MACs and best metric of any run's front) to the
    `reference` (MACs, metric), by default a tenth of the range beyond the worst values of the fronts. Columns:
    experiment, run_id, tier, points (on the run's front), hypervolume (0 to 1), ideal_macs, ideal_metric,
    reference_macs, reference_metric. Only rows with the same box are comparable. Candidates are the feasible ones of
    the table `candidates`, scored on validation data; the cost is always MACs, independent of the cost measure of the
    tiers. Raises ValueError for a reference that is not worse than the ideal. Source: Zitzler and Thiele, 1998.
    """
    rows = pareto(tables)
    rows = rows[rows["macs"].notna() & np.isfinite(rows["metric"].astype("float64"))]
    found: list[tuple[Hashable, ...]] = []
    for tier, of_tier in rows.groupby("tier", sort=False):
        fronts = {key: front_of(run) for key, run in of_tier.groupby(["experiment", "run_id"], sort=False)}
        box = _box(np.concatenate(list(fronts.values())), reference, str(tier))
        found += [(*key, tier, len(f), _share(f, box), *box.ideal, *box.reference) for key, f in fronts.items()]
    points = ["ideal_macs", "ideal_metric", "reference_macs", "reference_metric"]
    return pd.DataFrame(found, columns=["experiment", "run_id", "tier", "points", "hypervolume", *points])


def front_of(candidates: pd.DataFrame, cost: str = "macs") -> np.ndarray:
    """The non-dominated points (cost, metric), shape (n, 2), sorted by cost."""
    ordered = candidates[[cost, "metric"]].astype("float64").sort_values([cost, "metric"], ascending=[True, False])
    best_before = ordered["metric"].cummax().shift(fill_value=-np.inf)
    return ordered[ordered["metric"] > best_before].to_numpy()


def _box(points: np.ndarray, reference: tuple[float, float] | None, tier: str) -> Box:
    (least, lowest), (most, best) = points.min(axis=0), points.max(axis=0)
    if reference is None:
        # A front of one point, or without a range, still needs a box with an area.
        wide, high = (most - least) or abs(least) or 1.0, (best - lowest) or abs(best) or 1.0
        reference = (most + MARGIN * wide, lowest - MARGIN * high)
    if reference[0] <= least or reference[1] >= best:
        raise ValueError(
            f"the reference {tuple(map(float, reference))} of (MACs, metric) must be worse than the best of {tier}, "
            f"({least:g}, {best:g}): give more MACs and a lower metric"
        )
    return Box((float(least), float(best)), (float(reference[0]), float(reference[1])))


def _share(front: np.ndarray, box: Box) -> float:
    from pymoo.indicators.hv import HV  # imported here, because it loads slowly and reports do not need it

    ideal, reference = np.array(box.ideal), np.array(box.reference)
    # In both dimensions 0 is the ideal and 1 the reference; a point beyond the reference adds no volume.
    scaled = (front - ideal) / (reference - ideal)
    inside = scaled[(scaled < 1).all(axis=1)]
    return float(HV(ref_point=np.ones(2))(inside)) if len(inside) else 0.0
