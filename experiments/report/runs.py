"""The report of runs: its content, its summary for the terminal, and its numbers as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Group, RenderableType
from rich.text import Text

from fedloom.experiments.analysis.clients import client_metrics, confusions, failures, fairness, paragraphs, per_class
from fedloom.experiments.analysis.outcomes import outcomes
from fedloom.experiments.analysis.rounds import communication, communication_by_kind, convergence
from fedloom.experiments.analysis.settings import NOT_SET, Setting, is_absent, settings_of, value_text
from fedloom.experiments.analysis.silos import (
    SiloSummary,
    p_matrix,
    per_silo,
    personalisation_gains,
    phases,
    silo_summaries,
)
from fedloom.experiments.analysis.subnets import (
    Labels,
    Subnet,
    cost_comparisons,
    labels_of,
    subnet_summaries,
    subnets,
)
from fedloom.experiments.analysis.tables import (
    ALL_TABLES,
    ALL_TIERS,
    ALONE,
    METRIC,
    SILOS,
    SUBNETS,
    WITHOUT_CLIENTS,
    Bounds,
    Tables,
    by_stage,
    configuration,
    is_dry,
    kind_of,
    latest_run,
    load,
    only,
    real_rounds,
    runs_of_kind,
    untrained,
    upper_bounds,
    with_silo_clients,
    with_training,
)
from fedloom.experiments.analysis.targets import stop_targets, to_target
from fedloom.experiments.analysis.tiers import PERPLEXITY, pareto, per_tier, text_run_ids, with_perplexity
from fedloom.experiments.report.clients import (
    class_blocks,
    clients_pictures,
    confusion_pictures,
    failures_block,
    fairness_blocks,
    paragraph_block,
)
from fedloom.experiments.report.content import REFRESH_S, Block, Content, Picture, RunFacts, rich_block, sheets
from fedloom.experiments.report.outcomes import Groups, outcome_pictures, outcomes_block
from fedloom.experiments.report.pages import ReportFiles, write_content
from fedloom.experiments.report.rounds import (
    communication_block,
    communication_pictures,
    convergence_pictures,
    dry_block,
)
from fedloom.experiments.report.silos import missing_of_silos, silo_blocks, silo_pictures
from fedloom.experiments.report.staleness import staleness_block, staleness_pictures
from fedloom.experiments.report.subnets import cost_block, missing_of_subnets, subnet_block, subnet_pictures
from fedloom.experiments.report.targets import RunsOf, Target, target_blocks
from fedloom.experiments.report.tiers import (
    TierSummary,
    missing_of_tiers,
    narrow_tier_block,
    pareto_pictures,
    tier_block,
    tier_summaries,
    unknown_bounds,
)
from fedloom.experiments.report.wording import ABSENT, sentence, setting_head
from fedloom.platform.plugins import called
from fedloom.platform.results.manifest import check_files
from fedloom.platform.results.paths import RunPaths
from fedloom.platform.results.status import Status, read_status
from fedloom.platform.results.store import output_folder


def load_chosen(results: Path, run_ids: Sequence[str] | None = None, tables: Iterable[str] = ALL_TABLES) -> Tables:
    """Loads the tables of these runs (ids or unambiguous prefixes), or of the latest run if none is given.

    Runs that started from the supernet of another run include the rows of its training (see `with_training`).
    """
    return with_training(load(results, run_ids or [latest_run(results)], tables=tables))


def write_report(
    results: Path, run_ids: Sequence[str] | None = None, out: Path | None = None, targets: Sequence[Target] = ()
) -> ReportFiles:
    """Writes report.html, report.md, tables.tex and the plots of these runs (default: the latest run).

    Runs are given by ids, id prefixes, names or tags. The default of `out` is `results/reports/RUN`. Runs may be
    active, failed or without some stages; the report names the missing parts. It has a table of the cost of reaching
    each of `targets`, by default the targets at which the runs were to stop.
    Raises ValueError for an unknown run, a damaged file, or a folder that cannot be written.
    """
    tables = load_chosen(results, run_ids)
    for paths in tables.paths:
        check_files(paths)
    ids = [p.run_id for p in tables.paths]
    name = ids[0]
    if len(ids) > 1:
        name += f"-and-{len(ids) - 1}-more-{sha256(chr(10).join(sorted(ids)).encode()).hexdigest()[:8]}"
    folder = output_folder(results, out, f"reports/{name}")  # refused before anything is computed
    return write_content(report_content(tables, targets), folder, ids)


def report_content(tables: Tables, targets: Sequence[Target] = ()) -> Content:
    """The content of a report of these runs; `targets` as in `write_report`."""
    bounds, labels, settings = upper_bounds(tables), labels_of(tables), settings_of(tables)
    outcomes_of = outcome_groups(tables, settings)
    run_ids = [p.run_id for p in tables.paths]
    title = f"run {run_ids[0]}" if len(run_ids) == 1 else f"{len(run_ids)} runs"
    if len(settings) > 1:
        title += f" of {len(settings)} settings"
    blocks = [
        settings_block(settings),
        *([outcomes_block(outcomes_of, (setting_head(settings),))] if len(settings) > 1 else []),
        *(tier_block(summary, tables) for summary in tier_summaries(tables, bounds)),
        *(subnet_block(summary, wide=True) for summary in subnet_summaries(tables, labels)),
        *(cost_block(comparison) for comparison in cost_comparisons(tables, labels)),
        *silo_blocks(tables, wide=True),
        *target_blocks(tables, runs_of(settings), (setting_head(settings),), labels, targets),
        staleness_block(tables, settings),
        *fairness_blocks(tables, settings),
        *class_blocks(tables, settings),
        paragraph_block(tables, settings),
        communication_block(tables, settings, labels),
        failures_block(tables, settings),
    ]
    return Content(
        title=f"{', '.join(dict.fromkeys(s.experiment for s in settings))}: {title}",
        runs=tuple(_facts(tables, paths, settings) for paths in tables.paths),
        refresh_s=REFRESH_S if any(state_of(tables, p) in ("running", "stalled") for p in tables.paths) else None,
        missing=(*missing_of(tables), *unknown_bounds(tables, bounds)),
        blocks=tuple(block for block in blocks if block.rows),
        pictures=chain(
            outcome_pictures(outcomes_of),
            subnet_pictures(tables, labels),
            silo_pictures(tables),
            stage_pictures(tables, bounds, labels),
            staleness_pictures(tables, settings),
        ),
    )


def runs_of(settings: Sequence[Setting]) -> RunsOf:
    """The names of settings, and the ids of their runs."""
    return [((setting.name,), setting.run_ids) for setting in settings]


def outcome_groups(tables: Tables, settings: Sequence[Setting]) -> Groups:
    """The settings with their runs' rows of `outcomes`."""
    frame = outcomes(tables)
    return [((setting.name,), setting.rows(frame)) for setting in settings]


def summary_table(
    results: Path,
    run_ids: str | Sequence[str] | None = None,
    *,
    missing: bool = True,
    targets: Sequence[Target] | None = None,
) -> RenderableType:
    """The tables of these runs for the terminal, per setting, and what is missing; fast, without matplotlib.

    The costs of reaching `targets` are shown as well, as in `write_report`, unless `targets` is None.

    Raises ValueError for an unknown run or a damaged table.
    """
    ids = [run_ids] if isinstance(run_ids, str) else run_ids
    tables = with_silo_clients(load_chosen(results, ids, WITHOUT_CLIENTS))
    labels = labels_of(tables)
    blocks = [
        *(narrow_tier_block(summary) for summary in tier_summaries(tables, upper_bounds(tables))),
        *(subnet_block(summary, wide=False) for summary in subnet_summaries(tables, labels)),
        *(dry_block(tables, p.run_id, labels) for p in tables.paths if is_dry(tables, p.run_id)),
        *(cost_block(comparison) for comparison in cost_comparisons(tables, labels)),
        *silo_blocks(tables, wide=False),
    ]
    if targets is not None:
        settings = settings_of(tables)
        heads = (setting_head(settings),)
        blocks += target_blocks(tables, runs_of(settings), heads, labels, targets)
    shown = [rich_block(block, apart=ALL_TIERS) for block in blocks if block.rows]
    lines = missing_of(tables) if missing else ()
    return Group(*shown, *(Text(line, style="yellow") for line in lines))


def _facts(tables: Tables, paths: RunPaths, settings: Sequence[Setting]) -> RunFacts:
    """The facts of a run; they include the name of its setting if there are several settings."""
    rows = tables.runs[tables.runs["run_id"] == paths.run_id].to_dict(orient="records")
    row: dict[str, Any] = {str(k): v for k, v in rows[0].items() if not is_absent(v)} if rows else {}

    def text(name: str) -> str:
        """A text as it is, a list of texts, or the names and values of a JSON object."""
        value = str(row.get(name, ABSENT))
        if value.startswith("["):
            return ", ".join(json.loads(value))
        return ", ".join(f"{k} {v}" for k, v in json.loads(value).items()) if value.startswith("{") else value

    facts = [("experiment", paths.experiment), ("run", paths.run_id), ("status", state_of(tables, paths))]
    facts += [(name, text(name)) for name in ("name", "tags") if name in row]
    if len(settings) > 1:
        facts += [("setting", s.name) for s in settings if paths.run_id in s.run_ids]
    facts += [(name, called(text(name))) for name in ("method", "space", "dataset")]
    facts += [(n.replace("_", " "), text(n)) for n in ("seeds", "versions", "source_hash", "partition_hash")]
    facts += [("GPUs", text("gpus"))] if "gpus" in row else []
    facts += [(n, f"{row[n]:%Y-%m-%d %H:%M:%S} UTC" if n in row else ABSENT) for n in ("started", "ended")]
    facts += [("error", str(row["error"]))] if "error" in row else []
    ended = tables.rounds[(tables.rounds["run_id"] == paths.run_id) & tables.rounds["stopped"].notna()]
    facts += [
        ("ended early", f"{stage}, after round {round_ + 1}: {why}")
        for stage, round_, why in ended[["stage", "round", "stopped"]].itertuples(index=False)
    ]
    return RunFacts(paths.run_id, tuple(facts), json.dumps(configuration(tables, paths.run_id), indent=1))


def status_of(paths: RunPaths) -> Status | None:
    """The run's status; None without a status file, as in a copied folder, where the table `runs` suffices."""
    try:
        return read_status(paths.status)
    except ValueError:
        return None


def state_of(tables: Tables, paths: RunPaths) -> str:
    """The run's current state, from its status file, else from the table `runs`; without a row there no run is done."""
    status = status_of(paths)
    recorded = tables.runs.loc[tables.runs["run_id"] == paths.run_id, "status"].dropna()
    row = str(recorded.iloc[0]) if len(recorded) else "unknown"
    if status is None:
        return row
    return "interrupted" if status.state == "done" != row else status.state


DRY = (
    "a dry run: nothing was trained, so there are no losses, no accuracies and no models; bytes, MACs and "
    "simulated times are those of the work assigned to clients"
)


def missing_of(tables: Tables) -> tuple[str, ...]:
    """One sentence for each part of the report that a run does not have."""
    lines = [(paths.run_id, line) for paths in tables.paths for line in _missing(tables, paths)]
    dry = [p.run_id for p in tables.paths if is_dry(tables, p.run_id)]
    lines += [(", ".join(dry), DRY)] if dry else []
    several = len(tables.paths) > 1
    return tuple(f"{run_id}: {line}." if several else sentence(line) for run_id, line in lines)


def _missing(tables: Tables, paths: RunPaths) -> list[str]:
    run, state, status = only(tables, [paths.run_id]), state_of(tables, paths), status_of(paths)
    lines = []
    if state != "done" and status is None:
        lines.append(f"the run's status is {state}")
    elif state != "done" and status is not None:
        stage = f" in {status.stage}, round {status.round_shown} of {status.rounds_total}" if status.stage else ""
        cause = f": {status.message}" if status.message else ""
        lines.append(f"the run is {state}{stage}{cause}; only what it has written so far is shown")
    if run.rounds.empty:
        return [*lines, "no finished round is in the tables yet"]
    gone = untrained(run).values()
    lines += [
        f"bytes, MACs and time lack the supernet's training: run {source}, which did it, is gone" for source in gone
    ]
    if is_dry(tables, paths.run_id):
        return lines  # one sentence covers all dry runs
    tested = run.evaluations[(run.evaluations["split"] == "test") & (run.evaluations["metric"] == METRIC)]
    kind = kind_of(tables, paths.run_id)
    if kind == SILOS:
        lines += missing_of_silos(tables, paths.run_id, state)
    else:
        lines += (missing_of_subnets if kind == SUBNETS else missing_of_tiers)(run, tested, state)
    excluded = tested[tested["client_id"].notna() & (tested["samples"].fillna(0) == 0)]["client_id"].nunique()
    if excluded:
        lines.append(f"{excluded} clients have no test samples and are left out of the fairness figures")
    return lines


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The frame's rows as JSON values."""
    rows = frame.astype(object).to_dict(orient="records")
    return [{str(k): _value(v) for k, v in row.items()} for row in rows]


def _value(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_value, value))
    if isinstance(value, Mapping):
        return {key: _value(item) for key, item in value.items()}
    if is_absent(value):
        return None
    item = value.item() if callable(getattr(value, "item", None)) else value
    if isinstance(item, float) and not math.isfinite(item):  # of a diverged model; JSON has no infinity
        return None
    return item if isinstance(item, bool | int | float | str) else str(item)


def report_json(results: Path, run_ids: Sequence[str] | None = None, targets: Sequence[Target] = ()) -> dict[str, Any]:
    """The report's numbers as JSON values.

    Keys: metric, runs, missing; settings (runs, number of distinct seeds, and the configuration values that differ
    between settings of an experiment); summary (per setting and tier: mean, half_width of the 95 % interval, runs and
    their values, where runs that repeat a seed count as one); the rows per run of per_tier, fairness (for text data
    also fairness_in_perplexity), per_class, paragraphs, communication, communication_by_kind and failures; for
    SuperFedNAS runs the rows of subnets, a subnet_summary per setting, and cost_comparison with the first k members
    trained alone; for cross-silo runs silos (per setting), the rows of silo_clients, personalisation (rows of p,
    "matrix", and the gains) and phases; targets (for each of `targets`, as in `write_report`, the rows of to_target).
    Raises ValueError for an unknown run and for a damaged table.
    """
    tables = load_chosen(results, run_ids)
    bounds = upper_bounds(tables)
    stages, labels, matrix = communication(tables), labels_of(tables), p_matrix(tables)
    return {
        "metric": METRIC,
        "runs": [{"run_id": p.run_id, "experiment": p.experiment, "status": state_of(tables, p)} for p in tables.paths],
        "missing": [*missing_of(tables), *unknown_bounds(tables, bounds)],
        "settings": [{**_setting(s), "differences": dict(s.differences)} for s in settings_of(tables)],
        "summary": [
            {**_setting(s.setting), "tiers": [_with_estimates(tier) for tier in s.tiers]}
            for s in tier_summaries(tables, bounds)
        ],
        "per_tier": records(with_perplexity(per_tier(tables, bounds), tables)),
        "fairness": records(fairness(tables)),
        "fairness_in_perplexity": records(fairness(tables, PERPLEXITY)),
        "per_class": records(per_class(tables)),
        "paragraphs": records(paragraphs(tables)),
        "communication": records(stages),
        "communication_by_kind": records(communication_by_kind(stages)),
        "failures": records(failures(tables)),
        "subnets": records(subnets(tables, labels)),
        "subnet_summary": [
            {
                **_setting(s.setting),
                "subnets": [_with_estimates(subnet) for subnet in s.subnets],
                "predictors": [_value(asdict(predictor)) for predictor in s.predictors],
            }
            for s in subnet_summaries(tables, labels)
        ],
        "cost_comparison": [asdict(comparison) for comparison in cost_comparisons(tables, labels)],
        "silos": [{**_setting(s.setting), **_with_estimates(s)} for s in silo_summaries(tables)],
        "silo_clients": records(per_silo(tables)),
        "personalisation": {"matrix": records(matrix), "gains": records(personalisation_gains(matrix))},
        "phases": [asdict(phase) for phase in phases(tables)],
        "targets": target_records(tables, targets),
    }


def target_records(tables: Tables, targets: Sequence[Target]) -> list[dict[str, Any]]:
    """The rows of `to_target` for each target, by default for the targets at which the runs were to stop."""
    return [
        {"metric": metric, "target": target, "rows": records(to_target(tables, target, metric))}
        for metric, target in targets or stop_targets(tables)
    ]


def _setting(setting: Setting) -> dict[str, Any]:
    return {
        "setting": setting.name,
        "experiment": setting.experiment,
        "run_ids": list(setting.run_ids),
        "seeds": setting.num_seeds,
    }


def _with_estimates(summary: TierSummary | Subnet | SiloSummary) -> dict[str, Any]:
    """The texts of a summary, and {mean, half_width, runs, values} by name; null for what is unknown or undefined."""
    texts = {name: text for name, text in vars(summary).items() if name not in ("setting", "values")}
    estimates = {k: None if v is None or is_absent(v.mean) else _value(asdict(v)) for k, v in summary.values.items()}
    return {**texts, **estimates}


def settings_block(settings: Sequence[Setting]) -> Block:
    """One row per setting with its differences, runs and number of seeds; no rows if there is only one setting."""
    rows = []
    for s in settings:
        differences = [
            f"{key} {NOT_SET}" if value == NOT_SET else f"{key}={value_text(value)}"
            for key, value in s.differences.items()
        ]
        rows.append((s.name, ", ".join(differences) or ABSENT, ", ".join(s.run_ids), str(s.num_seeds)))
    text = (
        "Runs of one experiment whose configurations differ only in seeds form a setting; numbers are means over the "
        "seeds of one setting. The table lists the keys in which the settings of an experiment differ; different "
        "experiments may differ in any key, see the configurations below.",
    )
    heads = ("setting", "differs in", "runs", "seeds")
    return Block("Settings", text, heads, tuple(rows) if len(rows) > 1 else (), labels=3)


def stage_pictures(tables: Tables, bounds: Bounds, labels: Labels) -> Iterator[Picture]:
    """The figures of every experiment, with a panel per setting."""
    settings = settings_of(tables)
    experiments = list(dict.fromkeys(s.experiment for s in settings))
    # Cross-silo and SuperFedNAS runs have figures of their own for their curves and their searches.
    curves, candidates, silo_runs = convergence(tables), pareto(tables), runs_of_kind(tables, SILOS)
    curves = _labelled(curves[~curves["run_id"].isin(silo_runs)], labels)
    candidates = candidates[~candidates["run_id"].isin([*runs_of_kind(tables, SUBNETS), *silo_runs])]
    kinds, rounds = communication_by_kind(communication(tables)), by_stage(real_rounds(tables.rounds))
    clients, confused, texts = client_metrics(tables), confusions(tables), text_run_ids(tables)
    for experiment in experiments:
        for sheet in sheets([s for s in settings if s.experiment == experiment]):
            shown = sheet.settings
            for picture in chain(
                convergence_pictures(curves, shown, texts),
                pareto_pictures(candidates, shown, bounds),
                communication_pictures(kinds, rounds, shown),
                clients_pictures(clients, shown),
                confusion_pictures(confused, shown),
            ):
                labelled = sheet.labelled(picture)
                yield labelled.named(experiment) if len(experiments) > 1 else labelled


def _labelled(frame: pd.DataFrame, labels: Labels) -> pd.DataFrame:
    """The frame with labels instead of ids for subnets that are trained alone; tiers stay as they are."""
    names = zip(frame["run_id"], frame["kind"], frame["tier"], strict=True)
    shown = [labels.of(str(run), str(tier)) if kind == ALONE else tier for run, kind, tier in names]
    return frame.assign(tier=pd.Series(shown, frame.index, dtype=object))
