"""Composes `experiment=NAME key=value ...` to a checked RunConfig with Hydra, which only the driver uses."""

import json
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from fedloom.experiments.runs.presets import CONF, DEFAULT_METHOD, experiments, method_in, of_method
from fedloom.platform.data.checks import check as check_data
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.methods.registry import METHODS, find_method
from fedloom.platform.plugins import PluginError, is_import_path, nearest
from fedloom.platform.results.checkpoint import check_same_config
from fedloom.platform.results.files import check_name
from fedloom.platform.results.paths import find_run
from fedloom.platform.results.remote import fetch
from fedloom.platform.results.tables import read_table
from fedloom.platform.runs.run import FREE_ON_RESUME, free_on_resume
from fedloom.platform.settings import check_settings

PRESET, METHOD = "experiment=", "method="
FREE = ("options", "cost_weights")
"""Mappings of the configuration that accept arbitrary keys."""
OWN_PRESETS = "own"
"""Subgroup of `experiment` in which a user's own presets are registered."""


def compose_config(overrides: Sequence[str]) -> RunConfig:
    """Composes the configuration of a run.

    Raises ValueError with one line for a key or value that is unknown or out of range.
    """
    try:
        composed = _compose(overrides)
        _check_added(overrides)
        config = cast(RunConfig, OmegaConf.to_object(composed))
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_explain(error, overrides)) from error
    check_config(config)
    return config


def config_from_dict(values: Mapping[str, Any]) -> RunConfig:
    """Restores the configuration that a run stored in `config.json`; ValueError if it does not fit this version."""
    try:
        method = find_method(values["method"]["name"])
    except PluginError as error:
        raise ValueError(f"the run's method cannot be used: {error}") from error
    schema = OmegaConf.structured(RunConfig)
    schema.method = OmegaConf.structured(method.config)
    try:
        return cast(RunConfig, OmegaConf.to_object(OmegaConf.merge(schema, dict(values))))
    except OmegaConfBaseException as error:
        raise ValueError(f"the run's stored configuration does not fit this version: {_first_line(error)}") from error


def stored_config(results: str | Path, run_id: str) -> tuple[str, RunConfig]:
    """A run's full id and its stored configuration, with `results` as given; downloads a run at a URL first.

    Raises ValueError for an unknown run and for a configuration that is unreadable or differs from the recorded one.
    """
    root = fetch(results, [run_id])
    paths = find_run(root, run_id)
    try:
        values = json.loads(paths.config.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{paths.config} cannot be read: restore it from a copy, or start a new run") from error
    # The checkpoint belongs to the configuration that is recorded in the table `runs`.
    recorded = read_table(root, "runs", run_id=paths.run_id)["config"]
    if len(recorded) and recorded.notna().all():
        check_same_config(json.loads(recorded.iloc[-1]), values)
    config = config_from_dict(values)
    config.results = str(results)
    return paths.run_id, config


def change_stored(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Applies overrides that do not change results to a stored configuration; ValueError for any other override."""
    for override in overrides:
        key = override.partition("=")[0]
        if not free_on_resume(key):
            raise ValueError(
                f"{key} cannot change on resume, it would be another run: start one with `fedloom run`, "
                f"or change only {', '.join(FREE_ON_RESUME)}"
            )
    try:
        merged = OmegaConf.merge(OmegaConf.structured(config), OmegaConf.from_dotlist(list(overrides)))
        changed = cast(RunConfig, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        raise ValueError(_first_line(error)) from error
    check_config(changed)
    return changed


def _compose(overrides: Sequence[str]) -> DictConfig:
    _register_schema()
    ready = [_own_preset(o) if o.startswith(PRESET) else o for o in overrides]
    # Only the named methods are registered, so that the modules of the others are not imported.
    methods = [o.removeprefix(METHOD) for o in ready if o.startswith(METHOD)]
    for name in (DEFAULT_METHOD, *methods, *(method_in(o.removeprefix(PRESET)) for o in ready if o.startswith(PRESET))):
        _register_method(name)
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=str(CONF), version_base=None):
        return compose(config_name="config", overrides=[_addable(override) for override in ready])


def _addable(override: str) -> str:
    """Marks an override of a free mapping, such as the options of a plug-in, with Hydra's `++` for new keys."""
    key = override.partition("=")[0]
    free = any(f"{name}." in key for name in FREE)
    return f"++{override}" if free and "=" in override and not override.startswith(("+", "~")) else override


@cache
def _register_schema() -> None:
    ConfigStore.instance().store(name="run_schema", node=RunConfig)


@cache
def _register_method(name: str) -> None:
    """Registers a method with Hydra, by its name or by the import path of a user's own method."""
    if name in METHODS or is_import_path(name):
        ConfigStore.instance().store(group="method", name=name, node=find_method(name).config(name=name))


def _own_preset(override: str) -> str:
    """Registers the preset of `experiment=./mine.yaml`, which may extend another (`defaults: [fedoras_digits]`).

    Returns the override that chooses it; other overrides are returned unchanged.
    """
    given = override.removeprefix(PRESET)
    if not given.endswith((".yaml", ".yml")):
        return override
    path = Path(given)
    try:
        preset = OmegaConf.load(path)
    except FileNotFoundError:
        raise ValueError(f"experiment={given}: there is no such file") from None
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"experiment={given}: cannot be read as YAML: {_first_line(error)}") from error
    if not isinstance(preset, DictConfig):
        raise ValueError(f"experiment={given}: holds no keys; write a preset like fedloom's own")
    name = check_name("experiment", path.stem)
    preset.setdefault("experiment", name)
    for default in preset.get("defaults", ()):
        chosen = default.get("override /method") if isinstance(default, DictConfig) else None
        _register_method(str(chosen or ""))
    ConfigStore.instance().store(
        group=f"experiment/{OWN_PRESETS}", name=name, node=_relative(preset), package="_global_"
    )
    return f"{PRESET}{OWN_PRESETS}/{name}"


def _relative(preset: DictConfig) -> DictConfig:
    """Makes the presets in its defaults refer to fedloom's own presets."""
    defaults = [
        f"/experiment/{d}@_global_" if isinstance(d, str) and d != "_self_" else d for d in preset.get("defaults", ())
    ]
    if defaults and "_self_" not in defaults:
        defaults.append("_self_")
    preset.defaults = defaults
    return preset


def check_config(config: RunConfig) -> None:
    """Raises ValueError for invalid values and combinations of values."""
    check_settings(config)
    check_name("experiment", config.experiment)
    check_data(config.data)
    if config.executor.resident and config.executor.chunk_size != 1:
        raise ValueError(f"executor.chunk_size={config.executor.chunk_size}: resident clients take chunks of 1")


def _check_added(overrides: Sequence[str]) -> None:
    """Raises ValueError if `+key=value` adds a key outside free mappings, which Hydra itself accepts."""
    added = [override.lstrip("+").partition("=")[0] for override in overrides if override.startswith("+")]
    if not added:
        return
    defaults = _compose(_choices(overrides))
    known = list(_keys(OmegaConf.to_container(defaults)))
    for key in added:
        parent = OmegaConf.select(defaults, key.rpartition(".")[0]) if "." in key else defaults
        free = isinstance(parent, DictConfig) and OmegaConf.get_type(parent) is dict
        if key not in (*known, "experiment", "method") and not free:
            raise ValueError(_unknown(key, known))


def _unknown(key: str, known: list[str]) -> str:
    return f"unknown configuration key {key!r}{nearest(key, known) or '; see fedloom run --help'}"


def _explain(error: Exception, overrides: Sequence[str]) -> str:
    """One line that says what was given and what is allowed."""
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        own = is_import_path(value) or value.endswith((".yaml", ".yml"))
        for choice, kind, there in (("experiment", "preset", experiments()), ("method", "method", [*METHODS])):
            if key == choice and value not in there and not own:
                return f"{key}={value}: no such {kind}{nearest(value, there)}; there are {_some(value, there)}"
    if isinstance(error, OverrideParseException) and "=" in error.override:
        return f"{error.override} cannot be read ({_first_line(error)}): give key=value, a list as [1,2]"
    try:
        known = list(_keys(_defaults(overrides)))
    except (HydraException, OmegaConfBaseException) as clash:
        return _clash(_choices(overrides), _first_line(clash))
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        if "=" not in override:
            return f"{override!r} is not of the form key=value"
        if key not in (*known, "experiment", "method"):
            return _unknown(key, known)
    return _first_line(error)


def _clash(choices: list[str], problem: str) -> str:
    key, together = problem.partition(":")[0], " and ".join(choices)
    method = next((choice.removeprefix(METHOD) for choice in choices if choice.startswith(METHOD)), "")
    fitting = of_method(method)
    if not method or not key.startswith("method."):
        return f"{together} do not go together: {problem}; choose another preset"
    which = f"a preset of {method} ({', '.join(fitting[:MOST_NAMES])})" if fitting else "another preset"
    return f"{together} do not go together: the preset sets {key}, which {method} does not have; choose {which}"


MOST_NAMES = 8


def _some(given: str, names: list[str]) -> str:
    """All names, or the most similar ones if there are more than `MOST_NAMES`."""
    if len(names) <= MOST_NAMES:
        return ", ".join(names)
    like = sorted(get_close_matches(given, names, n=MOST_NAMES, cutoff=0.0))
    return f"{', '.join(like)} and {len(names) - len(like)} more (fedloom run --help lists all)"


def _choices(overrides: Sequence[str]) -> list[str]:
    return [override for override in overrides if override.startswith(("experiment=", "method="))]


def _defaults(overrides: Sequence[str]) -> Any:
    return OmegaConf.to_container(_compose(_choices(overrides)))


def _keys(values: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(values, dict):
        for key, value in values.items():
            yield f"{prefix}{key}"
            yield from _keys(value, f"{prefix}{key}.")


def _first_line(error: BaseException) -> str:
    """The first line of the innermost cause, because Hydra wraps OmegaConf's message."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    key = next((line.removeprefix("full_key:").strip() for line in lines if line.startswith("full_key:")), "")
    return f"{key}: {lines[0]}" if key else lines[0]
