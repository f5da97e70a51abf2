"""Records of what an item's own runs measured, kept beside it to show its claims without hours of training.

A file per item and scale in the paper's folder `recorded`: JSON with values by quantity, setting, place and seed.
"""

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from fedloom.experiments.analysis.settings import estimate
from fedloom.experiments.analysis.tables import load_paths
from fedloom.experiments.reproduce.claims import NOT_RUN, verdict
from fedloom.experiments.reproduce.items import (
    HOUR_S,
    ITEMS,
    START_FROM,
    Band,
    Claim,
    Combined,
    Item,
    Read,
    Scale,
    load_item,
    read_counted,
)
from fedloom.experiments.reproduce.measure import Measured, Runs, Values, done_runs, measured
from fedloom.experiments.reproduce.plan import DEVICES, Asked, Part, parts_of
from fedloom.experiments.store.ablations import FOLDER as ABLATIONS, read_ablation
from fedloom.platform.results.files import check_writable, write_atomically

FOLDER = "recorded"
COUNTED = ITEMS / "counted.yaml"
"""File of what is counted without training, by item, scale, quantity, setting, place; a test keeps it up to date."""
LATER = (
    "label_sets",
    "balanced_classes",
    "idle_momentum",
    "one_per_round",
    "keep_momentum",
    "own_start",
    "processors",
    "local_warmup_steps",
    "local_cosine_to",
    "coupled",
    "compile",
    "availability_table",
    "availability_period_s",
    "jitter",
    "server_bytes_per_s",
)
"""Configuration keys that are newer than the first records, whose runs did not have them."""
LATER_WORDS = (
    *(("aggregator", "mean"), ("optimizer", "sgd"), ("optimizer_state", "fresh"), ("shards_per_client", 2)),
    ("availability_share", 0.35),
)
"""Further newer keys, each with the value that runs without the key used."""


@dataclass(frozen=True)
class Record:
    """Measured values of an item at a scale.

    Attributes:
        ablations: the ids of the ablations whose runs were measured.
        runs: how many runs are in it, and how many the item needs; more are in it if others were needed before.
        computed: a hash of what the runs of these ablations compute, with the presets' content.
        reads: a hash of how the quantities with values are read.
        claims: a hash of each claim that was made before values that judge it were recorded; None in records written
            before there were hashes.
        seeds: the seeds of the runs.
        code: the commits, versions and processors with which the runs were computed, as text.
        day: when it was recorded, as 2026-11-23.
        hours: total duration of all rounds that the runs computed themselves; of runs from another item's record, their
            part of its hours.
        values: the values, by quantity, spot and seed.
        earlier: by ablation, the keys, with values, in which its runs differ from the presets of today.
    """

    ablations: tuple[str, ...]
    runs: tuple[int, int]
    computed: str
    reads: str
    day: str
    hours: float
    values: Mapping[str, Values]
    earlier: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    claims: tuple[str, ...] | None = None
    seeds: tuple[int, ...] = ()
    code: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether it has all runs that the item needs."""
        return self.runs[0] >= self.runs[1]

    @property
    def text(self) -> str:
        """When it was recorded, from how many runs, presets and code, as a phrase."""
        done, planned = self.runs
        number = f"{done}" if self.is_whole else f"{done} of {planned}"
        keys = {f"{key}={value}": None for of_ablation in self.earlier.values() for key, value in of_ablation.items()}
        earlier = f", with earlier presets: {', '.join(keys)}" if keys else ""
        code = f"; {'; '.join(self.code)}" if self.code else ""
        return f"recorded on {self.day} from {number} runs, {self.hours:g} h in all{earlier}{code}"

    @property
    def in_short(self) -> str:
        """The word recorded, with the number of runs if some are missing, and a note if presets have changed."""
        number = "" if self.is_whole else f", {self.runs[0]} of {self.runs[1]} runs"
        return f"recorded{number}{', earlier presets' if self.earlier else ''}"


# -- reading ----------------------------------------------------------------------------------------------------------


def record_file(item: Item, scale: str) -> Path:
    """Where the record of an item belongs."""
    return item.file.parent / FOLDER / f"{item.file.stem}.{scale}.json"


def record_of(item: Item, asked: Asked) -> Record | None:
    """The record of the item's own runs; None if there is none, or if the item runs or reads something else now.

    Runs and quantities that the item has besides have no values in it. Whether presets differ from those of the record
    (except for keys in `earlier`) takes a while to check: a test does so for fedloom's own items, this function for
    all others. Raises ValueError for a damaged file.
    """
    file = record_file(item, asked.scale)
    if not asked.is_own or not file.exists():
        return None
    record = read_record(file)
    parts = parts_of(item, asked)
    is_same = record.reads == reads(item, record.values) and {*record.ablations} <= {part.ablation_id for part in parts}
    if is_same and not file.is_relative_to(ITEMS):
        is_same = record.computed == _computed_of(item, asked, record)
    planned = sum(part.num_runs for part in parts)
    return replace(record, runs=(record.runs[0], planned)) if is_same else None


def recorded_counts(item: Item, scale: Scale, asked: Asked) -> dict[str, Values]:
    """The recorded counts of one of fedloom's own items, as exact values under the first seed.

    Quantities that are counted differently now, or were added later, are left out.
    """
    if not asked.is_own or not item.file.is_relative_to(ITEMS):
        return {}
    counts = read_counted(COUNTED).get(item.name, {}).get(asked.scale, {})
    return {
        quantity: {
            (setting, place): {scale.seeds[0]: float(value)}
            for setting, places in settings.items()
            for place, value in places.items()
        }
        for quantity, entry in counts.items()
        if entry["of"] == counted_of(item, scale, quantity)
        for settings in [entry["values"]]
    }


def counted_of(item: Item, scale: Scale, quantity: str) -> str:
    """A hash of what is counted: the quantity's source and the overrides of every setting."""
    source = item.quantities[quantity].source if quantity in item.quantities else None
    content = repr([source, {setting: scale.overrides_of(setting) for setting in scale.settings}])
    return sha256(content.encode()).hexdigest()[:16]


def recorded_scale(
    item: Item, asked: Asked, ablations: Collection[str], earlier: Mapping[str, Mapping[str, Any]]
) -> Scale:
    """The scale with only the settings of these ablations, and with the earlier values of keys that presets changed."""
    parts = [part for part in parts_of(item, asked) if part.ablation_id in ablations]
    before = {setting: earlier.get(part.ablation_id, {}) for part in parts for setting in part.scale.settings}
    scale = item.scales[asked.scale].only([*before])
    overridden = {override.partition("=")[0] for override in scale.overrides}
    others = {setting: {k: v for k, v in keys.items() if k not in overridden} for setting, keys in before.items()}
    return replace(scale, settings={name: {**others[name], **keys} for name, keys in scale.settings.items()})


def read_record(file: Path) -> Record:
    """The record in a file; ValueError if the file is damaged."""
    try:
        known: dict[str, Any] = json.loads(file.read_bytes())
        values: dict[str, Values] = {
            quantity: {
                (setting, place): {int(seed): float(value) for seed, value in seeds.items()}
                for setting, places in settings.items()
                for place, seeds in places.items()
            }
            for quantity, settings in known.pop("values").items()
        }
        done, planned = map(int, known.pop("runs"))
        ablations = tuple(map(str, known.pop("ablations")))
        claims, code = known.pop("claims", None), tuple(map(str, known.pop("code", ())))
        seeds = tuple(map(int, known.pop("seeds", ())))
        if not ablations or not 0 < done <= planned:
            raise ValueError("it has no runs")
        hours, day = float(known.pop("hours")), str(known.pop("day"))
        return Record(
            ablations=ablations,
            runs=(done, planned),
            hours=hours,
            day=day,
            values=values,
            claims=None if claims is None else tuple(map(str, claims)),
            seeds=seeds,
            code=code,
            **known,
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ValueError(f"{file} is damaged: delete it, and record again ({error})") from error


def reads(item: Item, names: Collection[str]) -> str:
    """A hash of how these quantities are read from the item's runs."""
    sources = {
        name: repr(quantity.source)
        for name, quantity in item.quantities.items()
        if isinstance(quantity.source, Read) and name in names
    }
    return sha256(json.dumps(sources, sort_keys=True).encode()).hexdigest()[:16]


def claim_hash(claim: Claim, item: Item) -> str:
    """A hash of a claim: its words, its checks, the regimes that it needs, and what the quantities in them are.

    How quantities are read is in `Record.reads`; here it is how they are combined, and with what they are compared.
    """
    entries = [claim, *(item.regimes[name] for name in claim.needs)]
    content: list[Any] = [
        entry.model_dump(exclude={"counted_in", "is_check", "despite"}, exclude_defaults=True) for entry in entries
    ]
    checks = [check for entry in entries for check in entry.checks]
    content += [repr(item.quantities[name].source) for name in _combined_in(content, item)]
    if any(isinstance(check, Band) and check.target is None for check in checks):
        content += [repr(item.quantities[name].published) for name in sorted(_names_in(content, item))]
    return sha256(json.dumps(content).encode()).hexdigest()[:16]


def _names_in(content: Any, item: Item) -> set[str]:
    """The names of the item's quantities in nested JSON values."""
    if isinstance(content, str):
        return {content} & item.quantities.keys()
    inside = content.values() if isinstance(content, Mapping) else content if isinstance(content, list | tuple) else ()
    return {name for each in inside for name in _names_in(each, item)}


def _combined_in(content: Any, item: Item) -> list[str]:
    """The quantities in nested JSON values that are combined of others, and of these again, sorted."""
    found, names = set[str](), _names_in(content, item)
    while names:
        found |= names
        sources = [item.quantities[name].source for name in names]
        parts = {part.quantity for s in sources if isinstance(s, Combined) for part in (s.first, s.second)}
        names = parts - found
    return sorted(name for name in found if isinstance(item.quantities[name].source, Combined))


def computed(scale: Scale) -> str:
    """A hash of all that the runs of a scale compute: every setting's whole configuration, and the seeds.

    Keys without a value, or without an effect, do not count, so that a new key does not invalidate a record.
    """
    configs = [_without_defaults(_computed_by(scale, setting)) for setting in scale.settings]
    content = json.dumps([configs, scale.seeds], sort_keys=True)
    return sha256(content.encode()).hexdigest()[:16]


def _computed_by(scale: Scale, setting: str) -> dict[str, Any]:
    from fedloom.experiments.runs.configuration import compose_config
    from fedloom.platform.runs.resuming import what_is_computed  # imports torch

    return what_is_computed(asdict(compose_config(scale.overrides_of(setting))))


def _changed(then: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in then.items():
        other = now.get(name)
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            yield from _changed(value, other, f"{prefix}{name}.")
        elif value != other and f"{prefix}{name}" not in ("seed", START_FROM, *DEVICES):
            yield f"{prefix}{name}"


def _without_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without keys that have no effect.

    These are keys that are None; privacy, adapters, attacks and early stopping that are off; and newer keys at their
    default.
    """
    return {
        name: _without_defaults(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if value is not None
        and not (name == "privacy" and value["clip"] is None and not value["secure"])
        and not (name == "attack" and not value["share"])
        and not (name == "stop" and value["patience"] is None and value["target"] is None)
        and not (name == "lora" and value["ranks"] is None)
        and not (name in LATER and not value)
        and (name, value) not in LATER_WORDS
    }


# -- comparing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Repeated:
    """Recorded values compared with those that runs here measured again.

    Attributes:
        equal: how many of `values` (compared per seed) are equal to the bit; wall times and peak memory do not count.
        within: how many of `spots` have a mean within the 95 % prediction interval that the record's other seeds give
            for the mean of as many further seeds. Spots with fewer than three other recorded seeds do not count.
    """

    equal: int
    values: int
    within: int
    spots: int

    @property
    def text(self) -> str:
        """Both counts in one sentence, those of which there are any."""
        equal = f"{self.equal} of {self.values} values measured again are equal to the record's to the bit"
        where = "within the 95 % prediction intervals of the record's other seeds"
        within = f"{self.within} of {self.spots} means are {where}"
        return f"{'; '.join(text for text, count in ((equal, self.values), (within, self.spots)) if count)}."


BY_THE_CLOCK = ("wall_s", "peak_memory_bytes")
"""Columns whose values a second run does not repeat."""


def repeated(item: Item, asked: Asked, quantities: Mapping[str, Measured]) -> Repeated | None:
    """Compares runs, with the item's own or other seeds, with the record; None without a record or common values.

    A value is compared with the record's of the same seed, a mean with the prediction of the recorded seeds that were
    not run again.
    """
    try:
        record = None if asked.changes else record_of(item, Asked(asked.scale))
    except ValueError:  # a damaged record is reported where records are requested
        record = None
    if record is None or record.earlier:  # runs of other presets repeat nothing
        return None
    pairs: list[bool] = []
    within: list[bool] = []
    for name, quantity in item.quantities.items():
        source = quantity.source
        if name not in record.values or not isinstance(source, Read) or source.value in BY_THE_CLOCK:
            continue
        for spot, values in quantities[name].values.items():
            known = record.values[name].get(spot, {})
            pairs += [value == known[seed] for seed, value in values.items() if seed in known]
            again = estimate(values.values())
            expected = estimate([value for seed, value in known.items() if seed not in values])
            if again is not None and expected is not None and expected.half_width is not None:
                half = expected.half_width * math.sqrt(1 + expected.runs / again.runs)
                within.append(abs(again.mean - expected.mean) <= half)
    return Repeated(sum(pairs), len(pairs), sum(within), len(within)) if pairs or within else None


# -- writing ----------------------------------------------------------------------------------------------------------


def check_recordable(item: Item, asked: Asked) -> None:
    """Raises ValueError for an item without runs, changed runs, a record that cannot stay, and a read-only folder."""
    if item.missing or not item.needs_runs:
        raise ValueError(f"{item.name}: {item.missing or 'what is counted without training is not recorded'}")
    if not asked.is_own:
        raise ValueError(f"{item.name}: runs changed by overrides are not recorded")
    file = record_file(item, asked.scale)
    # Before hours of training; this also raises for a damaged record.
    if record_of(item, asked) is None and file.exists():
        raise ValueError(
            f"{file} has {read_record(file).runs[0]} runs of what the item ran or read before: delete the file to "
            "record others"
        )
    check_writable(item.file.parent, "the item's folder")


def record(item: Item, asked: Asked, results: Path) -> Path:
    """Records, beside the item, what its own runs in this results folder measured; returns the file.

    Runs that are not done are left out; the record says how many it has. Runs that this folder lacks keep the values of
    the record so far, or are given those of another item's record that has them and reads all that this item reads, so
    that runs of many hours need not lie in one folder. Raises ValueError if no run is done, if presets have changed
    since the runs, and if the record so far is of other presets, or of what the item ran or read before.
    """
    check_recordable(item, asked)
    parts = parts_of(item, asked)
    begun = {part.ablation_id: done for part in parts if (done := done_runs(part, results)) is not None}
    runs = {place for done in begun.values() for place in done.places.values()}
    if not runs:
        raise ValueError(f"{item.name}: none of its runs is done: there is nothing to record")
    for part in parts:
        if part.ablation_id in begun:
            _check_presets(part, begun[part.ablation_id], results)
    file, known, scale = record_file(item, asked.scale), record_of(item, asked), item.scales[asked.scale]
    if known is not None and ({*known.earlier} & {*begun} or known.computed != _computed_of(item, asked, known)):
        raise ValueError(f"{file} has runs of other presets: delete the file to record those of {results}")
    # Read again, because the tables of `done_runs` include the rounds of supernets that other runs have trained.
    rounds = load_paths([p for done in begun.values() for p in done.tables.paths], ["rounds"]).rounds
    hours = float(rounds["wall_s"].sum()) / HOUR_S
    code = dict.fromkeys(() if known is None else known.code)
    code.update(dict.fromkeys(text for done in begun.values() for text in _computed_with(done)))
    quantities = measured(item, scale, [*begun.values()])
    # Counted and combined quantities are not kept: they take only seconds.
    read = [name for name, quantity in item.quantities.items() if isinstance(quantity.source, Read)]
    values = {name: {spot: dict(seeds) for spot, seeds in quantities[name].values.items()} for name in read}
    for other in _known_of_the_same_runs(item, asked, parts, known):
        if more := _runs_with_values(other.values) - runs:
            for name, by_spot in other.values.items():
                for spot, seeds in by_spot.items():
                    if by_seed := {seed: value for seed, value in seeds.items() if (spot[0], seed) in more}:
                        values[name].setdefault(spot, {}).update(by_seed)
            runs |= more
            hours += other.hours * len(more) / other.runs[0]
            code.update(dict.fromkeys(other.code))
    order = [*scale.settings]
    values = {
        name: dict(sorted(by_spot.items(), key=lambda each: order.index(each[0][0])))
        for name, by_spot in values.items()
        if by_spot
    }
    ablations = dict.fromkeys(() if known is None else known.ablations)
    ablations.update((part.ablation_id, None) for part in parts if any(name in part.scale.settings for name, _ in runs))
    earlier = {} if known is None else known.earlier
    new = Record(
        ablations=(*ablations,),
        runs=(len(runs), sum(part.num_runs for part in parts)),
        computed=computed(recorded_scale(item, asked, ablations, earlier)),
        reads=reads(item, values),
        day=datetime.now(tz=UTC).strftime("%Y-%m-%d"),
        hours=float(f"{hours:.3g}"),
        values=values,
        earlier=earlier,
        claims=_claims_made_before(item, asked, known),
        seeds=scale.seeds,
        code=(*code,),
    )
    by_setting: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for name, by_spot in values.items():
        settings_of = by_setting.setdefault(name, {})
        for (setting, place), seeds in by_spot.items():
            as_json = {str(seed): float(value) for seed, value in sorted(seeds.items())}
            settings_of.setdefault(setting, {})[place] = as_json
    file.parent.mkdir(exist_ok=True)
    content = {**vars(new), "values": by_setting}
    write_atomically(file, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())
    return file


def _known_of_the_same_runs(item: Item, asked: Asked, parts: Sequence[Part], own: Record | None) -> Iterator[Record]:
    """The record so far, and those of other items in the papers' folders that share ablations and read all it reads.

    They have only values of needed settings, under this item's names of the quantities.
    """
    if own is not None:
        yield replace(own, values=_of_settings(own.values, parts))
    sources = {name: q.source for name, q in item.quantities.items() if isinstance(q.source, Read)}
    for file in sorted(item.file.parent.parent.glob(f"*/{FOLDER}/*.{asked.scale}.json")):
        ablations = read_record(file).ablations
        shared = [part for part in parts if part.ablation_id in ablations]
        if not shared or file == record_file(item, asked.scale):
            continue
        stem = file.name.removesuffix(f".{asked.scale}.json")
        other = load_item(f"{file.parent.parent.name}/{stem}", item.file.parent.parent)
        names = {name: [n for n, q in other.quantities.items() if q.source == s] for name, s in sources.items()}
        known = record_of(other, Asked(asked.scale)) if all(names.values()) else None
        if known is None or known.earlier or known.computed != _computed_of(other, Asked(asked.scale), known):
            continue
        theirs = {name: known.values.get(same[0], {}) for name, same in names.items()}
        yield replace(known, values=_of_settings(theirs, shared))


def _of_settings(values: Mapping[str, Values], parts: Sequence[Part]) -> Mapping[str, Values]:
    """The values in settings that are needed of these parts."""
    needed = {setting for part in parts for setting in part.needed}
    return {name: {spot: seeds for spot, seeds in by.items() if spot[0] in needed} for name, by in values.items()}


def _computed_of(item: Item, asked: Asked, known: Record) -> str:
    """The hash of what the runs of a record would compute now."""
    return computed(recorded_scale(item, asked, known.ablations, known.earlier))


def _claims_made_before(item: Item, asked: Asked, known: Record | None) -> tuple[str, ...] | None:
    """The hashes of the claims that were as they are before any value that judges them was recorded.

    None if the known record has no hashes: nobody can say which claims have changed since.
    """
    claims = {claim_hash(claim, item): claim for claim in item.claims}
    if known is None:
        return tuple(claims)
    recorded = known.claims
    if recorded is None:
        return None
    scale = item.scales[asked.scale]
    before = measured(item, scale, [], known.values)
    return tuple(
        text
        for text, claim in claims.items()
        if text in recorded or verdict(claim, before, item, [*scale.settings], scale.seeds).state == NOT_RUN
    )


def _runs_with_values(values: Mapping[str, Values]) -> set[tuple[str, int]]:
    """The setting and the seed of every run that has a value."""
    spots = (spot for by_spot in values.values() for spot in by_spot.items())
    return {(setting, seed) for (setting, _), seeds in spots for seed in seeds}


def _computed_with(done: Runs) -> Iterator[str]:
    """The commit, the hash of the source, torch, the processor and the GPUs of every run."""
    for _, run in done.tables.runs.iterrows():
        torch = json.loads(run["versions"])["torch"]
        words = {"commit": run["commit"], "source": run["source_hash"], "torch": torch, "processor": run["processor"]}
        words |= {"gpus": ", ".join(json.loads(run["gpus"]))} if isinstance(run["gpus"], str) else {}
        yield ", ".join(f"{name} {word if isinstance(word, str) else 'not known'}" for name, word in words.items())


def _check_presets(part: Part, done: Runs, results: Path) -> None:
    """Raises ValueError for runs whose presets differ from today's, because the record would mix the two up.

    Keys that a run's configuration lacks are newer than the run and do not count; neither do the devices, and the seed
    and the run from which it started, which differ for every seed.
    """
    from fedloom.platform.runs.resuming import what_is_computed  # imports torch

    trials = read_ablation(results / ABLATIONS / part.ablation_id).trials
    configs = {done.places[trial.run_id][0]: trial.config for trial in trials if trial.run_id in done.places}
    for setting, config in configs.items():
        now = json.loads(json.dumps(_computed_by(part.scale, setting)))
        if changed := ", ".join(_changed(what_is_computed(config), now)):
            raise ValueError(
                f"the runs in {results} differ from the current {part.scale.experiment} ({setting}) in {changed}: "
                "run the item in another results folder, and record that"
            )
