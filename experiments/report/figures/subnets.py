"""Figures of SuperFedNAS: accuracy of subnets against MACs, the subnets scored in the search, and beta over rounds."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedloom.experiments.analysis.seeds import SEEDS, spread
from fedloom.experiments.analysis.settings import Setting
from fedloom.experiments.analysis.subnets import FRONT, SAMPLES, SEARCHED
from fedloom.experiments.report.figures.settings import (
    legend_height_in,
    legend_text,
    line_width,
    looks,
    setting_label,
    title_text,
)
from fedloom.experiments.report.figures.style import (
    COUNTS,
    GREY,
    LEGEND,
    VERMILION,
    quiet,
    tier_colours,
    tiers_in_order,
    whole_numbers,
)
from fedloom.experiments.report.parts.numbers import si_scale

LOGARITHMIC_FROM = 20.0
"""Ratio of the largest to the smallest MACs from which the axis is logarithmic, so that small subnets stay apart."""

PANEL_IN = 5.4
"""The width of a setting's panel in inches."""


def subnet_accuracy_figure(subnets: pd.DataFrame, settings: Sequence[Setting]) -> Figure | None:
    """Test accuracy (perplexity for text) against MACs, a panel per data set, a line per setting; None without values.

    `subnets` comes from `analysis.subnets.subnets`. Source: SuperFed, Fig. 4.
    """
    panels = _panels(subnets, settings)
    if not panels:
        return None
    drawn, width = looks(settings), 2.2 + 5.6 * len(panels)
    height = 4.4 + legend_height_in([setting_label(s) for s in settings], width)
    figure = Figure(figsize=(width, height), layout="constrained")
    row = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (dataset, quality, rows) in zip(row, panels, strict=True):
        scale, prefix = si_scale(float(rows["macs"].max()))
        for setting in settings:
            own = setting.rows(rows)
            _family(axes, own[own["model"] != SEARCHED], drawn[setting.name], scale)
            _winners(axes, own[own["model"] == SEARCHED], drawn[setting.name][0], scale)
        if rows["macs"].max() >= LOGARITHMIC_FROM * rows["macs"].min():
            axes.set_xscale("log")
        label = "test perplexity" if quality == "perplexity" else "test accuracy (%)"
        quiet(axes, title=dataset, xlabel=f"MACs of one forward pass{COUNTS[prefix]}", ylabel=label)
    shown = [s for s in settings if any(len(s.rows(rows)) for _, _, rows in panels)]
    with_winners = any((rows["model"] == SEARCHED).any() for _, _, rows in panels)
    handles = [
        Line2D([], [], color=colour, marker=marker, markersize=6, label=legend_text(setting_label(s), width))
        for s in shown
        for colour, marker in [drawn[s.name]]
    ]
    handles += [_star("winner of the search")] if with_winners else []
    figure.legend(handles=handles, loc="outside lower center", ncols=1, **LEGEND)
    return figure


def _panels(subnets: pd.DataFrame, settings: Sequence[Setting]) -> list[tuple[str, str, pd.DataFrame]]:
    """For each data set: its name, the compared quality, and the rows with `value` in the unit of the axis."""
    dataset_of = {r: str(s.config["data"]["dataset"]) for s in settings for r in s.run_ids}
    datasets = subnets["run_id"].map(dataset_of)
    panels = []
    for dataset in dict.fromkeys(datasets):
        rows = subnets[datasets == dataset]
        quality = "perplexity" if rows["test_perplexity"].notna().any() else "accuracy"
        values = rows[f"test_{quality}"] * (1 if quality == "perplexity" else 100)
        rows = rows.assign(value=values)[values.notna() & rows["macs"].notna()]
        if len(rows):
            panels.append((str(dataset), quality, rows))
    return panels


def _family(axes: Axes, rows: pd.DataFrame, look: tuple[str, str], scale: float) -> None:
    if rows.empty:
        return
    macs = spread(rows, ["architecture"], "macs")["mean"]
    points = spread(rows, ["architecture"], "value").assign(macs=macs).sort_values("macs")
    x = points["macs"].to_numpy(dtype=float) / scale
    colour, marker = look
    axes.plot(x, points["mean"].to_numpy(dtype=float), color=colour, marker=marker, markersize=6, linewidth=1.6)
    if rows[SEEDS].nunique() > 1:
        low, high = (points[end].to_numpy(dtype=float) for end in ("min", "max"))
        axes.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)


def _winners(axes: Axes, rows: pd.DataFrame, colour: str, scale: float) -> None:
    if rows.empty:
        return
    points = spread(rows, ["target"], "value")
    x, y = spread(rows, ["target"], "macs")["mean"] / scale, points["mean"]
    if rows[SEEDS].nunique() > 1:
        bars = [y - points["min"], points["max"] - y]
        axes.errorbar(x, y, yerr=bars, fmt="none", ecolor=colour, elinewidth=1.0, capsize=2)
    axes.scatter(x, y, s=170, marker="*", color=colour, edgecolors="black", linewidths=0.8, zorder=4)


def _star(label: str) -> Line2D:
    style: dict[str, Any] = {"color": "none", "markerfacecolor": "white", "markeredgecolor": "black"}
    return Line2D([], [], marker="*", markersize=12, label=label, **style)


def search_figure(scored: pd.DataFrame, settings: Sequence[Setting]) -> Figure | None:
    """Validation accuracy against MACs of all scored subnets, a panel per setting; None without rows.

    `scored` comes from `analysis.subnets.scored`. Samples are faint, the verified front is a line per run, the
    finalists of each target are dots and its winner is a star.
    """
    shown = [s for s in settings if len(s.rows(scored))]
    if not shown:
        return None
    targets = tiers_in_order(t for t in scored["tier"] if t not in (SAMPLES, FRONT))
    columns = min(len(shown), 2)
    lines = -(-len(shown) // columns)
    figure = Figure(figsize=(3.0 + PANEL_IN * columns, 0.6 + 4.0 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False).ravel()
    for axes, setting in zip(grid, shown, strict=False):
        rows = setting.rows(scored)
        scale, prefix = si_scale(float(rows["macs"].max()))
        _seen(axes, rows.assign(macs=rows["macs"] / scale, metric=rows["metric"] * 100), targets)
        title = title_text(setting.name, PANEL_IN) if len(shown) > 1 else ""
        quiet(axes, title=title, xlabel=f"MACs of one forward pass{COUNTS[prefix]}", ylabel="validation accuracy (%)")
    for axes in grid[len(shown) :]:
        axes.set_axis_off()
    figure.legend(handles=_search_handles(scored, targets), loc="outside right center", **LEGEND)
    return figure


def _seen(axes: Axes, rows: pd.DataFrame, targets: Sequence[str]) -> None:
    colours = tier_colours(targets)
    samples = rows[rows["tier"] == SAMPLES]
    axes.scatter(samples["macs"], samples["metric"], s=12, color=GREY, alpha=0.35, linewidths=0, zorder=2)
    front = rows[rows["tier"] == FRONT]
    axes.scatter(front["macs"], front["metric"], s=16, color=VERMILION, alpha=0.45, linewidths=0, zorder=3)
    for _, run in front[front["on_front"]].sort_values("macs").groupby("run_id"):
        axes.plot(run["macs"], run["metric"], color=VERMILION, marker="o", markersize=4, linewidth=1.4, zorder=3)
    for target in targets:
        own = rows[rows["tier"] == target]
        axes.scatter(own["macs"], own["metric"], s=22, color=colours[target], alpha=0.75, linewidths=0, zorder=4)
        won = own[own["is_winner"]]
        star: dict[str, Any] = {"s": 190, "marker": "*", "edgecolors": "black", "linewidths": 0.9, "zorder": 5}
        axes.scatter(won["macs"], won["metric"], color=colours[target], **star)


def _search_handles(scored: pd.DataFrame, targets: Sequence[str]) -> list[Line2D]:
    dot: dict[str, Any] = {"color": "none", "marker": "o", "markeredgecolor": "none"}
    colours, tiers = tier_colours(targets), set(scored["tier"])
    handles = []
    if SAMPLES in tiers:
        handles.append(Line2D([], [], markerfacecolor=GREY, alpha=0.6, markersize=4.5, label="sample", **dot))
    if FRONT in tiers:
        handles.append(Line2D([], [], color=VERMILION, marker="o", markersize=4, label="verified front"))
    handles += [
        Line2D([], [], markerfacecolor=colours[t], markersize=6, label=f"scored for {t}", **dot) for t in targets
    ]
    return [*handles, _star("winner")] if scored["is_winner"].any() else handles


def beta_figure(rounds: pd.DataFrame, settings: Sequence[Setting]) -> Figure | None:
    """beta against rounds, a line per setting; None if no run recorded it. Source: SuperFed, Sec. 4 and Fig. 5."""
    known = rounds[rounds["beta"].notna()]
    shown = [s for s in settings if len(s.rows(known))]
    if not shown:
        return None
    drawn, width = looks(settings), 7.0
    height = 3.6 + legend_height_in([s.name for s in shown], width)
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    for i, setting in enumerate(shown):
        beta = spread(setting.rows(known), ["round"], "beta")["mean"]
        style: dict[str, Any] = {"color": drawn[setting.name][0], "label": legend_text(setting.name, width)}
        axes.plot(beta.index + 1, beta.to_numpy(dtype=float), linewidth=line_width(i, len(shown)), **style)
    quiet(axes, xlabel="round", ylabel="beta")
    whole_numbers(axes)
    axes.set_ylim(0, 1)
    if len(settings) > 1:
        figure.legend(loc="outside lower center", ncols=1, **LEGEND)
    return figure
