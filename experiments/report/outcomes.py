"""The section of outcomes: the final models of each setting, and accuracy against cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fedloom.experiments.analysis.settings import by_seed, estimate_by_seed
from fedloom.experiments.analysis.tables import METRIC
from fedloom.experiments.analysis.tiers import front_of
from fedloom.experiments.report.content import Block, Picture
from fedloom.experiments.report.drawing import (
    GREY,
    LEGEND_LINE_IN,
    are_shares,
    legend_below,
    legend_line,
    looks,
    new_figure,
    quiet,
    with_bars,
)
from fedloom.experiments.report.wording import (
    BARS,
    INTERVALS,
    Write,
    mean_over_seeds,
    model_name,
    percent,
    seconds,
    si,
    si_scale,
    size,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Groups = Sequence[tuple[tuple[str, ...], pd.DataFrame]]
"""Settings: their labels, and their rows of `analysis.outcomes`."""

COLUMNS: tuple[tuple[str, str, Write], ...] = (
    (METRIC, "accuracy %", percent),
    ("least_accuracy", "worst model", percent),
    ("validation_accuracy", "validation", percent),
    ("client_accuracy", "clients", percent),
    ("worst_client", "worst client", percent),
    ("total_bytes", "bytes", size),
    ("total_macs", "total MACs", si),
    ("simulated_s", "simulated", seconds),
    ("epsilon", "epsilon", lambda value: f"{float(value):.3g}"),
    ("macs", "MACs", si),
    ("parameters", "parameters", si),
)
"""The measure, its head and its format."""

TEXT = (
    "The final models of each setting (one per tier, one for all clients, or one per silo), so that methods with "
    "different models can be compared. Accuracy in %: on all test data, the mean over the models and the worst model; "
    "on validation data, the mean; on each client's own test data with its tier's model, the mean over clients and the "
    "worst client. A single model for all clients is measured on all of them, including those that could not run it.",
    "Bytes are those that all clients received and sent; total MACs count forward passes; both, and the simulated "
    "time, cover all stages of the method. MACs of one forward pass and parameters are means over the models. "
    f"{INTERVALS}",
)


def outcomes_block(groups: Groups, heads: tuple[str, ...]) -> Block:
    """One row per setting, without columns that are empty for all; `heads` are the column titles of the labels."""
    evaluated = [(labels, known) for labels, rows in groups if len(known := rows.dropna(subset=["model"]))]
    shown = [column for column in COLUMNS if any(rows[column[0]].notna().any() for _, rows in evaluated)]
    cells = []
    for labels, rows in evaluated:
        # There are several names if the search found nothing for some seed.
        name = " or ".join(dict.fromkeys(model_name(str(name)) for name in rows["final_model"]))
        most = int(rows["models"].max())
        values = (mean_over_seeds(rows, measure, write) for measure, _, write in shown)
        models = name if most == 1 else f"{most} × {name}"
        cells.append((*labels, models, str(rows["seeds"].nunique()), *values))
    names = (*heads, "models", "n", *(head for _, head, _ in shown))
    return Block("What each setting ends with", TEXT, names, tuple(cells), labels=len(heads) + 1)


COSTS = (
    ("total_bytes", "bytes, both ways", "B"),
    ("total_macs", "MACs", ""),
    ("simulated_s", "simulated time", "s"),
)
"""The panels: the measure, its label and its unit."""

_DECADE, _HOUR_S = 10.0, 3600.0

_SAME = 0.01
"""Relative difference up to which costs count as equal, such as one from stray bytes."""


def outcomes_figure(groups: Groups, heads: tuple[str, ...] = ()) -> Figure | None:
    """A panel per cost and a point per setting: means over seeds, bars are 95 % intervals of the accuracy.

    The line joins the settings that no other beats in both accuracy and cost. A cost that is the same for all settings
    has no panel; None without a panel. `heads` are the titles of the labels.
    """
    means = _means(groups)
    # Settings that cost the same have no front.
    shown = [cost for cost in COSTS if float(means[cost[0]].max()) > (1 + _SAME) * float(means[cost[0]].min())]
    if not shown:
        return None
    columns = 4 if max(map(len, means["name"])) < 22 else 2
    height = 3.9 + LEGEND_LINE_IN * -(-len(means) // columns)
    figure = new_figure((1.0 + 3.7 * len(shown), height))
    panels = figure.subplots(1, len(shown), squeeze=False, sharey=True)[0]
    for axes, (measure, label, unit) in zip(panels, shown, strict=True):
        _panel(axes, means, measure, label, unit)
    if are_shares(means["values"].explode()):
        low, high = panels[0].get_ylim()
        panels[0].set_ylim(max(low, -1.0), min(high, 101.0))
    panels[0].set_ylabel("test accuracy, mean of the models (%)")
    handles = [
        legend_line(color=row["colour"], marker=row["marker"], markersize=6, linewidth=0, label=row["name"])
        for row in means.to_dict("records")
    ]
    legend_below(figure, handles, columns, ", ".join(heads) or None)
    return figure


def _means(groups: Groups) -> pd.DataFrame:
    """A row per evaluated setting: name, colour, marker, accuracy (metric, mean) with its interval, and the costs."""
    means: list[dict[str, Any]] = []
    for (labels, every), (colour, marker) in zip(groups, looks(range(len(groups))).values(), strict=True):
        rows = every.dropna(subset=["model"])  # the costs of the others cover only a part of the work
        accuracy = estimate_by_seed(rows[METRIC], rows["seeds"])
        if accuracy is None:
            continue
        look = {"name": ", ".join(labels), "colour": colour, "marker": marker}
        costs = {measure: by_seed(rows, [measure])[measure].mean() for measure, _, _ in COSTS}
        means.append({**look, "metric": accuracy.mean, **vars(accuracy), **costs})
    columns = ["name", "colour", "marker", "metric", "mean", "half_width", "values", *(c[0] for c in COSTS)]
    return pd.DataFrame(means, columns=columns)


def _panel(axes: Axes, means: pd.DataFrame, measure: str, label: str, unit: str) -> None:
    values = means[measure].astype("float64")
    scale, prefix = si_scale(float(values.max()))
    if unit == "s":
        scale, unit, prefix = (_HOUR_S, "h", "") if float(values.max()) >= _HOUR_S else (1.0, "s", "")
    known = means.assign(cost=values / scale)[np.isfinite(values)]
    for i, row in enumerate(known.to_dict("records")):
        with_bars(axes, [row["cost"]], known.iloc[[i]], row["colour"], zorder=3)
        style: dict[str, Any] = {
            "color": row["colour"],
            "marker": row["marker"],
            "markersize": 6,
            "zorder": 3,
            "label": row["name"],
        }
        axes.plot([row["cost"]], [100 * row["metric"]], **style)
    front = front_of(known, "cost")
    axes.plot(front[:, 0], 100 * front[:, 1], color=GREY, linewidth=1.0, drawstyle="steps-post", zorder=2)
    if float(known["cost"].max()) >= _DECADE * float(known["cost"].min()) > 0:
        axes.set_xscale("log")
    else:
        axes.set_xlim(0, 1.06 * float(known["cost"].max()))
    written = f"{prefix}{unit}".strip()
    quiet(axes, xlabel=f"{label} ({written})" if written else label)


FRONTS = (
    "Accuracy against what it costs",
    "One point per setting: the mean test accuracy of its final models against the bytes that all clients received and "
    "sent, the MACs of forward passes and the simulated time, over all of the method's own stages; a cost that is the "
    f"same for all is left out. The line joins the settings that no other beats in both accuracy and cost. {BARS}",
)
"""Title and caption."""


def outcome_pictures(groups: Groups) -> Iterator[Picture]:
    """The figure, if at least two settings were evaluated."""

    figure = outcomes_figure(groups)
    if figure is not None:
        yield Picture("fronts", *FRONTS, figure)
