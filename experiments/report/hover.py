"""The tooltips of a page: the drawn points of a figure with their values as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

INTERVAL = "95 % interval: "
"""Prefix of the text of an interval. Behind an underscore it begins the label of a bar that shows only a part of it."""

MOST_OF_A_LINE, MOST_OF_A_CLOUD = 40, 150
"""Maximum number of points with a tooltip, per line and per cloud of dots; of more, every n-th point has one."""


class Spot(NamedTuple):
    """A point of a figure: shares of its image's width and height, from the upper left corner, and values as text."""

    x: float
    y: float
    text: str


def spots(figure: Figure) -> tuple[Spot, ...]:
    """The marked points, dots and bars of a figure, which must have been drawn so that its layout is final."""
    panels = [axes for axes in figure.axes if axes.axison]
    names = {each: _label(panels, each) for each in "xy"}
    width, height = figure.bbox.width, figure.bbox.height
    every = []
    for axes in panels:
        xlabel, ylabel = (axes.get_xlabel() or names["x"]).replace("\n", " "), axes.get_ylabel() or names["y"]
        for x, y, label, interval in _points(axes):
            px, py = axes.transData.transform((x, y))
            if not (np.isfinite([px, py]).all() and axes.bbox.padded(1).contains(px, py)):
                continue
            values = (_value(xlabel, axes.xaxis, x), _value(ylabel.replace("\n", " "), axes.yaxis, y))
            text = "\n".join(line for line in (label, *values, interval) if line)
            every.append(Spot(round(px / width, 4), round(1 - py / height, 4), text))
    return tuple(every)


def _label(panels: list[Axes], which: str) -> str:
    """The first label of the panels, used for those that have none."""
    labels = [axes.get_xlabel() if which == "x" else axes.get_ylabel() for axes in panels]
    return next((label for label in labels if label), "")


def _value(label: str, axis: Axis, value: float) -> str:
    from matplotlib.ticker import FixedLocator, FuncFormatter

    locator, formatter, text = axis.get_major_locator(), axis.get_major_formatter(), f"{value:.4g}"
    # Each value or name has its own tick.
    if isinstance(locator, FixedLocator) and isinstance(formatter, FuncFormatter):
        ticks = axis.get_majorticklocs()
        text, label = formatter(ticks[np.abs(ticks - value).argmin()]), axis.get_label_text()
    return f"{label}: {text}" if label else text


def _points(axes: Axes) -> Iterator[tuple[float, float, str, str]]:
    """Yields x, y, the name of the line, and the text of the interval for each point."""
    from matplotlib.collections import PathCollection
    from matplotlib.container import BarContainer, ErrorbarContainer

    intervals, of_bars = dict[tuple[float, float], str](), set[int]()
    for bar in axes.containers:
        if isinstance(bar, ErrorbarContainer):
            line, caps, (segments, *_) = bar.lines
            of_bars |= {id(each) for each in (line, *caps)}
            if line is None:
                continue
            whole = str(bar.get_label()).removeprefix("_")
            for (x, y), ends in zip(np.asarray(line.get_xydata()), segments.get_segments(), strict=True):
                low, high = ends[:, 0 if bar.has_xerr else 1]
                text = whole if whole.startswith(INTERVAL) else f"{INTERVAL}{low:.4g} to {high:.4g}"
                intervals[float(x), float(y)] = text
        elif isinstance(bar, BarContainer):
            for patch in bar.patches:
                x, y = patch.get_center()
                end = (patch.get_width(), y) if bar.orientation == "horizontal" else (x, patch.get_height())
                yield *end, _name(bar), ""
    for line in axes.lines:
        if id(line) not in of_bars and line.get_marker() not in (None, "None", "none", "", " "):
            data = np.asarray(line.get_xydata(), dtype=float)
            for x, y in data[:: max(1, -(-len(data) // MOST_OF_A_LINE))]:
                yield x, y, _name(line), intervals.get((x, y), "")
    for dots in axes.collections:
        if isinstance(dots, PathCollection):
            data = np.asarray(dots.get_offsets(), dtype=float)
            for x, y in data[:: max(1, -(-len(data) // MOST_OF_A_CLOUD))]:
                yield x, y, _name(dots), ""


def _name(artist: object) -> str:
    label = str(getattr(artist, "get_label")())  # noqa: B009 - artists and containers have no common type
    return "" if label.startswith("_") else label
