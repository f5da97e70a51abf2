"""Which kind of method a run is of: one model per tier, subnets of an elastic supernet, or one model per silo."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedloom.experiments.analysis.tables import Tables, configuration, read_table_of

SUPERFEDNAS = "superfednas"
SILO_METHODS = (
    "spider", "local_adaptation", "ditto", "per_fedavg", "knn_per", "fedmn", "global_nas", "fednas", "fedpnas"
)  # fmt: skip
"""Cross-silo methods: every silo takes part in every round, and is measured with a model of its own."""


def is_elastic(config: Mapping[str, Any]) -> bool:
    """Whether this is SuperFedNAS or a baseline of it: subnets and targets instead of one model per tier."""
    return bool(config.get("method", {}).get("name") == SUPERFEDNAS)


def elastic_run_ids(tables: Tables) -> list[str]:
    """The runs of SuperFedNAS and of its baselines."""
    return [p.run_id for p in tables.paths if is_elastic(configuration(tables, p.run_id))]


def is_silo(config: Mapping[str, Any]) -> bool:
    """Whether this is SPIDER or another cross-silo method: a model per silo instead of one per tier."""
    return bool(config.get("method", {}).get("name") in SILO_METHODS)


def silo_run_ids(tables: Tables) -> list[str]:
    """The runs of cross-silo methods."""
    return [p.run_id for p in tables.paths if is_silo(configuration(tables, p.run_id))]


def with_silo_clients(tables: Tables) -> Tables:
    """The tables with the rows of `clients` of cross-silo runs, which are few, where they were left out."""
    own = set(silo_run_ids(tables))
    paths = [p for p in tables.paths if p.run_id in own]
    return replace(tables, clients=read_table_of(paths, "clients")) if paths else tables


def is_dry(tables: Tables, run_id: str) -> bool:
    """Whether the run only counted what its clients would do."""
    return bool(configuration(tables, run_id).get("dry_run", False))
