"""The style of all figures: colours that colour-blind readers can distinguish, plain axes, legible text."""

from collections.abc import Iterable, Sequence
from io import BytesIO
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from fedloom.experiments.analysis.frames import natural

# Okabe & Ito 2008: colours that readers with any common colour vision can distinguish.
BLUE, VERMILION, GREEN, GREY, INK = "#0072B2", "#D55E00", "#009E73", "#8A8A8A", "#222222"
MODEL_COLOURS = {"supernet_init": GREY, "fine_tuned": BLUE, "rand_init": VERMILION}
SERIES = (BLUE, VERMILION, GREEN, "#CC79A7", "#E69F00", "#56B4E9", INK)
"""Colours of lines without a natural order."""
MARKERS = "osD^vPX<>*"
DPI = 160
PDF_FONTS = 42
"""Text embedded as TrueType, Type 42; conferences reject matplotlib's default, Type 3."""


def tint(colour: str) -> str:
    """A lighter tone of a colour, for what is beside the point; unlike transparency it hides what it is drawn over."""
    red, green, blue = ((1 + 1.2 * part) / 2.2 for part in to_rgb(colour))
    return to_hex((red, green, blue))


def tier_colours(tiers: Sequence[str]) -> dict[str, str]:
    """A colour per tier, from dark to light (viridis without its yellow, which is hardly visible on paper)."""
    last = max(len(tiers) - 1, 1)
    return {tier: to_hex(colormaps["viridis"](0.84 * i / last)) for i, tier in enumerate(tiers)}


def model_colours(models: Sequence[str]) -> dict[str, str]:
    """A colour per model; a known model always has the same colour."""
    free = cycle((INK, GREEN, "#CC79A7", "#E69F00", "#56B4E9"))
    return {m: MODEL_COLOURS[m] if m in MODEL_COLOURS else next(free) for m in models}


def tier_markers(tiers: Sequence[str]) -> dict[str, str]:
    """A marker per tier, so that tiers differ in more than colour."""
    return {tier: MARKERS[i % len(MARKERS)] for i, tier in enumerate(tiers)}


def quiet(axes: Axes, *, title: str = "", xlabel: str = "", ylabel: str = "") -> None:
    """Sets labels and draws a light grid behind the data, without a box."""
    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=INK)
    axes.set_xlabel(xlabel, fontsize=10, color=INK)
    axes.set_ylabel(ylabel, fontsize=10, color=INK)
    axes.tick_params(labelsize=9, colors=INK, length=3)
    axes.grid(True, color="#E3E3E3", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#9A9A9A")


def with_bars(axes: Axes, x: Iterable[float], rows: pd.DataFrame, colour: str, **style: Any) -> None:
    """Draws the 95 % interval in % of each row with `mean`, `half_width` and `values`; of one or two seeds the values.

    Rows are drawn at the places `x`.
    """
    for place, mean, half, values in zip(x, rows["mean"], rows["half_width"], rows["values"], strict=True):
        if pd.notna(half):
            axes.errorbar([place], [100 * mean], [100 * half], color=colour, linestyle="none", **BAR, **style)
        else:
            heights = 100 * np.array(values)
            axes.scatter(np.full(len(heights), place), heights, s=12, color=colour, marker="_", **style)


def whole_numbers(axes: Axes) -> None:
    """Restricts the ticks of the x axis to whole numbers, since rounds are whole."""
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))


def logarithmic(axes: Axes) -> None:
    """A logarithmic y axis whose ticks are plain numbers: perplexities fall from the vocabulary's size to a few."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _place: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def png(figure: Figure) -> bytes:
    """The figure as PNG, with the same bytes for the same figure."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


def pdf(figure: Figure) -> bytes:
    """The figure as a vector PDF for papers, with the same bytes for the same figure."""
    buffer = BytesIO()
    with rc_context({"pdf.fonttype": PDF_FONTS}):
        figure.savefig(buffer, format="pdf", metadata={"CreationDate": None})
    return buffer.getvalue()


LEGEND: dict[str, Any] = {"fontsize": 9, "frameon": False}
"""Options of every legend."""
COUNTS = {
    "": "",
    "k": " (thousands)",
    "M": " (millions)",
    "G": " (billions)",
    "T": " (10¹²)",
    "P": " (10¹⁵)",
    "E": " (10¹⁸)",
}
"""Labels of axes with counts, by SI prefix."""
DASHED = (0, (4, 2))
BAR: dict[str, Any] = {"elinewidth": 1.0, "capsize": 2.0}


def tiers_in_order(names: Iterable[str]) -> list[str]:
    """The distinct non-empty names in natural order, tier2 before tier10."""
    return sorted({str(n) for n in names if n}, key=natural)
