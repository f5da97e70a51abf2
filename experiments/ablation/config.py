"""The configuration of an ablation (axes, seeds, search, scheduler), from a preset or a YAML file and overrides."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Interval
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from fedloom.experiments.runs.presets import CONF, ablations
from fedloom.experiments.store.ablations import FIGURES, FRAME_COLUMNS, axis_value, short
from fedloom.platform.plugins import nearest
from fedloom.platform.results.files import check_name
from fedloom.platform.settings import (
    NOT_EMPTY,
    ONE_OR_MORE,
    PATH,
    UP_TO_A_MILLION,
    UP_TO_A_THOUSAND,
    ZERO_OR_MORE,
    check_settings,
    is_path,
    validated,
)
from fedloom.platform.words import shown

logger = logging.getLogger(__name__)

PREFIX = "ablation."
NOT_AXES = {
    "seed": "an ablation has several seeds; give ablation.seeds=[1,2]",
    "name": "the trials of an ablation are named by their ids; use tags=[WORD] instead",
    "results": "all trials of an ablation lie in one results folder; give results=FOLDER",
    "ray": "all trials of an ablation run on one cluster; give ray.KEY=VALUE",
}
"""Configuration keys and sections that no axis may vary, and the advice for each."""


@dataclass
class AxisConfig:
    """One axis of an ablation.

    An axis has a configuration `key` with its `values`, a `key` with a range for a search (`uniform`,
    `log_uniform` or `integers`: the least and the greatest value), or named `settings` of several keys each.
    """

    key: str = ""
    values: list[Any] = field(default_factory=list)
    uniform: list[float] | None = None
    log_uniform: list[float] | None = None
    integers: list[int] | None = None
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass
class SearchConfig:
    """How points of the axes are chosen.

    `grid` takes all combinations, `random` draws `samples` points from `seed`, and `bayesian` suggests `samples`
    points, `batch` at a time, from the validation accuracy of earlier ones (Optuna's tree-structured Parzen estimator,
    Bergstra et al. 2011).
    """

    kind: Literal["grid", "random", "bayesian"] = "grid"
    samples: Annotated[int, UP_TO_A_MILLION] = 20
    seed: Annotated[int, ZERO_OR_MORE] = 1
    batch: Annotated[int, UP_TO_A_THOUSAND] = 4


@dataclass
class SchedulerConfig:
    """Which trials are stopped early: `none`, or `asha` (Li et al. 2020, asynchronous successive halving).

    ASHA compares the trials' `metric` (`metric` or `loss` of the table `rounds`, as reported by clients) after
    `grace_rounds` rounds of `stage` (default: the first stage), then after `reduction_factor` times as many, and so on.
    Each time it keeps the best 1 / `reduction_factor` of the trials.
    """

    kind: Literal["none", "asha"] = "none"
    metric: Literal["metric", "loss"] = "metric"
    stage: Annotated[str | None, NOT_EMPTY] = None
    grace_rounds: Annotated[int, ONE_OR_MORE] = 5
    reduction_factor: Annotated[float, Interval(gt=1, le=1000)] = 3.0


@dataclass
class AblationConfig:
    """An ablation: each point of its axes runs with every seed; `overrides` apply to all trials.

    `title` is the question that it answers. `figures` names the figures of its report (see
    `fedloom.experiments.report.ablation`). `attempts` limits the starts of a trial whose process dies;
    `concurrent` limits the number of trials that run at once, in addition to the cluster's resources.
    """

    title: str = ""
    axes: dict[str, AxisConfig] = field(default_factory=dict)
    seeds: list[Annotated[int, ZERO_OR_MORE]] = field(default_factory=lambda: [1, 2])
    overrides: list[str] = field(default_factory=list)
    figures: list[str] = field(default_factory=list)
    search: SearchConfig = field(default_factory=SearchConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    attempts: Annotated[int, UP_TO_A_THOUSAND] = 2
    concurrent: Annotated[int | None, UP_TO_A_MILLION] = None


def load_ablation_config(preset: str, overrides: Sequence[str] = ()) -> tuple[str, AblationConfig]:
    """Loads the name and definition of an ablation from a preset or a YAML file, with `ablation.KEY=VALUE` overrides.

    Raises ValueError in one line for an unknown preset, an unreadable file, an unknown key or a value out of range.
    """
    path = _path(preset)
    name = check_name("ablation", path.stem)
    changes = _own(overrides)
    try:
        values = OmegaConf.to_container(OmegaConf.merge(OmegaConf.load(path), changes), resolve=True)
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"ablation={preset}: {path} cannot be read as YAML: {_first_line(error)}") from error
    try:
        config = definition_of(values)
    except ValueError as error:
        raise ValueError(f"ablation={preset}: {error}") from error
    check_ablation(config)
    return name, config


def definition_of(values: Any) -> AblationConfig:
    """The definition with these values, whose names of axes and settings may be numbers, as YAML reads 1.

    Raises ValueError in one line for an unknown key or a value out of range.
    """
    return validated(AblationConfig, _with_text_names(values, PREFIX), PREFIX)


def _with_text_names(values: Any, prefix: str, depth: int = 5) -> Any:
    """Values whose names are text down to the keys of settings: ablation.axes.AXIS.settings.SETTING.KEY."""
    if not depth or not isinstance(values, Mapping):
        return values
    for name in values:
        if isinstance(name, bool):
            word = "yes, on or true" if name else "no, off or false"
            raise ValueError(f"{prefix}{str(name).lower()}: a name that is {word} must be in quotes")
        if not isinstance(name, str) and str(name) in values:
            raise ValueError(f"{prefix}{name}: two have this name, one in quotes and one without: rename one")
    return {str(name): _with_text_names(value, f"{prefix}{name}.", depth - 1) for name, value in values.items()}


def _own(overrides: Sequence[str]) -> Any:
    for override in overrides:
        if "=" not in override:
            raise ValueError(f"{override!r} is not of the form key=value")
        try:
            OmegaConf.from_dotlist([override])
        except (OmegaConfBaseException, YAMLError) as error:
            raise ValueError(f"{override} cannot be read ({_first_line(error)}): give a list as [1,2]") from error
    return OmegaConf.from_dotlist([o.removeprefix(PREFIX) for o in overrides])


def _path(preset: str) -> Path:
    if preset.endswith((".yaml", ".yml")):
        path = Path(preset)
        if not is_path(preset):
            raise ValueError(f"ablation={shown(preset)}: must be {PATH.meaning}")
        if not path.is_file():
            raise ValueError(f"ablation={preset}: there is no such file")
        return path
    if preset not in ablations():
        known = ablations()
        raise ValueError(
            f"ablation={preset}: no such ablation{nearest(preset, known)}; there are {', '.join(known)}, or give a "
            "YAML file of your own (ablation=my.yaml)"
        )
    return CONF / "ablation" / f"{preset}.yaml"


def check_ablation(config: AblationConfig) -> None:
    """Raises ValueError for a definition that cannot be run."""
    check_settings(config, PREFIX)
    if not config.axes:
        raise ValueError("ablation.axes is empty: name at least one axis, with a key and its values")
    for name, axis in config.axes.items():
        if name in FRAME_COLUMNS:
            raise ValueError(f"ablation.axes.{name}: tables of results have a column {name!r}: give it another name")
        _check_axis(name, axis, config.search.kind)
        for key in (axis.key, *(key for s in axis.settings.values() for key in s)):
            if (advice := NOT_AXES.get(key.lstrip("+").partition(".")[0])) is not None:
                raise ValueError(f"ablation.axes.{name} sets {key}: {advice}")
    for override in config.overrides:
        key = override.partition("=")[0].lstrip("+")
        if key in ("seed", "name"):
            raise ValueError(f"ablation.overrides has {override}: {NOT_AXES[key]}")
    if not config.seeds or len(set(config.seeds)) != len(config.seeds):
        raise ValueError(f"ablation.seeds={list(config.seeds)}: give one or more different seeds, such as [1,2,3]")
    for figure in config.figures:
        if figure not in FIGURES:
            raise ValueError(f"ablation.figures: no figure {figure!r}; there are {', '.join(FIGURES)}")
    for line in _without_effect(config):
        logger.warning("%s", line)


def _without_effect(config: AblationConfig) -> Iterator[str]:
    """One line for every key of the search and of the scheduler that was changed and has no effect."""
    kind, scheduler = config.search.kind, config.scheduler.kind
    unused = {"grid": ("samples", "seed", "batch"), "random": ("batch",), "bayesian": ()}[kind]
    for key in unused:
        if (value := getattr(config.search, key)) != getattr(SearchConfig(), key):
            yield f"ablation.search.{key}={value} has no effect with ablation.search.kind={kind}"
    for key in ("metric", "stage", "grace_rounds", "reduction_factor") if scheduler == "none" else ():
        if (value := getattr(config.scheduler, key)) != getattr(SchedulerConfig(), key):
            yield f"ablation.scheduler.{key}={value} has no effect with ablation.scheduler.kind={scheduler}"


def _check_axis(name: str, axis: AxisConfig, search: str) -> None:
    ranges = {k: r for k in ("uniform", "log_uniform", "integers") if (r := getattr(axis, k)) is not None}
    ways = bool(axis.values) + len(ranges) + bool(axis.settings)
    if ways != 1:
        raise ValueError(
            f"ablation.axes.{name} has {ways} of values, settings, uniform, log_uniform and integers: give one of them"
        )
    if bool(axis.key) == bool(axis.settings):
        raise ValueError(
            f"ablation.axes.{name}: give a key with its values, or settings (each a name and keys with values)"
        )
    if ranges and search == "grid":
        raise ValueError(
            f"ablation.axes.{name}: a range is for ablation.search.kind=random or bayesian; a grid needs values"
        )
    for kind, limits in ranges.items():
        ordered = len(limits) == 2 and -math.inf < limits[0] < limits[1] < math.inf
        if not ordered or (kind == "log_uniform" and limits[0] <= 0):
            positive = ", both above 0" if kind == "log_uniform" else ""
            raise ValueError(f"ablation.axes.{name}.{kind}={list(limits)}: give the least and the greatest{positive}")
    in_tables = [axis_value(value) for value in axis.values]  # they cannot tell 1 from 1.0, nor null from "null"
    twice = [value for i, value in enumerate(in_tables) if value in in_tables[:i]]
    if twice:
        raise ValueError(
            f"ablation.axes.{name}.values: {short(twice[0])} is there twice: for more runs of it use more seeds"
        )


def _first_line(error: BaseException) -> str:
    """The problem and its place: the key that OmegaConf names, or the line of the file."""
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem} in line {error.problem_mark.line + 1}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    key = next((line.removeprefix("full_key:").strip() for line in lines if line.startswith("full_key:")), "")
    what = lines[0] if lines else type(error).__name__
    return f"{key}: {what}" if key else what
