"""The section of cross-silo methods: accuracy per silo, curves and phases of the search, personalisation gains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedloom.experiments.analysis.architectures import decoder
from fedloom.experiments.analysis.settings import SEEDS, Setting, by_seed, is_absent, spread
from fedloom.experiments.analysis.silos import (
    PERSONAL,
    Phases,
    SiloSummary,
    as_square,
    best_on_test,
    curves,
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
    only,
    traits_of,
)
from fedloom.experiments.report.content import Block, Picture, sheets
from fedloom.experiments.report.drawing import (
    GREY,
    INK,
    SERIES,
    WITHOUT_STAR,
    above,
    heading,
    legend_below,
    legend_height_in,
    legend_mark,
    looks,
    new_figure,
    quiet,
    setting_handles,
    setting_label,
    whole_numbers,
)
from fedloom.experiments.report.wording import (
    ABSENT,
    Write,
    caption_of,
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

COSTS = ("parameters", "macs", "peak_memory_bytes", "bytes_per_round", "wall_s")
"""Columns that the terminal shows in a separate table."""

COLUMNS: tuple[tuple[str, str, Write, str], ...] = (
    ("accuracy", "test %,\nmean", percent, ""),
    ("std", "\nstd", percent, ""),
    ("worst", "\nworst", percent, ""),
    (
        "best_accuracy",
        "best\nround %",
        percent,
        "best round: the highest mean test accuracy of all measured rounds, as papers report it (too high, as test "
        "data chose that round; no training, search or choice of models depends on it)",
    ),
    ("best_round", "that\nround", count, ""),
    ("global_accuracy", "before\npers.", percent, "before pers.: the shared model's mean accuracy"),
    (
        "gain",
        "arch.\ngain",
        points,
        "arch. gain: by how much a silo's architecture beats the others' on the silo's data (g), mean over silos",
    ),
    ("parameters", "params", si, "params: mean over the silos' models"),
    ("macs", "MACs", si, "MACs: of one forward pass of one sample, mean over the silos' models"),
    ("architectures", "different\narch.", count, ""),
    ("peak_memory_bytes", "peak\nmemory", size, "peak memory: the largest of any silo in training"),
    ("bytes_per_round", "bytes per\nround", size, "bytes per round: both ways, per silo"),
    ("wall_s", "wall\ntime", seconds, "wall time: all training rounds, on the machine that computed them"),
)
"""The name of the value, its head, its format, and its explanation below the table."""


def silo_blocks(tables: Tables, *, wide: bool) -> list[Block]:
    """The table of all settings, in two halves for a terminal; with `wide` one table, plus gains and silos per run."""
    of_silos = silos(tables)
    summaries = silo_summaries(of_silos)
    if wide:
        runs = [only(of_silos, [p.run_id]) for p in of_silos.paths]
        blocks = [summary_block(summaries), *map(gains_block, runs), *map(run_block, runs)]
    else:
        blocks = [summary_block(summaries, "Silos", costs=False), summary_block(summaries, "Costs", accuracy=False)]
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
            *(with_interval(summary.values[key], write, summary.setting.num_seeds) for key, _, write, _ in columns),
        )
        for summary, dataset in zip(summaries, datasets, strict=True)
    )
    heads = (*labels, *(head for _, head, _, _ in columns))
    return Block(title, _text(summaries, {key for key, _, _, _ in columns}), heads, rows, labels=len(labels))


def _text(summaries: Sequence[SiloSummary], shown: set[str]) -> tuple[str, ...]:
    text = [over_settings([s.setting for s in summaries])]
    if "accuracy" in shown:
        shared = [s.method for s in summaries if s.model != PERSONAL and s.values["accuracy"] is not None]
        which = f" ({', '.join(dict.fromkeys(shared))}: the shared one)" if shared else ""
        text.append(
            f"Accuracy in % of every silo's model{which} on its own test data; all silos have the same weight; std is "
            "the population standard deviation over silos (divisor n)."
        )
    explained = "; ".join(note for key, _, _, note in COLUMNS if note and key in shown)
    return (*text, sentence(explained)) if explained else tuple(text)


def run_block(run: Tables) -> Block:
    """One row per silo of one run."""
    rows, run_id = per_silo(run), run.paths[0].run_id
    config = configuration(run, run_id)
    in_words = decoder(config)
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
    cells = []
    for row in rows.to_dict(orient="records"):
        name = ABSENT if is_absent(row["architecture"]) else in_words(str(row["architecture"]))
        values = (ABSENT if is_absent(row[key]) else write(row[key]) for key, _, write in columns)
        cells.append((str(row["client_id"]), name, *values))
    text = ["Every silo's model on its own test data."]
    if any("c_k" in row[1] for row in cells):
        several = "that are undecided" if config["method"].get("search") else "that are used together"
        text.append(
            "Each node of a cell is the sum of operators of its inputs: c_k-2 and c_k-1 are the outputs of the two "
            f"preceding cells, numbers are nodes, bars separate operators {several}, and pruned edges are left out."
        )
    heads = ("silo", "architecture", *(head for _, head, _ in columns))
    return Block(f"Silos of run {run_id}", tuple(text), heads, tuple(cells))


BEST_EPOCH = (
    "As in the paper, the accuracy of a fine-tuned model is that of its best epoch on the test data, which is too "
    "high. The accuracy after the last epoch is in the table of evaluations."
)


def compared(run: Tables) -> str:
    """Whose accuracies a run's p_ij are, which `method.gains` decides."""
    gains = configuration(run, run.paths[0].run_id).get("method", {}).get("gains", {})
    if gains.get("start", "shared") == "shared":
        models = "with its own and with the other silos' architectures, trained on its data from the shared weights"
    elif gains.get("tune_own", True):
        models = "of its own and of the other silos' final models, all fine-tuned on its data"
    else:
        models = "of its own final model as it is, and of the other silos' final models, fine-tuned on its data"
    text = f"Test accuracy in % on a silo's data, {models}."
    return f"{text} {BEST_EPOCH}" if best_on_test(run) else text


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
    text = (compared(run), "The gain is the silo's own accuracy minus the others' mean, in percentage points.")
    heads = ("silo", "own", "others', mean", "others', best", "others", "gain")
    return Block(f"Personalisation gains of run {run.paths[0].run_id}", text, heads, tuple(rows), labels=1)


COLOURS = (*SERIES, GREY)
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
    drawn = looks((s.name for s in settings), COLOURS, WITHOUT_STAR)
    figure = new_figure((8.6, 1.7 + 0.62 * len(shown)))
    axes = figure.subplots()
    for at, setting in enumerate(shown):
        _silo_dots(axes, at, setting.rows(known), drawn[setting.name][0])
    quiet(axes, xlabel="accuracy on the silo's own test data (%)")
    axes.set_yticks(range(len(shown)), [_wrapped(s.name) for s in shown])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.grid(False, axis="y")
    handles = [
        legend_mark("o", 6, "silo's model", face=GREY, edge="none"),
        legend_mark("<", 7, "worst silo"),
        legend_mark("|", 11, "mean", edge=INK, markeredgewidth=2.2),
    ]
    if known["global_accuracy"].notna().any():
        handles.append(legend_mark("o", 5, "shared model on the silo's data", edge=GREY))
    legend_below(figure, handles, 4)
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


def curves_figure(curves: pd.DataFrame, phases: Sequence[Phases], settings: Sequence[Setting]) -> Figure | None:
    """Validation accuracy (left) and training loss (right) against rounds, a line per setting; None without values.

    `curves` comes from `analysis.silos.curves`. Bands show the standard deviation over silos for one seed, or the range
    from the minimum to the maximum over several seeds. The phases of runs with a search are shaded. Source: SPIDER,
    Fig. 6.
    """
    loss = curves[(curves["series"] == "train") & curves["mean_loss"].notna()]
    validation = curves[(curves["series"] == "validation") & curves["mean"].notna()]
    shown = [s for s in settings if len(s.rows(curves))]
    panels = [
        (validation, "mean", "Validation accuracy", "mean over silos (%)"),
        (loss, "mean_loss", "Local training loss", "mean over silos (cross-entropy)"),
    ]
    panels = [panel for panel in panels if len(panel[0])]
    if not panels:
        return None
    drawn, spans = looks((s.name for s in settings), COLOURS, WITHOUT_STAR), _spans(phases, shown)
    # Above the axes stand the names of the phases, or a bar per setting.
    pad = 6.0 if not spans else 20.0 if len(set(spans.values())) == 1 else 9.0 + 6.5 * len(spans)
    width = 1.6 + 4.6 * len(panels)
    height = 3.9 + legend_height_in([setting_label(s) for s in shown], width)
    figure = new_figure((width, height))
    row = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (rows, value, title, label) in zip(row, panels, strict=True):
        for setting in shown:
            _curve(axes, setting.rows(rows), value, drawn[setting.name])
        quiet(axes, xlabel="finished rounds", ylabel=label)
        heading(axes, title, pad=pad)
        whole_numbers(axes)
        axes.set_xlim(0, max(1, int(curves["rounds_done"].max())))
        _mark_phases(axes, spans, {name: colour for name, (colour, _) in drawn.items()})
    legend_below(figure, setting_handles(shown, drawn, width, 4.5))
    return figure


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
    """Start and end of each phase for every setting with a search, as means over its seeds."""
    ends = pd.DataFrame(
        [(p.run_id, *(end for _, end in spans_of(p))) for p in phases], columns=["run_id", "first", "second", "third"]
    )
    spans: dict[str, Spans] = {}
    for setting in settings:
        if len(rows := setting.rows(ends)):
            first, second, third = by_seed(rows, ["first", "second", "third"]).mean()
            spans[setting.name] = ((0.0, first), (first, second), (second, third))
    return spans


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
                # A narrow phase has room only for its number.
                text = name if (end - begin) / whole >= 0.014 * len(name) else name.split(":")[0]
                above(axes, text, (begin + end) / 2)


def gains_figure(matrix: pd.DataFrame) -> Figure | None:
    """p_ij of one run in per cent (left), and p_ii - p_ij with g_i as the last column (right); None without rows.

    `matrix` comes from `analysis.silos.p_matrix`. Source: SPIDER, Fig. 3.
    """
    if matrix.empty:
        return None
    from matplotlib.patches import Rectangle

    square = as_square(matrix) * 100
    square = square.dropna(how="all")
    rows, silo_ids = list(square.index), list(square.columns)
    gain = personalisation_gains(matrix).set_index("client_id")["gain"].reindex(rows) * 100
    values = square.to_numpy(dtype=float)
    with_own = np.array([square.loc[i, i] for i in rows], dtype=float)
    # p_ii - p_ii is 0 by definition, so the diagonal stays white.
    differences = with_own[:, None] - values
    differences[[[i == j for j in silo_ids] for i in rows]] = np.nan
    both = np.column_stack([differences, gain.to_numpy(dtype=float)])
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    reach = max(float(np.nanmax(np.abs(both))) if np.isfinite(both).any() else 1.0, 1e-9)
    width = 0.62 * len(silo_ids)
    figure = new_figure((3.2 + 2 * width + 0.7, max(2.9, 1.5 + 0.5 * len(rows))))
    left, right = figure.subplots(1, 2, width_ratios=(len(silo_ids), len(silo_ids) + 1.2))
    columns = [str(j) for j in silo_ids]
    _heat(left, values, "Blues", (low, high) if high > low else (low - 1, high + 1))
    _frame(left, "Accuracy $p_{ij}$ (%)", rows, columns)
    for at, silo in enumerate(rows):
        corner = (silo_ids.index(silo) - 0.5, at - 0.5)
        left.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=INK, linewidth=1.6))
    _heat(right, both, "RdBu", (-reach, reach), signed=True)
    _frame(right, "Gain $p_{ii} - p_{ij}$ (points)", rows, [*columns, "$g_i$"])
    right.axvline(len(silo_ids) - 0.5, color=INK, linewidth=1.6)
    right.set_xlabel("architecture of silo j; last: mean gain", fontsize=10, color=INK)
    return figure


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


CAPTIONS = {
    "silos": (
        "Accuracy of the silos",
        "Each dot is a silo's model on the silo's own test data; the line is their mean, the triangle the worst. "
        "Rings, where there are any, are the shared model before personalisation. Silos of all runs of a setting are "
        "drawn together.",
    ),
    "phases": (
        "Curves and phases",
        "Validation accuracy of the silos' models and the loss on their training data, means over silos. Bands: for "
        "one run the standard deviation over silos, for several runs from the minimum to the maximum. Phases: before "
        "the search, the search until the last silo has decided every edge, and after it; if settings differ in these, "
        "bars in the settings' colours above the axes span only their searches. A silo that has added its validation "
        "data to its training data is no longer scored on it.",
    ),
    "gains": (
        "Personalisation gains",
        "Left: on the data of silo i with the architecture of silo j; framed: with its own. Right: by how many "
        "percentage points its own is better; last column: the mean gain of each silo. White: not measured, or its "
        "own.",
    ),
}


def silo_pictures(tables: Tables) -> Iterator[Picture]:
    """The figures of all cross-silo runs, then each run's gains and cells; none if there is no such run."""
    of_silos = silos(tables)
    if not of_silos.paths:
        return
    measured, trained, searched = per_silo(of_silos), curves(of_silos), phases(of_silos)
    for sheet in sheets(silo_settings(tables)):
        figures = {
            "silos": silo_accuracy_figure(measured, sheet.settings),
            "phases": curves_figure(trained, searched, sheet.settings),
        }
        for name, figure in figures.items():
            if figure is not None:
                title, caption = CAPTIONS[name]
                yield sheet.labelled(Picture(name, title, caption_of(sheet.settings, caption), figure))
    for paths in of_silos.paths:
        for picture in _of_run(only(of_silos, [paths.run_id])):
            yield picture.named(paths.run_id) if len(of_silos.paths) > 1 else picture


def _of_run(run: Tables) -> Iterator[Picture]:
    """The run's gains and the cells of its silos, reduction cells first as in the paper (SPIDER, Fig. 2)."""
    from fedloom.experiments.report.cells import CAPTION, cell_pictures

    figure = gains_figure(p_matrix(run))
    if figure is not None:
        title, caption = CAPTIONS["gains"]
        yield Picture("gains", title, f"{compared(run)} {caption}", figure)
    for cell_type, cells, left_out in cell_pictures(run):
        more = f" {left_out} more different cells are not drawn." if left_out else ""
        yield Picture(f"{cell_type}-cells", f"{cell_type.capitalize()} cells", f"{CAPTION}{more}", cells)


# -- what a run does not have ----------------------------------------------------------------------------------------

MOST_PAIRS = 6


def missing_of_silos(tables: Tables, run_id: str, state: str) -> list[str]:
    """Missing parts of a cross-silo run: scores or training of silos, gains, or decisions of its search."""
    run, config = only(tables, [run_id]), configuration(tables, run_id)
    num_silos, gains = int(config["data"]["num_clients"]), config["method"].get("gains", {})
    rows = run.evaluations
    rows = rows[(rows["split"] == "test") & (rows["metric"] == METRIC)]
    yet = "" if state == "done" else " yet"

    def named(silo_ids: Sequence[int]) -> str:
        if len(silo_ids) == num_silos:
            return "every silo"
        return f"silo{'' if len(silo_ids) == 1 else 's'} {', '.join(map(str, silo_ids))}"

    lines: list[str] = []
    if (rows["stage"] == EVALUATION).any():
        lines += _gaps_of_scores(run, named, num_silos)
    else:
        lines.append(f"nothing was measured on test data{yet}: no accuracy of silos")
    if gains.get("epochs", 0):
        matrix, covered = p_matrix(run), num_silos if gains.get("clients") is None else int(gains["clients"])
        # A silo without test samples has no p_ij.
        untested = rows[rows["stage"].isin([GAINS, EVALUATION]) & rows["samples"].eq(0)]["client_id"].dropna()
        measured = set(zip(matrix["client_id"].astype(int), matrix["silo"].astype(int), strict=True))
        pairs = [pair for pair in product(range(covered), repeat=2) if pair[0] not in set(untested.astype(int))]
        unmeasured = [pair for pair in pairs if pair not in measured]
        if matrix.empty:
            lines.append(f"personalisation gains were not measured{yet}")
        elif state != "running" and unmeasured:
            examples = [f"({i}, {j})" for i, j in unmeasured[:MOST_PAIRS]]
            examples += ["..."] if len(unmeasured) > MOST_PAIRS else []
            which, share = named(sorted({i for i, _ in unmeasured})), f"{len(unmeasured)} of {len(pairs)}"
            lines.append(
                f"personalisation gains of {which} are incomplete: {share} p_ij were not measured, (i, j) = "
                f"{', '.join(examples)}"
            )
    if state == "done" and config["method"].get("search") and (left := undecided_silos(tables, run_id)):
        lines.append(f"the search ended with undecided edges in {named(left)}")
    return lines


def _gaps_of_scores(run: Tables, named: Callable[[Sequence[int]], str], num_silos: int) -> Iterator[str]:
    """Sentences on silos without a score, and on silos with a score that were never trained.

    Silos without test samples have no score; a round does not count for a silo that failed, dropped out or was late.
    """
    scores, trained, run_id = per_silo(run), training(run.clients), run.paths[0].run_id
    scored = set(scores.loc[scores["accuracy"].notna() | scores["samples"].eq(0), "client_id"])
    unscored = [silo for silo in range(num_silos) if silo not in scored]
    if unscored:
        yield f"no accuracy on test data of {named(unscored)}: mean, std and worst are over the others"
    took_part_once = set(trained.loc[took_part(trained), "client_id"].dropna())
    untrained = [silo for silo in range(num_silos) if silo not in took_part_once and silo in scored]
    if len(trained) and untrained:
        model = "the shared model has learned nothing from the data there"
        if traits_of(run, run_id).get("own") == "model":
            # Tensors that no silo sends, such as FedPer's personal layers, are as the server initialised them.
            model = "the personal score there is that of the shared model, with initial values for what is never shared"
        elif traits_of(run, run_id).get("own") == "cells":
            model = "the personal score there is that of the shared base with cells that were never trained"
        selected = set(trained["client_id"].dropna())
        lost = [silo for silo in untrained if silo in selected]
        if lost:
            yield f"no training round of {named(lost)} counted (failed, dropped or late every time): {model}"
        if never := [silo for silo in untrained if silo not in selected]:
            yield f"{named(never)} never took part in a training round (not selected): {model}"
