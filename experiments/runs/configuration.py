"""Composes `experiment=NAME key=value ...` to a checked RunConfig with Hydra, which only the driver uses."""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedloom.experiments.runs.older import completed
from fedloom.experiments.runs.own_presets import is_own, own_preset
from fedloom.experiments.runs.presets import CONF, DEFAULT_METHOD, PRESET, method_in, of_method
from fedloom.experiments.runs.restored import restored_run
from fedloom.experiments.runs.spelling import (
    METHOD,
    MOST_NAMES,
    check_spelling,
    free_part,
    unknown,
    unquoted,
)
from fedloom.platform.data.sources import check as check_data
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.training_config import check_rule_names
from fedloom.platform.methods.registry import METHODS, find_method
from fedloom.platform.plugins import PluginError, is_import_path
from fedloom.platform.results.checkpoint import check_same_config
from fedloom.platform.results.copies import fetch
from fedloom.platform.results.files import check_name, from_json, read_json
from fedloom.platform.results.manifest import check_files
from fedloom.platform.results.paths import check_names, find_run, read_names
from fedloom.platform.results.store import without_secrets
from fedloom.platform.results.tables import read_table
from fedloom.platform.runs.run import FREE_ON_RESUME, free_on_resume, placed_here
from fedloom.platform.runs.sources import check_code_places, texts_of
from fedloom.platform.settings import check_settings
from fedloom.platform.words import MOST_SAID, said, shown

logger = logging.getLogger(__name__)

NO_LIST = "is not a ListConfig"
"""What OmegaConf says of a single value where a list belongs."""
_LONG_NUMBER = re.compile(r"\d{400}")


def compose_config(overrides: Sequence[str]) -> RunConfig:
    """Composes the configuration of a run.

    Raises ValueError with one line for a key or value that is unknown or out of range.
    """
    overrides = [unquoted(override) for override in overrides]
    for override in overrides:
        _check_form(override)
    check_spelling(overrides)
    try:
        config = cast(RunConfig, OmegaConf.to_object(composed_tree(overrides)))
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_explain(error, overrides)) from error
    except (OverflowError, RecursionError) as error:
        longest = max(overrides, key=len)
        raise ValueError(f"{shown(longest)}: the value is too large or nested too deeply ({said(error)})") from error
    check_config(config)
    return config


def composed_tree(overrides: Sequence[str]) -> DictConfig:
    """Hydra's composition of the overrides, without the checks of `check_config`.

    Raises the errors of Hydra and OmegaConf, and ValueError for a new key outside the mappings that take any.
    """
    overrides = [unquoted(override) for override in overrides]
    composed = _compose(overrides)
    _check_added(overrides)
    return composed


def config_from_dict(values: Mapping[str, Any]) -> RunConfig:
    """Restores the configuration that a run stored in `config.json`; ValueError if it does not fit this version."""
    check_resolved(values)
    try:
        method = find_method(str(values["method"]["name"]))
    except (KeyError, TypeError) as error:
        raise ValueError("the run's stored configuration names no method: restore it from a copy") from error
    except PluginError as error:
        raise ValueError(f"the run's method cannot be used: {error}") from error
    values = completed(values)
    known = restored_run(values, method.config)
    if known is not None:
        return known
    schema = OmegaConf.structured(RunConfig)
    schema.method = OmegaConf.structured(method.config)
    try:
        return cast(RunConfig, OmegaConf.to_object(OmegaConf.merge(schema, dict(values))))
    except (OmegaConfBaseException, OverflowError, RecursionError) as error:
        raise ValueError(f"the run's stored configuration does not fit this version: {_first_line(error)}") from error


def check_resolved(values: Any) -> None:
    """Raises ValueError for a text that OmegaConf would resolve, such as ${oc.env:NAME}: stored values never are."""
    if text := next((text for text in texts_of(values) if "${" in text), ""):
        raise ValueError(f"{shown(text, repr)} is no value that can be stored: what is stored is never resolved")


def stored_config(results: str | Path, run_id: str, overrides: Sequence[str] = ()) -> tuple[str, RunConfig]:
    """A run's full id and its stored configuration, with `results` as given; downloads a run at a URL first.

    Its addresses and folders are this machine's (see `placed_here`); those of the run that `overrides` do not give
    again are named in a warning.

    `run_id` is an id, its beginning, a name or a tag of one run.

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
    """Warns of stored addresses and folders that are not used, and that no override gives again."""
    if not all(isinstance(stored.get(section), Mapping) for section in ("data", "ray")):
        return
    given = {override.lstrip("+").partition("=")[0] for override in overrides}
    here = placed_here(stored)
    places = [(f"data.{name}", stored["data"].get(name), here["data"][name]) for name in ("root", "cache")]
    places.append(("ray.address", stored["ray"].get("address"), here["ray"]["address"]))
    left = [f"{key}={shown(then)}" for key, then, now in places if then not in (None, now) and key not in given]
    if left:
        again = "give it again: resume takes the key, other commands FEDLOOM_DATA and FEDLOOM_CACHE"
        logger.warning("%s was made with %s: if you want that here, %s", what, " ".join(left), again)


def change_stored(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Applies overrides that do not change results to a stored configuration; ValueError for any other override.

    They are read as those of a new run are, by Hydra's grammar.
    """
    for override in overrides:
        _check_form(override)
    chosen = [override for override in overrides if not override.lstrip("+").startswith((PRESET, METHOD, "ablation."))]
    check_spelling([f"{METHOD}{config.method.name}", *chosen])
    for override in overrides:
        key = override.partition("=")[0]
        if not free_on_resume(key):
            raise ValueError(
                f"{key} cannot change on resume, it would be another run: start one with `fedloom run`, "
                f"or change only {', '.join(FREE_ON_RESUME)}"
            )
    tree = OmegaConf.structured(config)
    try:
        for read in OverridesParser.create().parse_overrides(list(overrides)):
            if read.is_sweep_override():
                raise ValueError(f"{shown(str(read.input_line))}: give one value; a list is [1,2]")
            OmegaConf.update(tree, read.key_or_group, read.value(), merge=True)
        changed = cast(RunConfig, OmegaConf.to_object(tree))
    except OverrideParseException as error:
        raise ValueError(_unread(error)) from error
    except (HydraException, OmegaConfBaseException, OverflowError, RecursionError) as error:
        raise ValueError(_first_line(error)) from error
    check_config(changed)
    return changed


def _unread(error: OverrideParseException) -> str:
    """That Hydra cannot read an override, and the forms that it reads."""
    if "://" in error.override:  # without what the parser says, which quotes parts of it
        unread = shown(without_secrets(error.override.lstrip("+")))
        return f"{unread} cannot be read: put the URL in quotes, as in results='\"s3://bucket/path?region=eu\"'"
    given = shown(error.override.lstrip("+"))
    return f"{given} cannot be read ({_first_line(error)}): give key=value, a list as [1,2]"


def _compose(overrides: Sequence[str]) -> DictConfig:
    _register_schema()
    own = {o: own_preset(o) for o in overrides if is_own(o)}
    ready = [own[o].choice if o in own else o for o in overrides]
    # Only the named methods are registered, so that the modules of the others are not imported.
    methods = [o.removeprefix(METHOD) for o in ready if o.startswith(METHOD)]
    methods += [method_in(o.removeprefix(PRESET)) for o in ready if o.startswith(PRESET)]
    for name in (DEFAULT_METHOD, *methods, *(name for preset in own.values() for name in preset.methods)):
        _register_method(name)
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=str(CONF), version_base=None):
        return compose(config_name="config", overrides=[_addable(override) for override in ready])


def _check_form(override: str) -> None:
    """Raises ValueError for what Hydra takes as instructions to itself, or refuses without naming the key."""
    key, equals, value = override.partition("=")
    if not equals or not key.lstrip("+") or key.startswith("~"):
        raise ValueError(f"{shown(override, repr)} is not of the form key=value")
    if key.lstrip("+").partition(".")[0] == "hydra":
        raise ValueError(unknown(key, []))
    if _LONG_NUMBER.search(value):
        raise ValueError(f"{shown(override)}: a number of too many digits")


def _addable(override: str) -> str:
    """Marks an override of a free mapping, such as the options of a plug-in, with Hydra's `++` for new keys."""
    free = free_part(override.partition("=")[0])
    return f"++{override}" if free and "=" in override and not override.startswith(("+", "~")) else override


@cache
def _register_schema() -> None:
    ConfigStore.instance().store(name="run_schema", node=RunConfig)


def _register_method(name: str) -> None:
    """Registers a method with Hydra, by its name or by the import path of a user's own method."""
    if name in METHODS:
        _store_shipped(name)
    elif is_import_path(name):  # a module of the user's own may be loaded anew, in a notebook
        _store_method(name, find_method(name).config)


@cache
def _store_shipped(name: str) -> None:
    """Once: every composition names two methods, the default and its own, each a quarter of the time to register."""
    _store_method(name, find_method(name).config)


def _store_method(name: str, config_class: type) -> None:
    config = config_class(name=name)
    try:
        ConfigStore.instance().store(group="method", name=name, node=config)
    except (OmegaConfBaseException, NameError, TypeError) as error:
        raise PluginError(
            f"method {name!r}: its config cannot be composed: {_first_line(error)}; give fields of numbers, texts, "
            "true or false, lists and dictionaries of these, or dataclasses of such fields"
        ) from error


def check_config(config: RunConfig) -> None:
    """Raises ValueError for invalid values and combinations of values."""
    check_settings(config)
    check_resolved(asdict(config))
    name = config.method.name
    known = name in METHODS or is_import_path(name)
    if not known or not isinstance(config.method, find_method(name).config):
        choice = name if known else "NAME"
        raise ValueError(f"method.name={name}: a method is chosen by method={choice}, which brings its own keys")
    check_name("experiment", config.experiment)
    check_names(config.name, config.tags)
    check_data(config.data)
    check_rule_names(config.method, "method")
    if config.executor.resident and config.executor.chunk_size != 1:
        raise ValueError(f"executor.chunk_size={config.executor.chunk_size}: resident clients take chunks of 1")
    if config.executor.resident and config.executor.stack_clients not in ("auto", "off", "1"):
        raise ValueError(f"executor.stack_clients={config.executor.stack_clients}: resident clients are trained alone")


def _check_added(overrides: Sequence[str]) -> None:
    """Raises ValueError if `+key=value` adds a key outside free mappings, which Hydra itself accepts."""
    keys = [(override.startswith("+"), override.lstrip("+").partition("=")[0]) for override in overrides]
    added = [key for plus, key in keys if plus or free_part(key)]
    if not added:
        return
    defaults = defaults_tree(overrides)
    known = list(_keys(OmegaConf.to_container(defaults)))
    for key in added:
        if key not in (*known, "experiment", "method") and not takes_any(defaults, key):
            raise ValueError(unknown(free_part(key) or key, known))


def takes_any(defaults: DictConfig, key: str) -> bool:
    """Whether a key lies in a mapping of the configuration that takes keys of the user's own."""
    inside = free_part(key)
    return bool(inside) and OmegaConf.get_type(OmegaConf.select(defaults, inside)) is dict


def _explain(error: Exception, overrides: Sequence[str]) -> str:
    """One line that says what was given and what is allowed."""
    if isinstance(error, OverrideParseException) and "=" in error.override:
        return _unread(error)
    for override in filter(is_own, overrides):
        if problem := _problem_of(override):
            return f"{shown(override)}: {problem}"
    try:
        defaults = defaults_tree(overrides)
    except (HydraException, OmegaConfBaseException) as clash:
        return _clash(_choices(overrides), _first_line(clash))
    known = list(_keys(OmegaConf.to_container(defaults)))
    for override in overrides:
        key = override.lstrip("+").partition("=")[0]
        inside = free_part(key) or key
        if inside not in (*known, "experiment", "method"):
            return unknown(inside, known)
        if f"{key}=" not in (PRESET, METHOD) and (problem := _given_a_group(override, defaults)):
            return problem
    return _first_line(error)


def _given_a_group(override: str, defaults: DictConfig) -> str:
    # Only mistakes need this, and the import is slow.
    from fedloom.experiments.runs.groups import advice

    return advice(override, defaults)


def _problem_of(override: str) -> str:
    """What is wrong with a preset of a user's own by itself; empty if nothing is."""
    try:
        OmegaConf.to_object(_compose([override]))
    except (HydraException, OmegaConfBaseException) as error:
        line = _first_line(error)
        key, _, problem = line.partition(": ")
        known = list(_keys(OmegaConf.to_container(_compose([own_preset(override).beginning]))))
        is_new = problem.startswith("Key ") and key not in known and not free_part(key)
        return unknown(key, known) if is_new else line
    return ""


def _clash(choices: list[str], problem: str) -> str:
    key, together = problem.partition(":")[0], " and ".join(choices)
    method = next((choice.removeprefix(METHOD) for choice in choices if choice.startswith(METHOD)), "")
    fitting = of_method(method)
    if not method or not key.startswith("method."):
        return f"{together} do not go together: {problem}; choose another preset"
    which = f"a preset of {method} ({', '.join(fitting[:MOST_NAMES])})" if fitting else "another preset"
    return f"{together} do not go together: the preset sets {key}, which {method} does not have; choose {which}"


def _choices(overrides: Sequence[str]) -> list[str]:
    return [override for override in overrides if override.startswith(("experiment=", "method="))]


def defaults_tree(overrides: Sequence[str]) -> DictConfig:
    """What Hydra composes from the preset and the method among the overrides, without their other values."""
    return _compose([unquoted(choice) for choice in _choices(overrides)])


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
    # Hydra says where it was composing first.
    lines = lines[1:] if len(lines) > 1 and lines[0].endswith("raised while composing config:") else lines
    key = next((line.removeprefix("full_key:").strip() for line in lines if line.startswith("full_key:")), "")
    line = "must be a list, such as [a,b]" if NO_LIST in lines[0] else shown(lines[0], most=MOST_SAID)
    return f"{key}: {line}" if key else line
