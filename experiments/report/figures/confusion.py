"""Figure of confusion matrices: a panel per tier."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure, SubFigure
from numpy.typing import NDArray

from fedloom.experiments.analysis.details import of_final_models
from fedloom.experiments.analysis.settings import Setting
from fedloom.experiments.report.figures.settings import multiples
from fedloom.experiments.report.figures.style import BLUE, INK, tiers_in_order

MOST_NUMBERS = 12
"""Classes up to which the shares are written into the cells."""
MOST_PANELS = 8
SHADES = LinearSegmentedColormap.from_list("shades", ["#FFFFFF", BLUE])


def confusion_figure(confusions: pd.DataFrame, settings: Sequence[Setting]) -> Figure | None:
    """What share of each class (rows) was taken for each (columns), per tier; means over seeds. None without any.

    `confusions` comes from `analysis.confusions`; the models are those that the method ends with.
    """
    parts_of = {s.name: of_final_models(s.rows(confusions)) for s in settings}
    shown = [s for s in settings if 0 < parts_of[s.name]["tier"].nunique() <= MOST_PANELS]
    if not shown:
        return None
    panels = max(parts_of[s.name]["tier"].nunique() for s in shown)
    classes = max(parts_of[s.name]["class_name"].nunique() for s in shown)
    across, side = min(panels, 2), max(4.4, 0.3 * classes + 1.6)
    size = (across * side, -(-panels // across) * side)
    figure, parts = multiples(shown, size, size)
    for part, setting in zip(parts, shown, strict=True):
        _panels(part, parts_of[setting.name], across)
    return figure


def _panels(part: Figure | SubFigure, rows: pd.DataFrame, across: int) -> None:
    tiers = tiers_in_order(rows["tier"])
    grid = part.subplots(-(-len(tiers) // across), across, squeeze=False).ravel()
    for axes, tier in zip(grid, tiers, strict=False):
        own = rows[rows["tier"] == tier]
        names = list(dict.fromkeys([*own["class_name"], *own["prediction"]]))
        _matrix(axes, shares(own, names), names, tier)
    for axes in grid[len(tiers) :]:
        axes.set_axis_off()


def shares(rows: pd.DataFrame, names: Sequence[str]) -> NDArray[np.float64]:
    """The share of each class (rows) that was taken for each (columns), over all seeds together."""
    counts = rows.pivot_table(index="class_name", columns="prediction", values="count", aggfunc="sum", fill_value=0)
    order = list(names)
    table: NDArray[np.float64] = counts.reindex(index=order, columns=order, fill_value=0).to_numpy(dtype=np.float64)
    of_class: NDArray[np.float64] = np.maximum(table.sum(axis=1, keepdims=True), 1.0)
    found: NDArray[np.float64] = table / of_class
    return found


def _matrix(axes: Axes, table: NDArray[np.float64], names: Sequence[str], tier: str) -> None:
    axes.imshow(table, cmap=SHADES, vmin=0, vmax=1, interpolation="nearest")
    axes.set_title(tier, loc="left", fontsize=10.5, fontweight="bold", color=INK)
    labels = [name if len(name) <= 14 else f"{name[:13]}…" for name in names]
    axes.set_xticks(range(len(names)), labels, rotation=90, fontsize=8)
    axes.set_yticks(range(len(names)), labels, fontsize=8)
    axes.set_xlabel("predicted", fontsize=9, color=INK)
    axes.set_ylabel("class", fontsize=9, color=INK)
    if len(names) > MOST_NUMBERS:
        return
    for row, column in zip(*np.nonzero(table >= 0.005), strict=True):
        share = table[row, column]
        colour = "white" if share > 0.55 else INK
        axes.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=7.5, color=colour)
