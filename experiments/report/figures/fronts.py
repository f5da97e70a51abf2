"""Figure of the candidates of the tiers' searches and their fronts."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedloom.experiments.analysis.settings import Setting
from fedloom.experiments.report.figures.settings import multiples, same_limits
from fedloom.experiments.report.figures.style import (
    COUNTS,
    GREY,
    LEGEND,
    quiet,
    tier_colours,
    tier_markers,
    tiers_in_order,
)
from fedloom.experiments.report.parts.numbers import si_scale


def pareto_figure(
    pareto: pd.DataFrame, settings: Sequence[Setting], upper_bounds: Mapping[str, Mapping[str, float]] | None = None
) -> Figure | None:
    """Validation accuracy against MACs of all candidates, with a line per tier's front and a star for its winner.

    There is a panel per setting, all with the same axes. `upper_bounds` (MACs per tier, by the setting's name) are thin
    vertical lines. None without candidates.
    """
    known = pareto[pareto["metric"].notna() & pareto["macs"].notna()].astype({"macs": "float64"})
    shown = [s for s in settings if len(s.rows(known))]
    if not shown:
        return None
    tiers = tiers_in_order(known["tier"])
    scale, prefix = si_scale(float(known["macs"].max()))
    bounds = {s.name: [b / scale for b in (upper_bounds or {}).get(s.name, {}).values()] for s in shown}
    figure, parts = multiples(shown, (8.8, 4.6), (5.4, 3.9), columns=2)
    panels = []
    for part, setting in zip(parts, shown, strict=True):
        axes = part.subplots()
        _candidates(axes, setting.rows(known), tiers, scale)
        for bound in sorted(bounds[setting.name])[:-1]:
            axes.axvline(bound, color="#B5B5B5", linewidth=0.9, linestyle=":", zorder=1)
        quiet(axes, xlabel=f"MACs of one forward pass{COUNTS[prefix]}", ylabel="validation accuracy in search (%)")
        panels.append(axes)
    same_limits(panels, x=True, y=True)
    handles = _handles(tiers, with_bounds=any(bounds.values()))
    place: dict[str, Any] = {"loc": "outside right center"}
    if parts[0] is not figure:
        place = {"loc": "outside lower center", "ncols": min(len(handles), 6)}
    figure.legend(handles=handles, **place, **LEGEND)
    return figure


def _candidates(axes: Axes, candidates: pd.DataFrame, tiers: Sequence[str], scale: float) -> None:
    """Draws the candidates of one setting; every run has its own front."""
    colours, markers = tier_colours(tiers), tier_markers(tiers)
    star: dict[str, Any] = {"s": 190, "marker": "*", "edgecolors": "black", "linewidths": 0.9, "zorder": 4}
    for tier in tiers:
        rows = candidates[candidates["tier"] == tier]
        x, y = rows["macs"] / scale, rows["metric"] * 100
        axes.scatter(x, y, s=14, color=colours[tier], alpha=0.28, linewidths=0, zorder=2)
        for _, run in rows[rows["on_front"]].sort_values("macs").groupby("run_id"):
            style: dict[str, Any] = {"marker": markers[tier], "markersize": 4.5, "linewidth": 1.6, "zorder": 3}
            axes.plot(run["macs"] / scale, run["metric"] * 100, color=colours[tier], **style)
        won = rows["is_winner"]
        axes.scatter(x[won], y[won], color=colours[tier], **star)


def _handles(tiers: Sequence[str], *, with_bounds: bool) -> list[Line2D]:
    colours, markers = tier_colours(tiers), tier_markers(tiers)
    handles = [Line2D([], [], color=colours[t], marker=markers[t], markersize=4.5, label=f"{t}: front") for t in tiers]
    dot: dict[str, Any] = {"color": "none", "markerfacecolor": GREY, "markeredgecolor": "none"}
    handles.append(Line2D([], [], marker="o", markersize=4.5, alpha=0.5, label="candidate", **dot))
    star: dict[str, Any] = {"color": "none", "markerfacecolor": "white", "markeredgecolor": "black"}
    handles.append(Line2D([], [], marker="*", markersize=12, label="winner", **star))
    if with_bounds:
        handles.append(Line2D([], [], color="#B5B5B5", linestyle=":", label="tier's bound"))
    return handles
