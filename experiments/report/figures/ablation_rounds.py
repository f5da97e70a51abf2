"""Figures of an ablation's training and search: accuracy against steps and rounds."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedloom.experiments.analysis.ablation import by_setting, held, holding, values_of
from fedloom.experiments.analysis.convergence import convergence, simulated_hours
from fedloom.experiments.analysis.frames import METRIC
from fedloom.experiments.analysis.outcomes import final_model
from fedloom.experiments.analysis.seeds import SEEDS, spread
from fedloom.experiments.analysis.stages import SEARCH
from fedloom.experiments.analysis.steps import steps
from fedloom.experiments.analysis.tables import Tables
from fedloom.experiments.report.figures.ablation_axes import (
    Studied,
    bar_floor,
    bar_handles,
    bars,
    looks_of_values,
    title_of,
)
from fedloom.experiments.report.figures.convergence import KINDS
from fedloom.experiments.report.figures.style import DASHED, INK, LEGEND, quiet, whole_numbers
from fedloom.experiments.report.parts.words import model_name, stage_name
from fedloom.experiments.store.ablations import short

_FAINT: dict[str, Any] = {"s": 7, "alpha": 0.3, "linewidths": 0, "rasterized": True}


def stages_figure(studied: Studied, tables: Tables) -> Figure | None:
    """Validation accuracy against steps (above) and test accuracy per tier (below).

    Columns are the values of the first axis, colours those of the second. Above are paths of the supernet in training,
    then the candidates of the search. Bars are means with 95 % intervals over seeds. None if no validation accuracy is
    recorded. Source: FedorAS, Fig. 10.
    """
    ablation = studied.ablation
    first, *rest = ablation.axes
    second = rest[0] if rest else first
    chosen = holding(studied.frame, held(ablation, first, second))
    places = chosen[["run_id", SEEDS, *dict.fromkeys([first, second])]].drop_duplicates()
    seen = steps(tables).merge(places, on="run_id")
    if seen.empty:
        return None
    known = chosen.dropna(subset=[METRIC, "model"])
    tested = by_setting(known[known["model"] == final_model(known)], METRIC, list(dict.fromkeys([first, second])))
    columns = values_of(ablation, first)
    figure = Figure(figsize=(1.0 + 4.0 * max(len(columns), 1.5), 7.2), layout="constrained")
    grid = figure.subplots(2, len(columns), squeeze=False, sharey="row", height_ratios=(1.35, 1))
    for i, value in enumerate(columns):
        above, below = grid[0][i], grid[1][i]
        _scatter(above, seen[seen[first] == value], second, values_of(ablation, second))
        quiet(above, xlabel="steps", ylabel="" if i else "validation accuracy (%)")
        title: dict[str, Any] = {"loc": "left", "fontsize": 10.5, "fontweight": "bold", "color": INK}
        above.set_title(f"{first}={short(value)}", pad=18, **title)  # leaves room for the names of the phases
        bars(below, tested[tested[first] == value], second, values_of(ablation, second), studied.names)
        label = "" if i else f"test accuracy, {model_name(final_model(known)) or 'none yet'} (%)"
        quiet(below, ylabel=label)
        below.grid(False, axis="x")
        below.set_ylim(bar_floor([tested]) if len(tested) else 0.0, 101)
    handles = bar_handles(values_of(ablation, second))
    figure.legend(handles=handles, title=second, loc="outside lower center", ncols=min(len(handles), 6), **LEGEND)
    return figure


def _scatter(axes: Axes, rows: pd.DataFrame, axis: str, values: list[Any]) -> None:
    # Shuffled deterministically by multiples of the golden ratio, so that no value's dots cover all others.
    order = np.argsort(np.arange(len(rows)) * 0.618034 % 1.0, kind="stable")
    mixed = rows.iloc[order]
    colours = {value: colour for value, (colour, _) in looks_of_values(values).items()}
    axes.scatter(mixed["step"], 100 * mixed["accuracy"], c=[colours[v] for v in mixed[axis]], **_FAINT)
    training = rows[rows["phase"] != SEARCH]
    for value, colour in colours.items():
        mean = spread(training[training[axis] == value], ["step"], "accuracy")["mean"]
        axes.plot(mean.index.to_numpy(dtype=float), 100 * mean.to_numpy(dtype=float), color=colour, linewidth=1.6)
    searched = rows.loc[rows["phase"] == SEARCH, "step"]
    if len(searched):
        _mark(axes, float(searched.min()), float(searched.max()))


def _mark(axes: Axes, begin: float, end: float) -> None:
    """Marks the end of training and the start of the search."""
    axes.axvline(begin - 0.5, color="#9A9A9A", linewidth=0.9, linestyle=":")
    where = axes.get_xaxis_transform()
    style: dict[str, Any] = {"xycoords": where, "ha": "center", "va": "bottom", "fontsize": 8.5, "color": "#6B6B6B"}
    if begin > 1:
        axes.annotate("supernet training", (begin / 2, 1.0), annotation_clip=False, **style)
    axes.annotate("search", ((begin + end) / 2, 1.0), annotation_clip=False, **style)


def rounds_figure(studied: Studied, tables: Tables) -> Figure | None:
    """Validation accuracy against rounds, a panel per stage and a line per value of the first axis; None without rows.

    The line is the mean over seeds (and tiers), the band reaches from the minimum to the maximum over seeds. A stage
    without validation shows, dashed, what its clients report on training data.
    """
    return _by_stage(studied, convergence(tables), "rounds_done", "finished rounds")


def time_figure(studied: Studied, tables: Tables) -> Figure | None:
    """The same against the simulated hours since the stage began, the mean over seeds at every round."""
    known = convergence(tables).merge(simulated_hours(tables), on=["run_id", "stage", "rounds_done"])
    return _by_stage(studied, known, "simulated_h", "simulated hours")


def _by_stage(studied: Studied, known: pd.DataFrame, x: str, xlabel: str) -> Figure | None:
    ablation = studied.ablation
    first = next(iter(ablation.axes))
    runs = holding(studied.frame, held(ablation, first))[["run_id", SEEDS, first]].drop_duplicates()
    rows = known.dropna(subset=["metric"]).merge(runs, on="run_id")
    kinds = sorted(dict.fromkeys(rows["kind"]), key=lambda k: KINDS.index(k) if k in KINDS else len(KINDS))
    if not kinds:
        return None
    figure = Figure(figsize=(1.2 + 4.2 * max(len(kinds), 1.5), 4.6), layout="constrained")
    for i, (axes, kind) in enumerate(zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True)):
        _curves(axes, rows[rows["kind"] == kind], first, values_of(ablation, first), x)
        quiet(axes, title=stage_name(kind), xlabel=xlabel, ylabel="" if i else "accuracy (%)")
        if x == "rounds_done":
            whole_numbers(axes)
    handles = [Line2D([], [], color=c, marker=m, markersize=5, label=short(v)) for v, (c, m) in _looks(studied).items()]
    title = title_of(ablation, first).replace("\n", " ")
    figure.legend(handles=handles, title=title, loc="outside lower center", ncols=min(len(handles), 6), **LEGEND)
    return figure


def _looks(studied: Studied) -> dict[Any, tuple[str, str]]:
    return looks_of_values(values_of(studied.ablation, next(iter(studied.ablation.axes))))


def _curves(axes: Axes, rows: pd.DataFrame, axis: str, values: list[Any], at: str) -> None:
    validated = rows[rows["series"] == "validation"]
    shown, style = (validated, "-") if len(validated) else (rows, DASHED)
    for value, (colour, marker) in looks_of_values(values).items():
        own = shown[shown[axis] == value]
        over = 100 * spread(own, ["rounds_done"], "metric")
        places = own.groupby("rounds_done")[at].mean()
        x, y = places.reindex(over.index).to_numpy(dtype=float), over["mean"].to_numpy(dtype=float)
        every = max(1, len(x) // 10)
        axes.plot(x, y, color=colour, linestyle=style, linewidth=1.6, marker=marker, markersize=4.5, markevery=every)
        low, high = over["min"].to_numpy(dtype=float), over["max"].to_numpy(dtype=float)
        axes.fill_between(x, low, high, color=colour, alpha=0.13, linewidth=0)
    if shown["rounds_done"].nunique() == 1:
        axes.set_xlim(left=0)  # around a single point matplotlib would draw ticks at fractions of a round
