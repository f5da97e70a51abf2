"""Which figures a report of cross-silo runs has, and what they say."""

from collections.abc import Iterator

from fedloom.experiments.analysis.settings import settings_of
from fedloom.experiments.analysis.silos import curves, p_matrix, per_silo, phases, silos
from fedloom.experiments.analysis.tables import Tables, only
from fedloom.experiments.report.picture import Picture

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
    """The figures of all cross-silo runs together, then each run's gains and cells; none if there is no such run."""
    own = silos(tables)
    if not own.paths:
        return
    # Here, because matplotlib takes a second to load and a run's summary does without.
    from fedloom.experiments.report import silo_plots as plots
    from fedloom.experiments.report.style import png

    settings = settings_of(own)
    together = {
        "silos": plots.accuracy_figure(per_silo(own), settings),
        "phases": plots.curves_figure(curves(own), phases(own), settings),
    }
    for name, figure in together.items():
        if figure is not None:
            yield Picture(name, *CAPTIONS[name], png(figure))
    for paths in own.paths:
        run, named = only(own, [paths.run_id]), len(own.paths) > 1
        figure = plots.gains_figure(p_matrix(run))
        if figure is not None:
            title, caption = CAPTIONS["gains"]
            yield Picture(_name("gains", paths.run_id, named), _title(title, paths.run_id, named), caption, png(figure))
        yield from _cells(run, paths.run_id, named)


def _name(name: str, run_id: str, named: bool) -> str:
    return f"{name}-{run_id}" if named else name


def _title(title: str, run_id: str, named: bool) -> str:
    return f"{title}: {run_id}" if named else title


def _cells(run: Tables, run_id: str, named: bool) -> Iterator[Picture]:
    """The cells of the run's silos, reduction cells first as in the paper (SPIDER, Fig. 2)."""
    from fedloom.experiments.report.cells import CAPTION, cell_pictures
    from fedloom.experiments.report.style import png

    for cell_type, figure, left_out in cell_pictures(run):
        more = f" {left_out} more different cells are not drawn." if left_out else ""
        title = _title(f"{cell_type.capitalize()} cells", run_id, named)
        yield Picture(_name(f"{cell_type}-cells", run_id, named), title, f"{CAPTION}{more}", png(figure))
