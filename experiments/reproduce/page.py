"""The scoreboard as one page: claims with their states, figures with published and measured points, and numbers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from fedloom.experiments.report.content import Content, Picture
from fedloom.experiments.report.drawing import legend_below, legend_line, looks, new_figure, quiet, tint
from fedloom.experiments.report.pages import ReportFiles, write_content
from fedloom.experiments.reproduce.board import (
    Entry,
    claims_block,
    list_block,
    missing_sentences,
    papers,
    summary_block,
)
from fedloom.experiments.reproduce.items import SCALES
from fedloom.experiments.reproduce.outcome import Outcome, Row, number_blocks
from fedloom.platform.results.store import output_folder

MOST_PANELS = 4
ROOM = 32
"""Letters of tick labels that fit below a panel without rotation."""
SIDE_BY_SIDE = next(iter(looks([""]).values()))
"""The colour and marker of settings that are named on the x axis."""
SHIFT, APART = 0.2, 0.04
"""Distance between two settings' points at one place, and half the distance from published to measured, in places."""


def write_page(board: Sequence[Entry], results: Path, out: Path) -> ReportFiles:
    """Writes report.html, report.md, tables.tex and the figures into the folder."""
    folder = output_folder(results, out, "reports/scoreboard")  # refused before anything is computed
    outcomes = [entry.outcomes[scale] for entry in board for scale in SCALES if scale in entry.outcomes]
    measured = [outcome for outcome in outcomes if any(row.measured is not None for row in outcome.rows)]
    content = Content(
        title="What the papers claim, and what is shown here",
        runs=(),
        missing=tuple(missing_sentences(board)),
        blocks=(
            summary_block(board),
            *(block for paper in papers(board) if (block := claims_block(board, paper)).rows),
            *(block for outcome in measured for block in number_blocks(outcome)),
            list_block(board),
        ),
        pictures=(drawn for outcome in measured if (drawn := picture(outcome)) is not None),
    )
    return write_content(content, folder, ())


def picture(outcome: Outcome) -> Picture | None:
    """The quantities of an item by place, or by setting if they have one value each; None if nothing was measured."""
    names = dict.fromkeys(row.quantity for row in outcome.rows if row.measured is not None)
    panels = [[row for row in outcome.rows if row.quantity == name] for name in names]
    if not panels:
        return None
    shown = panels[:MOST_PANELS]
    widths_in = [_width_in(rows) for rows in shown]
    figure = new_figure((sum(widths_in), 3.8))
    named = dict.fromkeys(s for rows in shown if not _is_by_setting(rows) for s in _settings(rows))
    drawn = looks(named)
    for axes, rows in zip(figure.subplots(1, len(shown), squeeze=False, width_ratios=widths_in)[0], shown, strict=True):
        _panel(axes, rows, drawn)
    if len(named) > 1:
        dots = [legend_line(color=drawn[s][0], marker=drawn[s][1], linestyle="", label=s) for s in named if s]
        legend_below(figure, dots, 2 * len(shown))
    item = outcome.item
    left_out = (
        f" {len(panels) - MOST_PANELS} further quantities are in the tables." if len(panels) > MOST_PANELS else ""
    )
    caption = (
        f"{item.source}, at the {outcome.scale} scale. Filled: measured, with the 95 % interval over seeds. Hollow: "
        f"published, with the paper's standard deviation.{left_out}"
        + (f" Values {outcome.record.text}." if outcome.record else "")
    )
    name = f"{item.name.replace('/', '-')}-{outcome.scale}"
    return Picture(name, f"{item.name}: {item.title}", caption, figure)


def _settings(rows: Sequence[Row]) -> list[str]:
    """A panel's settings with measured values."""
    return list(dict.fromkeys(row.spot[0] for row in rows if row.measured is not None))


def _width_in(rows: Sequence[Row]) -> float:
    """A panel's width in inches: room for every setting on the x axis, or for its points at every place."""
    settings, places = len(_settings(rows)), len({row.spot[1] for row in rows})
    return max(4.6, 0.4 * settings if _is_by_setting(rows) else 0.17 * settings * places)


def _is_by_setting(rows: Sequence[Row]) -> bool:
    """Whether there is one value per setting, so that the x axis shows settings instead of places."""
    return all(row.spot[1] == "" for row in rows if row.measured is not None)


def _panel(axes: Axes, rows: Sequence[Row], drawn: Mapping[str, tuple[str, str]]) -> None:
    """A panel of one quantity: places from left to right, a colour per setting."""
    settings = _settings(rows)
    by_setting = _is_by_setting(rows)
    rows = [row for row in rows if row.spot[0] in settings]
    places = list(dict.fromkeys(row.spot[1] for row in rows))
    names = settings if by_setting else places
    for number, setting in enumerate(settings):
        colour, marker = SIDE_BY_SIDE if by_setting else drawn[setting]
        shift = 0.0 if by_setting else min(SHIFT, 0.8 / len(settings)) * (number - (len(settings) - 1) / 2)
        for row in (row for row in rows if row.spot[0] == setting):
            _point(axes, names.index(row.spot[0 if by_setting else 1]) + shift, row, colour, marker)
    is_long = max(map(len, names)) * len(names) > ROOM
    axes.set_xticks(range(len(names)), names, rotation=30 if is_long else 0, ha="right" if is_long else "center")
    axes.set_xlim(-0.5, len(names) - 0.5)
    quiet(axes, title=rows[0].quantity, ylabel=rows[0].unit)


def _point(axes: Axes, x: float, row: Row, colour: str, marker: str) -> None:
    if row.published is not None:
        std = row.published.std or 0.0
        style: dict[str, Any] = {"marker": marker, "color": tint(colour), "markerfacecolor": "white", "zorder": 2}
        axes.errorbar([x - APART], [row.published.value], yerr=[std], capsize=0, linestyle="", **style)
    if row.measured is not None:
        mean = row.measured.mean
        low, high = (mean if bound is None else bound for bound in (row.measured.low, row.measured.high))
        spread = [[mean - low], [high - mean]]
        axes.errorbar([x + APART], [mean], yerr=spread, capsize=3, linestyle="", marker=marker, color=colour)
