"""How an ablation's axis is drawn in figures: numbers on a scale joined by lines, names below each other as points."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from fedloom.experiments.report.drawing import looks, quiet, tier_colours, with_bars
from fedloom.experiments.store.ablations import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DECADE = 10.0
"""Ratio of an axis' largest to its smallest positive value from which its scale is logarithmic."""

MOST_TICKS = 6
"""Maximum number of numeric values with a tick each; for more values matplotlib chooses the ticks."""

ROOM = 0.05
"""Share of the axis that a tick's label needs."""

ASIDE = 0.009
"""Offset between neighbouring lines, whose bars would cover each other, as a share of the axis."""

ROW_IN, LETTERS_IN = 0.3, 13
"""Height in inches of a name with one point, and characters per inch of names beside a panel."""


def value_text(value: Any) -> str:
    """An axis value as text for a legend or tick: a number without a needless .0, all else as in tables."""
    return f"{value:g}" if isinstance(value, float) else short(value)


@dataclass(frozen=True)
class Scale:
    """The positions of an axis' values: `names` are unordered and stand below each other, other kinds are numbers."""

    positions: Mapping[Any, float]
    kind: Literal["names", "linear", "log", "symlog"]

    @property
    def is_ordered(self) -> bool:
        """Whether the values are numbers, which lines may join."""
        return self.kind != "names"

    def beside(self, at: pd.Series[float], line: int, lines: int) -> pd.Series[float]:
        """The positions of one of several lines, or points of a name, offset so that their bars do not overlap."""
        aside = line - (lines - 1) / 2
        if self.kind == "names":
            return at + aside * min(0.7 / lines, 0.25)
        low, high = (end(p for p in self.positions.values() if p > 0 or self.kind == "linear") for end in (min, max))
        return at + ASIDE * aside * (high - low) if self.kind == "linear" else at * (high / low) ** (ASIDE * aside)


def scale_of(values: Sequence[Any]) -> Scale:
    """Numbers to scale, logarithmic if they span a decade or have a constant ratio; names at equal distances."""
    numbers = [float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) < len(values) or len(values) < 2:
        return Scale({value: float(i) for i, value in enumerate(values)}, "names")
    positions = dict(zip(values, numbers, strict=True))
    positive = sorted(n for n in numbers if n > 0)
    if min(numbers) < 0 or not positive:
        return Scale(positions, "linear")
    ratios = np.array(positive[1:]) / np.array(positive[:-1])
    is_geometric = len(positive) >= 3 and bool(np.allclose(ratios, ratios[0]))
    if max(positive) < DECADE * min(positive) and not is_geometric:
        return Scale(positions, "linear")
    return Scale(positions, "symlog" if min(numbers) == 0 else "log")


def axis_looks(values: Sequence[Any]) -> dict[Any, tuple[str, str]]:
    """A colour and a marker for each value: numbers from dark to light, names in colours without an order."""
    drawn = looks(values)
    if not scale_of(values).is_ordered or len(values) < 3:
        return drawn
    shades = tier_colours([str(value) for value in sorted(values)])
    return {value: (shades[str(value)], marker) for value, (_, marker) in drawn.items()}


@dataclass(frozen=True)
class Series:
    """Rows of `over_seeds`, one per value of the axis, drawn in one colour with one marker."""

    name: str
    rows: pd.DataFrame
    colour: str
    marker: str


def draw_series(
    axes: Axes, axis: str, values: Sequence[Any], series: Sequence[Series], measure: str, *, of_shares: bool = True
) -> None:
    """Draws means with intervals in % along an axis: numbers left to right joined by lines, names top to bottom.

    With `of_shares`, the values are shares, and intervals are clipped to 0 to 100 %.
    """
    scale = scale_of(values)
    for i, each in enumerate(series):
        rows = each.rows.sort_values(axis, key=lambda values: values.astype(object).map(scale.positions), kind="stable")
        at = scale.beside(pd.Series([scale.positions[v] for v in rows[axis]], dtype=float), i, len(series))
        means, is_lying = 100 * rows["mean"], not scale.is_ordered
        with_bars(axes, at, rows, each.colour, lying=is_lying, of_shares=of_shares, alpha=0.6, zorder=2)
        style: dict[str, Any] = {
            "color": each.colour,
            "marker": each.marker,
            "markersize": 5,
            "zorder": 3,
            "label": each.name,
        }
        if scale.is_ordered:
            axes.plot(at, means, linewidth=1.7, **style)
        else:
            axes.plot(means, at, linewidth=0, **style)
    if scale.is_ordered:
        quiet(axes, xlabel=axis, ylabel=measure)
        axes.grid(False, axis="x")
        _ticks(axes, scale)
    else:
        quiet(axes, xlabel=measure)
        axes.set_yticks([*scale.positions.values()], [value_text(value) for value in scale.positions])
        axes.set_ylim(len(values) - 0.5, -0.5)
        axes.grid(False, axis="y")


def _ticks(axes: Axes, scale: Scale) -> None:
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    positions = scale.positions
    if scale.kind == "log":
        axes.set_xscale("log")
        low, high = min(positions.values()), max(positions.values())
        axes.set_xlim(low * (low / high) ** 0.06, high * (high / low) ** 0.06)
    elif scale.kind == "symlog":
        # 0 is one decade below the smallest positive value.
        axes.set_xscale("symlog", linthresh=min(p for p in positions.values() if p > 0))
    if len(positions) <= MOST_TICKS and _are_apart(scale):
        axes.set_xticks(list(positions.values()), [value_text(value) for value in positions], minor=False)
        axes.minorticks_off()
    elif scale.kind != "linear":
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())


def _are_apart(scale: Scale) -> bool:
    """Whether there is room for a label at every value; values drawn by a search may be too close together."""
    at = sorted(scale.positions.values())
    if scale.kind == "log":
        at = [math.log(value) for value in at]
    return scale.kind == "symlog" or all(after - before > ROOM * (at[-1] - at[0]) for before, after in pairwise(at))


def mark(axes: Axes, values: Sequence[Any], value: Any) -> None:
    """Draws a dotted line at a value of the axis."""
    scale = scale_of(values)
    style: dict[str, Any] = {"color": "#9A9A9A", "linewidth": 0.9, "linestyle": ":", "zorder": 1}
    (axes.axvline if scale.is_ordered else axes.axhline)(scale.positions[value], **style)


def panel_height_in(values: Sequence[Any], lines: int) -> float:
    """Height in inches of a panel of `draw_series` with its labels: fixed for numbers, by their count for names."""
    if scale_of(values).is_ordered:
        return 4.2
    return 1.4 + len(values) * max(ROW_IN, 0.1 * lines)


def names_width_in(values: Sequence[Any]) -> float:
    """Width in inches that names take beside a panel; 0 for numbers."""
    return 0.0 if scale_of(values).is_ordered else max(len(value_text(value)) for value in values) / LETTERS_IN
