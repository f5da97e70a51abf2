"""What a run's method declares of its runs: whose models they end with, and what silos keep of their own.

It is recorded with every run (`traits` in the table `runs`), so that a method of one's own is reported like those that
ship with fedloom.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pandas as pd

from fedloom.experiments.analysis.tables import Tables, configuration, read_table_of

TIERS, SUBNETS, SILOS, SHARED = "tiers", "subnets", "silos", "shared"
"""What a run ends with: a model per tier, subnets for targets, a model per silo, or one model for all."""

ALL_TIERS = "all"
"""Stands for a tier where something is of all of them."""


def traits_of(tables: Tables, run_id: str) -> Mapping[str, Any]:
    """What the run's method declares; nothing if the run stored no configuration."""
    recorded: Mapping[str, Any] | None = tables.recorded(run_id, "traits")
    if recorded is not None:
        return recorded
    return _of_older_runs(str(configuration(tables, run_id).get("method", {}).get("name", "")))


@cache
def _of_older_runs(method: str) -> Mapping[str, Any]:
    """What a method declares now, for runs from before it was recorded; one model for all had a tier then."""
    from fedloom.platform.methods.registry import METHODS

    if method not in METHODS:
        return {}
    traits = METHODS[method].traits(METHODS[method].config())
    return {**traits, "kind": TIERS if traits["kind"] == SHARED else traits["kind"]}


def kind_of(tables: Tables, run_id: str) -> str:
    """TIERS, SUBNETS, SILOS or SHARED; TIERS for a run that stored no configuration."""
    return str(traits_of(tables, run_id).get("kind", TIERS))


def runs_of_kind(tables: Tables, kind: str) -> list[str]:
    """The runs whose method is of a kind."""
    return [p.run_id for p in tables.paths if kind_of(tables, p.run_id) == kind]


def elastic_run_ids(tables: Tables) -> list[str]:
    """The runs that end with subnets of an elastic supernet."""
    return runs_of_kind(tables, SUBNETS)


def silo_run_ids(tables: Tables) -> list[str]:
    """The runs of cross-silo methods."""
    return runs_of_kind(tables, SILOS)


def keeps_own_models(tables: Tables, run_id: str) -> bool:
    """Whether silos keep a model of their own from round to round; where one keeps none, the shared one is scored."""
    return traits_of(tables, run_id).get("own") == "model"


def keeps_own_cells(tables: Tables, run_id: str) -> bool:
    """Whether silos put cells of their own behind a shared base."""
    return traits_of(tables, run_id).get("own") == "cells"


def for_all(tables: Tables, frame: pd.DataFrame) -> pd.DataFrame:
    """The frame, where what is of a run's one model for all is of tier "all"; rows of single clients stay."""
    shared = frame["run_id"].isin(runs_of_kind(tables, SHARED))
    if not shared.any():
        return frame
    if "client_id" in frame.columns:
        shared &= frame["client_id"].isna()
    return frame.assign(tier=frame["tier"].astype(object).where(~shared, ALL_TIERS))


def with_silo_clients(tables: Tables) -> Tables:
    """The tables with the rows of `clients` of cross-silo runs, which are few, where they were left out."""
    own = set(silo_run_ids(tables))
    paths = [p for p in tables.paths if p.run_id in own]
    return replace(tables, clients=read_table_of(paths, "clients")) if paths else tables


def is_dry(tables: Tables, run_id: str) -> bool:
    """Whether the run only counted what its clients would do."""
    return bool(configuration(tables, run_id).get("dry_run", False))
