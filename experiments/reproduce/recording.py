"""Keeps what an item's runs in a results folder have measured as a record beside the item."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from fedloom.experiments.analysis.tables import load_paths
from fedloom.experiments.reproduce.measure import Measured, Runs, Values, measured
from fedloom.experiments.reproduce.outcome import done_runs
from fedloom.experiments.reproduce.plan import Asked, Part, parts_of
from fedloom.experiments.reproduce.records import (
    Record,
    computed,
    other_than,
    reads,
    record_file,
    record_of,
    recorded_scale,
)
from fedloom.experiments.reproduce.schema import HOUR_S, Item, Read
from fedloom.experiments.store.ablations import FOLDER as ABLATIONS, read_ablation
from fedloom.platform.results.files import check_writable, write_atomically

DIGITS = 6


def check_recordable(item: Item, asked: Asked) -> None:
    """Raises ValueError for an item without runs, for runs that the command line changed, and for a place of no use."""
    if item.missing or not item.needs_runs:
        raise ValueError(f"{item.name}: {item.missing or 'what is counted without training is not recorded'}")
    if not asked.is_own:
        raise ValueError(f"{item.name}: runs that the command line changes are not recorded")
    record_of(item, asked)  # a damaged one is found before hours of training
    check_writable(item.file.parent, "the item's folder")


def record(item: Item, asked: Asked, results: Path) -> Path:
    """Keeps what the item's own runs in this folder have measured, beside the item; returns the file.

    Runs that are not done are left out, and counted. Values of other ablations of the item, recorded before, stay.
    Raises ValueError if no run is done, for runs of presets as they were before, and for fewer runs than the record has
    that is there.
    """
    check_recordable(item, asked)
    parts = parts_of(item, asked)
    begun = {part.ablation_id: done for part in parts if (done := done_runs(part, results)) is not None}
    runs = sum(len(done.places) for done in begun.values())
    if not runs:
        raise ValueError(f"{item.name}: none of its runs is done: there is nothing to record")
    for part in parts:
        if part.ablation_id in begun:
            _check_presets(part, begun[part.ablation_id], results)
    file, known = record_file(item, asked.scale), record_of(item, asked)
    others = known if known is not None and not {*known.ablations} & {*begun} else None
    if known is not None and others is None and (known.runs[0] > runs or not {*known.ablations} <= {*begun}):
        raise ValueError(f"{file} has {known.runs[0]} runs, here are {runs}: delete it if these shall replace them")
    scale = item.scales[asked.scale]
    # Without the rounds of supernets that other runs have trained, which the tables of `done_runs` repeat.
    rounds = load_paths([p for done in begun.values() for p in done.tables.paths], ["rounds"]).rounds
    hours = float(rounds["wall_s"].sum()) / HOUR_S + (others.hours if others is not None else 0.0)
    ablations = (*(others.ablations if others is not None else ()), *begun)
    values = _of_runs(item, measured(item, scale, begun.values()), others)
    earlier = {} if others is None else others.earlier
    found = Record(
        ablations=ablations,
        runs=(runs + (others.runs[0] if others is not None else 0), sum(part.num_runs for part in parts)),
        computed=computed(recorded_scale(item, asked, ablations, earlier)),
        reads=reads(item, values),
        day=datetime.now(tz=UTC).strftime("%Y-%m-%d"),
        hours=float(f"{hours:.3g}"),
        values=values,
        earlier=earlier,
    )
    _write(file, found)
    return file


def _check_presets(part: Part, done: Runs, results: Path) -> None:
    """Raises ValueError for runs that were of other presets than today's, whose values would be taken for theirs."""
    trials = read_ablation(results / ABLATIONS / part.ablation_id).trials
    configs = {done.places[trial.run_id][0]: trial.config for trial in trials if trial.run_id in done.places}
    for setting, config in configs.items():
        if changed := other_than(config, part.scale, setting):
            raise ValueError(
                f"the runs in {results} differ from what {part.scale.experiment} ({setting}) is now in {changed}: "
                "run the item in another results folder, and record that"
            )


def _of_runs(item: Item, found: Mapping[str, Measured], others: Record | None) -> dict[str, Values]:
    """What was read from runs, with what another record has; quantities without any value are left out.

    What is counted or combined is not kept, as it takes seconds.
    """
    before = {} if others is None else others.values
    names = [name for name, quantity in item.quantities.items() if isinstance(quantity.source, Read)]
    values = {name: {**before.get(name, {}), **found[name].values} for name in names}
    return {name: by_spot for name, by_spot in values.items() if by_spot}


def _write(file: Path, found: Record) -> None:
    content = {**vars(found), "values": {name: _by_setting(values) for name, values in found.values.items()}}
    file.parent.mkdir(exist_ok=True)
    write_atomically(file, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())


def _by_setting(values: Values) -> dict[str, dict[str, dict[str, float]]]:
    found: dict[str, dict[str, dict[str, float]]] = {}
    for (setting, place), seeds in values.items():
        found.setdefault(setting, {})[place] = {str(s): float(f"{v:.{DIGITS}g}") for s, v in sorted(seeds.items())}
    return found
