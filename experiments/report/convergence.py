"""The section of convergence: loss and accuracy against rounds."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from fedloom.experiments.analysis.seeds import SEEDS, spread
from fedloom.experiments.analysis.settings import Setting
from fedloom.experiments.analysis.tables import MODELS
from fedloom.experiments.analysis.tiers import PERPLEXITY, perplexity_of
from fedloom.experiments.report.content import Picture
from fedloom.experiments.report.drawing import (
    DASHED,
    GREY,
    INK,
    LEGEND,
    legend_line,
    logarithmic,
    multiples,
    quiet,
    same_limits,
    tier_colours,
    tier_markers,
    tiers_in_order,
    whole_numbers,
)
from fedloom.experiments.report.wording import PANELS, caption_of, stage_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

KINDS = ("supernet", *MODELS[1:])

LONGEST_SHORT_NAME = 10
"""Length of tier names up to which the legend has seven columns; labels of subnets are longer."""

SIMILAR = 3.0
"""Stages share an axis if none of them fills less than one part in so many of it."""

VALUES = {"metric": "accuracy (%)", "loss": "loss (cross-entropy)", "perplexity": "perplexity"}
"""The values to draw and the labels of their axes."""


def convergence_figure(convergence: pd.DataFrame, settings: Sequence[Setting], values: Sequence[str]) -> Figure | None:
    """Some of `VALUES` against rounds: a row per value, a column per stage, a colour per tier; None without rounds.

    Several settings are stacked with the same axes. Stages have the same range where that flattens none of them:
    fine-tuning moves little where training from fresh weights moves a lot. For several seeds the line is their mean and
    the band reaches from the minimum to the maximum.
    """
    if "perplexity" in values:
        convergence = convergence.assign(perplexity=convergence["loss"].map(perplexity_of, na_action="ignore"))
    shown = [s for s in settings if len(s.rows(convergence))]
    if not shown:
        return None
    found = dict.fromkeys(kind for s in shown for kind in s.rows(convergence)["kind"])
    kinds = [k for k in KINDS if k in found] + [k for k in found if k not in KINDS]
    tiers = tiers_in_order(convergence["tier"])
    width = 1.0 + 3.4 * max(len(kinds), 2)
    figure, parts = multiples(shown, (width, 0.4 + 2.9 * len(values)), (width, 0.3 + 2.5 * len(values)))
    grids = [_panels(part, s.rows(convergence), kinds, tiers, values) for part, s in zip(parts, shown, strict=True)]
    _share_ranges(grids)
    _convergence_legend(figure, tiers, convergence)
    return figure


CAPTION = (
    "Loss and accuracy against finished rounds. Solid: what the round's clients report on their own training data "
    "during training. Dashed: the server's validation data after that many rounds; for the supernet, the mean over its "
    "evaluated paths. Fine-tuning starts from the supernet's weights at round 0."
)


def convergence_pictures(
    convergence: pd.DataFrame, settings: Sequence[Setting], texts: Collection[str]
) -> Iterator[Picture]:
    """The figures of an experiment: one of both values for a single setting, else one of each to ease comparison.

    `texts` are the runs that are measured by perplexity.
    """
    loss = PERPLEXITY if all(run_id in texts for s in settings for run_id in s.run_ids) else "loss"
    title = "Convergence per stage"
    figures = {"convergence": (f"{title}: accuracy", ["metric"]), "convergence-loss": (f"{title}: loss", [loss])}
    if settings[0].is_alone:
        figures = {"convergence": (title, [loss, "metric"])}
    over_runs = "Lines are means over the runs, bands reach from the minimum to the maximum."
    for name, (title, values) in figures.items():
        figure = convergence_figure(convergence, settings, values)
        if figure is not None:
            yield Picture(name, title, caption_of(settings, CAPTION, over_runs, panels=PANELS), figure)


def _panels(
    part: Figure | SubFigure, rows: pd.DataFrame, kinds: Sequence[str], tiers: Sequence[str], values: Sequence[str]
) -> list[list[Axes]]:
    """The panels of one setting, a row per value and a column per kind of stage; empty for stages it does not have."""
    grid = part.subplots(len(values), len(kinds), sharex="col", squeeze=False)
    own = [kind for kind in kinds if rows["kind"].eq(kind).any()]
    for column, kind in enumerate(kinds):
        for line, value in enumerate(values):
            axes = grid[line][column]
            if kind not in own:
                axes.set_axis_off()
                continue
            _curves(axes, rows[rows["kind"] == kind], value, tiers, 100.0 if value == "metric" else 1.0)
            title, xlabel = stage_name(kind) if line == 0 else "", "finished rounds" if line == len(values) - 1 else ""
            quiet(axes, title=title, xlabel=xlabel, ylabel=VALUES[value] if kind == own[0] else "")
            whole_numbers(axes)
            if value == "perplexity":
                logarithmic(axes)
    return [list(line) for line in grid]


def _share_ranges(grids: Sequence[Sequence[Sequence[Axes]]]) -> None:
    """Gives settings the same ranges, and stages as well if their ranges are similar."""
    panels = np.array(grids)  # (settings, values, stages)
    drawn = np.array([[[axes.axison for axes in row] for row in grid] for grid in grids])
    for column in range(panels.shape[2]):
        same_limits(panels[:, :, column][drawn[:, :, column]].tolist(), x=True)
    for row in range(panels.shape[1]):
        for column in range(panels.shape[2]):
            same_limits(panels[:, row, column][drawn[:, row, column]].tolist(), y=True)
        if same_limits(panels[:, row][drawn[:, row]].tolist(), y=True, most=SIMILAR):
            for line, is_drawn in zip(panels[:, row], drawn[:, row], strict=True):
                for axes in line[is_drawn][1:]:
                    axes.tick_params(labelleft=False)


def _curves(axes: Axes, rows: pd.DataFrame, value: str, tiers: Sequence[str], scale: float) -> None:
    colours, markers = tier_colours(tiers), tier_markers(tiers)
    alone = not (rows["series"].eq("validation") & rows[value].notna()).any()
    for tier in ("", *tiers):
        colour = colours.get(tier, INK)
        for series in ("train", "validation"):
            of = rows[(rows["tier"] == tier) & (rows["series"] == series) & rows[value].notna()]
            if of.empty:
                continue
            over_seeds = spread(of, ["rounds_done"], value) * scale
            x = over_seeds.index.to_numpy(dtype=float)
            # Only one series has markers and bands, since those of both would overlap.
            leading = series == "validation" or alone
            style = {"linewidth": 1.1, "alpha": 0.75} if series == "train" else {"linewidth": 1.5, "linestyle": DASHED}
            marker, every = (markers.get(tier, "o") if leading else "", max(1, len(x) // 12))
            y = over_seeds["mean"].to_numpy()
            axes.plot(x, y, color=colour, marker=marker, markersize=4.5, markevery=every, **style)
            if of[SEEDS].nunique() > 1 and leading:
                low, high = over_seeds["min"].to_numpy(), over_seeds["max"].to_numpy()
                axes.fill_between(x, low, high, color=colour, alpha=0.1, linewidth=0)


def _convergence_legend(figure: Figure, tiers: Sequence[str], convergence: pd.DataFrame) -> None:
    colours, markers = tier_colours(tiers), tier_markers(tiers)
    handles = []
    if (convergence["tier"] == "").any():
        handles.append(legend_line(color=INK, marker="o", markersize=4.5, label="supernet"))
    handles += [legend_line(color=colours[t], marker=markers[t], markersize=4.5, label=t) for t in tiers]
    handles.append(legend_line(color=GREY, linewidth=1.1, label="training clients, on own batches"))
    if (convergence["series"] == "validation").any():
        handles.append(legend_line(color=GREY, linestyle=DASHED, label="server's validation data"))
    columns = 7 if all(len(t) <= LONGEST_SHORT_NAME for t in tiers) else 3
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), columns), **LEGEND)
