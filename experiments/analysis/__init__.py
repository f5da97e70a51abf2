"""Tidy pandas frames from the result tables, and comparisons over seeds; the reports use the same frames.

from fedloom.experiments import analysis

tables = analysis.load("results")
analysis.summary(tables)
"""

from fedloom.experiments.analysis.ablation import (
    ablation_frame,
    against_reference,
    by_setting,
    load_ablation,
    marginal,
    references,
)
from fedloom.experiments.analysis.clients import confusions, failures, fairness, paragraphs, per_class
from fedloom.experiments.analysis.compare import compare
from fedloom.experiments.analysis.importances import importances
from fedloom.experiments.analysis.outcomes import MEASURES, OUTCOMES, outcomes, per_model, summary
from fedloom.experiments.analysis.rounds import communication, communication_by_kind, convergence
from fedloom.experiments.analysis.settings import Estimate, estimate
from fedloom.experiments.analysis.subnets import decoded
from fedloom.experiments.analysis.tables import ALL_TABLES, Tables, load, with_training
from fedloom.experiments.analysis.targets import first_reached, to_target
from fedloom.experiments.analysis.tiers import hypervolume, pareto, per_tier, with_perplexity

__all__ = [
    "ALL_TABLES",
    "MEASURES",
    "OUTCOMES",
    "Estimate",
    "Tables",
    "ablation_frame",
    "against_reference",
    "by_setting",
    "communication",
    "communication_by_kind",
    "compare",
    "confusions",
    "convergence",
    "decoded",
    "estimate",
    "failures",
    "fairness",
    "first_reached",
    "hypervolume",
    "importances",
    "load",
    "load_ablation",
    "marginal",
    "outcomes",
    "paragraphs",
    "pareto",
    "per_class",
    "per_model",
    "per_tier",
    "references",
    "summary",
    "to_target",
    "with_perplexity",
    "with_training",
]
