"""The figures of one experiment: convergence, Pareto fronts, communication, and the metric of every client."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import NDArray

from fedloom.experiments.analysis.frames import MODELS, is_own, natural, shown_models
from fedloom.experiments.report.style import (
    BLUE,
    GREY,
    INK,
    VERMILION,
    model_colours,
    quiet,
    tier_colours,
    tier_markers,
    whole_numbers,
)
from fedloom.experiments.report.words import model_name, si, si_scale, stage_name

KINDS = ("supernet", *MODELS[1:])
MOST_DOTS = 400
"""Clients drawn as dots per tier and model; more would be one dark bar."""

LONGEST_SHORT_NAME = 10
"""Seven tiers' names beside each other; subnets' names are longer."""

LEGEND: dict[str, Any] = {"fontsize": 9, "frameon": False}
"""How every legend looks."""
_GOLDEN = 0.618034
COUNTS = {
    "": "",
    "k": " (thousands)",
    "M": " (millions)",
    "G": " (billions)",
    "T": " (10¹²)",
    "P": " (10¹⁵)",
    "E": " (10¹⁸)",
}
"""Prefixes of counts as an axis says them."""
DASHED = (0, (4, 2))


def tiers_in_order(names: Iterable[str]) -> list[str]:
    """The names without repetition, tier2 before tier10; empty ones left out."""
    return sorted({str(n) for n in names if n}, key=natural)


def convergence_figure(convergence: pd.DataFrame) -> Figure | None:
    """Loss (above) and accuracy (below) against rounds, a column per stage and a colour per tier; None without rounds.

    Over several runs the line is their mean and the band reaches from the least to the greatest.
    """
    found = list(dict.fromkeys(convergence["kind"]))
    kinds = [k for k in KINDS if k in found] + [k for k in found if k not in KINDS]
    if not kinds:
        return None
    tiers = tiers_in_order(convergence["tier"])
    figure = Figure(figsize=(1.0 + 3.4 * max(len(kinds), 2), 6.2), layout="constrained")
    grid = figure.subplots(2, len(kinds), sharex="col", sharey="row", squeeze=False)
    for column, kind in enumerate(kinds):
        rows = convergence[convergence["kind"] == kind]
        for row, (value, label) in enumerate((("loss", "loss (cross-entropy)"), ("metric", "accuracy (%)"))):
            axes = grid[row][column]
            _curves(axes, rows, value, tiers, 100.0 if value == "metric" else 1.0)
            title = stage_name(kind) if row == 0 else ""
            quiet(axes, title=title, xlabel="finished rounds" if row else "", ylabel="" if column else label)
            whole_numbers(axes)
    _convergence_legend(figure, tiers, convergence)
    return figure


def _curves(axes: Axes, rows: pd.DataFrame, value: str, tiers: Sequence[str], scale: float) -> None:
    colours, markers = tier_colours(tiers), tier_markers(tiers)
    alone = not (rows["series"].eq("validation") & rows[value].notna()).any()
    for tier in ("", *tiers):
        colour = colours.get(tier, INK)
        for series in ("train", "validation"):
            of = rows[(rows["tier"] == tier) & (rows["series"] == series) & rows[value].notna()]
            if of.empty:
                continue
            over_runs = of.groupby("rounds_done")[value].agg(["mean", "min", "max"]) * scale
            x = over_runs.index.to_numpy(dtype=float)
            # Markers and bands of both series would cover each other.
            leading = series == "validation" or alone
            style = {"linewidth": 1.1, "alpha": 0.75} if series == "train" else {"linewidth": 1.5, "linestyle": DASHED}
            marker, every = (markers.get(tier, "o") if leading else "", max(1, len(x) // 12))
            y = over_runs["mean"].to_numpy()
            axes.plot(x, y, color=colour, marker=marker, markersize=4.5, markevery=every, **style)
            if of["run_id"].nunique() > 1 and leading:
                low, high = over_runs["min"].to_numpy(), over_runs["max"].to_numpy()
                axes.fill_between(x, low, high, color=colour, alpha=0.1, linewidth=0)


def _convergence_legend(figure: Figure, tiers: Sequence[str], convergence: pd.DataFrame) -> None:
    colours, markers = tier_colours(tiers), tier_markers(tiers)
    handles = []
    if (convergence["tier"] == "").any():
        handles.append(Line2D([], [], color=INK, marker="o", markersize=4.5, label="supernet"))
    handles += [Line2D([], [], color=colours[t], marker=markers[t], markersize=4.5, label=t) for t in tiers]
    handles.append(Line2D([], [], color=GREY, linewidth=1.1, label="training clients"))
    if (convergence["series"] == "validation").any():
        handles.append(Line2D([], [], color=GREY, linestyle=DASHED, label="server's validation data"))
    columns = 7 if all(len(t) <= LONGEST_SHORT_NAME for t in tiers) else 3
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), columns), **LEGEND)


def pareto_figure(pareto: pd.DataFrame, upper_bounds: dict[str, float] | None = None) -> Figure | None:
    """Validation accuracy against MACs of all candidates, each tier's front as a line, the winner starred.

    `upper_bounds` (MACs per tier) are drawn as thin vertical lines. None without candidates.
    """
    known = pareto[pareto["metric"].notna() & pareto["macs"].notna()]
    if known.empty:
        return None
    tiers = tiers_in_order(known["tier"])
    colours, markers = tier_colours(tiers), tier_markers(tiers)
    scale, prefix = si_scale(float(known["macs"].max()))
    figure = Figure(figsize=(8.8, 4.6), layout="constrained")
    axes = figure.subplots()
    for tier in tiers:
        rows = known[known["tier"] == tier].astype({"macs": "float64"})
        x, y = rows["macs"] / scale, rows["metric"] * 100
        axes.scatter(x, y, s=14, color=colours[tier], alpha=0.28, linewidths=0, zorder=2)
        for _, run in rows[rows["on_front"]].sort_values("macs").groupby("run_id"):
            style: dict[str, Any] = {"marker": markers[tier], "markersize": 4.5, "linewidth": 1.6, "zorder": 3}
            axes.plot(run["macs"] / scale, run["metric"] * 100, color=colours[tier], **style)
        won = rows["is_winner"]
        axes.scatter(
            x[won], y[won], s=190, marker="*", color=colours[tier], edgecolors="black", linewidths=0.9, zorder=4
        )
    bounds = [b / scale for b in (upper_bounds or {}).values()]
    for bound in sorted(bounds)[:-1]:
        axes.axvline(bound, color="#B5B5B5", linewidth=0.9, linestyle=":", zorder=1)
    quiet(axes, xlabel=f"MACs of one forward pass{COUNTS[prefix]}", ylabel="validation accuracy in search (%)")
    _pareto_legend(figure, tiers, bool(bounds))
    return figure


def _pareto_legend(figure: Figure, tiers: Sequence[str], with_bounds: bool) -> None:
    colours, markers = tier_colours(tiers), tier_markers(tiers)
    handles = [Line2D([], [], color=colours[t], marker=markers[t], markersize=4.5, label=f"{t}: front") for t in tiers]
    dot: dict[str, Any] = {"color": "none", "markerfacecolor": GREY, "markeredgecolor": "none"}
    handles.append(Line2D([], [], marker="o", markersize=4.5, alpha=0.5, label="candidate", **dot))
    star: dict[str, Any] = {"color": "none", "markerfacecolor": "white", "markeredgecolor": "black"}
    handles.append(Line2D([], [], marker="*", markersize=12, label="winner", **star))
    if with_bounds:
        handles.append(Line2D([], [], color="#B5B5B5", linestyle=":", label="tier's bound"))
    figure.legend(handles=handles, loc="outside right center", **LEGEND)


def communication_figure(kinds: pd.DataFrame, rounds: pd.DataFrame) -> Figure | None:
    """Bytes down and up per kind of stage, and cumulative over the rounds; None if nothing was sent.

    `kinds` as from `communication_by_kind`, `rounds` as from `by_stage` of the table `rounds`; means over runs.
    """
    sums = kinds[kinds["kind"] != "method"].groupby("kind", sort=False)[["bytes_down", "bytes_up"]].sum()
    sums = sums.astype("float64") / max(kinds["run_id"].nunique(), 1)
    sums = sums[sums.sum(axis=1) > 0]
    if sums.empty:
        return None
    figure = Figure(figsize=(10.2, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
    _bars(left, sums)
    _cumulative(right, rounds)
    handles = [
        Patch(color=BLUE, label="down (server to clients)"),
        Patch(color=VERMILION, label="up (clients to server)"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, **LEGEND)
    return figure


def _bars(axes: Axes, sums: pd.DataFrame) -> None:
    scale, prefix = si_scale(float(sums.to_numpy().max()))
    at = np.arange(len(sums), dtype=float)
    for column, colour, offset in (("bytes_down", BLUE, -0.2), ("bytes_up", VERMILION, 0.2)):
        values = sums[column].to_numpy(dtype=float)
        axes.barh(at + offset, values / scale, height=0.36, color=colour)
        for y, value in zip(at + offset, values, strict=True):
            axes.annotate(
                si(value, "B"), (value / scale, y), (4, 0), textcoords="offset points", va="center", fontsize=8.5
            )
    quiet(axes, xlabel=f"{prefix}B")
    _title(axes, "Sum over all clients, per stage")
    axes.set_yticks(at, [stage_name(str(kind)) for kind in sums.index])
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.grid(False, axis="y")


def _title(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=INK, pad=18)  # room for the stages' names


def _cumulative(axes: Axes, rounds: pd.DataFrame) -> None:
    own = rounds[is_own(rounds)]
    rest = rounds[~is_own(rounds) & (rounds["kind"] == "rand_init")]
    largest = max(_totals(own).max(), _totals(rest).max())
    scale, prefix = si_scale(float(largest))
    for rows, line, alpha in ((own, "-", 1.0), (rest, DASHED, 0.8)):
        for _, run in rows.groupby("run_id", sort=False):
            x = np.arange(len(run) + 1)
            for column, colour, width in (("bytes_down", BLUE, 2.6), ("bytes_up", VERMILION, 1.3)):
                y = np.concatenate([[0.0], np.cumsum(run[column].to_numpy(dtype=float))]) / scale
                axes.plot(x, y, color=colour, linestyle=line, linewidth=width, alpha=alpha)
    quiet(axes, xlabel="rounds of all stages", ylabel=f"{prefix}B")
    _title(axes, "Cumulative")
    whole_numbers(axes)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    _stage_marks(axes, own)
    if len(rest):
        handles = [
            Line2D([], [], color=INK, label="method"),
            Line2D([], [], color=INK, linestyle=DASHED, label="rand-init baseline alone"),
        ]
        axes.legend(handles=handles, loc="upper left", fontsize=9, edgecolor="none", framealpha=1.0)


def _totals(rounds: pd.DataFrame) -> NDArray[np.float64]:
    sums = rounds.groupby("run_id")[["bytes_down", "bytes_up"]].sum().to_numpy(dtype=float)
    return np.append(sums.ravel(), 0.0)


def _stage_marks(axes: Axes, own: pd.DataFrame) -> None:
    """Where one kind of stage ends and the next begins, in the first run."""
    first = own[own["run_id"] == own["run_id"].iloc[0]] if len(own) else own
    kinds = list(first["kind"])
    starts = [i for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
    for start in starts:
        if start:
            axes.axvline(start, color="#B5B5B5", linewidth=0.9, linestyle=":")
    for start, end in zip(starts, [*starts[1:], len(kinds)], strict=True):
        text = stage_name(str(kinds[start])).removesuffix(" training")
        if end - start >= 0.017 * len(text) * len(kinds):  # what the letters take of the axes' width
            place = ((start + end) / 2, 1.02)
            where = axes.get_xaxis_transform()
            axes.annotate(
                text, place, xycoords=where, ha="center", fontsize=8.5, color="#6B6B6B", annotation_clip=False
            )


def clients_figure(clients: pd.DataFrame) -> Figure | None:
    """The test accuracy of every client that counts, per tier and model: dots, box, and the worst marked.

    `clients` as from `client_metrics`; None if no client was measured.
    """
    counted = clients[clients["counts"]]
    if counted.empty:
        return None
    tiers, models = tiers_in_order(counted["tier"]), shown_models(list(counted["model"]))
    colours = model_colours(models)
    width = 1.2 + 0.62 * len(tiers) * (len(models) + 0.8)
    figure = Figure(figsize=(min(max(6.4, width), 13.0), 4.6), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(models)
    for i, tier in enumerate(tiers):
        for j, model in enumerate(models):
            rows = counted[(counted["tier"] == tier) & (counted["model"] == model)]
            if len(rows):
                values = np.sort(rows["value"].to_numpy(dtype=float)) * 100
                _strip(axes, i + (j - (len(models) - 1) / 2) * width, values, 0.8 * width, colours[model])
    quiet(axes, ylabel="accuracy on the client's own test data (%)")
    axes.set_xticks(range(len(tiers)), tiers)
    axes.set_xlim(-0.6, len(tiers) - 0.4)
    axes.set_ylim(max(-4.0, 100 * counted["value"].min() - 8), 104)
    axes.grid(False, axis="x")
    _clients_legend(figure, models)
    return figure


def _strip(axes: Axes, at: float, values: NDArray[np.float64], width: float, colour: str) -> None:
    """A box (quartiles, median, whiskers to the 5th and 95th percentile) under the dots of sorted values."""
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
    # The first is the worst, which has a mark of its own.
    shown = values[np.unique(np.linspace(1, len(values) - 1, min(len(values) - 1, MOST_DOTS)).astype(int))]
    # Evenly scattered sideways without a random stream: multiples of the golden ratio.
    aside = (np.arange(len(shown)) * _GOLDEN % 1.0 - 0.5) * width * 0.8
    axes.scatter(at + aside, shown, s=9, color=colour, alpha=0.55, linewidths=0, zorder=3)
    axes.scatter([at], values[:1], s=46, marker="v", color=colour, edgecolors="black", linewidths=0.9, zorder=4)


def _clients_legend(figure: Figure, models: Sequence[str]) -> None:
    colours = model_colours(models)
    handles: list[Line2D | Patch] = [Patch(color=colours[m], label=model_name(m)) for m in models]
    worst: dict[str, Any] = {"color": "none", "markerfacecolor": "white", "markeredgecolor": "black"}
    handles.append(Line2D([], [], marker="v", markersize=7, label="worst client", **worst))
    handles.append(Patch(facecolor="#DDDDDD", label="middle half; line: median; whiskers: 5th to 95th percentile"))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 5), **LEGEND)
