"""The report of runs: its content, its summary for the terminal, and its numbers as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from rich.console import Group, RenderableType
from rich.text import Text

from fedloom.experiments.analysis.clients import client_metrics, confusions, failures, fairness, paragraphs, per_class
from fedloom.experiments.analysis.outcomes import outcomes
from fedloom.experiments.analysis.rounds import communication, communication_by_kind, convergence
from fedloom.experiments.analysis.seeds import Estimate, is_absent
from fedloom.experiments.analysis.settings import NOT_SET, Setting, settings_of, value_text
from fedloom.experiments.analysis.silos import (
    SiloSummary,
    p_matrix,
    per_silo,
    personalisation_gains,
    phases,
    silo_summaries,
)
from fedloom.experiments.analysis.subnets import (
    SEARCHED,
    Labels,
    Subnet,
    SubnetSummary,
    cost_comparisons,
    labels_of,
    subnet_summaries,
    subnets,
    targets_of,
)
from fedloom.experiments.analysis.tables import (
    ALL_TABLES,
    ALL_TIERS,
    ALONE,
    METRIC,
    SHARED,
    SILOS,
    SUBNETS,
    TIERS,
    Bounds,
    Tables,
    by_stage,
    configuration,
    elastic_run_ids,
    is_dry,
    kind_of,
    latest_run,
    load,
    only,
    real_rounds,
    silo_run_ids,
    upper_bounds,
    with_silo_clients,
    with_training,
)
from fedloom.experiments.analysis.tiers import PERPLEXITY, pareto, per_tier, text_run_ids, tiers_of, with_perplexity
from fedloom.experiments.report.classes import class_blocks, confusion_figure, paragraph_block
from fedloom.experiments.report.clients import clients_figure, failures_block, fairness_blocks
from fedloom.experiments.report.communication import communication_block, communication_figure, dry_block
from fedloom.experiments.report.content import REFRESH_S, Block, Content, Picture, RunFacts, rich_block, sheets
from fedloom.experiments.report.convergence import convergence_figure
from fedloom.experiments.report.outcomes import Groups, outcome_pictures, outcomes_block
from fedloom.experiments.report.pages import ReportFiles, write_content
from fedloom.experiments.report.silos import missing_of_silos, silo_blocks, silo_pictures
from fedloom.experiments.report.subnets import cost_block, subnet_block, subnet_pictures
from fedloom.experiments.report.tiers import Summary, narrow_tier_block, pareto_figure, summarise, tier_block
from fedloom.experiments.report.wording import ABSENT, REPEATED, sentence, setting_head
from fedloom.platform.plugins import called
from fedloom.platform.results.manifest import check_files
from fedloom.platform.results.paths import RunPaths
from fedloom.platform.results.status import Status, read_status
from fedloom.platform.results.store import output_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure


AT_WORK = ("running", "stalled")
"""States of runs of which there may be more to report."""


def load_chosen(results: Path, run_ids: Sequence[str] | None = None, tables: Iterable[str] = ALL_TABLES) -> Tables:
    """Loads the tables of these runs (ids or unambiguous prefixes), or of the latest run if none is given."""
    return load(results, run_ids or [latest_run(results)], tables=tables)


def write_report(results: Path, run_ids: Sequence[str] | None = None, out: Path | None = None) -> ReportFiles:
    """Writes report.html, report.md, tables.tex and the plots of these runs (default: the latest run).

    Runs are given by ids, their beginnings, names or tags. The default of `out` is `results/reports/RUN`. Runs may be
    active, failed or without some stages; the report names the missing parts.
    Raises ValueError for an unknown run, a damaged file, or a folder that cannot be written.
    """
    tables = load_chosen(results, run_ids)
    for paths in tables.paths:
        check_files(paths)
    folder = output_folder(results, out, f"reports/{_folder_name(tables.paths)}")
    return write_content(report_content(tables), folder, [p.run_id for p in tables.paths])


def _folder_name(paths: Sequence[RunPaths]) -> str:
    first = paths[0].run_id
    if len(paths) == 1:
        return first
    ids = sha256("\n".join(sorted(p.run_id for p in paths)).encode()).hexdigest()[:8]
    return f"{first}-and-{len(paths) - 1}-more-{ids}"


def report_content(tables: Tables) -> Content:
    """The content of a report of these runs."""
    bounds, labels = upper_bounds(tables), labels_of(tables)
    settings = settings_of(tables)
    return Content(
        title=_title(settings),
        runs=facts_of(tables, settings),
        refresh_s=REFRESH_S if any(state_of(tables, p) in AT_WORK for p in tables.paths) else None,
        missing=(*missing_of(tables), *unknown_bounds(tables, bounds)),
        blocks=tuple(block for block in _blocks(tables, settings, bounds, labels) if block.rows),
        pictures=chain(
            outcome_pictures(outcome_groups(tables, settings)),
            subnet_pictures(tables, labels),
            silo_pictures(tables),
            stage_pictures(tables, bounds, labels),
        ),
    )


def _title(settings: Sequence[Setting]) -> str:
    experiments = dict.fromkeys(s.experiment for s in settings)
    run_ids = [run_id for setting in settings for run_id in setting.run_ids]
    runs = f"run {run_ids[0]}" if len(run_ids) == 1 else f"{len(run_ids)} runs"
    return f"{', '.join(experiments)}: {runs}{f' of {len(settings)} settings' if len(settings) > 1 else ''}"


def _blocks(tables: Tables, settings: Sequence[Setting], bounds: Bounds, labels: Labels) -> list[Block]:
    return [
        settings_block(settings),
        *([outcomes_block(outcome_groups(tables, settings), (setting_head(settings),))] if len(settings) > 1 else []),
        *(tier_block(summary, tables) for summary in tier_summaries(tables, bounds)),
        *(subnet_block(summary, wide=True) for summary in subnet_summaries(tables, labels)),
        *(cost_block(comparison) for comparison in cost_comparisons(tables, labels)),
        *silo_blocks(tables, wide=True),
        *fairness_blocks(tables, settings),
        *class_blocks(tables, settings),
        paragraph_block(tables, settings),
        communication_block(tables, settings, labels),
        failures_block(tables, settings),
    ]


def outcome_groups(tables: Tables, settings: Sequence[Setting]) -> Groups:
    """The settings with the rows of what their runs end with."""
    frame = outcomes(with_training(tables))
    return [((setting.name,), setting.rows(frame)) for setting in settings]


def tier_summaries(tables: Tables, bounds: Bounds) -> list[Summary]:
    """The tiers of the runs, per setting."""
    return summarise(with_perplexity(per_tier(tables, bounds), tables), fairness(tables), settings_of(tables))


def summary_table(results: Path, run_ids: str | Sequence[str] | None = None) -> RenderableType:
    """The tables of these runs for the terminal, per setting; fast, without matplotlib.

    Raises ValueError for an unknown run or a damaged table.
    """
    ids = [run_ids] if isinstance(run_ids, str) else run_ids
    tables = with_silo_clients(load_chosen(results, ids, [t for t in ALL_TABLES if t != "clients"]))
    summaries, labels = tier_summaries(tables, upper_bounds(tables)), labels_of(tables)
    blocks = [
        *(narrow_tier_block(summary) for summary in summaries),
        *(subnet_block(summary, wide=False) for summary in subnet_summaries(tables, labels)),
        *(dry_block(tables, p.run_id, labels) for p in tables.paths if is_dry(tables, p.run_id)),
        *(cost_block(comparison) for comparison in cost_comparisons(tables, labels)),
        *silo_blocks(tables, wide=False),
    ]
    shown = [rich_block(block, apart=ALL_TIERS) for block in blocks if block.rows]
    return Group(*shown, *(Text(line, style="yellow") for line in missing_of(tables)))


def facts_of(tables: Tables, settings: Sequence[Setting]) -> tuple[RunFacts, ...]:
    """The facts of each run; they include the name of its setting if there are several settings."""
    named = {run_id: s.name for s in settings for run_id in s.run_ids} if len(settings) > 1 else {}
    return tuple(_facts(tables, paths, named.get(paths.run_id)) for paths in tables.paths)


def _facts(tables: Tables, paths: RunPaths, setting: str | None) -> RunFacts:
    found = tables.runs[tables.runs["run_id"] == paths.run_id].to_dict(orient="records")
    row: dict[str, Any] = {str(k): v for k, v in found[0].items()} if found else {}
    facts = [("experiment", paths.experiment), ("run", paths.run_id), ("status", state_of(tables, paths))]
    facts += [(key, _words(row.get(key))) for key in ("name", "tags") if not is_absent(row.get(key))]
    facts += [("setting", setting)] if setting is not None else []
    facts += [(name, called(_plain(row.get(name)))) for name in ("method", "space", "dataset")]
    names = ("seeds", "versions", "source_hash", "partition_hash")
    facts += [(name.replace("_", " "), _plain(row.get(name))) for name in names]
    facts += [(name, _time(row.get(name))) for name in ("started", "ended")]
    if not is_absent(row.get("error")):
        facts.append(("error", str(row["error"])))
    return RunFacts(paths.run_id, tuple(facts), json.dumps(configuration(tables, paths.run_id), indent=1))


def _words(text: Any) -> str:
    """A text, or the texts of a JSON list."""
    return ", ".join(json.loads(text)) if str(text).startswith("[") else str(text)


def _time(value: Any) -> str:
    return ABSENT if is_absent(value) else f"{value:%Y-%m-%d %H:%M:%S} UTC"


def _plain(text: Any) -> str:
    """Formats a JSON object as "name value, name value"; other text stays as it is."""
    if is_absent(text):
        return ABSENT
    if not str(text).startswith("{"):
        return str(text)
    return ", ".join(f"{name} {value}" for name, value in json.loads(str(text)).items())


def status_of(paths: RunPaths) -> Status | None:
    """The run's status file; None without one, as in a copied folder, for which the table `runs` suffices."""
    try:
        return read_status(paths.status)
    except ValueError:
        return None


def state_of(tables: Tables, paths: RunPaths) -> str:
    """The run's current state, from its status file, else from the table `runs`, without whose row no run is done."""
    status = status_of(paths)
    known = tables.runs.loc[tables.runs["run_id"] == paths.run_id, "status"].dropna()
    row = str(known.iloc[0]) if len(known) else "unknown"
    if status is None:
        return row
    return "interrupted" if status.state == "done" != row else status.state


DRY = (
    "a dry run: nothing was trained, so there are no losses, no accuracies and no models; bytes, MACs and "
    "simulated times are those of the assignments"
)


def missing_of(tables: Tables) -> tuple[str, ...]:
    """One sentence for each part of the report that a run does not have."""
    several = len(tables.paths) > 1
    lines = [
        f"{paths.run_id}: {line}." if several else sentence(line)
        for paths in tables.paths
        for line in _missing(tables, paths)
    ]
    dry = [p.run_id for p in tables.paths if is_dry(tables, p.run_id)]
    return (*lines, *([f"{', '.join(dry)}: {DRY}." if several else sentence(DRY)] if dry else []))


def _missing(tables: Tables, paths: RunPaths) -> list[str]:
    run, state = only(tables, [paths.run_id]), state_of(tables, paths)
    lines = [] if state == "done" else [_progress(paths, state)]
    if run.rounds.empty:
        return [*lines, "no finished round is in the tables yet"]
    if is_dry(tables, paths.run_id):
        return lines  # one sentence covers all dry runs
    tested = run.evaluations[(run.evaluations["split"] == "test") & (run.evaluations["metric"] == METRIC)]
    gaps = {
        TIERS: lambda: _missing_of_tiers(run, tested, state),
        SHARED: lambda: _missing_of_tiers(run, tested, state),
        SUBNETS: lambda: _missing_of_subnets(run, tested, state),
        SILOS: lambda: missing_of_silos(tables, paths.run_id, state),
    }
    return [*lines, *gaps[kind_of(tables, paths.run_id)](), *_without_test_samples(tested)]


def _missing_of_tiers(run: Tables, tested: pd.DataFrame, state: str) -> list[str]:
    """Missing parts of a run with a model per tier: candidates, test metrics, baseline, or models of tiers."""
    run_id = run.paths[0].run_id
    method = configuration(run, run_id).get("method", {})
    lines = []
    if "search" in method and run.candidates.empty:
        lines.append("no tier's search has ended: no candidates and no Pareto front")
    if tested.empty:
        lines.append("nothing was measured on test data: no test metric and no fairness")
    elif "rand_init" in method and "rand_init" not in set(tested["model"]):
        lines.append("the rand-init baseline was not evaluated")
    if state == "done" and "search" in method:
        chosen = set(run.models["tier"]) | set(run.candidates["tier"])
        empty = [t for t in tiers_of(run, run_id) if t not in chosen]
        lines += [f"{', '.join(empty)}: no model of the space lies within the bounds"] if empty else []
    return lines


def _without_test_samples(tested: pd.DataFrame) -> list[str]:
    excluded = tested[tested["client_id"].notna() & (tested["samples"].fillna(0) == 0)]["client_id"].nunique()
    return [f"{excluded} clients have no test samples and are left out of the fairness figures"] if excluded else []


def _missing_of_subnets(run: Tables, tested: pd.DataFrame, state: str) -> list[str]:
    """Missing parts of a SuperFedNAS run: the evaluation, or winners of targets."""
    found = set(tested.loc[tested["model"] == SEARCHED, "tier"])
    lines = [] if len(tested) else ["nothing was measured on test data yet: no accuracy of subnets"]
    lost = [t for t in targets_of(run, run.paths[0].run_id) if t not in found]
    if state == "done" and lost:
        lines.append(f"{', '.join(lost)}: the search chose no subnet for {'it' if len(lost) == 1 else 'them'}")
    return lines


def _progress(paths: RunPaths, state: str) -> str:
    status = status_of(paths)
    if status is None:
        return f"the run's status is {state}"
    place = f" in {status.stage}, round {status.round_shown} of {status.rounds_total}" if status.stage else ""
    cause = f": {status.message}" if status.message else ""
    return f"the run is {state}{place}{cause}; what follows is what it has written so far"


def unknown_bounds(tables: Tables, bounds: Bounds) -> list[str]:
    """A sentence on the runs that did not record the bounds of their tiers."""
    known = {run_id for run_id, _ in bounds}
    with_tiers = [p.run_id for p in tables.paths if kind_of(tables, p.run_id) == TIERS]  # others have no bounds
    unknown = [run_id for run_id in with_tiers if run_id not in known and configuration(tables, run_id)]
    if not unknown:
        return []
    return [f"Upper bounds are not shown for runs that did not record them: {', '.join(unknown)}."]


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The frame's rows as JSON values."""
    rows = frame.astype(object).to_dict(orient="records")
    return [{str(k): _value(v) for k, v in row.items()} for row in rows]


def _value(value: Any) -> Any:
    if isinstance(value, list):
        return [_value(item) for item in value]
    if is_absent(value):
        return None
    item = value.item() if callable(getattr(value, "item", None)) else value
    return item if isinstance(item, bool | int | float | str) else str(item)


def report_json(results: Path, run_ids: Sequence[str] | None = None) -> dict[str, Any]:
    """The report's numbers as JSON values.

    Keys: metric, runs, missing; settings (runs, number of distinct seeds, and the configuration values that differ
    between settings of an experiment); summary (per setting and tier: mean, half_width of the 95 % interval, runs and
    their values, where runs that repeat a seed count as one); the rows per single run of per_tier, fairness (of texts
    also fairness_in_perplexity), per_class, paragraphs, communication, communication_by_kind and failures; for
    SuperFedNAS runs the rows of subnets, a subnet_summary per setting, and cost_comparison with the first k members
    trained alone; for cross-silo runs silos (per setting), the rows of silo_clients, personalisation (rows of p,
    "matrix", and the gains) and phases. Raises ValueError for an unknown run and for a damaged table.
    """
    tables = load_chosen(results, run_ids)
    bounds = upper_bounds(tables)
    stages, labels, matrix = communication(tables), labels_of(tables), p_matrix(tables)
    return {
        "metric": METRIC,
        "runs": [{"run_id": p.run_id, "experiment": p.experiment, "status": state_of(tables, p)} for p in tables.paths],
        "missing": [*missing_of(tables), *unknown_bounds(tables, bounds)],
        "settings": [{**_setting(s), "differences": dict(s.differences)} for s in settings_of(tables)],
        "summary": [_tiers(summary) for summary in tier_summaries(tables, bounds)],
        "per_tier": records(with_perplexity(per_tier(tables, bounds), tables)),
        "fairness": records(fairness(tables)),
        "fairness_in_perplexity": records(fairness(tables, PERPLEXITY)),
        "per_class": records(per_class(tables)),
        "paragraphs": records(paragraphs(tables)),
        "communication": records(stages),
        "communication_by_kind": records(communication_by_kind(stages)),
        "failures": records(failures(tables)),
        "subnets": records(subnets(tables, labels)),
        "subnet_summary": [_subnets(summary) for summary in subnet_summaries(tables, labels)],
        "cost_comparison": [asdict(comparison) for comparison in cost_comparisons(tables, labels)],
        "silos": [_silos(summary) for summary in silo_summaries(tables)],
        "silo_clients": records(per_silo(tables)),
        "personalisation": {"matrix": records(matrix), "gains": records(personalisation_gains(matrix))},
        "phases": [asdict(phase) for phase in phases(tables)],
    }


def _setting(setting: Setting) -> dict[str, Any]:
    return {
        "setting": setting.name,
        "experiment": setting.experiment,
        "run_ids": list(setting.run_ids),
        "seeds": setting.num_seeds,
    }


def _estimates(values: Mapping[str, Estimate | None]) -> dict[str, Any]:
    """{mean, half_width, runs, values} by name; null for unknown values and for means that are undefined."""
    return {k: None if v is None or is_absent(v.mean) else asdict(v) for k, v in values.items()}


def _tiers(summary: Summary) -> dict[str, Any]:
    tiers = [{"tier": t.tier, "architecture": t.architecture, **_estimates(t.values)} for t in summary.tiers]
    return {**_setting(summary.setting), "tiers": tiers}


def _subnets(summary: SubnetSummary) -> dict[str, Any]:
    subnets, predictors = map(_subnet, summary.subnets), map(asdict, summary.predictors)
    return {**_setting(summary.setting), "subnets": [*subnets], "predictors": [*predictors]}


def _subnet(subnet: Subnet) -> dict[str, Any]:
    place = {"model": subnet.model, "target": subnet.target, "architecture": subnet.architecture, "label": subnet.label}
    return {**place, **_estimates(subnet.values)}


def _silos(summary: SiloSummary) -> dict[str, Any]:
    return {
        **_setting(summary.setting),
        "method": summary.method,
        "model": summary.model,
        **_estimates(summary.values),
    }


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
            yield Picture(name, _picture_title(name, alone=alone), _caption(name, settings, alone=alone), figure)


def _picture_title(name: str, *, alone: bool) -> str:
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


def settings_block(settings: Sequence[Setting]) -> Block:
    """One row per setting with its differences, runs and number of seeds; no rows if there is only one setting."""
    rows = [(s.name, _differences(s), ", ".join(s.run_ids), str(s.num_seeds)) for s in settings]
    text = (
        "Runs of one experiment whose configurations differ in seeds alone are a setting: numbers are means over its "
        "seeds, and never over settings. Listed are the keys in which an experiment's settings differ; experiments may "
        "differ in anything, see the configurations below.",
    )
    heads = ("setting", "differs in", "runs", "seeds")
    return Block("Settings", text, heads, tuple(rows) if len(rows) > 1 else (), labels=3)


def _differences(setting: Setting) -> str:
    found = [
        f"{key} {NOT_SET}" if value == NOT_SET else f"{key}={value_text(value)}"
        for key, value in setting.differences.items()
    ]
    return ", ".join(found) or ABSENT
