"""Sentences on the parts of a report that are missing, per run."""

import pandas as pd

from fedloom.experiments.analysis.bounds import Bounds
from fedloom.experiments.analysis.frames import (
    METRIC,
    tiers_of,
)
from fedloom.experiments.analysis.kinds import SHARED, SILOS, SUBNETS, TIERS, is_dry, kind_of
from fedloom.experiments.analysis.subnets import SEARCHED, targets_of
from fedloom.experiments.analysis.tables import Tables, configuration, only
from fedloom.experiments.report.pages.facts import state_of, status_of
from fedloom.experiments.report.pages.silo_gaps import missing_of_silos
from fedloom.experiments.report.parts.words import sentence
from fedloom.platform.results.paths import RunPaths

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
