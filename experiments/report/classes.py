"""The section of classes and texts: accuracy per class, confusion matrices, and paragraphs of language models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedloom.experiments.analysis.clients import of_final_models, paragraphs, per_class
from fedloom.experiments.analysis.settings import Setting
from fedloom.experiments.analysis.tables import Tables, natural
from fedloom.experiments.report.content import Block, Picture
from fedloom.experiments.report.drawing import BLUE, INK, multiples, tiers_in_order
from fedloom.experiments.report.wording import (
    ABSENT,
    PANELS,
    caption_of,
    count,
    mean_over_seeds,
    model_name,
    over_runs,
    percent,
    sentence,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

MOST_COLUMNS = 10
"""Tiers or targets beside each other; a table of more would not fit a page."""

MOST_PARAGRAPHS = 12


def class_blocks(tables: Tables, settings: Sequence[Setting]) -> list[Block]:
    """Per setting, the accuracy of every class with the models that the method ends with, a column per tier."""
    frame = per_class(tables)
    return [block for setting in settings if (block := _class_block(of_final_models(setting.rows(frame)), setting))]


def _class_block(rows: pd.DataFrame, setting: Setting) -> Block | None:
    tiers = sorted(set(rows["tier"].astype(str)), key=natural)
    if rows.empty or len(tiers) > MOST_COLUMNS:
        return None
    found = []
    for name in dict.fromkeys(rows["class_name"]):
        own = rows[rows["class_name"] == name]
        cells = [_recall(own[own["tier"] == tier]) for tier in tiers]
        found.append((str(name), mean_over_seeds(own[own["tier"] == own["tier"].iloc[0]], "samples", count), *cells))
    model = model_name(str(rows["model"].iloc[0]))
    text = (
        f"Accuracy in % on the test samples of each class, {model}; {over_runs(setting)}.",
        "Precision and F1: `analysis.per_class`.",
    )
    return Block(f"{setting.name}: classes", text, ("class", "samples", *tiers), tuple(found), labels=1)


def _recall(rows: pd.DataFrame) -> str:
    return mean_over_seeds(rows, "recall", percent) if len(rows) else ABSENT


def paragraph_block(tables: Tables, settings: Sequence[Setting]) -> Block:
    """A paragraph by every tier's model of every setting's first run: what it goes on with after the same beginning."""
    frame, rows = paragraphs(tables), []
    for setting in settings:
        own = of_final_models(frame[frame["run_id"] == setting.run_ids[0]])
        for _, row in own.sort_values("tier", key=lambda names: names.map(natural), kind="stable").iterrows():
            written = " ".join(f"[{row['given']}]{row['written']}".split())
            rows.append((setting.name, str(row["tier"]), written, f"{row['loss']:.2f}"))
    text = (
        "What the models write after the beginning of a test text, in brackets, drawn token by token.",
        sentence("loss: how surprising what they wrote is to themselves, in nats per token"),
    )
    heads = ("setting", "tier", "text", "loss")
    return Block("Written by the models", text, heads, tuple(rows[:MOST_PARAGRAPHS]), labels=3)


MOST_NUMBERS = 12
"""Classes up to which the shares are written into the cells."""

MOST_PANELS = 8


def confusion_figure(confusions: pd.DataFrame, settings: Sequence[Setting]) -> Figure | None:
    """What share of each class (rows) was taken for each (columns), per tier; means over seeds. None without any.

    `confusions` comes from `analysis.confusions`; the models are those that the method ends with.
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
            "Percentage of the whole test set's samples of each class (rows) that the model predicts as each class "
            "(columns), over all runs."
        )
        text = caption_of(settings, caption, panels=PANELS)
        yield Picture("confusion", "Confusion matrix per tier", text, figure)


def _panels(part: Figure | SubFigure, rows: pd.DataFrame, across: int) -> None:
    tiers = tiers_in_order(rows["tier"])
    grid = part.subplots(-(-len(tiers) // across), across, squeeze=False).ravel()
    for axes, tier in zip(grid, tiers, strict=False):
        own = rows[rows["tier"] == tier]
        names = list(dict.fromkeys([*own["class_name"], *own["prediction"]]))
        _matrix(axes, shares(own, names), names, tier)
    for axes in grid[len(tiers) :]:
        axes.set_axis_off()


def shares(rows: pd.DataFrame, names: Sequence[str]) -> NDArray[np.float64]:
    """The share of each class (rows) that was taken for each (columns), over all seeds together."""
    counts = rows.pivot_table(index="class_name", columns="prediction", values="count", aggfunc="sum", fill_value=0)
    order = list(names)
    table: NDArray[np.float64] = counts.reindex(index=order, columns=order, fill_value=0).to_numpy(dtype=np.float64)
    of_class: NDArray[np.float64] = np.maximum(table.sum(axis=1, keepdims=True), 1.0)
    found: NDArray[np.float64] = table / of_class
    return found


def _matrix(axes: Axes, table: NDArray[np.float64], names: Sequence[str], tier: str) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    shades = LinearSegmentedColormap.from_list("shades", ["#FFFFFF", BLUE])
    axes.imshow(table, cmap=shades, vmin=0, vmax=1, interpolation="nearest")
    axes.set_title(tier, loc="left", fontsize=10.5, fontweight="bold", color=INK)
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
