"""Pictures of the cells of silos' architectures, drawn by graphviz if `dot` is installed, else by matplotlib."""

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import matplotlib.image
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch, Patch

from fedloom.experiments.analysis.architectures import SHORT, node_label, space_of, subspace_of
from fedloom.experiments.analysis.silos import latest_architectures
from fedloom.experiments.analysis.tables import Tables, configuration
from fedloom.experiments.report.drawing import BLUE, DPI, GREEN, GREY, INK, VERMILION, grid_of, heading, legend_below
from fedloom.platform.spaces.darts import CELL_TYPES, DartsSpace
from fedloom.platform.spaces.slices import Subspace

MOST_CELLS = 8
"""Maximum number of cells in one picture: the number of silos in SPIDER."""

DOT_SECONDS = 30
"""Timeout of `dot` for a cell, in seconds; it usually takes less than 1 s."""

COLOURS = {
    "sep_conv_3x3": BLUE,
    "skip_connect": VERMILION,
    "sep_conv_5x5": "#56B4E9",
    "dil_conv_3x3": GREEN,
    "dil_conv_5x5": "#CC79A7",
    "max_pool_3x3": "#E69F00",
    "avg_pool_3x3": "#9A6A00",
    "noise": INK,
    "none": GREY,
}

CAPTION = (
    "From left to right: the inputs (the outputs of the two preceding cells), the nodes, and the output, which "
    "concatenates all nodes. An edge is labelled with its operator, or with several while it is undecided; pruned "
    "edges are left out. A dashed node has lost all of its edges."
)


@dataclass(frozen=True)
class CellEdge:
    """An edge of a cell with its kept operators; `source` and `node` are as in `DartsDesign.edges` (0, 1: inputs)."""

    source: int
    node: int
    operators: tuple[str, ...]


def darts_space_of(config: Mapping[str, Any]) -> DartsSpace | None:
    """The DARTS space of a stored configuration; None for another space, or if this version cannot build it."""
    space = space_of(config)
    return space if isinstance(space, DartsSpace) else None


def cell_edges(space: DartsSpace, subspace: Subspace, cell_type: str) -> tuple[CellEdge, ...]:
    """The edges of a cell type that keep an operator, with operator names, in the space's order."""
    pairs = zip(space.edges(cell_type), space.decisions(cell_type), strict=True)
    return tuple(
        CellEdge(source, node, tuple(space.operator_names[decision][option] for option in subspace[decision]))
        for (source, node), decision in pairs
        if subspace[decision]
    )


@dataclass(frozen=True)
class Cell:
    """A cell to draw; the title names its silos."""

    title: str
    nodes: int
    edges: tuple[CellEdge, ...]


def cell_pictures(run: Tables) -> Iterator[tuple[str, Figure, int]]:
    """Yields (cell type, figure, number of cells left out) for one run.

    Yields nothing if the run's space has no cells or if no silo has a network yet. Silos with the same cell share a
    drawing.
    """
    space = darts_space_of(configuration(run, run.paths[0].run_id))
    if space is None:
        return
    rows = latest_architectures(run)
    texts = zip(rows["client_id"], rows["architecture"], strict=True)
    parsed = {int(silo): subspace_of(space, str(text)) for silo, text in texts}
    for cell_type in reversed(CELL_TYPES):
        cells = _distinct(space, {c: subspace for c, subspace in parsed.items() if subspace is not None}, cell_type)
        if cells:
            yield cell_type, cells_figure(cells[:MOST_CELLS]), max(0, len(cells) - MOST_CELLS)


def _distinct(space: DartsSpace, kept_by_silo: Mapping[int, Subspace], cell_type: str) -> list[Cell]:
    silos: dict[tuple[CellEdge, ...], list[int]] = {}
    for silo, subspace in kept_by_silo.items():
        silos.setdefault(cell_edges(space, subspace, cell_type), []).append(silo)
    whole = len(silos) == 1 and len(kept_by_silo) > 1
    nodes = space.design.nodes
    return [
        Cell("all silos" if whole else f"silo{'' if len(who) == 1 else 's'} {', '.join(map(str, who))}", nodes, edges)
        for edges, who in silos.items()
    ]


def cells_figure(cells: Sequence[Cell]) -> Figure:
    """Small multiples of the cells, two per row, with the operators' colours below."""
    columns = min(2, len(cells))
    figure = Figure(figsize=(6.2 * columns, 0.6 + 2.9 * -(-len(cells) // columns)), layout="constrained")
    drawn = [_rendered(dot_source(cell)) for cell in cells] if shutil.which("dot") else [None] * len(cells)
    images = [None if png is None else matplotlib.image.imread(BytesIO(png), format="png") for png in drawn]
    # All images have one scale, so that text has the same size.
    size = [max((image.shape[i] for image in images if image is not None), default=0) for i in (0, 1)]
    for axes, cell, image in zip(grid_of(figure, len(cells), columns), cells, images, strict=True):
        heading(axes, cell.title)
        axes.set_axis_off()
        if image is None:
            _draw(axes, cell)
        else:
            axes.imshow(image, interpolation="antialiased")
            axes.set_xlim(0, size[1])
            axes.set_ylim(size[0], 0)
    names = dict.fromkeys(name for cell in cells for edge in cell.edges for name in edge.operators)
    handles = [Line2D([], [], color=colour_of(n), linewidth=2.4, label=f"{SHORT.get(n, n)}: {n}") for n in names]
    if handles:
        legend_below(figure, handles, 4)
    return figure


def is_dead(cell: Cell, node: int) -> bool:
    """Whether all edges to an inner node were pruned, so that its output is zero."""
    return 2 <= node < cell.nodes + 2 and all(edge.node != node for edge in cell.edges)


def colour_of(operator: str) -> str:
    """The operator's colour; grey for an operator that this version does not know."""
    return COLOURS.get(operator, GREY)


# -- graphviz ----------------------------------------------------------------------------------------------------------


def dot_source(cell: Cell) -> str:
    """The cell in graphviz's language, drawn from left to right."""
    last = cell.nodes + 2
    lines = [
        "digraph cell {",
        'rankdir=LR; ranksep=0.45; nodesep=0.18; bgcolor="white";',
        'node [shape=box, style="rounded,filled", fillcolor="#F4F4F4", color="#9A9A9A", fontname="DejaVu Sans", '
        "fontsize=15, height=0.35, width=0.35];",
        'edge [fontname="DejaVu Sans", fontsize=12, penwidth=1.8, arrowsize=0.7];',
        "{rank=same; n0 -> n1 [style=invis];}",
        *(f'n{i} [label="{node_label(i, cell.nodes)}"{_look(cell, i)}];' for i in range(last + 1)),
    ]
    for edge in cell.edges:
        for name in edge.operators:
            style = f'color="{colour_of(name)}", fontcolor="{colour_of(name)}", label="{SHORT.get(name, name)}"'
            lines.append(f"n{edge.source} -> n{edge.node} [{style}];")
    lines += [f'n{i} -> n{last} [color="#C4C4C4", style=dashed, penwidth=1.0];' for i in range(2, last)]
    return "\n".join([*lines, "}"]) + "\n"


def _look(cell: Cell, node: int) -> str:
    return ', style="rounded,filled,dashed"' if is_dead(cell, node) else ""


def _rendered(source: str) -> bytes | None:
    """The drawing as PNG; None if `dot` fails, for instance without a plugin for PNG."""
    command = ["dot", "-Tpng", f"-Gdpi={DPI}"]
    try:
        done = subprocess.run(command, input=source.encode(), capture_output=True, check=True, timeout=DOT_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout or None


# -- matplotlib --------------------------------------------------------------------------------------------------------

Place = tuple[float, float]

_GAP = 1.6
"""Distance between nodes, in the drawing's units."""


def _places(nodes: int) -> list[Place]:
    """Positions of all nodes on a line; edges are arcs above and below it, which never run through a node."""
    return [(i * _GAP, 0.0) for i in range(nodes + 2)] + [((nodes + 2.25) * _GAP, 0.0)]


def _draw(axes: Axes, cell: Cell) -> None:
    positions = _places(cell.nodes)
    _output(axes, cell.nodes, positions)
    circles = []
    for node, position in enumerate(positions):
        inner = 2 <= node < len(positions) - 1
        style: dict[str, Any] = {"linestyle": (0, (2, 2))} if is_dead(cell, node) else {}
        face = "#E8EEF4" if inner else "#F4F4F4"
        circle = Circle(position, 0.25, facecolor=face, edgecolor="#6B6B6B", linewidth=1.0, zorder=5, **style)
        circles.append(axes.add_patch(circle))
        label = re.sub("_(.*)", r"_{\1}", node_label(node, cell.nodes))
        axes.text(*position, f"${label}$", ha="center", va="center", fontsize=8, color=INK, zorder=6)
    for edge in cell.edges:
        for i, name in enumerate(edge.operators):
            ends, rims = (positions[edge.source], positions[edge.node]), (circles[edge.source], circles[edge.node])
            _arc(axes, ends, rims, _height(edge, i), name)
    reach = [_height(edge, len(edge.operators) - 1) for edge in cell.edges]
    axes.set_xlim(-0.5, positions[-1][0] + 0.5)
    axes.set_ylim(min([-0.6, *reach]) - 0.2, max([0.6, *reach]) + 0.2)
    axes.set_aspect("equal")


def _output(axes: Axes, nodes: int, positions: Sequence[Place]) -> None:
    """Draws a box around the nodes with one arrow to the output, which joins all of them."""
    first, last, out = positions[2][0], positions[nodes + 1][0], positions[-1][0]
    style: dict[str, Any] = {"boxstyle": "round,pad=0,rounding_size=0.3", "facecolor": "#FAFAFA"}
    box = FancyBboxPatch((first - 0.36, -0.36), last - first + 0.72, 0.72, edgecolor="#C4C4C4", zorder=0, **style)
    axes.add_patch(box)
    arrow: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 9, "color": "#9A9A9A", "linewidth": 1.0}
    axes.add_patch(FancyArrowPatch((last + 0.36, 0), (out - 0.25, 0), shrinkA=0, shrinkB=0, **arrow))


def _height(edge: CellEdge, at: int) -> float:
    """Height of the middle of the arc of an edge's operator number `at`; negative (below) if the source is odd."""
    side = 1.0 if edge.source % 2 == 0 else -1.0
    return side * _GAP * (0.25 * (edge.node - edge.source) + 0.08 + 0.13 * at)


def _arc(axes: Axes, ends: tuple[Place, Place], rims: tuple[Patch, Patch], height: float, name: str) -> None:
    begin, end = ends
    style: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 9, "linewidth": 1.5, "zorder": 3}
    style |= {"patchA": rims[0], "patchB": rims[1], "shrinkA": 0, "shrinkB": 0}
    # The middle of a quadratic curve has half of its control point's height.
    bend = f"arc3,rad={-2 * height / (end[0] - begin[0]):.4f}"
    arrow = FancyArrowPatch(begin, end, connectionstyle=bend, color=colour_of(name), **style)
    axes.add_patch(arrow)
    box: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
    middle = (begin[0] + end[0]) / 2
    axes.text(
        middle, height, SHORT.get(name, name), ha="center", va="center", fontsize=7, color=colour_of(name),
        bbox=box, zorder=4,
    )  # fmt: skip
