"""Figure of the accuracy of every client."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import NDArray

from fedloom.experiments.analysis.frames import shown_models
from fedloom.experiments.analysis.seeds import SEEDS
from fedloom.experiments.analysis.settings import Setting
from fedloom.experiments.report.figures.settings import multiples
from fedloom.experiments.report.figures.style import LEGEND, model_colours, quiet, tiers_in_order
from fedloom.experiments.report.parts.words import model_name

MOST_DOTS = 400
"""Maximum number of dots per tier and model, since more would overlap to a dark bar."""
WIDE_IN = 10.0
"""Figure width in inches from which the legend fits on one line."""
_GOLDEN = 0.618034


def clients_figure(clients: pd.DataFrame, settings: Sequence[Setting]) -> Figure | None:
    """The test accuracy of every client that counts, per tier and model: dots, a box, and a mark for the worst client.

    `clients` comes from `client_metrics`. Several settings are stacked with the same axes. The clients of all seeds are
    drawn together; runs that repeat a seed are averaged. None if no client was measured.
    """
    counted = clients[clients["counts"]]
    shown = [s for s in settings if len(s.rows(counted))]
    if not shown:
        return None
    tiers, models = tiers_in_order(counted["tier"]), shown_models(list(counted["model"]))
    width = min(max(6.4, 1.2 + 0.62 * len(tiers) * (len(models) + 0.8)), 13.0)
    figure, parts = multiples(shown, (width, 4.6), (width, 3.6))
    for part, setting in zip(parts, shown, strict=True):
        axes = part.subplots()
        _strips(axes, setting.rows(counted), tiers, models)
        axes.set_ylim(max(-4.0, 100 * counted["value"].min() - 8), 104)
    _clients_legend(figure, models, 5 if width >= WIDE_IN else 2)
    return figure


def _strips(axes: Axes, counted: pd.DataFrame, tiers: Sequence[str], models: Sequence[str]) -> None:
    """Draws the clients of one setting: a group per tier, a strip per model."""
    colours = model_colours(models)
    per_seed = counted.groupby(["tier", "model", SEEDS, "client_id"])["value"].mean()
    width = 0.8 / len(models)
    for (tier, model), values in per_seed.groupby(["tier", "model"]):
        at = tiers.index(str(tier)) + (models.index(str(model)) - (len(models) - 1) / 2) * width
        _strip(axes, at, np.sort(values.to_numpy(dtype=float)) * 100, 0.8 * width, colours[str(model)])
    label = "accuracy on the client's own test data (%)"
    quiet(axes, ylabel=label)
    axes.set_xticks(range(len(tiers)), tiers)
    axes.set_xlim(-0.6, len(tiers) - 0.4)
    axes.grid(False, axis="x")


def _strip(axes: Axes, at: float, values: NDArray[np.float64], width: float, colour: str) -> None:
    """Draws a box (quartiles, median, whiskers to the 5th and 95th percentile) behind the dots of sorted values."""
    box = {"facecolor": colour, "alpha": 0.16, "edgecolor": "none"}
    line = {"color": colour, "linewidth": 1.0}
    axes.boxplot(
        values,
        positions=[at],
        widths=width,
        whis=(5, 95),
        showfliers=False,
        showcaps=False,
        patch_artist=True,
        manage_ticks=False,
        boxprops=box,
        medianprops={"color": colour, "linewidth": 2.4},
        whiskerprops=line,
    )
    # The first value is the worst client, which has its own mark.
    shown = values[np.unique(np.linspace(1, len(values) - 1, min(len(values) - 1, MOST_DOTS)).astype(int))]
    # Multiples of the golden ratio spread the dots evenly and deterministically in x.
    aside = (np.arange(len(shown)) * _GOLDEN % 1.0 - 0.5) * width * 0.8
    axes.scatter(at + aside, shown, s=9, color=colour, alpha=0.55, linewidths=0, zorder=3)
    axes.scatter([at], values[:1], s=46, marker="v", color=colour, edgecolors="black", linewidths=0.9, zorder=4)


def _clients_legend(figure: Figure, models: Sequence[str], columns: int) -> None:
    colours = model_colours(models)
    handles: list[Line2D | Patch] = [Patch(color=colours[m], label=model_name(m)) for m in models]
    worst: dict[str, Any] = {"color": "none", "markerfacecolor": "white", "markeredgecolor": "black"}
    handles.append(Line2D([], [], marker="v", markersize=7, label="worst client", **worst))
    handles.append(Patch(facecolor="#DDDDDD", label="middle half; line: median; whiskers: 5th to 95th percentile"))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), columns), **LEGEND)
