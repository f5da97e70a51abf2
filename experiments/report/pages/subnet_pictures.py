"""The figures of SuperFedNAS runs with their captions."""

from collections.abc import Iterator, Sequence

from fedloom.experiments.analysis.costs import cost_comparisons
from fedloom.experiments.analysis.kinds import SUBNETS, elastic_run_ids
from fedloom.experiments.analysis.labels import Labels
from fedloom.experiments.analysis.settings import Setting, settings_of
from fedloom.experiments.analysis.stages import real_rounds
from fedloom.experiments.analysis.subnets import scored, subnets
from fedloom.experiments.analysis.tables import Tables, only
from fedloom.experiments.report.pages.sheets import sheets
from fedloom.experiments.report.parts.picture import Drawn, Picture
from fedloom.experiments.report.parts.words import REPEATED, sentence

CAPTIONS = {
    "accuracy-macs": (
        "Test accuracy against MACs",
        "Every point is a subnet on the server's whole test set. Lines join a family: subnets cut from one supernet as "
        "it is, or each trained alone. Stars are winners of the search, cut without any training. Over several runs of "
        "a configuration points are means, and bands and bars reach from the least to the greatest.",
    ),
    "search": (
        "What the search saw",
        "Subnets of the trained supernet, scored on the server's validation data. Grey: the samples that the "
        "predictors learn from. The line joins what no other of NSGA-II's verified front beats, paler dots are its "
        "rest. Coloured dots were scored for a target; the star is its winner.",
    ),
    "beta": (
        "Share of the largest subnet",
        "beta, the weight in the average of the client that was assigned the largest subnet, in every round; the other "
        "clients share the rest.",
    ),
    "cost": (
        "Cost of k models",
        "Bytes both ways and MACs of training, over all clients. Marked: iFedAvg, which trains each member of the "
        "family alone, added up in the family's order. Level: one supernet for all of them. Dashed: FedAvg on the "
        "largest member alone. The number is iFedAvg's cost in units of the supernet's.",
    ),
}


def subnet_pictures(tables: Tables, labels: Labels) -> Iterator[Picture]:
    """The figures of all SuperFedNAS runs; none if there is no such run."""
    elastic = only(tables, elastic_run_ids(tables))
    if not elastic.paths:
        return
    # Imported here, because matplotlib takes a second to load and a run's summary does not need it.
    from fedloom.experiments.report.figures.costs import cost_figure
    from fedloom.experiments.report.figures.drawing import Drawing
    from fedloom.experiments.report.figures.subnets import beta_figure, search_figure, subnet_accuracy_figure

    settings = [s for s in settings_of(tables) if s.kind == SUBNETS]
    frames = (subnets(elastic, labels), scored(elastic), real_rounds(elastic.rounds))
    for sheet in sheets(settings):
        figures = {
            "accuracy-macs": subnet_accuracy_figure(frames[0], sheet.settings),
            "search": search_figure(frames[1], sheet.settings),
            "beta": beta_figure(frames[2], sheet.settings),
        }
        for name, figure in figures.items():
            if figure is not None:
                yield sheet.labelled(_picture(name, Drawing(figure), sheet.settings))
    figure = cost_figure(cost_comparisons(tables, labels))
    if figure is not None:
        yield _picture("cost", Drawing(figure), settings)


def _picture(name: str, drawing: Drawn, settings: Sequence[Setting]) -> Picture:
    title, caption = CAPTIONS[name]
    repeated = f" {sentence(REPEATED)}" if any(s.repeats_seeds for s in settings) else ""
    return Picture(name, title, f"{caption}{repeated}", drawing)
