"""Personalisation gains as heat maps."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from fedloom.experiments.analysis.silo_gains import as_square, personalisation_gains
from fedloom.experiments.report.figures.style import INK, quiet


def gains_figure(matrix: pd.DataFrame) -> Figure | None:
    """p_ij of one run in per cent (left), and p_ii - p_ij with g_i as the last column (right); None without rows.

    `matrix` comes from `silo_gains.p_matrix`. Source: SPIDER, Fig. 3.
    """
    if matrix.empty:
        return None
    square = as_square(matrix) * 100
    rows = [i for i in square.index if square.loc[i].notna().any()]
    square = square.loc[rows]
    gain = personalisation_gains(matrix).set_index("client_id")["gain"].reindex(rows) * 100
    own = np.array([square.loc[i, i] for i in rows], dtype=float)
    values = square.to_numpy(dtype=float)
    size = 0.62 * values.shape[1]
    figure = Figure(figsize=(3.2 + 2 * size + 0.7, max(2.9, 1.5 + 0.5 * len(rows))), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(values.shape[1], values.shape[1] + 1.2))
    matrix_silos = sorted({*matrix["client_id"], *matrix["silo"]})
    columns = [str(j) for j in matrix_silos]
    _heat(left, values, "Blues", _range(values))
    _frame(left, "Accuracy $p_{ij}$ (%)", rows, columns)
    _mark_own(left, rows, [int(j) for j in matrix_silos])
    # p_ii - p_ii is 0 by definition, so the diagonal stays white.
    differences = own[:, None] - values
    differences[[[i == j for j in square.columns] for i in rows]] = np.nan
    both = np.column_stack([differences, gain.to_numpy(dtype=float)])
    reach = float(np.nanmax(np.abs(both))) if np.isfinite(both).any() else 1.0
    _heat(right, both, "RdBu", (-max(reach, 1e-9), max(reach, 1e-9)), signed=True)
    _frame(right, "Gain $p_{ii} - p_{ij}$ (points)", rows, [*columns, "$g_i$"])
    right.axvline(values.shape[1] - 0.5, color=INK, linewidth=1.6)
    right.set_xlabel("architecture of silo j; last: mean gain", fontsize=10, color=INK)
    return figure


def _range(values: NDArray[np.float64]) -> tuple[float, float]:
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    return (low, high) if high > low else (low - 1, high + 1)


def _heat(
    axes: Axes, values: NDArray[np.float64], colours: str, limits: tuple[float, float], *, signed: bool = False
) -> None:
    """Draws cells with their numbers; missing values stay white and empty."""
    image = axes.imshow(np.ma.masked_invalid(values), cmap=colours, vmin=limits[0], vmax=limits[1], aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            red, green, blue, _ = image.to_rgba(np.array([value]))[0]
            dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.55
            text = f"{value:{'+' if signed else ''}.1f}"
            axes.text(column, row, text, ha="center", va="center", fontsize=8.5, color="white" if dark else INK)


def _frame(axes: Axes, title: str, rows: Sequence[int], columns: Sequence[str]) -> None:
    quiet(axes, title=title, xlabel="architecture of silo j", ylabel="data of silo i")
    axes.grid(False)
    axes.set_yticks(range(len(rows)), [str(i) for i in rows])
    axes.set_xticks(range(len(columns)), columns)
    axes.tick_params(length=0)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)


def _mark_own(axes: Axes, rows: Sequence[int], columns: Sequence[int]) -> None:
    for at, silo in enumerate(rows):
        place = (columns.index(silo) - 0.5, at - 0.5)
        axes.add_patch(Rectangle(place, 1, 1, fill=False, edgecolor=INK, linewidth=1.6))
