"""Figure of the training cost of k models."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedloom.experiments.analysis.costs import CostComparison
from fedloom.experiments.report.figures.settings import LEGEND_LINE_IN, legend_text, line_width
from fedloom.experiments.report.figures.style import (
    BLUE,
    DASHED,
    GREEN,
    INK,
    LEGEND,
    MARKERS,
    VERMILION,
    quiet,
    whole_numbers,
)
from fedloom.experiments.report.parts.numbers import si_scale, times


def cost_figure(comparisons: Sequence[CostComparison]) -> Figure | None:
    """Bytes and MACs to train k models with iFedAvg and with a supernet; None without comparisons.

    Source: SuperFedNAS, Fig. 6.
    """
    if not comparisons:
        return None
    separate, supernets = {c.separately: c for c in comparisons}, {c.supernet: c for c in comparisons}
    width, handles = 10.2, _cost_handles(separate, supernets)
    for handle in handles:
        handle.set_label(legend_text(str(handle.get_label()), width))
    lines = sum(1 + str(handle.get_label()).count("\n") for handle in handles)
    figure = Figure(figsize=(width, 4.0 + LEGEND_LINE_IN * lines), layout="constrained")
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
            axes.plot([0.7, most + 0.3], [level, level], color=colour, linewidth=line_width(i, len(supernets)))
        if len(comparisons) == 1:
            _ratio(axes, comparisons[0], what, scale)
        quiet(axes, title=title, xlabel="models k", ylabel=f"{prefix}{unit}")
        whole_numbers(axes)
        axes.set_ylim(bottom=0)
        axes.set_xlim(0.7, most + 0.5)
    figure.legend(handles=handles, loc="outside lower center", ncols=1, **LEGEND)
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
