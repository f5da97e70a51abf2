"""Whether what was measured shows a claim, contradicts it, or does neither: intervals over seeds, never one seed."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from fedloom.experiments.analysis.compare import difference
from fedloom.experiments.analysis.settings import estimate
from fedloom.experiments.reproduce.items import (
    AtLeast,
    AtMost,
    Band,
    Check,
    Claim,
    Close,
    Combined,
    Comparison,
    Greater,
    Item,
    Less,
    Monotone,
    Spot,
)
from fedloom.experiments.reproduce.measure import Measured, at, combined, paired

SHOWN, NOT_SHOWN, CONTRADICTED, NOT_RUN = "shown", "not shown", "contradicted", "not run"
STATES = (CONTRADICTED, NOT_RUN, NOT_SHOWN, SHOWN)
"""From the worst to the best: a claim has the worst state of its checks."""
MOST_SPOTS = 3
"""Places that are named where a claim is not shown."""
NOT_PUBLISHED = "not published"
FEW_SEEDS = "one or two seeds have no interval"
NO_VALUE = "not measured"


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % interval over seeds; one or two seeds have none, an exact value one without width."""

    mean: float
    low: float | None
    high: float | None
    seeds: int


@dataclass(frozen=True)
class Finding:
    """One comparison at one spot: its state, the compared number with its interval, and why it is not shown."""

    spot: Spot
    state: str
    interval: Interval | None
    reason: str = ""


@dataclass(frozen=True)
class Verdict:
    """The state of a claim, with the findings of all its checks."""

    claim: Claim
    state: str
    findings: tuple[Finding, ...]

    @property
    def reason(self) -> str:
        """Where, and why, a claim is not shown; empty if it is."""
        bad = [f for f in self.findings if f.state == self.state and f.state != SHOWN]
        if not bad:
            return ""
        names = list(dict.fromkeys(spot_name(f.spot) for f in bad if spot_name(f.spot)))
        more = f" and {len(names) - MOST_SPOTS} more" if len(names) > MOST_SPOTS else ""
        places = f"{' / '.join(names[:MOST_SPOTS])}{more}"
        reasons = ", ".join(list(dict.fromkeys(f.reason or _range(f.interval) for f in bad))[:MOST_SPOTS])
        number = f"{len(bad)} of {len(self.findings)}" if len(self.findings) > 1 else ""
        return ": ".join(text for text in (number, "; ".join(filter(None, (places, reasons)))) if text)


def _range(interval: Interval | None) -> str:
    if interval is None or interval.low is None or interval.high is None:
        return ""
    low, high = f"{interval.low:.4g}", f"{interval.high:.4g}"
    return f"it is {low}" if low == high else f"it is {low} to {high}"


def spot_name(spot: Spot) -> str:
    """A setting and a place as text."""
    return ", ".join(part for part in spot if part)


def verdict(claim: Claim, measured: Mapping[str, Measured], item: Item, settings: Sequence[str]) -> Verdict:
    """The state of a claim: the worst of its checks at all spots, so that it is shown only if it is shown everywhere.

    A claim of which a part was not run is not shown, unless another part contradicts it; it is not run if no part was.
    """
    findings = [finding for check in claim.checks for finding in _findings(check, measured, item, settings)]
    states = {finding.state for finding in findings} or {NOT_RUN}
    if CONTRADICTED in states:
        state = CONTRADICTED
    elif states == {NOT_RUN}:
        state = NOT_RUN
    else:
        state = SHOWN if states == {SHOWN} else NOT_SHOWN
        findings = [replace(f, state=NOT_SHOWN) if f.state == NOT_RUN else f for f in findings]
    return Verdict(claim, state, tuple(findings))


def in_the_paper(claim: Claim, item: Item) -> str:
    """The claim's state for the published numbers, which count as exact, or that these were not published."""
    published = as_published(item)
    settings = list(dict.fromkeys(setting for quantity in published.values() for setting, _ in quantity.values))
    state = verdict(claim, published, item, settings).state
    return NOT_PUBLISHED if state == NOT_RUN else state


def as_published(item: Item) -> dict[str, Measured]:
    """The published numbers as if they had been counted; ratios and differences that were not published follow."""
    quantities: dict[str, Measured] = {}
    for name, quantity in item.quantities.items():
        values = {spot: {0: number.value} for spot, number in quantity.published.items()}
        if not values and isinstance(quantity.source, Combined):
            quantities[name] = combined(quantity.source, quantities)
        else:
            quantities[name] = Measured(values, is_exact=True)
    return quantities


def interval_at(quantity: Measured, spot: Spot) -> Interval | None:
    """The mean of a quantity at a spot, with its interval over seeds; None if it has no value there."""
    mean = estimate([value for value in quantity.values.get(spot, {}).values() if math.isfinite(value)])
    if mean is None:
        return None
    if quantity.is_exact:
        return Interval(mean.mean, mean.mean, mean.mean, 0)
    if mean.half_width is None:
        return Interval(mean.mean, None, None, mean.runs)
    return Interval(mean.mean, mean.mean - mean.half_width, mean.mean + mean.half_width, mean.runs)


def _of_pairs(pairs: Sequence[tuple[float, float]], is_exact: bool) -> Interval | None:
    """The mean difference with the interval of the paired t test."""
    known = [pair for pair in pairs if all(map(math.isfinite, pair))]
    if not known:
        return None
    first, second = (np.array(side) for side in zip(*known, strict=True))
    mean = difference(first, second, paired=True)
    if is_exact:
        return Interval(mean.difference, mean.difference, mean.difference, 0)
    return Interval(mean.difference, mean.low, mean.high, len(known))


# -- the kinds of checks ----------------------------------------------------------------------------------------------


def _findings(check: Check, measured: Mapping[str, Measured], item: Item, settings: Sequence[str]) -> Iterator[Finding]:
    quantity = at(measured, check.operand)
    if isinstance(check, Monotone):
        yield from _monotone(check, quantity, settings)
        return
    for spot in _spots(check, quantity, settings):
        if isinstance(check, Comparison):
            other = at(measured, check.other)
            pairs = [*paired(quantity, other, spot).values()]
            interval = _of_pairs(pairs, quantity.is_exact and other.is_exact)
        else:
            interval = interval_at(quantity, spot)
        setting = spot[0] if check.operand.setting is None else check.operand.setting
        place = spot[1] if check.operand.place is None else check.operand.place
        published = item.quantities[check.operand.quantity].published.get((setting, place))
        bounds = _bounds(check, published.value if published else None)
        if interval is None:
            yield Finding(spot, NOT_RUN, None, NO_VALUE)
        elif bounds is None:
            yield Finding(spot, NOT_RUN, interval, "no published number")
        else:
            yield _within(spot, interval, *bounds)


def _bounds(check: Check, published: float | None) -> tuple[float, float] | None:
    """The least and the greatest number with which a check holds; None if they depend on what was not published."""
    match check:
        case Greater(by=number) | AtLeast(value=number):
            return number, math.inf
        case Less(by=number):
            return -math.inf, -number
        case AtMost(value=number):
            return -math.inf, number
        case Close(within=number):
            return -number, number
        case Band(target=target, tolerance=(size, is_share)):
            middle = published if target is None else target
            if middle is None:
                return None
            half = abs(middle) * size if is_share else size
            return middle - half, middle + half
    raise AssertionError(f"{check} has no bounds")


def _spots(check: Check, quantity: Measured, settings: Sequence[str]) -> list[Spot]:
    """Where a check is made: in all its settings, at all places with values; a setting without any is one spot."""
    spots: list[Spot] = []
    for setting in _settings(check, quantity, settings):
        places = [place for of_setting, place in quantity.values if of_setting == setting]
        if check.operand.place is None:
            places = [*check.places] or places
        spots += [(setting, place) for place in dict.fromkeys(places)] or [(setting, "")]
    return spots


def _settings(check: Check, quantity: Measured, settings: Sequence[str]) -> list[str]:
    """The settings of a check; "" for a quantity that names its own, as the difference of two settings does."""
    is_fixed = check.operand.setting is not None or {setting for setting, _ in quantity.values} == {""}
    return [""] if is_fixed else [*(check.settings or settings)]


def _within(spot: Spot, interval: Interval, least: float, greatest: float) -> Finding:
    """Shown if the whole interval lies in the bounds, contradicted if none of it does.

    A difference of exactly 0 is none: a bound that is 0 and open to infinity has to be passed.
    """
    if interval.low is None or interval.high is None:
        return Finding(spot, NOT_SHOWN, interval, FEW_SEEDS)
    if interval.low == interval.high == 0 and (least, greatest) in ((0, math.inf), (-math.inf, 0)):
        return Finding(spot, NOT_SHOWN, interval, "no difference")
    if least <= interval.low and interval.high <= greatest:
        return Finding(spot, SHOWN, interval)
    if interval.high < least or interval.low > greatest:
        return Finding(spot, CONTRADICTED, interval)
    return Finding(spot, NOT_SHOWN, interval, "the interval crosses the limit")


def _monotone(check: Monotone, quantity: Measured, settings: Sequence[str]) -> Iterator[Finding]:
    """Each step of the order as a paired difference, in every setting or at every place that is not ordered."""
    by_settings = check.along == "settings"
    if by_settings:
        others = [*check.places] or [place for _, place in quantity.values]
    else:
        others = _settings(check, quantity, settings)
    for other in dict.fromkeys(others) or [""]:
        for before, after in pairwise(check.order):
            spots = [(step, other) if by_settings else (other, step) for step in (before, after)]
            first, second = (Measured({("", ""): quantity.values.get(s, {})}, quantity.is_exact) for s in spots)
            interval = _of_pairs([*paired(second, first, ("", "")).values()], quantity.is_exact)
            step = f"{before} to {after}"
            spot = (step, other) if by_settings else (other, step)
            if interval is None:
                yield Finding(spot, NOT_RUN, None, NO_VALUE)
            else:
                rises = check.direction == "increasing"
                yield _within(spot, interval, *((0.0, math.inf) if rises else (-math.inf, 0.0)))
