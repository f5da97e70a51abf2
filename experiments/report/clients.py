"""The section of clients, and of final evaluations beyond accuracy: fairness, failures, classes, and texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedloom.experiments.analysis.clients import failures, fairness, of_final_models, paragraphs, per_class
from fedloom.experiments.analysis.settings import SEEDS, Setting
from fedloom.experiments.analysis.tables import ALL_TIERS, Tables, natural, shown_models
from fedloom.experiments.analysis.tiers import PERPLEXITY
from fedloom.experiments.report.content import Block, Picture
from fedloom.experiments.report.drawing import (
    BLUE,
    INK,
    grid_of,
    heading,
    legend_below,
    legend_mark,
    legend_patch,
    model_colours,
    multiples,
    quiet,
    tiers_in_order,
)
from fedloom.experiments.report.wording import (
    ABSENT,
    PANELS,
    Write,
    caption_of,
    count,
    mean_over_seeds,
    model_name,
    over_runs,
    percent,
    sentence,
    setting_head,
    stage_name,
    two_digits,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch


def fairness_blocks(tables: Tables, settings: Sequence[Setting]) -> list[Block]:
    """The distribution over clients of accuracy, or of perplexity for text data (FedorAS, Tab. 7)."""
    by_perplexity = fairness(tables, PERPLEXITY)
    texts = set(by_perplexity["run_id"])
    images = [s for s in settings if not texts.intersection(s.run_ids)]
    rest = [s for s in settings if texts.intersection(s.run_ids)]
    accuracy, perplexity = ("Accuracy in %", percent), ("Perplexity", two_digits)
    blocks = [_block(fairness(tables), images, *accuracy, setting_head(settings))] if images or not rest else []
    return [*blocks, *([_block(by_perplexity, rest, *perplexity, setting_head(settings))] if rest else [])]


def _block(frame: pd.DataFrame, settings: Sequence[Setting], what: str, write: Write, head: str) -> Block:
    """One row per setting, model and tier."""
    models = shown_models(list(frame["model"]))
    rows = []
    for setting in settings:
        groups = [(str(m), str(t), group) for (m, t), group in setting.rows(frame).groupby(["model", "tier"])]
        groups.sort(key=lambda g: (models.index(g[0]), g[1] == ALL_TIERS, natural(g[1])))
        for model, tier, group in groups:
            counts = [mean_over_seeds(group, c, count) for c in ("clients", "excluded")]
            values = [mean_over_seeds(group, c, write) for c in ("mean", "std", "worst")]
            rows.append((setting.name, model_name(model), tier, *counts, *values))
    text = (
        f"{what} of each model on every client's own test data; every client has the same weight. std is the "
        "population standard deviation over clients (divisor n). Clients without test samples are left out and "
        "counted in a column of their own.",
    )
    heads = (head, "model", "tier", "clients", "left out", "mean", "std", "worst")
    title = "Fairness over clients" if what.startswith("Accuracy") else "Fairness over clients: perplexity"
    return Block(title, text, heads, tuple(rows), labels=3)


MOST_CAUSES = 30


def failures_block(tables: Tables, settings: Sequence[Setting] = ()) -> Block:
    """The client rows whose status is not ok, by cause; for several settings also their number per setting."""
    frame = failures(tables)
    rows = []
    for row in frame.head(MOST_CAUSES).to_dict(orient="records"):
        first = f"client {row['client_id']}, {row['stage']}, round {row['round'] + 1}"
        cells = (row["run_id"], stage_name(row["kind"]), row["status"], row["example"] or ABSENT, first)
        rows.append((*(str(c) for c in cells), str(row["count"])))
    of = [f"{_failed(s.rows(frame))} of {len(s.rows(tables.clients))} ({s.name})" for s in settings]
    each = f": {', '.join(of)}" if len(of) > 1 else ""
    text = [f"{_failed(frame)} of {len(tables.clients)} client rows are not ok{each}."]
    if len(frame) > MOST_CAUSES:
        text.append(f"The {MOST_CAUSES} most frequent of {len(frame)} causes are shown.")
    heads = ("run", "stage", "status", "cause (of the first)", "first", "rows")
    return Block("Clients that did not finish", tuple(text), heads, tuple(rows), labels=5)


def _failed(causes: pd.DataFrame) -> int:
    return int(causes["count"].sum())


MOST_DOTS = 400
"""Maximum number of dots per tier and model, since more would merge into a dark bar."""

WIDE_IN = 10.0
"""Figure width in inches from which the legend fits on one line."""

_GOLDEN = 0.618034


def clients_figure(clients: pd.DataFrame, settings: Sequence[Setting]) -> Figure | None:
    """The test accuracy of every client that counts, per tier and model: dots, a box, and a mark for the worst client.

    `clients` comes from `client_metrics`. Several settings are stacked with the same axes. The clients of all seeds are
    drawn together; runs that repeat a seed are averaged. None if no client was measured.
    """
    counted = clients[clients["counts"]]
    shown = [s for s in settings if len(s.rows(counted))]
    if not shown:
        return None
    tiers, models = tiers_in_order(counted["tier"]), shown_models(list(counted["model"]))
    width = min(max(6.4, 1.2 + 0.62 * len(tiers) * (len(models) + 0.8)), 13.0)
    figure, parts = multiples(shown, (width, 4.6), (width, 3.6))
    for part, setting in zip(parts, shown, strict=True):
        axes = part.subplots()
        _strips(axes, setting.rows(counted), tiers, models)
        low, high = 100 * counted["value"].min(), 100 * counted["value"].max()
        axes.set_ylim(max(-4.0, low - 8) if low >= 0 else low - 8, 104 if high <= 100 else high + 8)
    _clients_legend(figure, models, 5 if width >= WIDE_IN else 2)
    return figure


def clients_pictures(clients: pd.DataFrame, settings: Sequence[Setting]) -> Iterator[Picture]:
    """The figure of an experiment; see `clients_figure`."""
    figure = clients_figure(clients, settings)
    if figure is not None:
        caption = (
            "Each dot is a client's accuracy on its own test data with its tier's model; the triangle marks the worst "
            "client of the tier. Clients without test samples are left out."
        )
        together = "The clients of all runs are shown together."
        text = caption_of(settings, caption, together, panels=PANELS)
        yield Picture("clients", "Accuracy per client", text, figure)


def _strips(axes: Axes, counted: pd.DataFrame, tiers: Sequence[str], models: Sequence[str]) -> None:
    """Draws the clients of one setting: a group per tier, a strip per model."""
    colours = model_colours(models)
    per_seed = counted.groupby(["tier", "model", SEEDS, "client_id"])["value"].mean()
    width = 0.8 / len(models)
    for (tier, model), values in per_seed.groupby(["tier", "model"]):
        at = tiers.index(str(tier)) + (models.index(str(model)) - (len(models) - 1) / 2) * width
        _strip(axes, at, np.sort(values.to_numpy(dtype=float)) * 100, 0.8 * width, colours[str(model)])
    label = "accuracy on the client's own test data (%)"
    quiet(axes, ylabel=label)
    axes.set_xticks(range(len(tiers)), tiers)
    axes.set_xlim(-0.6, len(tiers) - 0.4)
    axes.grid(False, axis="x")


def _strip(axes: Axes, at: float, values: NDArray[np.float64], width: float, colour: str) -> None:
    """Draws a box (quartiles, median, whiskers to the 5th and 95th percentile) behind the dots of sorted values."""
    box = {"facecolor": colour, "alpha": 0.16, "edgecolor": "none"}
    line = {"color": colour, "linewidth": 1.0}
    axes.boxplot(
        values,
        positions=[at],
        widths=width,
        whis=(5, 95),
        showfliers=False,
        showcaps=False,
        patch_artist=True,
        manage_ticks=False,
        boxprops=box,
        medianprops={"color": colour, "linewidth": 2.4},
        whiskerprops=line,
    )
    # The first value is the worst client, which has its own mark.
    shown = values[np.unique(np.linspace(1, len(values) - 1, min(len(values) - 1, MOST_DOTS)).astype(int))]
    # Multiples of the golden ratio spread the dots evenly and deterministically in x.
    aside = (np.arange(len(shown)) * _GOLDEN % 1.0 - 0.5) * width * 0.8
    axes.scatter(at + aside, shown, s=9, color=colour, alpha=0.55, linewidths=0, zorder=3)
    axes.scatter([at], values[:1], s=46, marker="v", color=colour, edgecolors="black", linewidths=0.9, zorder=4)


def _clients_legend(figure: Figure, models: Sequence[str], columns: int) -> None:
    colours = model_colours(models)
    handles: list[Line2D | Patch] = [legend_patch(color=colours[m], label=model_name(m)) for m in models]
    handles.append(legend_mark("v", 7, "worst client"))
    handles.append(
        legend_patch(facecolor="#DDDDDD", label="middle half; line: median; whiskers: 5th to 95th percentile")
    )
    legend_below(figure, handles, columns)


# -- classes and texts ------------------------------------------------------------------------------------------------

MOST_COLUMNS = 10
"""Maximum number of columns of tiers or targets; a wider table would not fit a page."""

MOST_PARAGRAPHS = 12


def class_blocks(tables: Tables, settings: Sequence[Setting]) -> list[Block]:
    """One table per setting: the accuracy of its method's final models on every class, a column per tier."""
    frame = per_class(tables)
    return [block for setting in settings if (block := _class_block(of_final_models(setting.rows(frame)), setting))]


def _class_block(rows: pd.DataFrame, setting: Setting) -> Block | None:
    tiers = sorted(set(rows["tier"].astype(str)), key=natural)
    if rows.empty or len(tiers) > MOST_COLUMNS:
        return None
    cells = []
    for name in dict.fromkeys(rows["class_name"]):
        of_class = rows[rows["class_name"] == name]
        by_tier = {tier: of_class[of_class["tier"] == tier] for tier in tiers}
        recalls = (
            mean_over_seeds(r, "recall", percent, setting.num_seeds) if len(r) else ABSENT for r in by_tier.values()
        )
        cells.append((str(name), mean_over_seeds(by_tier[of_class["tier"].iloc[0]], "samples", count), *recalls))
    model = model_name(str(rows["model"].iloc[0]))
    text = (
        f"Accuracy in % on the test samples of each class, {model}; {over_runs(setting)}.",
        "Precision and F1: `analysis.per_class`.",
    )
    return Block(f"{setting.name}: classes", text, ("class", "samples", *tiers), tuple(cells), labels=1)


def paragraph_block(tables: Tables, settings: Sequence[Setting]) -> Block:
    """A paragraph by each tier's model of each setting's first run, all continuing the same beginning."""
    frame, rows = paragraphs(tables), []
    for setting in settings:
        of_run = of_final_models(frame[frame["run_id"] == setting.run_ids[0]])
        for _, row in of_run.sort_values("tier", key=lambda names: names.map(natural), kind="stable").iterrows():
            written = " ".join(f"[{row['given']}]{row['written']}".split())
            rows.append((setting.name, str(row["tier"]), written, f"{row['loss']:.2f}"))
    text = (
        "What the models write after the beginning of a test text (in brackets), sampled token by token.",
        sentence("loss: the model's own mean loss on the tokens that it wrote, in nats per token"),
    )
    heads = ("setting", "tier", "text", "loss")
    return Block("Written by the models", text, heads, tuple(rows[:MOST_PARAGRAPHS]), labels=3)


MOST_NUMBERS = 12
"""Maximum number of classes for which the shares are written into the cells."""

MOST_PANELS = 8


def confusion_figure(confusions: pd.DataFrame, settings: Sequence[Setting]) -> Figure | None:
    """Confusion matrices per tier: the share of each class (rows) that was predicted as each class (columns).

    Shares are means over seeds. None without any confusions. `confusions` comes from `analysis.confusions`; the models
    are the method's final ones.
    """
    parts_of = {s.name: of_final_models(s.rows(confusions)) for s in settings}
    shown = [s for s in settings if 0 < parts_of[s.name]["tier"].nunique() <= MOST_PANELS]
    if not shown:
        return None
    panels = max(parts_of[s.name]["tier"].nunique() for s in shown)
    classes = max(parts_of[s.name]["class_name"].nunique() for s in shown)
    across, side = min(panels, 2), max(4.4, 0.3 * classes + 1.6)
    size = (across * side, -(-panels // across) * side)
    figure, parts = multiples(shown, size, size)
    for part, setting in zip(parts, shown, strict=True):
        _panels(part, parts_of[setting.name], across)
    return figure


def confusion_pictures(confusions: pd.DataFrame, settings: Sequence[Setting]) -> Iterator[Picture]:
    """The figure of an experiment; see `confusion_figure`."""
    figure = confusion_figure(confusions, settings)
    if figure is not None:
        caption = (
            "Percentage of the test samples of each class (rows) that the model predicts as each class (columns), on "
            "the whole test set and over all runs."
        )
        text = caption_of(settings, caption, panels=PANELS)
        yield Picture("confusion", "Confusion matrix per tier", text, figure)


def _panels(part: Figure | SubFigure, rows: pd.DataFrame, across: int) -> None:
    tiers = tiers_in_order(rows["tier"])
    for axes, tier in zip(grid_of(part, len(tiers), across), tiers, strict=True):
        of_tier = rows[rows["tier"] == tier]
        names = list(dict.fromkeys([*of_tier["class_name"], *of_tier["prediction"]]))
        _matrix(axes, shares(of_tier, names), names, tier)


def shares(rows: pd.DataFrame, names: Sequence[str]) -> NDArray[np.float64]:
    """The share of each class (rows) that was predicted as each class (columns), over all seeds together."""
    counts = rows.pivot_table(index="class_name", columns="prediction", values="count", aggfunc="sum", fill_value=0)
    order = list(names)
    table: NDArray[np.float64] = counts.reindex(index=order, columns=order, fill_value=0).to_numpy(dtype=np.float64)
    of_class: NDArray[np.float64] = np.maximum(table.sum(axis=1, keepdims=True), 1.0)
    return np.asarray(table / of_class)


def _matrix(axes: Axes, table: NDArray[np.float64], names: Sequence[str], tier: str) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    shades = LinearSegmentedColormap.from_list("shades", ["#FFFFFF", BLUE])
    axes.imshow(table, cmap=shades, vmin=0, vmax=1, interpolation="nearest")
    heading(axes, tier)
    labels = [name if len(name) <= 14 else f"{name[:13]}…" for name in names]
    axes.set_xticks(range(len(names)), labels, rotation=90, fontsize=8)
    axes.set_yticks(range(len(names)), labels, fontsize=8)
    axes.set_xlabel("predicted", fontsize=9, color=INK)
    axes.set_ylabel("class", fontsize=9, color=INK)
    if len(names) > MOST_NUMBERS:
        return
    for row, column in zip(*np.nonzero(table >= 0.005), strict=True):
        share = table[row, column]
        colour = "white" if share > 0.55 else INK
        axes.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=7.5, color=colour)
