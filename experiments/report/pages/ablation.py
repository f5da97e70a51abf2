"""The report of an ablation: tables of its trials, settings and axes, and figures as in papers."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from rich.console import RenderableType

from fedloom.experiments.analysis.ablation import (
    ablation_frame,
    against_reference,
    axis_value,
    by_setting,
    is_grid,
    load_ablation,
    references,
)
from fedloom.experiments.analysis.frames import METRIC
from fedloom.experiments.analysis.labels import labels_of
from fedloom.experiments.analysis.outcomes import outcomes
from fedloom.experiments.analysis.tables import ALL_TABLES, Tables
from fedloom.experiments.report.pages.content import REFRESH_S, Content, RunFacts
from fedloom.experiments.report.pages.files import ReportFiles, write_content
from fedloom.experiments.report.pages.outcome_pictures import FRONTS
from fedloom.experiments.report.pages.values import records
from fedloom.experiments.report.parts.block import rich_block
from fedloom.experiments.report.parts.picture import Picture
from fedloom.experiments.report.parts.words import BARS
from fedloom.experiments.report.tables.ablation import axis_blocks, points_block, subnet_names, trials_block
from fedloom.experiments.report.tables.failures import failures_block
from fedloom.experiments.report.tables.outcomes import outcomes_block
from fedloom.experiments.store.ablations import FIGURES, FOLDER, PLAN, Ablation, ablation_ids, meant_ablation, short
from fedloom.experiments.store.trials import FINAL, TrialState, trial_states
from fedloom.platform.results.manifest import check_files
from fedloom.platform.results.paths import list_runs, start_of
from fedloom.platform.results.store import output_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedloom.experiments.report.figures.ablation_axes import Studied


UNFINISHED = ("waiting", "running", "stalled")
"""States of trials that may continue without the user's intervention."""


def chosen_ablation(results: Path, given: Sequence[str]) -> str | None:
    """The id of the ablation that the report is about; None if it is about runs.

    Without `given` it is about what was started last: an ablation rather than the last of its trials. Raises ValueError
    for several ablations, for an ablation together with runs, and for what may mean either.
    """
    if not given:
        return _latest_ablation(results)
    own = [found for name in given if (found := meant_ablation(results, name)) is not None]
    if not own:
        return None
    if len(given) > 1:
        raise ValueError(
            f"{' '.join(given)}: {own[0].ablation_id} is an ablation, and a report is of one ablation or of runs; give "
            "the ablation's id alone"
        )
    return own[0].ablation_id


def _latest_ablation(results: Path) -> str | None:
    """The ablation that was started last, if no run but its own trials was after it."""
    starts = {name: start_of(name, results / FOLDER / name / PLAN) for name in ablation_ids(results)}
    if not starts:
        return None
    latest = max(starts, key=lambda name: starts[name])
    runs = [run for run in list_runs(results) if not run.run_id.startswith(latest)]
    return None if any(start_of(run.run_id, run.config) > starts[latest] for run in runs) else latest


def write_ablation_report(results: Path, ablation_id: str, out: Path | None = None) -> ReportFiles:
    """Writes report.html, report.md, tables.tex and the figures (PNG, PDF) of an ablation in its current state.

    The default of `out` is `results/reports/ABLATION_ID`. Raises ValueError for an unknown ablation, a damaged file,
    or a folder that cannot be written.
    """
    ablation, tables = load_ablation(results, ablation_id)
    for paths in tables.paths:
        check_files(paths)
    folder = output_folder(results, out, f"reports/{ablation.ablation_id}")
    content = ablation_content(ablation, trial_states(Path(results), ablation), tables)
    return write_content(content, folder, [p.run_id for p in tables.paths])


def ablation_content(ablation: Ablation, states: Sequence[TrialState], tables: Tables) -> Content:
    """The content of an ablation's report."""
    frame = ablation_frame(tables, ablation)
    names = subnet_names(frame, labels_of(tables))
    blocks = [
        trials_block(ablation, states, tables),
        outcomes_block(outcome_groups(ablation, tables), tuple(ablation.axes)),
        points_block(ablation, frame, names, wide=True),
        *axis_blocks(ablation, frame, names),
        failures_block(tables),
    ]
    at_work = any(s.state in UNFINISHED for s in states)
    unknown = [f"There is no figure {n!r}: there are {', '.join(FIGURES)}." for n in _figures(ablation, known=False)]
    return Content(
        title=f"{ablation.name} on {ablation.experiment}: {ablation.title}".removesuffix(": "),
        runs=(_facts(ablation),),
        missing=(*progress_of(states), *unknown),
        blocks=tuple(block for block in blocks if block.rows),
        pictures=tuple(_pictures(ablation, frame, names, tables)),
        about="Ablation",
        refresh_s=REFRESH_S if at_work else None,
        pictures_first=True,
    )


def outcome_groups(ablation: Ablation, tables: Tables) -> list[tuple[tuple[str, ...], pd.DataFrame]]:
    """The settings of an ablation in order, with the rows of what their trials end with."""
    frame = outcomes(tables)
    runs: dict[tuple[str, ...], list[str]] = {}
    for trial in ablation.trials:
        runs.setdefault(tuple(short(trial.setting[axis]) for axis in ablation.axes), []).append(trial.run_id)
    groups = [(labels, frame[frame["run_id"].isin(run_ids)]) for labels, run_ids in runs.items()]
    return [(labels, rows) for labels, rows in groups if len(rows)]


def _figures(ablation: Ablation, *, known: bool) -> list[str]:
    return [name for name in dict.fromkeys(ablation.figures) if (name in FIGURES) is known]


def progress_of(states: Sequence[TrialState]) -> list[str]:
    """A sentence with the number of trials in each state; empty if all trials are done."""
    counts = pd.Series([s.state for s in states]).value_counts().to_dict()
    done = sum(counts.get(state, 0) for state in FINAL)
    if done == len(states):
        return []
    others = ", ".join(f"{count} {state}" for state, count in counts.items() if state != "done")
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
    return [f"{counts.get('done', 0)} of {len(states)} trials are done at {now}; {others}."]


def _facts(ablation: Ablation) -> RunFacts:
    axes = {axis: ", ".join(short(value) for value in values) for axis, values in ablation.axes.items()}
    whose = {True: "", False: " (the first value; the experiment has another)"}
    given = [f"{axis}={short(v)}{whose[axis in ablation.reference]}" for axis, v in references(ablation).items()]
    facts = [
        ("ablation", ablation.ablation_id),
        ("experiment", ablation.experiment),
        *((f"axis {axis}", text) for axis, text in axes.items()),
        ("references", ", ".join(given)),
        ("seeds", ", ".join(map(str, ablation.seeds))),
        ("trials", f"{len(ablation.trials)} ({'grid' if is_grid(ablation) else 'random search'})"),
        ("overrides", " ".join(ablation.overrides)),
        ("scheduler", str(ablation.scheduler.get("kind", "none"))),
        ("created", ablation.created),
    ]
    config = dict(ablation.trials[0].config) if ablation.trials else {}
    return RunFacts(ablation.ablation_id, tuple(facts), json.dumps(config, indent=1))


def _pictures(ablation: Ablation, frame: pd.DataFrame, names: Mapping[str, str], tables: Tables) -> Iterator[Picture]:
    # Imported here, because matplotlib takes a second to load and a summary does not need it.
    from fedloom.experiments.report.figures import ablation_axes, ablation_rounds
    from fedloom.experiments.report.figures.drawing import Drawing
    from fedloom.experiments.report.figures.outcomes import outcomes_figure

    makers: dict[str, Callable[[Studied], Figure | None]] = {
        "macs_by_axis": ablation_axes.macs_figure,
        "stages_by_axis": lambda studied: ablation_rounds.stages_figure(studied, tables),
        "tiers_by_axis": ablation_axes.tiers_figure,
        "metric_by_axis": ablation_axes.metric_figure,
        "time_by_axis": lambda studied: ablation_rounds.time_figure(studied, tables),
        "fronts": lambda _studied: outcomes_figure(outcome_groups(ablation, tables)),
        "convergence": lambda studied: ablation_rounds.rounds_figure(studied, tables),
    }
    for name in (*_figures(ablation, known=True), "convergence"):
        figure = makers[name](ablation_axes.Studied(ablation, frame, names))
        if figure is not None:
            title, caption = CAPTIONS[name]
            yield Picture(name, title, f"{caption} {_held_caption(ablation)}", Drawing(figure))


def _held_caption(ablation: Ablation) -> str:
    if len(ablation.axes) == 1:
        return ""
    if not is_grid(ablation):
        return "The other axes vary with what is shown: this is a random search."
    assumed = [axis for axis in ablation.axes if axis not in ablation.reference]
    first = f" ({', '.join(assumed)}: the first value, as the experiment's own is not among them)" if assumed else ""
    return f"Axes that are not shown are at their references{first}."


_BARS = f"{BARS} What would leave the panel is cut off."
CAPTIONS = {
    "macs_by_axis": (
        "Test accuracy against MACs, per axis",
        f"Each point is a subnet of the family, cut from the trained supernet, or a tier's final model. {_BARS}",
    ),
    "stages_by_axis": (
        "From training to the tiers' models",
        "Above: dots are paths of the supernet in training (a step is one client's local training; the line is their "
        "mean), then the candidates of the search in the order of their scoring (a step is one candidate), all on the "
        "server's validation data. Below: the test accuracy of each tier; the axis need not begin at 0. "
        f"{_BARS}",
    ),
    "tiers_by_axis": (
        "Test accuracy per tier",
        f"A bar per value; the axis need not begin at 0. {_BARS}",
    ),
    "metric_by_axis": (
        "Test accuracy along each axis",
        f"Means over tiers and subnets. The dotted line is the reference. {_BARS}",
    ),
    "time_by_axis": (
        "Accuracy per simulated hour",
        "Accuracy on the server's validation data against the simulated time since the stage began, a round taking as "
        "long as its slowest client; means over seeds, bands from the least seed to the greatest.",
    ),
    "fronts": FRONTS,
    "convergence": (
        "Convergence",
        "Accuracy on the server's validation data against finished rounds, mean over seeds; bands reach from the least "
        "seed to the greatest. Dashed where a stage is not validated: what its clients report while they train.",
    ),
}


def ablation_table(results: Path, ablation_id: str) -> RenderableType:
    """The table of an ablation's settings for the terminal; fast, without matplotlib."""
    ablation, tables = load_ablation(results, ablation_id, tables=[t for t in ALL_TABLES if t != "clients"])
    frame = ablation_frame(tables, ablation)
    block = points_block(ablation, frame, subnet_names(frame, labels_of(tables)), wide=False)
    return rich_block(block, stacked=False)


def ablation_json(results: Path, ablation_id: str) -> dict[str, Any]:
    """The report's numbers as JSON values: ablation, trials, missing, and the rows of frame, settings, differences."""
    ablation, tables = load_ablation(results, ablation_id)
    frame = ablation_frame(tables, ablation)
    axes, states = list(ablation.axes), trial_states(Path(results), ablation)
    plan = {"ablation_id": ablation.ablation_id, "name": ablation.name, "title": ablation.title}
    compared = [against_reference(frame, ablation, axis) for axis in axes] if is_grid(ablation) else []
    return {
        "ablation": {**plan, "experiment": ablation.experiment, "references": references(ablation)},
        "trials": [_trial_json(state) for state in states],
        "missing": progress_of(states),
        "frame": records(frame),
        "settings": records(by_setting(frame, METRIC, axes)),
        "differences": [row for rows in compared for row in records(rows)],
    }


def _trial_json(state: TrialState) -> dict[str, Any]:
    trial = state.trial
    setting = {axis: axis_value(value) for axis, value in trial.setting.items()}
    place = {"trial": trial.index, "run_id": trial.run_id, "seed": trial.seed, "setting": setting}
    return {**place, "state": state.state, "message": state.message}
