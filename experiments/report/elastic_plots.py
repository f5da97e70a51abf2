"""SuperFedNAS's figures: accuracy against MACs, what the search saw, beta over rounds, the cost of k models."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedloom.experiments.analysis.settings import Setting
from fedloom.experiments.analysis.subnets import FRONT, SAMPLES, SEARCHED
from fedloom.experiments.report.costs import CostComparison
from fedloom.experiments.report.plots import COUNTS, DASHED, LEGEND, tiers_in_order
from fedloom.experiments.report.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    MARKERS,
    SERIES,
    VERMILION,
    quiet,
    tier_colours,
    whole_numbers,
)
from fedloom.experiments.report.words import si_scale, times

LOGARITHMIC_FROM = 20.0
"""The ratio of the largest to the smallest MACs from which a linear axis would press the small ones together."""

Look = dict[str, tuple[str, str]]
"""Per setting its colour and its marker."""


def _looks(settings: Sequence[Setting]) -> Look:
    pairs = zip(cycle(SERIES), cycle(MARKERS[:-1]), strict=False)  # the last marker is the winners' star
    return {s.name: pair for s, pair in zip(settings, pairs, strict=False)}


def accuracy_figure(subnets: pd.DataFrame, settings: Sequence[Setting]) -> Figure | None:
    """Test accuracy (perplexity for texts) against MACs, a panel per data set and a line per setting; None without.

    `subnets` as from `subnets`. Source: SuperFed, Fig. 4.
    """
    panels = _panels(subnets, settings)
    if not panels:
        return None
    looks, height = _looks(settings), 4.4 + 0.2 * len(settings)
    figure = Figure(figsize=(2.2 + 5.6 * len(panels), height), layout="constrained")
    row = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (dataset, quality, rows) in zip(row, panels, strict=True):
        scale, prefix = si_scale(float(rows["macs"].max()))
        for setting in settings:
            own = rows[rows["run_id"].isin(setting.run_ids)]
            _family(axes, own[own["model"] != SEARCHED], looks[setting.name], scale)
            _winners(axes, own[own["model"] == SEARCHED], looks[setting.name][0], scale)
        if rows["macs"].max() >= LOGARITHMIC_FROM * rows["macs"].min():
            axes.set_xscale("log")
        label = "test perplexity" if quality == "perplexity" else "test accuracy (%)"
        quiet(axes, title=dataset, xlabel=f"MACs of one forward pass{COUNTS[prefix]}", ylabel=label)
    shown = [s for s in settings if any(rows["run_id"].isin(s.run_ids).any() for _, _, rows in panels)]
    with_winners = any((rows["model"] == SEARCHED).any() for _, _, rows in panels)
    figure.legend(handles=_handles(shown, looks, with_winners), loc="outside lower center", ncols=1, **LEGEND)
    return figure


def _panels(subnets: pd.DataFrame, settings: Sequence[Setting]) -> list[tuple[str, str, pd.DataFrame]]:
    """Per data set what its models are compared by, and the rows with `value` in the axis' unit."""
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
    points = rows.groupby("architecture").agg(macs=("macs", "mean"), mean=("value", "mean"))
    ends = rows.groupby("architecture")["value"].agg(["min", "max"])
    points = points.join(ends).sort_values("macs")
    x = points["macs"].to_numpy(dtype=float) / scale
    colour, marker = look
    axes.plot(x, points["mean"].to_numpy(dtype=float), color=colour, marker=marker, markersize=6, linewidth=1.6)
    if rows["run_id"].nunique() > 1:
        low, high = (points[end].to_numpy(dtype=float) for end in ("min", "max"))
        axes.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)


def _winners(axes: Axes, rows: pd.DataFrame, colour: str, scale: float) -> None:
    if rows.empty:
        return
    points = rows.groupby("target")[["macs", "value"]].agg(["mean", "min", "max"])
    x, y = points["macs"]["mean"] / scale, points["value"]["mean"]
    if rows["run_id"].nunique() > 1:
        bars = [y - points["value"]["min"], points["value"]["max"] - y]
        axes.errorbar(x, y, yerr=bars, fmt="none", ecolor=colour, elinewidth=1.0, capsize=2)
    axes.scatter(x, y, s=170, marker="*", color=colour, edgecolors="black", linewidths=0.8, zorder=4)


def _handles(settings: Sequence[Setting], looks: Look, with_winners: bool) -> list[Line2D]:
    handles = []
    for setting in settings:
        colour, marker = looks[setting.name]
        runs = f" ({len(setting.run_ids)} runs)" if len(setting.run_ids) > 1 else ""
        handles.append(Line2D([], [], color=colour, marker=marker, markersize=6, label=f"{setting.name}{runs}"))
    if with_winners:
        handles.append(_star("winner of the search"))
    return handles


def _star(label: str) -> Line2D:
    style: dict[str, Any] = {"color": "none", "markerfacecolor": "white", "markeredgecolor": "black"}
    return Line2D([], [], marker="*", markersize=12, label=label, **style)


def search_figure(scored: pd.DataFrame, settings: Sequence[Setting]) -> Figure | None:
    """Validation accuracy against MACs of all scored subnets, a panel per setting; None without any.

    `scored` as from `subnets.scored`: samples faint, the verified front as a line per run, each target's finalists
    as dots and its winner as a star.
    """
    shown = [s for s in settings if scored["run_id"].isin(s.run_ids).any()]
    if not shown:
        return None
    targets = tiers_in_order(t for t in scored["tier"] if t not in (SAMPLES, FRONT))
    columns = min(len(shown), 2)
    lines = -(-len(shown) // columns)
    figure = Figure(figsize=(3.0 + 5.4 * columns, 0.6 + 4.0 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False).ravel()
    for axes, setting in zip(grid, shown, strict=False):
        rows = scored[scored["run_id"].isin(setting.run_ids)]
        scale, prefix = si_scale(float(rows["macs"].max()))
        _seen(axes, rows.assign(macs=rows["macs"] / scale, metric=rows["metric"] * 100), targets)
        title = setting.name if len(shown) > 1 else ""
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
    """beta against rounds, a line per setting; None if no run had one. Source: SuperFed, Sec. 4 and Fig. 5."""
    known = rounds[rounds["beta"].notna()]
    shown = [s for s in settings if known["run_id"].isin(s.run_ids).any()]
    if not shown:
        return None
    looks = _looks(settings)
    figure = Figure(figsize=(7.0, 3.6 + 0.2 * len(shown)), layout="constrained")
    axes = figure.subplots()
    for i, setting in enumerate(shown):
        beta = known[known["run_id"].isin(setting.run_ids)].groupby("round")["beta"].mean()
        colour = looks[setting.name][0]
        axes.plot(
            beta.index + 1,
            beta.to_numpy(dtype=float),
            color=colour,
            label=setting.name,
            linewidth=_width(i, len(shown)),
        )
    quiet(axes, xlabel="round", ylabel="beta")
    whole_numbers(axes)
    axes.set_ylim(0, 1)
    if len(settings) > 1:
        figure.legend(loc="outside lower center", ncols=1, **LEGEND)
    return figure


def _width(i: int, count: int) -> float:
    """Thinner from line to line: ablations often share a schedule or a cost, and all must be seen."""
    return min(6.0, 1.8 + 1.1 * (count - 1 - i))


def cost_figure(comparisons: Sequence[CostComparison]) -> Figure | None:
    """Bytes and MACs of training k models, iFedAvg against the supernet, a line per comparison; None without any.

    Source: SuperFedNAS, Fig. 6.
    """
    if not comparisons:
        return None
    separate, supernets = {c.separately: c for c in comparisons}, {c.supernet: c for c in comparisons}
    height = 4.0 + 0.2 * (2 * len(separate) + len(supernets))
    figure = Figure(figsize=(10.2, height), layout="constrained")
    for axes, what, title, unit in zip(
        figure.subplots(1, 2), COST_FIELDS, ("communication, both ways", "compute"), ("B", "MACs"), strict=True
    ):
        totals = [getattr(step.total, what) for c in comparisons for step in (*c.steps, c.largest)]
        scale, prefix = si_scale(max(totals))
        most = max(len(c.steps) for c in comparisons)
        for comparison, colour, marker in zip(separate.values(), cycle(ALONE_COLOURS), cycle(MARKERS), strict=False):
            _growing(axes, comparison, what, scale, colour, marker, most + 0.3)
        for i, (comparison, colour) in enumerate(zip(supernets.values(), cycle(TOGETHER_COLOURS), strict=False)):
            level = getattr(comparison.supernet_cost, what) / scale
            axes.plot([0.7, most + 0.3], [level, level], color=colour, linewidth=_width(i, len(supernets)))
        if len(comparisons) == 1:
            _ratio(axes, comparisons[0], what, scale)
        quiet(axes, title=title, xlabel="models k", ylabel=f"{prefix}{unit}")
        whole_numbers(axes)
        axes.set_ylim(bottom=0)
        axes.set_xlim(0.7, most + 0.5)
    figure.legend(handles=_cost_handles(separate, supernets), loc="outside lower center", ncols=1, **LEGEND)
    return figure


COST_FIELDS = ("size_bytes", "macs")
ALONE_COLOURS = (VERMILION, "#E69F00", "#CC79A7")
TOGETHER_COLOURS = (BLUE, GREEN, "#56B4E9", INK)


def _growing(
    axes: Axes, comparison: CostComparison, what: str, scale: float, colour: str, marker: str, end: float
) -> None:
    k = [step.k for step in comparison.steps]
    totals = [getattr(step.total, what) / scale for step in comparison.steps]
    axes.plot(k, totals, color=colour, marker=marker, markersize=5, linewidth=1.7, zorder=3)
    largest = getattr(comparison.largest.total, what) / scale
    axes.plot([0.7, end], [largest, largest], color=colour, linewidth=1.0, linestyle=DASHED)


def _ratio(axes: Axes, comparison: CostComparison, what: str, scale: float) -> None:
    last = comparison.steps[-1]
    ratio = last.communication_ratio if what == "size_bytes" else last.compute_ratio
    place: dict[str, Any] = {"textcoords": "offset points", "fontsize": 9, "color": INK, "ha": "right", "va": "center"}
    axes.annotate(times(ratio), (last.k, getattr(last.total, what) / scale), (-9, 0), **place)


def _cost_handles(separate: Mapping[str, CostComparison], supernets: Mapping[str, CostComparison]) -> list[Line2D]:
    handles = []
    for (name, c), colour, marker in zip(separate.items(), cycle(ALONE_COLOURS), cycle(MARKERS), strict=False):
        label = f"{name}: each of the first k alone"
        handles.append(Line2D([], [], color=colour, marker=marker, markersize=5, label=label))
        label = f"{name}: {c.largest.member.label} alone (FedAvg)"
        handles.append(Line2D([], [], color=colour, linewidth=1.0, linestyle=DASHED, label=label))
    for name, colour in zip(supernets, cycle(TOGETHER_COLOURS), strict=False):
        handles.append(Line2D([], [], color=colour, linewidth=2.0, label=f"{name}: one supernet for all"))
    return handles
