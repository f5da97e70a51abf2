"""Figures of an ablation's evaluated models: against MACs, against the values of an axis, and per tier."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from fedloom.experiments.analysis.ablation import held, holding, is_grid, marginal, over_seeds, references, values_of
from fedloom.experiments.analysis.frames import METRIC, natural, shown_models
from fedloom.experiments.analysis.outcomes import final_model
from fedloom.experiments.report.figures.style import (
    COUNTS,
    INK,
    LEGEND,
    MARKERS,
    SERIES,
    model_colours,
    quiet,
    with_bars,
)
from fedloom.experiments.report.figures.subnets import LOGARITHMIC_FROM
from fedloom.experiments.report.parts.numbers import si_scale
from fedloom.experiments.report.parts.words import model_name
from fedloom.experiments.store.ablations import Ablation, short

DECADE = 10.0
"""Ratio of an axis' largest to its smallest positive value from which its scale is logarithmic."""
_PANEL, _MOST_COLUMNS = 4.1, 3
_MOST_TICKS = 5
"""Maximum number of numeric values with a tick each; for more values matplotlib chooses the ticks."""


@dataclass(frozen=True)
class Studied:
    """The data of the figures: the plan, its frame (see `ablation_frame`), and the labels of subnets by id."""

    ablation: Ablation
    frame: pd.DataFrame
    names: Mapping[str, str]


def looks_of_values(values: Sequence[Any]) -> dict[Any, tuple[str, str]]:
    """Colour and marker of each value of an axis."""
    return dict(zip(values, zip(cycle(SERIES), cycle(MARKERS), strict=False), strict=False))


def held_text(ablation: Ablation, *axes: str) -> str:
    """The fixed values of the other axes, as "a=1, b=2"; empty if none is fixed."""
    return ", ".join(f"{axis}={short(value)}" for axis, value in held(ablation, *axes).items())


def title_of(ablation: Ablation, *axes: str) -> str:
    """The varied axes, and below them the fixed values of the others."""
    given = held_text(ablation, *axes)
    return "\n".join([", ".join(axes), *([fill(f"at {given}", 44)] if given else [])])


def values_legend(axes: Axes, title: str, handles: Sequence[Line2D | Patch]) -> None:
    """Draws a legend below the panel, where it covers no points."""
    longest = max(len(str(handle.get_label())) for handle in handles)
    columns = max(1, min(len(handles), 52 // (longest + 5)))
    axes.legend(
        handles=handles,
        title=title,
        title_fontsize=9,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.17),
        ncols=columns,
        **LEGEND,
    )


def limit(panels: Sequence[Axes], rows: Sequence[pd.DataFrame]) -> None:
    """Sets one range for all panels and cuts long intervals, since those of few seeds may exceed all differences."""
    seeds = 100 * pd.concat([r["values"] for r in rows]).explode().astype(float)
    halves = 100 * pd.concat([r["half_width"] for r in rows]).fillna(0.0)
    low, high = float(seeds.min()), float(seeds.max())
    spread = max(high - low, 1.0)
    pad = min(float(halves.max()), spread) + 0.1 * spread
    for axes in panels:
        axes.set_ylim(max(low - pad, -1.0), min(high + pad, 101.0))


def _grid(count: int, height: float) -> tuple[Figure, list[Axes]]:
    columns = min(count, _MOST_COLUMNS)
    lines = -(-count // columns)
    figure = Figure(figsize=(0.8 + _PANEL * max(columns, 1.3), height * lines), layout="constrained")
    panels = list(figure.subplots(lines, columns, squeeze=False).ravel())
    for axes in panels[count:]:
        axes.set_axis_off()
    return figure, panels[:count]


def macs_figure(studied: Studied) -> Figure | None:
    """Test accuracy against MACs, a panel per axis and a line per value, the other axes at their references.

    Points are the evaluated subnets of a supernet's family, else the tiers' final models; bars are 95 % intervals over
    seeds. None if no model was evaluated. Source: SuperFed, Fig. 5.
    """
    frame = _compared(studied.frame)
    ablation = studied.ablation
    found = {axis: _with_macs(frame, ablation, axis) for axis in ablation.axes}
    found = {axis: rows for axis, rows in found.items() if len(rows)}
    if not found:
        return None
    figure, panels = _grid(len(found), 4.6)
    macs = pd.concat([rows["macs"] for rows in found.values()])
    scale, prefix = si_scale(float(macs.max()))
    logarithmic = bool(macs.max() >= LOGARITHMIC_FROM * macs.min())
    for i, (axes, (axis, rows)) in enumerate(zip(panels, found.items(), strict=True)):
        _lines(axes, rows, axis, values_of(ablation, axis), scale, logarithmic)
        label = "" if i % _MOST_COLUMNS else "test accuracy (%)"
        quiet(axes, title=title_of(ablation, axis), xlabel=f"MACs of one forward pass{COUNTS[prefix]}", ylabel=label)
    limit(panels, list(found.values()))
    return figure


def _compared(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of the family's subnets if there are any, else those of the method's final model."""
    known = frame.dropna(subset=[METRIC, "model"])
    family = known[known["subnet"] != ""]
    return family if len(family) else known[known["model"] == final_model(known)]


def _with_macs(frame: pd.DataFrame, ablation: Ablation, axis: str) -> pd.DataFrame:
    rows, macs = (marginal(frame, ablation, axis, measure) for measure in (METRIC, "macs"))
    key = [axis, "model", "tier", "subnet"]
    return rows.merge(macs[[*key, "mean"]].rename(columns={"mean": "macs"}), on=key)


def _lines(axes: Axes, rows: pd.DataFrame, axis: str, values: Sequence[Any], scale: float, logarithmic: bool) -> None:
    drawn = looks_of_values(values)
    width = float(rows["macs"].max() - rows["macs"].min()) or 1.0
    for i, value in enumerate(values):
        own = rows[rows[axis] == value].sort_values("macs")
        aside = i - (len(values) - 1) / 2  # offset, so that the bars of different lines do not overlap
        x = own["macs"] * 1.02**aside if logarithmic else own["macs"] + 0.009 * width * aside
        colour, marker = drawn[value]
        _points(axes, x / scale, own, colour, marker)
    if logarithmic:
        axes.set_xscale("log")
    handles = [Line2D([], [], color=c, marker=m, markersize=5, label=short(v)) for v, (c, m) in drawn.items()]
    values_legend(axes, axis, handles)


def _points(axes: Axes, x: "pd.Series[float]", rows: pd.DataFrame, colour: str, marker: str) -> None:
    with_bars(axes, x, rows, colour, alpha=0.55, zorder=2)
    axes.plot(x, 100 * rows["mean"], color=colour, marker=marker, markersize=5, linewidth=1.7, zorder=3)


def metric_figure(studied: Studied) -> Figure | None:
    """Mean test accuracy against the values of each axis, a line per model; None if no model was evaluated.

    Tiers and subnets are averaged per seed; bars are 95 % intervals over seeds. The dotted line is the reference.
    """
    known, ablation = studied.frame.dropna(subset=[METRIC, "model"]), studied.ablation
    found = {axis: over_seeds(holding(known, held(ablation, axis)), METRIC, [axis, "model"]) for axis in ablation.axes}
    found = {axis: rows for axis, rows in found.items() if len(rows)}
    if not found:
        return None
    models = shown_models([str(model) for rows in found.values() for model in rows["model"]])
    colours = model_colours(models)
    figure, panels = _grid(len(found), 4.2)
    for i, (axes, (axis, rows)) in enumerate(zip(panels, found.items(), strict=True)):
        places = _scale(axes, values_of(ablation, axis))
        for model, marker in zip(models, cycle(MARKERS), strict=False):
            own = rows[rows["model"] == model]
            _points(axes, pd.Series([places[v] for v in own[axis]]), own, colours[model], marker)
        if is_grid(ablation):
            axes.axvline(places[references(ablation)[axis]], color="#9A9A9A", linewidth=0.9, linestyle=":", zorder=1)
        label = "" if i % _MOST_COLUMNS else "mean test accuracy (%)"
        quiet(axes, title=title_of(ablation, axis), xlabel=axis, ylabel=label)
        axes.grid(False, axis="x")
        if not isinstance(next(iter(places)), int | float) and max(map(len, places)) > 30 // len(places):
            axes.tick_params(axis="x", rotation=25)
    limit(panels, list(found.values()))
    handles = [
        Line2D([], [], color=colours[m], marker=marker, markersize=5, label=model_name(m))
        for m, marker in zip(models, cycle(MARKERS), strict=False)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 4), **LEGEND)
    return figure


def _scale(axes: Axes, values: Sequence[Any]) -> dict[Any, float]:
    """Positions of the values: numbers to scale, logarithmic if they span a decade; names at equal distances."""
    numbers = [float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) < len(values) or len(values) < 2:
        places = {value: float(i) for i, value in enumerate(values)}
        axes.set_xlim(-0.4, len(values) - 0.6)
    else:
        places = dict(zip(values, numbers, strict=True))
        positive = [n for n in numbers if n > 0]
        if min(numbers) >= 0 and positive and max(positive) >= DECADE * min(positive):
            # symlog puts 0 one decade below the smallest positive value.
            axes.set_xscale("symlog" if min(numbers) == 0 else "log", **_linear_to(min(positive), min(numbers)))
    if len(values) <= _MOST_TICKS or len(numbers) < len(values):
        axes.set_xticks(list(places.values()), [short(value) for value in places], minor=False)
        axes.minorticks_off()
    return places


def _linear_to(least: float, minimum: float) -> dict[str, float]:
    return {"linthresh": least} if minimum == 0 else {}


def tiers_figure(studied: Studied) -> Figure | None:
    """Test accuracy per tier, a column per model, a row per axis, a bar per value; None if no model was evaluated."""
    known, ablation = studied.frame.dropna(subset=[METRIC, "model"]), studied.ablation
    models = shown_models([str(model) for model in known["model"]])
    models.sort(key=lambda m: m != final_model(known))  # the final model comes first
    found = {axis: marginal(known, ablation, axis) for axis in ablation.axes} if models else {}
    found = {axis: rows for axis, rows in found.items() if len(rows)}
    if not found:
        return None
    figure = Figure(figsize=(1.2 + 4.4 * max(len(models), 1.5), 3.9 * len(found)), layout="constrained")
    panels: list[Axes] = []
    for part, (axis, rows) in zip(figure.subfigures(len(found), 1, squeeze=False)[:, 0], found.items(), strict=True):
        line = part.subplots(1, len(models), squeeze=False)[0]
        panels.extend(line)
        for axes, model in zip(line, models, strict=True):
            bars(axes, rows[rows["model"] == model], axis, values_of(ablation, axis), studied.names)
            title = f"{model_name(model)}: {title_of(ablation, axis)}"
            quiet(axes, title=title, ylabel="" if axes is not line[0] else "test accuracy (%)")
            axes.grid(False, axis="x")
            axes.tick_params(labelleft=axes is line[0])
        handles = bar_handles(values_of(ablation, axis))
        part.legend(handles=handles, title=axis, loc="outside lower center", ncols=min(len(handles), 6), **LEGEND)
    _bar_limit(panels, list(found.values()))
    return figure


def bar_handles(values: Sequence[Any]) -> list[Patch]:
    """Legend entries for the bars of an axis' values."""
    return [Patch(color=colour, label=short(value)) for value, (colour, _) in looks_of_values(values).items()]


def bars(axes: Axes, rows: pd.DataFrame, axis: str, values: Sequence[Any], names: Mapping[str, str]) -> None:
    """Draws a group of bars per tier (or subnet), with one bar and its interval per value of the axis."""
    places = [names.get(subnet) or tier for subnet, tier in zip(rows["subnet"], rows["tier"], strict=True)]
    rows = rows.assign(place=places)
    groups = list(dict.fromkeys(places))
    if all(name.startswith("tier") for name in groups):
        groups.sort(key=natural)
    width = 0.8 / len(values)
    for i, (value, (colour, _)) in enumerate(looks_of_values(values).items()):
        own = rows[rows[axis] == value]
        at = np.array([groups.index(place) for place in own["place"]]) + (i - (len(values) - 1) / 2) * width
        axes.bar(at, 100 * own["mean"], 0.9 * width, color=colour)
        with_bars(axes, at, own, INK, zorder=3)
    axes.set_xticks(range(len(groups)), groups)
    if max((len(name) for name in groups), default=0) > 36 // max(len(groups), 1):
        axes.tick_params(axis="x", rotation=20)


def bar_floor(rows: Sequence[pd.DataFrame]) -> float:
    """Lower limit of the bars, in %: 0, or well below the smallest bar if all are 50 or more and would look alike."""
    least = 100 * min(float(r["mean"].min()) for r in rows if len(r))
    return 10 * np.floor((least - 10) / 10) if least >= 50 else 0.0


def _bar_limit(panels: Sequence[Axes], rows: Sequence[pd.DataFrame]) -> None:
    for axes in panels:
        axes.set_ylim(bar_floor(rows), 101)
