"""Reports of runs: files in a folder, or tables for the terminal."""

from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from fedloom.experiments.analysis.bounds import Bounds, upper_bounds
from fedloom.experiments.analysis.costs import cost_comparisons
from fedloom.experiments.analysis.frames import fairness, per_tier
from fedloom.experiments.analysis.kinds import ALL_TIERS, is_dry, with_silo_clients
from fedloom.experiments.analysis.labels import Labels, labels_of
from fedloom.experiments.analysis.outcomes import outcomes
from fedloom.experiments.analysis.reused import with_training
from fedloom.experiments.analysis.settings import Setting, settings_of
from fedloom.experiments.analysis.subnets import subnet_summaries
from fedloom.experiments.analysis.tables import ALL_TABLES, Tables, latest_run, load
from fedloom.experiments.analysis.texts import with_perplexity
from fedloom.experiments.report.pages.content import REFRESH_S, Content
from fedloom.experiments.report.pages.facts import facts_of, state_of
from fedloom.experiments.report.pages.files import ReportFiles, write_content
from fedloom.experiments.report.pages.gaps import missing_of, unknown_bounds
from fedloom.experiments.report.pages.outcome_pictures import outcome_pictures
from fedloom.experiments.report.pages.silo_pictures import silo_pictures
from fedloom.experiments.report.pages.stage_pictures import stage_pictures
from fedloom.experiments.report.pages.subnet_pictures import subnet_pictures
from fedloom.experiments.report.parts.block import Block, rich_block
from fedloom.experiments.report.parts.words import setting_head
from fedloom.experiments.report.tables.communication import communication_block, dry_block
from fedloom.experiments.report.tables.costs import cost_block
from fedloom.experiments.report.tables.details import class_blocks, paragraph_block
from fedloom.experiments.report.tables.failures import failures_block
from fedloom.experiments.report.tables.fairness import fairness_blocks
from fedloom.experiments.report.tables.outcomes import Groups, outcomes_block
from fedloom.experiments.report.tables.settings import settings_block
from fedloom.experiments.report.tables.silos import silo_blocks
from fedloom.experiments.report.tables.subnets import subnet_block
from fedloom.experiments.report.tables.tiers import Summary, narrow_tier_block, summarise, tier_block
from fedloom.platform.results.manifest import check_files
from fedloom.platform.results.paths import RunPaths
from fedloom.platform.results.store import output_folder

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
        pictures=(
            *outcome_pictures(outcome_groups(tables, settings)),
            *subnet_pictures(tables, labels),
            *silo_pictures(tables),
            *stage_pictures(tables, bounds, labels),
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
