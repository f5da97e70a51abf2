"""Reports of runs: files in a folder, a table for the terminal, or plain values."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Group, RenderableType
from rich.text import Text

from fedloom.experiments.analysis.bounds import Bounds, upper_bounds
from fedloom.experiments.analysis.frames import (
    METRIC,
    by_stage,
    client_metrics,
    communication,
    communication_by_kind,
    convergence,
    failures,
    fairness,
    pareto,
    per_tier,
)
from fedloom.experiments.analysis.kinds import elastic_run_ids, is_dry, silo_run_ids, with_silo_clients
from fedloom.experiments.analysis.labels import Labels, labels_of
from fedloom.experiments.analysis.silos import p_matrix, per_silo, personalisation_gains, phases, silo_summaries
from fedloom.experiments.analysis.silos import summary_as_dict as silos_as_dict
from fedloom.experiments.analysis.subnets import ALONE, subnet_summaries, subnets, summary_as_dict
from fedloom.experiments.analysis.tables import ALL_TABLES, Tables, configuration, latest_run, load
from fedloom.experiments.report.content import (
    Content,
    blocks_of,
    facts_of,
    missing_of,
    state_of,
    summaries_of,
)
from fedloom.experiments.report.costs import cost_comparisons
from fedloom.experiments.report.elastic_blocks import cost_block, dry_block, subnet_block
from fedloom.experiments.report.elastic_pictures import elastic_pictures
from fedloom.experiments.report.page import html_page, markdown_page
from fedloom.experiments.report.picture import Picture
from fedloom.experiments.report.silo_blocks import silo_blocks
from fedloom.experiments.report.silo_pictures import silo_pictures
from fedloom.experiments.report.table import Block, as_dict, records, rich_block, rich_table
from fedloom.platform.results.files import check_writable, write_atomically
from fedloom.platform.results.paths import RunPaths


@dataclass(frozen=True)
class ReportFiles:
    """Where a report was written, and which runs it is about."""

    run_ids: tuple[str, ...]
    folder: Path
    html: Path
    markdown: Path
    plots: tuple[Path, ...]
    missing: tuple[str, ...]
    """One sentence for everything that the runs do not have (yet)."""
    latex: Path | None = None
    """The tables for a paper, which reports of ablations have."""


def write_report(results: Path, run_ids: Sequence[str] | None = None, out: Path | None = None) -> ReportFiles:
    """Writes report.html, report.md and the plots of these runs (ids or their beginnings; the latest run if none).

    `out` is `results/reports/RUN` if not given. Works for runs that are still running, failed, or lack stages: what is
    missing is said. Raises ValueError for an unknown run, a damaged table, or a folder that cannot be written.
    """
    tables = load(results, _chosen(results, run_ids))
    folder = Path(results) / "reports" / _folder_name(tables.paths) if out is None else Path(out)
    check_writable(folder)
    return write_content(report_content(tables), folder, [p.run_id for p in tables.paths])


def write_content(content: Content, folder: Path, run_ids: Sequence[str], latex: Path | None = None) -> ReportFiles:
    """Writes the page, the Markdown and the pictures, each file whole or not at all; `latex` is written by others."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [(p.name, ending, image) for p in content.pictures for ending, image in (("png", p.png), ("pdf", p.pdf))]
    files = [file for file in files if file[2]]
    for name, ending, image in files:
        write_atomically(folder / f"{name}.{ending}", image, durable=False)
    html, text = folder / "report.html", folder / "report.md"
    write_atomically(html, html_page(content).encode(), durable=False)
    write_atomically(text, markdown_page(content).encode(), durable=False)
    plots = tuple(folder / f"{name}.{ending}" for name, ending, _ in files)
    return ReportFiles(tuple(run_ids), folder, html, text, plots, content.missing, latex)


def _chosen(results: Path, run_ids: Sequence[str] | None) -> Sequence[str]:
    return run_ids or [latest_run(results)]


def _folder_name(paths: Sequence[RunPaths]) -> str:
    first = paths[0].run_id
    if len(paths) == 1:
        return first
    ids = sha256("\n".join(sorted(p.run_id for p in paths)).encode()).hexdigest()[:8]
    return f"{first}-and-{len(paths) - 1}-more-{ids}"


def report_content(tables: Tables) -> Content:
    """Everything that a report of these runs says."""
    bounds, labels = upper_bounds(tables), labels_of(tables)
    experiments = list(dict.fromkeys(p.experiment for p in tables.paths))
    title = f"{', '.join(experiments)}: {_runs_in_words(tables.paths)}"
    return Content(
        title=title,
        runs=facts_of(tables),
        missing=(*missing_of(tables), *_unknown_bounds(tables, bounds)),
        blocks=blocks_of(tables, summaries_of(tables, bounds), labels),
        pictures=(
            *elastic_pictures(tables, labels),
            *silo_pictures(tables),
            *_all_pictures(tables, bounds, labels, experiments),
        ),
    )


def _all_pictures(tables: Tables, bounds: Bounds, labels: Labels, experiments: Sequence[str]) -> Iterator[Picture]:
    for name in experiments:
        yield from _pictures(_only(tables, name), bounds, labels, len(experiments) > 1)


def _runs_in_words(paths: Sequence[RunPaths]) -> str:
    return f"run {paths[0].run_id}" if len(paths) == 1 else f"{len(paths)} runs"


def _unknown_bounds(tables: Tables, bounds: Bounds) -> list[str]:
    known = {run_id for run_id, _ in bounds}
    known |= {*elastic_run_ids(tables), *silo_run_ids(tables)}  # their networks have no tier's bound
    unknown = [p.run_id for p in tables.paths if p.run_id not in known and configuration(tables, p.run_id)]
    if not unknown:
        return []
    return [f"Upper bounds are not shown for runs that did not record them: {', '.join(unknown)}."]


def _only(tables: Tables, experiment: str) -> Tables:
    def of(frame: pd.DataFrame) -> pd.DataFrame:
        return frame[frame["experiment"] == experiment].reset_index(drop=True)

    return replace(
        tables,
        paths=tuple(p for p in tables.paths if p.experiment == experiment),
        runs=of(tables.runs),
        rounds=of(tables.rounds),
        clients=of(tables.clients),
        candidates=of(tables.candidates),
        evaluations=of(tables.evaluations),
        models=of(tables.models),
    )


def _labelled(frame: pd.DataFrame, labels: Labels) -> pd.DataFrame:
    """Subnets that are trained alone by their labels; tiers stay tiers."""
    names = zip(frame["run_id"], frame["kind"], frame["tier"], strict=True)
    shown = [labels.of(str(run), str(tier)) if kind == ALONE else tier for run, kind, tier in names]
    return frame.assign(tier=pd.Series(shown, frame.index, dtype=object))


def _pictures(tables: Tables, bounds: Bounds, labels: Labels, named: bool) -> Iterator[Picture]:
    # Here, because matplotlib takes a second to load and a run's summary does without.
    from fedloom.experiments.report import plots
    from fedloom.experiments.report.style import png

    experiment, several = tables.paths[0].experiment, len(tables.paths) > 1
    kinds = communication_by_kind(communication(tables))
    figures = {
        "convergence": plots.convergence_figure(_labelled(_tier_convergence(tables), labels)),
        "pareto": plots.pareto_figure(_tier_candidates(tables), _macs_bounds(tables, bounds)),
        "communication": plots.communication_figure(kinds, by_stage(tables.rounds)),
        "clients": plots.clients_figure(client_metrics(tables)),
    }
    for name, figure in figures.items():
        if figure is not None:
            title, caption = CAPTIONS[name]
            if name == "communication" and len(silo_run_ids(tables)) == len(tables.paths):
                caption = COMMUNICATION_OF_SILOS
            over_runs = f" {OVER_RUNS[name]}" if several else ""
            suffix = (f"-{experiment}", f": {experiment}") if named else ("", "")
            yield Picture(f"{name}{suffix[0]}", f"{title}{suffix[1]}", f"{caption}{over_runs}", png(figure))


def _tier_candidates(tables: Tables) -> pd.DataFrame:
    """Candidates of searches for tiers; SuperFedNAS has a figure of its own for its targets, silos have no tiers."""
    frame = pareto(tables)
    return frame[~frame["run_id"].isin([*elastic_run_ids(tables), *silo_run_ids(tables)])]


def _tier_convergence(tables: Tables) -> pd.DataFrame:
    """Curves of all runs but those of cross-silo methods, whose curves are those of the silos' own models."""
    frame = convergence(tables)
    return frame[~frame["run_id"].isin(silo_run_ids(tables))]


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
    "clients": (
        "Accuracy per client",
        "Each dot is a client's accuracy on its own test data with its tier's model; the triangle marks the worst "
        "client of the tier. Clients without test samples are left out.",
    ),
}
COMMUNICATION_OF_SILOS = (
    "Bytes that all silos together received and sent. The cumulative curves leave out the final evaluation and "
    "personalisation gains."
)
"""What stands under that figure where no run has a baseline to be counted on its own."""

OVER_RUNS = {
    "convergence": "Lines are means over the runs, bands reach from the least to the greatest.",
    "pareto": "Every run has its own front and winner.",
    "communication": "Bars are means over the runs; every run has its own curve.",
    "clients": "The clients of all runs are shown together.",
}


def _macs_bounds(tables: Tables, bounds: Bounds) -> dict[str, float]:
    """Bounds of the first run, if they are in MACs and the same in all runs."""
    runs = [
        {tier: bound for (run_id, tier), bound in bounds.items() if run_id == paths.run_id} for paths in tables.paths
    ]
    measures = {configuration(tables, p.run_id).get("tiers", {}).get("cost") for p in tables.paths}
    return runs[0] if measures == {"macs"} and all(run == runs[0] for run in runs) else {}


def summary_table(results: Path, run_ids: str | Sequence[str] | None = None) -> RenderableType:
    """The per-tier tables of these runs for the terminal, one per experiment; quick, and without matplotlib.

    Raises ValueError for an unknown run or a damaged table.
    """
    ids = [run_ids] if isinstance(run_ids, str) else run_ids
    tables = with_silo_clients(load(results, _chosen(results, ids), tables=[t for t in ALL_TABLES if t != "clients"]))
    summaries = summaries_of(tables, upper_bounds(tables))
    shown: list[RenderableType] = [rich_table(summary) for summary in summaries if summary.tiers]
    shown += [rich_block(block) for block in _elastic_blocks(tables) if block.rows]
    shown += [rich_block(block) for block in silo_blocks(tables, wide=False)]
    return Group(*shown, *(Text(sentence, style="yellow") for sentence in missing_of(tables)))


def _elastic_blocks(tables: Tables) -> list[Block]:
    """SuperFedNAS's tables for the terminal; a dry run has its totals instead of accuracies."""
    labels = labels_of(tables)
    return [
        *(subnet_block(summary, wide=False) for summary in subnet_summaries(tables, labels)),
        *(dry_block(tables, p.run_id, labels) for p in tables.paths if is_dry(tables, p.run_id)),
        *(cost_block(comparison) for comparison in cost_comparisons(tables, labels)),
    ]


def report_json(results: Path, run_ids: Sequence[str] | None = None) -> dict[str, Any]:
    """The report's numbers as JSON values.

    Keys: metric, runs, missing, summary (per experiment and tier: mean, half_width of the 95 % interval, runs), and
    the rows of per_tier, fairness, communication and failures; of SuperFedNAS runs the rows of subnets, their
    subnet_summary per configuration, and cost_comparison with the first k members trained alone; of cross-silo runs
    silos (per configuration), the rows of silo_clients, personalisation (the rows of p, "matrix", and the gains) and
    phases. Raises ValueError as `write_report`.
    """
    tables = load(results, _chosen(results, run_ids))
    bounds = upper_bounds(tables)
    stages, labels, matrix = communication(tables), labels_of(tables), p_matrix(tables)
    return {
        "metric": METRIC,
        "runs": [{"run_id": p.run_id, "experiment": p.experiment, "status": state_of(tables, p)} for p in tables.paths],
        "missing": [*missing_of(tables), *_unknown_bounds(tables, bounds)],
        "summary": [as_dict(summary) for summary in summaries_of(tables, bounds)],
        "per_tier": records(per_tier(tables, bounds)),
        "fairness": records(fairness(tables)),
        "communication": records(stages),
        "communication_by_kind": records(communication_by_kind(stages)),
        "failures": records(failures(tables)),
        "subnets": records(subnets(tables, labels)),
        "subnet_summary": [summary_as_dict(summary) for summary in subnet_summaries(tables, labels)],
        "cost_comparison": [asdict(comparison) for comparison in cost_comparisons(tables, labels)],
        "silos": [silos_as_dict(summary) for summary in silo_summaries(tables)],
        "silo_clients": records(per_silo(tables)),
        "personalisation": {"matrix": records(matrix), "gains": records(personalisation_gains(matrix))},
        "phases": [asdict(phase) for phase in phases(tables)],
    }
