"""What is known of an item in a results folder: nothing is run or written."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from fedloom.experiments.analysis.ablation import load_ablation
from fedloom.experiments.analysis.tables import only
from fedloom.experiments.reproduce.claims import verdict
from fedloom.experiments.reproduce.measure import Runs, lacking, measured
from fedloom.experiments.reproduce.plan import AXIS, Asked, Part, parts_of
from fedloom.experiments.reproduce.records import Record, record_file, record_of, recorded_counts
from fedloom.experiments.reproduce.schema import Counted, Item, Scale
from fedloom.experiments.reproduce.settings import missing_data
from fedloom.experiments.reproduce.table import Outcome, rows_of
from fedloom.experiments.store.ablations import FOLDER, PLAN, read_ablation
from fedloom.experiments.store.trials import FINAL, counted, trial_states


def outcome_of(item: Item, asked: Asked, results: Path, *, recorded: bool = False) -> Outcome:
    """Measures an item from what its runs have left so far, and judges its claims.

    With `recorded`, the item's record stands for runs of which none is here; one of other runs is named as missing.
    What was counted is recorded, too, and not counted anew.
    """
    scale = asked.of(item.scales[asked.scale])
    parts = parts_of(item, asked) if item.needs_runs else []
    runs = [found for part in parts if (found := done_runs(part, results)) is not None]
    record = record_of(item, asked) if recorded and not runs else None
    is_old = recorded and not runs and record is None and record_file(item, asked.scale).exists()
    old = [f"{record_file(item, asked.scale)} does not count: it is of other runs"] if is_old else []
    planned = sum(part.num_runs for part in parts)
    if record is not None:
        parts = _not_in(record, parts)
    kept = {**recorded_counts(item, scale, asked)} if recorded else {}
    values = measured(item, scale, runs, kept if record is None else {**kept, **record.values})
    claims = [claim for claim in item.claims if asked.scale in claim.scales]
    return Outcome(
        item=item,
        scale=asked.scale,
        is_own=asked.is_own,
        rows=tuple(rows_of(item, scale, values)),
        verdicts=tuple(verdict(claim, values, item, [*scale.settings]) for claim in claims),
        missing=tuple(dict.fromkeys([*_lacks(item, scale, parts, results, asked.free), *old])),
        runs=(sum(len(found.places) for found in runs), planned),
        record=record,
    )


def done_runs(part: Part, results: Path) -> Runs | None:
    """The tables of a part's trials that are done; None if none is."""
    folder = results / FOLDER / part.ablation_id
    if not (folder / PLAN).exists():
        return None
    done = [s.trial for s in trial_states(results, read_ablation(folder)) if s.state in FINAL]
    if not done:
        return None
    _, tables = load_ablation(results, part.ablation_id)
    places = {trial.run_id: (str(trial.setting[AXIS]), trial.seed) for trial in done}
    return Runs(only(tables, [*places]), places)


def _not_in(record: Record, parts: list[Part]) -> list[Part]:
    """The parts that are not in a record; all of them if runs of its own ablations are not."""
    others = [part for part in parts if part.ablation_id not in record.ablations]
    own = sum(part.num_runs for part in parts if part.ablation_id in record.ablations)
    return parts if record.runs[0] < own else others


def _lacks(item: Item, scale: Scale, parts: Sequence[Part], results: Path, free: Sequence[str]) -> Iterator[str]:
    """What keeps an item from being measured: it cannot be run, its data is not there, or its runs are not done."""
    if item.missing:
        yield item.missing
        return
    yield from _missing(parts, results, free)
    yield from _not_countable(item, scale)


def _not_countable(item: Item, scale: Scale) -> Iterator[str]:
    """The data without which something of an item cannot be counted."""
    sources = [q.source for q in item.quantities.values() if isinstance(q.source, Counted)]
    found = (lacking(source, scale, setting) for source in sources for setting in scale.settings)
    return filter(None, found)


def _missing(parts: Sequence[Part], results: Path, free: Sequence[str]) -> Iterator[str]:
    """What the runs still lack: data, or trials."""
    for part in parts:
        folder = results / FOLDER / part.ablation_id
        if (folder / PLAN).exists():
            states = trial_states(results, read_ablation(folder))
            if any(state.state not in FINAL for state in states):
                yield f"{part.dataset}: {counted(states)} ({part.ablation_id})"
        elif lacking := missing_data(part.dataset, [*part.scale.overrides, *free]):
            yield lacking
        else:
            yield f"{part.dataset}: {part.num_runs} trials are not begun"
