"""The outcome of an item in a results folder, as tables of published and measured numbers, differences and claims.

Nothing is run or written.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedloom.experiments.report.content import Block
from fedloom.experiments.report.wording import ABSENT, ROUNDING
from fedloom.experiments.reproduce.claims import (
    Interval,
    Verdict,
    in_the_paper,
    interval_at,
    reached,
    spot_name,
    verdicts,
)
from fedloom.experiments.reproduce.items import PAPER, Counted, Item, Published, Read, Scale, Spot
from fedloom.experiments.reproduce.measure import NOTHING, Measured, done_runs, lacking, measured
from fedloom.experiments.reproduce.plan import Asked, Part, missing_data, parts_of
from fedloom.experiments.reproduce.records import (
    Record,
    Repeated,
    claim_hash,
    record_file,
    record_of,
    recorded_counts,
    repeated,
)
from fedloom.experiments.store.ablations import FOLDER, PLAN, read_ablation
from fedloom.experiments.store.trials import FINAL, counted, trial_states


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
        """Measured minus published; None unless both are known."""
        return None if self.published is None or self.measured is None else self.measured.mean - self.published.value


@dataclass(frozen=True)
class Outcome:
    """The outcome of an item at a scale: its numbers, its verdicts, and what is still missing.

    Attributes:
        is_own: whether the runs are the item's own, and not changed by the command line.
        missing: sentences about data that is not there and runs that are not done.
        runs: how many of its runs are done, and how many there are.
        record: the record that the values are from; None if they are from runs in the results folder.
        regimes: verdicts that say whether the regimes that claims need were reached.
        repeated: how values measured by runs here compare with the record; None if there is nothing to compare.
    """

    item: Item
    scale: str
    is_own: bool
    rows: tuple[Row, ...]
    verdicts: tuple[Verdict, ...]
    missing: tuple[str, ...] = ()
    runs: tuple[int, int] = (0, 0)
    record: Record | None = None
    regimes: tuple[Verdict, ...] = ()
    repeated: Repeated | None = None


def outcome_of(item: Item, asked: Asked, results: Path, *, recorded: bool = False) -> Outcome:
    """Measures an item from its runs that are finished so far, and judges its claims.

    With `recorded`, an item without runs here uses its record; a record that is not valid is reported under `missing`.
    Recorded counts are then used, too, instead of counting again.
    """
    scale = asked.of(item.scales[asked.scale])
    parts = parts_of(item, asked) if item.needs_runs else []
    runs = [done for part in parts if (done := done_runs(part, results)) is not None]
    record, file = record_of(item, asked) if recorded and not runs else None, record_file(item, asked.scale)
    is_old = recorded and not runs and record is None and file.exists()
    old = [f"{file} is not used: it records other runs, or reads them in another way"] if is_old else []
    planned = sum(part.num_runs for part in parts)
    if record is not None:
        # If the record lacks runs of its own ablations, all parts still have to be run.
        recorded_parts = [part for part in parts if part.ablation_id in record.ablations]
        if record.runs[0] >= sum(part.num_runs for part in recorded_parts):
            parts = [part for part in parts if part.ablation_id not in record.ablations]
    known = recorded_counts(item, scale, asked) if recorded else {}
    values = measured(item, scale, runs, known if record is None else {**known, **record.values})
    num_done = sum(len(each.places) for each in runs)
    read = [name for name, quantity in item.quantities.items() if isinstance(quantity.source, Read)]
    all_done = runs and num_done == planned
    # Otherwise a wrong word in an item would look like runs that are not done yet.
    empty = [f"{name}: no run has a value of it" for name in read if all_done and not values[name].values]
    regimes, judged = verdicts(item, asked.scale, values, [*scale.settings], scale.seeds)
    if record is not None and record.claims is not None:
        judged = [replace(v, is_changed=claim_hash(v.claim, item) not in record.claims) for v in judged]
    return Outcome(
        item=item,
        scale=asked.scale,
        is_own=asked.is_own,
        rows=tuple(_rows(item, scale, values)),
        verdicts=tuple(judged),
        missing=tuple(dict.fromkeys([*_lacks(item, scale, parts, results, asked.free), *old, *empty])),
        runs=(num_done, planned),
        record=record,
        regimes=tuple(regimes),
        repeated=repeated(item, asked, values) if runs else None,
    )


def _rows(item: Item, scale: Scale, measured: Mapping[str, Measured]) -> Iterator[Row]:
    """The quantities at all spots at which they are published or measured, the scale's settings first."""
    for name, quantity in item.quantities.items():
        values = measured.get(name, NOTHING)
        spots = dict.fromkeys([*quantity.published, *values.values])
        settings = [*scale.settings, *(setting for setting, _ in spots if setting not in scale.settings)]
        places = [*dict.fromkeys(place for _, place in spots)]
        for spot in sorted(spots, key=lambda spot: (settings.index(spot[0]), places.index(spot[1]))):
            numbers = quantity.published.get(spot), interval_at(values, spot)
            yield Row(name, quantity.unit, spot, *numbers, is_measurable=quantity.source is not None)


def _lacks(item: Item, scale: Scale, parts: Sequence[Part], results: Path, free: Sequence[str]) -> Iterator[str]:
    """What keeps an item from being measured: it cannot be run, its data is not there, or its runs are not done."""
    if item.missing:
        yield item.missing
        return
    for part in (part for part in parts if part.needed):
        folder = results / FOLDER / part.ablation_id
        if (folder / PLAN).exists():
            states = [s for s in trial_states(results, read_ablation(folder)) if part.needs(s.trial)]
            if any(state.state not in FINAL for state in states):
                yield f"{part.dataset}: {counted(states)} ({part.ablation_id})"
        elif no_data := missing_data(part.dataset, [*part.scale.overrides, *free]):
            yield no_data
        else:
            yield f"{part.dataset}: {part.num_runs} trials are not begun"
    for quantity in item.quantities.values():
        if isinstance(quantity.source, Counted):
            yield from filter(None, (lacking(quantity.source, scale, setting) for setting in scale.settings))


# -- tables -----------------------------------------------------------------------------------------------------------


def blocks(outcome: Outcome) -> list[Block]:
    """The numbers and the claims as tables."""
    cells = [
        (
            judged.claim.text,
            judged.state_text,
            in_the_paper(judged.claim, outcome.item),
            outcome.item.missing or judged.reason,
        )
        for judged in outcome.verdicts
    ]
    heads = ("claim", "state", "in the paper", "where and why")
    rows = [(v.claim.text, reached(v), v.reason) for v in outcome.regimes]
    regimes = [Block("Regimes that claims need", (), ("regime", "state", "where and why"), tuple(rows), labels=3)]
    return [*number_blocks(outcome), *(regimes if rows else ()), Block("Claims", (), heads, tuple(cells), labels=4)]


def number_blocks(outcome: Outcome) -> Iterator[Block]:
    """A table per set of places, which are its columns; up to three lines per quantity and setting."""
    lines: dict[tuple[str, str], list[Row]] = {}
    for row in outcome.rows:
        lines.setdefault((row.quantity, row.spot[0]), []).append(row)
    settings = outcome.item.scales[outcome.scale].settings
    by_places: dict[tuple[str, ...], list[list[Row]]] = {}
    for (_, setting), rows in lines.items():
        # Settings that only the paper has are left out at the small scale; "" is for quantities over two settings.
        if outcome.scale == PAPER or setting in (*settings, ""):
            by_places.setdefault(tuple(row.spot[1] for row in rows), []).append(rows)
    texts: tuple[str, ...] = _about(outcome)
    for places, groups in by_places.items():
        heads = ("quantity", "setting", "", *(place or "value" for place in places))
        cells = tuple(line for rows in groups for line in _cells(rows, outcome))
        yield Block(f"{outcome.item.name}: {outcome.item.title}", texts, heads, cells, labels=3)
        texts = ()


def _about(outcome: Outcome) -> tuple[str, ...]:
    """Where the numbers come from, as the text of a table."""
    item, scale = outcome.item, outcome.item.scales[outcome.scale]
    if item.missing:
        return tuple(filter(None, (f"{item.source}. Published numbers alone: it cannot be run here.", item.note)))
    changed = "" if outcome.is_own else ", changed by the command line"
    intervals = "mean ± 95 % interval over seeds; sd: the paper's standard deviation" if item.needs_runs else "counted"
    intervals += f"; values {outcome.record.text}" if outcome.record else ""
    first = f"{item.source}. Scale: {outcome.scale} ({scale.experiment}{changed}). Measured: {intervals}."
    again = "" if outcome.repeated is None else outcome.repeated.text
    return tuple(filter(None, (first, again, item.note)))


def _cells(rows: Sequence[Row], outcome: Outcome) -> Iterator[tuple[str, ...]]:
    """The lines of a quantity in a setting: published, measured and difference, where there are numbers.

    The difference is shown at the paper scale only: another scale has other data and fewer rounds.
    """
    name = f"{rows[0].quantity} ({rows[0].unit})" if rows[0].unit else rows[0].quantity
    kinds = [
        ("published", [_published_text(row.published) for row in rows]),
        ("measured", [_interval_text(row.measured) for row in rows]),
        ("difference", [_difference(row.difference) for row in rows] if outcome.scale == PAPER else []),
    ]
    for kind, texts in kinds:
        if any(text != ABSENT for text in texts) or (kind == "measured" and rows[0].is_measurable):
            yield (name, rows[0].spot[0], kind, *texts)
            name = ""


def _published_text(number: Published | None) -> str:
    """A published number as the paper gives it."""
    if number is None:
        return ABSENT
    return _text(number.value) if number.std is None else f"{_text(number.value)} (sd {_text(number.std)})"


def _interval_text(interval: Interval | None) -> str:
    """A mean with its interval, or without if all seeds are equal or there are fewer than three."""
    if interval is None:
        return ABSENT
    if interval.low is None or interval.high is None:
        return f"{_text(interval.mean)} ({'one seed' if interval.seeds == 1 else 'two seeds'})"
    half = (interval.high - interval.low) / 2
    is_equal = half <= ROUNDING * abs(interval.mean)  # costs: the same in all seeds
    return _text(interval.mean) if is_equal else f"{_text(interval.mean)} ± {_text(half)}"


def _difference(value: float | None) -> str:
    return ABSENT if value is None else f"{'+' if value > 0 else ''}{_text(value)}"


def _text(value: float) -> str:
    """Four significant digits, but at most four decimals; an exponent only below .001 and from a billion."""
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
        "repeated": None if outcome.repeated is None else asdict(outcome.repeated),
        "rows": [
            {
                "quantity": row.quantity,
                "unit": row.unit,
                "setting": row.spot[0],
                "place": row.spot[1],
                "published": None if row.published is None else asdict(row.published),
                "measured": None if row.measured is None else asdict(row.measured),
                "difference": row.difference,
            }
            for row in outcome.rows
        ],
        "claims": [
            {
                "claim": judged.claim.text,
                "state": judged.state,
                "reason": judged.reason,
                "regime": judged.regime or None,
                "p": judged.p,
                "changed_since": judged.is_changed,
                "in_the_paper": in_the_paper(judged.claim, outcome.item),
                "findings": [
                    {
                        "where": spot_name(finding.spot),
                        "state": finding.state,
                        "reason": finding.reason,
                        "interval": None if finding.interval is None else asdict(finding.interval),
                    }
                    for finding in judged.findings
                ],
            }
            for judged in outcome.verdicts
        ],
        "missing": [*outcome.missing],
        "runs": {"done": outcome.runs[0], "planned": outcome.runs[1]},
    }
