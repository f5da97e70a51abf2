"""Overview of all items for a results folder: what each needs to run, and which of its claims are shown."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.experiments.report.content import Block
from fedloom.experiments.report.wording import ABSENT, si
from fedloom.experiments.reproduce.claims import NOT_RUN, STATES, Verdict, in_the_paper
from fedloom.experiments.reproduce.items import HOUR_S, ITEMS, PAPER, SCALES, SMALL, Item, read_counted
from fedloom.experiments.reproduce.outcome import Outcome, outcome_of
from fedloom.experiments.reproduce.plan import Asked, missing_data, parts_of
from fedloom.experiments.reproduce.records import record_of

WORK = ITEMS / "work.yaml"
"""File with the MACs of a run, per item, scale and setting, as `work_facts` counts them; a test keeps it up to date."""
CORE_MACS_PER_S: Mapping[str, float] = {"digits": 4e9}
"""Speed of one laptop core by data set. Measured on digits: 3e9 to 6e9, as its small networks keep no core busy."""
OTHER_CORE_MACS_PER_S = 3e10
"""Speed of one laptop core with the small presets on all other data sets."""
GPU_MACS_PER_S = 1e12
"""Assumed speed of one GPU with clients' small batches; not measured."""
COUNTED, NOT_HERE = "counted in seconds", "cannot be run"


@dataclass(frozen=True)
class Entry:
    """An item with its outcome at each scale at which it is run, or counted."""

    item: Item
    outcomes: Mapping[str, Outcome]

    def verdicts(self) -> list[tuple[Verdict | None, Verdict | None]]:
        """Each claim's verdicts at the paper scale and at the small scale; None where the claim is not made."""
        by_scale = {scale: {v.claim: v for v in outcome.verdicts} for scale, outcome in self.outcomes.items()}
        return [(by_scale.get(PAPER, {}).get(c), by_scale.get(SMALL, {}).get(c)) for c in self.item.claims]


def entries(
    results: Path,
    items: Sequence[Item],
    tell: Callable[[str], None] | None,
    *,
    counting: bool = True,
    recorded: bool = False,
) -> list[Entry]:
    """The items with the outcomes of their own runs in this folder; `tell`, if given, is called with the progress.

    Without `counting`, items that need no training have no outcome: counting all of them takes minutes the first time.
    With `recorded`, items without runs in this folder use their record.
    """
    board = []
    for item in items:
        scales = item.scales if item.needs_runs or counting else ()
        if scales and tell is not None:
            tell(f"looking at {item.name}")
        outcomes = {scale: outcome_of(item, Asked(scale), results, recorded=recorded) for scale in scales}
        board.append(Entry(item, outcomes))
    return board


# -- what an item needs -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Need:
    """What an item needs at a scale: the work of all its runs in MACs (None: not counted), data sets, missing data.

    `recorded_hours` is what these runs took; None if its record has others, too.
    """

    macs: float | None
    datasets: tuple[str, ...]
    missing: tuple[str, ...]
    recorded_hours: float | None = None

    @property
    def core_hours(self) -> float | None:
        """Hours on one core, at the speed of the slowest of its data sets."""
        per_s = min((CORE_MACS_PER_S.get(name, OTHER_CORE_MACS_PER_S) for name in self.datasets), default=1.0)
        return None if self.macs is None else self.macs / per_s / HOUR_S

    @property
    def gpu_hours(self) -> float | None:
        """Hours on one GPU, at `GPU_MACS_PER_S`."""
        return None if self.macs is None else self.macs / GPU_MACS_PER_S / HOUR_S


UNKNOWN = Need(None, (), ())


def need_of(item: Item, scale: str) -> Need:
    """What an item needs at a scale."""
    if not item.needs_runs:
        return Need(None if item.missing else 0.0, (), ())
    parts = [part for part in parts_of(item, Asked(scale)) if part.needed]
    datasets = tuple(dict.fromkeys(part.dataset for part in parts))
    lacking = dict.fromkeys(missing_data(part.dataset, part.scale.overrides) for part in parts)
    runs_of = [(item.scales[scale].run_by[setting], setting) for part in parts for setting in part.needed]
    work = [read_counted(WORK).get(name, {}).get(scale, {}).get(setting, math.nan) for name, setting in runs_of]
    macs = len(item.scales[scale].seeds) * math.fsum(work)
    try:
        record = record_of(item, Asked(scale))
    except ValueError:  # a damaged record is reported where records are requested
        record = None
    return Need(
        macs=None if math.isnan(macs) else macs,
        datasets=datasets,
        missing=tuple(filter(None, lacking)),
        recorded_hours=record.hours if record is not None and record.runs[0] == record.runs[1] else None,
    )


def list_block(board: Sequence[Entry]) -> Block:
    """A row per item: what it needs at both scales, and the states of its claims."""
    rows = []
    for entry in board:
        item = entry.item
        needs = {scale: need_of(item, scale) for scale in item.scales}
        paper, small = needs.get(PAPER, UNKNOWN), needs.get(SMALL, UNKNOWN)
        datasets = dict.fromkeys(name for need in needs.values() for name in need.datasets)
        missing = {
            name for name in datasets if any(t.startswith(f"{name} not") for n in needs.values() for t in n.missing)
        }
        data = ", ".join(f"{name} (missing)" if name in missing else name for name in datasets) or ABSENT
        hours = (
            _hours(small.core_hours) + (f" (took {_hours(small.recorded_hours)})" if small.recorded_hours else ""),
            _hours(paper.core_hours),
            _hours(paper.gpu_hours),
        )
        others = [name for name in item.runs_of if name != item.name]
        shared = f"with {' and '.join(others)}" if others else ""
        rows.append((item.name, item.title, data, state_of(entry, PAPER), state_of(entry, SMALL), *hours, shared))
    heads = ("item", "title", "data", "paper scale", "small scale", "small core h", "paper core h", "paper GPU h", "")
    text = (
        f"Hours: the work of all runs that it needs, counted without training, at {si(OTHER_CORE_MACS_PER_S)}MAC/s "
        f"per core, with digits {si(CORE_MACS_PER_S['digits'])}MAC/s (measured on the small presets), and "
        f"{si(GPU_MACS_PER_S)}MAC/s per GPU (assumed). Took: recorded runs, one after the other. Counted items need "
        "seconds, no data.",
    )
    return Block("Tables and figures of the papers", text, heads, tuple(rows), labels=5)


def _hours(value: float | None) -> str:
    if value is None:
        return ABSENT
    return "0" if value == 0 else f"{value:.1g}" if value < 1 else f"{value:,.0f}"


def state_of(entry: Entry, scale: str) -> str:
    """The number of an item's claims in each state at a scale, and how many of its runs are done or recorded."""
    outcome = entry.outcomes.get(scale)
    if entry.item.missing:
        return NOT_HERE if scale in entry.item.scales else ABSENT
    if outcome is None:
        return COUNTED if scale in entry.item.scales else ABSENT
    done, planned = outcome.runs
    record = "" if outcome.record is None else f" ({outcome.record.in_short})"
    runs = f" ({done} of {planned} runs)" if 0 < done < planned else record
    return (counted_states(outcome.verdicts) or "no claim") + runs


def counted_states(verdicts: Iterable[Verdict]) -> str:
    """The number of claims per state, best state first; checks and claims counted in another item are left out."""
    counts = Counter(verdict.state for verdict in verdicts if verdict.claim.counts)
    if set(counts) == {NOT_RUN}:
        return NOT_RUN
    return ", ".join(f"{counts[state]} {state}" for state in reversed(STATES) if counts[state])


# -- the claims -------------------------------------------------------------------------------------------------------


def papers(board: Sequence[Entry]) -> list[str]:
    """The papers, in the order of the items."""
    return list(dict.fromkeys(entry.item.name.partition("/")[0] for entry in board))


def summary_block(board: Sequence[Entry]) -> Block:
    """A row per paper: the number of claims in each state at both scales."""
    rows = []
    for paper in papers(board):
        of_paper = [entry for entry in board if entry.item.name.startswith(f"{paper}/")]
        verdicts = [[v for e in of_paper if s in e.outcomes for v in e.outcomes[s].verdicts] for s in SCALES]
        states = [counted_states(of_scale) or ABSENT for of_scale in verdicts]
        rows.append(
            (paper, str(len(of_paper)), str(sum(claim.counts for e in of_paper for claim in e.item.claims)), *states)
        )
    recorded = [
        f"{entry.item.name} ({scale} scale{outcome.record.in_short.removeprefix('recorded')})"
        for entry in board
        for scale, outcome in entry.outcomes.items()
        if outcome.record is not None
    ]
    text = (
        "A claim is shown if the 95 % interval over seeds says so everywhere it is made, contradicted if the opposite "
        "is as certain anywhere (Bonferroni's correction over the places, Holm's over the claims of an item). Where "
        "its regime was not reached, it is neither. What is counted without training has no interval and stands under "
        "the paper's scale. Checks of the runs, and what another item compares as well, are not counted.",
        *([f"Recorded, not run here: {', '.join(recorded)}."] if recorded else []),
    )
    heads = ("paper", "items", "claims", "paper scale", "small scale")
    return Block("Scoreboard", text, heads, tuple(rows), labels=5)


def claims_block(board: Sequence[Entry], paper: str) -> Block:
    """A row per claim of a paper, with its state at both scales and for the published numbers."""
    rows = [
        (
            entry.item.name,
            claim.text,
            *map(_state, pair),
            _at_scales(pair, lambda verdict: verdict.regime) or ABSENT,
            in_the_paper(claim, entry.item),
            entry.item.missing or _why(pair),
        )
        for entry in board
        if entry.item.name.startswith(f"{paper}/")
        for claim, pair in zip(entry.item.claims, entry.verdicts(), strict=True)
    ]
    heads = ("item", "claim", "paper scale", "small scale", "regime", "in the paper", "where and why")
    return Block(f"Claims of {paper}", (), heads, tuple(rows), labels=7)


def _state(verdict: Verdict | None) -> str:
    return ABSENT if verdict is None else verdict.state_text


def _why(pair: Sequence[Verdict | None]) -> str:
    """The reasons at both scales; a claim that was not run needs none."""
    return _at_scales(pair, lambda verdict: "" if verdict.state == NOT_RUN else verdict.reason)


def _at_scales(pair: Sequence[Verdict | None], of_verdict: Callable[[Verdict], str]) -> str:
    """A text of a claim's verdicts, each behind the name of its scale if the texts differ."""
    known = {
        scale: text
        for scale, verdict in zip(SCALES, pair, strict=True)
        if verdict is not None and (text := of_verdict(verdict))
    }
    texts = [*dict.fromkeys(known.values())]
    return texts[0] if len(texts) == 1 else "; ".join(f"{scale} scale: {text}" for scale, text in known.items())


def missing_sentences(board: Sequence[Entry]) -> list[str]:
    """A sentence per missing data set: where its files belong, and which items need it."""
    items: dict[str, list[str]] = {}
    for entry in board:
        for scale in entry.item.scales:
            for text in need_of(entry.item, scale).missing:
                items.setdefault(text, []).append(entry.item.name)
    return [f"{text} (for {', '.join(dict.fromkeys(names))})" for text, names in items.items()]


def board_json(board: Sequence[Entry]) -> dict[str, Any]:
    """All items, needs and verdicts, for `--json`."""
    return {"items": [_entry_json(entry) for entry in board], "missing": missing_sentences(board)}


def _entry_json(entry: Entry) -> dict[str, Any]:
    item = entry.item
    needs = {scale: need_of(item, scale) for scale in item.scales}
    return {
        "item": item.name,
        "title": item.title,
        "source": item.source,
        "runs_of": [*item.runs_of],
        "needs": {
            scale: {"macs": n.macs, "core_hours": n.core_hours, "gpu_hours": n.gpu_hours, "data": n.datasets,
                    "missing": n.missing, "recorded_hours": n.recorded_hours}
            for scale, n in needs.items()
        },
        "recorded": {s: o.record.text if o.record else None for s, o in entry.outcomes.items()},
        "claims": [
            {"claim": claim.text, **{scale: _state(v) for scale, v in zip(SCALES, pair, strict=True)},
             "in_the_paper": in_the_paper(claim, item), "why": item.missing or _why(pair)}
            for claim, pair in zip(item.claims, entry.verdicts(), strict=True)
        ],
    }  # fmt: skip
