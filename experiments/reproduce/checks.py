"""Reads the checks of a claim."""

import re
from typing import Any

from fedloom.experiments.reproduce.fields import Fields, as_number
from fedloom.experiments.reproduce.quantities import read_operand
from fedloom.experiments.reproduce.schema import KINDS, Check
from fedloom.platform.words import shown

PUBLISHED = "published"
RESTRICT = ("settings", "places")
KEYS = {
    "greater": ("of", "than", "by"),
    "less": ("of", "than", "by"),
    "at_least": ("of", "value"),
    "at_most": ("of", "value"),
    "band": ("of", "target", "tolerance"),
    "close": ("of", "to", "within"),
    "monotone": ("of", "along", "order", "direction"),
}
"""The keys of each kind of check, beside `settings` and `places`."""
_PERCENT = re.compile(r"([0-9.]+) ?%")


def read_checks(claim: Fields) -> tuple[Check, ...]:
    """The checks of a claim: one by its kind, or several as a list `all`; ValueError for anything else."""
    claim.only("text", "scales", "despite", "all", *KINDS)
    if claim.has("all"):
        given = [Fields(each, f"{claim.where}: all").only(*KINDS) for each in claim.list("all")]
    else:
        given = [claim]
    return tuple(_check(each) for each in given)


def _check(fields: Fields) -> Check:
    kinds = [name for name in fields.names if name in KINDS]
    if len(kinds) != 1:
        raise ValueError(f"{fields.where} has {len(kinds)} checks: give one of {', '.join(KINDS)}, or a list `all`")
    kind = kinds[0]
    own = fields.inner(kind).only(*KEYS[kind], *RESTRICT)
    number, tolerance, relative = _numbers(kind, own)
    is_monotone = kind == "monotone"
    order = own.texts("order")
    if is_monotone and len(order) < 2:
        raise ValueError(f"{own.where}: order={list(order)}: give at least two settings or places")
    return Check(
        kind=kind,
        operand=_operand(own, "of"),
        other=_operand(own, {"close": "to"}.get(kind, "than")) if kind in ("greater", "less", "close") else None,
        number=number,
        tolerance=tolerance,
        relative=relative,
        along=own.one_of("along", RESTRICT, "places"),
        order=order,
        direction=own.one_of("direction", ("increasing", "decreasing"), "increasing"),
        settings=own.texts("settings"),
        places=own.texts("places"),
    )


def _operand(fields: Fields, name: str) -> Any:
    return read_operand(fields.value(name), f"{fields.where}: {name}")


def _numbers(kind: str, fields: Fields) -> tuple[float | None, float, bool]:
    """The check's number, its tolerance, and whether the tolerance is a share of the target."""
    if kind in ("greater", "less"):
        return fields.number("by", 0.0), 0.0, False
    if kind in ("at_least", "at_most"):
        return fields.number("value"), 0.0, False
    if kind == "close":
        return fields.number("within"), 0.0, False
    if kind == "band":
        target = fields.value("target")
        number = None if target == PUBLISHED else as_number(target, f"{fields.where}: target")
        return number, *_tolerance(fields)
    return 0.0, 0.0, False


def _tolerance(fields: Fields) -> tuple[float, bool]:
    """A number in the quantity's unit, or a share of the target, such as 10 %."""
    given = fields.value("tolerance")
    share = _PERCENT.fullmatch(given) if isinstance(given, str) else None
    if share is not None:
        return as_number(share[1], f"{fields.where}: tolerance") / 100, True
    if isinstance(given, str):
        raise ValueError(f"{fields.where}: tolerance is {shown(given)}: give a number, or a share such as 10 %")
    return as_number(given, f"{fields.where}: tolerance"), False
