"""Measures an item's quantities: from the tables of its finished runs, by counting, or from two other quantities."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType

import pandas as pd
from scipy.stats import kendalltau

from fedloom.experiments.analysis.ablation import load_ablation
from fedloom.experiments.analysis.tables import Tables, only
from fedloom.experiments.reproduce.counting import OF_DATA, SIZES, fact, facts_of
from fedloom.experiments.reproduce.frames import CONVERSIONS, FRAMES, REDUCTIONS
from fedloom.experiments.reproduce.items import ONLY, Combined, Counted, Item, Operand, Read, Scale, Spot
from fedloom.experiments.reproduce.plan import AXIS, Part, missing_data
from fedloom.experiments.store.ablations import FOLDER, PLAN, read_ablation
from fedloom.experiments.store.trials import FINAL, trial_states

Values = Mapping[Spot, Mapping[int, float]]
"""The values of a quantity, by spot and seed."""


@dataclass(frozen=True)
class Measured:
    """The values of a quantity; exact ones were counted instead of sampled over seeds, and have no spread."""

    values: Values
    is_exact: bool = False


NOTHING = Measured({})


@dataclass(frozen=True)
class Runs:
    """The tables of finished runs, with each run's setting and seed by run id."""

    tables: Tables
    places: Mapping[str, tuple[str, int]]


def done_runs(part: Part, results: Path) -> Runs | None:
    """The tables of the finished trials that are needed of a part; None if there are none."""
    folder = results / FOLDER / part.ablation_id
    if not (folder / PLAN).exists():
        return None
    states = trial_states(results, read_ablation(folder))
    done = [s.trial for s in states if s.state in FINAL and part.needs(s.trial)]
    if not done:
        return None
    _, tables = load_ablation(results, part.ablation_id)
    places = {trial.run_id: (str(trial.setting[AXIS]), trial.seed) for trial in done}
    return Runs(only(tables, [*places]), places)


def measured(
    item: Item, scale: Scale, runs: Sequence[Runs], known: Mapping[str, Values] = MappingProxyType({})
) -> dict[str, Measured]:
    """Every quantity of an item that can be measured, by name; those without a value are empty.

    `known` holds values that were read from runs or counted before; these quantities are not measured again.
    """

    @cache
    def frame(index: int, name: str) -> pd.DataFrame:
        return FRAMES[name](runs[index].tables)

    quantities: dict[str, Measured] = {}
    for name, quantity in item.quantities.items():
        source = quantity.source
        try:
            if name in known:
                quantities[name] = Measured(known[name], is_exact=isinstance(source, Counted))
            elif isinstance(source, Read):
                values: dict[Spot, dict[int, float]] = {}
                for index, each in enumerate(runs):
                    for spot, seed, value in _read(source, frame(index, source.frame), each.places):
                        values.setdefault(spot, {})[seed] = value
                quantities[name] = Measured(values)
            elif isinstance(source, Counted):
                quantities[name] = _counted(source, scale)
            elif isinstance(source, Combined):
                quantities[name] = combined(source, quantities)
        except ValueError as error:
            raise ValueError(f"{item.name}: {name}: {error}") from error
    return quantities


def _read(read: Read, frame: pd.DataFrame, places: Mapping[str, tuple[str, int]]) -> Iterator[tuple[Spot, int, float]]:
    """The values of a quantity with spot and seed; ValueError for an unknown column."""
    for column in (read.value, *read.where, *([read.place] if read.place else [])):
        if column not in frame.columns:
            raise ValueError(f"{read.frame} has no column {column!r}; it has {', '.join(map(str, frame.columns))}")
    rows = frame[frame["run_id"].isin(list(places))]
    for column, wanted in read.where.items():
        is_wanted = rows[column].isin([value for value in wanted if value is not None])
        rows = rows[is_wanted | rows[column].isna() if None in wanted else is_wanted]
    rows = rows.dropna(subset=[read.value])
    by = ["run_id", read.place] if read.place else ["run_id"]
    for key, group in rows.astype(dict.fromkeys(by, object)).groupby(by, sort=False):
        setting, seed = places[str(key[0])]
        value = CONVERSIONS[read.convert or "none"](REDUCTIONS[read.reduce](group[read.value].astype("float64")))
        yield (setting, str(key[1]) if read.place else ONLY), seed, value * read.times


def _counted(counted: Counted, scale: Scale) -> Measured:
    """A fact in all settings whose data is present, as an exact value under the first seed."""
    values = {
        (setting, place): {scale.seeds[0]: value * counted.times}
        for setting in scale.settings
        if not lacking(counted, scale, setting)
        for place, value in fact(facts_of(counted.facts, scale.overrides_of(setting)), counted.value).items()
    }
    return Measured(values, is_exact=True)


def lacking(counted: Counted, scale: Scale, setting: str) -> str:
    """The data that is missing to count this in a setting, and where it belongs; empty if nothing is missing."""
    dataset = scale.dataset_of(setting)
    return missing_data(dataset, scale.overrides) if counted.facts in OF_DATA and dataset not in SIZES else ""


# -- two quantities ---------------------------------------------------------------------------------------------------


def combined(source: Combined, known: Mapping[str, Measured]) -> Measured:
    """The ratio or the difference of two quantities, or their rank correlation over places, per seed."""
    first, second = at(known, source.first), at(known, source.second)
    if source.kind == "tau":
        return _rank_correlation(first, second)
    values: dict[Spot, dict[int, float]] = {}
    for spot in first.values:
        pairs = paired(first, second, spot)
        if pairs and source.kind == "difference":
            values[spot] = {seed: one - other for seed, (one, other) in pairs.items()}
        elif pairs:
            values[spot] = {seed: one / other if other else math.nan for seed, (one, other) in pairs.items()}
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


def at(known: Mapping[str, Measured], operand: Operand) -> Measured:
    """The operand's quantity, only in the setting and at the place that it names, which become "" in the spots."""
    quantity = known.get(operand.quantity, NOTHING)
    values = {
        ("" if operand.setting is not None else setting, "" if operand.place is not None else place): by_seed
        for (setting, place), by_seed in quantity.values.items()
        if operand.setting in (None, setting) and operand.place in (None, place)
    }
    return replace(quantity, values=values)


def paired(first: Measured, second: Measured, spot: Spot) -> dict[int, tuple[float, float]]:
    """The values of both quantities at a spot of the first, by seed; an exact value pairs with every seed.

    The second is read at the same spot, or at the one with "" for the setting or the place that its operand names.
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
