"""The figures of runs with stages and tiers, with their captions."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import pandas as pd

from fedloom.experiments.analysis.bounds import Bounds
from fedloom.experiments.analysis.convergence import convergence
from fedloom.experiments.analysis.details import confusions
from fedloom.experiments.analysis.frames import client_metrics, communication, communication_by_kind, pareto
from fedloom.experiments.analysis.kinds import SILOS, elastic_run_ids, silo_run_ids
from fedloom.experiments.analysis.labels import Labels
from fedloom.experiments.analysis.settings import Setting, settings_of
from fedloom.experiments.analysis.stages import ALONE, by_stage, real_rounds
from fedloom.experiments.analysis.tables import Tables
from fedloom.experiments.analysis.texts import PERPLEXITY, text_run_ids
from fedloom.experiments.report.pages.sheets import sheets
from fedloom.experiments.report.parts.picture import Picture
from fedloom.experiments.report.parts.words import REPEATED, sentence

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CAPTIONS = {
    "convergence": (
        "Convergence per stage",
        "Loss and accuracy against finished rounds. Solid: what the round's clients report on their own training data "
        "while they train. Dashed: the server's validation data after so many rounds; for the supernet the mean over "
        "its evaluated paths. Fine-tuning starts from the supernet's weights at round 0.",
    ),
    "pareto": (
        "Pareto front per tier",
        "Every candidate of the search, scored on validation data with the supernet's weights. Lines join the models "
        "that no other of the tier beats in accuracy and cost; the star is the tier's winner.",
    ),
    "communication": (
        "Bytes per stage",
        "Bytes that all clients together received and sent. The cumulative curves leave out the final evaluation; the "
        "rand-init baseline is counted on its own.",
    ),
    "confusion": (
        "Confusion matrix per tier",
        "Share in % of each class of the whole test set (rows) that the model took for each class (columns); all runs "
        "together.",
    ),
    "clients": (
        "Accuracy per client",
        "Each dot is a client's accuracy on its own test data with its tier's model; the triangle marks the worst "
        "client of the tier. Clients without test samples are left out.",
    ),
}
LOSS = "convergence-loss"
"""Name of the figure of loss; for several settings, loss and accuracy have separate figures to ease comparison."""

COMMUNICATION_OF_SILOS = (
    "Bytes that all silos together received and sent. The cumulative curves leave out the final evaluation and "
    "personalisation gains."
)
"""Caption of the figure of communication if all runs are cross-silo and therefore have no baseline."""

OVER_RUNS = {
    "convergence": "Lines are means over the runs, bands reach from the least to the greatest.",
    "pareto": "Every run has its own front and winner.",
    "communication": "Bars are means over the runs; every run has its own curve.",
    "confusion": "",
    "clients": "The clients of all runs are shown together.",
}
OVER_SETTINGS = "Each part is a setting, with the axes of the others"
WHERE_SIMILAR = {"communication": " where they sent similar amounts"}


def stage_pictures(tables: Tables, bounds: Bounds, labels: Labels) -> Iterator[Picture]:
    """The figures of every experiment, with a panel per setting."""
    settings = settings_of(tables)
    experiments = list(dict.fromkeys(s.experiment for s in settings))
    frames = _frames(tables, labels)
    for experiment in experiments:
        own = [s for s in settings if s.experiment == experiment]
        for sheet in sheets(own):
            for picture in _pictures(frames, sheet.settings, bounds, alone=len(own) == 1):
                labelled = sheet.labelled(picture)
                yield labelled.named(experiment) if len(experiments) > 1 else labelled


@dataclass(frozen=True)
class _Frames:
    """The data of the figures."""

    curves: pd.DataFrame
    candidates: pd.DataFrame
    kinds: pd.DataFrame
    rounds: pd.DataFrame
    clients: pd.DataFrame
    confusions: pd.DataFrame
    texts: frozenset[str]


def _frames(tables: Tables, labels: Labels) -> _Frames:
    return _Frames(
        curves=_labelled(_tier_convergence(tables), labels),
        candidates=_tier_candidates(tables),
        kinds=communication_by_kind(communication(tables)),
        rounds=by_stage(real_rounds(tables.rounds)),
        clients=client_metrics(tables),
        confusions=confusions(tables),
        texts=text_run_ids(tables),
    )


def _pictures(frames: _Frames, settings: Sequence[Setting], bounds: Bounds, *, alone: bool) -> Iterator[Picture]:
    # Imported here, because matplotlib takes a second to load and a run's summary does not need it.
    from fedloom.experiments.report.figures.clients import clients_figure
    from fedloom.experiments.report.figures.communication import communication_figure
    from fedloom.experiments.report.figures.confusion import confusion_figure
    from fedloom.experiments.report.figures.convergence import convergence_figure
    from fedloom.experiments.report.figures.drawing import Drawing
    from fedloom.experiments.report.figures.fronts import pareto_figure

    loss = PERPLEXITY if all(frames.texts.issuperset(s.run_ids) for s in settings) else "loss"
    values = {"convergence": (loss, "metric")} if alone else {"convergence": ("metric",), LOSS: (loss,)}
    # One at a time: each is drawn while the next is made.
    makers: dict[str, Callable[[], Figure | None]] = {
        **{name: partial(convergence_figure, frames.curves, settings, shown) for name, shown in values.items()},
        "pareto": lambda: pareto_figure(frames.candidates, settings, _macs_bounds(settings, bounds)),
        "communication": lambda: communication_figure(frames.kinds, frames.rounds, settings),
        "clients": lambda: clients_figure(frames.clients, settings),
        "confusion": lambda: confusion_figure(frames.confusions, settings),
    }
    for name, make in makers.items():
        figure = make()
        if figure is not None:
            yield Picture(name, _title(name, alone=alone), _caption(name, settings, alone=alone), Drawing(figure))


def _title(name: str, *, alone: bool) -> str:
    if name == LOSS or (name == "convergence" and not alone):
        return f"{CAPTIONS['convergence'][0]}: {'loss' if name == LOSS else 'accuracy'}"
    return CAPTIONS[name][0]


def _caption(name: str, settings: Sequence[Setting], *, alone: bool) -> str:
    key = "convergence" if name == LOSS else name
    of_silos = name == "communication" and all(s.kind == SILOS for s in settings)
    lines = [COMMUNICATION_OF_SILOS if of_silos else CAPTIONS[key][1]]
    if any(len(s.run_ids) > 1 for s in settings):
        lines.append(OVER_RUNS[key])
    if key != "pareto" and any(s.repeats_seeds for s in settings):
        lines.append(sentence(REPEATED))
    return " ".join([*lines, *([] if alone else [f"{OVER_SETTINGS}{WHERE_SIMILAR.get(key, '')}."])])


def _labelled(frame: pd.DataFrame, labels: Labels) -> pd.DataFrame:
    """The frame with labels instead of ids for subnets that are trained alone; tiers stay as they are."""
    names = zip(frame["run_id"], frame["kind"], frame["tier"], strict=True)
    shown = [labels.of(str(run), str(tier)) if kind == ALONE else tier for run, kind, tier in names]
    return frame.assign(tier=pd.Series(shown, frame.index, dtype=object))


def _tier_candidates(tables: Tables) -> pd.DataFrame:
    """Candidates of searches for tiers, without SuperFedNAS, which has its own figure, and without silos' methods."""
    frame = pareto(tables)
    return frame[~frame["run_id"].isin([*elastic_run_ids(tables), *silo_run_ids(tables)])]


def _tier_convergence(tables: Tables) -> pd.DataFrame:
    """Curves of all runs except cross-silo runs, whose curves show the silos' own models in another figure."""
    frame = convergence(tables)
    return frame[~frame["run_id"].isin(silo_run_ids(tables))]


def _macs_bounds(settings: Sequence[Setting], bounds: Bounds) -> dict[str, dict[str, float]]:
    """The tiers' bounds by the setting's name, for settings with bounds in MACs that are equal in all runs."""
    found = {}
    for setting in settings:
        runs = [{tier: bound for (of, tier), bound in bounds.items() if of == run_id} for run_id in setting.run_ids]
        same = all(run == runs[0] for run in runs)
        if same and setting.config.get("tiers", {}).get("cost") == "macs":
            found[setting.name] = runs[0]
    return found
