"""Published figures drawn again, with the measured points beside the published ones."""

from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedloom.experiments.report.figures.drawing import Drawing
from fedloom.experiments.report.figures.style import LEGEND, MARKERS, SERIES, quiet, tint
from fedloom.experiments.report.parts.picture import Picture
from fedloom.experiments.reproduce.table import Outcome, Row

MOST_PANELS, MOST_SETTINGS = 4, 7
ROOM = 32
"""Letters that fit below a panel side by side."""
SHIFT, APART = 0.2, 0.04
"""Distance between two settings' points at one place, and half of that from published to measured, in places."""


def picture(outcome: Outcome) -> Picture | None:
    """The quantities of an item by place, or by setting if they have one value each; None if nothing was measured."""
    panels = [rows for rows in _by_quantity(outcome.rows) if any(row.measured is not None for row in rows)]
    if not panels:
        return None
    shown = panels[:MOST_PANELS]
    figure = Figure(figsize=(4.6 * len(shown), 3.8), layout="constrained")
    for axes, rows in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        _panel(axes, rows)
    item = outcome.item
    left_out = (
        f" {len(panels) - MOST_PANELS} further quantities are in the tables." if len(panels) > MOST_PANELS else ""
    )
    caption = (
        f"{item.source}, at the {outcome.scale} scale. Filled: measured, with the 95 % interval over seeds. Hollow: "
        f"published, with the paper's standard deviation.{left_out}"
    )
    name = f"{item.name.replace('/', '-')}-{outcome.scale}"
    return Picture(name, f"{item.name}: {item.title}", caption, Drawing(figure))


def _by_quantity(rows: Sequence[Row]) -> Iterator[list[Row]]:
    for name in dict.fromkeys(row.quantity for row in rows):
        yield [row for row in rows if row.quantity == name]


def _panel(axes: Axes, rows: Sequence[Row]) -> None:
    """A panel of one quantity: places from left to right, a colour per setting."""
    settings = list(dict.fromkeys(row.spot[0] for row in rows if row.measured is not None))[:MOST_SETTINGS]
    rows = [row for row in rows if row.spot[0] in settings]
    places = list(dict.fromkeys(row.spot[1] for row in rows))
    by_setting = places == [""]
    names = settings if by_setting else places
    for number, setting in enumerate(settings):
        colour, marker = SERIES[number % len(SERIES)], MARKERS[number % len(MARKERS)]
        shift = 0.0 if by_setting else min(SHIFT, 0.8 / len(settings)) * (number - (len(settings) - 1) / 2)
        for row in (row for row in rows if row.spot[0] == setting):
            _point(axes, names.index(row.spot[0 if by_setting else 1]) + shift, row, colour, marker)
        if not by_setting:
            axes.plot([], [], marker=marker, color=colour, linestyle="", label=setting)
    is_long = max(map(len, names)) * len(names) > ROOM
    axes.set_xticks(range(len(names)), names, rotation=30 if is_long else 0, ha="right" if is_long else "center")
    axes.set_xlim(-0.5, len(names) - 0.5)
    quiet(axes, title=rows[0].quantity, ylabel=rows[0].unit)
    if len(settings) > 1 and not by_setting:
        axes.legend(**LEGEND)


def _point(axes: Axes, x: float, row: Row, colour: str, marker: str) -> None:
    if row.published is not None:
        std = row.published.std or 0.0
        style: dict[str, Any] = {"marker": marker, "color": tint(colour), "markerfacecolor": "white", "zorder": 2}
        axes.errorbar([x - APART], [row.published.value], yerr=[std], capsize=0, linestyle="", **style)
    if row.measured is not None:
        found = row.measured
        low, high = (found.mean if bound is None else bound for bound in (found.low, found.high))
        spread = [[found.mean - low], [high - found.mean]]
        axes.errorbar([x + APART], [found.mean], yerr=spread, capsize=3, linestyle="", marker=marker, color=colour)
