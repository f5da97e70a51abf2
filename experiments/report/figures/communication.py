"""Figure of the bytes per stage and over the rounds."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from fedloom.experiments.analysis.frames import is_own
from fedloom.experiments.analysis.seeds import SEEDS
from fedloom.experiments.analysis.settings import Setting
from fedloom.experiments.report.figures.settings import multiples, same_limits
from fedloom.experiments.report.figures.style import BLUE, INK, LEGEND, VERMILION, quiet, tint, whole_numbers
from fedloom.experiments.report.parts.numbers import si_scale, size
from fedloom.experiments.report.parts.words import stage_name

SIMILAR = 10.0
"""Settings share an axis if none of them fills less than one part in so many of it."""

DIRECTIONS: dict[str, tuple[str, Any, float]] = {
    "bytes_down": (BLUE, "-", 3.6),
    "bytes_up": (VERMILION, (0, (2.2, 1.6)), 2.0),
}
"""Colour, line style and width of both directions: dashes over a broad line, since often both are the same curve."""
WORDS = {"bytes_down": "down (server to clients)", "bytes_up": "up (clients to server)"}


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
    same_limits([left for left, _ in panels], x=True, most=SIMILAR)
    same_limits([right for _, right in panels], x=True, y=True, most=SIMILAR)
    handles = [
        Line2D([], [], color=colour, linestyle=line, linewidth=width, label=WORDS[column])
        for column, (colour, line, width) in DIRECTIONS.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, **LEGEND)
    return figure


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
        axes.barh(at + offset, values / scale, height=0.36, color=colour)
        for y, value in zip(at + offset, values, strict=True):
            place: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 8.5}
            axes.annotate(size(value), (value / scale, y), (4, 0), **place)
    quiet(axes, xlabel=f"{prefix}B")
    _title(axes, "Sum over all clients, per stage")
    axes.set_yticks(at, [stage_name(str(kind)) for kind in sums.index])
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.grid(False, axis="y")


def _title(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=INK, pad=18)  # room for stage names


def _cumulative(axes: Axes, rounds: pd.DataFrame, scale: float, prefix: str) -> None:
    own, rest = _parts(rounds)
    for rows, width, look in ((own, 1.0, str), (rest, 0.7, tint)):
        for _, run in rows.groupby("run_id", sort=False):
            x = np.arange(len(run) + 1)
            for column, (colour, line, size_pt) in DIRECTIONS.items():
                y = np.concatenate([[0.0], np.cumsum(run[column].to_numpy(dtype=float))]) / scale
                axes.plot(x, y, color=look(colour), linestyle=line, linewidth=width * size_pt)
    quiet(axes, xlabel="rounds of all stages", ylabel=f"{prefix}B")
    _title(axes, "Cumulative")
    whole_numbers(axes)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    _stage_marks(axes, own)
    if len(rest):
        handles = [
            Line2D([], [], color=INK, linewidth=2.6, label="method"),
            Line2D([], [], color=tint(INK), linewidth=1.8, label="rand-init baseline alone"),
        ]
        axes.legend(handles=handles, loc="upper left", fontsize=9, edgecolor="none", framealpha=1.0)


def _parts(rounds: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The rounds of the method itself, and those of its rand-init baseline."""
    return rounds[is_own(rounds)], rounds[~is_own(rounds) & (rounds["kind"] == "rand_init")]


def _totals(rounds: pd.DataFrame) -> NDArray[np.float64]:
    """The total bytes down and up of every run, for the method and for its baseline."""
    sums = [rows.groupby("run_id")[["bytes_down", "bytes_up"]].sum().to_numpy(dtype=float) for rows in _parts(rounds)]
    return np.concatenate([*(part.ravel() for part in sums), [0.0]])


def _stage_marks(axes: Axes, own: pd.DataFrame) -> None:
    """Marks the limits between kinds of stages, as in the first run."""
    first = own[own["run_id"] == own["run_id"].iloc[0]] if len(own) else own
    kinds = list(first["kind"])
    starts = [i for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
    for start in starts:
        if start:
            axes.axvline(start, color="#B5B5B5", linewidth=0.9, linestyle=":")
    for start, end in pairwise([*starts, len(kinds)]):
        text = stage_name(str(kinds[start])).removesuffix(" training")
        if end - start >= 0.017 * len(text) * len(kinds):  # the text's share of the axes' width
            place = ((start + end) / 2, 1.02)
            where = axes.get_xaxis_transform()
            axes.annotate(
                text, place, xycoords=where, ha="center", fontsize=8.5, color="#6B6B6B", annotation_clip=False
            )
