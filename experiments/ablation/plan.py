"""Plans the trials of an ablation: composes and checks a configuration for every point of the axes and every seed."""

import itertools
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from fedloom.experiments.ablation.bayesian import check_optuna, known_points, suggested
from fedloom.experiments.ablation.config import (
    NOT_AXES,
    PREFIX,
    AblationConfig,
    AxisConfig,
    SearchConfig,
    load_ablation_config,
)
from fedloom.experiments.runs.configuration import change_stored, compose_config, config_from_dict, tell_left_out
from fedloom.experiments.runs.overrides import GROUPS, override_text, read
from fedloom.experiments.store.ablations import Ablation, Trial, find_ablation, new_ablation_id, trial_id
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.results.checkpoint import differences
from fedloom.platform.results.store import local_root
from fedloom.platform.runs.resuming import free_on_resume, placed_here, what_is_computed
from fedloom.platform.runs.source_code import check_code_places
from fedloom.platform.seeding import stream

logger = logging.getLogger(__name__)

MOST_TRIALS = 10_000
MOST_DRAWS = 50
"""Draws per sample after which the axes count as exhausted."""
PLACES = ("results", "ray", "data.root", "data.cache", "data.download")
"""The keys that say where all trials of an ablation run."""
DEFAULT_FIGURES = ("metric_by_axis",)
Changes = Mapping[str, Any]
"""Configuration keys with their values."""


@dataclass(frozen=True)
class Point:
    """One combination of the axes: a value or setting name by axis, and the changed configuration keys."""

    setting: Mapping[str, Any]
    changes: Changes


def plan_ablation(arguments: Sequence[str]) -> Ablation:
    """Plans the ablation of the arguments `ablation=NAME experiment=NAME key=value ...` without writing files.

    Every trial's configuration is composed and checked. Raises ValueError with one line for a key or value that is
    unknown or out of range, or a key that is varied and set at the same time.
    """
    preset, changes, common = _sorted_arguments(arguments)
    name, config = load_ablation_config(preset, changes)
    return plan_of(name, config, common, named=f"ablation={preset}")


def plan_of(
    name: str, config: AblationConfig, common: Sequence[str], *, named: str, ablation_id: str | None = None
) -> Ablation:
    """Plans an ablation of this definition without writing files; `common` are further overrides of all its trials.

    Error messages call it `named`, such as ablation=alpha; it gets a new id unless `ablation_id` is given. Raises
    ValueError like `plan_ablation`.
    """
    chosen = [read(override) for override in [*config.overrides, *common]]
    axis_of = {
        key: name
        for name, axis in config.axes.items()
        for changes in [changes for _, changes in _choices(axis)] or [{axis.key: None}]
        for key in _keys_set(changes)
    }
    if not any(key in GROUPS for key in (*(override.key for override in chosen), *axis_of)):
        raise ValueError("give the experiment that the ablation varies, such as experiment=fedoras_digits")
    is_grid = config.search.kind == "grid"
    points_planned = config.search.samples if not is_grid else math.prod(len(_choices(a)) for a in config.axes.values())
    if (trials_planned := points_planned * len(config.seeds)) > MOST_TRIALS:
        raise ValueError(f"{named} has {trials_planned} trials: {MOST_TRIALS} at most; take fewer values")
    overrides = ["reuse_supernet=true", *config.overrides, *common]
    base = _base(named, overrides, common)
    if config.search.kind == "bayesian":
        check_optuna()
        if base.data.validation_share == 0:
            raise ValueError("data.validation_share=0: a Bayesian search compares points on validation data; give some")
    points = list(_points(config))
    for override in chosen:
        for key in _keys_set({override.key: override.value}):
            if varied := next((other for other in axis_of if _overlap(key, other)), None):
                raise ValueError(
                    f"{override.text}: the ablation varies {varied}; change its values instead "
                    f"(ablation.axes.{axis_of[varied]}.values=[...])"
                )
    ablation_id = ablation_id or new_ablation_id(local_root(base.results), name)
    try:
        trials = tuple(_trials(ablation_id, overrides, base, points, config.seeds))
    except ValueError as error:
        raise ValueError(f"{named} of {base.experiment}: {error}") from error
    return Ablation(
        ablation_id=ablation_id,
        name=name,
        title=config.title,
        experiment=base.experiment,
        axes=_axes(config, points),
        reference=_reference(config, base),
        seeds=tuple(config.seeds),
        figures=tuple(config.figures) or DEFAULT_FIGURES,
        scheduler=asdict(config.scheduler),
        overrides=tuple(overrides),
        attempts=config.attempts,
        concurrent=config.concurrent,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        trials=trials,
        search={} if config.search.kind != "bayesian" else {**asdict(config.search), "axes": _plain_axes(config)},
    )


def _plain_axes(config: AblationConfig) -> dict[str, Any]:
    return {name: asdict(axis) for name, axis in config.axes.items()}


def next_batch(root: Path, ablation: Ablation) -> Ablation | None:
    """The ablation with the next batch of its Bayesian search; None without such a search, or if it is done or stuck.

    What has been changed on resume is changed in the new trials, too. Raises ValueError like `known_points`, and if the
    preset has changed since the search began.
    """
    if not ablation.search:
        return None
    known = known_points(root, ablation)
    if ablation.points_left <= 0 or all(point.objective is None for point in known):
        return None
    config = AblationConfig(
        axes={name: AxisConfig(**axis) for name, axis in ablation.search["axes"].items()},
        search=SearchConfig(**{name: value for name, value in ablation.search.items() if name != "axes"}),
    )
    new = suggested(config.axes, config.search.seed, known, min(ablation.points_left, config.search.batch))
    if not new:
        logger.warning("the search ends after %d points: the axes have no others", len(known))
        return None
    _check_unchanged(ablation)
    points = [Point(point.setting, {}) for point in known]
    new_points = [_chosen(config, setting) for setting in new]
    first = ablation.trials[0]
    stored = asdict(config_from_dict(first.config))
    planned = asdict(compose_config([*ablation.overrides, *first.overrides, f"seed={first.seed}"]))
    base = compose_config(ablation.overrides)
    trials = _trials(ablation.ablation_id, ablation.overrides, base, new_points, ablation.seeds, len(ablation.trials))
    here = [replace(trial, config=_changed_alike(trial.config, planned, stored)) for trial in trials]
    axes = _axes(config, [*points, *new_points])
    return replace(ablation, trials=(*ablation.trials, *here), axes=axes)


def _check_unchanged(ablation: Ablation) -> None:
    """Raises ValueError if an earlier trial's overrides would give another configuration now.

    The user's own preset may have been edited since, and another version of fedloom may have other defaults.
    """
    for trial in ablation.trials[:: len(ablation.seeds)]:
        now = compose_config([*ablation.overrides, *trial.overrides, f"seed={trial.seed}"])
        then = config_from_dict(trial.config)
        if changes := differences(what_is_computed(asdict(then)), what_is_computed(asdict(now))):
            raise ValueError(
                f"the search cannot go on: trial {trial.index} would be another run now ({changes}), with which new "
                f"trials could not be compared: restore the preset {trial.experiment}, or start a new ablation"
            )


def _changed_alike(values: Changes, planned: Changes, stored: Changes, prefix: str = "") -> dict[str, Any]:
    """The configuration with the changes from `planned` to `stored` of keys that do not change results.

    Folders and addresses are the stored ones in any case, as plans may come from strangers (see `placed_here`).
    """
    changed = dict(values)
    for name, value in stored.items():
        key = f"{prefix}{name}"
        if key in PLACES:
            changed[name] = value
        elif all(isinstance(of.get(name), Mapping) for of in (values, planned, stored)):
            changed[name] = _changed_alike(values[name], planned[name], value, f"{key}.")
        elif free_on_resume(key) and value != planned.get(name):
            changed[name] = value
    return changed


def _chosen(config: AblationConfig, setting: Changes) -> Point:
    """The point with these values, or names of settings, by axis."""
    axes = config.axes.items()
    changes = (
        (name, setting[name], axis.settings.get(setting[name]) if axis.settings else None) for name, axis in axes
    )
    return _point([(n, v, {config.axes[n].key: v} if changed is None else changed) for n, v, changed in changes])


def _base(named: str, overrides: Sequence[str], common: Sequence[str]) -> RunConfig:
    """The base configuration, which every trial modifies.

    The error distinguishes mistakes in the ablation's overrides from mistakes in those of the command line.
    """
    try:
        return compose_config(overrides)
    except ValueError as error:
        typed = compose_config(common)
        raise ValueError(
            f"{named} does not fit {typed.experiment}: {error}; fedloom ablate --help says what it is for"
        ) from error


def planned_ablation(root: Path, ablation_id: str, overrides: Sequence[str]) -> Ablation:
    """Loads a stored ablation and applies overrides that do not change results (`ray.*`, `executor.actors`, ...).

    Addresses and folders are replaced by this machine's, as for a run that is resumed (see `placed_here`).

    Raises ValueError for an unknown or damaged plan, for one that names code in the results folder, and for an override
    of a key that the trials vary.
    """
    ablation = find_ablation(root, ablation_id)
    check_code_places((trial.config for trial in ablation.trials), root)
    for trial in ablation.trials[:1]:
        tell_left_out(f"ablation {ablation.ablation_id}", trial.config, overrides)
    trials = [replace(trial, config=placed_here(trial.config)) for trial in ablation.trials]
    if overrides:
        changed = _Changed(overrides)
        trials = [replace(trial, config=changed.of(trial.config)) for trial in trials]
    texts = {text for trial in trials for text in trial.overrides} if overrides else ()
    varied = {key for text in texts for key in _keys_set({read(text).key: read(text).value})}
    for override in map(read, overrides):
        if override.key == "name":
            raise ValueError(f"{override.text}: {NOT_AXES[override.key]}")
        if any(_overlap(key, other) for key in _keys_set({override.key: override.value}) for other in varied):
            raise ValueError(f"{override.text}: the trials of {ablation.ablation_id} vary {override.key}")
    return replace(ablation, trials=tuple(trials))


class _Changed:
    """Applies overrides to stored configurations; those that agree in all affected sections share the computation."""

    def __init__(self, overrides: Sequence[str]) -> None:
        self._overrides = overrides
        self._sections = [read(override).key.partition(".")[0] for override in overrides]
        self._interpolated = any("${" in override for override in overrides)  # may read any other section
        self._known: dict[str, Mapping[str, Any]] = {}

    def of(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration with the overrides."""
        names = [*self._sections, *(config if self._interpolated else ())]
        text = json.dumps({name: config.get(name) for name in names})  # a plan may be older than a section
        if text not in self._known:
            self._known[text] = asdict(change_stored(config_from_dict(config), self._overrides))
        return {**config, **{name: self._known[text][name] for name in names}}


def _sorted_arguments(arguments: Sequence[str]) -> tuple[str, list[str], list[str]]:
    """The ablation's name, its `ablation.` overrides, and the overrides of its runs."""
    names = [a.partition("=")[2] for a in arguments if a.startswith("ablation=")]
    if len(names) != 1 or not names[0]:
        many = f"{len(names)} ablations were given: " if len(names) > 1 else ""
        raise ValueError(f"{many}give one ablation=NAME (or a YAML file of your own), such as ablation=beta_schedule")
    changes = [a for a in arguments if a.startswith(PREFIX)]
    rest = [a for a in arguments if not a.startswith((PREFIX, "ablation="))]
    for argument in rest:
        key = argument.partition("=")[0].lstrip("+")
        if key in ("seed", "name"):
            raise ValueError(f"{argument}: {NOT_AXES[key]}")
    return names[0], changes, rest


def _points(config: AblationConfig) -> Iterator[Point]:
    if config.search.kind == "random":
        return _different(config)
    if config.search.kind == "bayesian":
        search = config.search
        first = suggested(config.axes, search.seed, (), min(search.batch, search.samples))
        return (_chosen(config, setting) for setting in first)
    choices = [[(name, *choice) for choice in _choices(axis)] for name, axis in config.axes.items()]
    return (_point(combination) for combination in itertools.product(*choices))


def _different(config: AblationConfig) -> Iterator[Point]:
    """Draws `search.samples` distinct points; a repeated point is skipped, so that no run is repeated."""
    seen: set[str] = set()
    for index in range(MOST_DRAWS * config.search.samples):
        point = _drawn(config, index)
        name = json.dumps(dict(point.setting), default=str)
        if name not in seen:
            seen.add(name)
            yield point
            if len(seen) == config.search.samples:
                return
    raise ValueError(
        f"ablation.search.samples={config.search.samples}: the axes have only about {len(seen)} different points; "
        "take fewer samples, or ablation.search.kind=grid"
    )


def _choices(axis: AxisConfig) -> list[tuple[Any, Changes]]:
    """The values of an axis: name and changed configuration keys."""
    if axis.settings:
        return list(axis.settings.items())
    return [(value, {axis.key: value}) for value in axis.values]


def _point(combination: Sequence[tuple[str, Any, Changes]]) -> Point:
    setting = {name: value for name, value, _ in combination}
    changes: dict[str, Any] = {}
    for name, _, changed in combination:
        by_others = [*_keys_set(changes)]
        for key in _keys_set(changed):
            if any(_overlap(key, other) for other in by_others):
                raise ValueError(f"ablation.axes.{name}: {key} is set by another axis, too: vary it in one of them")
        changes.update(changed)
    return Point(setting, changes)


def _keys_set(changes: Changes) -> Iterator[str]:
    """The keys that these changes set: those inside a mapping, which is merged with what is there."""
    for key, value in changes.items():
        if isinstance(value, Mapping):
            yield from _keys_set({f"{key}.{name}": inner for name, inner in value.items()})
        else:
            yield key.lstrip("+")


def _overlap(key: str, other: str) -> bool:
    """Whether two keys are one, or one is in the other; a chosen method or experiment does not set the keys in it."""
    shorter, longer = sorted((key, other), key=len)
    return key == other or (longer.startswith(f"{shorter}.") and shorter not in GROUPS)


def _drawn(config: AblationConfig, index: int) -> Point:
    """Draws the random search's point of this index, with a separate random stream per axis."""
    combination: list[tuple[str, Any, Changes]] = []
    for name, axis in config.axes.items():
        rng = stream(config.search.seed, "ablation", name, index)
        if axis.uniform or axis.log_uniform or axis.integers:
            value = _draw(axis, float(rng.random()))
            combination.append((name, value, {axis.key: value}))
        else:
            choices = _choices(axis)
            combination.append((name, *choices[int(rng.integers(len(choices)))]))
    return _point(combination)


def _draw(axis: AxisConfig, share: float) -> float:
    """The value at this share of the range, rounded to four significant digits for readability."""
    if axis.integers:
        low, high = axis.integers
        return int(low + math.floor(share * (high - low + 1)))
    if axis.log_uniform:
        least, greatest = axis.log_uniform
        value = least * (greatest / least) ** share
    else:
        assert axis.uniform is not None, "the axis has one of three ranges"
        least, greatest = axis.uniform
        value = least + (greatest - least) * share
    return min(max(float(f"{value:.4g}"), least), greatest)


def _trials(
    ablation_id: str,
    overrides: Sequence[str],
    base: RunConfig,
    points: Sequence[Point],
    seeds: Sequence[int],
    index: int = 0,
) -> Iterator[Trial]:
    for point in points:
        point_overrides = tuple(f"{key}={override_text(value)}" for key, value in point.changes.items())
        for seed in seeds:
            config = asdict(compose_config([*overrides, *point_overrides, f"seed={seed}"]))
            run_id = trial_id(ablation_id, index)
            yield Trial(index, run_id, seed, dict(point.setting), point_overrides, {**config, "results": base.results})
            index += 1


def _axes(config: AblationConfig, points: Sequence[Point]) -> dict[str, tuple[Any, ...]]:
    """The values of each axis; for a search those of its points, sorted if they are numbers."""
    if config.search.kind == "grid":
        return {name: tuple(value for value, _ in _choices(axis)) for name, axis in config.axes.items()}
    axes: dict[str, tuple[Any, ...]] = {}
    for name in config.axes:
        different = {json.dumps(value): value for value in (point.setting[name] for point in points)}.values()
        axes[name] = tuple(sorted(different) if all(isinstance(v, int | float) for v in different) else different)
    return axes


def _reference(config: AblationConfig, base: RunConfig) -> dict[str, Any]:
    """The experiment's own value of each axis, if it is among the values of the axis."""
    known = OmegaConf.create(asdict(base))
    reference: dict[str, Any] = {}

    def own(key: str) -> Any:
        return base.method.name if key == "method" else OmegaConf.select(known, key.lstrip("+"))

    for name, axis in config.axes.items():
        for value, changes in _choices(axis):
            if all(_same(own(key), wanted) for key, wanted in changes.items()):
                reference[name] = value
                break
    return reference


def _same(present: Any, wanted: Any) -> bool:
    plain = OmegaConf.to_container(present) if OmegaConf.is_config(present) else present
    return bool(plain == wanted)
