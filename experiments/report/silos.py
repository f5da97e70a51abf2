"""The section of cross-silo methods: accuracy per silo, curves and phases of the search, personalisation gains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedloom.experiments.analysis.seeds import SEEDS, by_seed, is_absent, spread
from fedloom.experiments.analysis.settings import Setting
from fedloom.experiments.analysis.silos import (
    PERSONAL,
    Phases,
    SiloSummary,
    as_square,
    best_on_test,
    curves,
    in_short,
    p_matrix,
    per_silo,
    personalisation_gains,
    phases,
    silo_settings,
    silo_summaries,
    silos,
    took_part,
    training,
    undecided_silos,
)
from fedloom.experiments.analysis.tables import (
    EVALUATION,
    GAINS,
    METRIC,
    Tables,
    configuration,
    keeps_own_cells,
    keeps_own_models,
    only,
)
from fedloom.experiments.report.content import Block, Picture, sheets
from fedloom.experiments.report.drawing import (
    GREY,
    INK,
    LEGEND,
    SERIES,
    legend_height_in,
    legend_line,
    legend_text,
    looks,
    new_figure,
    quiet,
    setting_label,
    whole_numbers,
)
from fedloom.experiments.report.wording import (
    ABSENT,
    REPEATED,
    Write,
    count,
    over_settings,
    percent,
    points,
    seconds,
    sentence,
    si,
    size,
    with_interval,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

COSTS = ("parameters", "macs", "peak_memory_bytes", "bytes_per_round", "wall_s")
"""Columns that the terminal shows in a separate table."""

COLUMNS: tuple[tuple[str, str, Write], ...] = (
    ("accuracy", "test %,\nmean", percent),
    ("std", "\nstd", percent),
    ("worst", "\nworst", percent),
    ("best_accuracy", "best\nround %", percent),
    ("best_round", "that\nround", count),
    ("global_accuracy", "before\npers.", percent),
    ("gain", "arch.\ngain", points),
    ("parameters", "params", si),
    ("macs", "MACs", si),
    ("architectures", "different\narch.", count),
    ("peak_memory_bytes", "peak\nmemory", size),
    ("bytes_per_round", "bytes per\nround", size),
    ("wall_s", "wall\ntime", seconds),
)


def silo_blocks(tables: Tables, *, wide: bool) -> list[Block]:
    """The table of all settings, in two halves for a terminal; with `wide` one table, plus gains and silos per run."""
    own = silos(tables)
    summaries = silo_summaries(own)
    if not wide:
        blocks = [summary_block(summaries, "Silos", costs=False), summary_block(summaries, "Costs", accuracy=False)]
    else:
        blocks = [summary_block(summaries)]
        blocks += [gains_block(only(own, [p.run_id])) for p in own.paths]
        blocks += [run_block(only(own, [p.run_id])) for p in own.paths]
    return [block for block in blocks if block.rows]


def summary_block(
    summaries: Sequence[SiloSummary], title: str = "Silos", *, accuracy: bool = True, costs: bool = True
) -> Block:
    """One row per setting (SPIDER, Tab. 1 and 3); columns without any value are left out."""
    wanted = [c for c in COLUMNS if (costs if c[0] in COSTS else accuracy)]
    columns = [c for c in wanted if any(s.values[c[0]] is not None for s in summaries)]
    if not columns:
        return Block(title, (), (), ())
    datasets = [str(s.setting.config["data"]["dataset"]) for s in summaries]
    several = len(set(datasets)) > 1
    # Presets are named after their method, so that a column of methods would repeat it.
    named = all(s.method in s.setting.name for s in summaries) and not several
    labels = ("setting", "method", "data")[: 1 if named else 2 + several]
    rows = tuple(
        (
            *(summary.setting.name, summary.method, dataset)[: len(labels)],
            *(with_interval(summary.values[key], write) for key, _, write in columns),
        )
        for summary, dataset in zip(summaries, datasets, strict=True)
    )
    heads = (*labels, *(head for _, head, _ in columns))
    return Block(title, _text(summaries, {key for key, _, _ in columns}), heads, rows, labels=len(labels))


def _text(summaries: Sequence[SiloSummary], shown: set[str]) -> tuple[str, ...]:
    text = [over_settings([s.setting for s in summaries])]
    if "accuracy" in shown:
        shared = [s.method for s in summaries if s.model != PERSONAL and s.values["accuracy"] is not None]
        which = f" ({', '.join(dict.fromkeys(shared))}: the shared one)" if shared else ""
        text.append(
            f"Accuracy of every silo's model{which} on its own test data in %; all silos weigh the same, std is "
            "that of the silos (divided by their number)."
        )
    notes = {
        "best_accuracy": "best round: the highest mean test accuracy of the rounds measured, as papers report it. Test "
        "data have chosen that round, so that it is too high; nothing is trained, searched or chosen by it.",
        "global_accuracy": "before pers.: the shared model's mean accuracy.",
        "gain": "arch. gain: mean over silos of g, by which a silo's architecture beats the others' on its own data.",
        "parameters": "params: of a silo's model, mean.",
        "macs": "MACs: of a silo's model, one forward pass of one sample, mean.",
        "peak_memory_bytes": "peak memory: the most of any silo in training.",
        "bytes_per_round": "bytes per round: both ways, per silo.",
        "wall_s": "wall time: all training rounds, on the machine that computed them.",
    }
    said = " ".join(note for key, note in notes.items() if key in shown)
    return (*text, said[:1].upper() + said[1:]) if said else tuple(text)


def run_block(run: Tables) -> Block:
    """One row per silo of one run."""
    rows = per_silo(run)
    with_cells = has_cells(run) and any("/" in str(text) for text in rows["architecture"])
    columns: list[tuple[str, str, Write]] = [
        ("samples", "test samples", count),
        ("accuracy", "test %", percent),
        ("loss", "test loss", lambda v: f"{float(v):.3g}"),
        ("global_accuracy", "before personalisation %", percent),
        ("neighbour_share", "neighbours' share", lambda v: f"{float(v):.2g}"),
        ("parameters", "parameters", si),
        ("macs", "MACs", si),
    ]
    columns = [c for c in columns if rows[c[0]].notna().any()]
    cells = tuple(
        (
            str(row["client_id"]),
            _architecture(row["architecture"], with_cells),
            *(ABSENT if is_absent(row[key]) else write(row[key]) for key, _, write in columns),
        )
        for row in rows.to_dict(orient="records")
    )
    heads = ("silo", "architecture", *(head for _, head, _ in columns))
    text = _run_text(with_cells, searched=bool(configuration(run, _name(run))["method"].get("search")))
    return Block(f"Silos of run {_name(run)}", text, heads, cells)


def _name(run: Tables) -> str:
    return run.paths[0].run_id


def has_cells(run: Tables) -> bool:
    """Whether the run's architectures are those of DARTS cells."""
    config = configuration(run, _name(run))
    return str(config.get("space", {}).get("name", "")).startswith("darts")


def _architecture(text: Any, with_cells: bool) -> str:
    if is_absent(text):
        return ABSENT
    return in_short(str(text)) if with_cells else str(text)


def _run_text(with_cells: bool, *, searched: bool) -> tuple[str, ...]:
    text = ["Every silo's model on its own test data."]
    if with_cells:
        several = "what is undecided" if searched else "several that are used together"
        text.append(
            "The architecture is the operator kept on each edge of the normal, then of the reduction cell, by its "
            f"number; a dot is an edge without any, braces hold {several}."
        )
    return tuple(text)


BEST_EPOCH = (
    "Fine-tuned models count with their best epoch on the test data, as in the paper: that is too high. The accuracy "
    "after the last epoch is in the table of evaluations."
)


def gains_block(run: Tables) -> Block:
    """g_i of one run's silos and their mean (SPIDER, Eq. 6)."""
    gains = personalisation_gains(p_matrix(run))
    rows = [
        (str(r.client_id), *(percent(v) for v in (r.own, r.others, r.best_other)), str(r.compared), points(r.gain))
        for r in gains.itertuples()
    ]
    if len(rows) > 1:
        means = (percent(gains[c].mean()) for c in ("own", "others", "best_other"))
        rows.append(("mean", *means, count(gains["compared"].mean()), points(gains["gain"].mean())))
    text = (
        "Test accuracy in % on a silo's data of its own architecture and of the other silos', all fine-tuned on its "
        "data. The gain is its own less the others' mean, in percentage points.",
        *([BEST_EPOCH] if best_on_test(run) else []),
    )
    heads = ("silo", "own architecture", "others', mean", "others', best", "others", "gain")
    return Block(f"Personalisation gains of run {_name(run)}", text, heads, tuple(rows), labels=1)


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
    figure = new_figure((8.6, 1.7 + 0.62 * len(shown)))
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
        legend_line(marker="o", markersize=6, label="silo's model", **dot),
        legend_line(marker="<", markersize=7, markeredgecolor="black", label="worst silo", **ring),
        legend_line(marker="|", markersize=11, markeredgewidth=2.2, markeredgecolor=INK, label="mean", **ring),
    ]
    if with_shared:
        label = "shared model on the silo's data"
        handles.append(legend_line(marker="o", markersize=5, markeredgecolor=GREY, label=label, **ring))
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
    figure = new_figure((width, height))
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
    return legend_line(color=look[0], marker=look[1], markersize=4.5, label=label)


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


def gains_figure(matrix: pd.DataFrame) -> Figure | None:
    """p_ij of one run in per cent (left), and p_ii - p_ij with g_i as the last column (right); None without rows.

    `matrix` comes from `silo_gains.p_matrix`. Source: SPIDER, Fig. 3.
    """
    if matrix.empty:
        return None
    square = as_square(matrix) * 100
    rows = [i for i in square.index if square.loc[i].notna().any()]
    square = square.loc[rows]
    gain = personalisation_gains(matrix).set_index("client_id")["gain"].reindex(rows) * 100
    own = np.array([square.loc[i, i] for i in rows], dtype=float)
    values = square.to_numpy(dtype=float)
    size = 0.62 * values.shape[1]
    figure = new_figure((3.2 + 2 * size + 0.7, max(2.9, 1.5 + 0.5 * len(rows))))
    left, right = figure.subplots(1, 2, width_ratios=(values.shape[1], values.shape[1] + 1.2))
    matrix_silos = sorted({*matrix["client_id"], *matrix["silo"]})
    columns = [str(j) for j in matrix_silos]
    _heat(left, values, "Blues", _range(values))
    _frame(left, "Accuracy $p_{ij}$ (%)", rows, columns)
    _mark_own(left, rows, [int(j) for j in matrix_silos])
    # p_ii - p_ii is 0 by definition, so the diagonal stays white.
    differences = own[:, None] - values
    differences[[[i == j for j in square.columns] for i in rows]] = np.nan
    both = np.column_stack([differences, gain.to_numpy(dtype=float)])
    reach = float(np.nanmax(np.abs(both))) if np.isfinite(both).any() else 1.0
    _heat(right, both, "RdBu", (-max(reach, 1e-9), max(reach, 1e-9)), signed=True)
    _frame(right, "Gain $p_{ii} - p_{ij}$ (points)", rows, [*columns, "$g_i$"])
    right.axvline(values.shape[1] - 0.5, color=INK, linewidth=1.6)
    right.set_xlabel("architecture of silo j; last: mean gain", fontsize=10, color=INK)
    return figure


def _range(values: NDArray[np.float64]) -> tuple[float, float]:
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    return (low, high) if high > low else (low - 1, high + 1)


def _heat(
    axes: Axes, values: NDArray[np.float64], colours: str, limits: tuple[float, float], *, signed: bool = False
) -> None:
    """Draws cells with their numbers; missing values stay white and empty."""
    image = axes.imshow(np.ma.masked_invalid(values), cmap=colours, vmin=limits[0], vmax=limits[1], aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            red, green, blue, _ = image.to_rgba(np.array([value]))[0]
            dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.55
            text = f"{value:{'+' if signed else ''}.1f}"
            axes.text(column, row, text, ha="center", va="center", fontsize=8.5, color="white" if dark else INK)


def _frame(axes: Axes, title: str, rows: Sequence[int], columns: Sequence[str]) -> None:
    quiet(axes, title=title, xlabel="architecture of silo j", ylabel="data of silo i")
    axes.grid(False)
    axes.set_yticks(range(len(rows)), [str(i) for i in rows])
    axes.set_xticks(range(len(columns)), columns)
    axes.tick_params(length=0)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)


def _mark_own(axes: Axes, rows: Sequence[int], columns: Sequence[int]) -> None:
    from matplotlib.patches import Rectangle

    for at, silo in enumerate(rows):
        place = (columns.index(silo) - 0.5, at - 0.5)
        axes.add_patch(Rectangle(place, 1, 1, fill=False, edgecolor=INK, linewidth=1.6))


CAPTIONS = {
    "silos": (
        "Accuracy of the silos",
        "Each dot is a silo's model on the silo's own test data; the line is their mean, the triangle the worst. "
        "Rings, where there are any, are the shared model before personalisation. Silos of all runs of a setting are "
        "drawn together.",
    ),
    "phases": (
        "Curves and phases",
        "Validation accuracy of the silos' models and the loss on their training data, means over silos. Bands: the "
        "standard deviation over silos of one run, or from the least to the greatest of several runs. Phases: before "
        "the search, until the last silo has decided every edge, and after; where searching settings differ in them, "
        "bars in their colours above the axes span their searches alone. A silo whose validation data has joined its "
        "training data is not scored on it.",
    ),
    "gains": (
        "Personalisation gains",
        "Left: test accuracy on silo i's data of silo j's architecture, fine-tuned on silo i's training data; framed: "
        "its own. Right: what its own architecture is better by, in percentage points, and the mean gain of each silo. "
        "White: not measured, or its own.",
    ),
}


def silo_pictures(tables: Tables) -> Iterator[Picture]:
    """The figures of all cross-silo runs, then each run's gains and cells; none if there is no such run."""
    own = silos(tables)
    if not own.paths:
        return

    measured, trained, searched = per_silo(own), curves(own), phases(own)
    for sheet in sheets(silo_settings(tables)):
        figures = {
            "silos": silo_accuracy_figure(measured, sheet.settings),
            "phases": curves_figure(trained, searched, sheet.settings),
        }
        repeated = f" {sentence(REPEATED)}" if any(s.repeats_seeds for s in sheet.settings) else ""
        for name, figure in figures.items():
            if figure is not None:
                title, caption = CAPTIONS[name]
                yield sheet.labelled(Picture(name, title, f"{caption}{repeated}", figure))
    for paths in own.paths:
        for picture in _of_run(only(own, [paths.run_id])):
            yield picture.named(paths.run_id) if len(own.paths) > 1 else picture


def _of_run(run: Tables) -> Iterator[Picture]:
    """The run's gains and the cells of its silos, reduction cells first as in the paper (SPIDER, Fig. 2)."""
    from fedloom.experiments.report.cells import CAPTION, cell_pictures

    figure = gains_figure(p_matrix(run))
    if figure is not None:
        yield Picture("gains", *CAPTIONS["gains"], figure)
    for cell_type, cells, left_out in cell_pictures(run):
        more = f" {left_out} more different cells are not drawn." if left_out else ""
        yield Picture(f"{cell_type}-cells", f"{cell_type.capitalize()} cells", f"{CAPTION}{more}", cells)


def missing_of_silos(tables: Tables, run_id: str, state: str) -> list[str]:
    """Missing parts of a cross-silo run: scores or training of silos, gains, or decisions of its search."""
    rows = tables.evaluations[tables.evaluations["run_id"] == run_id]
    rows = rows[(rows["stage"] == EVALUATION) & (rows["split"] == "test") & (rows["metric"] == METRIC)]
    yet = "" if state == "done" else " yet"
    none = f"nothing was measured on test data{yet}: no accuracy of silos"
    lines = gaps_of_scores(tables, run_id) if len(rows) else [none]
    if covered_silos(tables, run_id):
        if p_matrix(only(tables, [run_id])).empty:
            lines.append(f"personalisation gains were not measured{yet}")
        elif state != "running":
            lines += gaps_of_gains(tables, run_id)
    searches = configuration(tables, run_id)["method"].get("search")
    if state == "done" and searches and (left := undecided_silos(tables, run_id)):
        lines.append(f"the search ended with edges left to be searched in {silo_names(tables, run_id, left)}")
    return lines


MOST_PAIRS = 6


def num_silos(tables: Tables, run_id: str) -> int:
    """The configured number of silos of the run."""
    return int(configuration(tables, run_id)["data"]["num_clients"])


def silo_names(tables: Tables, run_id: str, silos: Sequence[int]) -> str:
    """The silos as part of a sentence."""
    if len(silos) == num_silos(tables, run_id):
        return "every silo"
    return f"silo{'' if len(silos) == 1 else 's'} {', '.join(map(str, silos))}"


def unscored_silos(tables: Tables, run_id: str) -> list[int]:
    """The silos without an accuracy in the final evaluation, except those without test samples."""
    rows = per_silo(only(tables, [run_id]))
    known = rows[rows["accuracy"].notna() | rows["samples"].eq(0)]
    return _others(known["client_id"], num_silos(tables, run_id))


def untrained_silos(tables: Tables, run_id: str) -> list[int]:
    """The silos for which no training round counted, because they failed, dropped out or were late every time."""
    rows = training(only(tables, [run_id]).clients)
    if rows.empty:
        return []
    return _others(rows.loc[took_part(rows), "client_id"], num_silos(tables, run_id))


def _others(known: pd.Series[Any], count: int) -> list[int]:
    there = {int(c) for c in known.dropna()}
    return [silo for silo in range(count) if silo not in there]


def unmeasured_pairs(tables: Tables, run_id: str) -> list[tuple[int, int]]:
    """The pairs (i, j) of covered silos whose p_ij was not measured, except silos i without test samples."""
    run, covered = only(tables, [run_id]), range(covered_silos(tables, run_id))
    matrix = p_matrix(run)
    measured = {(int(i), int(j)) for i, j in zip(matrix["client_id"], matrix["silo"], strict=True)}
    rows = run.evaluations
    tested = rows[rows["stage"].isin([GAINS, EVALUATION]) & (rows["split"] == "test") & (rows["metric"] == METRIC)]
    untested = {int(c) for c in tested.loc[tested["samples"].eq(0), "client_id"].dropna()}
    return [(i, j) for i in covered if i not in untested for j in covered if (i, j) not in measured]


def covered_silos(tables: Tables, run_id: str) -> int:
    """The number of silos, counted from the first, that the gains cover; 0 if gains are not configured."""
    gains = configuration(tables, run_id)["method"].get("gains", {})
    if not gains.get("epochs", 0):
        return 0
    given = gains.get("clients")
    return num_silos(tables, run_id) if given is None else int(given)


def gaps_of_scores(tables: Tables, run_id: str) -> list[str]:
    """Sentences on silos without a score, and on silos with a score that were never trained."""
    lines = []
    unscored = unscored_silos(tables, run_id)
    if unscored:
        which = silo_names(tables, run_id, unscored)
        lines.append(f"no accuracy on test data of {which}: mean, std and worst are over the others")
    if untrained := [silo for silo in untrained_silos(tables, run_id) if silo not in unscored]:
        which = silo_names(tables, run_id, untrained)
        scored = _scored(tables, run_id)
        lines.append(f"no training round of {which} counted (failed, dropped or late every time): {scored}")
    return lines


def _scored(tables: Tables, run_id: str) -> str:
    """Says which model the final evaluation scores for silos that were never trained."""
    if keeps_own_models(tables, run_id):
        return "what is scored as personal there is the shared model"
    if keeps_own_cells(tables, run_id):
        return "what is scored as personal there is the shared base with cells that were never trained"
    return "the shared model has learned nothing from the data there"


def gaps_of_gains(tables: Tables, run_id: str) -> list[str]:
    """A sentence on the pairs of silos whose p_ij is missing."""
    missing = unmeasured_pairs(tables, run_id)
    if not missing:
        return []
    named = ", ".join(f"({i}, {j})" for i, j in missing[:MOST_PAIRS]) + (", ..." if len(missing) > MOST_PAIRS else "")
    which = silo_names(tables, run_id, sorted({i for i, _ in missing}))
    share = f"{len(missing)} of {covered_silos(tables, run_id) ** 2}"
    return [f"personalisation gains of {which} are incomplete: {share} p_ij were not measured, (i, j) = {named}"]
