"""The figures of cross-silo runs with their captions."""

from collections.abc import Iterator

from fedloom.experiments.analysis.silo_curves import curves, phases
from fedloom.experiments.analysis.silo_gains import p_matrix
from fedloom.experiments.analysis.silo_summaries import silo_settings
from fedloom.experiments.analysis.silos import per_silo, silos
from fedloom.experiments.analysis.tables import Tables, only
from fedloom.experiments.report.pages.sheets import sheets
from fedloom.experiments.report.parts.picture import Picture
from fedloom.experiments.report.parts.words import REPEATED, sentence

CAPTIONS = {
    "silos": (
        "Accuracy of the silos",
        "Each dot is a silo's model on the silo's own test data; the line is their mean, the triangle the worst. "
        "Rings, where there are any, are the shared model before personalisation. Silos of all runs of a setting are "
        "drawn together.",
    ),
    "phases": (
        "Curves and phases",
        "Validation accuracy of the silos' models and the loss on their training data, means over silos. Bands: the "
        "standard deviation over silos of one run, or from the least to the greatest of several runs. Phases: before "
        "the search, until the last silo has decided every edge, and after; where searching settings differ in them, "
        "bars in their colours above the axes span their searches alone. A silo whose validation data has joined its "
        "training data is not scored on it.",
    ),
    "gains": (
        "Personalisation gains",
        "Left: test accuracy on silo i's data of silo j's architecture, fine-tuned on silo i's training data; framed: "
        "its own. Right: what its own architecture is better by, in percentage points, and the mean gain of each silo. "
        "White: not measured, or its own.",
    ),
}


def silo_pictures(tables: Tables) -> Iterator[Picture]:
    """The figures of all cross-silo runs, then each run's gains and cells; none if there is no such run."""
    own = silos(tables)
    if not own.paths:
        return
    # Imported here, because matplotlib takes a second to load and a run's summary does not need it.
    from fedloom.experiments.report.figures.drawing import Drawing
    from fedloom.experiments.report.figures.silos import curves_figure, silo_accuracy_figure

    measured, trained, searched = per_silo(own), curves(own), phases(own)
    for sheet in sheets(silo_settings(tables)):
        figures = {
            "silos": silo_accuracy_figure(measured, sheet.settings),
            "phases": curves_figure(trained, searched, sheet.settings),
        }
        repeated = f" {sentence(REPEATED)}" if any(s.repeats_seeds for s in sheet.settings) else ""
        for name, figure in figures.items():
            if figure is not None:
                title, caption = CAPTIONS[name]
                yield sheet.labelled(Picture(name, title, f"{caption}{repeated}", Drawing(figure)))
    for paths in own.paths:
        for picture in _of_run(only(own, [paths.run_id])):
            yield picture.named(paths.run_id) if len(own.paths) > 1 else picture


def _of_run(run: Tables) -> Iterator[Picture]:
    """The run's gains and the cells of its silos, reduction cells first as in the paper (SPIDER, Fig. 2)."""
    from fedloom.experiments.report.figures.cells import CAPTION, cell_pictures
    from fedloom.experiments.report.figures.drawing import Drawing
    from fedloom.experiments.report.figures.gains import gains_figure

    figure = gains_figure(p_matrix(run))
    if figure is not None:
        yield Picture("gains", *CAPTIONS["gains"], Drawing(figure))
    for cell_type, cells, left_out in cell_pictures(run):
        more = f" {left_out} more different cells are not drawn." if left_out else ""
        yield Picture(f"{cell_type}-cells", f"{cell_type.capitalize()} cells", f"{CAPTION}{more}", Drawing(cells))
