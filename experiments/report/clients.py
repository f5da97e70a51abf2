"""The section of clients: fairness, the accuracy of every client, and clients that did not finish."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedloom.experiments.analysis.clients import failures, fairness
from fedloom.experiments.analysis.seeds import SEEDS
from fedloom.experiments.analysis.settings import Setting
from fedloom.experiments.analysis.tables import ALL_TIERS, Tables, natural, shown_models
from fedloom.experiments.analysis.tiers import PERPLEXITY
from fedloom.experiments.report.content import Block, Picture
from fedloom.experiments.report.drawing import (
    LEGEND,
    legend_line,
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
    percent,
    setting_head,
    stage_name,
    two_digits,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch


def fairness_blocks(tables: Tables, settings: Sequence[Setting]) -> list[Block]:
    """The distribution of accuracy, of texts that of perplexity, over clients (FedorAS, Tab. 7)."""
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
        f"{what} of each model on every client's own test data; every client has the same weight. The standard "
        "deviation is that of the clients (divided by their number). Clients without test samples are left out and "
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
"""Maximum number of dots per tier and model, since more would overlap to a dark bar."""

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
        axes.set_ylim(max(-4.0, 100 * counted["value"].min() - 8), 104)
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
        over_runs = "The clients of all runs are shown together."
        text = caption_of(settings, caption, over_runs, panels=PANELS)
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
    worst: dict[str, Any] = {"color": "none", "markerfacecolor": "white", "markeredgecolor": "black"}
    handles.append(legend_line(marker="v", markersize=7, label="worst client", **worst))
    handles.append(
        legend_patch(facecolor="#DDDDDD", label="middle half; line: median; whiskers: 5th to 95th percentile")
    )
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), columns), **LEGEND)
