"""Plans the runs of an item: an ablation per preset and data set, found again by an id that follows from the item."""

import itertools
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from fedloom.experiments.reproduce.items import (
    EXPERIMENT,
    SCALES,
    SMALL,
    START_FROM,
    Combined,
    Comparison,
    Item,
    Monotone,
    Operand,
    Read,
    Scale,
    check_seeds,
)
from fedloom.experiments.runs.overrides import override_text
from fedloom.experiments.runs.presets import PRESET
from fedloom.experiments.store.ablations import Ablation, Trial, trial_id

AXIS = "setting"
"""The one axis of an item's ablations."""
SCALE, SEEDS = "scale", "seeds"
DEVICES = ("tiers.num_gpus", "tiers.num_cpus")
"""Keys that an item's runs may be given because they change its values by rounding alone, as another processor does."""


@dataclass(frozen=True)
class Asked:
    """What a command line asks for: a scale, and what it changes.

    Attributes:
        changes: overrides that change what is computed; the runs are then not the item's own.
        free: overrides that only change where and how it is computed, among them a client's share of a GPU.
        seeds: other seeds than the item's; empty for its own.
    """

    scale: str
    changes: tuple[str, ...] = ()
    free: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()

    @property
    def is_own(self) -> bool:
        """Whether exactly what the item says is computed; only such runs count on the scoreboard."""
        return not self.changes and not self.seeds

    def of(self, scale: Scale) -> Scale:
        """The scale with the changed seeds and overrides."""
        return replace(scale, seeds=self.seeds or scale.seeds, overrides=(*scale.overrides, *self.changes))


@dataclass(frozen=True)
class Part:
    """The settings of a scale that one item runs with the same preset and data set: they are one ablation.

    `needed` holds those of them that the item at hand needs; another item may need the others.
    """

    dataset: str
    ablation_id: str
    scale: Scale
    needed: frozenset[str]

    @property
    def num_runs(self) -> int:
        """The number of runs that are needed: every needed setting with every seed."""
        return len(self.needed) * len(self.scale.seeds)

    def needs(self, trial: Trial) -> bool:
        """Whether the item needs a trial of the ablation."""
        return str(trial.setting[AXIS]) in self.needed


def asked(item: Item, overrides: Sequence[str]) -> Asked:
    """Parses `scale=NAME seeds=[...] key=value ...` for an item; ValueError for an invalid scale, key or value.

    The default scale is small, which a laptop can run, or the only scale that the item has.
    """
    words = {o.partition("=")[0]: o.partition("=")[2] for o in overrides if o.partition("=")[0] in (SCALE, SEEDS)}
    scale_name = words.get(SCALE, SMALL)
    if scale_name not in SCALES:
        raise ValueError(f"scale={scale_name}: there are {' and '.join(SCALES)}")
    if scale_name not in item.scales:  # items that need no training have only the paper scale
        if SCALE in words:
            known = " and ".join(item.scales)
            raise ValueError(f"scale={scale_name}: {item.name} has only the scale {known}; leave scale out")
        scale_name = next(iter(item.scales))
    scale = item.scales[scale_name]
    seeds: tuple[int, ...] = ()
    if SEEDS in words:
        try:
            value = json.loads(words[SEEDS])
        except ValueError:
            value = words[SEEDS]
        seeds = tuple(value if isinstance(value, list) else [value])
        check_seeds(seeds)
    others = [o for o in overrides if o.partition("=")[0] not in (SCALE, SEEDS)]
    varied = {key for changes in scale.settings.values() for key in changes}
    for override in others:
        key, equals, _ = override.lstrip("+").partition("=")
        if not equals:
            raise ValueError(f"{override!r} is not of the form key=value")
        if key in varied or f"{key}=" == PRESET:
            raise ValueError(f"{override}: the settings of {item.name} vary this key; change another one")
        if key in (advice := {"seed": "seeds=[1,2]", "results": "--results FOLDER", "name": "tags=[WORD]"}):
            raise ValueError(f"{override}: give {advice[key]} instead")
    free: tuple[str, ...] = ()
    if others:
        from fedloom.platform.runs.resuming import free_on_resume  # imports torch

        free = tuple(o for o in others if (key := o.partition("=")[0]) in DEVICES or free_on_resume(key))
    changes = tuple(o for o in others if o not in free)
    return Asked(scale_name, changes, free, () if seeds == scale.seeds else seeds)


def parts_of(item: Item, asked_for: Asked) -> list[Part]:
    """The ablations of an item at a scale, in the order of its settings; none if it cannot be run."""
    if item.missing:
        return []
    scale = asked_for.of(item.scales[asked_for.scale])
    groups: dict[tuple[str, str, str], dict[str, dict[str, Any]]] = {}
    for setting, changes in scale.settings.items():
        others = {key: value for key, value in changes.items() if key != EXPERIMENT}
        groups.setdefault(scale.part_of(setting), {})[setting] = others
    parts: list[Part] = []
    needed = needed_settings(item, asked_for.scale)
    for (run_by, preset, dataset), settings in groups.items():
        of_part = replace(scale, experiment=preset, settings=settings)
        before = [part.ablation_id for part in parts_before(of_part, parts)]
        ablation_id = _ablation_id(run_by, asked_for.scale, of_part, before)
        parts.append(Part(dataset, ablation_id, of_part, needed & {*settings}))
    return parts


def needed_settings(item: Item, scale_name: str) -> frozenset[str]:
    """The settings that an item needs: its own, and those of other items that its numbers and claims name.

    A claim that names none is about all; an item without numbers and claims needs all. A setting needs that from whose
    runs its own start.
    """
    scale = item.scales[scale_name]
    needed = {setting for setting in scale.settings if scale.run_by[setting] == item.name}
    for quantity in item.quantities.values():
        needed |= {*quantity.by_setting}
        if isinstance(quantity.source, Combined):
            needed |= _named(item, quantity.source.first) | _named(item, quantity.source.second)
    for claim in (*item.regimes.values(), *item.claims):
        for check in claim.checks if scale_name in (claim.scales or item.scales) else ():
            order = check.order if isinstance(check, Monotone) and check.along == "settings" else ()
            unnamed = order or check.settings or scale.settings
            for operand in (check.operand, *((check.other,) if isinstance(check, Comparison) else ())):
                needed |= _named(item, operand, unnamed)
    needed &= {*scale.settings}
    while before := {other for name, other in scale.starts.items() if name in needed} - needed:
        needed |= before
    return frozenset(needed or scale.settings)


def _named(item: Item, operand: Operand, unnamed: Collection[str] = ()) -> set[str]:
    """The settings that an operand names, itself or in what it combines; `unnamed` for runs of no setting by name."""
    if operand.setting is not None:
        return {operand.setting}
    source = item.quantities[operand.quantity].source
    if isinstance(source, Combined):
        return _named(item, source.first, unnamed) | _named(item, source.second, unnamed)
    return {*unnamed} if isinstance(source, Read) else set()


def parts_before(scale: Scale, parts: Iterable[Part]) -> list[Part]:
    """The parts with the runs from which a scale's runs start."""
    settings = {*scale.starts.values()}
    return [part for part in parts if settings & {*part.scale.settings}]


def _ablation_id(run_by: str, scale_name: str, scale: Scale, before: Sequence[str]) -> str:
    """An id that changes with anything that changes the runs, so that results of other runs are never taken for theirs.

    `before` holds the ids of the ablations from whose runs these start.
    """
    content = json.dumps([scale.experiment, [*scale.settings.items()], scale.seeds, scale.overrides, *before])
    preset = re.sub(r"[^A-Za-z0-9_]+", "_", scale.experiment)[:40]
    words = [*run_by.split("/"), scale_name, preset]
    return "-".join(["paper", *words, sha256(content.encode()).hexdigest()[:8]])


def without_common_keys(scale: Scale) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The settings and the overrides of a scale, rearranged so that no key is in both, as ablations require.

    An override of a key that some settings change moves into the settings that do not change it.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser  # not needed to list items

    varied = {key for changes in scale.settings.values() for key in changes}
    read = OverridesParser.create().parse_overrides(list(scale.overrides))
    common = {o.key_or_group: o.value() for o in read if o.key_or_group in varied}
    settings = {name: {**common, **changes} for name, changes in scale.settings.items()}
    return settings, [str(o.input_line) for o in read if o.key_or_group not in common]


def planned(item: Item, part: Part, asked_for: Asked, results: Path) -> Ablation:
    """The plan of a part, with every trial's configuration composed and checked; a ValueError names the item.

    A run that starts from a run of another setting is given that run's id, which also follows from the item.
    """
    from fedloom.experiments.ablation.config import AblationConfig, AxisConfig
    from fedloom.experiments.ablation.plan import plan_of  # imports torch, which a list of items does not need

    scale = part.scale
    settings, overrides = without_common_keys(scale)
    config = AblationConfig(
        title=f"{item.source}: {item.title}",
        axes={AXIS: AxisConfig(settings=settings)},
        seeds=list(scale.seeds),
        overrides=[f"{PRESET}{scale.experiment}", *overrides],
    )
    common = [*asked_for.free, f"results={override_text(str(results))}"]
    plan = plan_of(item.name.replace("/", "-"), config, common, named=item.name, ablation_id=part.ablation_id)
    starts = scale.starts
    if not starts:
        return plan
    run_ids = {
        (name, seed): trial_id(other.ablation_id, index)
        for other in parts_of(item, asked_for)
        for index, (name, seed) in enumerate(itertools.product(other.scale.settings, other.scale.seeds))
    }
    trials = [
        _started_from(trial, run_ids[starts[name], trial.seed])
        if (name := str(trial.setting[AXIS])) in starts
        else trial
        for trial in plan.trials
    ]
    return replace(plan, trials=tuple(trials))


def _started_from(trial: Trial, run_id: str) -> Trial:
    """The trial with a run id in place of the setting's name, also in its override, so that it can be run by hand."""
    section, _, key = START_FROM.partition(".")
    config = {**trial.config, section: {**trial.config[section], key: run_id}}
    overrides = [f"{START_FROM}={run_id}" if o.startswith(f"{START_FROM}=") else o for o in trial.overrides]
    return replace(trial, config=config, overrides=tuple(overrides))


def missing_data(dataset: str, overrides: Sequence[str] = ()) -> str:
    """What this machine lacks of a built-in data set, and where it belongs; empty if nothing is missing.

    `overrides` may name the folder of the original files (`data.root=FOLDER`).
    """
    from fedloom.platform.data.config import DataConfig
    from fedloom.platform.data.registry import DATASETS, OF_ITS_OWN

    known: Mapping[str, Any] = DATASETS.known
    root = next((o.partition("=")[2] for o in reversed(overrides) if o.startswith("data.root=")), None)
    if dataset not in known or dataset in OF_ITS_OWN or "data.download=true" in overrides:
        return ""
    config = DataConfig(dataset=dataset)
    config.root = root if root is not None else config.root
    try:
        known[dataset](config)
    except ValueError as error:
        return str(error)
    return ""
