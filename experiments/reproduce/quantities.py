"""Reads how a quantity is measured: from the tables of runs, counted without training, or from two others."""

from collections.abc import Sequence
from typing import Any

from fedloom.experiments.reproduce.counted import FACTS
from fedloom.experiments.reproduce.fields import Fields, check_known
from fedloom.experiments.reproduce.measure import CONVERSIONS, FRAMES, REDUCTIONS, TAU
from fedloom.experiments.reproduce.schema import Combined, Counted, Operand, Read, Source
from fedloom.platform.words import shown

COMBINED = ("ratio", "difference", TAU)
BEST = {"max": ("accuracy", "metric", "test"), "min": ("loss", "perplexity", "test_loss")}
"""Reductions that choose the best of several rows, as early stopping does, by values with such names."""
OF_VALIDATION = ("candidates", "hypervolume", "rounds", "clients", "communication", "communication_by_kind")
"""Frames without a value on test data."""


def read_source(fields: Fields, quantities: Sequence[str], settings: Sequence[str]) -> Source | None:
    """How a quantity is measured; None if it is only published.

    `quantities` are those above it in the file, which it may combine. Raises ValueError for more than one way, for
    unknown names, and for a number that would be chosen by test data.
    """
    ways = [name for name in ("read", "count", *COMBINED) if fields.has(name)]
    if len(ways) > 1:
        raise ValueError(f"{fields.where} has {' and '.join(ways)}: give one of them")
    if not ways:
        return None
    if ways[0] == "read":
        return _read(fields.inner("read"))
    if ways[0] == "count":
        return _counted(fields.inner("count"))
    return _combined(ways[0], fields, quantities, settings)


def _read(fields: Fields) -> Read:
    fields.only("from", "value", "where", "place", "reduce", "times", "convert")
    where = fields.inner("where")
    found = Read(
        frame=fields.one_of("from", [*FRAMES]),
        value=fields.text("value"),
        where={name: _wanted(where.value(name)) for name in where.names},
        place=fields.text("place", "") if fields.has("place") else "",
        reduce=fields.one_of("reduce", [*REDUCTIONS], "one"),
        times=fields.number("times", 1.0),
        convert=fields.one_of("convert", [*CONVERSIONS], "none") if fields.has("convert") else "",
    )
    _check_not_chosen_by_test(found, fields.where)
    return found


def _wanted(given: Any) -> tuple[Any, ...]:
    return tuple(given) if isinstance(given, list) else (given,)


def _check_not_chosen_by_test(read: Read, where: str) -> None:
    """Raises ValueError for the best of several values on test data: which one is reported must not depend on it.

    The worst one, of all clients say, is no choice: it flatters nobody.
    """
    names = (read.value, *map(str, read.where.get("metric", ())))
    if read.frame == "evaluations":
        if "split" not in read.where:
            raise ValueError(f"{where}: say in where which split is read: test or validation")
        is_tested = "test" in read.where["split"]
    else:
        is_tested = read.frame not in OF_VALIDATION
    best = [name for name in names for kind in BEST.get(read.reduce, ()) if kind in name]
    if is_tested and best:
        raise ValueError(
            f"{where}: reduce={read.reduce} of {best[0]} chooses a number by test data: read the last, or each place"
        )


def _counted(fields: Fields) -> Counted:
    fields.only("from", "value", "times")
    return Counted(fields.one_of("from", [*FACTS]), fields.text("value"), fields.number("times", 1.0))


def _combined(kind: str, fields: Fields, quantities: Sequence[str], settings: Sequence[str]) -> Combined:
    given = fields.list(kind)
    if len(given) != 2:
        raise ValueError(f"{fields.where}: {kind} is {shown(given)}: give a list of two quantities")
    first, second = (read_operand(each, f"{fields.where}: {kind}") for each in given)
    for operand in (first, second):
        check_known([operand.quantity], quantities, "quantity above it", fields.where)
        check_known([operand.setting] if operand.setting else [], settings, "setting", fields.where)
    return Combined(kind, first, second)


def read_operand(given: Any, where: str) -> Operand:
    """A quantity's name, or {of: NAME, setting: NAME, place: NAME}."""
    if isinstance(given, str):
        return Operand(given)
    fields = Fields(given, where).only("of", "setting", "place")
    setting, place = (fields.text(name) if fields.has(name) else None for name in ("setting", "place"))
    return Operand(fields.text("of"), setting, place)
