"""The figure of what settings end with, with its caption."""

from collections.abc import Iterator

from fedloom.experiments.report.parts.picture import Picture
from fedloom.experiments.report.parts.words import BARS
from fedloom.experiments.report.tables.outcomes import Groups

FRONTS = (
    "Accuracy against what it costs",
    "A point per setting: the mean test accuracy of its final models against the bytes that all clients received and "
    "sent, the MACs of forward passes and the simulated time, all of the method's own stages. The "
    "line joins the settings that no other beats in both. "
    f"{BARS}",
)
"""Title and caption."""


def outcome_pictures(groups: Groups) -> Iterator[Picture]:
    """The figure, if at least two settings were evaluated."""
    # Imported here, because matplotlib takes a second to load and a summary does not need it.
    from fedloom.experiments.report.figures.drawing import Drawing
    from fedloom.experiments.report.figures.outcomes import outcomes_figure

    figure = outcomes_figure(groups)
    if figure is not None:
        yield Picture("fronts", *FRONTS, Drawing(figure))
