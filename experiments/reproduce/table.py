"""The table of an item: published, measured and their difference; and the states of its claims."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fedloom.experiments.report.content import Block
from fedloom.experiments.report.wording import ABSENT
from fedloom.experiments.reproduce.claims import Interval, Verdict, in_the_paper, interval_at, spot_name
from fedloom.experiments.reproduce.measure import NOTHING, Measured
from fedloom.experiments.reproduce.records import Record
from fedloom.experiments.reproduce.schema import PAPER, Item, Published, Quantity, Scale, Spot


@dataclass(frozen=True)
class Row:
    """A quantity at one spot."""

    quantity: str
    unit: str
    spot: Spot
    published: Published | None
    measured: Interval | None
    is_measurable: bool = True

    @property
    def difference(self) -> float | None:
        """Measured less published, if both are known."""
        return None if self.published is None or self.measured is None else self.measured.mean - self.published.value


@dataclass(frozen=True)
class Outcome:
    """What is known of an item at a scale: rows, verdicts, and what its runs still lack.

    Attributes:
        is_own: whether the runs are the item's own, and not changed by the command line.
        missing: sentences about data that is not there and runs that are not done.
        runs: how many of its runs are done, and how many there are.
        record: what the values were kept in; None if they are from runs in the results folder.
    """

    item: Item
    scale: str
    is_own: bool
    rows: tuple[Row, ...]
    verdicts: tuple[Verdict, ...]
    missing: tuple[str, ...] = ()
    runs: tuple[int, int] = (0, 0)
    record: Record | None = None


def rows_of(item: Item, scale: Scale, measured: Mapping[str, Measured]) -> Iterator[Row]:
    """The quantities at all spots at which they are published or measured, in the order of the file."""
    for quantity in item.quantities.values():
        own = measured.get(quantity.name, NOTHING)
        for spot in _spots(quantity, scale, own):
            known = quantity.published.get(spot), interval_at(own, spot)
            yield Row(quantity.name, quantity.unit, spot, *known, is_measurable=quantity.source is not None)


def _spots(quantity: Quantity, scale: Scale, own: Measured) -> list[Spot]:
    """The spots by setting, those of the scale first, then those that are only published; places as they come."""
    both = dict.fromkeys([*quantity.published, *own.values])
    settings = [*scale.settings, *(setting for setting, _ in both if setting not in scale.settings)]
    places = [*dict.fromkeys(place for _, place in both)]
    return sorted(both, key=lambda spot: (settings.index(spot[0]), places.index(spot[1])))


def blocks(outcome: Outcome) -> list[Block]:
    """The numbers and the claims as tables."""
    return [*number_blocks(outcome), _claims_block(outcome)]


def number_blocks(outcome: Outcome) -> Iterator[Block]:
    """A table per set of places, with these as columns; three lines per quantity and setting."""
    by_places: dict[tuple[str, ...], list[list[Row]]] = {}
    for rows in _lines(outcome):
        by_places.setdefault(tuple(row.spot[1] for row in rows), []).append(rows)
    texts: tuple[str, ...] = about(outcome)
    for places, groups in by_places.items():
        heads = ("quantity", "setting", "", *(place or "value" for place in places))
        lines = tuple(line for rows in groups for line in _cells(rows, outcome))
        yield Block(f"{outcome.item.name}: {outcome.item.title}", texts, heads, lines, labels=3)
        texts = ()


def about(outcome: Outcome) -> tuple[str, ...]:
    """Where the numbers are from."""
    item, scale = outcome.item, outcome.item.scales[outcome.scale]
    if item.missing:
        return tuple(filter(None, (f"{item.source}. Published numbers alone: it cannot be run here.", item.note)))
    changed = "" if outcome.is_own else ", changed by the command line"
    intervals = "mean ± 95 % interval over seeds; sd: the paper's standard deviation" if item.needs_runs else "counted"
    intervals += f"; values {outcome.record.text}" if outcome.record else ""
    first = f"{item.source}. Scale: {outcome.scale} ({scale.experiment}{changed}). Measured: {intervals}."
    return (first, item.note) if item.note else (first,)


def _lines(outcome: Outcome) -> list[list[Row]]:
    """The rows of each quantity and setting; those that only the paper has are left out at another scale.

    The setting of a quantity that compares two given settings is "".
    """
    lines: dict[tuple[str, str], list[Row]] = {}
    for row in outcome.rows:
        lines.setdefault((row.quantity, row.spot[0]), []).append(row)
    settings = outcome.item.scales[outcome.scale].settings
    return [rows for (_, setting), rows in lines.items() if outcome.scale == PAPER or setting in (*settings, "")]


def _cells(rows: Sequence[Row], outcome: Outcome) -> Iterator[tuple[str, ...]]:
    """The lines of a quantity in a setting: published, measured, difference, as far as there are numbers.

    Levels of another scale, with other data and fewer rounds, have no difference from the published ones.
    """
    name = f"{rows[0].quantity} ({rows[0].unit})" if rows[0].unit else rows[0].quantity
    kinds = [
        ("published", [published_text(row.published) for row in rows]),
        ("measured", [interval_text(row.measured) for row in rows]),
        ("difference", [_difference(row.difference) for row in rows] if outcome.scale == PAPER else []),
    ]
    for kind, texts in kinds:
        if any(text != ABSENT for text in texts) or (kind == "measured" and rows[0].is_measurable):
            yield (name, rows[0].spot[0], kind, *texts)
            name = ""


def _claims_block(outcome: Outcome) -> Block:
    heads = ("claim", "state", "in the paper", "where and why")
    rows = tuple(claim_cells(outcome.item, found) for found in outcome.verdicts)
    return Block("Claims", (), heads, rows, labels=4)


def claim_cells(item: Item, found: Verdict) -> tuple[str, ...]:
    """A claim as text, with its state for the published numbers."""
    return (found.claim.text, found.state, in_the_paper(found.claim, item), item.missing or found.reason)


def published_text(number: Published | None) -> str:
    """A published number as the paper gives it."""
    if number is None:
        return ABSENT
    return _text(number.value) if number.std is None else f"{_text(number.value)} (sd {_text(number.std)})"


def interval_text(interval: Interval | None) -> str:
    """A mean with its interval; a number alone if it was counted, or comes from fewer than three seeds."""
    if interval is None:
        return ABSENT
    if interval.low is None or interval.high is None:
        return f"{_text(interval.mean)} ({'one seed' if interval.seeds == 1 else 'two seeds'})"
    half = (interval.high - interval.low) / 2
    return (
        f"{_text(interval.mean)} ± {_text(half)}" if half else _text(interval.mean)
    )  # costs are the same in all seeds


def _difference(value: float | None) -> str:
    return ABSENT if value is None else f"{'+' if value > 0 else ''}{_text(value)}"


def _text(value: float) -> str:
    """Four significant digits, without an exponent where numbers are of everyday size."""
    if value and not 1e-3 <= abs(value) < 1e9:
        return f"{value:.3e}"
    digits = max(0, 3 - len(str(int(abs(value)))) + (1 if abs(value) >= 1 else 2))
    return f"{value:,.{min(digits, 4)}f}"


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """All numbers and verdicts, for `--json`."""
    return {
        "item": outcome.item.name,
        "title": outcome.item.title,
        "source": outcome.item.source,
        "scale": outcome.scale,
        "changed": not outcome.is_own,
        "recorded": outcome.record.text if outcome.record else None,
        "rows": [_row_as_json(row) for row in outcome.rows],
        "claims": [_claim_as_json(outcome.item, verdict) for verdict in outcome.verdicts],
        "missing": [*outcome.missing],
        "runs": {"done": outcome.runs[0], "planned": outcome.runs[1]},
    }


def _row_as_json(row: Row) -> dict[str, Any]:
    return {
        "quantity": row.quantity,
        "unit": row.unit,
        "setting": row.spot[0],
        "place": row.spot[1],
        "published": None if row.published is None else asdict(row.published),
        "measured": None if row.measured is None else asdict(row.measured),
        "difference": row.difference,
    }


def _claim_as_json(item: Item, verdict: Verdict) -> dict[str, Any]:
    findings = [
        {"where": spot_name(f.spot), "state": f.state, "reason": f.reason,
         "interval": None if f.interval is None else asdict(f.interval)}
        for f in verdict.findings
    ]  # fmt: skip
    paper = in_the_paper(verdict.claim, item)
    words = {"claim": verdict.claim.text, "state": verdict.state, "reason": verdict.reason, "in_the_paper": paper}
    return {**words, "findings": findings}
