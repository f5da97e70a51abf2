"""The report's numbers as JSON values."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from fedloom.experiments.analysis.bounds import upper_bounds
from fedloom.experiments.analysis.costs import cost_comparisons
from fedloom.experiments.analysis.details import paragraphs, per_class
from fedloom.experiments.analysis.frames import (
    METRIC,
    communication,
    communication_by_kind,
    failures,
    fairness,
    per_tier,
)
from fedloom.experiments.analysis.intervals import Estimate, is_absent
from fedloom.experiments.analysis.labels import labels_of
from fedloom.experiments.analysis.settings import Setting, settings_of
from fedloom.experiments.analysis.silo_curves import phases
from fedloom.experiments.analysis.silo_gains import p_matrix, personalisation_gains
from fedloom.experiments.analysis.silo_summaries import SiloSummary, silo_summaries
from fedloom.experiments.analysis.silos import per_silo
from fedloom.experiments.analysis.subnets import Subnet, SubnetSummary, subnet_summaries, subnets
from fedloom.experiments.analysis.texts import PERPLEXITY, with_perplexity
from fedloom.experiments.report.pages.facts import state_of
from fedloom.experiments.report.pages.gaps import missing_of, unknown_bounds
from fedloom.experiments.report.pages.runs import load_chosen, tier_summaries
from fedloom.experiments.report.tables.tiers import Summary


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
