"""How all figures are drawn: colours that colour-blind readers can distinguish, plain axes, small multiples."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from io import BytesIO
from itertools import cycle
from math import inf
from multiprocessing import get_context, parent_process
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np
import pandas as pd

from fedloom.experiments.analysis.settings import Setting
from fedloom.experiments.analysis.tables import natural
from fedloom.experiments.report.content import Picture
from fedloom.experiments.report.hover import INTERVAL, Spot, spots
from fedloom.experiments.report.wording import runs_in_brief

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.transforms import TransformNode

T = TypeVar("T")

# Okabe & Ito 2008: colours that readers with any common colour vision can distinguish.
BLUE, VERMILION, GREEN, GREY, INK = "#0072B2", "#D55E00", "#009E73", "#8A8A8A", "#222222"
MODEL_COLOURS = {"supernet_init": GREY, "fine_tuned": BLUE, "rand_init": VERMILION}

SERIES = (BLUE, VERMILION, GREEN, "#CC79A7", "#E69F00", "#56B4E9", INK, "#8C564B")
"""Colours of lines without a natural order: those of Okabe & Ito, except for the last, a brown."""

MARKERS = "osD^vPX<>h*"
WITHOUT_STAR = MARKERS[:-1]
"""Markers of lines in figures that mark the winners of searches with stars."""

LEGEND: dict[str, Any] = {"fontsize": 9, "frameon": False}
"""Options of every legend."""

DPI = 160

INTERRUPTS = (signal.SIGINT, signal.SIGTERM)

PDF_FONTS = 42
"""Text embedded as TrueType, Type 42; conferences reject matplotlib's default, Type 3."""


def new_figure(size_in: tuple[float, float]) -> Figure:
    """An empty figure of this width and height in inches, whose parts matplotlib lays out automatically."""
    from matplotlib.figure import Figure

    return Figure(figsize=size_in, layout="constrained")


def legend_line(**style: Any) -> Line2D:
    """A line, a marker or both for a legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], **style)


def legend_mark(
    marker: str, size: float, label: str, *, face: str = "white", edge: str = "black", **style: Any
) -> Line2D:
    """A marker without a line for a legend, hollow unless a colour fills it."""
    style |= {"color": "none", "markerfacecolor": face, "markeredgecolor": edge}
    return legend_line(marker=marker, markersize=size, label=label, **style)


def legend_patch(**style: Any) -> Patch:
    """A rectangle for a legend."""
    from matplotlib.patches import Patch

    return Patch(**style)


def legend_below(
    part: Figure | SubFigure, handles: Sequence[Line2D | Patch], columns: int = 1, title: str | None = None
) -> None:
    """Draws a legend below all panels in rows of equal length: at most `columns` entries each, fewer if too wide."""
    longest = max((len(str(handle.get_label())) for handle in handles), default=0)
    width_in = part.bbox.width / part.dpi
    most = max(1, min(columns, int(width_in / (longest / LEGEND_LETTERS + LEGEND_HANDLE_IN))))
    columns = -(-len(handles) // max(1, -(-len(handles) // most)))
    part.legend(handles=handles, title=title, loc="outside lower center", ncols=max(1, columns), **LEGEND)


def tint(colour: str) -> str:
    """A lighter tone of a colour for secondary content; unlike transparency it hides what it is drawn over."""
    from matplotlib.colors import to_hex, to_rgb

    red, green, blue = ((1 + 1.2 * part) / 2.2 for part in to_rgb(colour))
    return to_hex((red, green, blue))


def tier_colours(tiers: Sequence[str]) -> dict[str, str]:
    """A colour per tier, from dark to light (viridis without its end, which is hardly visible on paper)."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    last = max(len(tiers) - 1, 1)
    return {tier: to_hex(colormaps["viridis"](0.75 * i / last)) for i, tier in enumerate(tiers)}


def model_colours(models: Sequence[str]) -> dict[str, str]:
    """A colour per model; a known model always has the same colour."""
    free = cycle((INK, GREEN, "#CC79A7", "#E69F00", "#56B4E9"))
    return {m: MODEL_COLOURS[m] if m in MODEL_COLOURS else next(free) for m in models}


def tier_markers(tiers: Sequence[str]) -> dict[str, str]:
    """A marker per tier, so that tiers differ in more than colour."""
    return {tier: MARKERS[i % len(MARKERS)] for i, tier in enumerate(tiers)}


def heading(axes: Axes, text: str, *, pad: float | None = None) -> None:
    """Titles a panel; `pad` is the space in points between the title and the panel."""
    axes.set_title(text, loc="left", fontsize=10.5, fontweight="bold", color=INK, pad=pad)


def above(axes: Axes, text: str, x: float, y: float = 1.02, **style: Any) -> None:
    """Writes a small text above a panel, at `x` in data coordinates."""
    style |= {"xycoords": axes.get_xaxis_transform(), "annotation_clip": False}
    axes.annotate(text, (x, y), ha="center", fontsize=8.5, color="#6B6B6B", **style)


def grid_of(part: Figure | SubFigure, count: int, columns: int) -> list[Axes]:
    """`count` panels, row by row; the unused cells of the last row stay empty."""
    panels: list[Axes] = list(part.subplots(-(-count // columns), columns, squeeze=False).ravel())
    for axes in panels[count:]:
        axes.set_axis_off()
    return panels[:count]


def stars(axes: Axes, x: pd.Series[float], y: pd.Series[float], colour: str) -> None:
    """Marks the winners of a search with stars, in front of everything else."""
    axes.scatter(x, y, s=190, marker="*", color=colour, edgecolors="black", linewidths=0.9, zorder=5)


def quiet(axes: Axes, *, title: str = "", xlabel: str = "", ylabel: str = "") -> None:
    """Sets labels and draws a light grid behind the data, without a box."""
    heading(axes, title)
    axes.set_xlabel(xlabel, fontsize=10, color=INK)
    axes.set_ylabel(ylabel, fontsize=10, color=INK)
    axes.tick_params(labelsize=9, colors=INK, length=3)
    axes.grid(True, color="#E3E3E3", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#9A9A9A")


def are_shares(values: Iterable[float]) -> bool:
    """Whether these are within 0 and 1: what is drawn in % ends at 0 and 100, unless a metric of one's own goes on."""
    return all(0 <= value <= 1 for value in values if pd.notna(value))


def with_bars(
    axes: Axes,
    x: Iterable[float],
    rows: pd.DataFrame,
    colour: str,
    *,
    lying: bool = False,
    of_shares: bool = True,
    **style: Any,
) -> None:
    """Draws the 95 % interval in % of each row (`mean`, `half_width`, `values`), or the values of one or two seeds.

    `x` has the rows' positions on the x axis, or on the y axis for `lying` bars. With `of_shares`, intervals of shares
    (see `are_shares`) are clipped to 0 to 100 %; tooltips say them whole.
    """
    for at, mean, half, values in zip(x, rows["mean"], rows["half_width"], rows["values"], strict=True):
        if pd.notna(half):
            room = (mean, 1 - mean) if of_shares and are_shares(values) else (np.inf, np.inf)
            ends = [[100 * max(0.0, min(half, left))] for left in room]
            bar: dict[str, Any] = {"x": [100 * mean], "y": [at], "xerr": ends}
            if not lying:
                bar = {"x": [at], "y": [100 * mean], "yerr": ends}
            whole = f"_{INTERVAL}{100 * (mean - half):.4g} to {100 * (mean + half):.4g}"
            axes.errorbar(**bar, color=colour, linestyle="none", label=whole, **BAR, **style)
        else:
            measured = 100 * np.array(values)
            x_and_y = (measured, np.full(len(measured), at)) if lying else (np.full(len(measured), at), measured)
            axes.scatter(*x_and_y, color=colour, marker="|" if lying else "_", **{"s": 12, **style})


def whole_numbers(axes: Axes) -> None:
    """Restricts the ticks of the x axis to whole numbers, since rounds are whole."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))


def logarithmic(axes: Axes, which: Literal["x", "y"] = "y") -> None:
    """Makes an axis logarithmic with plain numbers as ticks: perplexities fall from the vocabulary's size to a few."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis = axes.yaxis if which == "y" else axes.xaxis
    axes.set(**{f"{which}scale": "log"})
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def png(figure: Figure) -> bytes:
    """The figure as PNG, with the same bytes for the same figure."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


def pdf(figure: Figure) -> bytes:
    """The figure as a vector PDF for papers, with the same bytes for the same figure."""
    from matplotlib import rc_context

    buffer = BytesIO()
    with rc_context({"pdf.fonttype": PDF_FONTS}):
        figure.savefig(buffer, format="pdf", metadata={"CreationDate": None})
    return buffer.getvalue()


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


TITLE_LETTERS, LEGEND_LETTERS = 11, 13
"""Characters per inch in the font sizes of titles and of legends."""

LEGEND_LINE_IN, LEGEND_HANDLE_IN = 0.2, 0.6
"""Height of a line of a legend, and width of an entry's line with the space around it, in inches."""


def looks(names: Iterable[T], colours: Sequence[str] = SERIES, markers: str = MARKERS) -> dict[T, tuple[str, str]]:
    """A colour and a marker for each of these values, which may be settings' names; all pairs before one repeats."""
    period = math.lcm(len(colours), len(markers))  # then every marker meets another colour
    return {
        name: (colours[i % len(colours)], markers[(i + i // period) % len(markers)]) for i, name in enumerate(names)
    }


def legend_text(text: str, width_in: float) -> str:
    """Breaks a setting's name into lines that fit the legend of a figure of this width."""
    return fill(text, round(LEGEND_LETTERS * (width_in - 0.8)))


def legend_height_in(texts: Sequence[str], width_in: float) -> float:
    """Height in inches of a legend with these texts, one below the other."""
    return LEGEND_LINE_IN * sum(1 + legend_text(text, width_in).count("\n") for text in texts)


def setting_label(setting: Setting) -> str:
    """The setting's name with its number of runs or seeds."""
    return f"{setting.name}{runs_in_brief(setting)}"


def setting_handles(
    settings: Sequence[Setting], drawn: Mapping[str, tuple[str, str]], width_in: float, marker_size: float
) -> list[Line2D]:
    """Legend entries of the settings, for a figure of this width."""
    return [
        legend_line(color=colour, marker=marker, markersize=marker_size, label=legend_text(setting_label(s), width_in))
        for s, (colour, marker) in ((s, drawn[s.name]) for s in settings)
    ]


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
    if settings[0].is_alone:
        figure = new_figure(alone)
        return figure, [figure]
    columns = min(columns, len(settings))
    lines = -(-len(settings) // columns)
    figure = new_figure((columns * each[0], lines * each[1] + 0.5))
    parts: list[SubFigure] = list(figure.subfigures(lines, columns, squeeze=False).ravel())[: len(settings)]
    for part, setting in zip(parts, settings, strict=True):
        name = title_text(setting.name, each[0])
        part.suptitle(name, x=0.01, ha="left", fontsize=10.5, fontweight="bold", color=INK)
    return figure, parts


def same_limits(panels: Sequence[Axes], *, x: bool = False, y: bool = False, most: float = inf) -> bool:
    """Gives all panels the same range, so that they can be compared, and returns whether it did.

    It does not if a panel's own range is less than 1 / `most` of the shared one, in which it would look flat.
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


class Images(NamedTuple):
    """A figure as PNG, for the page, and as PDF, for papers."""

    png: bytes
    pdf: bytes
    spots: tuple[Spot, ...] = ()
    """The tooltips of the page."""


def draw(figure: Figure) -> Images:
    """The images of a figure, the same bytes in any process."""
    page = png(figure)
    figure.set_layout_engine("none")  # the layout is final now, and computing it again takes half of the time
    return Images(page, pdf(figure), spots(figure))


def drawn(pictures: Iterable[Picture]) -> list[tuple[Picture, Images]]:
    """The pictures with their images; where a fork is safe, copies of this process draw while the next are made."""
    if not _may_fork():
        return [(picture, draw(picture.figure)) for picture in pictures]
    copies = ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("fork"), _begin_copy)
    try:
        answers = [(picture, _asked(copies, picture.figure)) for picture in pictures]
        return [(picture, _answered(answer, picture.figure)) for picture, answer in answers]
    finally:
        copies.shutdown(wait=False, cancel_futures=True)


def _may_fork() -> bool:
    """Whether a fork is safe: Linux, no other Python thread, and no Ray, whose threads do not survive it."""
    return hasattr(os, "sched_getaffinity") and threading.active_count() == 1 and "ray" not in sys.modules


def _asked(copies: ProcessPoolExecutor, figure: Figure) -> Future[Images] | None:
    # The first call forks the copies; interrupts are blocked until `_begin_copy`, as they would print a traceback.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTS)
    try:
        return copies.submit(draw, figure)
    except (BrokenProcessPool, OSError):  # a copy died, or the system has no room for another process
        return None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _answered(answer: Future[Images] | None, figure: Figure) -> Images:
    try:
        return draw(figure) if answer is None else answer.result()
    except BrokenProcessPool:
        return draw(figure)


def _begin_copy() -> None:
    """Sets a copy up to end silently with its command, whether that is killed or interrupted with its copies."""
    from matplotlib.transforms import TransformNode

    setattr(TransformNode, "__setstate__", restore_transform)  # noqa: B010 - its stubs do not name it
    for interrupt in INTERRUPTS:
        signal.signal(interrupt, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTS)
    threading.Thread(target=_end_with_command, daemon=True).start()


def restore_transform(node: TransformNode, state: dict[str, Any]) -> None:
    """Restores a pickled transform, and registers its dependent transforms under their ids in this process.

    matplotlib's own method keeps the ids of the process that pickled it. Another transform may have such an id here and
    replace the dependent one, which then misses changes of the resolution: now and then a text stood a line too low.
    """
    node.__dict__ = state
    depending = [parent for parent in state["_parents"].values() if parent is not None]
    parents: dict[int, weakref.ref[TransformNode]] = {}
    for parent in depending:
        key = id(parent)
        parents[key] = weakref.ref(parent, partial(_forget, parents, key))
    state["_parents"] = parents


def _forget(parents: dict[int, weakref.ref[TransformNode]], key: int, _: object) -> None:
    parents.pop(key, None)


def _end_with_command() -> None:
    command = parent_process()
    assert command is not None, "a copy has a parent"
    command.join()
    os._exit(1)
