"""The section of asynchronous rounds: how many rounds ended while a client worked on its update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pandas as pd

from fedloom.experiments.analysis.settings import SEEDS, Setting
from fedloom.experiments.analysis.tables import Tables
from fedloom.experiments.report.content import Block, Picture, sheets
from fedloom.experiments.report.drawing import (
    legend_below,
    legend_height_in,
    looks,
    new_figure,
    quiet,
    setting_handles,
    setting_label,
    whole_numbers,
)
from fedloom.experiments.report.wording import INTERVALS, caption_of, count, mean_over_seeds, seconds, setting_head

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "Staleness of asynchronous rounds"
MEASURES = ("mean", "median", "95 % quantile", "most")


def stale_updates(tables: Tables) -> pd.DataFrame:
    """The client rows whose update arrived and may be stale: run_id, staleness, ended_s."""
    rows = tables.clients
    rows = rows[rows["staleness"].notna() & (rows["status"] == "ok")]
    return rows[["run_id", "staleness", "ended_s"]].astype({"staleness": "int64", "ended_s": "float64"})


def staleness_block(tables: Tables, settings: Sequence[Setting]) -> Block:
    """One row per setting whose updates may be stale: their staleness, and the time between two of them."""
    updates = stale_updates(tables)
    of_run = updates.groupby("run_id").agg(
        updates=("staleness", "size"),
        mean=("staleness", "mean"),
        median=("staleness", "median"),
        quantile=("staleness", lambda values: values.quantile(0.95)),
        most=("staleness", "max"),
        first_s=("ended_s", "min"),
        last_s=("ended_s", "max"),
    )
    between_s = (of_run["last_s"] - of_run["first_s"]) / (of_run["updates"] - 1)
    frame = of_run.assign(between_s=between_s).reset_index()
    rows = []
    for setting in settings:
        runs = setting.rows(frame)
        if len(runs):
            cells = [mean_over_seeds(runs, name, count) for name in ("updates", "mean", "median", "quantile", "most")]
            rows.append((setting.name, *cells, mean_over_seeds(runs, "between_s", seconds)))
    text = (
        "The staleness of an update is the number of rounds that ended after its client was sent the weights and "
        "before the update arrived; it is 0 if rounds wait for all clients. Lost updates are not counted. The last "
        f"column is the simulated time between two arrivals. {INTERVALS}",
    )
    heads = (setting_head(settings), "updates", *(f"staleness, {name}" for name in MEASURES), "between two updates")
    return Block(TITLE, text, heads, tuple(rows), labels=1)


def staleness_figure(updates: pd.DataFrame, settings: Sequence[Setting]) -> Figure | None:
    """The share of updates with each staleness, a line per setting; None without stale updates."""
    shown = [s for s in settings if len(s.rows(updates))]
    most = max((int(s.rows(updates)["staleness"].max()) for s in shown), default=0)
    if most == 0:
        return None
    drawn, width = looks(s.name for s in shown), 7.0
    figure = new_figure((width, 3.6 + legend_height_in([setting_label(s) for s in shown], width)))
    axes = figure.subplots()
    for setting in shown:
        rows = setting.rows(updates)
        shares = rows.groupby(SEEDS)["staleness"].value_counts(normalize=True).unstack().fillna(0.0).mean()
        shares = shares.reindex(range(int(rows["staleness"].max()) + 1), fill_value=0.0)
        colour, marker = drawn[setting.name]
        axes.plot(
            shares.index.to_numpy(), 100 * shares.to_numpy(), color=colour, marker=marker, label=setting.name,
            markersize=4.5, linewidth=1.5,
        )  # fmt: skip
    quiet(axes, xlabel="staleness (rounds)", ylabel="share of updates (%)")
    whole_numbers(axes)
    axes.set_ylim(bottom=0)
    axes.set_xlim(-0.04 * most, 1.04 * most)
    if len(settings) > 1:
        legend_below(figure, setting_handles(shown, drawn, width, 5))
    return figure


def staleness_pictures(tables: Tables, settings: Sequence[Setting]) -> Iterator[Picture]:
    """The figure, if a run has updates that may be stale."""
    updates = stale_updates(tables)
    for sheet in sheets(settings):
        figure = staleness_figure(updates, sheet.settings)
        if figure is not None:
            text = "Share of the updates that arrived, by the number of rounds that ended while their clients worked."
            averaged = "For several runs, the mean of the shares."
            yield sheet.labelled(Picture("staleness", TITLE, caption_of(sheet.settings, text, averaged), figure))
