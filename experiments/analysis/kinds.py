"""Which kind of method a run is of: one model per tier, subnets of an elastic supernet, or one model per silo.

The only place that knows methods by their names.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedloom.experiments.analysis.tables import Tables, configuration, read_table_of

TIERS, SUBNETS, SILOS = "tiers", "subnets", "silos"
"""What a method ends with: a model per tier; subnets for targets (SuperFedNAS and its baselines); a model per silo."""

ELASTIC_METHODS = ("superfednas",)
SILO_METHODS = (
    "spider", "local_adaptation", "ditto", "per_fedavg", "knn_per", "fedmn", "global_nas", "fednas", "fedpnas"
)  # fmt: skip
"""Cross-silo methods: every silo takes part in every round, and is measured with a model of its own."""

_OWN_MODELS, _OWN_CELLS = ("spider", "ditto"), ("fedpnas",)


def method_of(config: Mapping[str, Any]) -> str:
    """The name of a stored configuration's method; empty if it has none."""
    return str(config.get("method", {}).get("name", ""))


def kind_of(tables: Tables, run_id: str) -> str:
    """TIERS, SUBNETS or SILOS; TIERS for a run that stored no configuration."""
    method = method_of(configuration(tables, run_id))
    return SUBNETS if method in ELASTIC_METHODS else SILOS if method in SILO_METHODS else TIERS


def elastic_run_ids(tables: Tables) -> list[str]:
    """The runs of SuperFedNAS and of its baselines."""
    return [p.run_id for p in tables.paths if kind_of(tables, p.run_id) == SUBNETS]


def silo_run_ids(tables: Tables) -> list[str]:
    """The runs of cross-silo methods."""
    return [p.run_id for p in tables.paths if kind_of(tables, p.run_id) == SILOS]


def keeps_own_models(tables: Tables, run_id: str) -> bool:
    """Whether silos keep a model of their own from round to round; where one keeps none, the shared one is scored."""
    return method_of(configuration(tables, run_id)) in _OWN_MODELS


def keeps_own_cells(tables: Tables, run_id: str) -> bool:
    """Whether silos put cells of their own behind a shared base."""
    return method_of(configuration(tables, run_id)) in _OWN_CELLS


def with_silo_clients(tables: Tables) -> Tables:
    """The tables with the rows of `clients` of cross-silo runs, which are few, where they were left out."""
    own = set(silo_run_ids(tables))
    paths = [p for p in tables.paths if p.run_id in own]
    return replace(tables, clients=read_table_of(paths, "clients")) if paths else tables


def is_dry(tables: Tables, run_id: str) -> bool:
    """Whether the run only counted what its clients would do."""
    return bool(configuration(tables, run_id).get("dry_run", False))
