"""From `experiment=NAME key=value ...` to a checked RunConfig: composed by Hydra, in the driver alone."""

import json
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedloom.experiments.runs.presets import CONF, experiments
from fedloom.platform.data.config import check as check_data
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.methods.registry import CONFIGS
from fedloom.platform.plugins import nearest
from fedloom.platform.results.checkpoint import check_same_config
from fedloom.platform.results.paths import find_run
from fedloom.platform.results.remote import fetch
from fedloom.platform.results.tables import read_table
from fedloom.platform.runs.run import FREE_ON_RESUME, free_on_resume


def compose_config(overrides: Sequence[str]) -> RunConfig:
    """The configuration of a run; ValueError in one line for whatever is unknown or out of range."""
    try:
        composed = _compose(overrides)
        _check_added(overrides)
        config = cast(RunConfig, OmegaConf.to_object(composed))
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_explain(error, overrides)) from error
    check_config(config)
    return config


def config_from_dict(values: Mapping[str, Any]) -> RunConfig:
    """The configuration that a run stored (its `config.json`)."""
    method = values["method"]["name"]
    if method not in CONFIGS:
        raise ValueError(f"the run's method {method!r} is unknown: known are {', '.join(CONFIGS)}")
    schema = OmegaConf.structured(RunConfig)
    schema.method = OmegaConf.structured(CONFIGS[method])
    try:
        return cast(RunConfig, OmegaConf.to_object(OmegaConf.merge(schema, dict(values))))
    except OmegaConfBaseException as error:
        raise ValueError(f"the run's stored configuration does not fit this version: {_first_line(error)}") from error


def stored_config(results: str | Path, run_id: str) -> tuple[str, RunConfig]:
    """A run's full id and its configuration, with the results folder where it is now; one at a URL is brought here."""
    root = fetch(results, [run_id])
    paths = find_run(root, run_id)
    try:
        values = json.loads(paths.config.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{paths.config} cannot be read: restore it from a copy, or start a new run") from error
    # The checkpoint was made with the configuration that the table `runs` recorded.
    recorded = read_table(root, "runs", run_id=paths.run_id)["config"]
    if len(recorded) and recorded.notna().all():
        check_same_config(json.loads(recorded.iloc[-1]), values)
    config = config_from_dict(values)
    config.results = str(results)
    return paths.run_id, config


def change_stored(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """A stored configuration with overrides that do not change what is computed; ValueError for any other."""
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
    store = ConfigStore.instance()
    store.store(name="run_schema", node=RunConfig)
    for name, method in CONFIGS.items():
        store.store(group="method", name=name, node=method)
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=str(CONF), version_base=None):
        return compose(config_name="config", overrides=list(overrides))


def check_config(config: RunConfig) -> None:
    """Raises ValueError for values that no run can have."""
    check_data(config.data)
    allowed = {
        "executor.kind": (config.executor.kind, ("ray", "serial")),
        "executor.failures.policy": (config.executor.failures.policy, ("stop", "retry", "tolerate")),
    }
    for key, (value, names) in allowed.items():
        if value not in names:
            raise ValueError(f"{key}={value}: must be one of {', '.join(names)}")
    least = {
        "executor.chunk_size": config.executor.chunk_size,
        "executor.threads": config.executor.threads,
        "checkpoint.every": config.checkpoint.every,
        "executor.failures.attempts": config.executor.failures.attempts,
        "executor.failures.actor_attempts": config.executor.failures.actor_attempts,
        "tiers.count": config.tiers.count,
        "tiers.paths": config.tiers.paths,
    }
    for key, number in least.items():
        if number < 1:
            raise ValueError(f"{key}={number}: must be at least 1")
    if not config.executor.client_timeout_s > 0:
        raise ValueError(f"executor.client_timeout_s={config.executor.client_timeout_s}: must be greater than 0")
    if not 0 <= config.executor.failures.max_share <= 1:
        raise ValueError(f"executor.failures.max_share={config.executor.failures.max_share}: must be between 0 and 1")
    if config.executor.resident and config.executor.chunk_size != 1:
        raise ValueError(f"executor.chunk_size={config.executor.chunk_size}: resident clients take chunks of 1")


def _check_added(overrides: Sequence[str]) -> None:
    """Hydra's `+key=value` adds a key even where the schema has none: only free mappings take new ones."""
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
    """One line: what was given and what is allowed."""
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        for choice, kind, there in (("experiment", "preset", experiments()), ("method", "method", [*CONFIGS])):
            if key == choice and value not in there:
                return f"{key}={value}: no such {kind}{nearest(value, there)}; there are {_some(value, there)}"
    if isinstance(error, OverrideParseException) and "=" in error.override:
        return f"{error.override} cannot be read ({_first_line(error)}): give key=value, a list as [1,2]"
    try:
        known = list(_keys(_defaults(overrides)))
    except (HydraException, OmegaConfBaseException) as clash:
        key = _first_line(clash).partition(":")[0]
        return f"{' and '.join(_choices(overrides))} do not go together, the preset sets {key}: choose another preset"
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        if "=" not in override:
            return f"{override!r} is not of the form key=value"
        if key not in (*known, "experiment", "method"):
            return _unknown(key, known)
    return _first_line(error)


MOST_NAMES = 8


def _some(given: str, names: list[str]) -> str:
    """All names, or those like the given one where a line cannot hold them all."""
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
    """The innermost cause in one line: Hydra wraps OmegaConf's own sentence."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    key = next((line.removeprefix("full_key:").strip() for line in lines if line.startswith("full_key:")), "")
    return f"{key}: {lines[0]}" if key else lines[0]
