"""The section of rounds: loss and accuracy against rounds, and bytes, MACs and time per stage."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedloom.experiments.analysis.rounds import communication, communication_by_kind, is_own
from fedloom.experiments.analysis.settings import SEEDS, Setting, spread
from fedloom.experiments.analysis.subnets import Labels
from fedloom.experiments.analysis.tables import ALONE, GAINS, MODELS, SILOS, SUBNETS, Tables, only
from fedloom.experiments.analysis.tiers import PERPLEXITY, perplexity_of
from fedloom.experiments.report.content import Block, Picture
from fedloom.experiments.report.drawing import (
    BLUE,
    DASHED,
    GREY,
    INK,
    VERMILION,
    above,
    heading,
    legend_below,
    legend_line,
    logarithmic,
    multiples,
    quiet,
    same_limits,
    tier_colours,
    tier_markers,
    tiers_in_order,
    tint,
    whole_numbers,
)
from fedloom.experiments.report.wording import (
    PANELS,
    Write,
    caption_of,
    count,
    mean_over_seeds,
    seconds,
    setting_head,
    si,
    si_scale,
    size,
    stage_name,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

KINDS = ("supernet", *MODELS[1:])

LONGEST_SHORT_NAME = 10
"""Length of tier names up to which the legend has seven columns; labels of subnets are longer."""

SIMILAR_STAGES = 3.0
"""Stages share an axis range if each of them fills at least 1 / `SIMILAR_STAGES` of it."""

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
    drawn = dict.fromkeys(kind for s in shown for kind in s.rows(convergence)["kind"])
    kinds = [k for k in KINDS if k in drawn] + [k for k in drawn if k not in KINDS]
    tiers = tiers_in_order(convergence["tier"])
    width = 1.0 + 3.4 * max(len(kinds), 2)
    figure, parts = multiples(shown, (width, 0.4 + 2.9 * len(values)), (width, 0.3 + 2.5 * len(values)))
    grids = [_panels(part, s.rows(convergence), kinds, tiers, values) for part, s in zip(parts, shown, strict=True)]
    _share_ranges(grids)
    _convergence_legend(figure, tiers, convergence)
    return figure


CAPTION = (
    "Loss and accuracy against finished rounds. Solid: what the round's clients report on their own training data "
    "during training. Dashed: on the server's validation data after that many rounds; for the supernet, the mean over "
    "its evaluated paths. Fine-tuning starts from the supernet's weights at round 0."
)


def convergence_pictures(
    convergence: pd.DataFrame, settings: Sequence[Setting], texts: Collection[str]
) -> Iterator[Picture]:
    """The figures of an experiment: one with both values for a single setting, else one per value to ease comparison.

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
    drawn = [kind for kind in kinds if rows["kind"].eq(kind).any()]
    for column, kind in enumerate(kinds):
        for line, value in enumerate(values):
            axes = grid[line][column]
            if kind not in drawn:
                axes.set_axis_off()
                continue
            _curves(axes, rows[rows["kind"] == kind], value, tiers, 100.0 if value == "metric" else 1.0)
            title, xlabel = stage_name(kind) if line == 0 else "", "finished rounds" if line == len(values) - 1 else ""
            quiet(axes, title=title, xlabel=xlabel, ylabel=VALUES[value] if kind == drawn[0] else "")
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
        if same_limits(panels[:, row][drawn[:, row]].tolist(), y=True, most=SIMILAR_STAGES):
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
    legend_below(figure, handles, 7 if all(len(t) <= LONGEST_SHORT_NAME for t in tiers) else 3)


# -- communication ----------------------------------------------------------------------------------------------------


def communication_block(tables: Tables, settings: Sequence[Setting], labels: Labels) -> Block:
    """One row per setting and stage, and one row per setting with the total of the method itself."""
    stages = communication(tables)
    kinds = communication_by_kind(stages)
    rows = [row for s in settings for row in _communication_rows(s, s.rows(stages), s.rows(kinds), labels)]
    others = any(s.kind != SILOS for s in settings)
    left_out = ["the rand-init baseline (where there is a supernet)"] if others else []
    left_out += ["the final evaluation", *(["personalisation gains"] if tables.rounds["stage"].eq(GAINS).any() else [])]
    text = (
        f"Sums over all clients that took part. The method in total is without {' and without '.join(left_out)}. "
        f"{'A central search sends nothing. ' if others else ''}"
        "Simulated time is that of the virtual clock, wall time that of this machine."
    )
    heads = (setting_head(settings), "stage", "rounds", "client tasks", "down", "up", "MACs", "simulated", "wall")
    return Block("Communication and work per stage", (text,), heads, tuple(rows))


def _communication_rows(
    setting: Setting, stages: pd.DataFrame, kinds: pd.DataFrame, labels: Labels
) -> Iterator[tuple[str, ...]]:
    """The rows of each kind of stage (its tiers and their sum), and the total of the method."""
    # The parts of a SuperFedNAS stage are subnets, or the steps of a search.
    every = "in all" if setting.kind == SUBNETS else "all tiers"
    for kind in dict.fromkeys(stages["kind"]):
        of_kind = stages[stages["kind"] == kind]
        tiers = list(dict.fromkeys(of_kind["tier"]))
        for tier in tiers:
            stage = stage_label(setting.run_ids[0], kind, tier, labels)
            yield (setting.name, stage, *_work(of_kind[of_kind["tier"] == tier]))
        if len(tiers) > 1:
            yield (setting.name, f"{stage_name(kind)}, {every}", *_work(kinds[kinds["kind"] == kind]))
    if len(stages):
        yield (setting.name, stage_name("method"), *_work(kinds[kinds["kind"] == "method"]))


WORK: tuple[tuple[str, Write], ...] = (
    ("rounds", count),
    ("clients", count),
    ("bytes_down", size),
    ("bytes_up", size),
    ("macs", si),
    ("simulated_s", seconds),
    ("wall_s", seconds),
)


def _work(rows: pd.DataFrame) -> list[str]:
    return [mean_over_seeds(rows, column, write) for column, write in WORK]


def dry_block(tables: Tables, run_id: str, labels: Labels) -> Block:
    """The counts of a dry run, per stage and in total."""
    stages = communication(only(tables, [run_id]))
    counted = WORK[:-1]
    rows = [
        (stage_label(run_id, row["kind"], row["tier"], labels), *(write(row[column]) for column, write in counted))
        for row in stages.to_dict(orient="records")
    ]
    if len(rows) > 1:
        rows.append(("in total", *(write(stages[column].sum()) for column, write in counted)))
    heads = ("stage", "rounds", "client\ntasks", "\ndown", "\nup", "\nMACs", "simulated\ntime")
    return Block(f"Dry run {run_id}", ("Counted over all clients; nothing was trained.",), heads, tuple(rows), labels=1)


def stage_label(run_id: str, kind: str, tier: str, labels: Labels) -> str:
    """The readable name of a stage and its tier, or of the subnet that it trained alone."""
    return f"{stage_name(kind)} {labels.of(run_id, tier) if kind == ALONE else tier}".strip()


SIMILAR_SETTINGS = 10.0
"""Settings share an axis range if each of them fills at least 1 / `SIMILAR_SETTINGS` of it."""

DIRECTIONS: dict[str, tuple[str, Any, float, str]] = {
    "bytes_down": (BLUE, "-", 3.6, "down (server to clients)"),
    "bytes_up": (VERMILION, (0, (2.2, 1.6)), 2.0, "up (clients to server)"),
}
"""Colour, line style, width and name per direction: dashes over a broad line, since both curves are often the same."""

FOR_NAMES = 18
"""Room for the names of stages above a panel, in points."""


def communication_figure(kinds: pd.DataFrame, rounds: pd.DataFrame, settings: Sequence[Setting]) -> Figure | None:
    """Bytes down and up per kind of stage, and cumulative over the rounds; None if no bytes were sent.

    `kinds` comes from `communication_by_kind`, `rounds` from `by_stage` of the finished rounds. Several settings are
    stacked with the same axes; bars are means over seeds.
    """
    sums = {s.name: _sums(s.rows(kinds)) for s in settings}
    shown = [s for s in settings if len(sums[s.name])]
    if not shown:
        return None
    scale = si_scale(max(float(sums[s.name].to_numpy().max()) for s in shown))
    whole_scale = si_scale(max(float(_totals(s.rows(rounds)).max()) for s in shown))
    figure, parts = multiples(shown, (10.2, 4.2), (10.2, 3.6))
    panels = [part.subplots(1, 2, width_ratios=(1, 1.15)) for part in parts]
    for (left, right), setting in zip(panels, shown, strict=True):
        _bars(left, sums[setting.name], *scale)
        _cumulative(right, setting.rows(rounds), *whole_scale)
    same_limits([left for left, _ in panels], x=True, most=SIMILAR_SETTINGS)
    same_limits([right for _, right in panels], x=True, y=True, most=SIMILAR_SETTINGS)
    handles = [
        legend_line(color=colour, linestyle=line, linewidth=width, label=name)
        for colour, line, width, name in DIRECTIONS.values()
    ]
    legend_below(figure, handles, 2)
    return figure


def communication_pictures(kinds: pd.DataFrame, rounds: pd.DataFrame, settings: Sequence[Setting]) -> Iterator[Picture]:
    """The figure of an experiment; see `communication_figure`."""
    figure = communication_figure(kinds, rounds, settings)
    if figure is None:
        return
    caption = (
        "Bytes that all clients received and sent in total. The cumulative curves leave out the final evaluation; the "
        "rand-init baseline is counted on its own."
    )
    if all(s.kind == SILOS for s in settings):  # these have no baseline
        caption = (
            "Bytes that all silos received and sent in total. The cumulative curves leave out the final evaluation and "
            "personalisation gains."
        )
    over_runs = "Bars are means over the runs; every run has its own curve."
    panels = "One panel per setting; panels have the same axes where the settings sent similar amounts."
    text = caption_of(settings, caption, over_runs, panels=panels)
    yield Picture("communication", "Bytes per stage", text, figure)


def _sums(kinds: pd.DataFrame) -> pd.DataFrame:
    """Bytes down and up by kind of stage, as means over seeds; kinds that sent no bytes are left out."""
    rows = kinds[kinds["kind"] != "method"]
    per_seed = rows.groupby(["kind", SEEDS], sort=False)[["bytes_down", "bytes_up"]].mean()
    sums = per_seed.astype("float64").groupby("kind", sort=False).mean()
    return sums[sums.sum(axis=1) > 0]


def _bars(axes: Axes, sums: pd.DataFrame, scale: float, prefix: str) -> None:
    at = np.arange(len(sums), dtype=float)
    for column, colour, offset in (("bytes_down", BLUE, -0.2), ("bytes_up", VERMILION, 0.2)):
        values = sums[column].to_numpy(dtype=float)
        axes.barh(at + offset, values / scale, height=0.36, color=colour, label=DIRECTIONS[column][3])
        for y, value in zip(at + offset, values, strict=True):
            style: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 8.5}
            axes.annotate(size(value), (value / scale, y), (4, 0), **style)
    quiet(axes, xlabel=f"{prefix}B")
    heading(axes, "Sum over all clients, per stage", pad=FOR_NAMES)
    axes.set_yticks(at, [stage_name(str(kind)) for kind in sums.index])
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.grid(False, axis="y")


def _cumulative(axes: Axes, rounds: pd.DataFrame, scale: float, prefix: str) -> None:
    of_method, baseline = _parts(rounds)
    for rows, width, look in ((of_method, 1.0, str), (baseline, 0.7, tint)):
        for _, run in rows.groupby("run_id", sort=False):
            x = np.arange(len(run) + 1)
            for column, (colour, line, size_pt, _) in DIRECTIONS.items():
                y = np.concatenate([[0.0], np.cumsum(run[column].to_numpy(dtype=float))]) / scale
                axes.plot(x, y, color=look(colour), linestyle=line, linewidth=width * size_pt)
    quiet(axes, xlabel="rounds of all stages", ylabel=f"{prefix}B")
    heading(axes, "Cumulative", pad=FOR_NAMES)
    whole_numbers(axes)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    _stage_marks(axes, of_method)
    if len(baseline):
        handles = [
            legend_line(color=INK, linewidth=2.6, label="method"),
            legend_line(color=tint(INK), linewidth=1.8, label="rand-init baseline alone"),
        ]
        axes.legend(handles=handles, loc="upper left", fontsize=9, edgecolor="none", framealpha=1.0)


def _parts(rounds: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The rounds of the method itself, and those of its rand-init baseline."""
    return rounds[is_own(rounds)], rounds[~is_own(rounds) & (rounds["kind"] == "rand_init")]


def _totals(rounds: pd.DataFrame) -> NDArray[np.float64]:
    """The total bytes down and up of every run, for the method and for its baseline."""
    sums = [rows.groupby("run_id")[["bytes_down", "bytes_up"]].sum().to_numpy(dtype=float) for rows in _parts(rounds)]
    return np.concatenate([*(part.ravel() for part in sums), [0.0]])


def _stage_marks(axes: Axes, rounds: pd.DataFrame) -> None:
    """Marks the boundaries between kinds of stages, as in the first run."""
    first = rounds[rounds["run_id"] == rounds["run_id"].iloc[0]] if len(rounds) else rounds
    kinds = list(first["kind"])
    starts = [i for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
    for start in starts:
        if start:
            axes.axvline(start, color="#B5B5B5", linewidth=0.9, linestyle=":")
    for start, end in pairwise([*starts, len(kinds)]):
        text = stage_name(str(kinds[start])).removesuffix(" training")
        if end - start >= 0.017 * len(text) * len(kinds):  # the text's share of the axes' width
            above(axes, text, (start + end) / 2)
