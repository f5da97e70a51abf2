"""Tests over several seeds whether measured values show a claim, contradict it, or do neither.

A claim that needs a regime (for example, that small subnets hurt the largest one) is neither shown nor contradicted
where that regime was not reached. Holm's correction accounts for the several claims of an item.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from fedloom.experiments.analysis.compare import difference
from fedloom.experiments.analysis.settings import CONFIDENCE, estimate
from fedloom.experiments.report.wording import ROUNDING
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
from fedloom.experiments.reproduce.measure import NOTHING, Measured, at, combined, paired

SHOWN, NOT_SHOWN, CONTRADICTED, NOT_RUN = "shown", "not shown", "contradicted", "not run"
NOT_REACHED = "regime not reached"
STATES = (CONTRADICTED, NOT_RUN, NOT_REACHED, NOT_SHOWN, SHOWN)
"""From the worst to the best."""
LEVEL = (1 - CONFIDENCE) / 2
"""The chance of being wrong in one direction: an interval of 95 % leaves 2.5 % on each side."""
MOST_SPOTS = 3
"""The most places, or reasons, that are named where a claim is not shown."""
NOT_PUBLISHED = "not published"
FEW_SEEDS = "one or two seeds have no interval"
NO_VALUE = "not measured"


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % interval over seeds: None for one or two seeds, of zero width for an exact value."""

    mean: float
    low: float | None
    high: float | None
    seeds: int


@dataclass(frozen=True)
class Finding:
    """One comparison at one spot: its state, the compared number with its interval, and why it is not shown.

    Attributes:
        if_not: upper bound on the probability of such values if the check does not hold.
        if_so: upper bound on the probability of such values if the check holds.
    """

    spot: Spot
    state: str
    interval: Interval | None
    reason: str = ""
    if_not: float = 1.0
    if_so: float = 1.0


@dataclass(frozen=True)
class Verdict:
    """The state of a claim, with the findings of all its checks.

    Attributes:
        why: a reason beyond the findings: the regime was not reached, or the test fails after the correction.
        p: the probability of such findings if the opposite were true, over all places; None if nothing was tested.
        regime: whether the regime that the claim needs was reached; empty if it needs none.
        is_changed: whether the claim was changed after the values were recorded.
    """

    claim: Claim
    state: str
    findings: tuple[Finding, ...]
    why: str = ""
    p: float | None = None
    regime: str = ""
    is_changed: bool = False

    @property
    def state_text(self) -> str:
        """The state, with notes if the claim changed since its values were recorded, counts elsewhere or is a check."""
        changed = ", changed since" if self.is_changed else ""
        elsewhere = f" (counted in {self.claim.counted_in})" if self.claim.counted_in else ""
        return f"{self.state}{changed}{elsewhere}{' (a check)' if self.claim.is_check else ''}"

    @property
    def reason(self) -> str:
        """Where, and why, a claim is not shown; empty if it is."""
        if self.why:
            return self.why
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


def verdicts(
    item: Item, scale: str, measured: Mapping[str, Measured], settings: Sequence[str], seeds: Collection[int]
) -> tuple[list[Verdict], list[Verdict]]:
    """The verdicts of an item's regimes and of its claims at a scale; findings that lack one of `seeds` decide nothing.

    The level of each claim's test follows from Holm's correction over the tested claims that count.
    """
    regimes = {
        name: verdict(regime, measured, item, settings, seeds)
        for name, regime in item.regimes.items()
        if scale in (regime.scales or item.scales)
    }
    made = [claim for claim in item.claims if scale in (claim.scales or item.scales)]
    judged = [_in_regime(verdict(claim, measured, item, settings, seeds), regimes) for claim in made]
    tested = sorted((v.p, index) for index, v in enumerate(judged) if v.p is not None and v.claim.counts)
    corrected = 0.0
    for rank, (p, index) in enumerate(tested):
        corrected = max(corrected, min(1.0, p * (len(tested) - rank)))
        if corrected > LEVEL and judged[index].state in (SHOWN, CONTRADICTED):
            why = f"{judged[index].state} alone (p = {p:.2g}), but not after correction for {len(tested)} claims"
            judged[index] = replace(judged[index], state=NOT_SHOWN, why=why)
    return [*regimes.values()], judged


def _in_regime(judged: Verdict, regimes: Mapping[str, Verdict]) -> Verdict:
    """The verdict, or "regime not reached" or "not run" if that is the case for a regime that the claim needs."""
    needed = [regimes[name] for name in judged.claim.needs if name in regimes]
    if not needed or judged.state == NOT_RUN:
        return judged
    lacking = next((regime for regime in needed if regime.state != SHOWN), None)
    judged = replace(judged, regime=reached(lacking or needed[0]))
    if lacking is None:
        return judged
    if lacking.state == NOT_RUN:
        return replace(judged, state=NOT_RUN, why="its regime was not measured", p=None)
    return replace(judged, state=NOT_REACHED, why=f"{lacking.claim.text} {lacking.reason}".strip(), p=None)


def reached(regime: Verdict) -> str:
    """Whether a regime was reached, by the state of its check."""
    return {SHOWN: "reached", NOT_RUN: "not measured"}.get(regime.state, "not reached")


def verdict(
    claim: Claim, measured: Mapping[str, Measured], item: Item, settings: Sequence[str], seeds: Collection[int] = ()
) -> Verdict:
    """The state of a claim on its own: shown if it is shown everywhere, contradicted if it fails anywhere.

    Both tests have the same level: to contradict, one of n places needs a p-value n times smaller (Bonferroni). A claim
    that was run only in part is not shown, unless another part contradicts it; if no part was run, it is not run. A
    place where one of the `seeds` has no finite value decides nothing.
    """
    findings = [finding for check in claim.checks for finding in _findings(check, measured, item, settings)]
    findings = [_whole(finding, seeds) for finding in findings]
    states = {finding.state for finding in findings} or {NOT_RUN}
    if states == {NOT_RUN}:
        return Verdict(claim, NOT_RUN, tuple(findings))
    shown = max(finding.if_not for finding in findings)
    at_one_place = min(finding.if_so for finding in findings)
    contradicted = min(1.0, len(findings) * at_one_place)
    is_tested = any(f.interval is not None and f.interval.low != f.interval.high for f in findings)
    p = min(shown, contradicted) if is_tested else None
    why = ""
    if contradicted <= LEVEL:
        state = CONTRADICTED
    elif states == {SHOWN}:
        state = SHOWN
    else:
        state = NOT_SHOWN
        if CONTRADICTED in states:
            why = (
                f"contradicted at one place (p = {at_one_place:.2g}), but not after correction for "
                f"{len(findings)} places"
            )
        findings = [replace(f, state=NOT_SHOWN) if f.state == NOT_RUN else f for f in findings]
    return Verdict(claim, state, tuple(findings), why, p)


def _whole(finding: Finding, seeds: Collection[int]) -> Finding:
    """The finding, or one that decides nothing if a seed is missing: the failed seed might have changed the result."""
    interval = finding.interval
    if interval is None or not 0 < interval.seeds < len(seeds):
        return finding
    return Finding(finding.spot, NOT_SHOWN, interval, f"{interval.seeds} of {len(seeds)} seeds have a value")


def in_the_paper(claim: Claim, item: Item) -> str:
    """The claim's state for the published numbers, taken as exact; "not published" if there are none to judge it."""
    published = as_published(item)
    settings = list(dict.fromkeys(setting for quantity in published.values() for setting, _ in quantity.values))
    state = verdict(claim, published, item, settings).state
    return NOT_PUBLISHED if state == NOT_RUN else state


def as_published(item: Item) -> dict[str, Measured]:
    """The published numbers as exact values; unpublished ratios, differences and taus are computed from them."""
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
    """The mean difference of the pairs, with the interval of the paired t test; None without finite pairs."""
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
    other = at(measured, check.other) if isinstance(check, Comparison) else NOTHING
    for spot in _spots(check, quantity, other, settings):
        if isinstance(check, Comparison):
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
            yield _within(spot, interval, *bounds, is_strict=isinstance(check, Greater | Less))


def _bounds(check: Check, published: float | None) -> tuple[float, float] | None:
    """The smallest and the largest value for which a check holds; None if they depend on an unpublished number."""
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


def _spots(check: Check, quantity: Measured, other: Measured, settings: Sequence[str]) -> list[Spot]:
    """The spots of a check: all places with values in each of its settings; a setting without values is one spot.

    Places at which only the `other` operand has values are among them, so that a < b says what b > a says.
    """
    spots: list[Spot] = []
    for setting in _settings(check, quantity, settings):
        places = [place for of_setting, place in quantity.values if of_setting == setting]
        if any(places):
            places += [place for of_setting, place in other.values if place and of_setting in (setting, "")]
        if check.operand.place is None:
            places = [*check.places] or places
        spots += [(setting, place) for place in dict.fromkeys(places)] or [(setting, "")]
    return spots


def _settings(check: Check, quantity: Measured, settings: Sequence[str]) -> list[str]:
    """The settings of a check; only "" if the operand names a setting, or the quantity compares two settings."""
    is_fixed = check.operand.setting is not None or {setting for setting, _ in quantity.values} == {""}
    return [""] if is_fixed else [*(check.settings or settings)]


def _within(spot: Spot, interval: Interval, least: float, greatest: float, *, is_strict: bool) -> Finding:
    """Shown if the whole interval lies in the bounds, contradicted if none of it does.

    If `is_strict`, a difference of exactly 0 does not meet a one-sided bound at 0: the bound must be exceeded.
    """
    if interval.low is None or interval.high is None:
        return Finding(spot, NOT_SHOWN, interval, FEW_SEEDS)
    if is_strict and interval.low == interval.high == 0 and (least, greatest) in ((0, math.inf), (-math.inf, 0)):
        return Finding(spot, NOT_SHOWN, interval, "no difference")
    if interval.low == interval.high:  # a value without spread that only rounding keeps off a limit is on it
        least, greatest = (
            interval.mean if math.isclose(interval.mean, limit, rel_tol=ROUNDING) else limit
            for limit in (least, greatest)
        )
    below, above = (_tail(interval, distance) for distance in (least - interval.mean, interval.mean - greatest))
    if least <= interval.low and interval.high <= greatest:
        state, reason = SHOWN, ""
    elif interval.high < least or interval.low > greatest:
        state, reason = CONTRADICTED, ""
    else:
        state, reason = NOT_SHOWN, "the interval crosses the limit"
    return Finding(spot, state, interval, reason, if_not=max(below, above), if_so=min(1 - below, 1 - above))


def _tail(interval: Interval, distance: float) -> float:
    """Probability of a mean at most `distance` outside a limit (negative: inside) if the true mean is on it; t test."""
    assert interval.high is not None, "one or two seeds are not tested"
    half = interval.high - interval.mean
    if half == 0 or math.isinf(distance):
        return float(distance > 0)
    from scipy.special import stdtr, stdtrit  # imported here: it takes half a second, and lists of items do not need it

    degrees = interval.seeds - 1
    return float(stdtr(degrees, distance / half * stdtrit(degrees, 0.5 + CONFIDENCE / 2)))


def _monotone(check: Monotone, quantity: Measured, settings: Sequence[str]) -> Iterator[Finding]:
    """Tests each step of the order as a paired difference: over settings at a place, or over places in a setting."""
    by_settings = check.along == "settings"
    if by_settings:
        others = [*check.places] or [place for setting, place in quantity.values if setting in check.order]
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
                yield _within(spot, interval, *((0.0, math.inf) if rises else (-math.inf, 0.0)), is_strict=True)
