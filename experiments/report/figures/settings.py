"""How figures distinguish settings: colours and markers, legends, and small multiples."""

from collections.abc import Callable, Sequence
from itertools import cycle
from math import inf
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from fedloom.experiments.analysis.settings import Setting
from fedloom.experiments.report.figures.style import INK, MARKERS, SERIES
from fedloom.experiments.report.parts.words import runs_in_brief

TITLE_LETTERS, LEGEND_LETTERS = 11, 13
"""Characters per inch in the font sizes of titles and of legends."""

LEGEND_LINE_IN = 0.2
"""Height of a line of a legend, in inches."""

Look = dict[str, tuple[str, str]]
"""Colour and marker by the name of the setting."""


def looks(settings: Sequence[Setting], colours: Sequence[str] = SERIES) -> Look:
    """A colour and a marker per setting; the last marker is reserved for the winners of searches."""
    pairs = zip(cycle(colours), cycle(MARKERS[:-1]), strict=False)
    return {s.name: pair for s, pair in zip(settings, pairs, strict=False)}


def legend_text(text: str, width_in: float) -> str:
    """Breaks a setting's name into lines that fit the legend of a figure of this width."""
    return fill(text, round(LEGEND_LETTERS * (width_in - 0.8)))


def legend_height_in(texts: Sequence[str], width_in: float) -> float:
    """Height in inches of a legend with these texts, one below the other."""
    return LEGEND_LINE_IN * sum(1 + legend_text(text, width_in).count("\n") for text in texts)


def setting_label(setting: Setting) -> str:
    """The setting's name with its number of runs or seeds."""
    return f"{setting.name}{runs_in_brief(setting)}"


def line_width(i: int, count: int) -> float:
    """Width of line `i` of `count`: later lines are thinner, so that equal lines of several settings stay visible."""
    return min(6.0, 1.8 + 1.1 * (count - 1 - i))


def title_text(text: str, width_in: float) -> str:
    """Breaks a setting's name into lines that fit above a panel of this width."""
    return fill(text, round(TITLE_LETTERS * width_in))


def multiples(
    settings: Sequence[Setting], alone: tuple[float, float], each: tuple[float, float], columns: int = 1
) -> tuple[Figure, Sequence[Figure | SubFigure]]:
    """A figure, and for each setting the subfigure, titled with its name, in which it is drawn.

    The only setting of an experiment is drawn in the figure itself. `alone` and `each` are the sizes in inches (width,
    height) of such a figure, and of a subfigure.
    """
    if [s.name for s in settings] == [settings[0].experiment]:
        figure = Figure(figsize=alone, layout="constrained")
        return figure, [figure]
    columns = min(columns, len(settings))
    lines = -(-len(settings) // columns)
    figure = Figure(figsize=(columns * each[0], lines * each[1] + 0.5), layout="constrained")
    parts: list[SubFigure] = list(figure.subfigures(lines, columns, squeeze=False).ravel())[: len(settings)]
    for part, setting in zip(parts, settings, strict=True):
        name = title_text(setting.name, each[0])
        part.suptitle(name, x=0.01, ha="left", fontsize=10.5, fontweight="bold", color=INK)
    return figure, parts


def same_limits(panels: Sequence[Axes], *, x: bool = False, y: bool = False, most: float = inf) -> bool:
    """Gives all panels the same range, so that they can be compared, and returns whether it did.

    It does not where a panel's own range would fill less than one part in `most` of it, and so be flat.
    """
    shared = [_share([axes.get_xlim() for axes in panels], [axes.set_xlim for axes in panels], most)] if x else []
    shared += [_share([axes.get_ylim() for axes in panels], [axes.set_ylim for axes in panels], most)] if y else []
    return all(shared)


def _share(
    ranges: Sequence[tuple[float, float]], setters: Sequence[Callable[[float, float], object]], most: float
) -> bool:
    if not ranges:
        return True
    low, high = min(min(ends) for ends in ranges), max(max(ends) for ends in ranges)
    if any(abs(end - begin) * most < high - low for begin, end in ranges):
        return False
    for set_range in setters:
        set_range(low, high)
    return True
