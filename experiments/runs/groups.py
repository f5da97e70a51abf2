"""Groups of configuration keys, such as `space`, and what to say to somebody who gives a group one value."""

from dataclasses import is_dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fedloom.experiments.runs.registries import registry_of
from fedloom.platform.plugins import PluginError, nearest
from fedloom.platform.settings import ComponentName, OneOf, Setting, settings_of
from fedloom.platform.words import shown

CHOOSERS = ("name", "kind", "dataset", "rule", "heuristic")
"""The keys of a group that choose what the group is about."""
MOST_KEYS = 4


def advice(override: str, composed: DictConfig) -> str:
    """What to give instead of `GROUP=value`; empty if the override's key is no group, or the value a mapping."""
    key, _, value = override.lstrip("+").partition("=")
    group = _group(composed, key)
    if group is None or value.startswith("{"):
        return ""
    settings = [*settings_of(group, f"{key}.")]
    chooser = next((s for s in settings if s.key.removeprefix(f"{key}.") in CHOOSERS), None)
    if chooser is None:
        some = ", ".join(setting.key for setting in settings[:MOST_KEYS])
        return f"{shown(override)}: {key} is a group of keys; give one of them, such as {some}"
    problem = _problem(chooser, value)
    given = "NAME" if problem else value
    return f"{shown(override)}: {key} is a group of keys; give {chooser.key}={given}{problem}"


def _group(composed: DictConfig, key: str) -> Any:
    """A group's configuration by its dotted key; None if there is no such group."""
    node = OmegaConf.select(composed, key)
    config = OmegaConf.get_type(node) if isinstance(node, DictConfig) else None
    return config() if isinstance(config, type) and is_dataclass(config) else None


def _problem(chooser: Setting, value: str) -> str:
    """Why the value cannot be chosen; empty if it can."""
    registry = registry_of(chooser.allowed.kind) if isinstance(chooser.allowed, ComponentName) else None
    if registry is not None:
        try:
            registry.find(value)
        except PluginError as error:
            return f": {error}"
    if isinstance(chooser.allowed, OneOf) and not chooser.allowed.holds(value):
        return f": {shown(value)} is not {chooser.allowed}{nearest(value, [*chooser.allowed.names])}"
    return ""
