"""Measures the quantities of an item: from the tables of its runs that are done, by counting, or from two others."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import pandas as pd
from scipy.stats import kendalltau

from fedloom.experiments.analysis.clients import fairness
from fedloom.experiments.analysis.outcomes import per_model
from fedloom.experiments.analysis.rounds import communication, communication_by_kind, convergence
from fedloom.experiments.analysis.silos import per_silo
from fedloom.experiments.analysis.tables import Tables, by_stage
from fedloom.experiments.analysis.tiers import PERPLEXITY, hypervolume, pareto, per_tier, perplexity_of
from fedloom.experiments.reproduce.counted import OF_DATA, fact, facts_of, stood_in
from fedloom.experiments.reproduce.frames import cells, gains, subnets_by_size
from fedloom.experiments.reproduce.schema import ONLY, Combined, Counted, Item, Operand, Quantity, Read, Scale, Spot
from fedloom.experiments.reproduce.settings import dataset_of, missing_data, overrides_of

FRAMES: Mapping[str, Callable[[Tables], pd.DataFrame]] = {
    "models": per_model,
    "tiers": per_tier,
    "fairness": fairness,
    "fairness_in_perplexity": lambda tables: fairness(tables, PERPLEXITY),
    "silos": per_silo,
    "subnets": subnets_by_size,
    "gains": gains,
    "cells": cells,
    "communication": communication,
    "communication_by_kind": lambda tables: communication_by_kind(communication(tables)),
    "candidates": pareto,
    "hypervolume": hypervolume,
    "convergence": convergence,
    "rounds": lambda tables: by_stage(tables.rounds),
    "clients": lambda tables: by_stage(tables.clients),
    "evaluations": lambda tables: by_stage(tables.evaluations),
}
"""The frames that a quantity may be read from; their docstrings say which columns they have."""

REDUCTIONS: Mapping[str, Callable[["pd.Series[float]"], float]] = {
    "one": lambda values: _only_one(values),
    "mean": lambda values: math.fsum(values) / len(values),
    "std": lambda values: float(values.std(ddof=0)),
    "min": lambda values: float(values.min()),
    "max": lambda values: float(values.max()),
    "sum": math.fsum,
    "first": lambda values: float(values.iloc[0]),
    "last": lambda values: float(values.iloc[-1]),
    "count": lambda values: float(len(values)),
}
"""How several rows of one run and place become one number; `one` refuses several."""

CONVERSIONS: Mapping[str, Callable[[float], float]] = {
    "none": lambda value: value,
    "perplexity": perplexity_of,
    "error": lambda accuracy: 1.0 - accuracy,
}
"""Functions of a number that a table holds."""

Values = Mapping[Spot, Mapping[int, float]]
"""A quantity by spot and seed."""


@dataclass(frozen=True)
class Measured:
    """The values of a quantity; exact ones were counted, not drawn, and have no interval."""

    values: Values
    is_exact: bool = False


NOTHING = Measured({})


@dataclass(frozen=True)
class Runs:
    """Tables of runs that are done, with the setting and the seed of each."""

    tables: Tables
    places: Mapping[str, tuple[str, int]]


def measured(
    item: Item, scale: Scale, runs: Iterable[Runs], kept: Mapping[str, Values] = MappingProxyType({})
) -> dict[str, Measured]:
    """Every quantity of an item that can be measured, by name; those without a value are empty.

    `kept` are values that were read from runs, or counted, before; these are neither read nor counted again.
    """
    sources, frames, facts = list(runs), _Frames(), _CountedFacts(scale)
    found: dict[str, Measured] = {}
    for quantity in item.quantities.values():
        source = quantity.source
        if quantity.name in kept:
            found[quantity.name] = Measured(kept[quantity.name], is_exact=isinstance(source, Counted))
        elif isinstance(source, Read):
            found[quantity.name] = _of_runs(item, quantity, source, sources, frames)
        elif isinstance(source, Counted):
            found[quantity.name] = facts.of(source)
        elif isinstance(source, Combined):
            found[quantity.name] = combined(source, found)
    return found


class _Frames:
    """The frames of tables, each made once."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], pd.DataFrame] = {}

    def of(self, name: str, runs: Runs) -> pd.DataFrame:
        key = (name, id(runs.tables))
        if key not in self._known:
            self._known[key] = FRAMES[name](runs.tables)
        return self._known[key]


def _of_runs(item: Item, quantity: Quantity, read: Read, sources: Iterable[Runs], frames: _Frames) -> Measured:
    values: dict[Spot, dict[int, float]] = {}
    for runs in sources:
        try:
            for setting, place, seed, value in _read(read, frames.of(read.frame, runs), runs.places):
                values.setdefault((setting, place), {})[seed] = value
        except ValueError as error:
            raise ValueError(f"{item.name}: {quantity.name}: {error}") from error
    return Measured(values)


def _read(
    read: Read, frame: pd.DataFrame, places: Mapping[str, tuple[str, int]]
) -> Iterator[tuple[str, str, int, float]]:
    """The values of a quantity as (setting, place, seed, value); ValueError for a column that is not there."""
    for column in (read.value, *read.where, *([read.place] if read.place else [])):
        if column not in frame.columns:
            raise ValueError(f"{read.frame} has no column {column!r}; it has {', '.join(map(str, frame.columns))}")
    rows = frame[frame["run_id"].isin(list(places))]
    for column, wanted in read.where.items():
        rows = rows[_is_one_of(rows[column], wanted)]
    rows = rows.dropna(subset=[read.value])
    by = ["run_id", read.place] if read.place else ["run_id"]
    for key, group in rows.astype(dict.fromkeys(by, object)).groupby(by, sort=False):
        setting, seed = places[str(key[0])]
        value = CONVERSIONS[read.convert or "none"](REDUCTIONS[read.reduce](group[read.value].astype("float64")))
        yield setting, str(key[1]) if read.place else ONLY, seed, value * read.times


def _is_one_of(column: "pd.Series[Any]", wanted: tuple[Any, ...]) -> "pd.Series[bool]":
    known = [value for value in wanted if value is not None]
    found = column.isin(known)
    return found | column.isna() if len(known) < len(wanted) else found


def _only_one(values: "pd.Series[float]") -> float:
    if len(values) > 1:
        raise ValueError(f"{len(values)} rows of one run and place: choose one by where, or give reduce")
    return float(values.iloc[0])


class _CountedFacts:
    """The facts of a scale's settings, each counted once."""

    def __init__(self, scale: Scale) -> None:
        self._scale = scale
        self._known: dict[tuple[str, str], Mapping[str, Any]] = {}

    def of(self, counted: Counted) -> Measured:
        """A fact in all settings, as the exact value of the first seed."""
        values = {
            (setting, place): {self._scale.seeds[0]: value * counted.times}
            for setting in self._scale.settings
            if not lacking(counted, self._scale, setting)
            for place, value in fact(self._facts(counted.facts, setting), counted.value).items()
        }
        return Measured(values, is_exact=True)

    def _facts(self, name: str, setting: str) -> Mapping[str, Any]:
        key = (name, setting)
        if key not in self._known:
            self._known[key] = facts_of(name, overrides_of(self._scale, setting))
        return self._known[key]


def lacking(counted: Counted, scale: Scale, setting: str) -> str:
    """The data that has to be there to count this in a setting, and where it belongs; empty if nothing is missing."""
    dataset = dataset_of(scale, setting)
    if counted.facts not in OF_DATA or stood_in(dataset):
        return ""
    return missing_data(dataset, scale.overrides)


# -- two quantities ---------------------------------------------------------------------------------------------------


TAU = "tau"
"""Kendall's rank correlation of two quantities over the places of a setting."""


def combined(source: Combined, known: Mapping[str, Measured]) -> Measured:
    """The ratio or the difference of two quantities, or their rank correlation over places, seed by seed."""
    first, second = (at(known.get(o.quantity, NOTHING), o) for o in (source.first, source.second))
    if source.kind == TAU:
        return _rank_correlation(first, second)
    values: dict[Spot, dict[int, float]] = {}
    for spot in first.values:
        both = paired(first, second, spot)
        by_seed = {seed: _apply(source.kind, *pair) for seed, pair in both.items()}
        if by_seed:
            values[spot] = by_seed
    return Measured(values, first.is_exact and second.is_exact)


def _rank_correlation(first: Measured, second: Measured) -> Measured:
    """Kendall's tau (tau-b) over the places where both are known; a seed needs at least three of them."""
    pairs: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for setting, place in first.values:
        for seed, pair in paired(first, second, (setting, place)).items():
            pairs.setdefault((setting, seed), []).append(pair)
    values: dict[Spot, dict[int, float]] = {}
    for (setting, seed), both in pairs.items():
        if len(both) >= 3:
            values.setdefault((setting, ONLY), {})[seed] = float(kendalltau(*zip(*both, strict=True)).statistic)
    return Measured(values, first.is_exact and second.is_exact)


def _apply(kind: str, first: float, second: float) -> float:
    if kind == "difference":
        return first - second
    return first / second if second else math.nan


def at(quantity: Measured, operand: Operand) -> Measured:
    """The quantity where the operand names it; a named setting or place is the spot's no longer: it is "" there."""

    def named(spot: Spot) -> bool:
        return operand.setting in (None, spot[0]) and operand.place in (None, spot[1])

    values = {
        ("" if operand.setting is not None else setting, "" if operand.place is not None else place): by_seed
        for (setting, place), by_seed in quantity.values.items()
        if named((setting, place))
    }
    return replace(quantity, values=values)


def paired(first: Measured, second: Measured, spot: Spot) -> dict[int, tuple[float, float]]:
    """The values of both at a spot of the first, by seed; an exact value pairs with every seed.

    A spot of the second is the same one, or the one without the setting or the place that it names itself.
    """
    setting, place = spot
    others = [(setting, place), ("", place), (setting, ""), ("", "")]
    mine = first.values.get(spot, {})
    theirs = next((second.values[other] for other in others if other in second.values), {})
    if second.is_exact and theirs:
        theirs = dict.fromkeys(mine, next(iter(theirs.values())))
    elif first.is_exact and mine:
        mine = dict.fromkeys(theirs, next(iter(mine.values())))
    return {seed: (mine[seed], theirs[seed]) for seed in mine if seed in theirs}
