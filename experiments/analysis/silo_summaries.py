"""Accuracy and cost of the silos of a setting, over its seeds."""

from dataclasses import dataclass
from typing import Any

import pandas as pd

from fedloom.experiments.analysis.intervals import Estimate
from fedloom.experiments.analysis.kinds import SILOS
from fedloom.experiments.analysis.seeds import estimate_by_seed
from fedloom.experiments.analysis.settings import Setting, settings_of
from fedloom.experiments.analysis.silo_gains import p_matrix, personalisation_gains
from fedloom.experiments.analysis.silos import PERSONAL, best_round, per_silo, silos, training
from fedloom.experiments.analysis.stages import real_rounds
from fedloom.experiments.analysis.tables import Tables, only
from fedloom.platform.plugins import called

MEASURED = (
    "accuracy",
    "std",
    "worst",
    "best_accuracy",
    "best_round",
    "global_accuracy",
    "gain",
    "parameters",
    "macs",
    "peak_memory_bytes",
    "bytes_per_round",
    "wall_s",
    "architectures",
)


@dataclass(frozen=True)
class SiloSummary:
    """Estimates of one setting over its seeds.

    `values` holds an estimate, or None, for: accuracy, std and worst (of the silos' own test accuracies);
    best_accuracy and best_round (`silos.best_round`);
    global_accuracy (mean of the shared model, if silos also have their own model); gain (mean personalisation gain);
    parameters and macs (means over the silos' models); peak_memory_bytes (maximum over silos in training);
    bytes_per_round (received and sent, per silo); wall_s (of all training rounds); architectures (number of distinct
    architectures of the silos).
    """

    setting: Setting
    method: str
    model: str
    values: dict[str, Estimate | None]


def silo_settings(tables: Tables) -> list[Setting]:
    """The settings of cross-silo methods, with names that are unique among all settings."""
    return [s for s in settings_of(tables) if s.kind == SILOS]


def silo_summaries(tables: Tables) -> list[SiloSummary]:
    """One summary per setting of a cross-silo method; settings without any value are left out."""
    own = silos(tables)
    measured, values = per_silo(own), {p.run_id: _run_values(only(own, [p.run_id])) for p in own.paths}
    found = []
    for setting in silo_settings(tables):
        runs = [values[run_id] for run_id in setting.run_ids]
        estimates = {name: estimate_by_seed([run[name] for run in runs], setting.seeds) for name in MEASURED}
        models = measured.loc[measured["run_id"].isin(setting.run_ids), "model"]
        if any(estimates.values()):
            model = str(models.iloc[0]) if len(models) else PERSONAL
            method = called(str(setting.config.get("method", {}).get("name", "")))
            found.append(SiloSummary(setting, method, model, estimates))
    return found


def _run_values(run: Tables) -> dict[str, float | None]:
    """The values of one run by the names of `MEASURED`; every silo with test data has the same weight."""
    rows, gains = per_silo(run), personalisation_gains(p_matrix(run))
    best, rounds = best_round(run), real_rounds(training(run.rounds))
    sent, tasks = rounds["bytes_down"].sum() + rounds["bytes_up"].sum(), rounds["clients_planned"].sum()
    architectures = int(rows["architecture"].nunique())
    values: dict[str, Any] = {
        "accuracy": rows["accuracy"].mean(),
        "std": rows["accuracy"].std(ddof=0),
        "worst": rows["accuracy"].min(),
        "best_accuracy": None if best is None else best[0],
        "best_round": None if best is None else best[1],
        "global_accuracy": rows["global_accuracy"].mean(),
        "gain": gains["gain"].mean(),
        "parameters": rows["parameters"].mean(),
        "macs": rows["macs"].mean(),
        "peak_memory_bytes": training(run.clients)["peak_memory_bytes"].max(),
        "bytes_per_round": sent / tasks if tasks else None,
        "wall_s": rounds["wall_s"].sum(min_count=1),
        "architectures": architectures or None,
    }
    return {name: None if value is None or pd.isna(value) else float(value) for name, value in values.items()}
