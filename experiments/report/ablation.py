"""The report of an ablation: tables of its trials, settings and axes, and figures as in papers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain, cycle
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from rich.console import Group, RenderableType

from fedloom.experiments.analysis.ablation import (
    ablation_frame,
    against_reference,
    by_setting,
    differences,
    held,
    holding,
    is_grid,
    load_ablation,
    marginal,
    over_seeds,
    references,
    values_of,
)
from fedloom.experiments.analysis.outcomes import MODEL_KEY, final_model, of_final_model, outcomes
from fedloom.experiments.analysis.rounds import convergence, megabytes, simulated_hours, steps
from fedloom.experiments.analysis.settings import FEWEST, SEEDS, Estimate, is_absent, spread
from fedloom.experiments.analysis.subnets import labels_of
from fedloom.experiments.analysis.tables import (
    METRIC,
    SEARCH,
    WITHOUT_CLIENTS,
    Tables,
    natural,
    real_rounds,
    shown_models,
)
from fedloom.experiments.report.axes import (
    Series,
    axis_looks,
    draw_series,
    mark,
    names_width_in,
    panel_height_in,
    scale_of,
    value_text,
)
from fedloom.experiments.report.clients import failures_block
from fedloom.experiments.report.content import REFRESH_S, Block, Content, Picture, RunFacts, rich_block
from fedloom.experiments.report.drawing import (
    BLUE,
    COUNTS,
    DASHED,
    INK,
    LEGEND,
    MARKERS,
    above,
    are_shares,
    grid_of,
    heading,
    legend_below,
    legend_line,
    legend_patch,
    logarithmic,
    model_colours,
    new_figure,
    quiet,
    same_limits,
    whole_numbers,
    with_bars,
)
from fedloom.experiments.report.history import history_picture, kind_of_search
from fedloom.experiments.report.importances import importances_block
from fedloom.experiments.report.outcomes import FRONTS, Groups, outcomes_block, outcomes_figure
from fedloom.experiments.report.pages import ReportFiles, write_content
from fedloom.experiments.report.rounds import KINDS
from fedloom.experiments.report.runs import records, target_records
from fedloom.experiments.report.subnets import LOGARITHMIC_FROM
from fedloom.experiments.report.targets import RunsOf, Target, target_blocks
from fedloom.experiments.report.wording import (
    ABSENT,
    BARS,
    INTERVALS,
    Write,
    model_name,
    percent,
    points,
    seconds,
    si,
    si_scale,
    size,
    stage_name,
    with_interval,
)
from fedloom.experiments.store.ablations import (
    FIGURES,
    FOLDER,
    PLAN,
    Ablation,
    ablation_ids,
    axis_value,
    meant_ablation,
    short,
)
from fedloom.experiments.store.trials import FINAL, TrialState, trial_states
from fedloom.platform.results.manifest import check_files
from fedloom.platform.results.paths import list_runs, start_of
from fedloom.platform.results.store import output_folder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch


Names = Mapping[str, str]
"""Readable labels of subnets, by id."""


@dataclass(frozen=True)
class Study:
    """An ablation, the tables of its trials that have started, their frame (see `ablation_frame`), and the labels."""

    ablation: Ablation
    tables: Tables
    frame: pd.DataFrame
    names: Names

    @property
    def axes(self) -> list[str]:
        """The names of the axes."""
        return list(self.ablation.axes)

    def values(self, axis: str) -> list[Any]:
        """The values of an axis, in order."""
        return values_of(self.ablation, axis)

    def evaluated(self) -> pd.DataFrame:
        """The rows of the trials that were evaluated."""
        return self.frame.dropna(subset=[METRIC, "model"])

    def title(self, *axes: str) -> str:
        """The varied axes, and below them the fixed values of the others."""
        fixed = ", ".join(f"{axis}={value_text(value)}" for axis, value in held(self.ablation, *axes).items())
        return "\n".join([", ".join(axes), *([fill(f"at {fixed}", 44)] if fixed else [])])


def study_of(ablation: Ablation, tables: Tables) -> Study:
    """The ablation with its frame and the labels of its subnets."""
    frame, labels = ablation_frame(tables, ablation), labels_of(tables)
    pairs = frame.dropna(subset=["subnet"]).drop_duplicates("subnet")[["run_id", "subnet"]]
    names = {str(subnet): labels.of(str(run), str(subnet)) for run, subnet in pairs.itertuples(index=False)}
    return Study(ablation, tables, frame, names)


# -- tables ----------------------------------------------------------------------------------------------------------


def trials_block(ablation: Ablation, states: Sequence[TrialState], tables: Tables) -> Block:
    """One row per planned trial: its setting and seed, its state, and the message of its run."""
    rounds = real_rounds(tables.rounds).groupby("run_id").size().to_dict()
    rows = []
    for s in states:
        message, status = s.message or ABSENT, s.status
        if not s.message and status is not None and status.stage and s.state != "done":
            message = f"in {status.stage}, round {status.round_shown} of {status.rounds_total}"
        setting = (short(s.trial.setting[axis]) for axis in ablation.axes)
        done = str(rounds.get(s.trial.run_id, 0))
        rows.append((str(s.trial.index), *setting, str(s.trial.seed), s.state, s.trial.run_id, message, done))
    text = ("Every trial is one run. The column of rounds counts the rounds of all stages recorded so far.",)
    heads = ("trial", *ablation.axes, "seed", "state", "run", "message", "rounds")
    return Block("Trials", text, heads, tuple(rows), labels=len(heads) - 1)


MEASURED: tuple[tuple[str, str, Write], ...] = (
    (METRIC, "accuracy %", percent),
    ("macs", "MACs", si),
    ("parameters", "parameters", si),
    ("total_bytes", "bytes", size),
    ("simulated_s", "simulated", seconds),
)
"""The columns of the table of settings: the measure, its head, and its format."""


def points_block(study: Study, *, wide: bool) -> Block:
    """One row per setting and model, tier or subnet: n, accuracy and costs; `wide` includes all costs."""
    measures = [m for m in MEASURED if wide or m[0] in (METRIC, "macs")]
    frames = [by_setting(study.frame, measure, study.axes) for measure, _, _ in measures]
    key, points = [*study.axes, *MODEL_KEY], frames[0]
    written = []
    for frame, (_, _, write) in zip(frames, measures, strict=True):
        estimates = [
            Estimate(mean, None if is_absent(half_width) else half_width, n, tuple(values))
            for n, mean, half_width, values in frame[["n", "mean", "half_width", "values"]].itertuples(index=False)
        ]
        keys = frame[key].itertuples(index=False, name=None)
        written.append(dict(zip(keys, (with_interval(e, write) for e in estimates), strict=True)))
    shown = _model_columns(points, study.names)
    rows = [
        (
            *(short(row[axis]) for axis in study.axes),
            *(write(row[column]) for column, write in shown),
            str(row["n"]),
            *(cells.get(tuple(row[name] for name in key), ABSENT) for cells in written),
        )
        for row in points.to_dict("records")
    ]
    if rows:
        same = [(name, str(points[name].iloc[0])) for name in ("model", "tier") if points[name].nunique() == 1]
        costs = (
            " Bytes and simulated time cover all stages of the method, including the training of a supernet that the "
            "trial shared with others."
        )
        text = [
            f"Test accuracy in %; MACs of one forward pass; n: number of seeds. {INTERVALS}{costs if wide else ''}",
            *([f"All rows: {', '.join(f'{name} {model_name(value)}' for name, value in same)}."] if same else []),
        ]
    else:
        text = ["No trial has been evaluated yet."]
    heads = (*study.axes, *(column for column, _ in shown), "n", *(head for _, head, _ in measures))
    return Block("Settings", tuple(text), heads, tuple(rows), labels=len(study.axes) + len(shown))


def _model_columns(rows: pd.DataFrame, names: Names) -> list[tuple[str, Write]]:
    """The columns among model, tier and subnet that differ between rows, and their formats."""
    writers: dict[str, Write] = {
        "model": model_name,
        "tier": str,
        "subnet": lambda subnet: names.get(subnet, subnet) or ABSENT,
    }
    return [(column, writers[column]) for column in MODEL_KEY if rows[column].nunique() > 1]


def axis_block(study: Study, axis: str) -> Block:
    """The paired differences of an axis' values to its reference."""
    ablation = study.ablation
    compared = against_reference(study.frame, ablation, axis)
    shown = _model_columns(compared, study.names)
    rows = []
    for row in compared.to_dict("records"):
        few, p = len(row["values"]) < FEWEST, row["p_value"]
        rows.append(
            (
                f"{short(row['value'])} – {short(row['reference'])}",
                *(write(row[column]) for column, write in shown),
                str(row["n"]),
                str(row["seeds"]),
                ", ".join(map(points, row["values"])) if few else points(row["mean"]),
                ABSENT if is_absent(row["low"]) else f"{points(row['low'])} to {points(row['high'])}",
                ABSENT if is_absent(p) else "< 0.001" if p < 0.001 else f"{p:.3f}",
            )
        )
    text = (
        "Differences of test accuracy in percentage points. A pair is two runs with the same seed that differ only in "
        "this axis; n is the number of pairs. A seed counts once, with the mean of its pairs. Shown are the mean "
        "difference, its 95 % interval and the two-sided p of the paired t test over seeds, not corrected for the "
        "number of rows. For one or two seeds, the differences themselves are shown. There is no interval and no p for "
        "fewer than three seeds, or if a seed lacks pairs that others have.",
    )
    reference = short(references(ablation)[axis]) + ("" if axis in ablation.reference else ", the first value")
    heads = (axis, *(column for column, _ in shown), "n", "seeds", "difference", "95 % interval", "p")
    return Block(f"{axis} against {reference}", text, heads, tuple(rows), 1 + len(shown))


# -- figures ---------------------------------------------------------------------------------------------------------

_PANEL_IN, _MOST_COLUMNS = 4.1, 3

_MOST_ROWS = 8
"""Maximum number of values of a second axis for which each value has its own row of panels."""


def _line_handles(values: Sequence[Any]) -> list[Line2D]:
    drawn = axis_looks(values).items()
    return [legend_line(color=c, marker=m, markersize=5, label=value_text(value)) for value, (c, m) in drawn]


def _bar_handles(values: Sequence[Any]) -> list[Patch]:
    return [legend_patch(color=colour, label=value_text(value)) for value, (colour, _) in axis_looks(values).items()]


def values_legend(axes: Axes, title: str, handles: Sequence[Line2D | Patch]) -> None:
    """Draws a legend below the panel, where it covers no points."""
    longest = max(len(str(handle.get_label())) for handle in handles)
    columns = max(1, min(len(handles), 52 // (longest + 5)))
    position: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.17), "ncols": columns}
    axes.legend(handles=handles, title=title, title_fontsize=9, **position, **LEGEND)


def _grid(count: int, height: float) -> tuple[Figure, list[Axes]]:
    columns = min(count, _MOST_COLUMNS)
    figure = new_figure((0.8 + _PANEL_IN * max(columns, 1.3), height * -(-count // columns)))
    return figure, grid_of(figure, count, columns)


def _limit(panels: Mapping[Axes, bool], rows: Sequence[pd.DataFrame], *, of_shares: bool = True) -> None:
    """Gives all panels one range of the measure that holds all intervals; for lying panels, it is the range of x."""
    whole = pd.concat(list(rows))
    means, halves = whole["mean"].astype(float), whole["half_width"].fillna(0.0)
    seeds = whole["values"].explode().astype(float)
    low, high = min((means - halves).min(), seeds.min()), max((means + halves).max(), seeds.max())
    if not of_shares:
        low, high = min(low, 0.0), max(high, 0.0)
    elif are_shares(seeds):
        low, high = max(low, 0.0), min(high, 1.0)
    pad = 0.06 * max(high - low, 0.01)
    for axes, is_lying in panels.items():
        (axes.set_xlim if is_lying else axes.set_ylim)(100 * (low - pad), 100 * (high + pad))


def _beside(x: pd.Series[float], line: int, lines: int, width: float | None) -> pd.Series[float]:
    """The positions of one of several lines, offset so that their bars do not overlap; no `width` if logarithmic."""
    aside = line - (lines - 1) / 2
    return x * 1.02**aside if width is None else x + 0.009 * width * aside


def macs_figure(study: Study) -> Figure | None:
    """Test accuracy against MACs, a panel per axis and a line per value, the other axes at their references.

    Points are the evaluated subnets of a supernet's family, else the tiers' final models; bars are 95 % intervals over
    seeds. None if no model was evaluated. Source: SuperFed, Fig. 5.
    """
    known = study.evaluated()
    has_family = known.groupby("run_id")["subnet"].transform(lambda subnets: (subnets != "").any()).astype(bool)
    known = pd.concat([known[has_family & (known["subnet"] != "")], of_final_model(known[~has_family])])
    rows_of = {}
    for axis in study.axes:
        rows, macs = (marginal(known, study.ablation, axis, measure) for measure in (METRIC, "macs"))
        key = [axis, *MODEL_KEY]
        rows = rows.merge(macs[[*key, "mean"]].rename(columns={"mean": "macs"}), on=key)
        if len(rows):
            rows_of[axis] = rows
    if not rows_of:
        return None
    figure, panels = _grid(len(rows_of), 4.6)
    macs = pd.concat([rows["macs"] for rows in rows_of.values()])
    scale, prefix = si_scale(float(macs.max()))
    is_logarithmic = bool(macs.max() >= LOGARITHMIC_FROM * macs.min())
    for i, (axes, (axis, rows)) in enumerate(zip(panels, rows_of.items(), strict=True)):
        values = study.values(axis)
        width = None if is_logarithmic else float(rows["macs"].max() - rows["macs"].min()) or 1.0
        for j, (value, (colour, marker)) in enumerate(axis_looks(values).items()):
            line = rows[rows[axis] == value].sort_values("macs")
            x = _beside(line["macs"], j, len(values), width) / scale
            with_bars(axes, x, line, colour, alpha=0.55, zorder=2)
            style: dict[str, Any] = {"markersize": 5, "linewidth": 1.7, "label": f"{axis}={value_text(value)}"}
            axes.plot(x, 100 * line["mean"], color=colour, marker=marker, zorder=3, **style)
        if is_logarithmic:
            axes.set_xscale("log")
        values_legend(axes, axis, _line_handles(values))
        label = "" if i % _MOST_COLUMNS else "test accuracy (%)"
        quiet(axes, title=study.title(axis), xlabel=f"MACs of one forward pass{COUNTS[prefix]}", ylabel=label)
    _limit(dict.fromkeys(panels, False), list(rows_of.values()))
    return figure


def companions(study: Study, axis: str) -> list[str]:
    """The other axes with several values, numeric ones first, along which effects can be followed; empty if no grid."""
    others = [name for name in study.axes if name != axis and len(study.values(name)) > 1]
    if not is_grid(study.ablation):
        return []
    return sorted(others, key=lambda name: not scale_of(study.values(name)).is_ordered)


def metric_figure(study: Study) -> Figure | None:
    """Mean test accuracy against the values of each axis, a panel each; None if no model was evaluated.

    Lines or colours are the values of the axis that it is crossed with, for the final models; without such an axis they
    are the models. Tiers and subnets are averaged per seed; bars are 95 % intervals over seeds. The dotted line is the
    reference.
    """
    known, ablation = study.evaluated(), study.ablation
    models = shown_models([str(model) for model in known["model"]])
    of_models = dict(zip(models, zip(model_colours(models).values(), cycle(MARKERS), strict=False), strict=False))
    panels = []
    for axis in study.axes:
        crossed = next(iter(companions(study, axis)), None)
        by = [axis, crossed or "model"]
        chosen = known if crossed is None else of_final_model(known)
        rows = over_seeds(holding(chosen, held(ablation, *by)), METRIC, by)
        if len(rows):
            panels.append((axis, crossed, rows))
    if not panels:
        return None
    figure, parts = _parts([(study.values(axis), _lines_of(study, crossed)) for axis, crossed, _ in panels])
    drawn = {}
    for part, (axis, crossed, rows) in zip(parts, panels, strict=True):
        axes, values = part.subplots(), study.values(axis)
        looks_of = axis_looks(study.values(crossed)) if crossed else of_models
        series = [
            Series(
                model_name(value) if crossed is None else f"{crossed}={value_text(value)}",
                rows[rows[crossed or "model"] == value],
                *look,
            )
            for value, look in looks_of.items()
        ]
        draw_series(axes, axis, values, series, "mean test accuracy (%)")
        heading(axes, study.title(axis, *([crossed] if crossed else [])))
        if is_grid(ablation):
            mark(axes, values, references(ablation)[axis])
        drawn[axes] = not scale_of(values).is_ordered
        if crossed:
            legend_below(part, _line_handles(study.values(crossed)), 6, crossed)
        elif len(models) > 1:
            names = {model_name(model): look for model, look in of_models.items()}
            handles = [legend_line(color=c, marker=m, markersize=5, label=name) for name, (c, m) in names.items()]
            legend_below(part, handles, 4, "model")
    _limit(drawn, [rows for _, _, rows in panels])
    return figure


def _lines_of(study: Study, axis: str | None) -> int:
    return len(study.values(axis)) if axis else 1


def _parts(panels: Sequence[tuple[Sequence[Any], int]]) -> tuple[Figure, list[SubFigure]]:
    """A figure with a part for each panel of `draw_series`; `panels` has the values and the number of lines of each."""
    columns = min(len(panels), _MOST_COLUMNS)
    lines = -(-len(panels) // columns)
    width = _PANEL_IN + max(names_width_in(values) for values, _ in panels)
    height = 0.4 + max(panel_height_in(values, count) for values, count in panels)
    figure = new_figure((0.4 + width * max(columns, 1.3), lines * height))
    return figure, list(figure.subfigures(lines, columns, squeeze=False).ravel())[: len(panels)]


def crossed_figure(study: Study) -> Figure | None:
    """Mean test accuracy against the first axis: a line per value of the second, a panel per value of the third.

    Further axes are at their references. None if no final model was evaluated.
    """
    if len(study.axes) == 1:
        return metric_figure(study)
    (first, second, *others), known = study.axes, study.evaluated()
    axis_names = [first, second, *others[:1]]
    known = holding(of_final_model(known), held(study.ablation, *axis_names))
    rows = over_seeds(known, METRIC, axis_names)
    return _crossed(study, rows, axis_names, study.values(second), "mean test accuracy (%)")


def differences_figure(study: Study, axis: str) -> Figure | None:
    """Paired differences between an axis' values and its reference, along the axis that it is crossed with.

    Both runs of a pair share a seed. Differences are drawn along the first of `companions`; the second has a panel
    per value, and further ones are at their references. None without pairs of two seeds, when accuracies say as much.
    """
    along, *others = companions(study, axis) or [axis]
    axis_names = [along, axis, *others[:1]]
    known = study.evaluated()
    known = holding(of_final_model(known), held(study.ablation, *axis_names))
    by = [name for name in axis_names if name != axis]
    rows = differences(known, study.ablation, axis, by) if len(known) else known.assign(n=0)
    if not (rows["n"] > 1).any():
        return None
    reference = references(study.ablation)[axis]
    lines = [value for value in study.values(axis) if value != reference]
    measure = f"difference to {axis}={value_text(reference)}\n(percentage points)"
    return _crossed(study, rows, axis_names, lines, measure, of_shares=False)


def _crossed(
    study: Study,
    rows: pd.DataFrame,
    axis_names: Sequence[str],
    lines: Sequence[Any],
    measure: str,
    *,
    of_shares: bool = True,
) -> Figure | None:
    """Panels of lines: `axis_names` are the axis that is drawn along, that of the `lines`, and that of the panels.

    A single axis is drawn along its own values, in one colour.
    """
    if rows.empty:
        return None
    along, second = axis_names[:2]
    third = axis_names[2] if len(axis_names) > 2 else None
    values = [value for value in study.values(along) if along != second or value in lines]
    panel_values = study.values(third) if third else [None]
    colours = {value: look for value, look in axis_looks(study.values(second)).items() if value in lines}
    if along == second:
        colours = {None: (BLUE, MARKERS[0])}
    figure, parts = _parts([(values, len(colours))] * len(panel_values))
    drawn = {}
    for part, panel in zip(parts, panel_values, strict=True):
        axes = part.subplots()
        shown = rows if third is None else rows[rows[third] == panel]
        series = [
            Series("", shown, *look)
            if value is None
            else Series(f"{second}={value_text(value)}", shown[shown[second] == value], *look)
            for value, look in colours.items()
        ]
        draw_series(axes, along, values, series, measure, of_shares=of_shares)
        heading(axes, study.title(*dict.fromkeys(axis_names[:2])) if third is None else f"{third}={value_text(panel)}")
        is_lying = drawn[axes] = not scale_of(values).is_ordered
        if not of_shares:
            (axes.axvline if is_lying else axes.axhline)(0, color=INK, linewidth=0.9, zorder=1)
    _limit(drawn, [rows], of_shares=of_shares)
    if along != second:
        handles = [legend_line(color=c, marker=m, markersize=5, label=value_text(v)) for v, (c, m) in colours.items()]
        legend_below(figure, handles, 6, second)
    return figure


def tiers_figure(study: Study) -> Figure | None:
    """Test accuracy per tier, a column per model, a row per axis, a bar per value; None if no model was evaluated."""
    known = study.evaluated()
    models = shown_models([str(model) for model in known["model"]])
    models.sort(key=lambda m: m != final_model(known))  # the final model comes first
    averaged = {axis: marginal(known, study.ablation, axis) for axis in study.axes} if models else {}
    rows_of = {axis: rows for axis, rows in averaged.items() if len(rows)}
    if not rows_of:
        return None
    figure = new_figure((1.2 + 4.4 * max(len(models), 1.5), 3.9 * len(rows_of)))
    parts = figure.subfigures(len(rows_of), 1, squeeze=False)[:, 0]
    panels: list[Axes] = []
    for part, (axis, rows) in zip(parts, rows_of.items(), strict=True):
        for i, (axes, model) in enumerate(zip(part.subplots(1, len(models), squeeze=False)[0], models, strict=True)):
            _bars(axes, rows[rows["model"] == model], axis, study)
            title = f"{model_name(model)}: {study.title(axis)}"
            quiet(axes, title=title, ylabel="" if i else "test accuracy (%)")
            axes.grid(False, axis="x")
            axes.tick_params(labelleft=not i)
            panels.append(axes)
        legend_below(part, _bar_handles(study.values(axis)), 6, axis)
    _limit_bars(panels, list(rows_of.values()))
    return figure


def _bars(axes: Axes, rows: pd.DataFrame, axis: str, study: Study) -> None:
    """Draws a group of bars per tier (or subnet), with one bar and its interval per value of the axis."""
    rows = rows.assign(group=[study.names.get(s) or t for s, t in zip(rows["subnet"], rows["tier"], strict=True)])
    groups = list(dict.fromkeys(rows["group"]))
    if all(name.startswith("tier") for name in groups):
        groups.sort(key=natural)
    values = study.values(axis)
    width = 0.8 / len(values)
    for i, (value, (colour, _)) in enumerate(axis_looks(values).items()):
        shown = rows[rows[axis] == value]
        at = np.array([groups.index(group) for group in shown["group"]]) + (i - (len(values) - 1) / 2) * width
        axes.bar(at, 100 * shown["mean"], 0.9 * width, color=colour, label=f"{axis}={value_text(value)}")
        with_bars(axes, at, shown, INK, zorder=3)
    axes.set_xticks(range(len(groups)), groups)
    if max((len(name) for name in groups), default=0) > 36 // max(len(groups), 1):
        axes.tick_params(axis="x", rotation=20)


def _limit_bars(panels: Sequence[Axes], rows: Sequence[pd.DataFrame]) -> None:
    """Lets panels end at 100 % and begin at 0, or well below the smallest bar if all are 50 or more and look alike."""
    if all(are_shares(r["values"].explode()) for r in rows):
        least = 100 * min((float(r["mean"].min()) for r in rows if len(r)), default=0.0)
        floor = 10 * np.floor((least - 10) / 10) if least >= 50 else 0.0
        for axes in panels:
            axes.set_ylim(floor, 101)
    else:
        _limit(dict.fromkeys(panels, False), rows, of_shares=False)


def stages_figure(study: Study) -> Figure | None:
    """Validation accuracy against steps (above) and test accuracy per tier (below).

    Columns are the values of the first axis, colours those of the second. Above are paths of the supernet in training,
    then the candidates of the search. Bars are means with 95 % intervals over seeds. None if no validation accuracy is
    recorded. Source: FedorAS, Fig. 10.
    """
    first, second = study.axes[0], study.axes[1 if len(study.axes) > 1 else 0]
    axis_names = list(dict.fromkeys([first, second]))
    chosen = holding(study.frame, held(study.ablation, first, second))
    scored = steps(study.tables).merge(chosen[["run_id", SEEDS, *axis_names]].drop_duplicates(), on="run_id")
    if scored.empty:
        return None
    known = chosen.dropna(subset=[METRIC, "model"])
    final = of_final_model(known)
    tested = by_setting(final, METRIC, axis_names)
    names = " or ".join(map(model_name, shown_models([str(model) for model in final["model"]])))
    columns = study.values(first)
    figure = new_figure((1.0 + 4.0 * max(len(columns), 1.5), 7.2))
    grid = figure.subplots(2, len(columns), squeeze=False, sharey="row", height_ratios=(1.35, 1))
    for i, value in enumerate(columns):
        upper, lower = grid[0][i], grid[1][i]
        _scatter(upper, scored[scored[first] == value], second, study.values(second))
        quiet(upper, xlabel="steps", ylabel="" if i else "validation accuracy (%)")
        heading(upper, f"{first}={value_text(value)}", pad=18)  # leaves room for the names of the phases
        _bars(lower, tested[tested[first] == value], second, study)
        label = "" if i else f"test accuracy, {names or 'none yet'} (%)"
        quiet(lower, ylabel=label)
        lower.grid(False, axis="x")
    _limit_bars([*grid[1]], [tested])
    legend_below(figure, _bar_handles(study.values(second)), 6, second)
    return figure


def _scatter(axes: Axes, rows: pd.DataFrame, axis: str, values: list[Any]) -> None:
    # Shuffled deterministically by multiples of the golden ratio, so that no value's dots cover all others.
    mixed = rows.iloc[np.argsort(np.arange(len(rows)) * 0.618034 % 1.0, kind="stable")]
    colours = {value: colour for value, (colour, _) in axis_looks(values).items()}
    dots: dict[str, Any] = {"s": 7, "alpha": 0.3, "linewidths": 0, "rasterized": True}
    axes.scatter(mixed["step"], 100 * mixed["accuracy"], c=[colours[v] for v in mixed[axis]], **dots)
    training = rows[rows["phase"] != SEARCH]
    for value, colour in colours.items():
        mean = spread(training[training[axis] == value], ["step"], "accuracy")["mean"]
        axes.plot(mean.index.to_numpy(dtype=float), 100 * mean.to_numpy(dtype=float), color=colour, linewidth=1.6)
    searched = rows.loc[rows["phase"] == SEARCH, "step"]
    if searched.empty:
        return
    begin, end = float(searched.min()), float(searched.max())
    axes.axvline(begin - 0.5, color="#9A9A9A", linewidth=0.9, linestyle=":")
    if begin > 1:
        above(axes, "supernet training", begin / 2, 1.0, va="bottom")
    above(axes, "search", (begin + end) / 2, 1.0, va="bottom")


def rounds_figure(study: Study) -> Figure | None:
    """Validation accuracy against rounds, a panel per stage and a line per value of the first axis; None without rows.

    The line is the mean over seeds (and tiers), the band reaches from the minimum to the maximum over seeds. A stage of
    runs without validation shows, dashed, what their clients report on training data.
    """
    return _by_stage(study, convergence(study.tables), "rounds_done", "finished rounds")


def time_figure(study: Study) -> Figure | None:
    """Like `rounds_figure`, against the simulated hours since the stage began, the mean over seeds at every round."""
    key = ["run_id", "stage", "rounds_done"]
    timed = convergence(study.tables).merge(simulated_hours(study.tables), on=key)
    return _by_stage(study, timed, "simulated_h", "simulated hours")


def bytes_figure(study: Study) -> Figure | None:
    """Like `rounds_figure`, against the megabytes of all clients since the stage began, means over seeds per round."""
    sent = convergence(study.tables).merge(megabytes(study.tables), on=["run_id", "stage", "rounds_done"])
    figure = _by_stage(study, sent, "megabytes", "megabytes received and sent")
    for axes in figure.axes if figure is not None else ():
        logarithmic(axes, "x")  # compressed messages are a tenth of the size of others
    return figure


def _by_stage(study: Study, known: pd.DataFrame, x: str, xlabel: str) -> Figure | None:
    """A panel per stage, a line per value of the first axis and, on a grid, a row of panels per value of the second."""
    first, *others = study.axes
    second = others[0] if others and is_grid(study.ablation) and len(study.values(others[0])) <= _MOST_ROWS else None
    values, axis_names = study.values(first), [first, *([second] if second else [])]
    runs = holding(study.frame, held(study.ablation, *axis_names))[["run_id", SEEDS, *axis_names]].drop_duplicates()
    rows = known.dropna(subset=["metric"]).merge(runs, on="run_id")
    kinds = sorted(dict.fromkeys(rows["kind"]), key=lambda k: KINDS.index(k) if k in KINDS else len(KINDS))
    if not kinds:
        return None
    panels = [(level, kind) for level in (study.values(second) if second else [None]) for kind in kinds]
    columns = len(kinds) if len(kinds) > 1 else min(len(panels), _MOST_COLUMNS)
    lines = -(-len(panels) // columns)
    figure = new_figure((1.2 + 4.2 * max(columns, 1.5), 0.8 + (3.8 if lines == 1 else 2.7) * lines))
    drawn = grid_of(figure, len(panels), columns)
    for i, (axes, (level, kind)) in enumerate(zip(drawn, panels, strict=True)):
        shown = rows[rows["kind"] == kind] if level is None else rows[(rows["kind"] == kind) & (rows[second] == level)]
        _curves(axes, shown, first, values, x)
        title = stage_name(kind) if level is None else f"{stage_name(kind)}, {second}={value_text(level)}"
        is_lowest = i + columns >= len(panels)
        quiet(axes, title=title, xlabel=xlabel if is_lowest else "", ylabel="" if i % columns else "accuracy (%)")
        if x == "rounds_done":
            whole_numbers(axes)
    same_limits(drawn, y=True)
    for j in range(columns):
        same_limits(drawn[j::columns], x=True)
    legend_below(figure, _line_handles(values), 6, " ".join([first, *study.title(*axis_names).split("\n")[1:]]))
    return figure


def _curves(axes: Axes, rows: pd.DataFrame, axis: str, values: list[Any], x_name: str) -> None:
    is_validated = rows["series"] == "validation"
    shown = rows[is_validated | ~is_validated.groupby(rows[axis], observed=True).transform("any")]
    for value, (colour, marker) in axis_looks(values).items():
        line = shown[shown[axis] == value]
        style = "-" if (line["series"] == "validation").any() else DASHED
        over = 100 * spread(line, ["rounds_done"], "metric")
        x = line.groupby("rounds_done")[x_name].mean().reindex(over.index).to_numpy(dtype=float)
        mean, low, high = (over[name].to_numpy(dtype=float) for name in ("mean", "min", "max"))
        marks: dict[str, Any] = {"marker": marker, "markersize": 4.5, "markevery": max(1, len(x) // 10)}
        axes.plot(x, mean, color=colour, linestyle=style, linewidth=1.6, label=f"{axis}={value_text(value)}", **marks)
        axes.fill_between(x, low, high, color=colour, alpha=0.13, linewidth=0)
    if shown["rounds_done"].nunique() == 1:
        axes.set_xlim(left=0)  # around a single point matplotlib would draw ticks at fractions of a round


DRAWN: dict[str, tuple[str, str, Callable[[Study], Figure | None]]] = {
    "macs_by_axis": (
        "Test accuracy against MACs, per axis",
        f"Each point is a subnet of the family, cut from the trained supernet, or a tier's final model. {BARS}",
        macs_figure,
    ),
    "stages_by_axis": (
        "From training to the tiers' models",
        "Above: dots are paths of the supernet in training (a step is one client's local training; the line is their "
        "mean), then the candidates of the search in the order of scoring (a step is one candidate), all scored on the "
        "server's validation data. Below: the test accuracy of each tier; the y axis need not begin at 0. "
        f"{BARS}",
        stages_figure,
    ),
    "tiers_by_axis": (
        "Test accuracy per tier",
        f"A bar per value; the y axis need not begin at 0. {BARS}",
        tiers_figure,
    ),
    "metric_by_axis": (
        "Test accuracy along each axis",
        "Means over tiers and subnets, a colour per value of the axis that it is crossed with. Numeric values are "
        f"joined by lines, names are not. The dotted line marks the reference. {BARS}",
        metric_figure,
    ),
    "metric_by_axes": (
        "Test accuracy along the first axis",
        "A line per value of the second axis, a panel per value of the third, means over tiers and subnets. " + BARS,
        crossed_figure,
    ),
    "time_by_axis": (
        "Accuracy per simulated hour",
        "Accuracy on the server's validation data against the simulated time since the stage began, where a round "
        "takes as long as its slowest client; means over seeds, bands from the minimum to the maximum over seeds.",
        time_figure,
    ),
    "bytes_by_axis": (
        "Accuracy per megabyte",
        "Accuracy on the server's validation data against the megabytes that all clients together have received and "
        "sent since the stage began; means over seeds, bands from the minimum to the maximum over seeds.",
        bytes_figure,
    ),
    "fronts": (*FRONTS, lambda study: outcomes_figure(outcome_groups(study.ablation, study.tables), tuple(study.axes))),
    "convergence": (
        "Convergence",
        "Accuracy on the server's validation data against finished rounds, mean over seeds; bands from the minimum to "
        "the maximum over seeds. Dashed, where nothing was validated: what clients report during training.",
        rounds_figure,
    ),
}
"""The figures by name: title, caption, and the function that draws them."""


DIFFERENCES = (
    "Test accuracy of the final models minus that of the reference, in pairs of runs with the same seed: means over "
    "tiers and subnets, a colour per value, along the axis that it is crossed with. On the zero line a value makes no "
    "difference. Bars are 95 % intervals (Student's t) of the paired differences over seeds; with two seeds, each "
    "difference is a dash instead."
)


def ablation_pictures(study: Study) -> Iterator[Picture]:
    """The figures that the ablation names and this version knows, then those of differences and of convergence."""
    ablation = study.ablation
    for name in (n for n in dict.fromkeys(ablation.figures) if n in FIGURES):
        title, caption, draw = DRAWN[name]
        figure = draw(study)
        if figure is not None:
            yield Picture(name, title, f"{caption}{_held_text(ablation, _AXES_SHOWN.get(name, 1))}", figure)
    for i, axis in enumerate(ablation.axes):
        figure = differences_figure(study, axis) if is_grid(ablation) and len(study.values(axis)) > 1 else None
        if figure is not None:
            title = f"What {axis} changes"
            yield Picture(f"differences-{i + 1}", title, f"{DIFFERENCES}{_held_text(ablation, 3)}", figure)
    figure = rounds_figure(study)
    if figure is not None:
        title, caption, _ = DRAWN["convergence"]
        yield Picture("convergence", title, f"{caption}{_held_text(ablation, 2)}", figure)


_AXES_SHOWN = {
    "metric_by_axes": 3,
    **dict.fromkeys(("stages_by_axis", "metric_by_axis", "time_by_axis", "bytes_by_axis"), 2),
}
"""The number of axes that a figure shows, by its name; others show one. The remaining axes are at their references."""


def _held_text(ablation: Ablation, shown: int) -> str:
    """A sentence on what a figure of `shown` axes does with the other axes; empty if there are none."""
    if len(ablation.axes) > 1 and not is_grid(ablation):
        return " The points are those of a search, so the axes that are not shown vary as well."
    if len(ablation.axes) <= shown:
        return ""
    assumed = [axis for axis in ablation.axes if axis not in ablation.reference]
    first = f" ({', '.join(assumed)}: the first value, since the experiment's own value is not on the axis)"
    return f" Axes that are not shown are at their references{first if assumed else ''}."


# -- the report ------------------------------------------------------------------------------------------------------


def chosen_ablation(results: Path, names: Sequence[str]) -> str | None:
    """The id of the ablation that the report is about; None if it is about runs.

    Without `names` it is about what was started last, where an ablation takes precedence over its own trials. Raises
    ValueError for several ablations, for an ablation together with runs, and for a name that may mean either.
    """
    if names:
        meant = [ablation for name in names if (ablation := meant_ablation(results, name)) is not None]
        if meant and len(names) > 1:
            raise ValueError(
                f"{' '.join(names)}: {meant[0].ablation_id} is an ablation, and a report is of one ablation or of "
                "runs; give the ablation's id alone"
            )
        return meant[0].ablation_id if meant else None
    starts = {name: start_of(name, results / FOLDER / name / PLAN) for name in ablation_ids(results)}
    if not starts:
        return None
    latest = max(starts, key=lambda name: starts[name])
    runs = [run for run in list_runs(results) if not run.run_id.startswith(latest)]
    return None if any(start_of(run.run_id, run.config) > starts[latest] for run in runs) else latest


def write_ablation_report(
    results: Path, ablation_id: str, out: Path | None = None, targets: Sequence[Target] = ()
) -> ReportFiles:
    """Writes report.html, report.md, tables.tex and the figures (PNG, PDF) of an ablation in its current state.

    The default of `out` is `results/reports/ABLATION_ID`. The report has a table of the cost of reaching each of
    `targets`, by default the targets at which the runs were to stop. Raises ValueError for an unknown ablation, a
    damaged file, or a folder that cannot be written.
    """
    ablation, tables = load_ablation(results, ablation_id)
    for paths in tables.paths:
        check_files(paths)
    folder = output_folder(results, out, f"reports/{ablation.ablation_id}")
    content = ablation_content(ablation, trial_states(Path(results), ablation), tables, targets)
    return write_content(content, folder, [p.run_id for p in tables.paths])


def ablation_content(
    ablation: Ablation, states: Sequence[TrialState], tables: Tables, targets: Sequence[Target] = ()
) -> Content:
    """The content of an ablation's report; `targets` as in `write_ablation_report`."""
    study = study_of(ablation, tables)
    blocks = [
        trials_block(ablation, states, tables),
        outcomes_block(outcome_groups(ablation, tables), tuple(ablation.axes)),
        importances_block(ablation, tables),
        points_block(study, wide=True),
        *_target_blocks(study, targets),
        # A random search has no pairs.
        *(axis_block(study, axis) for axis in study.axes if is_grid(ablation)),
        failures_block(tables),
    ]
    unfinished = any(s.state in ("waiting", "running", "stalled") for s in states)
    unknown = [n for n in dict.fromkeys(ablation.figures) if n not in FIGURES]
    return Content(
        title=f"{ablation.name} on {ablation.experiment}: {ablation.title}".removesuffix(": "),
        runs=(_facts(ablation),),
        missing=(
            *progress_of(states),
            *(f"There is no figure {name!r}; the known ones are {', '.join(FIGURES)}." for name in unknown),
        ),
        blocks=tuple(block for block in blocks if block.rows),
        pictures=chain(history_picture(ablation, tables), ablation_pictures(study)),
        about="Ablation",
        refresh_s=REFRESH_S if unfinished else None,
        pictures_first=True,
    )


def runs_of(ablation: Ablation) -> RunsOf:
    """The settings of an ablation in order, with the ids of their runs."""
    runs: dict[tuple[str, ...], list[str]] = {}
    for trial in ablation.trials:
        runs.setdefault(tuple(short(trial.setting[axis]) for axis in ablation.axes), []).append(trial.run_id)
    return [*runs.items()]


def _target_blocks(study: Study, targets: Sequence[Target]) -> Iterator[Block]:
    return target_blocks(study.tables, runs_of(study.ablation), tuple(study.axes), labels_of(study.tables), targets)


def outcome_groups(ablation: Ablation, tables: Tables) -> Groups:
    """The settings of an ablation in order, with their trials' rows of `outcomes`."""
    frame = outcomes(tables)
    groups = [(labels, frame[frame["run_id"].isin(run_ids)]) for labels, run_ids in runs_of(ablation)]
    return [(labels, rows) for labels, rows in groups if len(rows)]


def progress_of(states: Sequence[TrialState]) -> list[str]:
    """A sentence with the number of trials in each state; empty if all trials are done."""
    counts = Counter(s.state for s in states)
    if sum(counts[state] for state in FINAL) == len(states):
        return []
    others = ", ".join(f"{count} {state}" for state, count in counts.most_common() if state != "done")
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
    return [f"{counts['done']} of {len(states)} trials are done at {now}; {others}."]


def _facts(ablation: Ablation) -> RunFacts:
    told = [
        f"{axis}={short(value)}"
        + ("" if axis in ablation.reference else " (the first value, since the experiment's own is not on the axis)")
        for axis, value in references(ablation).items()
    ]
    facts = [
        ("ablation", ablation.ablation_id),
        ("experiment", ablation.experiment),
        *((f"axis {axis}", ", ".join(map(short, values))) for axis, values in ablation.axes.items()),
        ("references", ", ".join(told)),
        ("seeds", ", ".join(map(str, ablation.seeds))),
        ("trials", f"{len(ablation.trials)} ({kind_of_search(ablation)})"),
        ("overrides", " ".join(ablation.overrides)),
        ("scheduler", str(ablation.scheduler.get("kind", "none"))),
        ("created", ablation.created),
    ]
    config = dict(ablation.trials[0].config) if ablation.trials else {}
    return RunFacts(ablation.ablation_id, tuple(facts), json.dumps(config, indent=1))


def ablation_table(results: Path, ablation_id: str, targets: Sequence[Target] = ()) -> RenderableType:
    """The tables of an ablation's settings and of its targets' costs, for the terminal; fast, without matplotlib."""
    study = study_of(*load_ablation(results, ablation_id, tables=WITHOUT_CLIENTS))
    blocks = [points_block(study, wide=False), *(block for block in _target_blocks(study, targets) if block.rows)]
    return Group(*(rich_block(block, stacked=False) for block in blocks))


def ablation_json(results: Path, ablation_id: str, targets: Sequence[Target] = ()) -> dict[str, Any]:
    """The report's numbers as JSON values: ablation, trials, missing, and the rows of frame, settings, differences.

    `targets` has the rows of `to_target` for each target; the argument is as in `write_ablation_report`.
    """
    ablation, tables = load_ablation(results, ablation_id)
    frame, axes = ablation_frame(tables, ablation), list(ablation.axes)
    states = trial_states(Path(results), ablation)
    compared = [against_reference(frame, ablation, axis) for axis in axes] if is_grid(ablation) else []
    return {
        "ablation": {
            "ablation_id": ablation.ablation_id,
            "name": ablation.name,
            "title": ablation.title,
            "experiment": ablation.experiment,
            "references": references(ablation),
        },
        "trials": [
            {
                "trial": s.trial.index,
                "run_id": s.trial.run_id,
                "seed": s.trial.seed,
                "setting": {axis: axis_value(value) for axis, value in s.trial.setting.items()},
                "state": s.state,
                "message": s.message,
            }
            for s in states
        ],
        "missing": progress_of(states),
        "frame": records(frame),
        "settings": records(by_setting(frame, METRIC, axes)),
        "differences": [row for rows in compared for row in records(rows)],
        "targets": target_records(tables, targets),
    }
