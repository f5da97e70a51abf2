"""The traits that a run's method declares: which models its runs produce, and what silos keep for themselves.

Every run records them (`traits` in the table `runs`), so that a user's method is reported like those of fedloom.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pandas as pd

from fedloom.experiments.analysis.tables import Tables, configuration, read_table_of

TIERS, SUBNETS, SILOS, SHARED = "tiers", "subnets", "silos", "shared"
"""What a run produces: a model per tier, subnets for targets, a model per silo, or one model for all clients."""

ALL_TIERS = "all"
"""The tier in rows that concern all tiers."""


def traits_of(tables: Tables, run_id: str) -> Mapping[str, Any]:
    """The traits of the run's method; empty if the run stored no configuration."""
    recorded: Mapping[str, Any] | None = tables.recorded(run_id, "traits")
    if recorded is not None:
        return recorded
    return _of_older_runs(str(configuration(tables, run_id).get("method", {}).get("name", "")))


@cache
def _of_older_runs(method: str) -> Mapping[str, Any]:
    """A method's current traits, for older runs that recorded none; these assigned a shared model to a tier."""
    from fedloom.platform.methods.registry import METHODS

    if method not in METHODS:
        return {}
    traits = METHODS[method].traits(METHODS[method].config())
    return {**traits, "kind": TIERS if traits["kind"] == SHARED else traits["kind"]}


def kind_of(tables: Tables, run_id: str) -> str:
    """TIERS, SUBNETS, SILOS or SHARED; TIERS for a run that stored no configuration."""
    return str(traits_of(tables, run_id).get("kind", TIERS))


def runs_of_kind(tables: Tables, kind: str) -> list[str]:
    """The runs whose method has this kind."""
    return [p.run_id for p in tables.paths if kind_of(tables, p.run_id) == kind]


def elastic_run_ids(tables: Tables) -> list[str]:
    """The runs that produce subnets of an elastic supernet."""
    return runs_of_kind(tables, SUBNETS)


def silo_run_ids(tables: Tables) -> list[str]:
    """The runs of cross-silo methods."""
    return runs_of_kind(tables, SILOS)


def keeps_own_models(tables: Tables, run_id: str) -> bool:
    """Whether silos keep their own model between rounds; the shared model is scored for a silo that has none."""
    return traits_of(tables, run_id).get("own") == "model"


def keeps_own_cells(tables: Tables, run_id: str) -> bool:
    """Whether silos have their own cells on top of a shared base."""
    return traits_of(tables, run_id).get("own") == "cells"


def for_all(tables: Tables, frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with tier "all" in the rows of models that all clients share; rows of single clients stay unchanged."""
    shared = frame["run_id"].isin(runs_of_kind(tables, SHARED))
    if not shared.any():
        return frame
    if "client_id" in frame.columns:
        shared &= frame["client_id"].isna()
    return frame.assign(tier=frame["tier"].astype(object).where(~shared, ALL_TIERS))


def with_silo_clients(tables: Tables) -> Tables:
    """The tables with `clients` of the cross-silo runs, which have few rows; other runs' rows are not read."""
    own = set(silo_run_ids(tables))
    paths = [p for p in tables.paths if p.run_id in own]
    return replace(tables, clients=read_table_of(paths, "clients")) if paths else tables


def is_dry(tables: Tables, run_id: str) -> bool:
    """Whether the run was a dry run, which counts the clients' work without training."""
    return bool(configuration(tables, run_id).get("dry_run", False))
