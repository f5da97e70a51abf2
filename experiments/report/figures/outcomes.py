"""Figure of what settings end with: accuracy against bytes, MACs and simulated time, with the Pareto front of each."""

from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedloom.experiments.analysis.frames import METRIC
from fedloom.experiments.analysis.fronts import front_of
from fedloom.experiments.analysis.seeds import by_seed, estimate_by_seed
from fedloom.experiments.report.figures.settings import LEGEND_LINE_IN
from fedloom.experiments.report.figures.style import GREY, LEGEND, MARKERS, SERIES, quiet, with_bars
from fedloom.experiments.report.parts.numbers import si_scale
from fedloom.experiments.report.tables.outcomes import Groups, evaluated

COSTS = (
    ("total_bytes", "bytes, both ways", "B"),
    ("total_macs", "MACs", ""),
    ("simulated_s", "simulated time", "s"),
)
"""The panels: the measure, its label and its unit."""
_DECADE, _HOUR_S = 10.0, 3600.0


def outcomes_figure(groups: Groups) -> Figure | None:
    """A panel per cost and a point per setting: means over seeds, bars are 95 % intervals of the accuracy.

    The line joins the settings that no other beats in both. None with fewer than two evaluated settings.
    """
    means = _means(groups)
    shown = [cost for cost in COSTS if means[cost[0]].notna().any() and float(means[cost[0]].max()) > 0]
    if len(means) < 2 or not shown:
        return None
    columns = 4 if max(map(len, means["name"])) < 22 else 2
    height = 3.9 + LEGEND_LINE_IN * -(-len(means) // columns)
    figure = Figure(figsize=(1.0 + 3.7 * len(shown), height), layout="constrained")
    panels = figure.subplots(1, len(shown), squeeze=False, sharey=True)[0]
    for axes, (measure, label, unit) in zip(panels, shown, strict=True):
        _panel(axes, means, measure, label, unit)
    low, high = panels[0].get_ylim()
    panels[0].set_ylim(max(low, -1.0), min(high, 101.0))
    panels[0].set_ylabel("test accuracy, mean of the models (%)")
    handles = [
        Line2D([], [], color=row["colour"], marker=row["marker"], markersize=6, linewidth=0, label=row["name"])
        for row in means.to_dict("records")
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, **LEGEND)
    return figure


def _means(groups: Groups) -> pd.DataFrame:
    """A row per evaluated setting: name, colour, marker, accuracy (metric, mean) with its interval, and the costs."""
    found: list[dict[str, Any]] = []
    # Seven colours and ten markers have no common divisor: no two of seventy settings look alike.
    for (labels, every), colour, marker in zip(groups, cycle(SERIES), cycle(MARKERS), strict=False):
        rows = evaluated(every)
        known = estimate_by_seed(rows[METRIC], rows["seeds"])
        if known is None:
            continue
        looks = {"name": ", ".join(labels), "colour": colour, "marker": marker}
        costs = {measure: by_seed(rows, [measure])[measure].mean() for measure, _, _ in COSTS}
        found.append({**looks, "metric": known.mean, **vars(known), **costs})
    columns = ["name", "colour", "marker", "metric", "mean", "half_width", "values", *(c[0] for c in COSTS)]
    return pd.DataFrame(found, columns=columns)


def _panel(axes: Axes, means: pd.DataFrame, measure: str, label: str, unit: str) -> None:
    values = means[measure].astype("float64")
    scale, prefix = si_scale(float(values.max()))
    if unit == "s":
        scale, unit, prefix = (_HOUR_S, "h", "") if float(values.max()) >= _HOUR_S else (1.0, "s", "")
    known = means.assign(cost=values / scale)[np.isfinite(values)]
    for i, row in enumerate(known.to_dict("records")):
        with_bars(axes, [row["cost"]], known.iloc[[i]], row["colour"], zorder=3)
        style: dict[str, Any] = {"color": row["colour"], "marker": row["marker"], "markersize": 6, "zorder": 3}
        axes.plot([row["cost"]], [100 * row["metric"]], **style)
    front = front_of(known, "cost")
    axes.plot(front[:, 0], 100 * front[:, 1], color=GREY, linewidth=1.0, drawstyle="steps-post", zorder=2)
    if float(known["cost"].max()) >= _DECADE * float(known["cost"].min()) > 0:
        axes.set_xscale("log")
    else:
        axes.set_xlim(0, 1.06 * float(known["cost"].max()))
    written = f"{prefix}{unit}".strip()
    quiet(axes, xlabel=f"{label} ({written})" if written else label)
