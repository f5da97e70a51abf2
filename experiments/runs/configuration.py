"""Composes `experiment=NAME key=value ...` to a checked RunConfig with Hydra, which only the driver uses."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedloom.experiments.runs.overrides import ENDINGS, GROUPS, first_line, read, unknown
from fedloom.experiments.runs.own_presets import own_preset
from fedloom.experiments.runs.presets import CONF, DEFAULT_METHOD, PRESET, experiments, method_in, of_method
from fedloom.platform.data.registry import check as check_data
from fedloom.platform.federation.config import AttackConfig, RunConfig
from fedloom.platform.federation.training_config import check_rule_names
from fedloom.platform.methods.registry import METHODS, find_method
from fedloom.platform.plugins import PluginError, is_import_path, nearest
from fedloom.platform.results.checkpoint import check_same_config
from fedloom.platform.results.copies import fetch
from fedloom.platform.results.files import check_name, from_json, read_json
from fedloom.platform.results.manifest import check_files
from fedloom.platform.results.paths import check_names, find_run, read_names
from fedloom.platform.results.tables import read_table
from fedloom.platform.runs.resuming import FREE_ON_RESUME, free_on_resume, placed_here
from fedloom.platform.runs.source_code import check_code_places, texts_of
from fedloom.platform.settings import PATH, UnknownKeyError, check_settings, is_path, settings_of, validated
from fedloom.platform.words import shown

logger = logging.getLogger(__name__)

MOST_NAMES = 8


def compose_config(overrides: Sequence[str]) -> RunConfig:
    """Composes the configuration of a run.

    Hydra composes the chosen preset and method, once for all configurations that choose the same. The other overrides
    then change single values.

    Raises ValueError with one line for a key or value that is unknown or out of range.
    """
    parsed = [read(override) for override in overrides]
    choices = {override.key: str(override.value) for override in parsed if override.key in GROUPS}
    for key, value in choices.items():
        _check_choice(key, value)
    chosen = _composed(tuple(f"{key}={value}" for key, value in choices.items()), _sources_of(choices))
    values = deepcopy(chosen)
    for key in _optional_groups(find_method(chosen["method"]["name"]).config):
        if any(override.key.startswith(f"{key}.") for override in parsed):
            _put(values, key, {})  # in place of null
    for override in parsed:
        if override.key == "method.name":
            raise ValueError(f"{override.text}: a method is chosen by method=NAME, which brings its own keys")
        if override.key not in GROUPS:
            _put(values, override.key, deepcopy(override.value))
    try:
        return _checked(_resolved(values))
    except UnknownKeyError as error:
        _blame_choices(choices, chosen, error)
        key = next((o.key for o in parsed if f"{o.key}.".startswith(f"{error.key}.")), error.key)
        raise ValueError(unknown(key, {*_keys(chosen), *GROUPS, *error.known})) from error
    except ValueError as error:
        _blame_choices(choices, chosen, error)
        raise


def config_from_dict(values: Mapping[str, Any]) -> RunConfig:
    """Restores the configuration that a run stored in `config.json`; ValueError if it does not fit this version."""
    check_resolved(values)
    try:
        find_method(str(values["method"]["name"]))
    except (KeyError, TypeError) as error:
        raise ValueError("the run's stored configuration names no method: restore it from a copy") from error
    except PluginError as error:
        raise ValueError(f"the run's method cannot be used: {error}") from error
    try:
        return _config(_completed(values))
    except ValueError as error:
        raise ValueError(f"the run's stored configuration does not fit this version: {error}") from error


def _completed(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The stored configuration, completed with the former behaviour of newer keys where defaults differ from it."""
    data, method, objective = values["data"], values["method"], values["objective"]
    if "balanced_classes" not in data and data["dataset"] == "speech_commands":
        values = {**values, "data": {**data, "options": {"features": "slaney", "silence": None, **data["options"]}}}
    if "balanced_classes" not in data and objective["name"] == "masked_classes":
        values = {**values, "objective": {**objective, "options": {"in_mean": False, **objective["options"]}}}
    if "searcher" in method.get("search", ()):
        search = {"objectives": "metric_and_cost", "statistics": "averaged", **method["search"]}
        values = {**values, "method": {**method, "search": search}}
    return values


def check_resolved(values: Any) -> None:
    """Raises ValueError for text that OmegaConf would resolve, such as ${oc.env:NAME}: stored values never are."""
    if text := next((text for text in texts_of(values) if "${" in text), ""):
        raise ValueError(f"{shown(text, repr)} cannot be stored: stored values are not resolved; give the value itself")


def stored_config(results: str | Path, run_id: str, overrides: Sequence[str] = ()) -> tuple[str, RunConfig]:
    """A run's full id and its stored configuration, with `results` as given; downloads a run at a URL first.

    Addresses and folders are replaced by this machine's (see `placed_here`); a warning names those of the run that
    `overrides` do not set again.

    `run_id` is an id, its beginning, or a name or tag of exactly one run.

    Raises ValueError for an unknown run and for a configuration that is unreadable or differs from the recorded one.
    """
    root = fetch(results, [run_id])
    paths = find_run(root, run_id)
    check_files(paths)
    try:
        values = read_json(paths.config)
    except (OSError, ValueError) as error:
        raise ValueError(f"{paths.config} cannot be read: restore it from a copy, or start a new run") from error
    # The checkpoint belongs to the configuration that is recorded in the table `runs`.
    recorded = read_table(root, "runs", run_id=paths.run_id)["config"]
    if len(recorded) and recorded.notna().all():
        check_same_config(from_json(recorded.iloc[-1], f"the configuration of run {paths.run_id}"), values)
    check_code_places([values], root)
    config = config_from_dict(placed_here(values))
    tell_left_out(f"run {paths.run_id}", values, overrides)
    config.results = str(results)
    names = read_names(paths.artifacts)  # may have changed since the run started
    config.name, config.tags = names.name, list(names.tags)
    return paths.run_id, config


def tell_left_out(what: str, stored: Mapping[str, Any], overrides: Sequence[str] = ()) -> None:
    """Warns of stored addresses and folders that are not used here, unless an override sets them again."""
    if not all(isinstance(stored.get(section), Mapping) for section in ("data", "ray")):
        return
    given_keys = {override.lstrip("+").partition("=")[0] for override in overrides}
    here = placed_here(stored)
    settings = [(f"data.{name}", stored["data"].get(name), here["data"][name]) for name in ("root", "cache")]
    settings.append(("ray.address", stored["ray"].get("address"), here["ray"]["address"]))
    left = [f"{key}={shown(then)}" for key, then, now in settings if then not in (None, now) and key not in given_keys]
    if left:
        again = "to use it, give it again (resume: the key; other commands: FEDLOOM_DATA and FEDLOOM_CACHE)"
        logger.warning("%s was made with %s, not used here: %s", what, " ".join(left), again)


def tell_of_attack(config: RunConfig, overrides: Sequence[str]) -> None:
    """Warns if an override names the default attack without attackers, which the configuration alone does not show."""
    if config.attack.share or config.attack.name != AttackConfig().name:  # the check of all keys warns of others
        return
    keys = {read(override).key for override in overrides}
    if "attack.name" in keys and "attack.share" not in keys:  # a whole configuration has both
        logger.warning("attack.name=%s has no effect with attack.share=0.0: it is for attackers", config.attack.name)


def change_stored(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Applies overrides that do not change results to a stored configuration; ValueError for any other override."""
    values = asdict(config)
    known = [*_keys(values), *GROUPS]
    for override in map(read, overrides):
        if override.key not in known and not override.key.startswith("ablation."):
            raise ValueError(unknown(override.key, known))
        if not free_on_resume(override.key):
            raise ValueError(
                f"{override.key} cannot change on resume, it would be another run: start one with `fedloom run`, "
                f"or change only {', '.join(FREE_ON_RESUME)}"
            )
        _put(values, override.key, deepcopy(override.value))
    try:
        return _checked(_resolved(values))
    except UnknownKeyError as error:
        raise ValueError(unknown(error.key, known)) from error


def _config(values: Mapping[str, Any]) -> RunConfig:
    """The configuration with these values; ValueError for a value that is not allowed."""
    method: Any = validated(find_method(values["method"]["name"]).config, values["method"], "method.")
    return replace(validated(RunConfig, {**values, "method": None}), method=method)


def _checked(values: Mapping[str, Any]) -> RunConfig:
    """The configuration with these values, after checks of their combinations; ValueError if one fails."""
    config = _config(values)
    if is_import_path(config.method.name):  # fedloom's own have nothing else
        try:
            json.dumps(asdict(config.method))  # as the run's files will
        except TypeError as error:
            raise _unfit_config(config.method.name, error) from error
    check_resolved(values)
    check_name("experiment", config.experiment)
    check_names(config.name, config.tags)
    check_data(config.data)
    check_rule_names(config.method, "method")
    if config.executor.resident and config.executor.chunk_size != 1:
        raise ValueError(f"executor.chunk_size={config.executor.chunk_size}: resident clients take chunks of 1")
    if config.executor.resident and config.executor.stack_clients not in ("auto", "off", "1"):
        raise ValueError(f"executor.stack_clients={config.executor.stack_clients}: resident clients are trained alone")
    return config


# -- presets and methods -----------------------------------------------------------------------------------------------


def _check_choice(key: str, value: str) -> None:
    """Raises ValueError for a preset or a method that does not exist; the user's own are looked up later."""
    kind, names = ("preset", experiments()) if key == "experiment" else ("method", [*METHODS])
    is_own = value.endswith(ENDINGS) if key == "experiment" else is_import_path(value)
    if is_own and key == "experiment" and not is_path(value):
        raise ValueError(f"{key}={shown(value)}: must be {PATH.meaning}")
    if value in names or is_own:
        return
    known = names if len(names) <= MOST_NAMES else sorted(names, key=lambda name: not nearest(value, [name], 0.0))
    where = "fedloom run --help" if key == "experiment" else "fedloom plugins method"
    more = f" and {len(names) - MOST_NAMES} more ({where} lists all)" if len(names) > MOST_NAMES else ""
    listed = f"{', '.join(known[:MOST_NAMES])}{more}"
    raise ValueError(f"{key}={shown(value)}: no such {kind}{nearest(value, names)}; there are {listed}")


def _sources_of(choices: Mapping[str, str]) -> tuple[Any, ...]:
    """The present content of the user's own preset and method, as a cache key: files change, modules are reloaded."""
    preset, method = Path(choices.get("experiment", "")), choices.get("method", "")
    text = preset.read_bytes() if preset.suffix in ENDINGS and preset.is_file() else b""
    return text, find_method(method).config if is_import_path(method) else None


@lru_cache(maxsize=256)  # more than there are presets
def _composed(choices: tuple[str, ...], _sources: tuple[Any, ...]) -> dict[str, Any]:
    """The values of a preset and a method, as Hydra composes them from the defaults of the configuration's classes."""
    own_presets = {
        choice: own_preset(choice) for choice in choices if choice.startswith(PRESET) and choice.endswith(ENDINGS)
    }
    chosen = [own_presets[choice].choice if choice in own_presets else choice for choice in choices]
    methods = [choice.removeprefix("method=") for choice in choices if choice.startswith("method=")]
    methods += [method_in(choice.removeprefix(PRESET)) for choice in choices if choice.startswith(PRESET)]
    store = ConfigStore.instance()
    store.repo.pop("method", None)  # of earlier choices: Hydra copies whatever is stored
    store.store(name="run_schema", node=asdict(RunConfig()))
    # Only the chosen methods are registered, so that the modules of the others are not imported.
    registered = {DEFAULT_METHOD, *methods, *(name for preset in own_presets.values() for name in preset.methods)}
    for name in registered:
        config = find_method(name).config(name=name)
        try:
            check_settings(config, "method.")
            store.store(group="method", name=name, node=asdict(config))
        except (OmegaConfBaseException, NameError, TypeError) as error:
            raise _unfit_config(name, error) from error
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=str(CONF), version_base=None):
            tree = compose(config_name="config", overrides=chosen)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(f"{' '.join(choices)}: {first_line(error)}") from error
    values: dict[str, Any] = OmegaConf.to_container(tree)  # type: ignore[assignment]
    if (name := values["method"]["name"]) not in registered:
        raise ValueError(
            f"{' '.join(choices)}: method.name={name}: a method is chosen by method={name}, which brings its own keys"
        )
    return values


@lru_cache
def _optional_groups(config: Callable[[], Any]) -> list[str]:
    """The keys of a method that are null or a group of keys of their own."""
    return [setting.key for setting in settings_of(config(), "method.") if setting.is_group]


def _unfit_config(method: str, error: Exception) -> PluginError:
    return PluginError(
        f"method {method!r}: its config cannot be composed: {first_line(error)}; give fields of numbers, texts, "
        "true or false, lists and dictionaries of these, or dataclasses of such fields"
    )


def _blame_choices(choices: Mapping[str, str], chosen: Mapping[str, Any], error: ValueError) -> None:
    """Raises ValueError if the error comes from the preset itself, or from a method that does not fit the preset."""
    try:
        _config(_resolved(chosen))
        return
    except ValueError as of_choices:
        if str(of_choices) != str(error):
            return
    preset, method = choices.get("experiment", ""), choices.get("method", "")
    if preset.endswith(ENDINGS) and "method" not in choices:
        raise ValueError(f"{PRESET}{preset}: {error}") from error
    fitting = of_method(method)
    others = f"a preset of {method} ({', '.join(fitting[:MOST_NAMES])})" if fitting else "another preset"
    cause = (
        f"the preset sets {error.key}, which {method} does not have" if isinstance(error, UnknownKeyError) else error
    )
    raise ValueError(f"{PRESET}{preset} and method={method} do not go together: {cause}; choose {others}") from error


# -- values ------------------------------------------------------------------------------------------------------------


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    """Sets the value of a dotted key in nested mappings; a mapping is merged with what is there, as Hydra does."""
    owner: Any = values
    *sections, last = key.split(".")

    def place(entries: list[Any], section: str) -> int:
        if not section.isdecimal() or int(section) >= len(entries):
            raise ValueError(f"{key}: the list has {len(entries)} entries, from 0: give one of them, or the whole list")
        return int(section)

    for section in sections:
        owner = owner[place(owner, section)] if isinstance(owner, list) else owner.setdefault(section, {})
        if not isinstance(owner, dict | list):
            raise ValueError(unknown(key, [*_keys(values), *GROUPS]))
    if isinstance(owner, list):
        owner[place(owner, last)] = value
    elif isinstance(value, dict) and isinstance(owner.get(last), dict):
        for name, inner in value.items():
            _put(owner[last], str(name), inner)
    else:
        owner[last] = value


def _resolved(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values with interpolations such as ${seed} resolved."""
    if not any("${" in text for text in texts_of(values)):
        return values
    try:
        return OmegaConf.to_container(OmegaConf.create(dict(values)), resolve=True)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise ValueError(first_line(error)) from error


def _keys(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _keys(value, f"{prefix}{key}.")
