"""The figure of a Bayesian search: the accuracy of each point, and the best so far."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedloom.experiments.analysis.ablation import ablation_frame, is_grid
from fedloom.experiments.analysis.tables import Tables
from fedloom.experiments.report.content import Picture
from fedloom.experiments.report.drawing import SERIES, legend_below, legend_line, new_figure, quiet, whole_numbers
from fedloom.experiments.store.ablations import Ablation

OBJECTIVE = "validation_accuracy"


def kind_of_search(ablation: Ablation) -> str:
    """The kind of the ablation's points: a Bayesian search, a grid or a random search."""
    if ablation.search:
        return f"Bayesian search of {ablation.search['samples']} points"
    return "grid" if is_grid(ablation) else "random search"


def history_picture(ablation: Ablation, tables: Tables) -> Iterator[Picture]:
    """Validation accuracy per point, in the order in which points were suggested; only for a Bayesian search."""
    if not ablation.search:
        return
    frame = ablation_frame(tables, ablation, each="run").dropna(subset=[OBJECTIVE])
    of_points = frame.groupby(frame["trial"] // len(ablation.seeds))[OBJECTIVE]
    # As in the search, a point is finished when its runs with all seeds are.
    points = of_points.mean()[of_points.size() == len(ablation.seeds)]
    if points.empty:
        return
    number, reached = 1 + points.index.to_numpy(), 100 * points.to_numpy(dtype=np.float64)
    figure = new_figure((6.4, 4.0))
    axes = figure.subplots()
    axes.plot(number, reached, "o", color=SERIES[0], markersize=5)
    axes.step(number, np.maximum.accumulate(reached), where="post", color=SERIES[1], linewidth=1.7)
    quiet(axes, title="", xlabel="point", ylabel="validation accuracy (%)")
    whole_numbers(axes)
    legend_below(
        figure,
        [
            legend_line(color=SERIES[0], marker="o", markersize=5, linestyle="", label="a point, mean over seeds"),
            legend_line(color=SERIES[1], label="the best so far"),
        ],
        2,
    )
    yield Picture(
        "search_history",
        "What the search has reached",
        f"The objective, the validation accuracy of the final models, of each of the {len(points)} finished points, in "
        "the order of suggestion.",
        figure,
    )
