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
from fedloom.experiments.analysis.compare import compare
from fedloom.experiments.analysis.convergence import convergence
from fedloom.experiments.analysis.details import confusions, paragraphs, per_class
from fedloom.experiments.analysis.frames import (
    communication,
    communication_by_kind,
    failures,
    fairness,
    pareto,
    per_tier,
)
from fedloom.experiments.analysis.fronts import hypervolume
from fedloom.experiments.analysis.intervals import Estimate, estimate
from fedloom.experiments.analysis.labels import decoded
from fedloom.experiments.analysis.outcomes import OUTCOMES, outcomes
from fedloom.experiments.analysis.reused import with_training
from fedloom.experiments.analysis.summary import MEASURES, per_model, summary
from fedloom.experiments.analysis.tables import ALL_TABLES, Tables, load
from fedloom.experiments.analysis.texts import with_perplexity

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
    "hypervolume",
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
    "with_perplexity",
    "with_training",
]
