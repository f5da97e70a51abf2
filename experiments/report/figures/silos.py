"""Figures of cross-silo methods: the accuracy of every silo, and curves with the phases of the search."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedloom.experiments.analysis.seeds import SEEDS, by_seed, spread
from fedloom.experiments.analysis.settings import Setting
from fedloom.experiments.analysis.silo_curves import Phases
from fedloom.experiments.report.figures.settings import legend_height_in, legend_text, looks, setting_label
from fedloom.experiments.report.figures.style import GREY, INK, LEGEND, SERIES, quiet, whole_numbers

COLOURS = (*SERIES, "#8C564B", GREY)
"""One colour per method that may be compared."""

PHASES = ("1: pre-training", "2: search", "3: training")
SHADES = ("#F4F4F4", "#DCE9F3", "#F4F4F4")
"""Background colours of the phases; the search is highlighted."""

Spans = tuple[tuple[float, float], ...]
"""Start and end of each of `PHASES`, in finished rounds; they are equal for an empty phase."""

NARROW = 26
"""Maximum number of characters per line of a setting's name beside an axis."""


def silo_accuracy_figure(per_silo: pd.DataFrame, settings: Sequence[Setting]) -> Figure | None:
    """The test accuracy of every silo, a row per setting, with marks for the mean and the worst; None without values.

    `per_silo` comes from `silos.per_silo`. The silos of all seeds of a setting are drawn together; runs that repeat a
    seed are averaged.
    """
    known = per_silo[per_silo["accuracy"].notna()]
    shown = [s for s in settings if len(s.rows(known))]
    if not shown:
        return None
    drawn = looks(settings, COLOURS)
    figure = Figure(figsize=(8.6, 1.7 + 0.62 * len(shown)), layout="constrained")
    axes = figure.subplots()
    with_shared = bool(known["global_accuracy"].notna().any())
    for at, setting in enumerate(shown):
        _silo_dots(axes, at, setting.rows(known), drawn[setting.name][0])
    quiet(axes, xlabel="accuracy on the silo's own test data (%)")
    axes.set_yticks(range(len(shown)), [_wrapped(s.name) for s in shown])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.grid(False, axis="y")
    figure.legend(handles=_dot_handles(with_shared), loc="outside lower center", ncols=4, **LEGEND)
    return figure


def _wrapped(name: str) -> str:
    """The name with line breaks after commas."""
    lines = [""]
    for part in name.split(", "):
        joined = f"{lines[-1]}, {part}" if lines[-1] else part
        lines = [*lines[:-1], joined] if len(joined) <= NARROW or not lines[-1] else [*lines, part]
    return ",\n".join(lines)


def _silo_dots(axes: Axes, at: int, rows: pd.DataFrame, colour: str) -> None:
    per_seed = rows.groupby([SEEDS, "client_id"], sort=False)[["accuracy", "global_accuracy"]].mean()
    values = per_seed["accuracy"].to_numpy(dtype=float) * 100
    shared = per_seed["global_accuracy"].dropna().to_numpy(dtype=float) * 100
    axes.scatter(values, np.full(len(values), float(at)), s=34, color=colour, alpha=0.6, linewidths=0, zorder=3)
    mark: dict[str, Any] = {"color": colour, "edgecolors": "black", "linewidths": 0.9, "zorder": 4}
    axes.scatter([values.min()], [at], s=48, marker="<", **mark)
    axes.plot([values.mean()] * 2, [at - 0.26, at + 0.26], color=INK, linewidth=2.2, zorder=5)
    if len(shared):
        axes.scatter(shared, np.full(len(shared), at + 0.2), s=18, facecolors="none", edgecolors=colour, zorder=3)


def _dot_handles(with_shared: bool) -> list[Line2D]:
    dot: dict[str, Any] = {"color": "none", "markeredgecolor": "none", "markerfacecolor": GREY}
    ring: dict[str, Any] = {"color": "none", "markerfacecolor": "white"}
    handles = [
        Line2D([], [], marker="o", markersize=6, label="silo's model", **dot),
        Line2D([], [], marker="<", markersize=7, markeredgecolor="black", label="worst silo", **ring),
        Line2D([], [], marker="|", markersize=11, markeredgewidth=2.2, markeredgecolor=INK, label="mean", **ring),
    ]
    if with_shared:
        label = "shared model on the silo's data"
        handles.append(Line2D([], [], marker="o", markersize=5, markeredgecolor=GREY, label=label, **ring))
    return handles


def curves_figure(curves: pd.DataFrame, phases: Sequence[Phases], settings: Sequence[Setting]) -> Figure | None:
    """Validation accuracy (left) and training loss (right) against rounds, a line per setting; None without values.

    `curves` comes from `silo_curves.curves`. Bands show the standard deviation over silos for one seed, or the range
    from the minimum to the maximum over several seeds. The phases of runs with a search are shaded. Source: SPIDER,
    Fig. 6.
    """
    loss = curves[(curves["series"] == "train") & curves["mean_loss"].notna()]
    validation = curves[(curves["series"] == "validation") & curves["mean"].notna()]
    shown = [s for s in settings if len(s.rows(curves))]
    panels = [
        (rows, value, title, label)
        for rows, value, title, label in (
            (validation, "mean", "Validation accuracy", "mean over silos (%)"),
            (loss, "mean_loss", "Local training loss", "mean over silos (cross-entropy)"),
        )
        if len(rows)
    ]
    if not panels:
        return None
    drawn, spans = looks(settings, COLOURS), _spans(phases, shown)
    width = 1.6 + 4.6 * len(panels)
    height = 3.9 + legend_height_in([setting_label(s) for s in shown], width)
    figure = Figure(figsize=(width, height), layout="constrained")
    row = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (rows, value, title, label) in zip(row, panels, strict=True):
        for setting in shown:
            _curve(axes, setting.rows(rows), value, drawn[setting.name])
        quiet(axes, xlabel="finished rounds", ylabel=label)
        axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=INK, pad=_room(spans))
        whole_numbers(axes)
        axes.set_xlim(0, max(1, int(curves["rounds_done"].max())))
        _mark_phases(axes, spans, {name: colour for name, (colour, _) in drawn.items()})
    handles = [_handle(s, drawn[s.name], width) for s in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=1, **LEGEND)
    return figure


def _room(spans: Mapping[str, Spans]) -> float:
    """Space between the axes and their title in points, for the names of the phases or for a bar per setting."""
    if not spans:
        return 6.0
    return 20.0 if len(set(spans.values())) == 1 else 9.0 + 6.5 * len(spans)


def _handle(setting: Setting, look: tuple[str, str], width_in: float) -> Line2D:
    label = legend_text(setting_label(setting), width_in)
    return Line2D([], [], color=look[0], marker=look[1], markersize=4.5, label=label)


def _curve(axes: Axes, rows: pd.DataFrame, value: str, look: tuple[str, str]) -> None:
    if rows.empty:
        return
    scale = 100.0 if value == "mean" else 1.0
    line = spread(rows, ["rounds_done"], value) * scale
    x, y = line.index.to_numpy(dtype=float), line["mean"].to_numpy()
    colour, marker = look
    style: dict[str, Any] = {"marker": marker, "markersize": 4.5, "markevery": max(1, len(x) // 12)}
    axes.plot(x, y, color=colour, linewidth=1.6, zorder=3, **style)
    if rows[SEEDS].nunique() > 1:
        low, high = line["min"].to_numpy(), line["max"].to_numpy()
    elif value == "mean":
        std = rows.groupby("rounds_done")["std"].mean().to_numpy() * scale
        low, high = np.clip(y - std, 0.0, 100.0), np.clip(y + std, 0.0, 100.0)
    else:
        return
    axes.fill_between(x, low, high, color=colour, alpha=0.1, linewidth=0, zorder=2)


def _spans(phases: Sequence[Phases], settings: Sequence[Setting]) -> dict[str, Spans]:
    """Starts and ends of the phases by setting with a search, as means over its seeds."""
    ends = pd.DataFrame(
        [(p.run_id, *(end for _, end in spans_of(p))) for p in phases], columns=["run_id", "first", "second", "third"]
    )
    found: dict[str, Spans] = {}
    for setting in settings:
        if len(own := setting.rows(ends)):
            first, second, third = by_seed(own, ["first", "second", "third"]).mean()
            found[setting.name] = ((0.0, first), (first, second), (second, third))
    return found


def spans_of(phases: Phases) -> Spans:
    """Start and end of the three phases; the search ends with the last decision of the last silo."""
    end = phases.rounds if phases.last_decided is None else phases.last_decided
    start = min(phases.search_start, end)
    return ((0.0, start), (start, end), (end, max(phases.rounds, end)))


def _mark_phases(axes: Axes, spans: Mapping[str, Spans], colours: Mapping[str, str]) -> None:
    """Shades the phases if they are equal in all settings; otherwise draws a bar per setting that spans its search."""
    if len(set(spans.values())) > 1:
        for i, (name, setting) in enumerate(spans.items()):
            bar: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "clip_on": False, "solid_capstyle": "butt"}
            axes.plot(setting[1], [1.025 + 0.026 * i] * 2, color=colours[name], linewidth=3.0, **bar)
        return
    for setting in list(spans.values())[:1]:
        whole = max(end for _, end in setting)
        for (begin, end), shade, name in zip(setting, SHADES, PHASES, strict=True):
            if end > begin:
                axes.axvspan(begin, end, color=shade, linewidth=0, zorder=0)
                _name_phase(axes, begin, end, name, whole)


def _name_phase(axes: Axes, begin: float, end: float, name: str, whole: float) -> None:
    # A narrow phase has room only for its number.
    text = name if (end - begin) / whole >= 0.014 * len(name) else name.split(":")[0]
    place: dict[str, Any] = {"xycoords": axes.get_xaxis_transform(), "ha": "center", "annotation_clip": False}
    axes.annotate(text, ((begin + end) / 2, 1.02), fontsize=8.5, color="#6B6B6B", **place)
