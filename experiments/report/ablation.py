"""The report of an ablation: tables of its trials, settings and axes, and figures as in papers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from rich.console import RenderableType

from fedloom.experiments.analysis.ablation import (
    ablation_frame,
    against_reference,
    axis_value,
    by_setting,
    held,
    holding,
    is_grid,
    load_ablation,
    marginal,
    over_seeds,
    references,
    values_of,
)
from fedloom.experiments.analysis.outcomes import MODEL_KEY, final_model, outcomes
from fedloom.experiments.analysis.rounds import convergence, simulated_hours, steps
from fedloom.experiments.analysis.seeds import FEWEST, SEEDS, Estimate, is_absent, spread
from fedloom.experiments.analysis.subnets import Labels, labels_of
from fedloom.experiments.analysis.tables import ALL_TABLES, METRIC, SEARCH, Tables, natural, real_rounds, shown_models
from fedloom.experiments.report.clients import failures_block
from fedloom.experiments.report.content import REFRESH_S, Block, Content, Picture, RunFacts, rich_block
from fedloom.experiments.report.convergence import KINDS
from fedloom.experiments.report.drawing import (
    COUNTS,
    DASHED,
    INK,
    LEGEND,
    MARKERS,
    SERIES,
    legend_line,
    legend_patch,
    model_colours,
    new_figure,
    quiet,
    whole_numbers,
    with_bars,
)
from fedloom.experiments.report.outcomes import FRONTS, outcomes_block, outcomes_figure
from fedloom.experiments.report.pages import ReportFiles, write_content
from fedloom.experiments.report.runs import records
from fedloom.experiments.report.subnets import LOGARITHMIC_FROM
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
from fedloom.experiments.store.ablations import FIGURES, FOLDER, PLAN, Ablation, ablation_ids, meant_ablation, short
from fedloom.experiments.store.trials import FINAL, TrialState, trial_states
from fedloom.platform.results.manifest import check_files
from fedloom.platform.results.paths import list_runs, start_of
from fedloom.platform.results.store import output_folder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch


Names = Mapping[str, str]
"""Readable labels of subnets, by id."""

MEASURED: tuple[tuple[str, str, Write], ...] = (
    (METRIC, "accuracy %", percent),
    ("macs", "MACs", si),
    ("parameters", "parameters", si),
    ("total_bytes", "bytes", size),
    ("simulated_s", "simulated", seconds),
)
"""The columns of the table of settings: the measure, its head, and its format."""


def subnet_names(frame: pd.DataFrame, labels: Labels) -> dict[str, str]:
    """The labels of the subnets in an ablation's frame."""
    pairs = frame.dropna(subset=["subnet"]).drop_duplicates("subnet")[["run_id", "subnet"]]
    return {str(subnet): labels.of(str(run), str(subnet)) for run, subnet in pairs.itertuples(index=False)}


def trials_block(ablation: Ablation, states: Sequence[TrialState], tables: Tables) -> Block:
    """One row per planned trial: its setting and seed, its state, and the message of its run."""
    rounds = real_rounds(tables.rounds).groupby("run_id").size().to_dict()
    rows = [
        (
            str(s.trial.index),
            *(short(s.trial.setting[axis]) for axis in ablation.axes),
            str(s.trial.seed),
            s.state,
            s.trial.run_id,
            _said(s),
            str(rounds.get(s.trial.run_id, 0)),
        )
        for s in states
    ]
    text = ("Every trial is a run of its own. Rounds are those of all stages that are in the tables so far.",)
    heads = ("trial", *ablation.axes, "seed", "state", "run", "message", "rounds")
    return Block("Trials", text, heads, tuple(rows), labels=len(heads) - 1)


def _said(state: TrialState) -> str:
    status = state.status
    if state.message:
        return state.message
    if status is None or not status.stage or state.state == "done":
        return ABSENT
    return f"in {status.stage}, round {status.round_shown} of {status.rounds_total}"


def points_block(ablation: Ablation, frame: pd.DataFrame, names: Names, *, wide: bool) -> Block:
    """One row per setting and model, tier or subnet: n, accuracy and costs; `wide` includes all costs."""
    axes = list(ablation.axes)
    chosen = [m for m in MEASURED if wide or m[0] in (METRIC, "macs")]
    found = [by_setting(frame, measure, axes) for measure, _, _ in chosen]
    shown = _model_columns(found[0], names)
    key = [*axes, *MODEL_KEY]
    cells = [rows.set_index(key) for rows in found]
    rows = []
    for place in found[0][key].itertuples(index=False, name=None):
        settings = tuple(short(value) for value in place[: len(axes)])
        model = tuple(write(place[len(axes) + i]) for i, _, write in shown)
        n = str(cells[0].loc[place, "n"])
        measured = (_estimate(c, place, write) for c, (_, _, write) in zip(cells, chosen, strict=True))
        rows.append((*settings, *model, n, *measured))
    heads = (*axes, *(head for _, head, _ in shown), "n", *(head for _, head, _ in chosen))
    return Block("Settings", _settings_text(found[0], wide), heads, tuple(rows), labels=len(axes) + len(shown))


def _estimate(cells: pd.DataFrame, place: tuple[Any, ...], write: Write) -> str:
    if place not in cells.index:
        return ABSENT
    row = cells.loc[place]
    half_width = None if is_absent(row["half_width"]) else float(row["half_width"])
    return with_interval(Estimate(row["mean"], half_width, row["n"], tuple(row["values"])), write)


def _model_columns(rows: pd.DataFrame, names: Names) -> list[tuple[int, str, Write]]:
    """The columns among model, tier and subnet that differ between rows: index, head and format."""
    writers: dict[str, Write] = {
        "model": model_name,
        "tier": str,
        "subnet": lambda subnet: names.get(subnet, subnet) or ABSENT,
    }
    return [(i, column, writers[column]) for i, column in enumerate(MODEL_KEY) if rows[column].nunique() > 1]


def _settings_text(rows: pd.DataFrame, wide: bool) -> tuple[str, ...]:
    if rows.empty:
        return ("No trial has been evaluated yet.",)
    same = [
        f"{column} {model_name(str(rows[column].iloc[0]))}"
        for column in ("model", "tier")
        if rows[column].nunique() == 1
    ]
    costs = (
        " Bytes and simulated time are those of all that the method did, with the training of a supernet that the "
        "trial shared with others."
    )
    return (
        f"Test accuracy in %; MACs of one forward pass; n seeds. {INTERVALS}{costs if wide else ''}",
        *([f"All rows: {', '.join(same)}."] if same else []),
    )


def axis_blocks(ablation: Ablation, frame: pd.DataFrame, names: Names) -> list[Block]:
    """A table per axis of paired differences to its reference; none for a random search, which has no pairs."""
    if not is_grid(ablation):
        return []
    blocks = [_axis_block(ablation, frame, names, axis) for axis in ablation.axes]
    return [block for block in blocks if block.rows]


def _axis_block(ablation: Ablation, frame: pd.DataFrame, names: Names, axis: str) -> Block:
    found = against_reference(frame, ablation, axis)
    shown = _model_columns(found, names)
    rows = [
        (
            f"{short(row['value'])} – {short(row['reference'])}",
            *(write(row[head]) for _, head, write in shown),
            str(row["n"]),
            str(row["seeds"]),
            ", ".join(map(points, row["values"])) if len(row["values"]) < FEWEST else points(row["mean"]),
            _interval(row["low"], row["high"]),
            _probability(row["p_value"]),
        )
        for row in found.to_dict("records")
    ]
    heads = (axis, *(head for _, head, _ in shown), "n", "seeds", "difference", "95 % interval", "p")
    return Block(f"{axis} against {reference_text(ablation, axis)}", _PAIRS, heads, tuple(rows), 1 + len(shown))


_PAIRS = (
    "Differences of test accuracy in percentage points. A pair is two runs of one seed that differ in this axis alone. "
    "Of n pairs a seed counts once, with the mean of its own: mean difference, 95 % interval and "
    "two-sided p of the paired t test over seeds, not corrected for the number of rows. One or two seeds show their "
    "differences; they, and seeds that lack pairs which others have, give neither interval nor p.",
)


def reference_text(ablation: Ablation, axis: str) -> str:
    """The reference of an axis as text that says whether it is only the axis' first value."""
    value = short(references(ablation)[axis])
    whose = "" if axis in ablation.reference else ", the first value"
    return f"{value}{whose}"


def _interval(low: Any, high: Any) -> str:
    return ABSENT if is_absent(low) else f"{points(low)} to {points(high)}"


def _probability(p: Any) -> str:
    if is_absent(p):
        return ABSENT
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


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
    figure = new_figure((0.8 + _PANEL * max(columns, 1.3), height * lines))
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
    handles = [legend_line(color=c, marker=m, markersize=5, label=short(v)) for v, (c, m) in drawn.items()]
    values_legend(axes, axis, handles)


def _points(axes: Axes, x: pd.Series[float], rows: pd.DataFrame, colour: str, marker: str) -> None:
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
        legend_line(color=colours[m], marker=marker, markersize=5, label=model_name(m))
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
    figure = new_figure((1.2 + 4.4 * max(len(models), 1.5), 3.9 * len(found)))
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
    return [legend_patch(color=colour, label=short(value)) for value, (colour, _) in looks_of_values(values).items()]


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
    figure = new_figure((1.0 + 4.0 * max(len(columns), 1.5), 7.2))
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
    figure = new_figure((1.2 + 4.2 * max(len(kinds), 1.5), 4.6))
    for i, (axes, kind) in enumerate(zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True)):
        _curves(axes, rows[rows["kind"] == kind], first, values_of(ablation, first), x)
        quiet(axes, title=stage_name(kind), xlabel=xlabel, ylabel="" if i else "accuracy (%)")
        if x == "rounds_done":
            whole_numbers(axes)
    handles = [legend_line(color=c, marker=m, markersize=5, label=short(v)) for v, (c, m) in _looks(studied).items()]
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


UNFINISHED = ("waiting", "running", "stalled")
"""States of trials that may continue without the user's intervention."""


def chosen_ablation(results: Path, given: Sequence[str]) -> str | None:
    """The id of the ablation that the report is about; None if it is about runs.

    Without `given` it is about what was started last: an ablation rather than the last of its trials. Raises ValueError
    for several ablations, for an ablation together with runs, and for what may mean either.
    """
    if not given:
        return _latest_ablation(results)
    own = [found for name in given if (found := meant_ablation(results, name)) is not None]
    if not own:
        return None
    if len(given) > 1:
        raise ValueError(
            f"{' '.join(given)}: {own[0].ablation_id} is an ablation, and a report is of one ablation or of runs; give "
            "the ablation's id alone"
        )
    return own[0].ablation_id


def _latest_ablation(results: Path) -> str | None:
    """The ablation that was started last, if no run but its own trials was after it."""
    starts = {name: start_of(name, results / FOLDER / name / PLAN) for name in ablation_ids(results)}
    if not starts:
        return None
    latest = max(starts, key=lambda name: starts[name])
    runs = [run for run in list_runs(results) if not run.run_id.startswith(latest)]
    return None if any(start_of(run.run_id, run.config) > starts[latest] for run in runs) else latest


def write_ablation_report(results: Path, ablation_id: str, out: Path | None = None) -> ReportFiles:
    """Writes report.html, report.md, tables.tex and the figures (PNG, PDF) of an ablation in its current state.

    The default of `out` is `results/reports/ABLATION_ID`. Raises ValueError for an unknown ablation, a damaged file,
    or a folder that cannot be written.
    """
    ablation, tables = load_ablation(results, ablation_id)
    for paths in tables.paths:
        check_files(paths)
    folder = output_folder(results, out, f"reports/{ablation.ablation_id}")
    content = ablation_content(ablation, trial_states(Path(results), ablation), tables)
    return write_content(content, folder, [p.run_id for p in tables.paths])


def ablation_content(ablation: Ablation, states: Sequence[TrialState], tables: Tables) -> Content:
    """The content of an ablation's report."""
    frame = ablation_frame(tables, ablation)
    names = subnet_names(frame, labels_of(tables))
    blocks = [
        trials_block(ablation, states, tables),
        outcomes_block(outcome_groups(ablation, tables), tuple(ablation.axes)),
        points_block(ablation, frame, names, wide=True),
        *axis_blocks(ablation, frame, names),
        failures_block(tables),
    ]
    at_work = any(s.state in UNFINISHED for s in states)
    unknown = [f"There is no figure {n!r}: there are {', '.join(FIGURES)}." for n in _figures(ablation, known=False)]
    return Content(
        title=f"{ablation.name} on {ablation.experiment}: {ablation.title}".removesuffix(": "),
        runs=(_facts(ablation),),
        missing=(*progress_of(states), *unknown),
        blocks=tuple(block for block in blocks if block.rows),
        pictures=_pictures(ablation, frame, names, tables),
        about="Ablation",
        refresh_s=REFRESH_S if at_work else None,
        pictures_first=True,
    )


def outcome_groups(ablation: Ablation, tables: Tables) -> list[tuple[tuple[str, ...], pd.DataFrame]]:
    """The settings of an ablation in order, with the rows of what their trials end with."""
    frame = outcomes(tables)
    runs: dict[tuple[str, ...], list[str]] = {}
    for trial in ablation.trials:
        runs.setdefault(tuple(short(trial.setting[axis]) for axis in ablation.axes), []).append(trial.run_id)
    groups = [(labels, frame[frame["run_id"].isin(run_ids)]) for labels, run_ids in runs.items()]
    return [(labels, rows) for labels, rows in groups if len(rows)]


def _figures(ablation: Ablation, *, known: bool) -> list[str]:
    return [name for name in dict.fromkeys(ablation.figures) if (name in FIGURES) is known]


def progress_of(states: Sequence[TrialState]) -> list[str]:
    """A sentence with the number of trials in each state; empty if all trials are done."""
    counts = pd.Series([s.state for s in states]).value_counts().to_dict()
    done = sum(counts.get(state, 0) for state in FINAL)
    if done == len(states):
        return []
    others = ", ".join(f"{count} {state}" for state, count in counts.items() if state != "done")
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
    return [f"{counts.get('done', 0)} of {len(states)} trials are done at {now}; {others}."]


def _facts(ablation: Ablation) -> RunFacts:
    axes = {axis: ", ".join(short(value) for value in values) for axis, values in ablation.axes.items()}
    whose = {True: "", False: " (the first value; the experiment has another)"}
    given = [f"{axis}={short(v)}{whose[axis in ablation.reference]}" for axis, v in references(ablation).items()]
    facts = [
        ("ablation", ablation.ablation_id),
        ("experiment", ablation.experiment),
        *((f"axis {axis}", text) for axis, text in axes.items()),
        ("references", ", ".join(given)),
        ("seeds", ", ".join(map(str, ablation.seeds))),
        ("trials", f"{len(ablation.trials)} ({'grid' if is_grid(ablation) else 'random search'})"),
        ("overrides", " ".join(ablation.overrides)),
        ("scheduler", str(ablation.scheduler.get("kind", "none"))),
        ("created", ablation.created),
    ]
    config = dict(ablation.trials[0].config) if ablation.trials else {}
    return RunFacts(ablation.ablation_id, tuple(facts), json.dumps(config, indent=1))


def _pictures(ablation: Ablation, frame: pd.DataFrame, names: Mapping[str, str], tables: Tables) -> Iterator[Picture]:

    makers: dict[str, Callable[[Studied], Figure | None]] = {
        "macs_by_axis": macs_figure,
        "stages_by_axis": lambda studied: stages_figure(studied, tables),
        "tiers_by_axis": tiers_figure,
        "metric_by_axis": metric_figure,
        "time_by_axis": lambda studied: time_figure(studied, tables),
        "fronts": lambda _studied: outcomes_figure(outcome_groups(ablation, tables)),
        "convergence": lambda studied: rounds_figure(studied, tables),
    }
    for name in (*_figures(ablation, known=True), "convergence"):
        figure = makers[name](Studied(ablation, frame, names))
        if figure is not None:
            title, caption = CAPTIONS[name]
            yield Picture(name, title, f"{caption} {_held_caption(ablation)}", figure)


def _held_caption(ablation: Ablation) -> str:
    if len(ablation.axes) == 1:
        return ""
    if not is_grid(ablation):
        return "The other axes vary with what is shown: this is a random search."
    assumed = [axis for axis in ablation.axes if axis not in ablation.reference]
    first = f" ({', '.join(assumed)}: the first value, as the experiment's own is not among them)" if assumed else ""
    return f"Axes that are not shown are at their references{first}."


_BARS = f"{BARS} What would leave the panel is cut off."
CAPTIONS = {
    "macs_by_axis": (
        "Test accuracy against MACs, per axis",
        f"Each point is a subnet of the family, cut from the trained supernet, or a tier's final model. {_BARS}",
    ),
    "stages_by_axis": (
        "From training to the tiers' models",
        "Above: dots are paths of the supernet in training (a step is one client's local training; the line is their "
        "mean), then the candidates of the search in the order of their scoring (a step is one candidate), all on the "
        "server's validation data. Below: the test accuracy of each tier; the axis need not begin at 0. "
        f"{_BARS}",
    ),
    "tiers_by_axis": (
        "Test accuracy per tier",
        f"A bar per value; the axis need not begin at 0. {_BARS}",
    ),
    "metric_by_axis": (
        "Test accuracy along each axis",
        f"Means over tiers and subnets. The dotted line is the reference. {_BARS}",
    ),
    "time_by_axis": (
        "Accuracy per simulated hour",
        "Accuracy on the server's validation data against the simulated time since the stage began, a round taking as "
        "long as its slowest client; means over seeds, bands from the least seed to the greatest.",
    ),
    "fronts": FRONTS,
    "convergence": (
        "Convergence",
        "Accuracy on the server's validation data against finished rounds, mean over seeds; bands reach from the least "
        "seed to the greatest. Dashed where a stage is not validated: what its clients report while they train.",
    ),
}


def ablation_table(results: Path, ablation_id: str) -> RenderableType:
    """The table of an ablation's settings for the terminal; fast, without matplotlib."""
    ablation, tables = load_ablation(results, ablation_id, tables=[t for t in ALL_TABLES if t != "clients"])
    frame = ablation_frame(tables, ablation)
    block = points_block(ablation, frame, subnet_names(frame, labels_of(tables)), wide=False)
    return rich_block(block, stacked=False)


def ablation_json(results: Path, ablation_id: str) -> dict[str, Any]:
    """The report's numbers as JSON values: ablation, trials, missing, and the rows of frame, settings, differences."""
    ablation, tables = load_ablation(results, ablation_id)
    frame = ablation_frame(tables, ablation)
    axes, states = list(ablation.axes), trial_states(Path(results), ablation)
    plan = {"ablation_id": ablation.ablation_id, "name": ablation.name, "title": ablation.title}
    compared = [against_reference(frame, ablation, axis) for axis in axes] if is_grid(ablation) else []
    return {
        "ablation": {**plan, "experiment": ablation.experiment, "references": references(ablation)},
        "trials": [_trial_json(state) for state in states],
        "missing": progress_of(states),
        "frame": records(frame),
        "settings": records(by_setting(frame, METRIC, axes)),
        "differences": [row for rows in compared for row in records(rows)],
    }


def _trial_json(state: TrialState) -> dict[str, Any]:
    trial = state.trial
    setting = {axis: axis_value(value) for axis, value in trial.setting.items()}
    place = {"trial": trial.index, "run_id": trial.run_id, "seed": trial.seed, "setting": setting}
    return {**place, "state": state.state, "message": state.message}
