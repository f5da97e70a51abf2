"""A picture of a partition: how many training samples of which classes each client has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np

from fedloom.experiments.report.drawing import BLUE, INK, new_figure, pdf, png, quiet, whole_numbers
from fedloom.platform.data.artefact import IntArray
from fedloom.platform.data.config import WITH_ALPHA, DataConfig
from fedloom.platform.data.federated import FederatedData, size_variation
from fedloom.platform.words import naming

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WRITERS = {".png": png, ".pdf": pdf}
MOST_CLIENTS = 50
"""Maximum number of clients that are drawn one by one; for more, distributions are drawn."""
MOST_NAMES, MOST_LETTERS = 30, 14
"""Maximum number of class names (for more classes, every k-th is named), and of characters of a name."""
MOST_NUMBERS = 24
"""Maximum number of clients, and of classes, for which every cell has room for its number."""
MOST_BINS = 40
WIDTH_IN, LINE = 8.0, 88
"""Width of the figure in inches, and characters of a line in bold."""


def check_picture(path: Path) -> None:
    """Raises ValueError if a picture cannot have this path; called before anything is written."""
    if path.suffix not in WRITERS:
        raise ValueError(f"--picture {path}: give a name that ends in {' or '.join(WRITERS)}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--picture {path}: {path.absolute().parent} is no folder; make it, or choose another")


def write_picture(path: Path, config: DataConfig, data: FederatedData) -> None:
    """Writes the picture of the clients' training samples as PNG or PDF."""
    image = WRITERS[path.suffix](partition_figure(config, data))
    with naming(path):
        path.write_bytes(image)


def class_counts(data: FederatedData) -> IntArray | None:
    """Every client's number of training samples of each class (num_clients, C); None if samples have many labels."""
    if data.label_variation() is None:
        return None
    labels = data.dataset.labels("train")[data.partition.all_indices("train")]
    counts = np.zeros((data.num_clients, data.dataset.num_classes), dtype=np.int64)
    np.add.at(counts, (np.repeat(np.arange(data.num_clients), data.sizes("train")), labels), 1)
    return counts


def partition_figure(config: DataConfig, data: FederatedData) -> Figure:
    """Clients by classes or, for many clients, the distributions of their sizes and numbers of classes."""
    sizes, counts = data.sizes("train"), class_counts(data)
    draw = _draw_clients if data.num_clients <= MOST_CLIENTS else _draw_distributions
    figure = draw(sizes, counts, data)
    figure.suptitle(fill(_asked(config, data), LINE), x=0.01, ha="left", fontsize=10.5, fontweight="bold", color=INK)
    figure.axes[0].set_title("\n".join(_came_out(data, sizes, counts)), loc="left", fontsize=9, color=INK, pad=10)
    return figure


def _asked(config: DataConfig, data: FederatedData) -> str:
    asked = [data.dataset.name, config.partition]
    asked += [f"alpha {config.alpha:g}"] if config.partition in WITH_ALPHA else []
    asked += [f"{config.shards_per_client} shards per client"] if config.partition == "shards" else []
    asked += [f"{data.num_clients:,} clients"]
    asked += [f"noise of variance up to {config.noise:g}"] if config.noise is not None else []
    asked += [f"rotated by up to {config.rotation:g}°"] if config.rotation is not None else []
    return ", ".join([*asked, f"seed {data.partition.generator['seed']}"])


def _came_out(data: FederatedData, sizes: IntArray, counts: IntArray | None) -> list[str]:
    spread = f"mean {sizes.mean():,.1f}, variation {size_variation(sizes):.2f}"
    lines = [f"training samples per client: {_span(sizes)}, {spread}"]
    if counts is not None:
        classes = (counts > 0).sum(axis=1)
        spread = f"median {np.median(classes):g}; label variation {data.label_variation():.2f}"
        lines.append(f"classes per client: {_span(classes)} of {counts.shape[1]}, {spread}")
    return lines


def _span(values: IntArray) -> str:
    return f"{values.min():,}" if values.min() == values.max() else f"{values.min():,} to {values.max():,}"


# -- up to fifty clients ----------------------------------------------------------------------------------------------


def _draw_clients(sizes: IntArray, counts: IntArray | None, data: FederatedData) -> Figure:
    heights = [1.2] if counts is None else [1.2, min(6.0, max(1.6, 0.3 * counts.shape[1]))]
    figure = new_figure((WIDTH_IN, sum(heights) + 1.5))
    panels = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    quiet(panels[0], ylabel="samples")
    panels[0].bar(np.arange(len(sizes)), sizes, width=0.9, color=BLUE)
    panels[0].grid(False, axis="x")
    if counts is not None:
        panels[0].tick_params(axis="x", length=0)
        _draw_shares(panels[1], counts, data.dataset.class_names)
        # The colour bar is beside both panels, so that their x axes stay aligned.
        bar = figure.colorbar(panels[1].collections[0], ax=panels, aspect=40, pad=0.01, ticks=[0.01, 0.1, 0.25, 0.5, 1])
        bar.ax.set_yticklabels(["1 %", "10 %", "25 %", "50 %", "100 %"], fontsize=8, color=INK)
        bar.set_label("share of a client's samples", fontsize=9, color=INK)
        bar.outline.set_visible(False)
    last, num_clients = panels[-1], data.num_clients
    last.set_xlim(-0.6, num_clients - 0.4)
    last.set_xlabel("clients", fontsize=10, color=INK)
    natural = data.partition.natural_clients
    if natural is None:
        last.set_xticks(np.arange(0, num_clients, _step(num_clients, 12)))
    else:
        names = [_short(data.dataset.client_names[client]) for client in natural.tolist()]
        last.set_xticks(np.arange(num_clients), names, rotation=90, fontsize=8)
    return figure


def _step(count: int, most: int) -> int:
    """The smallest step (1, 2, 5, 10, ...) at which labelling every step-th of `count` gives at most `most` labels."""
    steps = [each * int(10**power) for power in range(10) for each in (1, 2, 5)]
    return next(step for step in steps if count <= most * step)


def _short(name: str) -> str:
    """The name, cut at its beginning if it is long, since endings distinguish more names."""
    return name if len(name) <= MOST_LETTERS else f"…{name[1 - MOST_LETTERS :]}"


def _draw_shares(axes: Axes, counts: IntArray, names: Sequence[str]) -> None:
    """Draws each class as a share of each client's samples, on one scale for all partitions; sizes are shown above."""
    from matplotlib.colors import PowerNorm

    (num_clients, num_classes), shares = counts.shape, counts / counts.sum(axis=1, keepdims=True)
    edges = [np.arange(length + 1) - 0.5 for length in counts.shape]
    # White means no samples; the square root makes small shares visible.
    drawn = np.ma.masked_equal(shares.T, 0)
    axes.pcolormesh(*edges, drawn, cmap="Blues", norm=PowerNorm(0.5, 0, 1), edgecolors="white", linewidth=0.4)
    quiet(axes, ylabel="classes")
    axes.grid(False)
    step = _step(num_classes, MOST_NAMES)
    axes.set_yticks(np.arange(0, num_classes, step), [_short(name) for name in names[::step]])
    axes.invert_yaxis()
    if max(num_clients, num_classes) <= MOST_NUMBERS:
        for (client, label), count in np.ndenumerate(counts):
            colour = "white" if shares[client, label] > 0.3 else INK
            axes.text(client, label, f"{count or ''}", ha="center", va="center", fontsize=7, color=colour)


# -- more clients -----------------------------------------------------------------------------------------------------


def _draw_distributions(sizes: IntArray, counts: IntArray | None, data: FederatedData) -> Figure:
    del data
    figure = new_figure((WIDTH_IN, 3.8))
    panels = figure.subplots(1, 1 if counts is None else 2, squeeze=False)[0]
    quiet(panels[0], xlabel="training samples of a client", ylabel="clients")
    # Bins are whole numbers wide, so that every bin spans equally many sizes.
    width = -(-(sizes.max() - sizes.min() + 1) // MOST_BINS)
    panels[0].hist(sizes, np.arange(sizes.min(), sizes.max() + width + 1, width) - 0.5, color=BLUE, rwidth=0.9)
    panels[0].set_xlim(0, sizes.max() + width)
    if counts is not None:
        quiet(panels[1], xlabel="classes of a client")
        panels[1].hist((counts > 0).sum(axis=1), np.arange(counts.shape[1] + 1) + 0.5, color=BLUE, rwidth=0.9)
    for axes in panels:
        axes.grid(False, axis="x")
        whole_numbers(axes)
    return figure
